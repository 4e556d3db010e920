"""The preflight's rules about R3, the replay of the rollout's routes: the keys, the model, both engines.

verl notices a wrong combination late (a worker's exception after the model is loaded), or not at all: FSDP accepts
``router_replay.mode=R3`` and ignores it, Megatron replays rows that nobody recorded as expert 0. Everything that the
configuration tells of it is found here. Jobs that ask for no replay are left alone, whatever else they do
(:func:`asks_for_replay`).

"verl" below is 0.9.1; numbers of issues are those of the project named before them.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from packaging.version import InvalidVersion, Version

from verl_sat import _compat
from verl_sat.preflight_job import BYPASS, Finding, Job, as_override
from verl_sat.preflight_rules import plugin_missing_elsewhere
from verl_sat.preflight_scope import ACTOR, STRATEGY, sees_mini_batch
from verl_sat.router_replay.client import FLAG_KEY, OUR_STRATEGIES
from verl_sat.router_replay.engines import EngineUnsupported, check_engine_version
from verl_sat.router_replay.layout import TEXT_CONFIGS, MoELayout, NotMoEError

ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
LOAD_METRICS = f"{ROLLOUT}.moe_load_balance_metrics_interval"
LOOK_ALIKE = f"{ACTOR}.router_replay.mode"
MEGATRON = f"{ACTOR}.megatron"
OVERRIDES = f"{MEGATRON}.override_transformer_config"
MODES = ("disabled", "R2", "R3")

# Where the actor's engine of a strategy has its settings; elsewhere the block is called as the strategy.
_BLOCKS = {"fsdp": "fsdp_config", "fsdp2": "fsdp_config", "fsdp_turbo": "fsdp_config"}
_VERLS_OWN = ("megatron", "veomni")
REFUSED_MODELS = {
    "doge": "an expert is a pair of keys, each chosen by a top-k of its own",
    "ernie4_5_vl_moe": "its layers have a router for text and one for images",
    "jetmoe": "its layers have a router in the attention and one in the feed-forward part",
    "phimoe": "its router takes one expert after the other instead of a top-k",
}
"""Model types with experts whose choice the hook cannot force; it refuses them by name when the model is built."""
# Families that score experts by a sigmoid and whose configuration does not always say so in `scoring_func`.
_SIGMOID = ("deepseek_v3", "glm4_moe", "glm4v_moe_text", "minimax_m2")
# First tested version in which a draft model does not write over the target's routes: vLLM#48622, sglang#26980.
_DRAFTS_KEPT_APART = {"vllm": "0.30.0", "sglang": "0.5.23"}


# --- what a job asks for ------------------------------------------------------------------------------------------


def replay_modes(job: Job) -> dict[str, Any]:
    """Full key -> value of every ``router_replay.mode`` in the configuration, whether or not anything reads it."""
    found = dict(_find_modes(OmegaConf.to_container(job.config, resolve=False), ""))
    return {key: job.get(key) if isinstance(value, str) and "${" in value else value for key, value in found.items()}


def _find_modes(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, value in node.items() if isinstance(node, Mapping) else ():
        key = f"{path}.{name}" if path else str(name)
        if name != "router_replay":
            yield from _find_modes(value, key)
        elif isinstance(value, Mapping):
            yield f"{key}.mode", value.get("mode")
        elif value is not None:
            yield key, value


def own_key(job: Job) -> str:
    """Key of the mode that the actor's own engine reads."""
    strategy = str(job.get(STRATEGY, "fsdp"))
    return f"{ACTOR}.{_BLOCKS.get(strategy, strategy)}.router_replay.mode"


def own_mode(job: Job) -> Any:
    """The mode that the actor's own engine reads."""
    return job.get(own_key(job), "disabled")


def asks_for_replay(job: Job) -> bool:
    """Whether a mode or the rollout's flag is set anywhere. If not, none of the rules below has a say."""
    return bool(job.get(FLAG_KEY, False)) or any(mode not in (None, "disabled") for mode in replay_modes(job).values())


def _replays(job: Job) -> bool:
    return own_mode(job) == "R3"


def _on_fsdp(job: Job) -> bool:
    return job.get(STRATEGY) in OUR_STRATEGIES


def _is_actors(key: str) -> bool:
    return key.startswith(f"{ACTOR}.")


def _set(job: Job, key: str, value: Any) -> str:
    """The override as it has to be typed: verl's FSDP configuration has no such block."""
    return f"{'' if job.has(key) else '+'}{key}={as_override(value)}"


def _group(job: Job) -> str:
    group = {"fsdp_config": "fsdp", "megatron": "megatron"}.get(own_key(job).split(".")[2])
    return f" (hydra.searchpath=[pkg://verl_sat.conf] +r3={group} sets both keys)" if group else ""


def describe_replay(job: Job) -> str:
    """One line that says whose routes are replayed where; empty where none are.

    Args:
        job: a configuration without errors.
    """
    if not _records(job):
        return ""
    who = "verl-sat's FSDP engine" if _on_fsdp(job) else f"verl's own {job.get(STRATEGY)} engine"
    return f"R3: routes of {job.get(f'{ROLLOUT}.name')} replayed by {who}, in the actor alone"


# --- the two keys -------------------------------------------------------------------------------------------------


def _mode_exists(job: Job) -> Iterator[Finding]:
    """verl checks it where its dataclass is built, without the key; on FSDP, which names no dataclass, never."""
    for key, mode in replay_modes(job).items():
        if not key.endswith(".mode"):
            yield Finding("error", key, f"{mode!r}: this is a block, with the key `mode`", f"{key}={{mode:{mode}}}")
        elif mode is not None and mode not in MODES:
            close = [known for known in MODES if known.lower() == str(mode).lower()]
            wanted = close[0] if close else ("R3" if key == own_key(job) else "disabled")
            yield Finding(
                "error",
                key,
                f"{mode!r} is no mode: expected one of {', '.join(MODES)} as spelt here, together with {FLAG_KEY}",
                f"{key}={wanted}",
            )


def _mode_is_read(job: Job) -> Iterator[Finding]:
    """A mode in a block that the actor's engine does not read."""
    own = own_key(job)
    for key, mode in replay_modes(job).items():
        if key == own or not key.endswith(".mode") or mode not in ("R2", "R3"):
            continue
        if _is_actors(key):
            what = (
                "looks like the key of the mode, but is none of verl's: its workers would stop with a TypeError"
                if key == LOOK_ALIKE
                else f"the actor runs strategy {job.get(STRATEGY)}, which does not read this block"
            )
            yield Finding(
                "error",
                key,
                f"{mode}: {what}. The engine reads {own}{_group(job)}",
                f"{_set(job, own, mode)} in its place",
            )
        else:
            yield Finding(
                "warning" if _replays(job) else "error",
                key,
                f"{mode} has no effect here: only the actor replays, by {own}; all others route natively",
                f"{key}=disabled" if _replays(job) else f"{key}=disabled {_set(job, own, mode)}",
            )


def _look_alike_contradicts(job: Job) -> Iterator[Finding]:
    if own_mode(job) != "disabled" and replay_modes(job).get(LOOK_ALIKE) == "disabled":
        yield Finding(
            "error",
            LOOK_ALIKE,
            f"disabled, while {own_key(job)}={own_mode(job)}: it looks like the key of the mode, but is none of verl's, "
            "whose workers would stop with a TypeError",
            f"~{LOOK_ALIKE.removesuffix('.mode')}",
        )


def _both_keys(job: Job) -> Iterator[Finding]:
    """C05: the mode without the routes, or the routes without the mode."""
    own, flag = own_key(job), bool(job.get(FLAG_KEY, False))
    if _replays(job) and not flag:
        yield Finding(
            "error",
            FLAG_KEY,
            f"{own}=R3 replays what the rollout engine recorded, and with {FLAG_KEY}=False it records nothing"
            f"{_group(job)}",
            f"{FLAG_KEY}=True, or {own}=disabled",
        )
    misplaced = any(mode in ("R2", "R3") and _is_actors(key) for key, mode in replay_modes(job).items())
    if not flag or own_mode(job) not in (None, "disabled") or misplaced:
        return
    wasted = (
        f"the rollout engine records routes and every batch carries them, but nothing replays them: {own} is "
        f"disabled{_group(job)}"
    )
    if int(job.get(LOAD_METRICS, 0) or 0) > 0:
        yield Finding("warning", FLAG_KEY, f"{wasted}. They only feed verl's rollout/moe/* metrics ({LOAD_METRICS})")
    else:
        yield Finding("error", FLAG_KEY, wasted, f"{_set(job, own, 'R3')}, or {FLAG_KEY}=False")


def _r2(job: Job) -> Iterator[Finding]:
    """R2 is verl's: routes recorded in its own log-prob pass, replayed in the update."""
    if own_mode(job) != "R2":
        return
    own = own_key(job)
    if job.get(STRATEGY) not in _VERLS_OWN:
        yield Finding(
            "error",
            own,
            f"R2 is not available with strategy {job.get(STRATEGY)}, which would ignore it; verl has it for "
            f"{' and '.join(_VERLS_OWN)}",
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
    if _replays(job) and _on_fsdp(job) and interval > 0:
        yield Finding(
            "error",
            LOAD_METRICS,
            f"{interval}: verl computes rollout/moe/* from plain expert ids, and on FSDP the batch carries packed codes "
            f"in which a row that was not recorded can be told from expert 0 ({own_key(job)}=R3)",
            f"{LOAD_METRICS}=0",
        )


# --- who replays --------------------------------------------------------------------------------------------------


def _an_engine_replays(job: Job) -> Iterator[Finding]:
    """R22: verl's FSDP engine accepts R3 and ignores it, and so do those without replay."""
    if not _replays(job):
        return
    strategy, own = job.get(STRATEGY), own_key(job)
    off = f"{own}=disabled {FLAG_KEY}=False"
    if strategy not in (*OUR_STRATEGIES, *_VERLS_OWN):
        known = f"{', '.join(OUR_STRATEGIES)} (verl-sat's engine) and {', '.join(_VERLS_OWN)} (verl's own)"
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


def _model_config(job: Job) -> tuple[str, dict[str, Any]] | None:
    """Key of the model's path and its parsed ``config.json``; None where it is not on this machine."""
    for key in (f"{MODEL}.hf_config_path", f"{MODEL}.path"):
        path = job.get(key)
        if path:
            file = Path(str(path)) / "config.json"
            return (key, json.loads(file.read_text())) if file.is_file() else None
    return None


def _model_has_experts(job: Job) -> Iterator[Finding]:
    """C06: a dense model would be noticed after it is loaded, or with the first answer."""
    found = _model_config(job) if _replays(job) else None
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
        if _on_fsdp(job):  # elsewhere verl carries ids as they come
            yield Finding("error", key, f"routes of this model cannot be recorded: {error}", off)
        return
    if layout.model_type in REFUSED_MODELS and _on_fsdp(job):
        yield Finding(
            "error",
            key,
            f"the routers of {layout.model_type} cannot be made to replay on FSDP: {REFUSED_MODELS[layout.model_type]}",
            off,
        )


def _images_under_ulysses(job: Job) -> Iterator[Finding]:
    """verl slices such a model's tokens inside the model, after the embedding, and the others' before it."""
    if not (_replays(job) and _on_fsdp(job)):
        return
    keys = [f"{place}.ulysses_sequence_parallel_size" for place in (f"{ACTOR}.fsdp_config", ACTOR)]
    sizes = {key: int(job.get(key, 1) or 1) for key in keys}
    key = max(sizes, key=sizes.__getitem__)
    found = _model_config(job) if sizes[key] > 1 else None
    if found is not None and "vision_config" in found[1]:
        yield Finding(
            "error",
            key,
            f"{sizes[key]}: verl slices the tokens of a vision-language model elsewhere than those of others, and R3 "
            f"was not tested there ({found[0]} has a vision_config)",
            f"{key}=1",
        )


# --- the rollout engine -------------------------------------------------------------------------------------------


def _records(job: Job) -> bool:
    return _replays(job) and bool(job.get(FLAG_KEY, False))


def _installed(name: str) -> str | None:
    """Version of a rollout engine; the driver may have none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _older(version: str, than: str) -> bool:
    try:
        return Version(version).release < Version(than).release
    except InvalidVersion:
        return False


def _rollout_engine(job: Job) -> Iterator[Finding]:
    """C07: an engine that returns no routes, or a version of one."""
    name = job.get(f"{ROLLOUT}.name")
    if not _records(job) or name is None:
        return
    version = _installed(str(name))
    try:
        caution = check_engine_version(str(name), version)
    except EngineUnsupported as error:
        yield Finding("error", f"{ROLLOUT}.name", str(error), f"{FLAG_KEY}=False {own_key(job)}=disabled")
        return
    if caution is not None and version is not None:
        yield Finding("warning", f"{ROLLOUT}.name", caution)


def _prompts_computed_elsewhere(job: Job) -> Iterator[Finding]:
    """An engine records what it computes itself; rows whose cache came from elsewhere hold anything."""
    if not _records(job):
        return
    why = "such tokens are not computed where their routes are read, and what is returned for them is another request's"
    kwargs = f"{ROLLOUT}.engine_kwargs"
    if job.get(f"{ROLLOUT}.disaggregation.enabled", False):
        key = f"{ROLLOUT}.disaggregation.enabled"
        yield Finding(
            "error", key, f"a decode server takes the prompt's cache from a prefill server: {why}", f"{key}=False"
        )
    engine = job.get(f"{ROLLOUT}.name")
    given = {
        "vllm": {
            "kv_transfer_config": "a connector brings in cached tokens (vLLM itself refuses most of them)",
            "kv_offloading_size": "a connector brings in cached tokens (vLLM itself refuses most of them)",
        },
        "sglang": {"disaggregation_mode": "a decode server takes the prompt's cache from a prefill server"},
    }
    for name, what in given.get(engine, {}).items():
        key = f"{kwargs}.{engine}.{name}"
        if job.get(key) not in (None, "null", 0):
            yield Finding("error", key, f"{what}: {why}", f"{key}=null")
    for name in ("enable_hierarchical_cache", "enable_lmcache") if engine == "sglang" else ():
        key = f"{kwargs}.sglang.{name}"
        if job.get(key, False):
            yield Finding(
                "warning",
                key,
                "routes of tokens that come back from the host's cache were wrong rows (sglang#26975), which no check "
                "of shapes and ranges notices",
                f"{key}=False",
            )


def _routers_inside_kernels(job: Job) -> Iterator[Finding]:
    engine = job.get(f"{ROLLOUT}.name")
    name = {"vllm": "moe_backend", "sglang": "moe_runner_backend"}.get(engine)
    key = f"{ROLLOUT}.engine_kwargs.{engine}.{name}"
    backend = job.get(key) if name and _records(job) else None
    if str(backend).startswith("flashinfer"):
        yield Finding(
            "warning",
            key,
            f"{backend}: such kernels choose the experts themselves, and some versions then return zeros for all routes "
            "(vLLM#44116), which are refused one by one",
            f"{key}=triton",
        )


def _draft_models(job: Job) -> Iterator[Finding]:
    """R27: a draft model with experts wrote its own over the target's first layer; every check passes."""
    if not _records(job):
        return
    engine = str(job.get(f"{ROLLOUT}.name"))
    version, apart = _installed(engine), _DRAFTS_KEPT_APART.get(engine)
    if apart is None or (version is not None and not _older(version, apart)):
        return
    mended = f"{engine} {apart} keeps them apart" + ("" if version is None else f", {version} is installed")
    for key, off in _drafts(job, engine):
        yield Finding(
            "warning" if version is None else "error",
            key,
            "a draft model with experts writes them over those of the target's layers of the same number, and nothing "
            f"tells them apart afterwards; {mended}",
            off,
        )


def _drafts(job: Job, engine: str) -> Iterator[tuple[str, str]]:
    key = f"{MODEL}.mtp.enable_rollout"
    if job.get(f"{ROLLOUT}.mtp.enable", False) and job.get(f"{ROLLOUT}.mtp.enable_rollout", False):
        yield key, f"{key}=False"
    name = {"vllm": "speculative_config", "sglang": "speculative_algorithm"}.get(engine)
    key = f"{ROLLOUT}.engine_kwargs.{engine}.{name}"
    value = job.get(key)
    if value and "ngram" not in str(value).lower():  # n-grams are proposed without a model
        yield key, f"{key}=null"


# --- Megatron (and VeOmni): verl replays, as it does --------------------------------------------------------------


def _megatron_layout(job: Job) -> Iterator[Finding]:
    """Settings under which verl's Megatron replay goes wrong or stops in its first forward pass."""
    if not (_replays(job) and job.get(STRATEGY) == "megatron"):
        return
    key = f"{OVERRIDES}.moe_router_fusion"
    if job.get(key, False):
        yield Finding(
            "error", key, "a fused router chooses in its kernel, where nothing can be replayed", f"{key}=False"
        )
    key, parallel = f"{MEGATRON}.sequence_parallel", int(job.get(f"{MEGATRON}.tensor_model_parallel_size", 1) or 1)
    if parallel > 1 and not job.get(key, True):
        yield Finding(
            "error",
            key,
            f"verl spreads the routes over the {parallel} tensor-parallel ranks in any case, but without sequence "
            "parallelism each rank routes all tokens: the others' share would have no routes",
            f"{key}=True",
        )
    key = f"{MEGATRON}.pad_to_length"
    if job.get(key, False):
        yield Finding(
            "error", key, "verl's replay stops with an exception at the first padded micro-batch", f"{key}=False"
        )


def _packed_tokens(job: Job) -> Iterator[Finding]:
    """The actor's workers take this from the model's block, whatever the engine's says."""
    key = f"{MODEL}.use_remove_padding"
    if _replays(job) and job.get(STRATEGY) in _VERLS_OWN and not job.get(key, True):
        yield Finding(
            "error",
            key,
            f"verl's replay on {job.get(STRATEGY)} lays the routes out for packed tokens; padded ones would get other "
            "tokens' experts",
            f"{key}=True",
        )


def _megatron_mtp(job: Job) -> Iterator[Finding]:
    """R03: layers for multi-token prediction are numbered from 1 again."""
    key = f"{MODEL}.mtp.enable_train"
    training = job.get(f"{MODEL}.mtp.enable", False) and job.get(key, False)
    if not (_replays(job) and job.get(STRATEGY) == "megatron" and training):
        return
    found = _model_config(job)
    wrapped = found is not None and "vision_config" in found[1]
    what = "verl tells a decoder's layers from those for multi-token prediction, of the same numbers, by where they are"
    if wrapped:
        yield Finding(
            "error",
            key,
            f"{what}; in a vision-language model it looks elsewhere, and the latter would replay the decoder's routes",
            f"{key}=False",
        )
    else:
        yield Finding("warning", key, f"{what}: these stay native. This was not tested", f"{key}=False")


def _megatron_patch(job: Job) -> Iterator[Finding]:
    """verl puts a router function of its own in the place of Megatron's."""
    version = _installed("megatron-core")
    key = f"{OVERRIDES}.moe_router_dtype"
    if not (_replays(job) and job.get(STRATEGY) == "megatron" and version) or _older(version, "0.18"):
        return
    found = _model_config(job)
    half = job.get(f"{MEGATRON}.dtype", "bfloat16") == "bfloat16" and job.get(key) not in ("fp32", "fp64")
    if found is not None and half and _scores_by_sigmoid(found[1]):
        yield Finding(
            "warning",
            key,
            f"with megatron-core {version} (0.18 and newer) verl's router rounds sigmoid scores to bf16, and Megatron's "
            "own does not: rows that are not replayed can choose other experts than without R3",
            _set(job, key, "fp32"),
        )


def _scores_by_sigmoid(config: Mapping[str, Any]) -> bool:
    parts = [config, *(config[name] for name in TEXT_CONFIGS if isinstance(config.get(name), Mapping))]
    return any(part.get("scoring_func") == "sigmoid" or part.get("model_type") in _SIGMOID for part in parts)


def _rows_without_routes(job: Job) -> Iterator[Finding]:
    """R06, R07, R09: on FSDP such rows are routed natively and counted; verl's own replay knows no such rows."""
    if not (_replays(job) and job.get(STRATEGY) in _VERLS_OWN):
        return
    here = (
        f"On {job.get(STRATEGY)} verl replays the rollout's routes as they come; on FSDP this plugin counts such rows"
    )
    key = f"{ROLLOUT}.multi_turn.enable"
    if job.get(key, False):
        yield Finding(
            "warning",
            key,
            "a tool's reply at the end of a response has no routes and is replayed as expert 0, and the last turn's "
            f"routes stand for all turns, whichever weights sampled them. {here}",
        )
    partial = "async_training.partial_rollout"
    if job.trainer == "fully_async" and job.get(partial, False):
        key = partial
    elif job.trainer == "v1" and job.is_async:
        key = "trainer.v1.trainer_mode"
    else:
        return
    yield Finding(
        "warning",
        key,
        "a weight update interrupts responses, and verl joins the routes of the parts by counting from their ends: a "
        "part that comes without routes is given those of newer weights, or the rows after it move and the last are "
        f"replayed as expert 0. {here}",
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
    _rollout_engine,
    _prompts_computed_elsewhere,
    _routers_inside_kernels,
    _draft_models,
    _megatron_layout,
    _packed_tokens,
    _megatron_mtp,
    _megatron_patch,
    _rows_without_routes,
)
