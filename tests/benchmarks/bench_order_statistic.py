"""The exact quantile by counting (`verl_sat/order_statistic.py`) against a sort, a selection and NumPy's partition.

No assertion on a time. All four give the same element; that is asserted for every size and dtype, with ties too.
"""

import math

import harness
import numpy as np
import pytest
import torch

from verl_sat.order_statistic import Observations, radix_quantile

LEVEL = 0.9
EXPONENTS = range(14, 23, 2)
METHODS = {
    "torch.sort": lambda values, rank: values.sort().values[rank - 1],
    "torch.kthvalue": lambda values, rank: values.kthvalue(rank).values,
    "numpy.partition": lambda values, rank: np.partition(values.numpy(), rank - 1)[rank - 1],
    "radix count": lambda values, rank: radix_quantile([Observations(values)], LEVEL).value,
}


def heavy_tailed(size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.exp(1.5 * torch.randn(size, generator=generator, dtype=dtype)) * 0.0036


def rank_of(size: int) -> int:
    return math.ceil(size * 9 / 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_time(report, dtype):
    name = str(dtype).removeprefix("torch.")
    series, rows, data = {}, [], {}
    for exponent in EXPONENTS:
        values, rank = heavy_tailed(2**exponent, dtype), rank_of(2**exponent)
        cases = {method: _Bound(function, values, rank) for method, function in METHODS.items()}
        times = harness.time_interleaved(cases, rounds=10 if exponent < 20 else 5, warm_up=2)
        data[2**exponent] = times.rounds
        for method in METHODS:
            series.setdefault(method, []).append((2**exponent, times.spread(method)))
        ratio = times.ratio("radix count", "torch.sort").text(3)
        rows.append([f"2^{exponent}", *(times.spread(method).text() for method in METHODS), ratio])
    report.table(f"0.9-quantile [ms], {name}, 1 thread", ["values", *METHODS, "radix count / sort"], rows, data=data)
    figure = harness.line_plot(
        series, x="values", y="time [ms]", title=f"The exact 0.9-quantile of {name} values", log_y=True
    )
    report.plot(name, figure)


class _Bound:
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __call__(self):
        return self.function(*self.arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_all_give_the_same_element(dtype, exponent, ties):
    values, rank = heavy_tailed(2**exponent, dtype), rank_of(2**exponent)
    if ties:
        values = (values * 1000).round() / 1000
    found = {method: float(function(values, rank)) for method, function in METHODS.items()}
    assert len(set(found.values())) == 1, found


def test_masked_positions_and_repeated_values():
    values = heavy_tailed(2**16, torch.float32)
    mask = torch.arange(2**16) % 3 != 0
    expected = values[mask].sort().values[math.ceil(int(mask.sum()) * 9 / 10) - 1]
    masked = Observations(values * mask, surplus_zeros=(~mask).sum())
    assert radix_quantile([masked], LEVEL).value == expected

    means, lengths = values[:256], torch.arange(256) % 50 + 1
    expected = means.repeat_interleave(lengths).sort().values[math.ceil(int(lengths.sum()) * 9 / 10) - 1]
    assert radix_quantile([Observations(means, counts=lengths)], LEVEL).value == expected
