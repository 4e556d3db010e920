"""The exact quantile of Eq. 14 (arXiv 2607.18722) by counting, over any number of tensors and ranks; torch only.

The bits of non-negative IEEE floats, read as integers, are in the order of the numbers. So the k-th smallest is found
digit by digit: count how many values have each leading digit, take the digit in which the k-th lies, count the next
digit among those only. Three passes for fp32, five for fp64; no sort, no interpolation, and nothing leaves the device.
(On a CPU, where reading a value costs nothing, the first pass is the only one over all values.)
Counts add: over the micro-batches of a mini-batch by a sum, over data-parallel ranks by one all-reduce per digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Layout(NamedTuple):
    """How the bits of a dtype are cut into digits, the leading one first (the sign bit is always 0)."""

    integer: torch.dtype
    widths: tuple[int, ...]
    finite_digits: int  # leading digits from here on are inf and NaN


_LAYOUTS = {
    torch.float32: _Layout(torch.int32, (11, 10, 10), 255 << 3),
    torch.float64: _Layout(torch.int64, (11, 13, 13, 13, 13), 2047),
}


class Observations(NamedTuple):
    """A bag of values to take a quantile of.

    Attributes:
        values: fp32 or fp64, >= 0 and not -0.0, any shape. Values that are not finite are ignored.
        counts: how often each value was observed, integer or bool, same shape; None is once.
        surplus_zeros: how many zeros of ``values`` were not observed, 0-dim int64: masked positions, which need no
            ``where`` that way. None is none. Not together with ``counts``.
    """

    values: torch.Tensor
    counts: torch.Tensor | None = None
    surplus_zeros: torch.Tensor | None = None


class Quantile(NamedTuple):
    """Result of :func:`radix_quantile`; 0-dim tensors on the device of the observations.

    Attributes:
        value: the quantile, 0 if nothing was observed.
        following: the smallest observed value above it, inf if there is none.
        observed: how many observations there were, int64.
    """

    value: torch.Tensor
    following: torch.Tensor
    observed: torch.Tensor


def rank_of(level: float, observed: torch.Tensor) -> torch.Tensor:
    """``ceil(level * observed)``, at least 1, in integers: as a float, 0.07 * 100 is a little more than 7.

    Args:
        level: in (0, 1].
        observed: number of observations, int64, any shape.
    """
    share = Fraction(level).limit_denominator(10**9)
    whole, rest = observed // share.denominator, observed % share.denominator  # apart, or the product could overflow
    rank = whole * share.numerator + (rest * share.numerator + (share.denominator - 1)) // share.denominator
    return rank.clamp(min=1)


@torch.no_grad()
def radix_quantile(
    bags: Sequence[Observations], level: float, group: ProcessGroup | None = None, with_following: bool = False
) -> Quantile:
    """The ``ceil(level * n)``-th smallest of the n observations in all bags of all ranks.

    Args:
        bags: at least one, all of one dtype and on one device. A rank with nothing to say passes an empty tensor.
        level: quantile in (0, 1].
        group: ranks whose observations are pooled; every one of them must call. None is this process alone.
        with_following: also find the next value above, which takes one more pass (and a further all-reduce).

    Returns:
        The quantile, the same on every rank; ``following`` is inf unless asked for.

    Raises:
        TypeError: values are neither fp32 nor fp64, or of different dtypes.
    """
    dtype = bags[0].values.dtype
    if dtype not in _LAYOUTS or any(bag.values.dtype != dtype for bag in bags):
        found = sorted({str(bag.values.dtype) for bag in bags})
        raise TypeError(f"observations must be all float32 or all float64, got {', '.join(found)}")
    layout = _LAYOUTS[dtype]
    bags = [bag._replace(values=bag.values.detach().reshape(-1)) for bag in bags]
    keys = [
        (bag.values.view(layout.integer), None if bag.counts is None else bag.counts.reshape(-1).long()) for bag in bags
    ]
    shift = sum(layout.widths)
    prefix = rank = observed = None
    for width in layout.widths:
        shift -= width
        histogram = bags[0].values.new_zeros(1 << width, dtype=torch.int64)
        for (key, counts), bag in zip(keys, bags, strict=True):
            histogram += _digit_counts(key, counts, shift, width, prefix)
            if bag.surplus_zeros is not None:
                histogram[0] -= bag.surplus_zeros if prefix is None else bag.surplus_zeros * (prefix == 0)
        if group is not None:
            torch.distributed.all_reduce(histogram, group=group)
        if prefix is None:
            histogram[layout.finite_digits :] = 0
        cumulative = histogram.cumsum(dim=0)
        if rank is None:
            observed = cumulative[-1]
            rank = rank_of(level, observed)
        digit = torch.searchsorted(cumulative, rank).clamp(max=(1 << width) - 1)
        # take, not [digit]: indexing by a 0-dim tensor copies the index to the host
        rank = rank - (cumulative.take(digit) - histogram.take(digit))
        if prefix is None and reads_are_free(histogram):
            keys = [_with_digit(key, counts, shift, int(digit)) for key, counts in keys]
        prefix = digit if prefix is None else (prefix << width) + digit
    value = torch.where(observed > 0, prefix, 0).to(layout.integer).view(dtype)

    following = value.new_full((), torch.inf)
    if with_following:
        for bag in bags:
            following = torch.minimum(following, _smallest_above(bag, value))
        if group is not None:
            torch.distributed.all_reduce(following, op=torch.distributed.ReduceOp.MIN, group=group)
    return Quantile(value, following, observed)


@torch.no_grad()
def quantile_of_call(bag: Observations, level: float) -> torch.Tensor:
    """The quantile of one bag on this process alone, by whatever finds it soonest; the same number as all others.

    Args:
        bag: what one loss call observed, without ``counts``.
        level: quantile in (0, 1].

    Returns:
        The quantile, 0-dim, 0 of nothing.
    """
    values = bag.values.detach().reshape(-1)
    if reads_are_free(values) or values.numel() == 0:
        return radix_quantile([bag], level).value
    surplus = 0 if bag.surplus_zeros is None else bag.surplus_zeros
    # On an accelerator sorting is itself a count of digits, and a handful of launches where ours are some fifty.
    observed = values.isfinite().sum() - surplus
    ordered = torch.where(values.isfinite(), values, torch.inf).sort().values
    index = (rank_of(level, observed) + surplus - 1).clamp(0, values.numel() - 1)
    return torch.where(observed > 0, ordered.take(index), 0.0)


def reads_are_free(tensor: torch.Tensor) -> bool:
    """Whether a value of the tensor can be read without a copy from a device; numpy then sees the same memory."""
    return tensor.device.type == "cpu"


def _with_digit(
    key: torch.Tensor, counts: torch.Tensor | None, shift: int, digit: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Only the keys with this leading digit. By numpy, whose selection is several times as fast as torch's."""
    chosen = (key >> shift).numpy() == digit
    return torch.from_numpy(key.numpy()[chosen]), None if counts is None else torch.from_numpy(counts.numpy()[chosen])


def _smallest_above(bag: Observations, value: torch.Tensor) -> torch.Tensor:
    """Smallest finite observation above ``value``, inf if there is none; 0-dim."""
    above = (bag.values > value) & (bag.values < torch.inf)
    if bag.counts is not None:
        above &= bag.counts.reshape(-1) > 0
    if reads_are_free(above):
        larger = bag.values.numpy()[above.numpy()]
        return value.new_tensor(larger.min() if larger.size else torch.inf)
    return torch.where(above, bag.values, torch.inf).amin() if above.numel() else value.new_full((), torch.inf)


def _digit_counts(
    key: torch.Tensor, counts: torch.Tensor | None, shift: int, width: int, prefix: torch.Tensor | None
) -> torch.Tensor:
    """Histogram of one digit of the keys that begin with ``prefix``, shape (2**width,), int64."""
    digits = key >> shift if shift else key.clone()
    bins = 1 << width
    if prefix is None:
        return _bincount(digits, counts, bins)
    # Digits of other keys fall into the two bins outside.
    digits -= (prefix << width).to(digits.dtype)
    digits.clamp_(-1, bins).add_(1)
    return _bincount(digits, counts, bins + 2)[1:-1]


def _bincount(digits: torch.Tensor, counts: torch.Tensor | None, bins: int) -> torch.Tensor:
    if counts is None and reads_are_free(digits):
        return torch.bincount(digits, minlength=bins)
    # bincount sizes its output by the largest entry, which on an accelerator is a copy to the host
    weights = digits.new_ones(1, dtype=torch.int64).expand_as(digits) if counts is None else counts
    return digits.new_zeros(bins, dtype=torch.int64).scatter_add_(0, digits.to(torch.int64), weights)
