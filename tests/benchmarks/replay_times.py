"""Times and live bytes of training steps with and without replay, in one process; run by `bench_replay.py`.

usage: replay_times.py MODEL_DIR PLAN_JSON   (with VERL_PLATFORM=cpu)

The plan is a list of ``{"model": {...}, "rows", "response", "micro_batches", "rounds"}``; the result a list of
``{"rounds": {"native" | "R3": [ms]}, "peak": {"native" | "R3": bytes}, "metrics": {...}}``. Both cases use one worker;
the routes that are replayed are those that the model chooses itself, so that experts have the same load in both.
"""

import json
import sys
from pathlib import Path

import harness
import torch
import training

MODE = "+actor_rollout_ref.actor.fsdp_config.router_replay.mode=R3"
FLAG = "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"


def make_model(path: Path, sizes: dict) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=sizes["hidden"],
        intermediate_size=2 * sizes["hidden"],
        moe_intermediate_size=sizes["expert"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=sizes["hidden"] // 4,
        num_experts=sizes["experts"],
        num_experts_per_tok=sizes["top_k"],
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM._from_config(config, dtype=torch.float32).save_pretrained(path)


def with_routes(actor: training.Actor, batch):
    """The batch with the routes that the model chooses, in transport form."""
    replay = actor.worker.engine.route_replay
    layout, module = replay.layout, actor.worker.engine.module
    rows = []
    for ids in batch["input_ids"].unbind():
        with torch.no_grad(), replay.hook.record() as recording:
            module(input_ids=ids.unsqueeze(0), use_cache=False)
        codes = torch.zeros(len(ids), layout.num_layers, 2 * layout.transport_width, dtype=torch.uint8)
        codes[:-1, list(replay.hook.layers), : layout.top_k] = (recording.routes()[:-1] + 1).to(torch.uint8)
        rows.append(codes.view(torch.int16))
    batch["routed_experts"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return batch


class Step:
    """A step of one case; replay is switched on or off outside the clock."""

    def __init__(self, actor, batch, micro_batch_size, replay) -> None:
        self.actor, self.batch, self.micro_batch_size, self.replay = actor, batch, micro_batch_size, replay

    def prepare(self) -> None:
        self.actor.worker.engine.route_replay = self.replay

    def __call__(self):
        return self.actor.step(self.batch, self.micro_batch_size)


def peak_bytes(step: Step) -> int:
    """Most live bytes of torch's allocator in a step, above what was live before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    live = peak = 0
    for _, change in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        live += change
        peak = max(peak, live)
    return peak


def run(folder: Path, item: dict) -> dict:
    if not (folder / "config.json").exists():
        make_model(folder, item["model"])
    actor = training.Actor(folder, training.Size(), (MODE, FLAG))
    actor.use("gspo")
    batch = with_routes(actor, training.make_batch(item["rows"], item["response"], 1024))
    size = item["rows"] // item["micro_batches"]
    replay = actor.worker.engine.route_replay
    cases = {"native": Step(actor, batch, size, None), "R3": Step(actor, batch, size, replay)}
    result = {"peak": {}, "metrics": {}}
    for name, case in cases.items():
        case.prepare()
        metrics = case()  # also the warm-up
        result["metrics"] |= {key: value for key, value in metrics.items() if "/r3/" in key}
        result["peak"][name] = peak_bytes(case)
    result["rounds"] = harness.time_interleaved(cases, rounds=item["rounds"], warm_up=1).rounds
    return result


def main() -> None:
    torch.set_num_threads(1)
    import verl  # noqa: F401  (loads the plugin, and with it the CPU platform, before any engine)

    training.start_process_group("gloo")
    plan = json.loads(sys.argv[2])
    results = [run(Path(sys.argv[1]) / str(item["model"]["layers"]), item) for item in plan]
    torch.distributed.destroy_process_group()
    print("RESULT " + json.dumps(results))


if __name__ == "__main__":
    main()
