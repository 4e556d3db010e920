"""This plugin's FSDP engine in verl's own worker: lag metrics for one and two data-parallel ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "engine_step.py"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("engine") / "model"


@pytest.mark.parametrize("world_size", [1, 2])
def test_lag_is_the_same_for_any_number_of_ranks(model_dir, world_size):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(model_dir), str(world_size)],
        env={**os.environ, "VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_PLUGINS": "verl_sat"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["engine"] == "verl_sat.engine.fsdp.SATFSDPEngine"

    first, second, third = result["metrics"]
    # One value per rank, all equal: verl averages them over ranks.
    assert all(len(set(values)) == 1 and len(values) == world_size for m in result["metrics"] for values in m.values())

    def value(metrics, name):
        return metrics[f"actor/staleness/{name}"][0]

    # Version 0, all of version 0 (row 7 is padding in every batch).
    assert (value(first, "versions"), value(first, "updates"), value(first, "unknown_frac")) == (0, 0, 0)
    # Version 1: rows 0, 1 of version 0; rows 2, 3, 5, 6 of version 1; row 4 without a tag.
    assert value(second, "versions") == pytest.approx(2 / 6)
    assert value(second, "unknown_frac") == pytest.approx(1 / 7)
    # Version 2, one update per version: row 0 is 2 versions old, rows 1 to 6 are fresh.
    assert value(third, "versions") == value(third, "updates") == pytest.approx(2 / 7)
    assert value(third, "versions_oldest") == 2
