"""The preflight's rules about R3, the replay of the rollout's routes: the keys, the model, both engines.

verl notices a wrong combination late (a worker's exception after the model is loaded), or not at all: FSDP accepts
``router_replay.mode=R3`` and ignores it, Megatron replays rows that nobody recorded as expert 0. Everything that the
configuration tells of it is found here. Jobs that ask for no replay are left alone, whatever else they do
(:func:`asks_for_replay`).

"verl" below is 0.9.1; numbers of issues are those of the project named before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from verl_sat import _compat
from verl_sat.preflight_job import BYPASS, Finding, Job
from verl_sat.preflight_r3_job import (
    ROLLOUT,
    VERLS_OWN,
    asks_for_replay,
    describe_replay,
    group_of,
    is_actors,
    model_config,
    on_fsdp,
    override,
    own_key,
    own_mode,
    replay_modes,
    replays,
)
from verl_sat.preflight_r3_megatron import MEGATRON_RULES
from verl_sat.preflight_r3_rollout import ROLLOUT_RULES
from verl_sat.preflight_rules import plugin_missing_elsewhere
from verl_sat.preflight_scope import ACTOR, STRATEGY, sees_mini_batch
from verl_sat.router_replay.client import FLAG_KEY, OUR_STRATEGIES
from verl_sat.router_replay.layout import MoELayout, NotMoEError

__all__ = ["R3_RULES", "asks_for_replay", "describe_replay"]

LOAD_METRICS = f"{ROLLOUT}.moe_load_balance_metrics_interval"
LOOK_ALIKE = f"{ACTOR}.router_replay.mode"
MODES = ("disabled", "R2", "R3")
REFUSED_MODELS = {
    "doge": "an expert is a pair of keys, each chosen by a top-k of its own",
    "ernie4_5_vl_moe": "its layers have a router for text and one for images",
    "jetmoe": "its layers have a router in the attention and one in the feed-forward part",
    "phimoe": "its router takes one expert after the other instead of a top-k",
}
"""Model types with experts whose choice the hook cannot force; it refuses them by name when the model is built."""


# --- the two keys -------------------------------------------------------------------------------------------------


def _mode_exists(job: Job) -> Iterator[Finding]:
    """verl checks it where its dataclass is built, without the key; on FSDP, which names no dataclass, never."""
    for key, mode in replay_modes(job).items():
        if not key.endswith(".mode"):
            yield Finding("error", key, f"{mode!r}: this is a block, with the key `mode`", f"{key}={{mode:{mode}}}")
        elif mode is not None and mode not in MODES:
            close = [known for known in MODES if known.lower() == str(mode).lower()]
            wanted = close[0] if close else ("R3" if key == own_key(job) else "disabled")
            allowed = [known for known in MODES if known != "R2" or job.get(STRATEGY) in VERLS_OWN]
            yield Finding(
                "error",
                key,
                f"{mode!r} is no mode: expected {' or '.join(allowed)} as spelt here (R3 with {FLAG_KEY}=True)",
                f"{key}={wanted}",
            )


def _mode_is_read(job: Job) -> Iterator[Finding]:
    """A mode in a block that the actor's engine does not read."""
    own = own_key(job)
    for key, mode in replay_modes(job).items():
        if key == own or not key.endswith(".mode") or mode not in ("R2", "R3"):
            continue
        if is_actors(key):
            what = (
                "looks like the key of the mode, but is none of verl's: its workers would stop with a TypeError"
                if key == LOOK_ALIKE
                else f"the actor runs strategy {job.get(STRATEGY)}, which does not read this block"
            )
            yield Finding(
                "error",
                key,
                f"{mode}: {what}. The engine reads {own}{group_of(job)}",
                f"{override(job, own, mode)} in its place",
            )
        else:
            yield Finding(
                "warning" if replays(job) else "error",
                key,
                f"{mode} has no effect here: only the actor replays, by {own}; all others route natively",
                f"{key}=disabled" if replays(job) else f"{key}=disabled {override(job, own, mode)}",
            )


def _look_alike_contradicts(job: Job) -> Iterator[Finding]:
    if own_mode(job) != "disabled" and replay_modes(job).get(LOOK_ALIKE) == "disabled":
        yield Finding(
            "error",
            LOOK_ALIKE,
            f"disabled, while {own_key(job)}={own_mode(job)}: it looks like the mode's key, but is none of verl's, "
            "whose workers would stop with a TypeError",
            f"~{LOOK_ALIKE.removesuffix('.mode')}",
        )


def _both_keys(job: Job) -> Iterator[Finding]:
    """C05: the mode without the routes, or the routes without the mode."""
    own, flag = own_key(job), bool(job.get(FLAG_KEY, False))
    if replays(job) and not flag:
        yield Finding(
            "error",
            FLAG_KEY,
            f"{own}=R3 replays what the rollout engine recorded, and with {FLAG_KEY}=False it records nothing"
            f"{group_of(job)}",
            f"{FLAG_KEY}=True, or {own}=disabled",
        )
    misplaced = any(mode in ("R2", "R3") and is_actors(key) for key, mode in replay_modes(job).items())
    if not flag or own_mode(job) not in (None, "disabled") or misplaced:
        return
    wasted = (
        f"the rollout engine records routes and every batch carries them, but nothing replays them: {own} is "
        f"disabled{group_of(job)}"
    )
    if int(job.get(LOAD_METRICS, 0) or 0) > 0:
        yield Finding("warning", FLAG_KEY, f"{wasted}. They only feed verl's rollout/moe/* metrics ({LOAD_METRICS})")
    else:
        yield Finding("error", FLAG_KEY, wasted, f"{override(job, own, 'R3')}, or {FLAG_KEY}=False")


def _r2(job: Job) -> Iterator[Finding]:
    """R2 is verl's: routes recorded in its own log-prob pass, replayed in the update."""
    if own_mode(job) != "R2":
        return
    own = own_key(job)
    if job.get(STRATEGY) not in VERLS_OWN:
        yield Finding(
            "error",
            own,
            f"R2 is not available with strategy {job.get(STRATEGY)}, which would ignore it; verl has it for "
            f"{' and '.join(VERLS_OWN)}",
            f"{own}=R3 {FLAG_KEY}=True, or {own}=disabled",
        )
        return
    if job.get(FLAG_KEY, False):
        yield Finding(
            "error",
            FLAG_KEY,
            f"{own}=R2 replays routes of the trainer's own log-prob pass; with the rollout's routes in the batch as "
            "well, verl stops when it joins the two, or replays the wrong ones",
            f"{FLAG_KEY}=False, or {own}=R3",
        )
    if job.bypass:
        yield Finding(
            "error",
            BYPASS,
            f"{own}=R2 records routes in the trainer's pass for old_log_prob, which bypass mode leaves out",
            f"{BYPASS}=False, or {own}=R3 {FLAG_KEY}=True",
        )


def _metrics_read_plain_ids(job: Job) -> Iterator[Finding]:
    interval = int(job.get(LOAD_METRICS, 0) or 0)
    if replays(job) and on_fsdp(job) and interval > 0:
        yield Finding(
            "error",
            LOAD_METRICS,
            f"{interval}: verl computes rollout/moe/* from plain expert ids, and on FSDP the batch carries codes "
            f"in which a row that was not recorded can be told from expert 0 ({own_key(job)}=R3)",
            f"{LOAD_METRICS}=0",
        )


# --- who replays --------------------------------------------------------------------------------------------------


def _an_engine_replays(job: Job) -> Iterator[Finding]:
    """R22: verl's FSDP engine accepts R3 and ignores it, and so do those without replay."""
    if not replays(job):
        return
    strategy, own = job.get(STRATEGY), own_key(job)
    off = f"{own}=disabled {FLAG_KEY}=False"
    if strategy not in (*OUR_STRATEGIES, *VERLS_OWN):
        known = f"{', '.join(OUR_STRATEGIES)} (verl-sat's engine) and {', '.join(VERLS_OWN)} (verl's own)"
        move = f"{STRATEGY}=fsdp2, or " if strategy == "fsdp_turbo" else ""
        yield Finding(
            "error", STRATEGY, f"{strategy} accepts {own}=R3 and ignores it; {known} replay", f"{move}{off}"
        )  # fmt: skip
    elif strategy in OUR_STRATEGIES and not sees_mini_batch(job):
        yield Finding(
            "error",
            own,
            f"R3 on {strategy} is replayed by verl-sat's engine, which is for NVIDIA GPUs and the CPU; on this device "
            f"(trainer.device={job.get('trainer.device', 'cuda')}) verl's own runs, which accepts R3 and ignores it",
            off,
        )
    elif strategy in OUR_STRATEGIES:
        yield from _plugin_is_there(job, own)


def _plugin_is_there(job: Job, own: str) -> Iterator[Finding]:
    for failure in _compat.FAILURES:
        yield Finding("error", own, f"verl-sat could not be loaded, so nothing would replay: {failure}")
    missing = plugin_missing_elsewhere(job)
    if missing is not None:
        level, remedy = missing
        yield Finding(
            level,
            own,
            "verl finds verl-sat in this process only: its entry point is not used here, and in Ray workers started by "
            "another raylet verl's own engine would accept R3 and ignore it. Install verl-sat on every node and leave "
            "VERL_USE_EXTERNAL_PLUGINS at auto, or pass the module on",
            remedy,
        )


# --- the model ----------------------------------------------------------------------------------------------------


def _model_has_experts(job: Job) -> Iterator[Finding]:
    """C06: a dense model would be noticed after it is loaded, or with the first answer."""
    found = model_config(job) if replays(job) else None
    if found is None:
        return
    key, config = found
    off = f"{own_key(job)}=disabled {FLAG_KEY}=False"
    try:
        layout = MoELayout.from_config(config)
    except NotMoEError as error:
        yield Finding("error", key, f"{error} (asked for by {own_key(job)}=R3 and {FLAG_KEY})", off)
        return
    except ValueError as error:
        if on_fsdp(job):  # elsewhere verl carries ids as they come
            yield Finding("error", key, f"routes of this model cannot be recorded: {error}", off)
        return
    if layout.model_type in REFUSED_MODELS and on_fsdp(job):
        yield Finding(
            "error",
            key,
            f"the routers of {layout.model_type} cannot be made to replay on FSDP: {REFUSED_MODELS[layout.model_type]}",
            off,
        )


def _images_under_ulysses(job: Job) -> Iterator[Finding]:
    """verl slices such a model's tokens inside the model, after the embedding, and the others' before it."""
    if not (replays(job) and on_fsdp(job)):
        return
    keys = [f"{place}.ulysses_sequence_parallel_size" for place in (f"{ACTOR}.fsdp_config", ACTOR)]
    sizes = {key: int(job.get(key, 1) or 1) for key in keys}
    key = max(sizes, key=sizes.__getitem__)
    found = model_config(job) if sizes[key] > 1 else None
    if found is not None and "vision_config" in found[1]:
        yield Finding(
            "error",
            key,
            f"{sizes[key]}: verl slices the tokens of a vision-language model elsewhere than those of others, and R3 "
            f"was not tested there ({found[0]} has a vision_config)",
            f"{key}=1",
        )


R3_RULES: tuple[Callable[[Job], Iterator[Finding]], ...] = (
    _mode_exists,
    _mode_is_read,
    _look_alike_contradicts,
    _both_keys,
    _r2,
    _metrics_read_plain_ids,
    _an_engine_replays,
    _model_has_experts,
    _images_under_ulysses,
    *ROLLOUT_RULES,
    *MEGATRON_RULES,
)
