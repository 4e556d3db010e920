"""The staleness-adaptive trust region (SAT) as tensor arithmetic; torch only, no verl.

Source: arXiv 2607.18722, Sections 3 and 4. Read top to bottom this module is the rule:

1. ``token_log_ratio`` / ``mean_log_ratio``: the sampled log-ratio d, Eq. 13 (per token or per response);
2. ``inverse_cdf_quantile``: the gate level q over the scope's tokens, Eq. 14;
3. ``sat_trust_region``: gate, kernel and one-sided contraction of the clip interval, Eq. 15-17;
4. ``surrogate``: the pessimistic clipped loss, Eq. 18-19, with verl's dual clip;
5. ``effective_radii``, ``is_inert``: what that interval amounts to, in terms of plain PPO.

Contract
    - A *masked* position holds a log-ratio of exactly 0, put there with ``where`` before any other
      arithmetic. Zero can never be stale, so nothing below needs the mask again.
    - ``q`` is an ordinary input of step 3: where it was taken from (this micro-batch, all ranks, the whole
      mini-batch, the last one) is the caller's business.
    - Floating dtype in is floating dtype out (fp32 or fp64). Nothing here copies to the host.
    - Steps 1-4 work on tensors; step 5 works on Python floats, after the caller's one transfer: its
      bisection would otherwise be some hundred tiny kernels.
"""

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple, TypeVar

import torch

# Beyond these the ratio is numerically meaningless; the clamp also keeps one infinite log-prob from setting q.
LOG_RATIO_LIMIT = 20.0
# A response's mean log-ratio; the upper end is the clamp of verl's gspo.
SEQUENCE_LOG_RATIO_LIMITS = (-20.0, 10.0)

Number = TypeVar("Number", float, torch.Tensor)

# psi(u; p) with u = |d| / q > 1. Each falls to 0 as u grows; "none" is the ablation without contraction.
KERNELS: dict[str, Callable[[Number, float], Number]] = {
    "hill": lambda u, p: 1 / (1 + u**p),
    "hill_excess": lambda u, p: 1 / (1 + (u - 1) ** p),
    "inverse_power": lambda u, p: u**-p,
    "none": lambda u, p: u * 0 + 1,
}


class GateLevel(NamedTuple):
    """Where the gate of Eq. 16 stands; 0-dim tensors, detached.

    Attributes:
        q: the quantile [nats], which the kernel is relative to; 0 closes the gate.
        threshold: a token is stale iff its |log-ratio| is above this [nats]. It is q, or lies between q and the next
            larger observation where both were taken in another forward pass: rounding between the two passes must not
            make the very response that set q stale.
    """

    q: torch.Tensor
    threshold: torch.Tensor


class TrustRegion(NamedTuple):
    """Clip interval of every token; all fields have the shape of the log-ratio.

    Attributes:
        stale: bool, the token lies beyond the gate (Eq. 16).
        contraction: c in [0, 1], 1 where not stale (Eq. 15).
        lower: lower clip endpoint of the ratio, ``1 - clip_ratio_low <= lower <= 1``.
        upper: upper clip endpoint of the ratio, ``1 <= upper <= 1 + clip_ratio_high``.
    """

    stale: torch.Tensor
    contraction: torch.Tensor
    lower: torch.Tensor
    upper: torch.Tensor


class Surrogate(NamedTuple):
    """Per-token loss and which clip acted; all fields have the shape of the ratio.

    Attributes:
        loss: the negated surrogate, before any weighting or aggregation.
        clipped: bool, the clip interval decides the loss (gradient 0).
        dual_clipped: bool, the dual clip decides the loss (gradient 0); False everywhere without one.
    """

    loss: torch.Tensor
    clipped: torch.Tensor
    dual_clipped: torch.Tensor


def token_log_ratio(log_prob: torch.Tensor, old_log_prob: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log-ratio log pi - log mu of each token, exactly 0 where masked (Eq. 13), not clamped.

    Args:
        log_prob: log-probabilities under the current policy [nats], shape (batch_size, response_length).
        old_log_prob: log-probabilities under the policy that sampled, same shape and dtype.
        mask: bool, True where the token is trained, same shape.

    Returns:
        Log-ratio [nats], same shape. Whatever sits at masked positions, NaN and inf included, reaches neither the
        value nor the gradient.
    """
    return torch.where(mask, log_prob - old_log_prob, 0.0)


def mean_log_ratio(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Length-normalised log-ratio of each response: the mean over its active tokens, never their sum.

    Args:
        log_ratio: from ``token_log_ratio``, shape (batch_size, response_length).
        mask: bool, True where the token is trained, same shape.

    Returns:
        Mean log-ratio [nats], shape (batch_size,), not clamped; 0 for a response without active tokens.
    """
    lengths = mask.sum(dim=-1).clamp(min=1)
    return log_ratio.sum(dim=-1) / lengths


def straight_through_ratio(log_ratio: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """GSPO's ratio: the response's value at every token, the token's own gradient.

    Args:
        log_ratio: from ``token_log_ratio``, shape (batch_size, response_length).
        mean: from ``mean_log_ratio``, shape (batch_size,).

    Returns:
        Ratio, shape (batch_size, response_length): ``exp(mean)`` in value; its derivative by each token's
        log-probability is the ratio itself (the form of verl's gspo).
    """
    # inf - inf would be NaN: an infinite log-prob is already in `mean` and has no useful gradient of its own.
    gradient_path = torch.where(log_ratio.isfinite(), log_ratio - log_ratio.detach(), 0.0)
    low, high = SEQUENCE_LOG_RATIO_LIMITS
    return torch.exp(torch.clamp(gradient_path + mean.detach().unsqueeze(-1), low, high))


def inverse_cdf_quantile(values: torch.Tensor, counts: torch.Tensor, level: float) -> torch.Tensor:
    """Smallest value whose empirical distribution function reaches ``level``; no interpolation (Eq. 14).

    Args:
        values: observations, any shape. Entries of count 0 are ignored, NaN ones included.
        counts: how often each value was observed, bool or integer, same shape. A mask for tokens; the number of
            active tokens for responses, which is the same as repeating a response's value for each of its tokens.
        level: quantile in (0, 1].

    Returns:
        0-dim tensor of the dtype of ``values``: the ``ceil(level * n)``-th smallest of the ``n = counts.sum()``
        observations, 0 if there is none. Detached.
    """
    values = values.detach().flatten()
    if values.numel() == 0:
        return values.new_zeros(())
    ordered, order = values.sort()
    cumulative = counts.flatten()[order].cumsum(dim=0, dtype=torch.int64)
    observed = cumulative[-1]
    # The rank in integers: as a float, 0.07 * 100 is a little more than 7 and its ceiling would be 8.
    share = Fraction(level).limit_denominator(10**9)
    rank = (observed * share.numerator + (share.denominator - 1)) // share.denominator
    index = torch.searchsorted(cumulative, rank.clamp(min=1)).clamp(max=values.numel() - 1)
    # take, not ordered[index]: indexing by a 0-dim tensor copies the index to the host
    return torch.where(observed > 0, ordered.take(index), 0.0)


def sat_trust_region(
    log_ratio: torch.Tensor,
    q: torch.Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    kernel: str = "hill",
    exponent: float = 2.0,
    threshold: torch.Tensor | None = None,
) -> TrustRegion:
    """Contract the outward clip endpoint of stale tokens (Eq. 15-17).

    Args:
        log_ratio: log pi - log mu [nats], detached, clamped, 0 where masked; shape (batch_size, response_length).
            At sequence level every active token carries its response's mean.
        q: gate level [nats], 0-dim, same dtype, >= 0; 0 closes the gate.
        clip_ratio_low: nominal lower radius.
        clip_ratio_high: nominal upper radius.
        kernel: a key of ``KERNELS``; with ``none`` no token counts as stale.
        exponent: power of the kernel, > 0.
        threshold: as in ``GateLevel``; None is q.

    Returns:
        The trust region, each field of shape (batch_size, response_length), detached.
    """
    staleness = log_ratio.abs()
    stale = (q > 0) & (staleness > (q if threshold is None else threshold))  # strict: a tie with q is not stale
    if kernel == "none":
        stale = torch.zeros_like(stale)
    relative = torch.where(stale, staleness / q, 1.0)  # 0 / 0 and x / 0 are not selected: the gate is shut there
    contraction = torch.where(stale, KERNELS[kernel](relative, exponent), 1.0)

    # Nominal endpoints are written as scalars, as verl's clip has them, so that uncontracted tokens agree with it to
    # the last bit. Contracted ones stay inside them although eps is rounded to the dtype here: c is at least one unit
    # in the last place below 1, and that outweighs the rounding of eps.
    contracted = contraction < 1
    lower = torch.where(contracted & (log_ratio < 0), 1 - clip_ratio_low * contraction, 1 - clip_ratio_low)
    upper = torch.where(contracted & (log_ratio > 0), 1 + clip_ratio_high * contraction, 1 + clip_ratio_high)
    return TrustRegion(stale, contraction, lower, upper)


def surrogate(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    lower: torch.Tensor,
    upper: torch.Tensor,
    clip_ratio_c: float | None = None,
) -> Surrogate:
    """Negated pessimistic surrogate ``max(-A r, -A clip(r, lower, upper))`` per token (Eq. 18-19).

    Args:
        ratio: importance ratio with gradient, shape (batch_size, response_length).
        advantages: same shape.
        lower: lower clip endpoint, same shape.
        upper: upper clip endpoint, same shape.
        clip_ratio_c: dual clip: for A < 0 the loss is at most ``-A * clip_ratio_c`` (as verl's vanilla); None is off.

    Returns:
        Loss and clip flags, each of shape (batch_size, response_length).
    """
    unclipped_loss = -advantages * ratio
    # clamp, not minimum(maximum()): at an exact tie those would pass half the gradient
    clipped_loss = -advantages * torch.clamp(ratio, lower, upper)
    loss = torch.maximum(unclipped_loss, clipped_loss)
    clipped = clipped_loss > unclipped_loss
    if clip_ratio_c is None:
        return Surrogate(loss, clipped, torch.zeros_like(clipped))
    cap = -advantages * clip_ratio_c
    negative = advantages < 0
    return Surrogate(torch.where(negative, torch.minimum(cap, loss), loss), clipped, (loss > cap) & negative)


def nominal_log_radii(clip_ratio_low: float, clip_ratio_high: float) -> tuple[float, float]:
    """Log-ratios [nats, >= 0] at which plain PPO starts to clip: below the lower and above the upper endpoint."""
    low = math.inf if clip_ratio_low >= 1 else -math.log1p(-clip_ratio_low)
    return low, math.log1p(clip_ratio_high)


def is_inert(q: float, any_stale: bool, clip_ratio_low: float, clip_ratio_high: float) -> bool:
    """Whether SAT's gradient is plain PPO's: nothing is stale, or PPO clips before the gate opens, on both sides."""
    low, high = nominal_log_radii(clip_ratio_low, clip_ratio_high)
    return not any_stale or (q >= low and q >= high)


@functools.lru_cache(maxsize=16)  # a wide scope has the same q in every micro-batch
def effective_radii(
    q: float, *, clip_ratio_low: float, clip_ratio_high: float, kernel: str = "hill", exponent: float = 2.0
) -> tuple[float, float]:
    """Radii of the plain PPO clip that has SAT's gradient at this q.

    The distance of a ratio from 1, less the contracted radius, grows with |d|; so on each side there is one crossing,
    and clipping there by a plain interval zeroes exactly the gradients that SAT zeroes. (Loss values of clipped tokens
    differ.) At a kernel that jumps at the gate the crossing may be the gate itself.

    Args:
        q: gate level [nats], >= 0.
        clip_ratio_low: nominal lower radius.
        clip_ratio_high: nominal upper radius.
        kernel: a key of ``KERNELS``.
        exponent: power of the kernel, > 0.

    Returns:
        (lower, upper) radius; the nominal one on a side that PPO clips before the gate opens, or with the gate shut.
    """
    low, high = nominal_log_radii(clip_ratio_low, clip_ratio_high)

    def contraction(log_ratio: float) -> float:
        try:
            return KERNELS[kernel](log_ratio / q, exponent)
        except OverflowError:  # u**p beyond a float: full contraction
            return 0.0

    def below(log_ratio: float) -> float:
        return -math.expm1(-log_ratio)

    def effective(nominal: float, log_radius: float, distance: Callable[[float], float]) -> float:
        if q <= 0 or q >= log_radius or kernel == "none":
            return nominal
        inside, outside = q, min(log_radius, LOG_RATIO_LIMIT)
        for _ in range(64):  # halvings of an interval of at most 20 nats: down to the last bit
            middle = (inside + outside) / 2
            if distance(middle) >= nominal * contraction(middle):
                outside = middle
            else:
                inside = middle
        return min(nominal, distance(outside))

    return effective(clip_ratio_low, low, below), effective(clip_ratio_high, high, math.expm1)
