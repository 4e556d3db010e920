"""The losses of this plugin against verl's, through verl's registry, forward and backward, all metrics on.

Time, memory, transfers, aggregation modes, growth. No assertion on a time; what must hold on any machine is asserted:
the quantile is a sort's, one transfer per call, verl's loss where nothing is contracted.
"""

import math

import harness
import pytest
import torch
from harness import LOSSES, MIB, OWN_AGG, SHAPES, Call

AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
SMALL = (64, 512)
ROUNDS = 20


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def shape(request):
    return request.param


@pytest.fixture(scope="module")
def inputs(shape):
    return harness.make_inputs(shape)


def cases_for(inputs, names=LOSSES, plain=True, **settings):
    """verl's loss, ours, and our plain implementation, of each pair."""
    cases = {}
    for name in names:
        cases[LOSSES[name]] = Call(LOSSES[name], inputs, **settings)
        cases[name] = Call(name, inputs, **settings)
        if plain:
            cases[f"{name} plain"] = Call(name, inputs, plain=True, **settings)
    return cases


def test_time(report, shape, inputs):
    rows, data = [], {}
    for count in (1, 2):
        with harness.threads(count):
            times = harness.time_interleaved(cases_for(inputs), rounds=ROUNDS)
        data[count] = times.rounds
        for name, other in LOSSES.items():
            cells = [times.spread(case).text(1) for case in (other, name, f"{name} plain")]
            ratios = [times.ratio(case, other).text() for case in (name, f"{name} plain")]
            rows.append([f"{name} / {other}", count, *cells, *ratios])
    report.table(
        f"Forward + backward [ms], shape {list(shape)}, {inputs.tokens} active tokens, fp32",
        ["loss", "threads", "verl", "ours", "ours, plain", "ours / verl", "plain / verl"],
        rows,
        f"Median and quartiles of {ROUNDS} interleaved rounds; ratios are medians of the ratios within a round.",
        data,
    )


def test_quantile_is_exact(inputs):
    log_ratio = (inputs.log_prob - inputs.old_log_prob).clamp(-20, 20)
    active = inputs.response_mask
    expected = log_ratio[active].abs().sort().values[math.ceil(inputs.tokens * 9 / 10) - 1].item()
    call = Call("sat_grpo", inputs)
    call()
    assert call.metrics["actor/sat/quantile"] == expected
    # a response's mean depends on the order of the sum, so here the last bits may differ
    means = (log_ratio * active).double().sum(-1) / active.sum(-1)
    broadcast = means.unsqueeze(-1).expand(active.shape)[active]
    call = Call("sat_gspo", inputs)
    call()
    expected = broadcast.abs().sort().values[math.ceil(inputs.tokens * 9 / 10) - 1].item()
    assert call.metrics["actor/sat/quantile"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_loss_is_verls_where_nothing_is_contracted(inputs, name):
    calls = [Call(LOSSES[name], inputs), Call(name, inputs, sat={"kernel": "none"}), Call(name, inputs)]
    calls.append(Call(name, inputs, plain=True))
    for call in calls:
        call()
    verls, ours, contracted, plain = calls
    torch.testing.assert_close(ours.loss, verls.loss, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(ours.leaf.grad, verls.leaf.grad, rtol=1e-6, atol=0)
    # and where something is, our two implementations agree
    torch.testing.assert_close(contracted.loss, plain.loss, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(contracted.leaf.grad, plain.leaf.grad, rtol=1e-6, atol=0)
    assert contracted.metrics == pytest.approx(plain.metrics, rel=1e-5, abs=1e-7)
    if name == "sat_grpo":  # at sequence level a batch of 8 or 32 responses need not have one beyond the gate
        assert contracted.metrics["actor/sat/intercepted_frac"] > 0
        assert not torch.equal(contracted.leaf.grad, verls.leaf.grad)


class _KnownNeeds:
    """3 MiB at most in the forward pass, 1 MiB held, 2 MiB at most in the backward pass."""

    def forward(self):
        first = torch.empty(MIB, dtype=torch.uint8)
        second = torch.empty(2 * MIB, dtype=torch.uint8)
        del second
        self.held = first

    def backward(self):
        torch.empty(MIB, dtype=torch.uint8)

    def reset(self):
        self.held = None

    def __call__(self):
        self.forward()
        self.backward()


def test_memory(report, shape, inputs):
    assert harness.measure_memory(_KnownNeeds()) == (3 * MIB, MIB, 3 * MIB)
    padded = inputs.log_prob.numel()
    memory = {name: harness.measure_memory(call) for name, call in cases_for(inputs).items()}
    rows = []
    for name, other in LOSSES.items():
        for case in (other, name, f"{name} plain"):
            found = memory[case]
            ratios = [f"{a / b:.2f}" for a, b in zip(found, memory[other], strict=True)]
            rows.append([case, *(f"{value / MIB:.2f}" for value in found), f"{found.peak / padded:.1f}", *ratios])
        assert all(a <= b for a, b in zip(memory[name], memory[other], strict=True))
    report.table(
        f"Memory of a call above its inputs, shape {list(shape)}, fp32",
        [
            "loss",
            "forward peak [MiB]",
            "held for backward [MiB]",
            "peak [MiB]",
            "peak [B/position]",
            "forward / verl",
            "held / verl",
            "peak / verl",
        ],
        rows,
        "Live bytes of torch's CPU allocator, from its own allocation events; the gradient counts.",
        {name: found._asdict() for name, found in memory.items()},
    )


def test_transfers(report):
    inputs = harness.make_inputs(SMALL)
    rows = []
    for case, call in cases_for(inputs).items():
        found = harness.count_transfers(call)
        rows.append([case, len(found), ", ".join(found)])
        assert len(found) == (1 if case.startswith("sat") else 3), found
    report.table("Reads of a value by the host per call", ["loss", "count", "by"], rows)


def test_aggregation_modes(report):
    inputs = harness.make_inputs(SHAPES[0])
    rows, data = [], {}
    for agg in AGG_MODES:
        times = harness.time_interleaved(cases_for(inputs, plain=False, agg=agg), rounds=ROUNDS)
        data[agg] = times.rounds
        for name, other in LOSSES.items():
            cells = [times.spread(other).text(1), times.spread(name).text(1), times.ratio(name, other).text()]
            rows.append([f"{name} / {other}", agg, *cells])
    rows.sort(key=lambda row: row[0])
    report.table(
        f"Aggregation modes, forward + backward [ms], shape {list(SHAPES[0])}, 1 thread",
        ["loss", "loss_agg_mode", "verl", "ours", "ours / verl"],
        rows,
        data=data,
    )


def test_growth_with_tokens(report):
    width, rounds = 1024, 10
    series, ratios, rows, data = {}, {}, [], {}
    for exponent in range(14, 22):
        inputs = harness.make_inputs((2**exponent // width, width))
        times = harness.time_interleaved(cases_for(inputs, plain=False), rounds=rounds, warm_up=2)
        data[2**exponent] = times.rounds
        for name, other in LOSSES.items():
            series.setdefault(f"verl {other}", []).append((2**exponent, times.spread(other)))
            series.setdefault(name, []).append((2**exponent, times.spread(name)))
            ratios.setdefault(f"{name} / {other}", []).append((2**exponent, times.ratio(name, other)))
            cells = [times.spread(other).text(2), times.spread(name).text(2), times.ratio(name, other).text()]
            rows.append([f"{name} / {other}", f"2^{exponent}", *cells])
    rows.sort(key=lambda row: row[0])
    report.table(
        "Growth with tokens: forward + backward [ms], 1 thread",
        ["loss", "positions", "verl", "ours", "ours / verl"],
        rows,
        f"Rows of {width} positions; median and quartiles of {rounds} rounds.",
        data,
    )
    at = "positions of the call (batch size x response length)"
    figure = harness.line_plot(series, x=at, y="forward + backward [ms]", title="Time of a loss call", log_y=True)
    report.plot("tokens", figure)
    report.plot("tokens_ratio", harness.line_plot(ratios, x=at, y="time / verl's", title="Ratio to verl's loss"))


def test_growth_with_micro_batches(report):
    shape, rounds = (256, 1024), 10
    whole = harness.make_inputs(shape)
    series, rows, data = {}, [], {}
    for count in (1, 2, 4, 8, 16, 32, 64):
        parts = [harness.Inputs(*tensors) for tensors in zip(*(x.chunk(count) for x in whole), strict=True)]

        cases = {name: _Loop([Call(name, part) for part in parts]) for pair in LOSSES.items() for name in pair}
        times = harness.time_interleaved(cases, rounds=rounds, warm_up=2)
        data[count] = times.rounds
        for name, other in LOSSES.items():
            series.setdefault(f"verl {other}", []).append((count, times.spread(other)))
            series.setdefault(name, []).append((count, times.spread(name)))
            cells = [times.spread(other).text(2), times.spread(name).text(2), times.ratio(name, other).text()]
            rows.append([f"{name} / {other}", count, *cells])
    rows.sort(key=lambda row: row[0])
    report.table(
        f"Growth with micro-batches: forward + backward of {list(shape)} in all [ms], 1 thread",
        ["loss", "micro-batches", "verl", "ours", "ours / verl"],
        rows,
        f"Median and quartiles of {rounds} rounds.",
        data,
    )
    title = f"Loss calls for {shape[0]} responses of up to {shape[1]} tokens"
    figure = harness.line_plot(series, x="micro-batches", y="forward + backward of all [ms]", title=title)
    figure.axes[0].set_ylim(bottom=0)
    report.plot("micro_batches", figure)


class _Loop:
    def __init__(self, calls):
        self.calls = calls

    def __call__(self):
        for call in self.calls:
            call()

    def reset(self):
        for call in self.calls:
            call.reset()


def test_summary(report):
    """The table of the README, in Markdown, from the tables above."""
    times = [table for table in report.tables if table["title"].startswith("Forward + backward")]
    memory = [table for table in report.tables if table["title"].startswith("Memory")]
    if not times or not memory:
        pytest.skip("needs the tables of time and memory")
    rows = []
    for time_table, memory_table, shape in zip(times, memory, SHAPES, strict=True):
        for name, other in LOSSES.items():
            cells = {row[1]: row[5] for row in time_table["rows"] if row[0] == f"{name} / {other}"}
            peak = next(row for row in memory_table["rows"] if row[0] == name)
            rows.append([f"`{name}` / `{other}`", list(shape), cells["1"], cells["2"], peak[5], peak[7]])
    heads = ["loss", "shape", "time, 1 thread", "time, 2 threads", "forward peak", "peak"]
    report.table("Ratio to verl's loss: time and memory of forward + backward", heads, rows)
    print("\n" + report.markdown(last=1))


assert set(OWN_AGG.values()) <= set(AGG_MODES)
