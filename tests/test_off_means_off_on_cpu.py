"""Installed and not configured, the plugin changes nothing: one step of verl's own actor worker, bit for bit.

Three processes start from the same weights and the same batch and run verl's `TrainingWorker` with its FSDP2 engine and
its `ppo_loss` on a configuration composed from its YAML: without plugins, with them, and with them and one flag of
ours. The third shows that the comparison can fail.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "plain_actor_step.py"
COMPARED = ("loss", "gradients", "weights", "metrics", "metric_keys")


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    model = tmp_path_factory.mktemp("model")

    def run(policy, *overrides):
        variables = {key: value for key, value in os.environ.items() if not key.startswith("VERL_")}
        variables |= {"VERL_USE_EXTERNAL_PLUGINS": policy, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(model), *overrides],
            capture_output=True,
            text=True,
            timeout=240,
            env=variables,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert done.returncode == 0 and lines, done.stderr[-3000:]
        return json.loads(lines[-1].removeprefix("RESULT "))

    return run


def test_a_plain_job_is_the_same_to_the_bit_with_the_plugin_installed(step):
    without = step("none")  # first: it writes the model
    with ThreadPoolExecutor(2) as pool:
        with_plugin = pool.submit(step, "auto")
        switched_on = pool.submit(step, "auto", "actor_rollout_ref.actor.policy_loss.loss_mode=sat_grpo")
    with_plugin, switched_on = with_plugin.result(), switched_on.result()
    assert without["ours"] == []
    assert "verl_sat.plugin" in with_plugin["ours"]  # or nothing was compared
    assert len(without["gradients"]) == 1 and "actor/pg_clipfrac" in without["metric_keys"]
    assert {key: with_plugin[key] for key in COMPARED} == {key: without[key] for key in COMPARED}

    assert "actor/sat/quantile" in switched_on["metric_keys"]
    for key in COMPARED:
        assert switched_on[key] != without[key], key
