"""What the benchmarks share: inputs, timing, memory, transfers, reports. Runs on the CPU and on CUDA.

Method
    - *Time.* Everything that is compared runs interleaved in one process, one call of each per round in
      an order drawn anew (a fixed one would put the same two cases into every slow moment), after warm-up. A ratio is
      the median of the ratios *within* a round. Given are medians and quartiles. On CUDA the clock is a pair of events.
    - *Memory on the CPU.* torch's profiler reports every allocation and release of torch's CPU allocator, those inside
      operators included, which a dispatch mode would not see. Their running sum is the number of live bytes.
      Calibrated in `bench_losses.py` on a function with known needs.
    - *Memory on CUDA.* `torch.cuda.max_memory_allocated` and `memory_allocated`.
    - *Transfers.* On the CPU: calls of the tensor methods that hand values to Python, and operators that read a value
      outside of one. On CUDA: device-to-host copies that the driver reports.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from verl_sat import order_statistic

ROOT = Path(__file__).resolve().parents[2]
LOSSES = {"sat_grpo": "vanilla", "sat_gspo": "gspo"}
OWN_AGG = {"vanilla": "token-mean", "sat_grpo": "token-mean", "gspo": "seq-mean-token-mean"}
OWN_AGG["sat_gspo"] = OWN_AGG["gspo"]
SHAPES = ((32, 8192), (256, 2048), (8, 32768))
MIB = 2**20


# --- losses and their inputs -------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """Arguments of a policy loss, shape (batch_size, response_length)."""

    old_log_prob: torch.Tensor
    log_prob: torch.Tensor
    advantages: torch.Tensor
    response_mask: torch.Tensor

    @property
    def tokens(self) -> int:
        return int(self.response_mask.sum())


def make_inputs(
    shape: tuple[int, int], seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Inputs:
    """Responses of different lengths whose |log-ratio| is heavy-tailed with mean 0.011, as in asynchronous training.

    A response has a drift of its own beside the noise of its tokens, so that sequence-level ratios differ too.

    Args:
        shape: (batch_size, response_length).
        seed: of lengths, log-probs and advantages.
        device: where the tensors are.
        dtype: of the log-probs; advantages are fp32.
    """
    rows, columns = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    lengths = (columns * torch.exp(0.6 * normal(rows) - 0.7)).clamp(columns // 16, columns).long()
    lengths[0] = columns
    mask = torch.arange(columns) < lengths.unsqueeze(-1)
    old = -torch.rand(shape, generator=generator) * 3 - 1e-3

    def heavy_tailed(*size: int) -> torch.Tensor:
        return torch.exp(1.5 * normal(*size)) * normal(*size).sign()

    log_ratio = heavy_tailed(*shape) + 0.2 * heavy_tailed(rows, 1)
    log_ratio = log_ratio * (0.011 / log_ratio[mask].abs().mean())
    advantages = normal(rows, 1).expand(shape) * mask
    log_probs = (tensor.to(device, dtype).contiguous() for tensor in (old, old + log_ratio))
    return Inputs(*log_probs, advantages.to(device).contiguous(), mask.to(device))


def make_config(name: str, inputs: Inputs | None = None, sat: Mapping[str, Any] | None = None) -> Any:
    """verl's actor configuration for a loss, with the batch-wide counts that verl's worker would set."""
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig

    from verl_sat.config import SATPolicyLossConfig

    policy = (
        SATPolicyLossConfig(loss_mode=name, sat=dict(sat or {})) if name in LOSSES else PolicyLossConfig(loss_mode=name)
    )
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        policy_loss=policy,
    )
    if inputs is not None:
        rows, columns = inputs.response_mask.shape
        counts = dict(dp_size=1, batch_num_tokens=inputs.tokens, global_batch_size=rows, loss_scale_factor=columns)
        config.global_batch_info.update(counts)
    return config


class Call:
    """One loss on one batch: ``forward()``, ``backward()``, or both by calling it.

    Args:
        name: loss in verl's registry.
        inputs: the batch.
        agg: aggregation; the loss's usual one if None.
        sat: settings of the ``sat`` block; ``micro_batch`` scope unless it says otherwise.
        plain: run the plain implementation of this plugin instead of the fast one.
    """

    def __init__(
        self,
        name: str,
        inputs: Inputs,
        *,
        agg: str | None = None,
        sat: Mapping[str, Any] | None = None,
        plain: bool = False,
    ) -> None:
        from verl.trainer.ppo.core_algos import get_policy_loss_fn

        self.function = get_policy_loss_fn(name)
        self.inputs = inputs
        self.agg = agg or OWN_AGG[name]
        self.config = make_config(name, inputs, {"scope": "micro_batch", **(sat or {})})
        self.environment = {"VERL_SAT_LOSS": "plain"} if plain else {}
        self.leaf = inputs.log_prob.clone().requires_grad_()
        self.loss: torch.Tensor | None = None
        self.metrics: dict[str, float] = {}

    def forward(self) -> None:
        with environment(**self.environment):
            self.loss, self.metrics = self.function(
                old_log_prob=self.inputs.old_log_prob,
                log_prob=self.leaf,
                advantages=self.inputs.advantages,
                response_mask=self.inputs.response_mask,
                loss_agg_mode=self.agg,
                config=self.config,
                rollout_is_weights=None,
            )

    def backward(self) -> None:
        self.loss.backward()

    def reset(self) -> None:
        self.loss, self.leaf.grad = None, None

    def __call__(self) -> None:
        self.forward()
        self.backward()


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Environment variables for the time of a block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """torch's threads within operators for the time of a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- time --------------------------------------------------------------------------------------------------------


class Spread(NamedTuple):
    """Median and quartiles."""

    median: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def spread(values: Sequence[float]) -> Spread:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


@dataclass
class Times:
    """Milliseconds per round of everything that ran in it."""

    rounds: dict[str, list[float]] = field(default_factory=dict)

    def spread(self, name: str) -> Spread:
        return spread(self.rounds[name])

    def ratio(self, name: str, to: str) -> Spread:
        """Of the ratios within each round, not of the medians."""
        return spread([a / b for a, b in zip(self.rounds[name], self.rounds[to], strict=True)])


def time_interleaved(
    cases: Mapping[str, Callable[[], Any]], *, rounds: int = 20, warm_up: int = 3, device: str = "cpu"
) -> Times:
    """Time several functions side by side, one call of each per round, in an order drawn anew for each.

    Args:
        cases: name -> function without arguments; its methods ``prepare`` and ``reset`` run outside the clock.
        rounds: timed rounds.
        warm_up: rounds before them.
        device: ``cpu`` or a CUDA device.
    """
    times = Times({name: [] for name in cases})
    order = random.Random(0)
    gc.collect()
    gc.disable()
    try:
        for number in range(warm_up + rounds):
            for name in order.sample(list(cases), len(cases)):
                getattr(cases[name], "prepare", lambda: None)()
                elapsed = _clock(cases[name], device)
                getattr(cases[name], "reset", lambda: None)()
                if number >= warm_up:
                    times.rounds[name].append(elapsed)
    finally:
        gc.enable()
    return times


def _clock(function: Callable[[], Any], device: str) -> float:
    if not device.startswith("cuda"):
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e3
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


# --- memory ------------------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """Bytes of a call above its inputs: at most in the forward pass, between the passes, at most in both."""

    forward_peak: int
    held: int
    peak: int


def measure_memory(call: Any, device: str = "cpu") -> Memory:
    """Live bytes of ``call.forward()`` and ``call.backward()``; the gradient counts, the inputs do not."""
    call()  # whatever is made once per process
    call.reset()
    gc.collect()
    memory = _cuda_memory(call) if device.startswith("cuda") else _cpu_memory(call)
    call.reset()
    return memory


def _cuda_memory(call: Any) -> Memory:
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call.forward()
    forward_peak = torch.cuda.max_memory_allocated() - start
    held = torch.cuda.memory_allocated() - start
    call.backward()
    torch.cuda.synchronize()
    return Memory(forward_peak, held, torch.cuda.max_memory_allocated() - start)


def _cpu_memory(call: Any) -> Memory:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        call.forward()
        with torch.profiler.record_function("bench::between"):
            pass
        call.backward()
    events = profiler.profiler.kineto_results.events()
    (between,) = (event.start_ns() for event in events if event.name() == "bench::between")
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    live = held = forward_peak = peak = 0
    for at, change in changes:
        live += change
        peak = max(peak, live)
        if at < between:
            held, forward_peak = live, peak
    return Memory(forward_peak, held, peak)


# --- transfers ---------------------------------------------------------------------------------------------------

_METHODS = ("tolist", "cpu", "item", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__")
_OPERATORS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "_unique2")


class _Reads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inside = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.inside and func.overloadpacket.__name__ in _OPERATORS:
            self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def count_transfers(call: Any, device: str = "cpu") -> list[str]:
    """What copies values to the host in one forward and backward pass, an entry per copy."""
    call()
    call.reset()
    found = _driver_copies(call) if device.startswith("cuda") else _host_reads(call)
    call.reset()
    return found


def _driver_copies(call: Any) -> list[str]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        call()
        torch.cuda.synchronize()
    names = (event.name() for event in profiler.profiler.kineto_results.events())
    return [name for name in names if name.startswith("Memcpy DtoH")]


def _host_reads(call: Any) -> list[str]:
    """On a CPU: what would be a copy on an accelerator, so by the path that an accelerator takes."""
    reads = _Reads()
    on_the_host = order_statistic.reads_are_free
    order_statistic.reads_are_free = lambda tensor: False
    originals = {name: getattr(torch.Tensor, name) for name in _METHODS}

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self, *args: Any, **kwargs: Any) -> Any:
            if reads.inside:  # item() within __float__, say
                return original(self, *args, **kwargs)
            reads.found.append(name)
            reads.inside = True
            try:
                return original(self, *args, **kwargs)
            finally:
                reads.inside = False

        return method

    try:
        for name, original in originals.items():
            setattr(torch.Tensor, name, counting(name, original))
        with reads:
            call()
    finally:
        order_statistic.reads_are_free = on_the_host
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)
    return reads.found


# --- reports -----------------------------------------------------------------------------------------------------


def output_folder() -> Path:
    """``VERL_SAT_BENCH_OUT``, else ``out/benchmarks`` of the checkout."""
    folder = Path(os.environ.get("VERL_SAT_BENCH_OUT") or ROOT / "out" / "benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    import verl

    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    found = {"cpu": model, "cores": os.cpu_count(), "torch": torch.__version__, "verl": verl.__version__}
    # Two threads of a call wait for each other: on a machine that is busy otherwise, those times mean nothing.
    found["load"] = f"{os.getloadavg()[0]:.1f}"
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


class Report:
    """Tables and plots of one benchmark: shown at once; JSON, Markdown and PNG in the output folder.

    Args:
        name: stem of the files.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = output_folder()
        self.machine = machine()  # before the benchmark itself is the load
        self.tables: list[dict[str, Any]] = []
        self.plots: list[str] = []

    def table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], note: str = "", data: Any = None
    ) -> None:
        """Show a table and keep it.

        Args:
            title: heading.
            columns: column heads, units included.
            rows: cells, shown as text.
            note: a line below.
            data: raw numbers for the JSON file.
        """
        cells = [[str(cell) for cell in row] for row in rows]
        self.tables.append(dict(title=title, columns=list(columns), rows=cells, note=note, data=data))
        _show(self.tables[-1])

    def markdown(self, last: int = 0) -> str:
        """The tables (the ``last`` ones, or all), and links to the plots."""
        parts = [f"Measured on {', '.join(f'{key} {value}' for key, value in self.machine.items())}."]
        for table in self.tables[-last:]:
            parts.append(_markdown_table(table))
        parts += [f"![{plot}]({plot})" for plot in self.plots if not last]
        return "\n\n".join(parts) + "\n"

    def plot(self, name: str, figure: Any) -> None:
        """Write a matplotlib figure."""
        file = f"{self.name}_{name}.png"
        figure.tight_layout()
        figure.savefig(self.folder / file, dpi=150)
        self.plots.append(file)

    def save(self) -> None:
        content = dict(machine=self.machine, tables=self.tables, plots=self.plots)
        (self.folder / f"{self.name}.json").write_text(json.dumps(content, indent=1) + "\n")
        (self.folder / f"{self.name}.md").write_text(self.markdown())
        print(f"\nwritten: {self.folder / self.name}.json, .md" + (", .png" if self.plots else ""), flush=True)


def _markdown_table(table: Mapping[str, Any]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    lines = [f"**{table['title']}**", "", line(table["columns"])]
    lines += [line(["---"] + ["---:"] * (len(table["columns"]) - 1)), *(line(row) for row in table["rows"])]
    return "\n".join(lines + (["", table["note"]] if table["note"] else []))


def _show(table: Mapping[str, Any]) -> None:
    print(flush=True)
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text  # a plain str would be read as markup: "[ms]" would vanish
    except ImportError:  # an installation without the extras of the tests
        print(_markdown_table(table), flush=True)
        return
    caption = Text(table["note"]) if table["note"] else None
    shown = Table(title=Text(table["title"]), caption=caption, title_justify="left", caption_justify="left")
    for number, column in enumerate(table["columns"]):
        shown.add_column(Text(column), justify="left" if number == 0 else "right")
    for row in table["rows"]:
        shown.add_row(*(Text(cell) for cell in row))
    Console(width=150).print(shown)


class Checks:
    """Checks of a script outside pytest: each is printed, and a failed one decides the exit status."""

    def __init__(self) -> None:
        self.failed = 0

    def __call__(self, name: str, holds: bool, detail: Any = "") -> None:
        """Print whether ``name`` holds, with what was seen."""
        self.failed += not holds
        print(f"{'ok    ' if holds else 'FAILED'} {name}" + (f": {detail}" if detail != "" else ""), flush=True)

    def status(self) -> int:
        """Exit status of the process."""
        print(f"{self.failed} checks failed" if self.failed else "all checks passed", flush=True)
        return 1 if self.failed else 0


def line_plot(
    series: Mapping[str, Sequence[tuple[float, Spread]]], *, x: str, y: str, title: str, log_y: bool = False
) -> Any:
    """Medians over x (logarithmic, base 2) with quartile bands; a series whose name starts with ``verl`` is dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name, points in series.items():
        at, values = [point[0] for point in points], [point[1] for point in points]
        style = "--" if name.startswith("verl") else "-"
        (line,) = axes.plot(at, [value.median for value in values], style, marker="o", markersize=4, label=name)
        low, high = [value.low for value in values], [value.high for value in values]
        axes.fill_between(at, low, high, alpha=0.15, color=line.get_color(), linewidth=0)
    axes.set_xscale("log", base=2)
    places = sorted({point[0] for points in series.values() for point in points})
    large = max(places) > 1024
    axes.set_xticks(places, [f"$2^{{{int(at).bit_length() - 1}}}$" if large else str(at) for at in places])
    if log_y:
        axes.set_yscale("log")
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    plt.close(figure)
    return figure
