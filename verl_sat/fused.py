"""The SAT surrogate in few passes: the same numbers as ``trust_region`` read top to bottom, several times faster.

``trust_region`` says what is computed; this module says it again for speed. It writes loss and derivative side by
side, block by block in reused buffers, so that autograd neither records nor keeps the some forty intermediate tensors
of the formula. Three observations carry it:

- A masked position has log-ratio 0, so ratio 1, which no clip touches: after one multiplication by the mask, nothing
  below needs it again. (Multiplied, not selected: ``where`` on a byte mask costs ten multiplications. A NaN in the
  padding survives that, is seen, and sends the call to the plain formula.)
- Choosing the contracted side by the sign of the advantage gives the same loss and gradient as choosing it by the sign
  of the log-ratio (Eq. 17, and the remark after it), so both endpoints are contracted and one clamp does.
- The derivative is a weight times the ratio: 1 where the interval does not act, 0 where it does, and at exact ties the
  1/2 that autograd gives to each side of a ``maximum``. Those weights are reproduced, so gradients agree with the plain
  formula, and with verl's losses where nothing is contracted, to the last bit.

What this path does not do (values that are not finite, log-ratios beyond the clamp, old log-probs that were never
recorded) it detects in numbers that it needs anyway; they travel with the metrics in the call's one transfer, and the
caller repeats the call by the plain formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from verl_sat.order_statistic import Observations
from verl_sat.trust_region import KERNELS, LOG_RATIO_LIMIT, SEQUENCE_LOG_RATIO_LIMITS, GateLevel

# Elements handled at a time on a CPU: six buffers of this size stay in a core's second-level cache.
CPU_BLOCK = 1 << 16
# Beyond this, `1 + eps - eps * (1 - c)` has lost digits of `1 + eps * c` that matter.
LARGEST_RADIUS = 4.0
# Steeper than any log-prob: `d - STEEP * old_log_prob` is below a bound on d only where old_log_prob is 0.
STEEP = 1e9


class Settings(NamedTuple):
    """The numbers of the formula, all on the host.

    Attributes:
        clip_ratio_low: nominal lower radius.
        clip_ratio_high: nominal upper radius.
        clip_ratio_c: dual clip, None for none.
        kernel: a key of ``trust_region.KERNELS``.
        exponent: its power.
        missing_log_prob: log-ratio [nats] below which an old log-prob of exactly 0 is taken for a fill value.
    """

    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_c: float | None
    kernel: str
    exponent: float
    missing_log_prob: float


class LogRatio(NamedTuple):
    """First pass: the log-ratio, its size, and what could be wrong with it.

    Attributes:
        mask: active positions as 0 and 1, dtype of the log-probs, shape (batch_size, response_length).
        signed: log-ratio [nats], 0 where masked, same shape. The second pass overwrites it by the ratio.
        size: its absolute value, same shape.
        lengths: active tokens of each response, int64, shape (batch_size,).
        mean: mean log-ratio of each response, shape (batch_size,); None at token level.
        irregular: 0-dim bool, the plain formula has to be used.
        kl: minus the summed log-ratio, 0-dim.
        distance: summed absolute log-ratio, 0-dim.
    """

    mask: torch.Tensor
    signed: torch.Tensor
    size: torch.Tensor
    lengths: torch.Tensor
    mean: torch.Tensor | None
    irregular: torch.Tensor
    kl: torch.Tensor
    distance: torch.Tensor

    def observations(self) -> Observations:
        """What the gate's quantile is taken of: tokens, or a response once for each of its tokens (Eq. 14, 20)."""
        if self.mean is None:
            return Observations(self.size, surplus_zeros=self.size.numel() - self.lengths.sum())
        return Observations(self.mean.clamp(*SEQUENCE_LOG_RATIO_LIMITS).abs(), counts=self.lengths)


def obstacle(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, advantages: torch.Tensor, settings: Settings
) -> str | None:
    """What this path does not take in such a call, in words; None if it takes it."""
    dtype = log_prob.dtype
    if dtype not in (torch.float32, torch.float64) or not old_log_prob.dtype == advantages.dtype == dtype:
        return f"dtypes {log_prob.dtype}, {old_log_prob.dtype}, {advantages.dtype} that are not one"
    if log_prob.dim() != 2 or log_prob.numel() == 0:
        return "a call that is empty, or not of shape (batch_size, response_length)"
    if advantages.requires_grad:
        return "advantages with a gradient"
    if max(settings.clip_ratio_low, settings.clip_ratio_high) > LARGEST_RADIUS:
        return f"a clip ratio beyond {LARGEST_RADIUS:g}"
    return None


def _blocks(tensor: torch.Tensor) -> Iterator[slice]:
    """Slices of rows; the whole tensor at once on an accelerator, where a launch costs more than a cache miss."""
    rows, columns = tensor.shape
    step = rows if tensor.device.type != "cpu" else max(1, CPU_BLOCK * torch.get_num_threads() // columns)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


@torch.no_grad()
def log_ratio(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, mask: torch.Tensor, sequence_level: bool, missing: float
) -> LogRatio:
    """The first pass.

    Args:
        log_prob: log-probs of the current policy [nats], shape (batch_size, response_length).
        old_log_prob: of the policy that sampled, same shape and dtype.
        mask: bool, same shape.
        sequence_level: take the mean of each response too.
        missing: as ``Settings.missing_log_prob``.
    """
    active = mask.to(log_prob.dtype)
    signed, size = torch.empty_like(active), torch.empty_like(active)
    unrecorded = []
    for rows in _blocks(log_prob):
        block = torch.sub(log_prob[rows], old_log_prob[rows], out=signed[rows])
        torch.abs(block.mul_(active[rows]), out=size[rows])
        certain = torch.clamp(old_log_prob[rows], max=0)  # a certain token's may be rounded to a little above 0
        unrecorded.append(torch.addcmul(block, certain, active[rows], value=-STEEP).amin())
    lengths = mask.sum(dim=-1)
    # Comparisons with NaN are false, so a NaN anywhere is irregular too.
    regular = (size.amax() <= LOG_RATIO_LIMIT) & (torch.stack(unrecorded).amin() >= missing)
    mean = None
    if sequence_level:
        mean = signed.sum(dim=-1) / lengths.clamp(min=1)
        regular &= mean.amax() <= SEQUENCE_LOG_RATIO_LIMITS[1]
    return LogRatio(active, signed, size, lengths, mean, ~regular, -signed.sum(), size.sum())


class Terms(NamedTuple):
    """Second pass. ``loss`` is the negated surrogate per token; its derivative by ``log_prob`` is ``weight * ratio``.

    Attributes:
        loss: shape (batch_size, response_length).
        weight: same shape.
        ratio: same shape, or (batch_size, 1) at sequence level.
        sums: named 0-dim tensors, sums over active tokens of what ``metrics.measure`` takes means of.
        strongest: smallest contraction, 0-dim.
    """

    loss: torch.Tensor
    weight: torch.Tensor
    ratio: torch.Tensor
    sums: dict[str, torch.Tensor]
    strongest: torch.Tensor


@torch.no_grad()
def token_terms(first: LogRatio, advantages: torch.Tensor, gate: GateLevel, settings: Settings) -> Terms:
    """SAT-GRPO: ratio, interval, loss and derivative per token. Overwrites ``first.signed``.

    Args:
        first: from :func:`log_ratio`.
        advantages: shape (batch_size, response_length).
        gate: level of the gate.
        settings: the numbers of the formula.
    """
    loss, weight = torch.empty_like(first.size), torch.empty_like(first.size)
    names = ("stale_frac", "shrink_high", "shrink_low", *_CLIP_SUMS, "loss")
    parts, strongest, scratch = [], [], _Scratch(loss, 6)
    for rows in _blocks(loss):
        stale, shrink, upward, lower, nominal, spare = scratch.take(rows)
        size, ratio = first.size[rows], first.signed[rows]
        torch.gt(ratio, 0, out=upward)
        _shrink(size, gate, settings, stale, out=shrink)
        sums = [stale.sum(), _dot(shrink, upward), _dot(shrink, upward.neg_().add_(1))]
        strongest.append(shrink.amax())
        ratio.exp_()
        torch.clamp(ratio, 1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high, out=nominal)
        inside_nominal = torch.eq(nominal, ratio, out=nominal)
        clamped = _clamp(ratio, shrink, settings, lower=lower, upper=stale)
        inside = torch.eq(clamped, ratio, out=upward)
        negative_advantage = torch.neg(advantages[rows], out=stale)
        buffers = (shrink, lower, spare)
        clipped, positive, dual = _clip(
            negative_advantage, ratio, clamped, inside, settings, loss[rows], weight[rows], buffers
        )
        sums += [clipped.sum(), _dot(clipped, positive), _dot(clipped, inside_nominal), dual, loss[rows].sum()]
        parts.append(torch.stack(sums))
    totals = dict(zip(names, _add_up(parts).unbind(), strict=True))
    return Terms(loss, weight, first.signed, totals, 1 - torch.stack(strongest).amax())


@torch.no_grad()
def sequence_terms(first: LogRatio, advantages: torch.Tensor, gate: GateLevel, settings: Settings) -> Terms:
    """SAT-GSPO: ratio and interval per response, loss and derivative per token.

    Args:
        first: from :func:`log_ratio`, with means.
        advantages: shape (batch_size, response_length).
        gate: level of the gate.
        settings: the numbers of the formula.
    """
    mean = first.mean.clamp(*SEQUENCE_LOG_RATIO_LIMITS).unsqueeze(-1)
    stale, shrink = torch.empty_like(mean), torch.empty_like(mean)
    _shrink(mean.abs(), gate, settings, stale, out=shrink)
    ratio = mean.exp()
    clamped = _clamp(ratio, shrink, settings, lower=torch.empty_like(mean), upper=torch.empty_like(mean))
    inside = (clamped == ratio).to(ratio.dtype)
    inside_nominal = (ratio >= 1 - settings.clip_ratio_low) & (ratio <= 1 + settings.clip_ratio_high)

    loss, weight = torch.empty_like(first.size), torch.empty_like(first.size)
    parts, scratch = [], _Scratch(loss, 4)
    for rows in _blocks(loss):
        negative_advantage, *buffers = scratch.take(rows)
        # Here a masked position has the response's ratio, so it must have no advantage.
        torch.mul(advantages[rows], first.mask[rows], out=negative_advantage).neg_()
        clipped, positive, dual = _clip(
            negative_advantage,
            ratio[rows],
            clamped[rows],
            inside[rows],
            settings,
            loss[rows],
            weight[rows],
            buffers,
        )
        intercepted = clipped.sum(dim=-1, keepdim=True) * inside_nominal[rows]
        parts.append(torch.stack([clipped.sum(), _dot(clipped, positive), intercepted.sum(), dual, loss[rows].sum()]))
    totals = dict(zip((*_CLIP_SUMS, "loss"), _add_up(parts).unbind(), strict=True))
    lengths = first.lengths.to(mean.dtype).unsqueeze(-1)
    totals["stale_frac"] = (stale * lengths).sum()
    totals["shrink_low"] = (shrink * lengths * (mean < 0)).sum()
    totals["shrink_high"] = (shrink * lengths * (mean > 0)).sum()
    return Terms(loss, weight, ratio, totals, 1 - shrink.amax())


_CLIP_SUMS = ("clipped", "clipfrac_high", "intercepted_frac", "dual_clipped")


def _add_up(parts: list[torch.Tensor]) -> torch.Tensor:
    """Sum over blocks; in fp64 where there are several (a CPU), so that counts are added up exactly."""
    return parts[0] if len(parts) == 1 else torch.stack(parts).double().sum(dim=0).to(parts[0].dtype)


class _Scratch:
    """Buffers of one block, reused for all: an allocation costs more than the arithmetic."""

    def __init__(self, like: torch.Tensor, count: int) -> None:
        first = next(_blocks(like))
        self.buffers = [torch.empty_like(like[first]) for _ in range(count)]

    def take(self, rows: slice) -> list[torch.Tensor]:
        return [buffer[: rows.stop - rows.start] for buffer in self.buffers]


def _dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Sum of products of two 0-or-1 tensors (or one), without a tensor for the products."""
    return torch.dot(left.reshape(-1), right.reshape(-1))


def _shrink(
    size: torch.Tensor, gate: GateLevel, settings: Settings, stale: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """1 - c of Eq. 15-16 into ``out``, and the gate as 0 and 1 into ``stale``."""
    if settings.kernel == "none":
        stale.zero_()
        return out.zero_()
    opened = gate.q > 0
    torch.gt(size, torch.where(opened, gate.threshold, torch.inf), out=stale)
    torch.div(size, torch.where(opened, gate.q, 1.0), out=out)
    if settings.kernel == "hill":
        # 1 - 1 / (1 + x) with x = 0 at the gate's closed side: exactly 0 there
        out.square_() if settings.exponent == 2 else out.pow_(settings.exponent)
        return out.mul_(stale).add_(1).reciprocal_().neg_().add_(1)
    contraction = KERNELS[settings.kernel](torch.where(stale > 0, out, 1.0), settings.exponent)
    return out.copy_(torch.where(stale > 0, 1 - contraction, 0.0))


def _clamp(
    ratio: torch.Tensor, shrink: torch.Tensor, settings: Settings, lower: torch.Tensor, upper: torch.Tensor
) -> torch.Tensor:
    """The ratio inside its interval, both endpoints contracted, into ``lower``.

    Nominal endpoint and contraction are added as scalars of the dtype, as verl's clip has them, so that an
    uncontracted token agrees with it to the last bit.
    """
    torch.mul(shrink, settings.clip_ratio_low, out=lower).add_(1 - settings.clip_ratio_low)
    torch.mul(shrink, -settings.clip_ratio_high, out=upper).add_(1 + settings.clip_ratio_high)
    return torch.clamp(ratio, lower, upper, out=lower)


def _clip(
    negative_advantage: torch.Tensor,
    ratio: torch.Tensor,
    clamped: torch.Tensor,
    inside: torch.Tensor,
    settings: Settings,
    loss: torch.Tensor,
    weight: torch.Tensor,
    buffers: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Eq. 18-19 with verl's dual clip: loss and weight of the derivative.

    Args:
        negative_advantage: -A, same shape as the four outputs.
        ratio: same shape, or a column.
        clamped: ratio inside its interval, as ``ratio``. May share memory with the second buffer.
        inside: 1 where the two are equal, as ``ratio``.
        settings: the numbers of the formula.
        loss: output.
        weight: output.
        buffers: three, overwritten.

    Returns:
        ``clipped`` and ``A > 0`` as 0 and 1, both in buffers, and the number of dual-clipped tokens.
    """
    spare, other, third = buffers
    unclipped_loss = torch.mul(negative_advantage, ratio, out=spare)
    clipped_loss = torch.mul(negative_advantage, clamped, out=weight)
    torch.maximum(unclipped_loss, clipped_loss, out=loss)
    # Autograd of the maximum: all of the gradient to the larger, half to each at a tie; the clamp passes its half on
    # inside the interval only. So 1 inside or where the unclipped loss is larger, 1/2 at a tie outside, else 0.
    strictly = torch.gt(unclipped_loss, clipped_loss, out=other)
    clipped = torch.gt(clipped_loss, unclipped_loss, out=spare)
    torch.maximum(strictly, inside, out=weight)
    weight.sub_(clipped).add_(1).mul_(0.5)

    dual = loss.new_zeros(())
    if settings.clip_ratio_c is not None:
        # A bound of 0 for A >= 0, where the loss is at most 0: the dual clip acts on A < 0 alone.
        bound = torch.clamp(negative_advantage, min=0, out=other).mul_(settings.clip_ratio_c)
        above = torch.gt(loss, bound, out=third)
        dual = above.sum()
        torch.minimum(loss, bound, out=loss)
        # As above: 1 below the bound, half at a tie, 0 beyond; (bound > loss) + (1 - above), halved.
        weight.mul_(torch.gt(bound, loss, out=bound).sub_(above).add_(1).mul_(0.5))
    weight.mul_(negative_advantage)
    return clipped, torch.lt(negative_advantage, 0, out=other), dual


class _TokenLoss(torch.autograd.Function):
    """Attaches a loss and the derivative that was computed beside it to the graph."""

    @staticmethod
    def forward(ctx: Any, log_prob: torch.Tensor, old_log_prob: torch.Tensor, terms: list[torch.Tensor]) -> Any:
        loss, weight, ratio = terms
        ctx.save_for_backward(weight, ratio)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the SAT loss was asked for a second derivative (create_graph=True), which its fast path does not "
                "have: set VERL_SAT_LOSS=plain in the environment of the workers to compute it by the plain formula"
            )
        weight, ratio = ctx.saved_tensors
        # In this order: (gradient * -A) * r is what autograd computes, to the last bit.
        derivative = (gradient * weight).mul_(ratio)
        return derivative, -derivative if ctx.needs_input_grad[1] else None, None


def attach(log_prob: torch.Tensor, old_log_prob: torch.Tensor, terms: Terms) -> torch.Tensor:
    """The token losses of the second pass, with gradient.

    Args:
        log_prob: with gradient, shape (batch_size, response_length).
        old_log_prob: same shape; receives a gradient if it requires one.
        terms: from :func:`token_terms` or :func:`sequence_terms`.

    Returns:
        Token losses, shape (batch_size, response_length). A second derivative raises RuntimeError.
    """
    return _TokenLoss.apply(log_prob, old_log_prob, [terms.loss, terms.weight, terms.ratio])
