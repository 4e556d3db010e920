"""The wraps around verl: refused on any drift, transparent, idempotent, and listed in a ledger.

The installer is tested on modules made up here, the four wraps on verl's own objects. The worker group with real Ray
is in `test_plugin_on_cpu.py`.
"""

import asyncio
import functools
import inspect
import subprocess
import sys
import types
from types import SimpleNamespace

import pytest
from verl.single_controller.base.decorator import MAGIC_ATTR
from verl.workers.engine_workers import ActorRolloutRefWorker

from verl_sat import _compat
from verl_sat._compat import CompatError, Patch


def wraps_with(log):
    def wrap(original):
        @functools.wraps(original)
        def replacement(*args, **kwargs):
            log.append(original.__name__)
            return original(*args, **kwargs)

        return replacement

    return wrap


@pytest.fixture
def fake(monkeypatch):
    """A module `fake_verl` with a function, a class and a second binding of the function."""
    module = types.ModuleType("fake_verl")

    def double(value, times=2):
        return value * times

    class Worker:
        async def sync(self, step=None):
            return step

    double.dispatch = "one_to_all"
    module.double, module.Worker = double, Worker
    other = types.ModuleType("fake_alias")
    other.double = double
    monkeypatch.setitem(sys.modules, "fake_verl", module)
    monkeypatch.setitem(sys.modules, "fake_alias", other)
    monkeypatch.setattr(_compat, "_ARMED", set())
    return module


def patch(log, **changes):
    fields = dict(
        name="double",
        target="fake_verl:double",
        parameters=("value", "times"),
        wrap=wraps_with(log),
        why="a test",
        remove_when="never",
    )
    return Patch(**{**fields, **changes})


def test_a_wrap_keeps_behaviour_signature_and_attributes(fake):
    log = []
    original = fake.double
    _compat.install(ledger=[patch(log, aliases=("fake_alias:double",))])
    assert fake.double is not original
    assert fake.double(3, times=4) == 12 and log == ["double"]
    assert list(inspect.signature(fake.double).parameters) == ["value", "times"]
    assert fake.double.dispatch == "one_to_all" and fake.double.__name__ == "double"
    assert sys.modules["fake_alias"].double is fake.double


def test_wrapping_twice_wraps_once(fake):
    log = []
    first, second = patch(log), patch(log, name="another")
    _compat.install(ledger=[first, second])
    _compat._ARMED.clear()  # as a second process-wide load would find it, had it not remembered
    _compat.install(ledger=[first, second])
    assert fake.double(1) == 2 and log == ["double", "double"]  # once for each of two different wraps


@pytest.mark.parametrize("parameters", [("value",), ("times", "value"), ("value", "times", "more")])
def test_a_changed_parameter_list_is_refused_with_function_version_and_module(fake, parameters):
    original = fake.double
    with pytest.raises(CompatError, match=r"verl 0\.9\.\d.*fake_verl:double.*verl_sat/_compat\.py"):
        _compat.install(ledger=[patch([], parameters=parameters)])
    assert fake.double is original
    assert issubclass(CompatError, RuntimeError)


def test_a_target_that_is_gone_is_refused(fake):
    for target in ("fake_verl:gone", "fake_verl:Worker.gone", "fake_verl:Gone.sync"):
        with pytest.raises(CompatError, match="is gone"):
            _compat.install(ledger=[patch([], target=target)])


def test_an_unsupported_verl_is_refused_before_anything_is_wrapped(fake, monkeypatch):
    original = fake.double
    monkeypatch.setattr(sys.modules["verl"], "__version__", "0.10.0")
    with pytest.raises(CompatError, match="verl 0.10.0 is not supported"):
        _compat.install(ledger=[patch([])])
    assert fake.double is original


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.9.0", True),
        ("0.9.1", True),
        ("0.9.7.dev0", True),
        ("0.9.1+cu128", True),
        ("0.9.0.dev0", True),
        ("0.8.0", False),
        ("0.10.0", False),
        ("0.10.0.dev0", False),
        ("1.0", False),
    ],
)
def test_supported_versions(version, supported):
    if supported:
        _compat.require_verl(version)
    else:
        with pytest.raises(CompatError, match="Install verl=="):
            _compat.require_verl(version)


def test_a_wrap_that_would_change_the_function_is_refused(fake):
    with pytest.raises(CompatError, match="changes whether"):
        _compat.install(
            ledger=[patch([], target="fake_verl:Worker.sync", parameters=("self", "step"), wrap=wraps_with([]))]
        )
    with pytest.raises(CompatError, match="loses"):
        _compat.install(ledger=[patch([], wrap=lambda original: lambda value, times=2: None)])


def test_a_guard_can_refuse(fake):
    def guard(original):
        """the default is two"""
        if inspect.signature(original).parameters["times"].default != 3:
            raise CompatError("not three")

    with pytest.raises(CompatError, match="not three"):
        _compat.install(ledger=[patch([], guard=guard)])
    assert "the default is two" in _compat.as_markdown([patch([], guard=guard)])


def test_the_cpu_profile_is_active_only_when_asked_for(fake, monkeypatch):
    log = []
    only_cpu = patch(log, active=_compat.cpu_profile)
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    original = fake.double
    _compat.install(ledger=[only_cpu])
    assert fake.double is original
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    _compat.install(ledger=[only_cpu])
    assert fake.double is not original


def test_a_module_that_is_imported_later_is_wrapped_then(monkeypatch, tmp_path):
    (tmp_path / "later_verl.py").write_text("def double(value, times=2):\n    return value * times\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_compat, "_ARMED", set())
    log = []
    _compat.install(ledger=[patch(log, target="later_verl:double")])
    assert "later_verl" not in sys.modules
    import later_verl

    assert later_verl.double(1) == 2 and log == ["double"]


def test_a_late_refusal_is_handed_over_and_does_not_break_the_import(monkeypatch, tmp_path):
    (tmp_path / "drifted_verl.py").write_text("def double(value):\n    return value\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_compat, "_ARMED", set())
    seen = []
    _compat.install(on_late_failure=seen.append, ledger=[patch([], target="drifted_verl:double")])
    import drifted_verl

    assert drifted_verl.double(5) == 5
    assert len(seen) == 1 and isinstance(seen[0], CompatError)
    with pytest.raises(CompatError):  # and a second load of the plugin meets it again
        _compat.install(on_late_failure=seen.append, ledger=[patch([], target="drifted_verl:double")])


def test_a_late_refusal_in_the_cpu_profile_fails_the_import(monkeypatch, tmp_path):
    (tmp_path / "drifted_cpu_verl.py").write_text("def double(value):\n    return value\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_compat, "_ARMED", set())
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    wrap = patch([], target="drifted_cpu_verl:double", active=_compat.cpu_profile)
    _compat.install(on_late_failure=lambda error: None, ledger=[wrap])
    with pytest.raises(CompatError):
        import drifted_cpu_verl  # noqa: F401


# --- the ledger --------------------------------------------------------------------------------------------------


def test_the_ledger_is_complete_and_its_names_are_unique():
    names = [p.name for p in _compat.LEDGER]
    assert len(set(names)) == len(names)
    for p in _compat.LEDGER:
        module, _, attribute = p.target.partition(":")
        assert module.startswith(("verl.", "tensordict", "transfer_queue", "ray.")) and attribute, p.target
        assert p.why and p.remove_when and (p.parameters is not None or p.guard is not None)


def test_the_ledger_prints_as_a_table_without_loading_verl():
    code = (
        "import runpy, sys; runpy.run_module('verl_sat._compat', run_name='__main__'); assert 'verl' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 + len(_compat.LEDGER)
    assert all(line.startswith("| ") and line.count(" | ") == 5 for line in [lines[0], *lines[2:]])
    assert "`verl.utils.config:validate_config`" in done.stdout


# --- the weight version ------------------------------------------------------------------------------------------


class Engine:
    """What the wrap looks for, and what verl's own method asks of an engine in checkpoint-engine mode."""

    def __init__(self, log):
        self.log = log

    def get_per_tensor_param(self):
        self.log.append("send")
        return iter(()), None


class VersionedEngine(Engine):
    def note_weight_sync(self, global_steps):
        self.log.append(global_steps)


class Checkpoint:
    async def send_weights(self, weights, global_steps):
        return {"sent": global_steps}


def worker(engine):
    config = SimpleNamespace(rollout=SimpleNamespace(checkpoint_engine=SimpleNamespace(backend="gloo")))
    return SimpleNamespace(config=config, actor=SimpleNamespace(engine=engine), checkpoint_engine=Checkpoint())


@pytest.mark.parametrize(
    ("args", "kwargs", "version"), [((7,), {}, 7), ((), {"global_steps": 7}, 7), ((0, "auto"), {}, 0), ((), {}, None)]
)
def test_our_engine_is_told_the_version_before_the_weights_leave(args, kwargs, version):
    log = []
    result = asyncio.run(ActorRolloutRefWorker.update_weights(worker(VersionedEngine(log)), *args, **kwargs))
    assert log == [version, "send"]
    assert result == {"sent": version}


def test_verls_own_engine_sees_nothing_of_it():
    log = []
    assert asyncio.run(ActorRolloutRefWorker.update_weights(worker(Engine(log)), 3)) == {"sent": 3}
    assert log == ["send"]


def test_the_wrapped_method_is_still_what_verls_worker_groups_expect():
    method = ActorRolloutRefWorker.update_weights
    assert hasattr(method, _compat._MARK)
    assert getattr(method, MAGIC_ATTR) == getattr(method.__wrapped__, MAGIC_ATTR)
    assert getattr(method, MAGIC_ATTR)["blocking"] is False
    assert inspect.iscoroutinefunction(method)
    assert list(inspect.signature(method).parameters) == ["self", "global_steps", "mode"]
