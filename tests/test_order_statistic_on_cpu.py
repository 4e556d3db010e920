"""The quantile by counting against the definition: the ceil(level * n)-th smallest (Eq. 14)."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_sat import order_statistic
from verl_sat.order_statistic import Observations, quantile_of_call, radix_quantile, rank_of
from verl_sat.trust_region import inverse_cdf_quantile

levels = st.one_of(st.sampled_from([0.07, 0.1, 0.3, 0.5, 0.9, 0.95, 0.999, 1.0]), st.floats(1e-6, 1.0))


def numbers(width):
    return st.one_of(
        st.sampled_from([0.0, 1.0, 0.1, 20.0]),
        st.floats(0.0, 20.0, width=width, allow_subnormal=True),
        st.just(math.nan),
    )


def literal(values, level):
    """Sorted, the ceil(level * n)-th; 0 of nothing."""
    ordered = sorted(v for v in values if math.isfinite(v))
    if not ordered:
        return 0.0
    return ordered[max(1, math.ceil(Fraction(level).limit_denominator(10**9) * len(ordered))) - 1]


@pytest.mark.parametrize("dtype, width", [(torch.float32, 32), (torch.float64, 64)])
def test_is_the_literal_order_statistic(dtype, width):
    @settings(max_examples=150, deadline=None)
    @given(st.lists(numbers(width), max_size=60), levels, st.integers(0, 60))
    def check(values, level, cut):
        tensor = torch.tensor(values, dtype=dtype)
        values = tensor.tolist()
        whole = radix_quantile([Observations(tensor)], level, with_following=True)
        assert whole.value.dtype == dtype and whole.value.item() == literal(values, level)
        assert whole.observed.item() == sum(map(math.isfinite, values))
        above = [v for v in values if v > whole.value.item()]
        assert whole.following.item() == (min(above) if above else math.inf)
        # however it is cut into bags
        pieces = radix_quantile([Observations(tensor[:cut]), Observations(tensor[cut:])], level)
        assert torch.equal(pieces.value, whole.value)
        # as the reference of the losses
        assert torch.equal(inverse_cdf_quantile(tensor, ~tensor.isnan(), level), whole.value)

    check()


@pytest.mark.parametrize("path", ["cpu", "accelerator"])
def test_every_path_of_a_call_finds_the_same(path, monkeypatch):
    if path == "accelerator":
        monkeypatch.setattr(order_statistic, "reads_are_free", lambda tensor: False)

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.tuples(numbers(32), st.booleans()), max_size=40), levels)
    def check(pairs, level):
        values = torch.tensor([v if active else 0.0 for v, active in pairs], dtype=torch.float32)
        masked = torch.tensor(sum(not active for _, active in pairs))
        found = quantile_of_call(Observations(values, surplus_zeros=masked), level)
        observed = [v for v, (_, active) in zip(values.tolist(), pairs, strict=True) if active]
        assert found.dtype == torch.float32 and found.item() == literal(observed, level)

    check()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 20, width=32), st.integers(0, 5)), max_size=30), levels)
def test_a_count_is_a_repetition(pairs, level):
    values = torch.tensor([v for v, _ in pairs], dtype=torch.float32)
    counts = torch.tensor([n for _, n in pairs], dtype=torch.int64)
    found = radix_quantile([Observations(values, counts=counts)], level, with_following=True)
    repeated = [v for v, n in pairs for _ in range(n)]
    assert found.value.item() == literal(repeated, level)
    above = [v for v in repeated if v > found.value.item()]
    assert found.following.item() == (min(above) if above else math.inf)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans()), max_size=40), levels)
def test_surplus_zeros_are_masked_positions(pairs, level):
    values = torch.tensor([v if active else 0.0 for v, active in pairs], dtype=torch.float32)
    masked = torch.tensor(sum(not active for _, active in pairs))
    found = radix_quantile([Observations(values, surplus_zeros=masked)], level)
    assert found.value.item() == literal([v for v, active in pairs if active], level)


def test_neighbouring_floats_are_told_apart():
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(3, dtype=dtype)
        next_one = torch.nextafter(one[0], torch.tensor(2.0, dtype=dtype))
        values = torch.cat([one, next_one.expand(2), torch.nextafter(next_one, torch.tensor(2.0, dtype=dtype))[None]])
        for level, index in ((0.5, 2), (0.51, 3), (5 / 6, 4), (1.0, 5)):
            assert radix_quantile([Observations(values)], level).value == values[index]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_accelerators_path_finds_the_same(dtype, monkeypatch):
    """There the later passes are over all values, and counting is by scatter: taken here too, by weights of one."""
    g = torch.Generator().manual_seed(0)
    values = torch.rand(5000, generator=g, dtype=dtype) ** 8
    values[torch.rand(5000, generator=g) < 0.2] = 0.0
    zeros = torch.tensor(700)
    ones = torch.ones(5000, dtype=torch.int64)
    for level in (0.001, 0.1, 0.5, 0.9, 1.0):
        cpu = radix_quantile([Observations(values, surplus_zeros=zeros)], level, with_following=True)
        weighted = radix_quantile([Observations(values, counts=ones)], level, with_following=True)
        with monkeypatch.context() as patch:
            patch.setattr(order_statistic, "reads_are_free", lambda tensor: False)
            other = radix_quantile([Observations(values, surplus_zeros=zeros)], level, with_following=True)
            scattered = radix_quantile([Observations(values, counts=ones)], level, with_following=True)
        assert all(map(torch.equal, cpu, other)) and all(map(torch.equal, weighted, scattered))
    on_meta = radix_quantile([Observations(values.to("meta"))], 0.9, with_following=True)
    assert all(x.is_meta and x.dim() == 0 for x in on_meta)


def test_ranks_are_integers():
    counts = torch.tensor([0, 1, 7, 100, 10**9, 2**33])
    assert rank_of(0.07, counts).tolist() == [1, 1, 1, 7, 70_000_000, math.ceil(Fraction(7, 100) * 2**33)]
    assert rank_of(0.999999937, torch.tensor(2**41)).item() == math.ceil(Fraction(999999937, 10**9) * 2**41)
    assert rank_of(1.0, counts[1:]).tolist() == counts[1:].tolist()


def test_counts_of_more_than_a_float_can_hold():
    """2**24 + 1 observations: fp32 counts would lose the last one."""
    values, counts = torch.tensor([0.25, 0.5]), torch.tensor([2**24, 2**24 + 2])
    assert radix_quantile([Observations(values, counts=counts)], 0.5).value == 0.5
    assert radix_quantile([Observations(values, counts=counts - torch.tensor([0, 2]))], 0.5).value == 0.25


@pytest.mark.parametrize("dtypes", [[torch.bfloat16], [torch.int64], [torch.float32, torch.float64]])
def test_other_dtypes_are_refused(dtypes):
    with pytest.raises(TypeError, match="float32 or all float64"):
        radix_quantile([Observations(torch.ones(3, dtype=dtype)) for dtype in dtypes], 0.9)
