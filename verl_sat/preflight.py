"""What stops a job before it starts.

The driver is the one place that sees the whole configuration: workers see only ``actor_rollout_ref``, and a
loss does not even know whether it runs in bypass mode. So whatever would leave SAT lost (another loss is
trained) or meaningless (every ratio is 1) is found here, before a worker starts, and each finding names the
full key and the value to set.

`check` is a pure function of the composed configuration and never raises; `run` raises or logs what it found.
A configuration without any of our names has no findings.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hydra.errors import CompactHydraException
from omegaconf import DictConfig, OmegaConf

from verl_sat import _compat

logger = logging.getLogger(__name__)

LOSSES = ("sat_grpo", "sat_gspo")

POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
LOSS_MODE = f"{POLICY_LOSS}.loss_mode"
SAT_BLOCK = f"{POLICY_LOSS}.sat"
SAT_TARGET = "verl_sat.config.SATPolicyLossConfig"
CORRECTION = "algorithm.rollout_correction"
BYPASS = f"{CORRECTION}.bypass_mode"
CALCULATE_LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs"
SAMPLER = "trainer.v1.sampler"
SEPARATE_ASYNC = "trainer.use_v1=True trainer.v1.trainer_mode=separate_async"

# The keys of SPEC's options that are nobody else's when found directly under `policy_loss`.
_OPTION_NAMES = (
    "quantile",
    "kernel",
    "exponent",
    "scope",
    "q",
    "q_min",
    "advantage_clip_low",
    "advantage_clip_high",
    "advantage_clip_scope",
)
_STOCK_TARGETS = (
    None,
    "verl.workers.config.PolicyLossConfig",
    "verl.workers.config.actor.PolicyLossConfig",
)
_RADIUS_FLOOR = 1e-3

_emitted: set[str] = set()


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a configuration.

    Attributes:
        level: ``error`` stops the job, ``warning`` is logged once.
        key: full configuration key that it is about.
        message: what is wrong, and what would happen.
        remedy: ``key=value`` overrides that mend it, separated by blanks; empty if there is no single one.
    """

    level: Literal["error", "warning"]
    key: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level}: {self.key}: {self.message}" + (f"; set {self.remedy}" if self.remedy else "")


class SATPreflightError(ValueError, CompactHydraException):
    """The configuration would lose SAT or make it meaningless.

    Hydra prints an exception of this kind as its text alone, without a traceback (``HYDRA_FULL_ERROR=1`` shows it).
    """

    def __init__(self, findings: list[Finding] | str) -> None:
        if isinstance(findings, str):  # from a pickle: exceptions are rebuilt from their text
            super().__init__(findings)
            return
        count = f"{len(findings)} error" + ("s" if len(findings) != 1 else "")
        lines = [f"verl-sat: this job was not started ({count} in its configuration)", *map(str, findings)]
        super().__init__("\n".join(lines))


def check(config: Any) -> list[Finding]:
    """Find what would lose SAT or make it meaningless.

    Args:
        config: the composed configuration of any of verl's trainers (DictConfig or mapping). Keys may be missing.
    Returns:
        Findings, errors first. Empty if the configuration names nothing of ours.
    """
    job = _Job.read(config)
    if not job.concerns_us:
        return []
    findings: list[Finding] = []
    for rule in _RULES:
        try:
            findings.extend(rule(job))
        except Exception as error:  # a rule that cannot be evaluated must not stop a job that would run
            _warn_once(f"preflight rule {rule.__name__} could not be evaluated: {type(error).__name__}: {error}")
    return sorted(findings, key=lambda finding: finding.level != "error")


def run(config: Any) -> None:
    """Check a configuration in the driver: raise for errors, log each warning once, say what will run.

    Args:
        config: as for `check`.
    Raises:
        SATPreflightError: with a line per error.
    """
    findings = check(config)
    for finding in findings:
        if finding.level == "warning":
            _warn_once(str(finding).removeprefix("warning: "))
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        raise SATPreflightError(errors)
    job = _Job.read(config)
    if job.sat:
        _say_once(f"[verl-sat] {describe(job)}")


def _warn_once(text: str) -> None:
    if text not in _emitted:
        _emitted.add(text)
        logger.warning("verl-sat: %s", text)


def _say_once(text: str) -> None:
    if text not in _emitted:
        _emitted.add(text)
        print(text, flush=True)  # as verl's own "[validate_config] ..." line, which INFO logging would hide


def lost_to_bypass_rewrite(loss_mode: str, trainer: str = "legacy") -> Finding:
    """The finding for a legacy trainer in bypass mode, which writes ``bypass_mode`` over ``loss_mode`` in its
    configuration (`verl/trainer/ppo/rollout_corr_helper.py`). In verl 0.9.1 it does so after the workers took their
    copy, which then still names our loss; nothing but that order keeps SAT in the job."""
    who = {
        "fully_async": "fully_async_policy",
        "one_step_off": "one_step_off_policy",
        "legacy": "the legacy trainer (trainer.use_v1=False, fully_async_policy or one_step_off_policy)",
    }[trainer]
    return Finding(
        "error",
        BYPASS,
        f"in bypass mode {who} replaces loss_mode={loss_mode} by 'bypass_mode' in its configuration, so which loss is "
        f"trained depends on when a worker read it; the V1 trainer leaves it alone. Run verl.trainer.main_ppo with "
        f"{SEPARATE_ASYNC}, or stay here without bypass",
        f"{BYPASS}=False",
    )


# --- what a configuration says -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """The facts that the rules ask for, read leniently: a key that is missing or cannot be resolved is None."""

    config: DictConfig
    loss_mode: str
    trainer: Literal["v1", "legacy", "fully_async", "one_step_off"]
    mode: str

    @staticmethod
    def read(config: Any) -> _Job:
        config = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
        loss_mode = _select(config, LOSS_MODE)
        if _select(config, "async_training") is not None:
            trainer = "fully_async"
        elif _select(config, "rollout.nnodes") is not None:
            trainer = "one_step_off"
        else:
            trainer = "legacy" if _select(config, "trainer.use_v1") is False else "v1"
        return _Job(
            config=config,
            loss_mode=loss_mode if isinstance(loss_mode, str) else "",
            trainer=trainer,
            mode=str(_select(config, "trainer.v1.trainer_mode", "sync")),
        )

    def get(self, key: str, default: Any = None) -> Any:
        return _select(self.config, key, default)

    @property
    def sat(self) -> bool:
        """The job asks for a loss of ours, perhaps misspelt."""
        return self.loss_mode.lower().replace("-", "_").startswith("sat_")

    @property
    def concerns_us(self) -> bool:
        return bool(
            self.sat
            or _looks_like_ours(self.loss_mode)
            or any(self.has(key) for key in ("sat", "r3", SAT_BLOCK, *_MISPLACED_BLOCKS))
            or str(self.get(f"{POLICY_LOSS}._target_", "")).startswith("verl_sat.")
            or self.our_sampler
        )

    def has(self, key: str) -> bool:
        """Whether the key is there, whatever its value (a group that sets nothing is still a group)."""
        parent, _, name = key.rpartition(".")
        node = self.config if not parent else self.get(parent)
        return isinstance(node, DictConfig) and name in node.keys()

    @property
    def bypass(self) -> bool:
        return bool(self.get(BYPASS, False))

    @property
    def kernel(self) -> Any:
        return self.get(f"{SAT_BLOCK}.kernel", "hill")

    @property
    def contracts(self) -> bool:
        """False for an advantage clip on a plain loss (``kernel=none`` or ``quantile=1``): nothing is gated."""
        return self.kernel != "none" and self.get(f"{SAT_BLOCK}.quantile", 0.9) != 1

    @property
    def is_async(self) -> bool:
        if self.trainer == "v1":
            return "async" in self.mode
        return self.trainer in ("fully_async", "one_step_off")

    @property
    def sync_step(self) -> int:
        """K: optimizer updates (mini-batches) per weight transfer."""
        if self.trainer == "fully_async":
            return int(self.get("async_training.trigger_parameter_sync_step", 1))
        if self.trainer == "v1":
            return int(self.get(f"trainer.v1.{self.mode}.parameter_sync_step", 1))
        return 1

    @property
    def warmup_batches(self) -> float:
        """W: batches in flight before training starts."""
        return float(self.get(f"trainer.v1.{self.mode}.num_warmup_batches", 0) or 0)

    @property
    def updates_per_old_log_prob(self) -> int | None:
        """Decoupled mode: optimizer updates that share one policy as pi_old. With 1, the ratio is always 1."""
        mini = self.get("actor_rollout_ref.actor.ppo_mini_batch_size")
        epochs = int(self.get("actor_rollout_ref.actor.ppo_epochs", 1))
        if self.trainer == "fully_async":
            return int(self.get("async_training.require_batches", 1)) * epochs * self.sync_step
        batch = self.get("data.train_batch_size")
        if not mini or not batch:
            return None
        updates = max(1, int(batch) // self.sync_step // int(mini)) * epochs
        # Only separate_async keeps the weights of the cycle's first sub-step for the later ones
        # (trainer_separate_async.py, _compute_old_log_prob); the others take the current weights each time.
        return updates * self.sync_step if self.mode == "separate_async" and self.trainer == "v1" else updates

    @property
    def our_sampler(self) -> bool:
        path = str(self.get(f"{SAMPLER}.custom_sampler.path") or "")
        return "verl_sat" in path or self.get(f"{SAMPLER}.custom_sampler.name") == "ExactLagReplayBuffer"


def _select(config: DictConfig, key: str, default: Any = None) -> Any:
    try:
        value = OmegaConf.select(config, key, default=default)
    except Exception:  # missing mandatory values and interpolations that point nowhere are "not set" here
        return default
    return default if value is None else value


def _as_override(value: Any) -> str:
    return "null" if value is None else str(value)


def _looks_like_ours(loss_mode: str) -> bool:
    folded = loss_mode.lower().replace("-", "_")
    return folded not in LOSSES and bool(difflib.get_close_matches(folded, LOSSES, cutoff=0.8))


def describe(job: _Job | Any) -> str:
    """One line that says which loss runs against which denominator at which lag.

    Args:
        job: a configuration as for `check`.
    """
    job = job if isinstance(job, _Job) else _Job.read(job)
    denominator = "the rollout engine's (bypass)" if job.bypass else "recomputed by the trainer (decoupled)"
    text = f"loss {job.loss_mode}, kernel {job.kernel}, old_log_prob {denominator}"
    if job.trainer == "v1" and job.is_async:
        k, w = job.sync_step, job.warmup_batches
        versions = f"{w:g} version" + ("" if w == 1 else "s")
        updates = f"{w * k:g}" if k == 1 else f"{w * k:g} to {w * k + k - 1:g}"
        text += f", {job.mode}: typical lag {versions}, {updates} optimizer updates"
    return text


# --- rules -------------------------------------------------------------------------------------------------------

_MISPLACED_BLOCKS = {
    "actor_rollout_ref.sat": SAT_BLOCK,
    "actor_rollout_ref.actor.sat": SAT_BLOCK,
    "algorithm.sat": SAT_BLOCK,
}


def _plugin_is_loaded(job: _Job) -> Iterator[Finding]:
    if job.sat:
        for failure in _compat.FAILURES:
            yield Finding("error", LOSS_MODE, f"verl-sat could not be loaded: {failure}")


def _plugin_reaches_the_workers(job: _Job) -> Iterator[Finding]:
    """verl does not forward VERL_USE_EXTERNAL_MODULES to Ray (`verl/trainer/constants_ppo.py`), so a worker of another
    raylet finds us by the entry point or not at all."""
    if not job.sat or _entry_point_is_used():
        return
    env = "ray_kwargs.ray_init.runtime_env.env_vars"
    if "verl_sat" in str(job.get(f"{env}.VERL_USE_EXTERNAL_MODULES", "")):
        return
    elsewhere = (
        int(job.get("trainer.nnodes", 1)) > 1 or job.get("ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
    )
    yield Finding(
        "error" if elsewhere else "warning",
        LOSS_MODE,
        f"verl finds verl-sat in this process only: its entry point is not used here, and Ray workers started by "
        f"another raylet would report loss_mode={job.loss_mode} as unsupported. Install verl-sat on every node and "
        f"leave VERL_USE_EXTERNAL_PLUGINS at auto, or pass the module on",
        f"+{env}.VERL_USE_EXTERNAL_MODULES=verl_sat.plugin",
    )


def _entry_point_is_used() -> bool:
    from importlib.metadata import entry_points

    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    names = {entry.name for entry in entry_points(group="verl.plugins") if entry.value.startswith("verl_sat")}
    if policy == "auto":
        return bool(names)
    return bool(names & {name.strip() for name in policy.split(",")})


def _loss_name(job: _Job) -> Iterator[Finding]:
    if job.loss_mode in LOSSES or not (job.sat or _looks_like_ours(job.loss_mode)):
        return
    guess = difflib.get_close_matches(job.loss_mode.lower().replace("-", "_"), LOSSES, n=1, cutoff=0.0)[0]
    yield Finding(
        "error",
        LOSS_MODE,
        f"there is no loss {job.loss_mode!r}; did you mean {guess!r}? (verl-sat has {', '.join(LOSSES)})",
        f"{LOSS_MODE}={guess}",
    )


def _groups_in_the_wrong_place(job: _Job) -> Iterator[Finding]:
    for name in ("sat", "r3"):
        if job.has(name):
            yield Finding(
                "error",
                name,
                "a config group landed at the top level, where verl does not read it and the job stays as it was. "
                "The groups of verl_sat.conf set keys of verl: select one with hydra.searchpath=[pkg://verl_sat.conf] "
                f"+{name}=..., and begin a group of your own with '# @package _global_'",
            )
    for key, right in _MISPLACED_BLOCKS.items():
        if job.has(key):
            block = job.get(key)
            options = block.items() if isinstance(block, DictConfig) else ()
            yield Finding(
                "error",
                key,
                f"verl does not read it there; the block belongs at {right}",
                " ".join(f"+{right}.{name}={_as_override(value)}" for name, value in options),
            )
    if job.sat or str(job.get(f"{POLICY_LOSS}._target_", "")).startswith("verl_sat."):
        for name in _OPTION_NAMES:
            if job.has(f"{POLICY_LOSS}.{name}"):
                value = job.get(f"{POLICY_LOSS}.{name}")
                yield Finding(
                    "error",
                    f"{POLICY_LOSS}.{name}",
                    "an option of SAT one level too high",
                    f"+{SAT_BLOCK}.{name}={_as_override(value)}",
                )


def _sat_block(job: _Job) -> Iterator[Finding]:
    target = job.get(f"{POLICY_LOSS}._target_")
    block = job.get(SAT_BLOCK)
    if block is None and not (target == SAT_TARGET and not job.has(SAT_BLOCK)):
        return
    if not (job.sat or _looks_like_ours(job.loss_mode)):
        yield Finding(
            "error",
            LOSS_MODE,
            f"loss_mode={job.loss_mode or 'null'} does not read the block {SAT_BLOCK}, so it would be lost",
            f"{LOSS_MODE}=sat_grpo (or sat_gspo), or {SAT_BLOCK}=null",
        )
    if block is not None and target in _STOCK_TARGETS:
        yield Finding(
            "error",
            f"{POLICY_LOSS}._target_",
            "verl's own PolicyLossConfig does not know the block `sat`: every worker would stop with a TypeError. Use "
            "the config group, hydra.searchpath=[pkg://verl_sat.conf] +sat=grpo (or gspo), or name the class",
            f"{POLICY_LOSS}._target_={SAT_TARGET}",
        )
    yield from _sat_values(block)


def _sat_values(block: Any) -> Iterator[Finding]:
    """One finding per wrong option; `verl_sat.config` stops at the first, so it is asked about one at a time."""
    from verl_sat.config import SATConfig, SATConfigError, validate_sat_block

    if block is None:
        return
    raw = OmegaConf.to_container(block, resolve=True) if OmegaConf.is_config(block) else block
    for part in [{name: value} for name, value in raw.items()] if isinstance(raw, Mapping) else [raw]:
        try:
            validate_sat_block(part, prefix=SAT_BLOCK)
        except SATConfigError as error:
            name = next(iter(part)) if isinstance(part, Mapping) else None
            key = SAT_BLOCK if name is None else f"{SAT_BLOCK}.{name}"
            message = str(error).removeprefix(key).lstrip("=: ").rstrip(".")
            default = SATConfig.__dataclass_fields__.get(name)
            yield Finding("error", key, message, f"{key}={_as_override(default.default)}" if default else "")


def _lost_in_legacy_bypass(job: _Job) -> Iterator[Finding]:
    if job.sat and job.bypass and job.trainer != "v1":
        yield lost_to_bypass_rewrite(job.loss_mode, job.trainer)


def _log_probs_are_there(job: _Job) -> Iterator[Finding]:
    if not job.sat or job.get(CALCULATE_LOG_PROBS, True):
        return
    if job.bypass:
        yield Finding(
            "error",
            CALCULATE_LOG_PROBS,
            "in bypass mode the rollout engine's log-probs are the denominator of the ratio, and it does not return "
            "them",
            f"{CALCULATE_LOG_PROBS}=True",
        )
        return
    for key in ("rollout_is", "rollout_rs"):
        if job.get(f"{CORRECTION}.{key}"):
            yield Finding(
                "error",
                CALCULATE_LOG_PROBS,
                f"{CORRECTION}.{key} needs the rollout engine's log-probs; without them verl skips the correction in "
                "silence",
                f"{CALCULATE_LOG_PROBS}=True",
            )


def _both_corrections(job: _Job) -> Iterator[Finding]:
    if not (job.sat and job.bypass):
        return
    for key in ("rollout_is", "rollout_rs"):
        value = job.get(f"{CORRECTION}.{key}")
        if value:
            yield Finding(
                "error",
                f"{CORRECTION}.{key}",
                f"{value!r} together with bypass_mode=True: the ratio against the rollout engine already holds the "
                f"correction, and the V1 trainer ignores {key} in bypass mode. Take one of them: this, or decoupled "
                f"mode ({BYPASS}=False) with {key}",
                f"{CORRECTION}.{key}=null",
            )


def _ratio_is_always_one(job: _Job) -> Iterator[Finding]:
    if not job.sat or job.bypass or job.updates_per_old_log_prob != 1:
        return
    what = (
        "pi_old is recomputed with the current weights before every update, so every ratio is 1 up to rounding: "
        "staleness is invisible"
    )
    if not job.contracts:
        if job.is_async:
            yield Finding("warning", BYPASS, f"{what} and nothing is ever clipped", _bypass_remedy(job))
        return
    what += " and SAT would gate numerical noise"
    yield Finding("error" if job.is_async else "warning", BYPASS, what, _bypass_remedy(job))


def _bypass_remedy(job: _Job) -> str:
    v1 = f"{SEPARATE_ASYNC} {BYPASS}=True"
    if job.trainer == "fully_async":
        return f"async_training.trigger_parameter_sync_step=4 (or more), or run verl.trainer.main_ppo with {v1}"
    if job.trainer == "one_step_off":
        return f"these for verl.trainer.main_ppo: {v1}"
    if job.trainer == "v1":
        return f"{BYPASS}=True"
    return f"trainer.use_v1=True {BYPASS}=True"


def _decoupled_sees_half(job: _Job) -> Iterator[Finding]:
    if job.sat and job.contracts and job.is_async and not job.bypass and job.updates_per_old_log_prob != 1:
        weights = "importance weights correct for it, but the trust region does not see it"
        if not job.get(f"{CORRECTION}.rollout_is"):
            weights = "nothing corrects for it"
        yield Finding(
            "warning",
            BYPASS,
            "an asynchronous job in decoupled mode: d is the policy update since pi_old only; the lag before that and "
            f"the mismatch of engine and routing are not in it ({weights})",
            f"{BYPASS}=True",
        )


def _needless_snapshot(job: _Job) -> Iterator[Finding]:
    separate = job.trainer == "v1" and job.mode == "separate_async"
    if job.sat and separate and not job.bypass and job.sync_step == 1 and job.updates_per_old_log_prob != 1:
        yield Finding(
            "warning",
            "trainer.v1.separate_async.parameter_sync_step",
            "in decoupled mode verl copies all weights to the CPU in every step; with parameter_sync_step=1 the copy "
            "is never used",
            f"{BYPASS}=True",
        )


def _sampler_loses_settings(job: _Job) -> Iterator[Finding]:
    path, name = (job.get(f"{SAMPLER}.custom_sampler.{key}") for key in ("path", "name"))
    if job.our_sampler and not (path and name):
        yield Finding(
            "error",
            f"{SAMPLER}.custom_sampler.{'name' if path else 'path'}",
            "verl uses a custom sampler only if both path and name are set, and its own one otherwise",
            f"{SAMPLER}.custom_sampler.path=pkg://verl_sat.sampler {SAMPLER}.custom_sampler.name=ExactLagReplayBuffer",
        )
    if not (path and name) or not (job.sat or job.our_sampler):
        return
    for key in ("algorithm.filter_groups.enable", f"{SAMPLER}.sync_refill_failed_groups"):
        if job.get(key):
            yield Finding(
                "error",
                key,
                f"verl hands this setting to its own sampler only; with the custom sampler {name} it is lost in "
                "silence",
                f"{key}=False",
            )
    if job.our_sampler and job.trainer == "v1" and job.mode == "sync":
        yield Finding(
            "error",
            f"{SAMPLER}.custom_sampler.name",
            "the exact-lag sampler is for the asynchronous trainers; in a synchronous one the lag is 0 anyway",
            f"{SAMPLER}.custom_sampler.path=null {SAMPLER}.custom_sampler.name=null",
        )


def _lag_is_capped(job: _Job) -> Iterator[Finding]:
    key = f"{SAMPLER}.max_off_policy_threshold"
    threshold = job.get(key)
    if job.trainer != "v1" or not job.is_async or threshold is None or job.warmup_batches < threshold:
        return
    if job.our_sampler:
        yield Finding(
            "error",
            key,
            f"{threshold} evicts or blocks the samples of lag {job.warmup_batches:g} that the exact-lag sampler is "
            "to hand out",
            f"{key}=null",
        )
    elif job.get(f"{SAMPLER}.max_off_policy_strategy", "drop") == "drop":
        yield Finding(
            "warning",
            key,
            f"with num_warmup_batches={job.warmup_batches:g} samples are {job.warmup_batches:g} versions old, but verl "
            f"drops them from {threshold} on: the lag stays below {threshold} and work is thrown away",
            f"{key}=null",
        )


def _rollout_log_probs_are_biased(job: _Job) -> Iterator[Finding]:
    """Bypass mode: log mu has to be the log-softmax of logits / temperature over the whole vocabulary, which is what
    the trainer computes for log pi (verl's engines divide the logits by ``rollout.temperature``)."""
    if not (job.sat and job.bypass):
        return
    rollout = "actor_rollout_ref.rollout"
    top_p, top_k = float(job.get(f"{rollout}.top_p", 1.0)), int(job.get(f"{rollout}.top_k", -1))
    cut = (
        "the engine samples from a cut distribution, the trainer's log-probs are over the whole vocabulary: where the "
        "engine's are renormalised (vLLM's processed_logprobs), every ratio carries an offset that looks like staleness"
    )
    if top_p < 1:
        yield Finding("warning", f"{rollout}.top_p", f"{top_p:g}: {cut}", f"{rollout}.top_p=1.0")
    if top_k > 0:
        yield Finding("warning", f"{rollout}.top_k", f"{top_k}: {cut}", f"{rollout}.top_k=-1")
    yield from _temperature_parity(job, rollout)


def _temperature_parity(job: _Job, rollout: str) -> Iterator[Finding]:
    engine = str(job.get(f"{rollout}.name", ""))
    temperature = float(job.get(f"{rollout}.temperature", 1.0))
    offset = f"without the temperature {temperature:g}, which the trainer applies: every ratio carries an offset"
    if engine == "vllm":
        # engine_kwargs come last in vllm_async_server.py, so they win.
        key = f"{rollout}.engine_kwargs.vllm.logprobs_mode"
        if job.get(key) is None:
            key = f"{rollout}.logprobs_mode"
        mode = str(job.get(key, "processed_logprobs"))
        if mode.endswith("_logits"):
            yield Finding("warning", key, f"{mode}: logits, not log-probs", f"{key}=processed_logprobs")
        elif mode == "raw_logprobs" and temperature != 1:
            yield Finding("warning", key, f"raw_logprobs are taken {offset}", f"{key}=processed_logprobs")
    elif engine == "sglang" and temperature != 1:
        for name in ("SGLANG_RETURN_ORIGINAL_LOGPROB", "RETURN_ORIGINAL_LOGPROB"):
            value = job.get(f"ray_kwargs.ray_init.runtime_env.env_vars.{name}", os.environ.get(name, ""))
            if str(value).strip().lower() in ("1", "true", "yes", "y"):
                yield Finding(
                    "warning",
                    f"{rollout}.temperature",
                    f"{name} makes SGLang return log-probs {offset}",
                    f"{rollout}.temperature=1.0, or unset {name}",
                )
    elif engine == "trtllm" and temperature != 1:
        yield Finding(
            "warning",
            f"{rollout}.temperature",
            f"{temperature:g}: verl does not ask TensorRT-LLM for log-probs of the scaled logits, which is what the "
            "trainer computes; whether it returns them depends on its version",
            f"{rollout}.temperature=1.0",
        )


def _gspo_radii(job: _Job) -> Iterator[Finding]:
    if job.loss_mode != "sat_gspo" or not job.contracts:
        return
    actor = "actor_rollout_ref.actor"
    radii = {
        f"{actor}.{side}": float(job.get(f"{actor}.{side}", job.get(f"{actor}.clip_ratio", 0.2)))
        for side in ("clip_ratio_low", "clip_ratio_high")
    }
    small = [key for key, radius in radii.items() if radius < _RADIUS_FLOOR]
    if small:
        values = ", ".join(f"{key.rpartition('.')[2]}={radii[key]:g}" for key in small)
        yield Finding(
            "warning",
            small[0],
            f"{values}: almost any quantile is beyond such a radius, so the contraction is inert and this is plain "
            "GSPO. The radii that plain GSPO wants do not carry over",
            " ".join(f"{key}=0.2" for key in small),
        )


def _gspo_aggregation(job: _Job) -> Iterator[Finding]:
    key = "actor_rollout_ref.actor.loss_agg_mode"
    mode = job.get(key, "token-mean")
    if job.loss_mode == "sat_gspo" and mode != "seq-mean-token-mean":
        yield Finding(
            "warning",
            key,
            f"{mode} does not weigh responses equally, as GSPO means to; it is used as set",
            f"{key}=seq-mean-token-mean",
        )


def _aggregation_by_padding(job: _Job) -> Iterator[Finding]:
    actor = "actor_rollout_ref.actor"
    mode, factor = job.get(f"{actor}.loss_agg_mode"), job.get(f"{actor}.loss_scale_factor")
    if job.sat and mode == "seq-mean-token-sum-norm" and factor is None:
        length = job.get("data.max_response_length", 512)
        yield Finding(
            "warning",
            f"{actor}.loss_scale_factor",
            "unset, seq-mean-token-sum-norm divides by the padded width of each micro-batch: the loss depends on "
            "padding",
            f"{actor}.loss_scale_factor={length}",
        )


_RULES: tuple[Callable[[_Job], Iterator[Finding]], ...] = (
    _plugin_is_loaded,
    _plugin_reaches_the_workers,
    _loss_name,
    _groups_in_the_wrong_place,
    _sat_block,
    _lost_in_legacy_bypass,
    _log_probs_are_there,
    _both_corrections,
    _ratio_is_always_one,
    _decoupled_sees_half,
    _needless_snapshot,
    _sampler_loses_settings,
    _lag_is_capped,
    _rollout_log_probs_are_biased,
    _gspo_radii,
    _gspo_aggregation,
    _aggregation_by_padding,
)
