"""Replay of routes in verl's actor worker on the CPU: what comes out of this plugin's FSDP engine under many batches.

The model is a Qwen3-MoE whose first layer is dense. Its routes are recorded by plain forward passes of one sample each,
without verl; then verl's `TrainingWorker` sees the samples with these routes, with altered ones, with missing ones.

Writes into OUT_DIR ``results.pt``: per rank ``{scenario: {"log_probs": [per sample], "metrics": {...}, "gradient",
"error"}}``, and ``reference``: per sample the log-probs of plain passes, natively and under the altered routes.

usage: replay_steps.py WORLD_SIZE OUT_DIR
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

ROWS, VOCAB, EXPERTS, TOP_K, LAYERS = 8, 64, 8, 2, 4
ALTERED = (2, 5, 2)  # sample, row, layer whose route is changed
MISSING = {1: (3, 4), 5: (0, 1, 2)}  # sample: rows without a record


def make_model(path: Path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        mlp_only_layers=[0],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    model.save_pretrained(path)
    return model.eval()


def make_samples() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(4)
    samples = []
    for number in range(ROWS):
        prompt = torch.randint(0, VOCAB, (2 + number % 4,), generator=generator).tolist()
        response = torch.randint(0, VOCAB, (3 + (number * 5) % 7,), generator=generator).tolist()
        samples.append({"prompt": prompt, "response": response, "mask": [1] * len(response)})
    return samples


def plain_pass(model, sample, hook=None, codes=None) -> torch.Tensor:
    """Log-probs of all tokens but the first, by a pass of its own."""
    ids = torch.tensor([sample["prompt"] + sample["response"]])
    with torch.no_grad(), hook.replay(codes) if codes is not None else contextlib.nullcontext():
        logits = model(ids, use_cache=False).logits[0]
    return logits.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None]).squeeze(-1)


def record_routes(model, hook, sample) -> np.ndarray:
    """Ids ``[tokens - 1, LAYERS, TOP_K]``; the dense layer's are zeros, as engines send them."""
    ids = torch.tensor([sample["prompt"] + sample["response"][:-1]])
    with torch.no_grad(), hook.record() as recording:
        model(ids, use_cache=False)
    routes = np.zeros((ids.shape[1], LAYERS, TOP_K), np.int32)
    routes[:, list(hook.layers)] = recording.routes().numpy()
    return routes


def altered(routes: list[np.ndarray]) -> list[np.ndarray]:
    """One route of one token changed: to two experts that the router did not take."""
    sample, row, layer = ALTERED
    changed = [one.copy() for one in routes]
    taken = set(changed[sample][row, layer].tolist())
    changed[sample][row, layer] = [e for e in range(EXPERTS) if e not in taken][:TOP_K]
    return changed


def to_transport(ids: np.ndarray, missing_rows=()) -> torch.Tensor:
    """By hand, not by the package: id + 1 as bytes, zero where nothing is recorded and in the dense layer."""
    codes = (ids + 1).astype(np.uint8)
    codes[:, 0] = 0
    codes[list(missing_rows)] = 0
    return torch.from_numpy(codes.view("<i2").copy())


def tensor_dict(samples, transports, infos=None):
    """As the V1 trainer sends it: jagged, a last row of zeros for the last token."""
    from tensordict import NonTensorStack, TensorDict
    from verl.utils import tensordict_utils as tu

    def jagged(values, dtype=torch.long):
        return torch.nested.as_nested_tensor([torch.as_tensor(v).to(dtype) for v in values], layout=torch.jagged)

    full = [s["prompt"] + s["response"] for s in samples]
    data = {
        "input_ids": jagged(full),
        "position_ids": jagged([range(len(ids)) for ids in full]),
        "prompts": jagged([s["prompt"] for s in samples]),
        "responses": jagged([s["response"] for s in samples]),
        "response_mask": jagged([s["mask"] for s in samples]),
        "loss_mask": jagged([[0] * len(s["prompt"]) + s["mask"] for s in samples]),
        "old_log_probs": jagged([[-4.0] * len(s["response"]) for s in samples], torch.float32),
        "advantages": jagged([[1.0 - i % 3] * len(s["response"]) for i, s in enumerate(samples)], torch.float32),
    }
    if transports is not None:
        pairs = zip(transports, full, strict=True)
        rows = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, len(ids) - len(t))) for t, ids in pairs]
        data["routed_experts"] = jagged(rows, torch.int16)
    data = TensorDict(data, batch_size=len(samples))
    if infos is not None:
        data["extra_fields"] = NonTensorStack(*[{"routes": info} if info else {} for info in infos])
    tu.assign_non_tensor(
        data, temperature=1.0, calculate_entropy=False, global_batch_size=ROWS, mini_batch_size=ROWS, epochs=1
    )
    return data


def make_worker(model_dir: Path, changes=()):
    import plain_actor_step as plain
    from verl.workers.engine import EngineRegistry

    register, EngineRegistry.register = EngineRegistry.register, lambda **_: lambda cls: cls
    try:
        return plain.make_worker(
            model_dir,
            [
                "+actor_rollout_ref.actor.fsdp_config.router_replay.mode=R3",
                "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
                "actor_rollout_ref.actor.optim.lr=0.0",
                *changes,
            ],
        )
    finally:
        EngineRegistry.register = register


class Bench:
    """One worker and what to ask of it."""

    def __init__(self, worker, rank: int, world_size: int) -> None:
        self.worker, self.rank, self.world_size = worker, rank, world_size
        self.gradient = None
        engine = worker.engine
        step = engine.optimizer_step

        def recording_step():
            parts = [p.grad for _, p in sorted(engine.module.named_parameters()) if p.grad is not None]
            self.gradient = torch.cat([(g.full_tensor() if hasattr(g, "full_tensor") else g).flatten() for g in parts])
            return step()

        engine.optimizer_step = recording_step

    def share(self, data):
        from verl.utils import tensordict_utils as tu

        size = len(data) // self.world_size
        return tu.index_select_tensor_dict(data, list(range(self.rank * size, (self.rank + 1) * size)))

    def settings(self, data, micro=2, dynamic=False, packed=False, **more):
        from verl.utils import tensordict_utils as tu

        tu.assign_non_tensor(
            data,
            use_dynamic_bsz=dynamic,
            micro_batch_size_per_gpu=micro,
            max_token_len_per_gpu=24,
            use_remove_padding=packed,
            **more,
        )
        return data

    def infer(self, data, **how) -> list[torch.Tensor]:
        """Log-probs per sample of this rank, of all tokens but the first."""
        with self.worker.engine.eval_mode():
            output = self.worker.engine.infer_batch(self.settings(self.share(data), compute_loss=False, **how))
        return [row[:-1].clone() for row in output["model_output"]["log_probs"].unbind()]

    def train(self, data, **how) -> dict[str, Any]:
        from verl.utils import tensordict_utils as tu

        self.gradient = None
        engine = self.worker.engine
        data = self.settings(self.share(data), **how)
        with engine.train_mode():
            output = engine.train_batch(data, self.worker.loss_fn)
        metrics = {k: v[0] if isinstance(v, list) else v for k, v in output["metrics"].items() if "r3" in k}
        return {"metrics": metrics, "gradient": self.gradient, "tu": tu.__name__}


def ulysses_slices(replay, samples) -> dict[str, Any]:
    """What this rank gets of tokens and of routes that name their token, sliced by verl over all ranks."""
    from verl.utils.ulysses import set_ulysses_sequence_parallel_group, ulysses_pad_and_slice_inputs

    def named(sample):  # row of token t: experts t // 8 and t % 8, in every layer
        ids = torch.tensor(sample["prompt"] + sample["response"][:-1])
        return to_transport(torch.stack([ids // 8, ids % 8], -1)[:, None].expand(-1, LAYERS, -1).numpy())

    samples = [samples[0], samples[1], samples[3]]  # an odd number of tokens
    data = tensor_dict(samples, [named(sample) for sample in samples])
    set_ulysses_sequence_parallel_group(torch.distributed.group.WORLD)
    try:
        tokens, _, pad_size = ulysses_pad_and_slice_inputs(
            data["input_ids"].values()[None], sp_size=torch.distributed.get_world_size()
        )
        routes, counted = replay._aligned(data, {"input_ids": tokens}, {"pad_size": pad_size}, sliced=True)
    finally:
        set_ulysses_sequence_parallel_group(None)
    return {
        "tokens": tokens[0],
        "codes": replay.codes(routes).to(torch.int64),
        "counted": counted,
        "pad_size": pad_size,
        "lengths": [len(s["prompt"]) + len(s["response"]) for s in samples],
    }


def failed_in_the_middle(bench: Bench, data) -> dict[str, Any]:
    """A mini-batch whose second call of the loss raises, and the one after it."""
    loss, calls = bench.worker.loss_fn, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("in the middle")
        return loss(*args, **kwargs)

    bench.worker.loss_fn = failing
    error = caught(bench.train, data.copy())
    bench.worker.loss_fn = loss
    return {"error": error, **bench.train(data)}


def caught(function, *args, **kwargs) -> str:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def scenarios(bench: Bench, samples, routes, out: Path) -> dict[str, Any]:
    from contextlib import contextmanager

    own = [to_transport(r) for r in routes]
    other = [to_transport(r) for r in altered(routes)]
    holes = [to_transport(r, MISSING.get(i, ())) for i, r in enumerate(routes)]
    zeroed = [
        torch.where(torch.from_numpy(np.isin(np.arange(len(t)), MISSING.get(i, ())))[:, None, None], 257 + 1, t)
        for i, t in enumerate(own)
    ]  # what verl's zero fill means elsewhere: expert 0 (here 0 and 1, a router never takes one twice)
    results: dict[str, Any] = {}

    for name, transports in (("own", own), ("altered", other), ("holes", holes), ("zeroed", zeroed)):
        results[name] = {"log_probs": bench.infer(tensor_dict(samples, transports))}
        results[name] |= bench.train(tensor_dict(samples, transports))
    for name, how in {
        "one call": {"micro": ROWS // bench.world_size},
        "call per sample": {"micro": 1},
        "dynamic": {"dynamic": True},
        "packed, one sample": {"micro": 1, "packed": True},
    }.items():
        results[f"altered, {name}"] = {"log_probs": bench.infer(tensor_dict(samples, other), **how)}
        results[f"altered, {name}"] |= bench.train(tensor_dict(samples, other), **how)

    engine = bench.worker.engine
    engine.pad_to_length, engine.pad_to_length_bucket = True, 16
    results["altered, bucketed"] = {"log_probs": bench.infer(tensor_dict(samples, other), micro=1, packed=True)}
    results["altered, bucketed"] |= bench.train(tensor_dict(samples, other), micro=1, packed=True)
    engine.pad_to_length = False
    results["ulysses"] = ulysses_slices(engine.route_replay, samples) if bench.world_size > 1 else None

    padding = [
        dict(sample, mask=[0] * len(sample["mask"])) if i in (0, 7) else sample for i, sample in enumerate(samples)
    ]
    nothing = [torch.zeros_like(t) if i in (0, 7) else t for i, t in enumerate(own)]
    results["padding"] = bench.train(tensor_dict(padding, nothing))
    why = [
        {"engine": "x", "why": [[2, 2], [0, 2], [1, len(t) - 4]], "versions": [[3, len(t)]], "rejected": {"range": 2}}
        for t in own
    ]
    described = [torch.where((torch.arange(len(t)) // 2 == 1)[:, None, None], t, 0) for t in own]
    results["reasons"] = bench.train(tensor_dict(samples, described, why))

    results["no field"] = {
        "infer": caught(bench.infer, tensor_dict(samples, None)),
        "train": caught(bench.train, tensor_dict(samples, None)),
    }
    narrow = [t[..., :1][..., [0, 0]] for t in own]
    dense = tensor_dict(samples, own)
    dense["routed_experts"] = dense["routed_experts"].to_padded_tensor(0)
    short = tensor_dict(samples, own)
    rows = [row[:-1] for row in short["routed_experts"].unbind()]
    short["routed_experts"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    results["wrong form"] = {
        "width": caught(bench.train, tensor_dict(samples, narrow)),
        "dense": caught(bench.train, dense),
        "rows": caught(bench.train, short),
    }
    results["failed in the middle"] = failed_in_the_middle(bench, tensor_dict(samples, own))

    engine.module.disable_adapter = contextlib.nullcontext
    with engine.disable_adapter():
        results["reference"] = {"log_probs": bench.infer(tensor_dict(samples, other))}
        results["reference without field"] = {"error": caught(bench.infer, tensor_dict(samples, None))}

    replay = engine.route_replay.hook.replay
    try:

        @contextmanager
        def nothing_forced(codes, counted=None, **_):
            counts = torch.tensor([0, 0, int(counted.sum()) * (LAYERS - 1)])
            yield type("Replaying", (), {"counts": counts})()

        engine.route_replay.hook.replay = nothing_forced
        engine.route_replay._replayed_before = False
        results["disabled hook"] = {"train": caught(bench.train, tensor_dict(samples, own))}
        engine.route_replay._replayed_before = True
        results["disabled hook, later"] = bench.train(tensor_dict(samples, own))
    finally:
        engine.route_replay.hook.replay = replay
    engine.route_replay._replayed_before = False
    empty = [torch.zeros_like(t) for t in own]
    results["nothing recorded"] = {"train": caught(bench.train, tensor_dict(samples, empty))}
    return results


def run_rank(rank: int, world_size: int, out: str, store: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT="0", VERL_PLATFORM="cpu")
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=90)
    )
    try:
        from transformers import Qwen3MoeForCausalLM

        from verl_sat.router_replay.hook import RouterHook

        folder = Path(out) / "model"
        samples = make_samples()
        plain = Qwen3MoeForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
        hook = RouterHook.install(plain, num_experts=EXPERTS, top_k=TOP_K)
        routes = [record_routes(plain, hook, sample) for sample in samples]
        results: dict[str, Any] = {"layers": hook.layers}
        if rank == 0:
            forced = []
            for sample, ids in zip(samples, altered(routes), strict=False):
                codes = np.zeros((len(ids) + 1, LAYERS, TOP_K), np.uint8)
                codes[:-1, 1:] = ids[:, 1:] + 1
                forced.append(plain_pass(plain, sample, hook, torch.from_numpy(codes)))
            results["plain"] = {
                "native": [plain_pass(plain, sample) for sample in samples],
                "altered": forced,
                "lengths": [len(s["prompt"]) + len(s["response"]) for s in samples],
            }
        hook.remove()
        results |= scenarios(Bench(make_worker(folder), rank, world_size), samples, routes, Path(out))
        checkpointed = Bench(
            make_worker(folder, ["actor_rollout_ref.model.enable_gradient_checkpointing=True"]), rank, world_size
        )
        results["altered, checkpointed"] = checkpointed.train(
            tensor_dict(samples, [to_transport(r) for r in altered(routes)])
        )
        torch.save(results, Path(out) / f"results_{rank}.pt")
    except BaseException:
        traceback.print_exc()
        raise
    torch.distributed.destroy_process_group()


def main() -> None:
    world_size, out = int(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    make_model(out / "model")
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=run_rank, args=(rank, world_size, str(out), f"{folder}/store"))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        sys.exit(1)


if __name__ == "__main__":
    main()
