"""``sat_grpo`` and ``sat_gspo`` in the signature of verl's policy losses (arXiv 2607.18722, Sec. 4).

Same steps as verl's ``vanilla`` and ``gspo`` (``verl/trainer/ppo/core_algos.py``), in the same order and with the same
reductions; between ratio and clip stands the trust region of ``verl_sat.trust_region``. Where nothing is contracted,
loss, gradient and the three shared metrics are verl's to the last bit. ``plugin.py`` registers the functions.

What is not verl's, and always counted or said:
    - 16-bit inputs are computed in fp32; one warning, because their log-probs cannot resolve small radii.
    - A NaN at an active token makes the loss NaN; metrics leave it out and ``nonfinite_frac`` counts it. Infinite
      log-probs are clamped and counted there too. Masked positions may hold anything.
    - An old log-prob of exactly 0.0 claims that the sampled token was certain. In a response where the current policy
      gives such a token less than ``MISSING_LOG_PROB`` nats, the zeros are a fill value: those tokens are left out of
      loss and statistics, counted in ``missing_log_prob_frac``, and warned about once. A batch-wide token or response
      count that verl passes is not reduced for them.
    - Without verl's batch-wide counts the means are over this call only; one warning.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from verl_sat import fused, scope
from verl_sat.advantage import clip_advantages
from verl_sat.metrics import assemble, measure, to_host
from verl_sat.order_statistic import Observations, quantile_of_call
from verl_sat.scope_facts import SCOPE_KEY, few_sequences
from verl_sat.trust_region import (
    LOG_RATIO_LIMIT,
    SEQUENCE_LOG_RATIO_LIMITS,
    GateLevel,
    inverse_cdf_quantile,
    mean_log_ratio,
    sat_trust_region,
    straight_through_ratio,
    surrogate,
    token_log_ratio,
)

if TYPE_CHECKING:
    from verl_sat.config import SATConfig

logger = logging.getLogger(__name__)

# Below this [nats, about 2 %] the current policy contradicts an old log-prob of 0.0 beyond what training can do.
MISSING_LOG_PROB = -4.0
# `plain` computes every call by the readable formula: to compare, or for second derivatives.
IMPLEMENTATION_VARIABLE = "VERL_SAT_LOSS"

_warned: set[str] = set()


def _warn_once(key: str, message: str, *args: Any) -> None:
    if key not in _warned:
        _warned.add(key)
        logger.warning(f"verl-sat: {message}", *args)


class _Batch(NamedTuple):
    """Inputs in the compute dtype, shape (batch_size, response_length), with harmless values where masked."""

    active: torch.Tensor  # bool: trained, and with a recorded old log-prob
    log_ratio: torch.Tensor  # with gradient, not clamped, 0 where not active
    advantages: torch.Tensor
    weights: torch.Tensor | None
    nonfinite: torch.Tensor  # bool: active, with an inf or NaN
    nan: torch.Tensor  # bool: with a NaN
    missing: torch.Tensor  # bool: left out for want of an old log-prob


def compute_policy_loss_sat_grpo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, dict[str, float]]:
    """SAT-GRPO: verl's vanilla clip with a per-token trust region that contracts with staleness.

    Args:
        old_log_prob: log-probs of the policy that sampled (in bypass mode the rollout engine's) [nats], shape
            (batch_size, response_length).
        log_prob: log-probs of the current policy [nats], with gradient, same shape.
        advantages: same shape.
        response_mask: 1 (or True) where the token is trained, same shape.
        loss_agg_mode: a mode of verl's ``agg_loss``.
        config: verl's ``ActorConfig``; read are ``clip_ratio``, ``clip_ratio_low``, ``clip_ratio_high``,
            ``clip_ratio_c``, ``policy_loss``, ``global_batch_info``, ``loss_scale_factor``.
        rollout_is_weights: correction weights, same shape, where verl passes them; they multiply the token losses.
        **unused: further keywords of later verl versions, ignored.

    Returns:
        The scalar loss, and the metrics ``verl_sat.metrics.METRIC_KEYS`` as floats.

    Raises:
        ValueError: a tensor or ``config`` is None, shapes differ, or a clip ratio is out of range.
        SATConfigError: the ``sat`` block is wrong.
    """
    return _sat_policy_loss(
        False, old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )


def compute_policy_loss_sat_gspo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, dict[str, float]]:
    """SAT-GSPO: verl's gspo with a trust region that contracts with the staleness of the response.

    Ratio and staleness of a token are its response's: the *mean* log-ratio over active tokens. The quantile is taken
    over tokens, so long responses weigh more (Eq. 20). As in verl's gspo there is no dual clip. Aggregation other than
    seq-mean-token-mean is honoured, with one warning.

    Args:
        old_log_prob: as ``compute_policy_loss_sat_grpo``.
        log_prob: as there.
        advantages: as there.
        response_mask: as there.
        loss_agg_mode: as there.
        config: as there, but ``clip_ratio_c`` is not read.
        rollout_is_weights: as there.
        **unused: as there.

    Returns:
        The scalar loss, and the metrics ``verl_sat.metrics.METRIC_KEYS`` as floats.

    Raises:
        ValueError: a tensor or ``config`` is None, shapes differ, or a clip ratio is out of range.
        SATConfigError: the ``sat`` block is wrong.
    """
    if loss_agg_mode != "seq-mean-token-mean":
        _warn_once(
            "gspo aggregation",
            "sat_gspo with actor_rollout_ref.actor.loss_agg_mode=%s: responses no longer weigh equally; "
            "GSPO is defined with seq-mean-token-mean.",
            loss_agg_mode,
        )
    return _sat_policy_loss(
        True, old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )


def _sat_policy_loss(
    sequence_level: bool,
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: torch.Tensor | None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Both losses: settings, the gate's scope, then the fast path or the plain formula, then the metrics."""
    from verl_sat.config import get_sat_config

    if config is None:
        raise ValueError("config is required: verl's ActorConfig with the clip ratios and the policy_loss block")
    sat = get_sat_config(config.get("policy_loss", None))
    clip_ratio_low, clip_ratio_high = _clip_radii(config)
    if sequence_level and old_log_prob is not None:
        old_log_prob = old_log_prob.detach()  # as in verl's gspo; verl's vanilla lets its gradient through
    call = _Call(
        sat,
        sequence_level,
        fused.Settings(
            clip_ratio_low,
            clip_ratio_high,
            None if sequence_level else _dual_clip(config),
            sat.kernel,
            sat.exponent,
            MISSING_LOG_PROB,
        ),
        config,
        loss_agg_mode,
        *_check(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights),
    )
    level, scope_name = scope.level_for_call(
        sat, sequence_level, observe=lambda: _observe(sequence_level, _prepare(call)), like=call.log_prob.detach()
    )
    result = _fast_path(call, level) or _plain_formula(call, level)
    if scope_name == "running":
        scope.remember(sat, sequence_level, result.observed, result.sequences)
    _warn_about(result.host, sat, sequence_level, scope_name)
    return result.loss, assemble(
        result.host,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        kernel=sat.kernel,
        exponent=sat.exponent,
    )


class _Call(NamedTuple):
    """Settings and checked inputs of one call; tensors of shape (batch_size, response_length), fp32 or fp64."""

    sat: SATConfig
    sequence_level: bool
    numbers: fused.Settings
    config: Any
    loss_agg_mode: str
    old_log_prob: torch.Tensor
    log_prob: torch.Tensor
    advantages: torch.Tensor
    trained: torch.Tensor  # bool
    weights: torch.Tensor | None


class _Result(NamedTuple):
    """What either path returns: loss with gradient, host values, and what the gate's quantile could be taken of."""

    loss: torch.Tensor
    host: dict[str, float]
    observed: Observations
    sequences: torch.Tensor


def _fast_path(call: _Call, level: scope.Level | None) -> _Result | None:
    """The formula as ``verl_sat.fused`` has it, None for a call that it does not take.

    What it takes depends on the inputs' kind, known at once, and on their values, which come with the metrics in the
    one transfer: log-probs that are not finite, beyond the clamp or never recorded make a second transfer, by the
    plain formula.
    """
    sat = call.sat
    clips_advantages = not (sat.advantage_clip_low is sat.advantage_clip_high is None)
    if (
        _plain_is_asked_for()
        or call.weights is not None
        or (clips_advantages and sat.advantage_clip_scope != "all")
        or not fused.supported(call.log_prob, call.old_log_prob, call.advantages, call.numbers)
    ):
        return None
    active, numbers = call.trained, call.numbers
    # Differentiable inputs enter the graph by `attach` alone.
    log_prob, old_log_prob = call.log_prob.detach(), call.old_log_prob.detach()
    first = fused.log_ratio(log_prob, old_log_prob, active, call.sequence_level, numbers.missing_log_prob)
    observed = first.observations()
    gate = _gate_level(sat, lambda: _quantile_of_call(observed, sat.quantile), level, first.kl)
    advantages, changed = clip_advantages(
        call.advantages.detach(), sat.advantage_clip_low, sat.advantage_clip_high, "all", stale=None
    )
    terms = (fused.sequence_terms if call.sequence_level else fused.token_terms)(first, advantages, gate, numbers)
    dtype = log_prob.dtype
    found = terms.sums
    sums = {
        "actor/pg_clipfrac": found["clipped"],
        "actor/pg_clipfrac_lower": found["dual_clipped"],
        "actor/ppo_kl": first.kl,
        "abs_log_ratio": first.distance,
        "clipfrac_low": found["clipped"] - found["clipfrac_high"],
        "advantage_clipfrac": first.kl.new_zeros(()) if changed is None else (changed & active).sum().to(dtype),
        **{name: found[name] for name in ("stale_frac", "shrink_low", "shrink_high")},
        **{name: found[name] for name in ("clipfrac_high", "intercepted_frac")},
    }
    responses = (first.lengths > 0).sum()
    host = to_host(
        {
            "quantile": gate.q,
            "contraction_strongest": terms.strongest,
            "num_sequences": responses if level is None else level.sequences,
            "opens": _opens(sat, level, found["stale_frac"] > 0),
            # an infinite advantage that was clipped is not in the loss any more
            "irregular": first.irregular | ~(found["loss"] if changed is None else call.advantages.sum()).isfinite(),
        },
        sums,
        (first.lengths.sum() + 1e-8).to(dtype),  # as verl's masked_mean, to the last bit
    )
    if host.pop("irregular"):
        _warn_once(
            "irregular",
            "SAT loss: a call holds a NaN or inf (perhaps in the padding), a log-ratio beyond the clamp or a log-prob "
            "that was never recorded. Such calls are computed a second time, by the plain formula, which is slower.",
        )
        return None
    host |= {"nonfinite_frac": 0.0, "missing_log_prob_frac": 0.0}
    token_loss = fused.attach(call.log_prob, call.old_log_prob, terms)
    return _Result(_aggregate(call, token_loss, active), host, observed, responses)


def _quantile_of_call(observed: Observations, level: float) -> torch.Tensor:
    if observed.counts is None:
        return quantile_of_call(observed, level)
    return inverse_cdf_quantile(observed.values, observed.counts, level)  # a value per response: a sort is cheaper


def _plain_is_asked_for() -> bool:
    value = os.environ.get(IMPLEMENTATION_VARIABLE, "")
    if value not in ("", "fast", "plain"):
        raise ValueError(f"{IMPLEMENTATION_VARIABLE}={value!r} is not allowed: expected 'fast' or 'plain'")
    return value == "plain"


def _plain_formula(call: _Call, level: scope.Level | None) -> _Result:
    """The formula as ``verl_sat.trust_region`` has it, for any input: the readable and checked reference."""
    sat, numbers = call.sat, call.numbers
    radii = dict(clip_ratio_low=numbers.clip_ratio_low, clip_ratio_high=numbers.clip_ratio_high)
    batch = _prepare(call)
    active, log_ratio = batch.active, batch.log_ratio

    # Ratio (with gradient) and staleness (without): per token, or the response's mean at each of its tokens.
    token_clamped = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    staleness = _staleness(call.sequence_level, batch)
    valid = staleness.valid
    if call.sequence_level:
        ratio = straight_through_ratio(log_ratio, mean_log_ratio(log_ratio, active).detach())
        token_valid = torch.where(valid, token_clamped.detach(), 0.0)
    else:
        ratio = torch.exp(token_clamped)
        token_valid = staleness.log_ratio

    gate = _gate_level(
        sat, lambda: inverse_cdf_quantile(staleness.observed, staleness.counts, sat.quantile), level, token_valid
    )
    region = sat_trust_region(
        staleness.log_ratio,
        gate.q,
        kernel=numbers.kernel,
        exponent=numbers.exponent,
        threshold=gate.threshold,
        **radii,
    )
    clipped_advantages, advantage_changed = clip_advantages(
        batch.advantages, sat.advantage_clip_low, sat.advantage_clip_high, sat.advantage_clip_scope, region.stale
    )
    token_loss = surrogate(ratio, clipped_advantages, region.lower, region.upper, numbers.clip_ratio_c)
    loss_mat = token_loss.loss if batch.weights is None else token_loss.loss * batch.weights
    loss = _aggregate(call, loss_mat, active)

    means = measure(
        valid=valid,
        region=region,
        token_loss=token_loss,
        ratio=ratio,
        staleness_log_ratio=staleness.log_ratio,
        log_ratio=token_valid,
        advantages=clipped_advantages,
        advantage_changed=advantage_changed,
        **radii,
    )
    q = gate.q
    trained = (active | batch.missing).sum().clamp(min=1).to(q.dtype)
    observed, responses = _as_observations(staleness)
    host = to_host(
        means
        | {
            "quantile": q,
            "contraction_strongest": region.contraction.amin() if region.contraction.numel() else q.new_ones(()),
            "nonfinite_frac": batch.nonfinite.sum() / trained,
            "missing_log_prob_frac": batch.missing.sum() / trained,
            "num_sequences": responses if level is None else level.sequences,
            "opens": _opens(sat, level, region.stale.any()),
        }
    )
    return _Result(loss, host, observed, responses)


def _aggregate(call: _Call, loss_mat: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    # Not at the top: importing verl loads the plugin, and the plugin imports this module. Whichever is imported first
    # in a process (unpickling a config in a worker, say), the plugin must find it complete.
    from verl.trainer.ppo.core_algos import agg_loss

    return agg_loss(
        loss_mat=loss_mat,
        loss_mask=active,
        loss_agg_mode=call.loss_agg_mode,
        **_aggregation_counts(call.config, active, call.loss_agg_mode),
    )


class _Staleness(NamedTuple):
    """The gated log-ratio of each token, and the values and counts that its quantile is taken of."""

    valid: torch.Tensor  # bool: active and free of NaN
    log_ratio: torch.Tensor  # detached, clamped, 0 where not valid
    observed: torch.Tensor  # its size, per token or per response
    counts: torch.Tensor  # bool per token, tokens per response


def _staleness(sequence_level: bool, batch: _Batch) -> _Staleness:
    log_ratio = batch.log_ratio.detach()
    valid = batch.active & ~batch.nan
    if not sequence_level:
        clamped = torch.where(valid, log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), 0.0)
        return _Staleness(valid, clamped, clamped.abs(), valid)
    mean = mean_log_ratio(log_ratio, batch.active).clamp(*SEQUENCE_LOG_RATIO_LIMITS)
    valid = valid & ~mean.isnan().unsqueeze(-1)
    # One entry per response, counted once per token: the quantile over broadcast tokens, without broadcasting.
    return _Staleness(valid, torch.where(valid, mean.unsqueeze(-1), 0.0), mean.abs(), valid.sum(dim=-1))


def _as_observations(staleness: _Staleness) -> tuple[Observations, torch.Tensor]:
    sequences = staleness.valid.any(dim=-1).sum()
    if staleness.counts.dtype != torch.bool:
        return Observations(staleness.observed, counts=staleness.counts), sequences
    # per token, what does not count is 0 there
    return Observations(staleness.observed, surplus_zeros=(~staleness.valid).sum()), sequences


def _observe(sequence_level: bool, batch: _Batch) -> tuple[Observations, torch.Tensor]:
    return _as_observations(_staleness(sequence_level, batch))


@torch.no_grad()
def observe(
    sequence_level: bool,
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
) -> tuple[Observations, torch.Tensor]:
    """What the gate's quantile is taken of, exactly as the losses take it, for an engine that looks ahead.

    Args:
        sequence_level: as ``sat_gspo``.
        old_log_prob: log-probs of the policy that sampled [nats], shape (batch_size, response_length).
        log_prob: of the current policy, same shape.
        advantages: same shape; tokens with a NaN here are left out too.
        response_mask: same shape.

    Returns:
        The observations, and the number of responses in them (0-dim).
    """
    return _observe(sequence_level, _prepare_inputs(*_check(old_log_prob, log_prob, advantages, response_mask, None)))


def _check(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_is_weights: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The inputs in the compute dtype, the mask as bool."""
    named = {
        "old_log_prob": old_log_prob,
        "log_prob": log_prob,
        "advantages": advantages,
        "response_mask": response_mask,
    }
    for name, tensor in named.items():
        if tensor is None:
            raise ValueError(f"{name} is required, got None")
    if rollout_is_weights is not None:
        named["rollout_is_weights"] = rollout_is_weights
    if len({tensor.shape for tensor in named.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in named.items())
        raise ValueError(f"all inputs must have the shape (batch_size, response_length) of log_prob, got {shapes}")
    if log_prob.dtype.itemsize < 4 or old_log_prob.dtype.itemsize < 4:
        _warn_once(
            "16 bit",
            "SAT loss: log_prob is %s and old_log_prob is %s, computed in fp32. 16-bit log-probs carry an error of the "
            "size of a small clip radius: have the engines return fp32.",
            log_prob.dtype,
            old_log_prob.dtype,
        )
    dtype = torch.promote_types(torch.promote_types(log_prob.dtype, old_log_prob.dtype), torch.float32)
    weights = None if rollout_is_weights is None else _at_least_fp32(rollout_is_weights)
    return (
        old_log_prob.to(dtype),
        log_prob.to(dtype),
        _at_least_fp32(advantages),
        response_mask.bool(),
        weights,
    )


def _prepare(call: _Call) -> _Batch:
    return _prepare_inputs(call.old_log_prob, call.log_prob, call.advantages, call.trained, call.weights)


def _prepare_inputs(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    trained: torch.Tensor,
    weights: torch.Tensor | None,
) -> _Batch:
    certain = trained & (old_log_prob == 0)
    contradicted = (certain & (log_prob < MISSING_LOG_PROB)).any(dim=-1, keepdim=True)
    missing = certain & contradicted
    active = trained & ~missing

    log_ratio = token_log_ratio(log_prob, old_log_prob, active)
    advantages = torch.where(active, advantages, 0.0)
    weights = None if weights is None else torch.where(active, weights, 0.0)
    # NaN or infinite where any of the inputs is: one test in place of three
    probe = log_ratio.detach() + advantages
    if weights is not None:
        probe = probe + weights
    return _Batch(active, log_ratio, advantages, weights, active & ~probe.isfinite(), probe.isnan(), missing)


def _at_least_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _gate_level(
    sat: SATConfig, own_quantile: Callable[[], torch.Tensor], level: scope.Level | None, like: torch.Tensor
) -> GateLevel:
    """The configured q, else that of a wider scope, else this call's quantile; never below ``q_min``."""
    if sat.q is not None:
        q = threshold = like.new_full((), sat.q)
    elif level is not None:
        q, threshold = level.gate
    else:
        q = threshold = own_quantile()
    if sat.q_min == 0:
        return GateLevel(q, threshold)
    return GateLevel(q.clamp(min=sat.q_min), torch.where(q < sat.q_min, sat.q_min, threshold))


def _opens(sat: SATConfig, level: scope.Level | None, in_call: torch.Tensor) -> torch.Tensor:
    """Whether anything in the scope is stale; where ``q_min`` overrides the scope's level, only the call knows."""
    return in_call if level is None else in_call | (level.opens & (level.gate.q >= sat.q_min))


def _clip_radii(config: Any) -> tuple[float, float]:
    """Nominal radii, with verl's fallback to ``clip_ratio``."""
    radii = []
    for name in ("clip_ratio_low", "clip_ratio_high"):
        value = config.get(name, None)
        value = config.get("clip_ratio", None) if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"actor_rollout_ref.actor.{name}={value!r} is not allowed: expected a finite number >= 0")
        radii.append(float(value))
    return radii[0], radii[1]


def _dual_clip(config: Any) -> float:
    clip_ratio_c = config.get("clip_ratio_c", 3.0)
    if clip_ratio_c is None or not clip_ratio_c > 1:
        raise ValueError(f"actor_rollout_ref.actor.clip_ratio_c={clip_ratio_c!r} is not allowed: expected a number > 1")
    return clip_ratio_c


def _aggregation_counts(config: Any, active: torch.Tensor, loss_agg_mode: str) -> dict[str, Any]:
    """Keyword arguments of ``agg_loss``: verl's batch-wide counts, this call's own where there are none."""
    counts = dict(config.get("global_batch_info", None) or {})
    if counts.get("loss_scale_factor") is None:
        counts["loss_scale_factor"] = config.get("loss_scale_factor", None)
    if loss_agg_mode == "seq-mean-token-sum-norm" and counts["loss_scale_factor"] is None:
        _warn_once(
            "loss_scale_factor",
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm without "
            "actor_rollout_ref.actor.loss_scale_factor divides by the padded width, so the loss depends on padding: "
            "set it to a constant, for example the maximum response length.",
        )
    name = {"token-mean": "batch_num_tokens", "token-sum": None}.get(loss_agg_mode, "global_batch_size")
    if name is None:
        return counts
    if counts.get(name) is not None:
        # an optimizer step without any active token: 0, not 0 / 0
        counts[name] = counts[name].clamp(min=1) if isinstance(counts[name], torch.Tensor) else max(counts[name], 1)
    elif (counts.get("dp_size") or 1) == 1:  # on more ranks verl raises, rightly
        _warn_once(
            "local counts",
            "SAT loss: no %s in config.global_batch_info, so loss_agg_mode=%s divides by this call's own count. "
            "With more than one micro-batch per optimizer step a mean of such means is not the mini-batch's.",
            name,
            loss_agg_mode,
        )
        counts[name] = (active if loss_agg_mode == "token-mean" else active.any(dim=-1)).sum().clamp(min=1)
    return counts


def _warn_about(host: dict[str, float], sat: SATConfig, sequence_level: bool, scope_name: str) -> None:
    """Say once what the numbers of a call give away."""
    if host["missing_log_prob_frac"] > 0:
        _warn_once(
            "missing",
            "SAT loss: %.1f %% of the tokens of this call have an old log-prob of exactly 0.0 in a response where the "
            "current policy contradicts it: they were never recorded. They are left out of the loss and counted in "
            "actor/sat/missing_log_prob_frac. Check actor_rollout_ref.rollout.calculate_log_probs.",
            100 * host["missing_log_prob_frac"],
        )
    if host["nonfinite_frac"] > 0:
        _warn_once(
            "nonfinite",
            "SAT loss: %.2g of the tokens of this call have an inf or NaN in log-prob, old log-prob, advantage or "
            "weight (actor/sat/nonfinite_frac). Infinite log-ratios are clamped; a NaN makes the loss NaN.",
            host["nonfinite_frac"],
        )
    needed = few_sequences(sat.quantile)
    if sequence_level and scope.is_adaptive(sat) and 0 < host["num_sequences"] < needed:
        _warn_once(
            "few sequences",
            "sat_gspo: the quantile is taken over %d responses (scope %s). Over so few it is mostly the longest "
            "response itself, so nothing, or next to nothing, counts as stale and the loss is plain GSPO (see "
            "actor/sat/inert). %s, or set actor_rollout_ref.actor.policy_loss.sat.q.",
            host["num_sequences"],
            scope_name,
            {
                "micro_batch": f"Set {SCOPE_KEY}=mini_batch or running, or raise "
                f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu to {needed} or more",
                "dp_group": f"Set {SCOPE_KEY}=mini_batch or running, or raise "
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu until all ranks together hold "
                f"{needed} or more in a micro-batch",
            }.get(
                scope_name,
                f"Raise actor_rollout_ref.actor.ppo_mini_batch_size until a mini-batch holds {needed} responses",
            ),
        )
    if sat.advantage_clip_scope == "stale" and not (sat.advantage_clip_low is sat.advantage_clip_high is None):
        if sat.kernel == "none":
            _warn_once(
                "stale scope",
                "actor_rollout_ref.actor.policy_loss.sat: with kernel=none no token is stale, so "
                "advantage_clip_scope=stale clips no advantage; use advantage_clip_scope=all.",
            )
