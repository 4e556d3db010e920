"""Replay of routes on one GPU: the hook by itself, and verl's worker with this plugin's engine, on a small Qwen3-MoE.

On CUDA the backward pass runs on autograd's own threads, so a recompute under gradient checkpointing is what a CPU can
only imitate; and a router that waits for the device is refused by torch's own check. Exits with 1 if a check fails.
``--device cpu`` runs the same code with gloo and the CPU platform, to try the script itself.

usage: gpu_replay.py [--device cuda|cpu]
"""

import contextlib
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import harness  # noqa: E402
import replay_times  # noqa: E402
import training  # noqa: E402

SIZES = {
    "cpu": {"hidden": 64, "expert": 32, "layers": 2, "experts": 8, "top_k": 2},
    "cuda": {"hidden": 1024, "expert": 512, "layers": 6, "experts": 64, "top_k": 8},
}
ROWS = {"cpu": (8, 32), "cuda": (32, 256)}  # responses, longest
TOLERANCE = 2e-5  # relative, of fp32 gradients: CUDA's atomics add in any order


@contextlib.contextmanager
def no_waiting(device: str):
    """Raise where something on the host waits for the device."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def gradients(model) -> torch.Tensor:
    flat = torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return flat


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


def check_hook(check: harness.Checks, device: str, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    from verl_sat.router_replay.hook import RouterHook

    sizes = SIZES[device]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").to(device).train()
    hook = RouterHook.install(model, num_experts=sizes["experts"], top_k=sizes["top_k"])
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randint(0, 1024, (2, 64), generator=generator).to(device) for _ in range(2)]
    codes = []
    for ids in batches:
        with torch.no_grad(), hook.record() as recording:
            model(ids, use_cache=False)
        codes.append((recording.routes() + 1).to(torch.uint8))
    native = model(batches[0], use_cache=False).logits
    native.square().mean().backward()
    expected = gradients(model)
    with hook.replay(codes[0]) as replaying:
        replayed = model(batches[0], use_cache=False).logits
    replayed.square().mean().backward()
    used, differ, counted = replaying.counts.tolist()
    rows = 2 * 64 * sizes["layers"]
    check("own routes: all are replayed", (used, counted) == (rows, rows), (used, counted))
    check("own routes: the live choice agrees", differ <= 0.001 * rows, differ)
    check("own routes: logits", off(replayed, native) < TOLERANCE, f"{off(replayed, native):.1e}")
    found = gradients(model)
    check("own routes: gradient", off(found, expected) < TOLERANCE, f"{off(found, expected):.1e}")

    other = [torch.roll(code, 1, dims=0) for code in codes]  # another token's experts
    losses = []
    for ids, code in zip(batches, other, strict=True):
        with hook.replay(code):
            losses.append(model(ids, use_cache=False).logits.square().mean())
    for loss in losses:
        loss.backward()
    expected = gradients(model)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        losses = []
        for ids, code in zip(batches, other, strict=True):
            with hook.replay(code):
                losses.append(model(ids, use_cache=False).logits.square().mean())
        for loss in reversed(losses):  # F0 F1 B1 B0
            loss.backward()
        found = gradients(model)
        name = "reentrant" if reentrant else "non-reentrant"
        check(f"checkpointing, {name}, F0 F1 B1 B0: gradient", off(found, expected) < TOLERANCE, off(found, expected))
    model.gradient_checkpointing_disable()
    site = hook.sites[0]
    hidden = torch.randn(2 * 64, sizes["hidden"], device=device)
    try:
        with hook.replay(codes[0], counted=torch.ones(2 * 64, dtype=torch.bool, device=device)) as _:
            for each in hook.sites:
                with no_waiting(device):
                    getattr(each.module, each.method)(hidden)
        waited = ""
    except RuntimeError as error:
        waited = str(error)
    check(f"{type(site.module).__name__}: nothing on the host waits for a router", not waited, waited)
    with torch.autocast(device, torch.bfloat16), hook.replay(codes[0]) as replaying:
        model(batches[0], use_cache=False).logits.float().square().mean().backward()
    used = int(replaying.counts[0])
    check("bf16 autocast: all are replayed", used == rows and gradients(model).isfinite().all().item(), used)
    hook.remove()


def check_engine(check: harness.Checks, device: str, folder: Path) -> None:
    actor = training.Actor(folder, training.Size(), (replay_times.MODE, replay_times.FLAG))
    actor.use("gspo")
    rows, response = ROWS[device]
    batch = replay_times.with_routes(actor, training.make_batch(rows, response, 1024))
    replay = actor.worker.engine.route_replay
    cases = {
        name: replay_times.Step(actor, batch, rows // 4, each) for name, each in (("native", None), ("R3", replay))
    }
    cases["R3"].prepare()
    metrics = cases["R3"]()
    values = {key: metrics[key] for key in metrics if "/r3/" in key}
    value = values["actor/r3/replayed_frac"]
    check("verl's worker: all are replayed", (value[0] if isinstance(value, list) else value) == 1.0, values)
    times = harness.time_interleaved(cases, rounds=10, warm_up=2, device=device)
    print(f"step with R3 / native: {times.ratio('R3', 'native').text()}, native {times.spread('native').text(1)} ms")
    if device == "cuda":
        for name, case in cases.items():
            case.prepare()
            torch.cuda.reset_peak_memory_stats()
            case()
            print(f"peak memory, {name}: {torch.cuda.max_memory_allocated() / harness.MIB:.0f} MiB")


def main() -> int:
    start = time.monotonic()
    device = training.begin(__doc__)
    check = harness.Checks()
    with tempfile.TemporaryDirectory() as folder:
        replay_times.make_model(Path(folder), SIZES[device])
        check_hook(check, device, Path(folder))
        check_engine(check, device, Path(folder))
    torch.distributed.destroy_process_group()
    print(f"{time.monotonic() - start:.0f} s")
    return check.status()


if __name__ == "__main__":
    sys.exit(main())
