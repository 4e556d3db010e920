"""One plain update of verl's own actor worker on a CPU, and hashes of everything that came out of it.

Names nothing of verl-sat: `tests/test_off_means_off_on_cpu.py` runs it in processes that load the plugin and in one
that does not, and compares what it prints: a JSON object with a hash of the gradients, of the updated weights and of
the metrics (loss included).

usage: plain_actor_step.py MODEL_DIR [hydra overrides]   (a random tiny model is written there unless it holds one)
"""

import hashlib
import json
import math
import os
import sys
import types
from functools import partial
from pathlib import Path

import torch
from tensordict import TensorDict

PROMPT, RESPONSE, BATCH, VOCAB = 4, 6, 8, 64


def make_model(path: Path) -> None:
    """Write a two-layer Qwen3 with fixed random weights, so that every process starts from the same file."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
        initializer_range=0.01,  # nearly uniform, so that old log-probs near -log(VOCAB) give ratios near 1
    )
    Qwen3ForCausalLM(config).save_pretrained(path)


def use_a_cpu_platform() -> None:
    """verl has no CPU platform: a minimal one, enough for one actor step."""
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_base import PlatformBase

    device = types.SimpleNamespace(**vars(torch.cpu))
    device.max_memory_allocated = device.max_memory_reserved = device.memory_allocated = lambda *_: 0
    device.memory_reserved = lambda *_: 0
    device.mem_get_info = lambda *_: (0, 0)
    device.empty_cache = lambda: None
    device.get_device_name = lambda *_: "CPU"  # a name without known FLOPS
    members = dict.fromkeys(PlatformBase.__abstractmethods__, lambda self, *args, **kwargs: None)
    members |= {
        "device_name": "cpu",
        "vendor_name": "generic",
        "device_module": device,
        "current_device": lambda self: "cpu",
        "device_count": lambda self: 1,
        "is_available": lambda self: True,
        "communication_backend_name": lambda self: "gloo",
        "get_device_capability": lambda self, index=0: (None, None),
        "visible_devices_envvar": lambda self: "CUDA_VISIBLE_DEVICES",
        "ray_resource_name": lambda self: "GPU",
        "ray_noset_envvars": lambda self: [],
        "is_ipc_supported": lambda self: False,
    }
    set_platform(type("PlatformCPU", (PlatformBase,), members)())


def make_worker(model_dir: Path, changes: list[str]):
    """verl's TrainingWorker with verl's FSDP2 engine, as `ActorRolloutRefWorker.init_model` builds it."""
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass, validate_config
    from verl.workers.config import TrainingWorkerConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    actor = "actor_rollout_ref.actor"
    overrides = [
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.model.path={model_dir}",
        "+actor_rollout_ref.model.load_tokenizer=False",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{actor}.strategy=fsdp2",
        f"{actor}.ppo_mini_batch_size={BATCH}",
        f"{actor}.ppo_micro_batch_size_per_gpu=2",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{actor}.fsdp_config.model_dtype=fp32",
        f"+{actor}.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
        f"{actor}.optim.lr=1e-3",
        f"{actor}.optim.total_training_steps=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        "trainer.n_gpus_per_node=1",
        "algorithm.adv_estimator=grpo",
        f"data.train_batch_size={BATCH}",
        *changes,
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    validate_config(config, use_reference_policy=False, use_critic=False)

    actor_config = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    model_config = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    actor_config.model_config = model_config
    engine_config = actor_config.engine
    engine_config.use_dynamic_bsz = False
    engine_config.micro_batch_size_per_gpu = actor_config.ppo_micro_batch_size_per_gpu
    engine_config.infer_micro_batch_size_per_gpu = 2

    EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device="cpu")(FSDPEngineWithLMHead)
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model_config,
            engine_config=engine_config,
            optimizer_config=actor_config.optim,
            checkpoint_config=actor_config.checkpoint,
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss, config=actor_config))
    return worker


def make_batch() -> TensorDict:
    """A batch as the V1 trainer sends it: jagged tensors, no padding, lengths that differ."""
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(1)
    lengths = [RESPONSE - row % 3 for row in range(BATCH)]

    def jagged(rows):
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    def noise(length):
        return torch.randn(length, generator=generator)

    total = [PROMPT + length for length in lengths]
    batch = TensorDict(
        {
            "input_ids": jagged([torch.randint(0, VOCAB, (n,), generator=generator) for n in total]),
            "position_ids": jagged([torch.arange(n) for n in total]),
            "prompts": jagged([torch.zeros(PROMPT, dtype=torch.long) for _ in lengths]),
            "responses": jagged([torch.zeros(n, dtype=torch.long) for n in lengths]),
            "response_mask": jagged([torch.ones(n, dtype=torch.long) for n in lengths]),
            "loss_mask": jagged([torch.cat([torch.zeros(PROMPT), torch.ones(n)]).long() for n in lengths]),
            "old_log_probs": jagged([noise(n) * 0.05 - math.log(VOCAB) for n in lengths]),
            "advantages": jagged([noise(1).expand(n).clone() for n in lengths]),
        },
        batch_size=BATCH,
    )
    tu.assign_non_tensor(
        batch, temperature=1.0, calculate_entropy=True, global_batch_size=BATCH, mini_batch_size=BATCH, epochs=1
    )
    return batch


def digest(tensors) -> str:
    """SHA-256 over names, dtypes, shapes and bytes."""
    sha = hashlib.sha256()
    for name, tensor in tensors:
        tensor = tensor.detach()
        tensor = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).contiguous()
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()


def main() -> None:
    model_dir = Path(sys.argv[1])
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.set_num_threads(1)
    if not (model_dir / "config.json").exists():
        make_model(model_dir)
    import verl  # noqa: F401

    use_a_cpu_platform()
    from verl.utils import tensordict_utils as tu

    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    torch.manual_seed(2)
    worker = make_worker(model_dir, sys.argv[2:])
    gradients = []
    step = worker.engine.optimizer_step

    def recording_step():
        gradients.append(digest((n, p.grad) for n, p in worker.engine.module.named_parameters()))
        return step()

    worker.engine.optimizer_step = recording_step
    output = worker.train_mini_batch(make_batch())
    metrics = tu.get(output, "metrics")
    # What a clock or the machine's memory decides, not the step.
    values = {k: v for k, v in sorted(metrics.items()) if not k.startswith("perf/") and k != "mfu"}
    text = json.dumps({k: repr(v) for k, v in values.items()})
    result = {
        "gradients": gradients,
        "weights": digest(worker.engine.module.named_parameters()),
        "metrics": hashlib.sha256(text.encode()).hexdigest(),
        "metric_keys": sorted(metrics),
        "loss": repr(metrics.get("loss", metrics.get("actor/pg_loss"))),
        "ours": sorted(name for name in sys.modules if name.partition(".")[0] == "verl_sat"),
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
