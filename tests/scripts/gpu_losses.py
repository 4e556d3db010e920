"""The losses against verl's on a GPU: time, memory, transfers; the quantile by counting against a sort.

The same measurements as `tests/benchmarks/bench_losses.py`, with CUDA's clock and allocator, in fp32 and bf16. Exits
with 1 if a check fails. ``--device cpu`` runs the same code with small tensors, to try the script itself.

usage: gpu_losses.py [--device cuda|cpu]
"""

import argparse
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import harness  # noqa: E402
from harness import LOSSES, MIB, Call  # noqa: E402

LEVEL = 0.9
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def cases_for(inputs: harness.Inputs) -> dict[str, Call]:
    cases = {}
    for name, other in LOSSES.items():
        cases |= {other: Call(other, inputs), name: Call(name, inputs)}
        cases[f"{name} plain"] = Call(name, inputs, plain=True)
    return cases


def compare(report: harness.Report, check: harness.Checks, shape: tuple[int, int], device: str) -> None:
    for label, dtype in DTYPES.items():
        inputs = harness.make_inputs(shape, device=device, dtype=dtype)
        cases = cases_for(inputs)
        times = harness.time_interleaved(cases, rounds=20, warm_up=5, device=device)
        memory = {name: harness.measure_memory(call, device) for name, call in cases.items()}
        reads = {name: harness.count_transfers(call, device) for name, call in cases.items()}
        rows = []
        for name, other in LOSSES.items():
            for case in (other, name, f"{name} plain"):
                peaks = [f"{value / MIB:.1f}" for value in memory[case]]
                ratios = [times.ratio(case, other).text(), f"{memory[case].peak / memory[other].peak:.2f}"]
                rows.append([case, times.spread(case).text(3), *peaks, len(reads[case]), *ratios])
            where = f"{name} {list(shape)} {label}"
            check(f"{where}: one device-to-host transfer", len(reads[name]) == 1, f"{len(reads[name])}")
            cases[name]()
            check(
                f"{where}: loss, gradient and metrics are finite",
                bool(cases[name].loss.isfinite() & cases[name].leaf.grad.isfinite().all())
                and all(math.isfinite(value) for value in cases[name].metrics.values()),
            )
        report.table(
            f"Forward + backward, shape {list(shape)}, {label} log-probs",
            ["loss", "ms", "forward peak [MiB]", "held [MiB]", "peak [MiB]", "transfers", "time / verl", "peak / verl"],
            rows,
            "Median and quartiles of 20 interleaved rounds; memory above the inputs.",
            {name: dict(ms=times.rounds[name], memory=memory[name]._asdict()) for name in cases},
        )


def check_values(check: harness.Checks, shape: tuple[int, int], device: str) -> None:
    inputs = harness.make_inputs(shape, device=device)
    log_ratio = (inputs.log_prob - inputs.old_log_prob)[inputs.response_mask].abs()
    expected = log_ratio.sort().values[math.ceil(inputs.tokens * 9 / 10) - 1].item()
    ours = Call("sat_grpo", inputs)
    ours()
    found = ours.metrics["actor/sat/quantile"]
    check("sat_grpo: the quantile is that of a sort", found == expected, f"{found} {expected}")
    for name, other in LOSSES.items():
        verls, off = Call(other, inputs), Call(name, inputs, sat={"kernel": "none"})
        on, plain = Call(name, inputs), Call(name, inputs, plain=True)
        host = Call(name, harness.Inputs(*(tensor.cpu() for tensor in inputs)))
        for call in (verls, off, on, plain, host):
            call()
        comparisons = {
            f"verl's {other} where nothing is contracted": (off, verls, 1e-6),
            "fast and plain implementation agree": (on, plain, 1e-6),
            "device and CPU agree": (on, host, 1e-5),
        }
        for what, (left, right, tolerance) in comparisons.items():
            distance = _distance(left, right)
            check(f"{name}: {what}", distance < tolerance, f"{distance:.1e}")


def _distance(left: Call, right: Call) -> float:
    """Relative distance of loss and gradient, the larger one."""
    pairs = ((left.loss, right.loss), (left.leaf.grad, right.leaf.grad))
    differences = [(a.detach().cpu() - b.detach().cpu()).norm() / b.detach().cpu().norm() for a, b in pairs]
    return max(float(value) for value in differences)


def quantiles(report: harness.Report, check: harness.Checks, exponents: range, device: str) -> None:
    from verl_sat.order_statistic import Observations, radix_quantile

    rows = []
    for exponent in exponents:
        generator = torch.Generator().manual_seed(exponent)
        values = (torch.exp(1.5 * torch.randn(2**exponent, generator=generator)) * 0.0036).to(device)
        rank = math.ceil(2**exponent * 9 / 10)
        cases = {
            "torch.sort": lambda v=values, k=rank: v.sort().values[k - 1],
            "torch.kthvalue": lambda v=values, k=rank: v.kthvalue(k).values,
            "radix count": lambda v=values: radix_quantile([Observations(v)], LEVEL).value,
        }
        found = {name: case().item() for name, case in cases.items()}
        check(
            f"2^{exponent} values: counting, selecting and sorting agree",
            len(set(found.values())) == 1,
            sorted(set(found.values())),
        )
        times = harness.time_interleaved(cases, rounds=20, warm_up=5, device=device)
        ratio = times.ratio("radix count", "torch.sort").text()
        rows.append([f"2^{exponent}", *(times.spread(name).text(3) for name in cases), ratio])
    heads = ["values", "torch.sort", "torch.kthvalue", "radix count", "radix count / sort"]
    report.table("0.9-quantile of fp32 values [ms]", heads, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    device = parser.parse_args().device
    small = device == "cpu"
    report, check = harness.Report("gpu_losses" if not small else "gpu_losses_on_cpu"), harness.Checks()
    print(f"measured on {report.machine}")
    for shape in ((16, 512),) if small else harness.SHAPES:
        compare(report, check, shape, device)
    check_values(check, (32, 512) if small else (64, 4096), device)
    quantiles(report, check, range(12, 17, 2) if small else range(14, 25, 2), device)
    report.save()
    return check.status()


if __name__ == "__main__":
    sys.exit(main())
