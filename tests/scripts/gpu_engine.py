"""This plugin's FSDP engine on one GPU, as verl finds it: every scope, both losses, with a tiny random model.

One rank (NCCL), verl's own worker. Exits with 1 if a check fails. ``--device cpu`` runs the same code with gloo and the
CPU platform, to try the script itself.

usage: gpu_engine.py [--device cuda|cpu]
"""

import math
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import harness  # noqa: E402
import training  # noqa: E402

ENGINE = "verl_sat.engine.fsdp.SATFSDPEngine"
SCOPES = ("micro_batch", "dp_group", "running", "mini_batch")
ROWS, RESPONSE = 32, 64
SIZE = training.Size(hidden=64, layers=2, vocabulary=256)
# Relative, of fp32 gradients. Sums over other micro-batches are rounded otherwise, and CUDA's atomics add in any order.
TOLERANCE = {"cpu": 1e-6, "cuda": 1e-5}


def qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def numbers(value) -> list[float]:
    """A metric as verl's worker gives it: a number, a list, or a ``Metric``."""
    value = getattr(value, "values", value)
    return [float(v) for v in value] if isinstance(value, list | tuple) else [float(value)]


def check_registry(check: harness.Checks, device: str) -> None:
    from verl.utils.device import get_vendor
    from verl.workers.engine import EngineRegistry

    for strategy in ("fsdp", "fsdp2"):
        found = qualified(EngineRegistry.get_engine_cls("language_model", strategy))
        check(f"verl's registry: {strategy} on {device}, vendor {get_vendor()}", found == ENGINE, found)
        if device == "cuda":
            entry = EngineRegistry._engines["language_model"][strategy].get(("cuda", "nvidia"))
            found = None if entry is None else qualified(entry)
            check(f"verl's registry: {strategy} under the key ('cuda', 'nvidia')", found == ENGINE, found)


class Runner:
    """Steps of one actor, with the gradient of each."""

    def __init__(self, actor: training.Actor) -> None:
        self.actor, self.batch = actor, training.make_batch(ROWS, RESPONSE, SIZE.vocabulary)

    def step(self, loss: str, sat: dict | None, micro_batch_size: int) -> tuple[dict[str, list[float]], torch.Tensor]:
        self.actor.use(loss, sat)
        with self.actor.recording_gradients():
            metrics = self.actor.step(self.batch, micro_batch_size)
        return {key: numbers(value) for key, value in metrics.items()}, self.actor.gradients


def distance(gradient: torch.Tensor, reference: torch.Tensor) -> float:
    return float((gradient - reference).norm() / reference.norm())


def check_scopes(check: harness.Checks, runner: Runner, loss: str, tolerance: float) -> None:
    from verl_sat.metrics import METRIC_KEYS

    gradients = {}
    for scope in SCOPES:
        steps = [runner.step(loss, {"scope": scope}, 8) for _ in range(2 if scope == "running" else 1)]
        metrics, gradients[scope] = steps[-1]
        missing = [key for key in METRIC_KEYS if key not in metrics]
        values = [value for key in METRIC_KEYS if key in metrics for value in metrics[key]]
        finite = all(math.isfinite(value) for value in values) and math.isfinite(gradients[scope].norm().item())
        quantile = metrics.get("actor/sat/quantile", [0.0])
        detail = f"q {quantile[0]:.5f}, gradient norm {gradients[scope].norm():.5f}"
        check(f"{loss}, scope {scope}: a step with all metrics, all finite", finite and not missing, missing or detail)
        check(f"{loss}, scope {scope}: a quantile and a gradient", quantile[0] > 0 and gradients[scope].any().item())
    off = distance(gradients["dp_group"], gradients["micro_batch"])
    check(f"{loss}: with one rank dp_group is micro_batch", off < tolerance, f"{off:.1e}")
    # the same weights and batch: the previous mini-batch is this one
    off = distance(gradients["running"], gradients["mini_batch"])
    check(f"{loss}: running after the same mini-batch is mini_batch", off < tolerance, f"{off:.1e}")

    whole = runner.step(loss, {"scope": "mini_batch"}, ROWS)[1]
    for size in (16, 8, 2):
        off = distance(runner.step(loss, {"scope": "mini_batch"}, size)[1], whole)
        check(
            f"{loss}, mini_batch: {ROWS // size} x {size} has the gradient of 1 x {ROWS}", off < tolerance, f"{off:.1e}"
        )
    verls = runner.step(harness.LOSSES[loss], None, 8)[1]
    off = distance(runner.step(loss, {"scope": "micro_batch", "kernel": "none"}, 8)[1], verls)
    check(
        f"{loss}: without contraction the gradient is that of verl's {harness.LOSSES[loss]}",
        off < tolerance,
        f"{off:.1e}",
    )
    off = distance(whole, verls)
    check(f"{loss}: with contraction it is not", off > 10 * tolerance, f"{off:.1e}")


def main() -> int:
    start = time.monotonic()
    device = training.begin(__doc__)
    check = harness.Checks()
    check_registry(check, device)
    with tempfile.TemporaryDirectory() as folder:
        actor = training.Actor(Path(folder) / "model", SIZE)
    found = qualified(type(actor.worker.engine))
    check("verl's worker runs this plugin's engine", found == ENGINE, found)
    where = {parameter.device.type for parameter in actor.worker.engine.module.parameters()}
    check(f"its weights are on the {device}", where == {device}, where)
    runner = Runner(actor)
    for loss in harness.LOSSES:
        check_scopes(check, runner, loss, TOLERANCE[device])
    torch.distributed.destroy_process_group()
    print(f"{time.monotonic() - start:.0f} s")
    return check.status()


if __name__ == "__main__":
    sys.exit(main())
