"""The preflight's rules about the scope of the gate's quantile: what it is, whether it can be had and can act."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from verl_sat.preflight_job import SAT_BLOCK, Finding, Job
from verl_sat.scope_facts import DYNAMIC_CP_KEY, SCOPE_KEY, few_sequences

ACTOR = "actor_rollout_ref.actor"
STRATEGY = f"{ACTOR}.strategy"
MINI_BATCH_SIZE = f"{ACTOR}.ppo_mini_batch_size"
MICRO_BATCH_SIZE = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
# Backends that the plugin's engine registers itself for; on a GPU, NVIDIA's (verl_sat/engine/fsdp.py).
_OUR_BACKENDS = ("fsdp", "fsdp2")


def is_adaptive(job: Job) -> bool:
    """Whether a quantile decides anything in this job (as `verl_sat.scope.is_adaptive`)."""
    return job.sat and job.contracts and job.get(f"{SAT_BLOCK}.q") is None


def sees_mini_batch(job: Job) -> bool:
    """Whether the plugin's engine will run, as far as the configuration says."""
    device = os.environ.get("VERL_ENGINE_DEVICE") or str(job.get("trainer.device", "cuda"))
    # PyTorch for AMD calls its device cuda too; verl tells them apart by vendor, and so do we.
    on_amd = getattr(getattr(sys.modules.get("torch"), "version", None), "hip", None) is not None
    vendor = os.environ.get("VERL_ENGINE_VENDOR") or ("amd" if on_amd else "nvidia")
    ours = device == "cpu" or (device == "cuda" and vendor == "nvidia")
    return job.get(STRATEGY) in _OUR_BACKENDS and ours


def scope_of(job: Job) -> str:
    """The scope that the losses will use (as `verl_sat.scope.resolve`)."""
    scope = str(job.get(SCOPE_KEY, "auto"))
    if scope != "auto":
        return scope
    if job.loss_mode != "sat_gspo":
        return "micro_batch"
    return "mini_batch" if sees_mini_batch(job) else "running"


def describe_scope(job: Job) -> str:
    """For the line that says what will run; empty where no quantile is taken."""
    if not is_adaptive(job):
        return ""
    auto = " (auto)" if job.get(SCOPE_KEY, "auto") == "auto" else ""
    return f", quantile over scope {scope_of(job)}{auto}"


def scope_needs_an_engine(job: Job) -> Iterator[Finding]:
    """An explicit ``mini_batch`` where another engine will run: every worker would refuse its first loss call."""
    if is_adaptive(job) and job.get(SCOPE_KEY) == "mini_batch" and not sees_mini_batch(job):
        where = f"{STRATEGY}={job.get(STRATEGY)}"
        if job.get(STRATEGY) in _OUR_BACKENDS:
            where += f" on this device (trainer.device={job.get('trainer.device', 'cuda')})"
        yield Finding(
            "error",
            SCOPE_KEY,
            f"mini_batch takes its quantile in verl-sat's own FSDP engine, and with {where} another one runs. running "
            "is independent of the split too, and needs no engine",
            f"{SCOPE_KEY}=running",
        )


def scope_needs_equal_counts(job: Job) -> Iterator[Finding]:
    """Megatron's dynamic context parallelism gives ranks different numbers of micro-batches."""
    if is_adaptive(job) and job.get(DYNAMIC_CP_KEY, False) and scope_of(job) != "micro_batch":
        yield Finding(
            "error",
            DYNAMIC_CP_KEY,
            f"ranks then see different numbers of micro-batches and share responses, and scope {scope_of(job)} pools "
            "data-parallel ranks: it would count responses twice, or wait for ever",
            f"{DYNAMIC_CP_KEY}=False, or {SCOPE_KEY}=micro_batch",
        )


def scope_holds_few_responses(job: Job) -> Iterator[Finding]:
    """Sequence level: over few responses nothing can become stale, in expectation."""
    if job.loss_mode != "sat_gspo" or not is_adaptive(job):
        return
    needed = few_sequences(float(job.get(f"{SAT_BLOCK}.quantile", 0.9)))
    scope, found = scope_of(job), responses_in_scope(job)
    if found is None or found >= needed:
        return
    opens = f"too few for a quantile of {job.get(f'{SAT_BLOCK}.quantile', 0.9):g}: the longest response sets it and"
    if scope in ("micro_batch", "dp_group"):
        yield Finding(
            "warning",
            SCOPE_KEY,
            f"scope {scope} holds {found} responses ({_count(job)}), {opens} hardly anything counts as stale, so this "
            "is plain GSPO",
            f"{SCOPE_KEY}={'mini_batch' if sees_mini_batch(job) else 'running'}",
        )
    else:
        yield Finding(
            "warning",
            MINI_BATCH_SIZE,
            f"a mini-batch holds {found} responses, {opens} hardly anything counts as stale, so this is plain GSPO: "
            f"it takes about {needed}",
        )


def group_of_one(job: Job) -> Iterator[Finding]:
    """``dp_group`` with one data-parallel rank is ``micro_batch``."""
    if is_adaptive(job) and job.get(SCOPE_KEY) == "dp_group" and _data_parallel_size(job) == 1:
        yield Finding(
            "warning",
            SCOPE_KEY,
            "dp_group pools data-parallel ranks, and with the parallel sizes of this job there is one: it is "
            "micro_batch then",
            f"{SCOPE_KEY}={'mini_batch' if sees_mini_batch(job) else 'running'}",
        )


def responses_in_scope(job: Job) -> int | None:
    """Responses in the scope; None where the configuration does not say."""
    if scope_of(job) in ("mini_batch", "running"):
        prompts = job.get(MINI_BATCH_SIZE)
        return None if not prompts else int(prompts) * int(job.get("actor_rollout_ref.rollout.n", 1))
    size = job.get(MICRO_BATCH_SIZE)
    if not size or job.get(f"{ACTOR}.use_dynamic_bsz", False):
        return None
    ranks = _data_parallel_size(job) if scope_of(job) == "dp_group" else 1
    return None if ranks is None else int(size) * ranks


def _count(job: Job) -> str:
    text = f"{MICRO_BATCH_SIZE.rpartition('.')[2]}={job.get(MICRO_BATCH_SIZE)}"
    return text if scope_of(job) == "micro_batch" else f"{text} on {_data_parallel_size(job)} data-parallel ranks"


def _data_parallel_size(job: Job) -> int | None:
    """Data-parallel ranks of the actor, from the parallel sizes; None where they are not plain numbers."""
    nodes, per_node = job.get("trainer.nnodes"), job.get("trainer.n_gpus_per_node")
    if not isinstance(nodes, int) or not isinstance(per_node, int):
        return None
    size = nodes * per_node
    if job.get(STRATEGY) == "megatron":
        for dimension in ("tensor_model", "pipeline_model", "context"):
            size //= int(job.get(f"{ACTOR}.megatron.{dimension}_parallel_size", 1) or 1)
        return size
    if job.get(STRATEGY) in _OUR_BACKENDS:
        # verl still reads its deprecated place as well
        places = (f"{ACTOR}.fsdp_config", ACTOR)
        return size // max(int(job.get(f"{place}.ulysses_sequence_parallel_size", 1) or 1) for place in places)
    return None


SCOPE_RULES = (
    scope_needs_an_engine,
    scope_needs_equal_counts,
    scope_holds_few_responses,
    group_of_one,
)
