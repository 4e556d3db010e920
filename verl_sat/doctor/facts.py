"""What a configuration will do, in a few lines: the part of the doctor's report that is no complaint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from verl_sat.preflight_job import BYPASS, CORRECTION, SAT_BLOCK, Job
from verl_sat.preflight_r3_job import ROLLOUT, installed, model_config, on_fsdp, own_key, records, replays
from verl_sat.preflight_scope import ACTOR, STRATEGY, describe_scope, is_adaptive, responses_in_scope
from verl_sat.router_replay.client import FLAG_KEY
from verl_sat.router_replay.layout import MoELayout, NotMoEError

PACKAGES = (
    "verl-sat",
    "verl",
    "torch",
    "ray",
    "transformers",
    "tensordict",
    "TransferQueue",
    "sglang",
    "vllm",
    "megatron-core",
    "math-verify",
)

Fact = tuple[str, str]
"""A heading and what there is to say under it."""


def installed_versions() -> dict[str, str | None]:
    """Installed versions, None for a package that is not on this machine."""
    return {name: installed(name) for name in PACKAGES}


def describe(job: Job, losses: dict[str, str]) -> list[Fact]:
    """Everything there is to say about a job, in the order of the report.

    Args:
        job: the configuration.
        losses: verl's registry of policy losses, name -> function; empty if verl could not be imported.
    """
    rules = (_denominator, _radii, _aggregation, _scope, _replay, _routes_memory, _sampling, _evaluation)
    found = list(_loss(job, losses))
    for rule in rules:
        found.extend(rule(job))
    return found


def _loss(job: Job, losses: dict[str, str]) -> Iterator[Fact]:
    where = losses.get(job.loss_mode)
    whose = "verl-sat" if str(where).startswith("verl_sat.") else "verl"
    text = job.loss_mode or "not set"
    yield "loss", f"{text}: {where} ({whose})" if where else text
    if job.sat:
        options = job.get(SAT_BLOCK) or {}
        shown = ", ".join(f"{name} {options[name]}" for name in options if options[name] is not None)
        yield "loss", f"options: {shown or 'the defaults'}"


def _denominator(job: Job) -> Iterator[Fact]:
    if job.bypass:
        yield "denominator", f"the rollout engine's log-probs ({BYPASS}=True): the ratio is pi / mu"
        return
    n = job.updates_per_old_log_prob
    shared = "" if n is None else f", shared by {n} update" + ("s" if n != 1 else "")
    yield "denominator", f"log-probs recomputed by the trainer ({BYPASS}=False){shared}"
    weights = job.get(f"{CORRECTION}.rollout_is")
    if weights:
        bound = job.get(f"{CORRECTION}.rollout_is_threshold")
        yield "denominator", f"importance weights per {weights}, truncated at {bound}: pi_old / mu"


def _radii(job: Job) -> Iterator[Fact]:
    low, high = (job.get(f"{ACTOR}.clip_ratio_{side}") for side in ("low", "high"))
    if not all(isinstance(x, int | float) for x in (low, high)):
        return
    if job.loss_mode.startswith("dppo"):
        yield "radii", f"{low:g} / {high:g}, here bounds of the divergence, not of the ratio"
    elif job.sat and job.contracts and 0 <= low < 1 and high >= 0:
        limits = f"{-math.log1p(-low):.3f} / {math.log1p(high):.3f}"
        yield "radii", f"{low:g} / {high:g} nominal; SAT is inert where its gate level is beyond {limits} nats"
    else:
        yield "radii", f"{low:g} / {high:g}"


def _aggregation(job: Job) -> Iterator[Fact]:
    yield "aggregation", str(job.get(f"{ACTOR}.loss_agg_mode", "token-mean"))


def _scope(job: Job) -> Iterator[Fact]:
    if not is_adaptive(job):
        return
    found = responses_in_scope(job)
    micro = job.get(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    tokens = job.get(f"{ACTOR}.ppo_max_token_len_per_gpu")
    batches = f"micro-batches of up to {tokens} tokens" if job.get(f"{ACTOR}.use_dynamic_bsz", False) else (
        f"micro-batches of {micro} responses")  # fmt: skip
    held = f"{found} responses" if found is not None else "a number of responses that varies"
    yield "scope", f"{describe_scope(job).removeprefix(', ')}: {held}; {batches}"


def _replay(job: Job) -> Iterator[Fact]:
    if not (replays(job) or job.get(FLAG_KEY, False)):
        yield "replay", "none: every engine routes by itself"
        return
    engine = job.get(f"{ROLLOUT}.name")
    version = installed(str(engine))
    here = version or "not on this machine, its version is checked by its own processes"
    recorded = "returns its routes" if job.get(FLAG_KEY, False) else "does not return routes"
    yield "replay", f"rollout: {engine} ({here}) {recorded}"
    if not records(job):
        yield "replay", f"actor: {own_key(job)} is not R3, nothing is replayed"
        return
    if on_fsdp(job):
        yield "replay", f"actor: verl-sat's engine on {job.get(STRATEGY)}; proof in actor/r3/*"
    else:
        yield "replay", f"actor: verl's own replay on {job.get(STRATEGY)}; verl has no metric that proves it"
    passes = "none in bypass mode" if job.bypass else "replayed too"
    yield "replay", f"pass for old_log_prob: {passes}; reference and critic: their own routers"


def _routes_memory(job: Job) -> Iterator[Fact]:
    if not records(job):
        return
    lengths = [job.get("data.max_prompt_length"), job.get("data.max_response_length")]
    found = model_config(job)
    if found is None:
        yield "routes", "the model's config.json is not here: give it with --model-config to see their size"
        return
    try:
        layout = MoELayout.from_config(found[1])
    except (NotMoEError, ValueError):
        return  # a finding of the preflight
    ids = layout.num_layers * layout.top_k
    # verl's own transport is int16
    per_token = layout.bytes_per_token if on_fsdp(job) else 2 * ids
    text = f"{ids} ids a token ({layout.num_layers} layers x top-{layout.top_k} of {layout.num_experts})"
    text += f", {per_token} B a token"
    if all(isinstance(x, int) for x in lengths):
        text += f", up to {per_token * sum(lengths) / 2**20:.1f} MiB a response"
        prompts, n = job.get("data.train_batch_size"), job.get(f"{ROLLOUT}.n", 1)
        if isinstance(prompts, int) and isinstance(n, int):
            gib = per_token * sum(lengths) * prompts * n / 2**30
            text += f", at most {gib:.0f} GiB of host memory for a step's {prompts * n} (spread over nodes)"
    yield "routes", text
    if not on_fsdp(job):
        yield "routes", "as verl carries them on this engine (int16; its trainer holds int64 per layer while it trains)"


def _sampling(job: Job) -> Iterator[Fact]:
    values = {name: job.get(f"{ROLLOUT}.{name}") for name in ("temperature", "top_p", "top_k", "n")}
    yield "sampling", ", ".join(f"{name} {_number(value)}" for name, value in values.items())


def _evaluation(job: Job) -> Iterator[Fact]:
    every = job.get("trainer.test_freq", -1)
    if not isinstance(every, int) or every <= 0:
        yield "evaluation", "none (trainer.test_freq)"
        return
    updates = every * job.updates_per_version if job.trainer == "v1" else every
    n = job.get(f"{ROLLOUT}.val_kwargs.n", 1)
    yield "evaluation", f"every {every} trainer steps, {updates} optimizer updates, {n} samples of each problem"


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
