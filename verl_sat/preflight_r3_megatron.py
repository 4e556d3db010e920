"""The preflight's rules where verl itself replays, on Megatron and VeOmni: what goes wrong there, and stays unsaid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verl_sat.preflight_job import SAMPLER, Finding, Job
from verl_sat.preflight_r3_job import (
    MODEL,
    ROLLOUT,
    VERLS_OWN,
    installed,
    is_older,
    model_config,
    override,
    replays,
)
from verl_sat.preflight_scope import ACTOR, STRATEGY
from verl_sat.router_replay.layout import TEXT_CONFIGS

MEGATRON = f"{ACTOR}.megatron"
OVERRIDES = f"{MEGATRON}.override_transformer_config"
# Families that score experts by a sigmoid and whose configuration does not always say so in `scoring_func`.
_SIGMOID = ("deepseek_v3", "glm4_moe", "glm4v_moe_text", "minimax_m2")


def _megatron_layout(job: Job) -> Iterator[Finding]:
    """Settings under which verl's Megatron replay goes wrong or stops in its first forward pass."""
    if not (replays(job) and job.get(STRATEGY) == "megatron"):
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
    if replays(job) and job.get(STRATEGY) in VERLS_OWN and not job.get(key, True):
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
    if not (replays(job) and job.get(STRATEGY) == "megatron" and training):
        return
    found = model_config(job)
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
    version = installed("megatron-core")
    key = f"{OVERRIDES}.moe_router_dtype"
    if not (replays(job) and job.get(STRATEGY) == "megatron" and version) or is_older(version, "0.18"):
        return
    found = model_config(job)
    half = job.get(f"{MEGATRON}.dtype", "bfloat16") == "bfloat16" and job.get(key) not in ("fp32", "fp64")
    if found is not None and half and _scores_by_sigmoid(found[1]):
        yield Finding(
            "warning",
            key,
            f"with megatron-core {version} (0.18 and newer) verl's router rounds sigmoid scores to bf16, and "
            "Megatron's own does not: rows that are not replayed can choose other experts than without R3",
            override(job, key, "fp32"),
        )


def _scores_by_sigmoid(config: Mapping[str, Any]) -> bool:
    parts = [config, *(config[name] for name in TEXT_CONFIGS if isinstance(config.get(name), Mapping))]
    return any(part.get("scoring_func") == "sigmoid" or part.get("model_type") in _SIGMOID for part in parts)


def _rows_without_routes(job: Job) -> Iterator[Finding]:
    """R06, R07, R09: on FSDP such rows are routed natively and counted; verl's own replay knows no such rows."""
    if not (replays(job) and job.get(STRATEGY) in VERLS_OWN):
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
    elif job.trainer == "v1" and job.is_async and not job.our_sampler:
        key = "trainer.v1.trainer_mode"
    else:  # the exact-lag sampler lets no weight update meet a running request
        return
    sampler = f"{SAMPLER}.custom_sampler"
    yield Finding(
        "warning",
        key,
        "a weight update interrupts responses, and verl joins the routes of the parts by counting from their ends: a "
        "part that comes without routes is given those of newer weights, or the rows after it move and the last are "
        f"replayed as expert 0. {here}. The exact-lag sampler keeps updates and requests apart",
        ""
        if key == partial
        else f"{sampler}.path=pkg://verl_sat.sampler {sampler}.name=ExactLagReplayBuffer "
        f"{SAMPLER}.max_off_policy_threshold=null",
    )


MEGATRON_RULES = (
    _megatron_layout,
    _packed_tokens,
    _megatron_mtp,
    _megatron_patch,
    _rows_without_routes,
)
