"""What verl passes to a policy loss, checked and made harmless where masked, and what the gate's quantile is taken of.

Both losses begin here, on either path, and so does an engine that looks at a mini-batch before it is split
(`verl_sat/engine/look_ahead.py`): what counts as an observation is decided in one place.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from verl_sat.once import warn_once
from verl_sat.order_statistic import Observations
from verl_sat.trust_region import LOG_RATIO_LIMIT, SEQUENCE_LOG_RATIO_LIMITS, mean_log_ratio, token_log_ratio

logger = logging.getLogger(__name__)

# Below this [nats, about 2 %] the current policy contradicts an old log-prob of 0.0 beyond what training can do.
MISSING_LOG_PROB = -4.0


class Inputs(NamedTuple):
    """A call's tensors in the compute dtype (fp32 or fp64), all of shape (batch_size, response_length).

    Attributes:
        old_log_prob: log-probs of the policy that sampled [nats].
        log_prob: log-probs of the current policy [nats], with gradient.
        advantages: as passed.
        trained: bool, the response mask.
        weights: correction weights, None without.
    """

    old_log_prob: torch.Tensor
    log_prob: torch.Tensor
    advantages: torch.Tensor
    trained: torch.Tensor
    weights: torch.Tensor | None = None


class Batch(NamedTuple):
    """Inputs with harmless values where masked, shape (batch_size, response_length).

    Attributes:
        active: bool, trained and with a recorded old log-prob.
        log_ratio: with gradient, not clamped, 0 where not active.
        advantages: 0 where not active.
        weights: 0 where not active, None without.
        nonfinite: bool, active with an inf or NaN.
        nan: bool, with a NaN.
        missing: bool, left out for want of an old log-prob.
    """

    active: torch.Tensor
    log_ratio: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor | None
    nonfinite: torch.Tensor
    nan: torch.Tensor
    missing: torch.Tensor


class Staleness(NamedTuple):
    """The gated log-ratio of each token, and the values that its quantile is taken of.

    Attributes:
        valid: bool, active and free of NaN, shape (batch_size, response_length).
        log_ratio: detached, clamped, 0 where not valid, same shape.
        observed: its size: of each token (0 where not valid), or of each response, shape (batch_size,).
        counts: how often each is observed: ``valid``, or the valid tokens of each response.
    """

    valid: torch.Tensor
    log_ratio: torch.Tensor
    observed: torch.Tensor
    counts: torch.Tensor

    def observations(self) -> tuple[Observations, torch.Tensor]:
        """For the quantile; and how many responses are in them (0-dim)."""
        responses = self.valid.any(dim=-1).sum()
        if self.counts is self.valid:
            return Observations(self.observed, surplus_zeros=(~self.valid).sum()), responses
        return Observations(self.observed, counts=self.counts), responses


def check_inputs(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_is_weights: torch.Tensor | None = None,
) -> Inputs:
    """The inputs in the compute dtype: fp32, or fp64 if one of the log-probs is.

    Args:
        old_log_prob: shape (batch_size, response_length), any float dtype; 16-bit ones are warned about once.
        log_prob: same shape.
        advantages: same shape.
        response_mask: same shape, bool or number.
        rollout_is_weights: same shape, or None.

    Raises:
        ValueError: one is None, or shapes differ.
    """
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
        warn_once(
            logger,
            "16 bit",
            "SAT loss: log_prob is %s and old_log_prob is %s, computed in fp32. 16-bit log-probs carry an error of the "
            "size of a small clip radius: have the engines return fp32.",
            log_prob.dtype,
            old_log_prob.dtype,
        )
    dtype = torch.promote_types(torch.promote_types(log_prob.dtype, old_log_prob.dtype), torch.float32)
    return Inputs(
        old_log_prob.to(dtype),
        log_prob.to(dtype),
        _at_least_fp32(advantages),
        response_mask.bool(),
        None if rollout_is_weights is None else _at_least_fp32(rollout_is_weights),
    )


def _at_least_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def prepare(inputs: Inputs) -> Batch:
    """Leave out what was never recorded, mask, and find what is not finite."""
    certain = inputs.trained & (inputs.old_log_prob == 0)
    contradicted = (certain & (inputs.log_prob < MISSING_LOG_PROB)).any(dim=-1, keepdim=True)
    missing = certain & contradicted
    active = inputs.trained & ~missing

    log_ratio = token_log_ratio(inputs.log_prob, inputs.old_log_prob, active)
    advantages = torch.where(active, inputs.advantages, 0.0)
    weights = None if inputs.weights is None else torch.where(active, inputs.weights, 0.0)
    # NaN or infinite where any of the inputs is: one test in place of three
    probe = log_ratio.detach() + advantages
    if weights is not None:
        probe = probe + weights
    return Batch(active, log_ratio, advantages, weights, active & ~probe.isfinite(), probe.isnan(), missing)


def staleness_of(sequence_level: bool, batch: Batch) -> Staleness:
    """Staleness per token, or the response's mean at each of its tokens (Eq. 13, 20).

    Args:
        sequence_level: as ``sat_gspo``.
        batch: from :func:`prepare`.
    """
    log_ratio = batch.log_ratio.detach()
    valid = batch.active & ~batch.nan
    if not sequence_level:
        clamped = torch.where(valid, log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), 0.0)
        return Staleness(valid, clamped, clamped.abs(), valid)
    mean = mean_log_ratio(log_ratio, batch.active).clamp(*SEQUENCE_LOG_RATIO_LIMITS)
    valid = valid & ~mean.isnan().unsqueeze(-1)
    # One entry per response, counted once per token: the quantile over broadcast tokens, without broadcasting.
    return Staleness(valid, torch.where(valid, mean.unsqueeze(-1), 0.0), mean.abs(), valid.sum(dim=-1))


@torch.no_grad()
def observe(sequence_level: bool, inputs: Inputs) -> tuple[Observations, torch.Tensor]:
    """What the gate's quantile is taken of, exactly as the losses take it; and the number of responses (0-dim).

    Args:
        sequence_level: as ``sat_gspo``.
        inputs: from :func:`check_inputs`.
    """
    return staleness_of(sequence_level, prepare(inputs)).observations()
