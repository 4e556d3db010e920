"""The preflight's rules about verl's asynchronous trainer and its sizes: what stops it minutes after its start.

verl asserts most of these where the trainer or a worker is built, after Ray has started and perhaps after a model was
loaded; a response that fits no micro-batch stops it in the middle of a run. They are checked for jobs of ours, and for
any job by ``verl-sat doctor``.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache

from verl_sat.composition import CompositionError, verl_config_dir
from verl_sat.preflight_job import Finding, Job
from verl_sat.preflight_r3_job import ROLLOUT, model_config
from verl_sat.preflight_scope import ACTOR, MINI_BATCH_SIZE, STRATEGY

K_KEY = "trainer.v1.separate_async.parameter_sync_step"
ENV_VARS = "ray_kwargs.ray_init.runtime_env.env_vars"
MAX_TOKENS = f"{ACTOR}.ppo_max_token_len_per_gpu"


def _separate(job: Job) -> bool:
    return job.trainer == "v1" and job.mode == "separate_async"


def batch_is_a_cycle(job: Job) -> Iterator[Finding]:
    """A step holds exactly K mini-batches; `trainer_separate_async.py` asserts it once Ray is up."""
    batch, mini, cycle = job.get("data.train_batch_size"), job.get(MINI_BATCH_SIZE), job.get(K_KEY, 1)
    if not _separate(job) or not all(isinstance(x, int) for x in (batch, mini, cycle)) or batch == cycle * mini:
        return
    yield Finding(
        "error",
        "data.train_batch_size",
        f"{batch}: separate_async wants parameter_sync_step x ppo_mini_batch_size = {cycle} x {mini} prompts",
        f"data.train_batch_size={cycle * mini}",
    )


def _pools(job: Job) -> Iterator[Finding]:
    if not _separate(job):
        return
    for name in ("nnodes", "n_gpus_per_node"):
        key = f"{ROLLOUT}.{name}"
        value = job.get(key)
        if isinstance(value, int) and value <= 0:
            yield Finding(
                "error", key, f"{value}: separate_async samples on GPUs of their own, and there are none", f"{key}=1"
            )
    key = f"{ROLLOUT}.checkpoint_engine.backend"
    if job.get(key, "naive") == "naive":
        yield Finding(
            "error", key, "naive: weights have to go to another pool of GPUs, which this backend cannot", f"{key}=nccl"
        )


def _parallel_sizes(job: Job) -> Iterator[Finding]:
    """Pools that the parallel sizes do not divide."""
    pool = _product(job, "trainer.nnodes", "trainer.n_gpus_per_node")
    if pool and job.get(STRATEGY) == "megatron":
        block = f"{ACTOR}.megatron"
        for names in (
            ("tensor_model", "pipeline_model", "context"),
            ("expert_model", "expert_tensor", "pipeline_model"),
        ):
            keys = [f"{block}.{name}_parallel_size" for name in names]
            # without a value of its own, the experts' tensor parallelism is the model's
            sizes = [job.get(key) or (job.get(f"{block}.tensor_model_parallel_size", 1) if "tensor" in key else 1)
                     for key in keys]  # fmt: skip
            size = sizes[0] * sizes[1] * sizes[2]
            if pool % size:
                shown = " x ".join(f"{name} {value}" for name, value in zip(names, sizes, strict=True))
                yield Finding("error", keys[0], f"{shown} = {size} does not divide the trainer's {pool} GPUs")
    if pool and job.get(STRATEGY) in ("fsdp", "fsdp2"):
        key = f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"
        size = int(job.get(key, 1) or 1)
        if pool % size:
            yield Finding("error", key, f"{size} does not divide the trainer's {pool} GPUs")
    pool = _product(job, f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node") if _separate(job) else None
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    size = _product(job, key, f"{ROLLOUT}.data_parallel_size", f"{ROLLOUT}.pipeline_model_parallel_size")
    if pool and size and pool % size:
        yield Finding("error", key, f"a server takes {size} GPUs, which does not divide the rollout's {pool}")


def _product(job: Job, *keys: str) -> int | None:
    values = [job.get(key) for key in keys]
    if not all(isinstance(value, int) and value > 0 for value in values):
        return None
    product = 1
    for value in values:
        product *= value
    return product


def _info_log_line(job: Job) -> Iterator[Finding]:
    """One of verl's own log lines raises a TypeError (`trainer_separate_async.py`, ``flush=True`` to a logger)."""
    if not _separate(job) or job.get("actor_rollout_ref.hybrid_engine", True) or not _has_the_log_line():
        return
    key = f"{ENV_VARS}.VERL_LOGGING_LEVEL"
    level = str(job.get(key) or os.environ.get("VERL_LOGGING_LEVEL") or "INFO").upper()
    if level in ("INFO", "DEBUG", "NOTSET"):
        yield Finding(
            "error",
            "actor_rollout_ref.hybrid_engine",
            f"False: this verl then stops with a TypeError at one of its own log lines while the level is {level}",
            f"{'' if job.has(key) else '+'}{key}=WARNING",
        )


@cache
def _has_the_log_line() -> bool:
    try:
        source = (verl_config_dir().parent / "ppo" / "v1" / "trainer_separate_async.py").read_text()
    except (CompositionError, OSError):
        return False
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    logged = (call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "info")
    return any(keyword.arg == "flush" for call in logged for keyword in call.keywords)


def _a_response_fits(job: Job) -> Iterator[Finding]:
    """With dynamic batch sizes verl asserts that a sequence fits, when one comes that does not."""
    longest = _longest(job)
    if longest is None or not job.get(f"{ACTOR}.use_dynamic_bsz", False):
        return
    factor, who = 1, ""
    if job.get(STRATEGY) == "megatron":
        factor, who = int(job.get(f"{ACTOR}.megatron.context_parallel_size", 1) or 1), "context_parallel_size"
    elif job.get(STRATEGY) in ("fsdp", "fsdp2"):
        places = (f"{ACTOR}.fsdp_config", ACTOR)
        factor = max(int(job.get(f"{place}.ulysses_sequence_parallel_size", 1) or 1) for place in places)
        who = "ulysses_sequence_parallel_size"
    keys = [MAX_TOKENS]
    if not job.bypass:
        keys.append(f"{ROLLOUT}.log_prob_max_token_len_per_gpu")  # the pass for old_log_prob
    if job.get(f"{ACTOR}.use_kl_loss", False) or job.get("algorithm.use_kl_in_reward", False):
        keys.append("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu")
    for key in keys:
        value = job.get(key)
        if isinstance(value, int) and value * factor < longest:
            shown = f"{value}" + (f" x {who} {factor} = {value * factor}" if factor > 1 else "")
            yield Finding(
                "error",
                key,
                f"{shown} tokens do not hold one sequence of full length (data.max_prompt_length + max_response_length "
                f"= {longest}): verl stops when the first comes",
                f"{key}={-(-longest // factor)}",
            )


def _the_context_holds_it(job: Job) -> Iterator[Finding]:
    longest, key = _longest(job), f"{ROLLOUT}.max_model_len"
    if longest is None:
        return
    limit = job.get(key)
    found = model_config(job)
    context = found and _context(found[1])
    if context and isinstance(limit, int) and limit > context:
        yield Finding(
            "error",
            key,
            f"{limit} is more than the model's {context} positions (max_position_embeddings): the server refuses it",
            f"{key}={context}",
        )
        return
    smallest = min((x for x in (limit, context) if isinstance(x, int)), default=None)
    if smallest is not None and longest > smallest:
        where = key if limit == smallest else f"the model's max_position_embeddings ({found[0]})"
        yield Finding(
            "warning",
            "data.max_response_length",
            f"prompt and response may take {longest} tokens, and {where} is {smallest}: long responses end earlier",
            f"data.max_response_length={smallest - job.get('data.max_prompt_length')}",
        )


def _context(config: dict) -> int | None:
    for part in (config, config.get("text_config") or {}, config.get("thinker_config") or {}):
        if isinstance(part, dict) and isinstance(part.get("max_position_embeddings"), int):
            return part["max_position_embeddings"]
    return None


def _longest(job: Job) -> int | None:
    lengths = [job.get("data.max_prompt_length"), job.get("data.max_response_length")]
    return sum(lengths) if all(isinstance(length, int) for length in lengths) else None


def _asynchronous_checkpoints(job: Job) -> Iterator[Finding]:
    """A10, verl#7952."""
    key = f"{ACTOR}.checkpoint.async_save"
    if job.get(key, False) and job.get(STRATEGY) in ("fsdp", "fsdp2"):
        yield Finding(
            "warning",
            key,
            "on FSDP verl then never writes the file that says which checkpoint is the last: resume_mode=auto starts "
            "from the beginning",
            f"{key}=False",
        )


def _betas_reach_megatron(job: Job) -> Iterator[Finding]:
    """`verl/utils/megatron/optimizer.py` builds Megatron's settings from a list of keys without ``betas``."""
    block = f"{ACTOR}.optim"
    betas = job.get(f"{block}.betas")
    if job.get(STRATEGY) != "megatron" or betas is None or list(betas) == [0.9, 0.999]:  # Megatron's own
        return
    overrides = f"{block}.override_optimizer_config"
    wanted = {f"{overrides}.adam_beta{i}": beta for i, beta in enumerate(betas, start=1)}
    if any(job.get(key) != beta for key, beta in wanted.items()):
        yield Finding(
            "warning",
            f"{block}.betas",
            f"{list(betas)} does not reach Megatron's optimizer, which keeps its own 0.9 and 0.999",
            " ".join(f"{'' if job.has(key) else '+'}{key}={beta}" for key, beta in wanted.items()),
        )


def _cpu_platform(job: Job) -> Iterator[Finding]:
    if job.get("trainer.device") == "cpu" and os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        yield Finding(
            "error",
            "trainer.device",
            "cpu: verl takes its platform from the environment, and VERL_PLATFORM is not cpu there (export "
            "VERL_PLATFORM=cpu before the command)",
        )


ASYNC_RULES = (
    batch_is_a_cycle,
    _pools,
    _parallel_sizes,
    _info_log_line,
    _a_response_fits,
    _the_context_holds_it,
    _asynchronous_checkpoints,
    _betas_reach_megatron,
    _cpu_platform,
)
