"""Three updates with this plugin's FSDP engine on the CPU platform, for a given number of ranks.

Prints a JSON object: the engine's class, the metrics of every update, and a hash of the weights at the end.

usage: engine_step.py MODEL_DIR WORLD_SIZE
"""

import json
import os
import sys
from pathlib import Path

import torch

VERSIONS = [[0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, None, 1, 1, 0], [0, 2, 2, 2, 2, 2, 2, 0]]
PADDING_ROW = 7  # carries the oldest version and no token


def run_rank(rank: int, world_size: int, model_dir: str, store_file: str, queue) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT="0", VERL_PLATFORM="cpu")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store_file}", rank=rank, world_size=world_size)
    sys.path.insert(0, str(Path(__file__).parent))
    import plain_actor_step as plain
    from tensordict import NonTensorStack
    from verl.utils import tensordict_utils as tu

    worker = make_worker(plain, Path(model_dir))
    results = []
    for version, versions in enumerate(VERSIONS):
        worker.engine.note_weight_sync(version)
        batch = plain.make_batch()
        mask = list(batch["response_mask"].unbind())
        mask[PADDING_ROW] = torch.zeros_like(mask[PADDING_ROW])
        batch["response_mask"] = torch.nested.as_nested_tensor(mask, layout=torch.jagged)
        batch["extra_fields"] = NonTensorStack(*[{"min_global_steps": v, "max_global_steps": v} for v in versions])
        share = plain.BATCH // world_size
        batch = tu.index_select_tensor_dict(batch, list(range(rank * share, (rank + 1) * share)))
        tu.assign_non_tensor(
            batch,
            temperature=1.0,
            calculate_entropy=False,
            global_batch_size=plain.BATCH,
            mini_batch_size=plain.BATCH,
            epochs=1,
        )
        metrics = tu.get(worker.train_mini_batch(batch), "metrics")
        results.append({key: value for key, value in metrics.items() if "staleness" in key})
    digest = plain.digest((n, p) for n, p in worker.engine.module.named_parameters())
    if rank == 0:
        engine = type(worker.engine)
        queue.put({"engine": f"{engine.__module__}.{engine.__qualname__}", "metrics": results, "weights": digest})
    torch.distributed.destroy_process_group()


def make_worker(plain, model_dir: Path):
    """verl's worker; its registry finds our engine for the CPU by itself."""
    from verl.workers.engine import EngineRegistry

    register, EngineRegistry.register = EngineRegistry.register, lambda **_: lambda cls: cls
    try:
        return plain.make_worker(model_dir, ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"])
    finally:
        EngineRegistry.register = register


def main() -> None:
    import tempfile

    model_dir, world_size = sys.argv[1], int(sys.argv[2])
    if not (Path(model_dir) / "config.json").exists():
        sys.path.insert(0, str(Path(__file__).parent))
        import plain_actor_step as plain

        plain.make_model(Path(model_dir))
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, model_dir, f"{folder}/store", queue)
        ranks = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(world_size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(1)
    print(json.dumps(queue.get()))


if __name__ == "__main__":
    main()
