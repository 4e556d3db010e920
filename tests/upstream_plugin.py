"""pytest plugin of `tests/upstream.py`: puts this package where verl's own tests name verl's.

None of verl's tests is copied here. A `Swap` names tests in a checkout by file and function, and what takes the place
of which name of their module while they run. Every swapped test must have reached what was put in, or it fails.

Run as a script it starts pytest with the plugin (`upstream.py` does): only this folder is then put on ``sys.path``,
neither the current folder nor the checkout, so ``import verl`` finds the installed package.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CORE_ALGOS = "tests/trainer/ppo/test_core_algos_on_cpu.py"
DYNAMIC_LOSSES = "tests/trainer/ppo/test_dynamic_policy_losses_on_cpu.py"
AGGREGATION = "tests/trainer/ppo/test_loss_aggregation_on_cpu.py"
VALUE_LOSS = "tests/trainer/ppo/test_value_loss_normalization_on_cpu.py"
CORRECTION = "tests/trainer/ppo/test_rollout_corr.py"
CORRECTION_WITH_LOSS = "tests/trainer/ppo/test_rollout_corr_integration.py"
LOSS_METRICS = "tests/trainer/ppo/test_metric_utils_on_cpu.py"
ACTOR_CONFIG = "tests/workers/config/test_actor_config_on_cpu.py"
BASE_CONFIG = "tests/test_base_config_on_cpu.py"
REPLAY_BUFFER = "tests/trainer/ppo/v1/test_replay_buffer_on_cpu.py"

AS_THEY_ARE = (
    DYNAMIC_LOSSES,
    AGGREGATION,
    VALUE_LOSS,
    CORRECTION,
    CORRECTION_WITH_LOSS,
    LOSS_METRICS,
    ACTOR_CONFIG,
    BASE_CONFIG,
    CORE_ALGOS,
)
"""Files about policy losses (advantages, aggregation, correction weights, metrics) and actor configuration."""

LOSSES = ("sat_grpo", "sat_gspo")
SAMPLER = "ExactLagReplayBuffer"
PUT_INS = (*LOSSES, SAMPLER)


class Reached:
    """How often a swapped test came to what was put in."""

    def __init__(self) -> None:
        self.times = 0


@dataclass(frozen=True)
class Swap:
    """Tests of one file that run with something of ours.

    Attributes:
        file: path inside a checkout of verl.
        what: what stands in for what, for the closing table; ``{name}`` is the loss.
        put_in: called with the test's module, a monkeypatch, the name of the loss and the counter.
        tests: functions of the file; empty for all.
    """

    file: str
    what: str
    put_in: Callable[[ModuleType, pytest.MonkeyPatch, str, Reached], None]
    tests: tuple[str, ...] = ()

    def covers(self, file: str, function: str) -> bool:
        return file == self.file and (not self.tests or function in self.tests)


# --- what is put in ----------------------------------------------------------------------------------------------


def loss_for_vanilla(module: ModuleType, patch: pytest.MonkeyPatch, name: str, reached: Reached) -> None:
    """The registered loss where the module calls verl's vanilla by name, with the paper's settings."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    def loss(**kwargs: Any) -> Any:
        reached.times += 1
        return get_policy_loss_fn(name)(**kwargs)

    patch.setattr(module, "compute_policy_loss_vanilla", loss)


def loss_for_value_loss(module: ModuleType, patch: pytest.MonkeyPatch, name: str, reached: Reached) -> None:
    """The registered loss where the module calls the critic's: prediction, value and return are read as log-prob, old
    log-prob and advantage. What the module asserts (a mini-batch's loss, its gradient and its reported metric do not
    depend on the split into micro-batches or ranks) holds for every loss that aggregates as verl does, as long as no
    statistic is taken per micro-batch: hence ``kernel=none``.
    """
    import torch
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    from verl_sat.config import SATPolicyLossConfig

    def loss(
        vpreds: Any,
        returns: Any,
        values: Any,
        response_mask: Any,
        cliprange_value: float,
        loss_agg_mode: str = "token-mean",
        **counts: Any,
    ) -> Any:
        reached.times += 1
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio=cliprange_value,
            clip_ratio_low=cliprange_value,
            clip_ratio_high=cliprange_value,
            policy_loss=SATPolicyLossConfig(loss_mode=name, sat={"kernel": "none"}),
        )
        config.global_batch_info.update(counts)
        value, metrics = get_policy_loss_fn(name)(
            old_log_prob=values,
            log_prob=vpreds,
            advantages=returns,
            response_mask=response_mask,
            loss_agg_mode=loss_agg_mode,
            config=config,
        )
        return value, torch.tensor(metrics["actor/pg_clipfrac"])

    patch.setattr(module, "compute_value_loss", loss)


def block_in_actor_config(module: ModuleType, patch: pytest.MonkeyPatch, name: str, reached: Reached) -> None:
    """Our policy-loss block in every actor configuration that the module builds: through Hydra's ``_target_`` where it
    converts a mapping or YAML, as a user's override does, and as an argument where it calls the class.
    """
    from omegaconf import OmegaConf
    from verl.workers.config import ActorConfig, FSDPActorConfig, McoreActorConfig

    from verl_sat.config import SATPolicyLossConfig

    block = {"_target_": "verl_sat.config.SATPolicyLossConfig", "loss_mode": name, "sat": {"quantile": 0.8}}
    convert = module.omega_conf_to_dataclass

    def converted(config: Any, *args: Any, **kwargs: Any) -> Any:
        config = OmegaConf.merge(OmegaConf.create(config), {})  # a copy: the test keeps its own
        OmegaConf.set_struct(config, False)
        config.policy_loss = block
        result = convert(config, *args, **kwargs)
        assert isinstance(result.policy_loss, SATPolicyLossConfig) and result.policy_loss.sat.quantile == 0.8
        return result

    def initialised(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            kwargs.setdefault("policy_loss", SATPolicyLossConfig(loss_mode=name))
            assert isinstance(kwargs["policy_loss"], SATPolicyLossConfig)
            reached.times += 1
            original(self, *args, **kwargs)

        return __init__

    patch.setattr(module, "omega_conf_to_dataclass", converted)
    for config_class in (ActorConfig, FSDPActorConfig, McoreActorConfig):
        patch.setattr(config_class, "__init__", initialised(config_class.__init__))


def exact_lag_sampler(module: ModuleType, patch: pytest.MonkeyPatch, name: str, reached: Reached) -> None:
    """Our sampler as the asynchronous buffer, which also takes the place of the synchronous default."""
    from verl_sat.sampler import ExactLagReplayBuffer

    def make(*args: Any, **kwargs: Any) -> ExactLagReplayBuffer:
        reached.times += 1
        return ExactLagReplayBuffer(*args, **kwargs)

    patch.setattr(module, "ReplayBufferAsync", make)
    patch.setitem(module._make_rb.__kwdefaults__, "trainer_mode", "separate_async")


LOSS_SWAPS = (
    Swap(
        CORRECTION_WITH_LOSS,
        "{name} in place of vanilla",
        loss_for_vanilla,
        (
            "test_policy_loss_with_rollout_is",
            "test_metrics_only_mode",
            "test_exact_icepop_matches_filtered_weighted_ppo_loss",
        ),
    ),
    Swap(VALUE_LOSS, "{name} (kernel none) in place of the critic's loss", loss_for_value_loss),
    Swap(ACTOR_CONFIG, "{name} block in every actor config", block_in_actor_config),
)

# Left out, because our sampler means to differ: it waits for groups in flight, adds a metric to every batch, checks
# its threshold against the lag first, and refuses group filtering and refill.
SAMPLER_SWAPS = (
    Swap(
        REPLAY_BUFFER,
        f"{SAMPLER} in place of verl's buffers",
        exact_lag_sampler,
        (
            "test_init_rejects_unknown_strategy",
            "test_sync_metadata_classifies_keys",
            "test_sync_metadata_unknown_status_raises",
            "test_clear_groups_updates_active_snapshot",
            "test_sample_prioritizes_smallest_global_steps",
            "test_sample_blocks_until_enough_then_unblocks",
            "test_sync_grpo_step_returns_complete_groups",
            "test_async_overproduction_drains_in_batches_without_duplicates",
            "test_drop_uses_one_snapshot_per_poll_iteration",
            "test_wait_blocks_until_stale_inflight_finishes",
            "test_async_failure_refills_exact_missing_count",
        ),
    ),
)


def swaps_of(put_in: str | None) -> tuple[Swap, ...]:
    """The swaps of a run; none for verl's tests as they are."""
    if put_in is None:
        return ()
    return SAMPLER_SWAPS if put_in == SAMPLER else LOSS_SWAPS


# --- the plugin --------------------------------------------------------------------------------------------------


@dataclass
class Upstream:
    """Selects, swaps and reports.

    Attributes:
        checkout: verl's checkout, whose tests run.
        installed: folder of the installed ``verl`` package, which is what they must test.
        put_in: one of `PUT_INS`, or None.
        report: file that gets a JSON line per test: file, test, outcome, with.
    """

    checkout: Path
    installed: Path
    put_in: str | None
    report: Path
    _with: dict[str, str] = field(default_factory=dict)

    def pytest_configure(self, config: pytest.Config) -> None:
        import verl
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

        found = Path(verl.__file__).parent
        if found.resolve() != self.installed.resolve():
            raise pytest.UsageError(f"`import verl` found {found}, not the installed {self.installed}")
        ours = [name for name in LOSSES if getattr(POLICY_LOSS_REGISTRY.get(name), "__module__", "") == _LOSS_MODULE]
        if len(ours) != len(LOSSES):
            raise pytest.UsageError(f"verl-sat is not loaded into verl: {', '.join(LOSSES)} are not its own losses")

    def pytest_sessionstart(self) -> None:
        if self.put_in == SAMPLER:
            import ray

            # TransferQueue's actors want more cores than a small machine has, and would wait for them for ever.
            ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    def pytest_report_header(self) -> str:
        import verl

        import verl_sat

        swapped = f", with {self.put_in} put in" if self.put_in else ", as they are"
        return (
            f"verl {verl.__version__} at {self.installed}, verl-sat {verl_sat.__version__} loaded; "
            f"tests of {self.checkout}{swapped}"
        )

    def _file(self, path: Path) -> str:
        return path.resolve().relative_to(self.checkout.resolve()).as_posix()

    def _swap(self, item: pytest.Item) -> Swap | None:
        function = getattr(item, "originalname", None) or item.name
        return next((s for s in swaps_of(self.put_in) if s.covers(self._file(item.path), function)), None)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for item in items:
            swap = self._swap(item)
            self._with[item.nodeid] = "verl's own" if swap is None else swap.what.format(name=self.put_in)
        if self.put_in is not None:
            self._report_absent(items)
            out = [item for item in items if self._swap(item) is None]
            items[:] = [item for item in items if self._swap(item) is not None]
            config.hook.pytest_deselected(items=out)

    def _report_absent(self, items: list[pytest.Item]) -> None:
        """A test that a swap names and this checkout does not have is said, not skipped in silence."""
        found = {(self._file(item.path), getattr(item, "originalname", None) or item.name) for item in items}
        for swap in swaps_of(self.put_in):
            for test in swap.tests:
                if (swap.file, test) not in found:
                    nodeid = f"{swap.file}::{test}"
                    self._with[nodeid] = swap.what.format(name=self.put_in)
                    self._write(nodeid, "absent")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        swap = self._swap(item)
        if swap is None:
            return (yield)
        reached = Reached()
        with pytest.MonkeyPatch.context() as patch:
            swap.put_in(item.module, patch, self.put_in, reached)
            result = yield
        if not reached.times:
            pytest.fail(f"the test passed without {self.put_in}: what was put in was never reached", pytrace=False)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._write(report.nodeid, report.outcome if report.when == "call" or report.skipped else "failed")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "failed")

    def _write(self, nodeid: str, outcome: str) -> None:
        file, _, test = nodeid.partition("::")
        line = {"file": file, "test": test, "outcome": outcome, "with": self._with.get(nodeid, "verl's own")}
        with open(self.report, "a") as stream:
            stream.write(json.dumps(line) + "\n")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """The checkout's package must have stayed out: one module of it would make every result doubtful."""
        foreign = sorted(
            name
            for name, module in sys.modules.items()
            if name.partition(".")[0] == "verl"
            and isinstance(getattr(module, "__file__", None), str)
            and not Path(module.__file__).resolve().is_relative_to(self.installed.resolve())
        )
        if foreign:
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
            print(f"\nerror: not of the installed verl: {foreign}", file=sys.stderr)


_LOSS_MODULE = "verl_sat.policy_loss"


def main(arguments: list[str]) -> int:
    """``CHECKOUT INSTALLED REPORT PUT_IN FILE...``: run pytest on files of a checkout; PUT_IN may be ``-``."""
    checkout, installed, report, put_in, *files = arguments
    plugin = Upstream(Path(checkout), Path(installed), None if put_in == "-" else put_in, Path(report))
    with contextlib.suppress(SystemExit):
        return int(
            pytest.main(
                [
                    # Each file under its own name, and nothing of the checkout on sys.path.
                    "--import-mode=importlib",
                    f"--rootdir={checkout}",
                    "-c/dev/null",  # neither verl's pytest settings nor ours
                    "-pno:cacheprovider",  # nothing is written into the checkout
                    "-Wignore",
                    "--timeout=120",
                    "-q",
                    *(str(Path(checkout, file)) for file in files),
                ],
                plugins=[plugin],
            )
        )
    return int(pytest.ExitCode.INTERNAL_ERROR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
