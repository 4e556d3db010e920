"""The rules of the preflight: each looks at a job and yields what is wrong with it.

`verl_sat.preflight` runs them. A rule never raises on purpose; one that does is logged and skipped.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from omegaconf import OmegaConf

from verl_sat import _compat
from verl_sat.preflight_job import (
    BYPASS,
    CALCULATE_LOG_PROBS,
    CORRECTION,
    LOSS_MODE,
    LOSSES,
    OPTION_NAMES,
    POLICY_LOSS,
    SAMPLER,
    SAT_BLOCK,
    SAT_TARGET,
    SEPARATE_ASYNC,
    Finding,
    Job,
    as_override,
    looks_like_ours,
)
from verl_sat.preflight_scope import SCOPE_RULES

_STOCK_TARGETS = (
    None,
    "verl.workers.config.PolicyLossConfig",
    "verl.workers.config.actor.PolicyLossConfig",
)
_RADIUS_FLOOR = 1e-3


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


def _plugin_is_loaded(job: Job) -> Iterator[Finding]:
    if job.sat:
        for failure in _compat.FAILURES:
            yield Finding("error", LOSS_MODE, f"verl-sat could not be loaded: {failure}")


def _plugin_reaches_the_workers(job: Job) -> Iterator[Finding]:
    missing = plugin_missing_elsewhere(job) if job.sat else None
    if missing is not None:
        level, remedy = missing
        yield Finding(
            level,
            LOSS_MODE,
            f"verl finds verl-sat in this process only: its entry point is not used here, and Ray workers started by "
            f"another raylet would report loss_mode={job.loss_mode} as unsupported. Install verl-sat on every node and "
            f"leave VERL_USE_EXTERNAL_PLUGINS at auto, or pass the module on",
            remedy,
        )


def plugin_missing_elsewhere(job: Job) -> tuple[Literal["error", "warning"], str] | None:
    """Whether workers of another raylet would run without this plugin: how bad that is, and the override against it.

    verl does not forward VERL_USE_EXTERNAL_MODULES to Ray (`verl/trainer/constants_ppo.py`), so such a worker finds us
    by the entry point or not at all.
    """
    env = "ray_kwargs.ray_init.runtime_env.env_vars"
    if _entry_point_is_used() or "verl_sat" in str(job.get(f"{env}.VERL_USE_EXTERNAL_MODULES", "")):
        return None
    elsewhere = (
        int(job.get("trainer.nnodes", 1)) > 1 or job.get("ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
    )
    return "error" if elsewhere else "warning", f"+{env}.VERL_USE_EXTERNAL_MODULES=verl_sat.plugin"


def _entry_point_is_used() -> bool:
    from importlib.metadata import entry_points

    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    names = {entry.name for entry in entry_points(group="verl.plugins") if entry.value.startswith("verl_sat")}
    if policy == "auto":
        return bool(names)
    return bool(names & {name.strip() for name in policy.split(",")})


def _loss_name(job: Job) -> Iterator[Finding]:
    if job.loss_mode in LOSSES or not (job.sat or looks_like_ours(job.loss_mode)):
        return
    guess = difflib.get_close_matches(job.loss_mode.lower().replace("-", "_"), LOSSES, n=1, cutoff=0.0)[0]
    yield Finding(
        "error",
        LOSS_MODE,
        f"there is no loss {job.loss_mode!r}; did you mean {guess!r}? (verl-sat has {', '.join(LOSSES)})",
        f"{LOSS_MODE}={guess}",
    )


def _groups_in_the_wrong_place(job: Job) -> Iterator[Finding]:
    for name in ("sat", "r3"):
        if job.has(name):
            yield Finding(
                "error",
                name,
                "a config group landed at the top level, where verl does not read it and the job stays as it was. "
                "The groups of verl_sat.conf set keys of verl: select one with hydra.searchpath=[pkg://verl_sat.conf] "
                f"+{name}=..., and begin a group of your own with '# @package _global_'",
            )
    for key, value in job.misplaced.items():
        right = SAT_BLOCK if isinstance(value, Mapping) else LOSS_MODE
        options = {f"+{right}.{n}": v for n, v in value.items()} if isinstance(value, Mapping) else {right: value}
        yield Finding(
            "error",
            key,
            f"verl does not read it there; it belongs at {right}",
            " ".join(f"{name}={as_override(option)}" for name, option in options.items()),
        )
    if job.sat or str(job.get(f"{POLICY_LOSS}._target_", "")).startswith("verl_sat."):
        for name in OPTION_NAMES:
            if job.has(f"{POLICY_LOSS}.{name}"):
                value = job.get(f"{POLICY_LOSS}.{name}")
                yield Finding(
                    "error",
                    f"{POLICY_LOSS}.{name}",
                    "an option of SAT one level too high",
                    f"+{SAT_BLOCK}.{name}={as_override(value)}",
                )


def _sat_block(job: Job) -> Iterator[Finding]:
    target = job.get(f"{POLICY_LOSS}._target_")
    block = job.get(SAT_BLOCK)
    if block is None and not (target == SAT_TARGET and not job.has(SAT_BLOCK)):
        return
    if not (job.sat or looks_like_ours(job.loss_mode)):
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
            yield Finding("error", key, message, f"{key}={as_override(default.default)}" if default else "")


def _lost_in_legacy_bypass(job: Job) -> Iterator[Finding]:
    if job.sat and job.bypass and job.trainer != "v1":
        yield lost_to_bypass_rewrite(job.loss_mode, job.trainer)


def _log_probs_are_there(job: Job) -> Iterator[Finding]:
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


def _both_corrections(job: Job) -> Iterator[Finding]:
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


def _ratio_is_always_one(job: Job) -> Iterator[Finding]:
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


def _bypass_remedy(job: Job) -> str:
    v1 = f"{SEPARATE_ASYNC} {BYPASS}=True"
    if job.trainer == "fully_async":
        return f"async_training.trigger_parameter_sync_step=4 (or more), or run verl.trainer.main_ppo with {v1}"
    if job.trainer == "one_step_off":
        return f"these for verl.trainer.main_ppo: {v1}"
    if job.trainer == "v1":
        return f"{BYPASS}=True"
    return f"trainer.use_v1=True {BYPASS}=True"


def _decoupled_sees_half(job: Job) -> Iterator[Finding]:
    if job.sat and job.contracts and job.is_async and not job.bypass and job.updates_per_old_log_prob != 1:
        weights = "importance weights correct for it, but the trust region does not see it"
        if not job.get(f"{CORRECTION}.rollout_is"):
            weights = "nothing corrects for it"
        yield Finding(
            "warning",
            BYPASS,
            "an asynchronous job in decoupled mode: d is the policy update since pi_old only; the lag before that and "
            f"the mismatch of engine and routing are not in it ({weights})",
            # Elsewhere bypass mode would be refused: the trainer has to change with it.
            f"{BYPASS}=True"
            if job.trainer == "v1"
            else f"these for verl.trainer.main_ppo: {SEPARATE_ASYNC} {BYPASS}=True",
        )


def _needless_snapshot(job: Job) -> Iterator[Finding]:
    separate = job.trainer == "v1" and job.mode == "separate_async"
    if job.sat and separate and not job.bypass and job.sync_step == 1 and job.updates_per_old_log_prob != 1:
        yield Finding(
            "warning",
            "trainer.v1.separate_async.parameter_sync_step",
            "in decoupled mode verl copies all weights to the CPU in every step; with parameter_sync_step=1 the copy "
            "is never used",
            f"{BYPASS}=True",
        )


def _sampler_loses_settings(job: Job) -> Iterator[Finding]:
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
    key = f"trainer.v1.{job.mode}.hybrid_rollout.enable_switch"
    if job.our_sampler and job.trainer == "v1" and job.get(key, False):
        yield Finding(
            "error",
            key,
            "it lends the trainer's GPUs to generation while a step waits for samples; the exact-lag sampler waits "
            "before the weight transfer, where nothing is lent, and refuses it",
            f"{key}=False",
        )
    if job.our_sampler and job.trainer == "v1" and job.mode == "sync":
        yield Finding(
            "error",
            f"{SAMPLER}.custom_sampler.name",
            "the exact-lag sampler is for the asynchronous trainers; in a synchronous one the lag is 0 anyway",
            f"{SAMPLER}.custom_sampler.path=null {SAMPLER}.custom_sampler.name=null",
        )


def _lag_is_capped(job: Job) -> Iterator[Finding]:
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


def _rollout_log_probs_are_biased(job: Job) -> Iterator[Finding]:
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


def _temperature_parity(job: Job, rollout: str) -> Iterator[Finding]:
    engine = str(job.get(f"{rollout}.name", ""))
    temperature = float(job.get(f"{rollout}.temperature", 1.0))
    offset = f"without the temperature {temperature:g}, which the trainer applies: every ratio carries an offset"
    if engine in ("vllm", "hf"):
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


def _distillation_drops_the_loss(job: Job) -> Iterator[Finding]:
    """Without task rewards the policy loss is not part of the loss (`verl/trainer/distillation/losses.py`)."""
    key = "distillation.distillation_loss.use_task_rewards"
    if job.sat and job.get("distillation.enabled", False) and job.get(key, True) is False:
        yield Finding(
            "error",
            key,
            f"with distillation and without task rewards verl drops the policy loss, so {job.loss_mode} has no effect",
            f"{key}=True",
        )


def _clip_ratios_are_numbers(job: Job) -> Iterator[Finding]:
    """What the loss would refuse in a worker, after a whole rollout."""
    if not job.sat:
        return
    actor = "actor_rollout_ref.actor"
    checks = [("clip_ratio_low", 0.0, ">= 0", 0.2), ("clip_ratio_high", 0.0, ">= 0", 0.2)]
    if job.loss_mode == "sat_grpo":
        checks.append(("clip_ratio_c", 1.0, "> 1", 3.0))
    for name, bound, allowed, default in checks:
        value = job.get(f"{actor}.{name}", job.get(f"{actor}.clip_ratio", 0.2) if bound == 0 else None)
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < bound or (bound and value == bound):
            yield Finding(
                "error",
                f"{actor}.{name}",
                f"{value!r} is not allowed: expected a finite number {allowed}",
                f"{actor}.{name}={default}",
            )


def _gate_never_acts(job: Job) -> Iterator[Finding]:
    """A fixed gate level can make every call inert, or shut the gate."""
    if not (job.sat and job.contracts):
        return
    q, floor = job.get(f"{SAT_BLOCK}.q"), job.get(f"{SAT_BLOCK}.q_min", 0.0)
    if any(not isinstance(x, int | float) for x in (floor, 0 if q is None else q)):
        return  # another rule's finding
    if q == 0 and floor == 0:
        yield Finding(
            "warning", f"{SAT_BLOCK}.q", "0 shuts the gate: nothing is ever stale and this is the plain loss",
            f"{SAT_BLOCK}.q=null",
        )  # fmt: skip
        return
    level = max(q or 0.0, floor)
    low, high = (job.get(f"actor_rollout_ref.actor.clip_ratio_{side}", 0.2) for side in ("low", "high"))
    if not all(isinstance(x, int | float) and 0 <= x < 1 for x in (low, high)):
        return
    if level >= -math.log1p(-low) and level >= math.log1p(high):
        key = f"{SAT_BLOCK}.{'q' if q is not None and q >= floor else 'q_min'}"
        yield Finding(
            "warning",
            key,
            f"{level:g} is beyond both nominal log-radii ({-math.log1p(-low):.3f} and {math.log1p(high):.3f}): SAT is "
            "inert in every call and this is the plain loss",
            f"{key}={'null' if key.endswith('.q') else '0.0'}",
        )


def _gspo_radii(job: Job) -> Iterator[Finding]:
    if job.loss_mode != "sat_gspo" or not job.contracts:
        return
    actor = "actor_rollout_ref.actor"
    radii = {
        f"{actor}.{side}": float(job.get(f"{actor}.{side}", job.get(f"{actor}.clip_ratio", 0.2)))
        for side in ("clip_ratio_low", "clip_ratio_high")
    }
    small = [key for key, radius in radii.items() if 0 <= radius < _RADIUS_FLOOR]
    if small:
        values = ", ".join(f"{key.rpartition('.')[2]}={radii[key]:g}" for key in small)
        yield Finding(
            "warning",
            small[0],
            f"{values}: almost any quantile is beyond such a radius, so the contraction is inert and this is plain "
            "GSPO. The radii that plain GSPO wants do not carry over",
            " ".join(f"{key}=0.2" for key in small),
        )


def _gspo_aggregation(job: Job) -> Iterator[Finding]:
    key = "actor_rollout_ref.actor.loss_agg_mode"
    mode = job.get(key, "token-mean")
    if job.loss_mode == "sat_gspo" and mode != "seq-mean-token-mean":
        yield Finding(
            "warning",
            key,
            f"{mode} does not weigh responses equally, as GSPO means to; it is used as set",
            f"{key}=seq-mean-token-mean",
        )


def _aggregation_by_padding(job: Job) -> Iterator[Finding]:
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


RULES: tuple[Callable[[Job], Iterator[Finding]], ...] = (
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
    _distillation_drops_the_loss,
    _clip_ratios_are_numbers,
    _gate_never_acts,
    _gspo_radii,
    _gspo_aggregation,
    _aggregation_by_padding,
    *SCOPE_RULES,
)
