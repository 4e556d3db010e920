"""The preflight's rules about the rollout engine whose routes are to be replayed: what it cannot return rightly.

Numbers of issues are those of the project named before them.
"""

from __future__ import annotations

from collections.abc import Iterator

from verl_sat.preflight_job import Finding, Job
from verl_sat.preflight_r3_job import MODEL, ROLLOUT, installed, is_older, own_key, records
from verl_sat.router_replay.client import FLAG_KEY
from verl_sat.router_replay.engines import EngineUnsupported, check_engine_version

# First tested version in which a draft model does not write over the target's routes: vLLM#48622, sglang#26980.
_DRAFTS_KEPT_APART = {"vllm": "0.30.0", "sglang": "0.5.23"}


def _rollout_engine(job: Job) -> Iterator[Finding]:
    """C07: an engine that returns no routes, or a version of one."""
    name = job.get(f"{ROLLOUT}.name")
    if not records(job) or name is None:
        return
    version = installed(str(name))
    try:
        caution = check_engine_version(str(name), version)
    except EngineUnsupported as error:
        yield Finding("error", f"{ROLLOUT}.name", str(error), f"{FLAG_KEY}=False {own_key(job)}=disabled")
        return
    if caution is not None and version is not None:
        yield Finding("warning", f"{ROLLOUT}.name", caution)


def _prompts_computed_elsewhere(job: Job) -> Iterator[Finding]:
    """An engine records what it computes itself; rows whose cache came from elsewhere hold anything."""
    if not records(job):
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
    backend = job.get(key) if name and records(job) else None
    if str(backend).startswith("flashinfer"):
        yield Finding(
            "warning",
            key,
            f"{backend}: such kernels choose the experts themselves, and some versions then return zeros throughout "
            "(vLLM#44116), which are refused one by one",
            f"{key}=triton",
        )


def _draft_models(job: Job) -> Iterator[Finding]:
    """R27: a draft model with experts wrote its own over the target's first layer; every check passes."""
    if not records(job):
        return
    engine = str(job.get(f"{ROLLOUT}.name"))
    version, apart = installed(engine), _DRAFTS_KEPT_APART.get(engine)
    if apart is None or (version is not None and not is_older(version, apart)):
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


ROLLOUT_RULES = (
    _rollout_engine,
    _prompts_computed_elsewhere,
    _routers_inside_kernels,
    _draft_models,
)
