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
from verl_sat.loss_inputs import MISSING_LOG_PROB, Inputs, check_inputs, observe, prepare, staleness_of
from verl_sat.metrics import assemble, measure, to_host
from verl_sat.once import warn_once
from verl_sat.order_statistic import Observations, quantile_of_call
from verl_sat.scope_facts import SCOPE_KEY, few_sequences
from verl_sat.trust_region import (
    LOG_RATIO_LIMIT,
    GateLevel,
    inverse_cdf_quantile,
    mean_log_ratio,
    sat_trust_region,
    straight_through_ratio,
    surrogate,
)

if TYPE_CHECKING:
    from verl_sat.config import SATConfig

logger = logging.getLogger(__name__)

# `plain` computes every call by the readable formula: to compare, or for second derivatives.
IMPLEMENTATION_VARIABLE = "VERL_SAT_LOSS"


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
        warn_once(
            logger,
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
        check_inputs(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights),
    )
    level, scope_name = scope.level_for_call(
        sat, sequence_level, lambda: observe(sequence_level, call.inputs), like=call.inputs.log_prob.detach()
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
    """Settings and checked inputs of one call."""

    sat: SATConfig
    sequence_level: bool
    numbers: fused.Settings
    config: Any
    loss_agg_mode: str
    inputs: Inputs


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
    sat, inputs = call.sat, call.inputs
    if _plain_is_asked_for():
        return None
    obstacle = _obstacle(call)
    if obstacle:
        warn_once(
            logger, obstacle, "SAT loss: computed by the plain formula, which is slower, because of %s.", obstacle
        )
        return None
    active, numbers = inputs.trained, call.numbers
    # Differentiable inputs enter the graph by `attach` alone.
    log_prob, old_log_prob = inputs.log_prob.detach(), inputs.old_log_prob.detach()
    first = fused.log_ratio(log_prob, old_log_prob, active, call.sequence_level, numbers.missing_log_prob)
    observed = first.observations()
    gate = _gate_level(sat, lambda: _quantile_of_call(observed, sat.quantile), level, first.kl)
    advantages, changed = clip_advantages(
        inputs.advantages.detach(), sat.advantage_clip_low, sat.advantage_clip_high, "all", stale=None
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
            "irregular": first.irregular | ~(found["loss"] if changed is None else inputs.advantages.sum()).isfinite(),
        },
        sums,
        (first.lengths.sum() + 1e-8).to(dtype),  # as verl's masked_mean, to the last bit
    )
    if host.pop("irregular"):
        warn_once(
            logger,
            "irregular",
            "SAT loss: a call holds a NaN or inf (perhaps in the padding), a log-ratio beyond the clamp or a log-prob "
            "that was never recorded. Such calls are computed a second time, by the plain formula, which is slower.",
        )
        return None
    host |= {"nonfinite_frac": 0.0, "missing_log_prob_frac": 0.0}
    token_loss = fused.attach(inputs.log_prob, inputs.old_log_prob, terms)
    return _Result(_aggregate(call, token_loss, active), host, observed, responses)


def _obstacle(call: _Call) -> str | None:
    """What of a call's kind the fast path does not take, in words; None if it takes the call."""
    sat, inputs = call.sat, call.inputs
    if inputs.weights is not None:
        return "correction weights (rollout_is)"
    if sat.advantage_clip_scope != "all" and not (sat.advantage_clip_low is sat.advantage_clip_high is None):
        return "advantage_clip_scope=stale"
    return fused.obstacle(inputs.log_prob, inputs.old_log_prob, inputs.advantages, call.numbers)


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
    batch = prepare(call.inputs)
    active, log_ratio = batch.active, batch.log_ratio

    # Ratio (with gradient) and staleness (without): per token, or the response's mean at each of its tokens.
    token_clamped = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    staleness = staleness_of(call.sequence_level, batch)
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
    observed, responses = staleness.observations()
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
        warn_once(
            logger,
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
        warn_once(
            logger,
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
        warn_once(
            logger,
            "missing",
            "SAT loss: %.1f %% of the tokens of this call have an old log-prob of exactly 0.0 in a response where the "
            "current policy contradicts it: they were never recorded. They are left out of the loss and counted in "
            "actor/sat/missing_log_prob_frac. Check actor_rollout_ref.rollout.calculate_log_probs.",
            100 * host["missing_log_prob_frac"],
        )
    if host["nonfinite_frac"] > 0:
        warn_once(
            logger,
            "nonfinite",
            "SAT loss: %.2g of the tokens of this call have an inf or NaN in log-prob, old log-prob, advantage or "
            "weight (actor/sat/nonfinite_frac). Infinite log-ratios are clamped; a NaN makes the loss NaN.",
            host["nonfinite_frac"],
        )
    needed = few_sequences(sat.quantile)
    if sequence_level and scope.is_adaptive(sat) and 0 < host["num_sequences"] < needed:
        warn_once(
            logger,
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
            warn_once(
                logger,
                "stale scope",
                "actor_rollout_ref.actor.policy_loss.sat: with kernel=none no token is stale, so "
                "advantage_clip_scope=stale clips no advantage; use advantage_clip_scope=all.",
            )
