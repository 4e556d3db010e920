"""How verl finds the plugin, what it registers, and what happens when it cannot.

Every way of loading runs in a process of its own, because `import verl` happens once per process. What a failure does
to a process is tested in this one, by loading the plugin again. With real Ray: the entry point in a worker that no
environment variable reaches, and the wrapped `update_weights` behind verl's worker group.
"""

import importlib
import inspect
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import PolicyLossConfig

from verl_sat import _compat, plugin

SCRIPTS = Path(__file__).parent / "scripts"
OURS = ("sat_grpo", "sat_gspo")

# Reports what `import verl` left behind. The registry is asked only if the import brought it.
REPORT = """
import json, logging, sys
import verl
modules = sorted(sys.modules)
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as registry
losses = {name: f"{f.__module__}.{f.__qualname__}" for name, f in registry.items()}
print("RESULT " + json.dumps({"modules": modules, "losses": losses}))
"""
FAILING = """
import sys
sys.modules["verl_sat.policy_loss"] = None  # an import error inside the plugin
import logging
logging.disable(logging.CRITICAL)  # the message must not depend on how a process logs
"""
PLAIN = "import verl.trainer.ppo.core_algos\n"  # what the plugin may cost at most, without it

SCENARIOS = {
    "plain": ({"VERL_USE_EXTERNAL_PLUGINS": "none"}, PLAIN + REPORT),
    "entry point": ({}, REPORT),
    "module": ({"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "verl_sat.plugin"}, REPORT),
    "both": ({"VERL_USE_EXTERNAL_MODULES": "verl_sat.plugin"}, REPORT),
    "by hand": ({"VERL_USE_EXTERNAL_PLUGINS": "none"}, "import verl_sat.plugin\n" + REPORT),
    "failing": ({}, FAILING + REPORT),
    # the one dependency that verl does not bring: `pip install --no-deps`
    "no wrapt": ({}, 'import sys\nsys.modules["wrapt"] = None\n' + REPORT),
}


def run(arguments, environment, timeout=240):
    variables = {k: v for k, v in os.environ.items() if not k.startswith("VERL_")}
    variables |= {"OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, env=variables)


def result_of(done):
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


@pytest.fixture(scope="module")
def loaded():
    """What each scenario left behind, two processes at a time."""
    results, slots = {}, threading.Semaphore(2)

    def work(name):
        with slots:
            environment, code = SCENARIOS[name]
            results[name] = run(["-c", code], environment)

    threads = [threading.Thread(target=work, args=(name,)) for name in SCENARIOS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# --- ways of loading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["entry point", "module", "both", "by hand"])
def test_P02_every_way_of_loading_registers_both_losses_and_says_nothing(loaded, way):
    result = result_of(loaded[way])
    assert {name: result["losses"][name] for name in OURS} == {
        name: f"verl_sat.policy_loss.compute_policy_loss_{name}" for name in OURS
    }
    assert "verl-sat" not in loaded[way].stderr and "Traceback" not in loaded[way].stderr


def test_without_the_plugin_nothing_of_ours_is_loaded(loaded):
    result = result_of(loaded["plain"])
    assert not set(OURS) & set(result["losses"])
    assert not [name for name in result["modules"] if name.partition(".")[0] in ("verl_sat", "wrapt")]


def test_the_plugin_adds_only_its_two_losses(loaded):
    plain, with_plugin = (result_of(loaded[way])["losses"] for way in ("plain", "entry point"))
    assert {name: f for name, f in with_plugin.items() if name not in OURS} == plain


def test_P07_import_verl_costs_no_more_than_core_algos_with_it(loaded):
    """Not timed, but by what is imported: nothing but our own small modules and what they are made of."""
    plain, with_plugin = (set(result_of(loaded[way])["modules"]) for way in ("plain", "entry point"))
    extra = {name for name in with_plugin - plain}
    assert {name.partition(".")[0] for name in extra} <= {"verl_sat", "wrapt", "packaging"}
    assert not {name for name in extra if name.startswith(("verl_sat.embedded", "verl_sat.engine"))}
    assert "verl_sat.preflight" not in extra and "hydra" not in with_plugin


@pytest.mark.parametrize("way", ["entry point", "module", "by hand"])
def test_P07_no_engine_trainer_or_rollout_is_imported(loaded, way):
    modules = result_of(loaded[way])["modules"]
    heavy = ("vllm", "sglang", "megatron", "tensorrt_llm", "deepspeed", "peft")
    verl_heavy = ("verl.workers.engine", "verl.workers.engine_workers", "verl.workers.rollout", "verl.trainer.main_ppo")
    verl_heavy += ("verl.trainer.ppo.v1", "verl.trainer.ppo.ray_trainer", "verl.experimental")
    found = [n for n in modules if n.partition(".")[0] in heavy or n.startswith(verl_heavy)]
    assert not [n for n in found if n not in ("verl.workers.config.engine",)]


# --- failures ----------------------------------------------------------------------------------------------------


def test_P01_a_failure_is_printed_at_error_with_cause_and_remedy_although_verl_swallows_it(loaded):
    result = result_of(loaded["failing"])  # the process goes on: verl swallowed the exception
    lines = [line for line in loaded["failing"].stderr.splitlines() if line.startswith("ERROR: verl-sat")]
    assert len(lines) == 3
    assert "could not be loaded into verl 0.9." in lines[0] and "verl_sat.policy_loss" in lines[0]
    assert "install what is missing" in lines[2]
    assert {result["losses"][name] for name in OURS} == {"verl_sat.plugin._refusing_loss.<locals>.refuse"}


def test_P01_a_missing_dependency_is_said_too(loaded):
    result = result_of(loaded["no wrapt"])
    lines = [line for line in loaded["no wrapt"].stderr.splitlines() if line.startswith("ERROR: verl-sat")]
    assert len(lines) == 3
    assert "wrapt" in lines[0] and "'wrapt'" in lines[2]
    assert {result["losses"][name] for name in OURS} == {"verl_sat.plugin._refusing_loss.<locals>.refuse"}


@pytest.fixture
def reloadable(monkeypatch):
    """Lets a test break the plugin in this process, and mends it afterwards."""
    yield monkeypatch
    monkeypatch.undo()
    plugin.register()
    assert _compat.FAILURES == []


def test_P01_after_a_failed_load_our_names_refuse_with_the_cause_and_others_work(reloadable, capfd):
    vanilla = core_algos.get_policy_loss_fn("vanilla")
    reloadable.setitem(sys.modules, "verl_sat.policy_loss", None)
    with pytest.raises(ModuleNotFoundError):
        plugin.register()
    assert "ERROR: verl-sat" in capfd.readouterr().err
    for name in OURS:
        with pytest.raises(RuntimeError, match=f"loss_mode={name} is not available.*verl_sat.policy_loss"):
            core_algos.get_policy_loss_fn(name)(old_log_prob=None, log_prob=None)
    assert core_algos.get_policy_loss_fn("vanilla") is vanilla
    assert "verl_sat.policy_loss" in _compat.FAILURES[0]


def test_an_unsupported_verl_is_refused_by_version(reloadable, capfd):
    reloadable.setattr(sys.modules["verl"], "__version__", "0.10.0")
    with pytest.raises(_compat.CompatError, match="0.10.0"):
        plugin.register()
    error = capfd.readouterr().err
    assert "into verl 0.10.0" in error and "Install verl==" in error
    with pytest.raises(RuntimeError, match="0.10.0"):
        core_algos.get_policy_loss_fn("sat_grpo")()


def _agg_loss_without_scale(loss_mat, loss_mask, loss_agg_mode, dp_size=1, batch_num_tokens=None):
    raise AssertionError


def _agg_loss_that_wants_more(
    loss_mat,
    loss_mask,
    loss_agg_mode,
    something,
    dp_size=1,
    batch_num_tokens=None,
    global_batch_size=None,
    loss_scale_factor=None,
):
    raise AssertionError


@pytest.mark.parametrize("changed", [_agg_loss_without_scale, _agg_loss_that_wants_more])
def test_a_changed_aggregation_is_refused(reloadable, changed):
    reloadable.setattr(core_algos, "agg_loss", changed)
    with pytest.raises(_compat.CompatError, match="agg_loss"):
        plugin.register()


def test_a_further_optional_parameter_of_the_aggregation_is_harmless(reloadable):
    original = core_algos.agg_loss

    def more(
        loss_mat,
        loss_mask,
        loss_agg_mode,
        dp_size=1,
        batch_num_tokens=None,
        global_batch_size=None,
        loss_scale_factor=None,
        new=0,
    ):
        return original(loss_mat, loss_mask, loss_agg_mode)

    reloadable.setattr(core_algos, "agg_loss", more)
    plugin.register()


def test_a_changed_registry_or_loss_configuration_is_refused(reloadable):
    reloadable.setattr(core_algos, "register_policy_loss", lambda name, overwrite: None)
    with pytest.raises(_compat.CompatError, match="register_policy_loss"):
        plugin.register()
    reloadable.undo()
    reloadable.delitem(PolicyLossConfig.__dataclass_fields__, "rollout_correction")
    with pytest.raises(_compat.CompatError, match="rollout_correction"):
        plugin.register()


def test_a_wrap_that_is_refused_late_takes_the_losses_back_and_leaves_the_rest(reloadable, capfd, tmp_path):
    (tmp_path / "late_drift.py").write_text("def target(other):\n    return other\n")
    reloadable.syspath_prepend(str(tmp_path))
    late = _compat.Patch("late", "late_drift:target", ("value",), lambda f: f, "a test", "never")
    reloadable.setattr(_compat, "LEDGER", [*_compat.LEDGER, late])
    plugin.register()
    assert core_algos.get_policy_loss_fn("sat_grpo").__module__ == "verl_sat.policy_loss"
    module = importlib.import_module("late_drift")
    assert module.target(3) == 3
    assert "late_drift:target" in capfd.readouterr().err
    with pytest.raises(RuntimeError, match="late_drift:target"):
        core_algos.get_policy_loss_fn("sat_grpo")()


# --- the registry ------------------------------------------------------------------------------------------------


def test_registering_again_is_silent_and_changes_nothing(caplog):
    before = {name: core_algos.POLICY_LOSS_REGISTRY[name] for name in OURS}
    plugin.register()
    importlib.reload(plugin)
    assert {name: core_algos.POLICY_LOSS_REGISTRY[name] for name in OURS} == before
    assert not caplog.records


def test_a_foreign_function_under_our_name_is_reported_and_ours_wins(caplog):
    @core_algos.register_policy_loss("sat_grpo")
    def somebodys_loss(*args, **kwargs):
        raise AssertionError

    plugin.register()
    assert core_algos.get_policy_loss_fn("sat_grpo").__module__ == "verl_sat.policy_loss"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    message = record.getMessage()
    assert "'sat_grpo'" in message and "somebodys_loss" in message and Path(__file__).name in message
    caplog.clear()
    core_algos.POLICY_LOSS_REGISTRY["sat_gspo"] = object()  # not even a function
    plugin.register()
    assert "'sat_gspo'" in caplog.text


def test_P04_what_is_registered_takes_what_verls_worker_passes():
    for name in OURS:
        parameters = inspect.signature(core_algos.get_policy_loss_fn(name)).parameters
        assert any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        with pytest.raises(Exception, match="response_mask"):
            core_algos.get_policy_loss_fn(name)(
                old_log_prob=torch.zeros(1, 2), log_prob=torch.zeros(1, 2), advantages=torch.ones(1, 2)
            )


def test_the_cpu_platform_is_registered_only_when_asked_for(loaded):
    for way in ("entry point", "both"):
        assert not [n for n in result_of(loaded[way])["modules"] if n.startswith("verl_sat.embedded")]
    done = run(
        [
            "-c",
            "import verl; from verl.utils.device import get_device_name; print('RESULT \"%s\"' % get_device_name())",
        ],
        {"VERL_PLATFORM": "cpu"},
    )
    assert result_of(done) == "cpu"
    assert "Unknown platform" not in done.stderr


# --- in Ray ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_ray():
    return result_of(run([str(SCRIPTS / "ray_checks.py")], {}, timeout=400))


@pytest.mark.long
def test_P02_a_ray_worker_without_the_variable_finds_the_losses_by_the_entry_point(in_ray):
    assert in_ray["losses"]["entry point"] == "verl_sat.policy_loss"
    assert in_ray["losses"]["module passed on"] == "verl_sat.policy_loss"


@pytest.mark.long
def test_the_wrapped_update_weights_works_behind_verls_worker_group(in_ray):
    weights = in_ray["weights"]
    assert weights["results"] == [[{"sent": 0}], [{"sent": 5}]]
    assert weights["seen"] == [[["note", 0], ["send", 0], ["note", 5], ["send", 5]]]
