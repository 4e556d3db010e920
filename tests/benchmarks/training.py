"""A training step of verl's actor worker with a small random model, on whatever device verl finds here.

One worker serves all losses and scopes: between steps only the loss function is exchanged, and the learning rate is 0,
so that every step meets the same weights. On the CPU it needs ``VERL_PLATFORM=cpu`` before verl is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

PROMPT = 16
OWN_AGG = {"vanilla": "token-mean", "sat_grpo": "token-mean"}


class Size(NamedTuple):
    """Sizes of the model."""

    hidden: int = 128
    layers: int = 4
    vocabulary: int = 1024


def make_model(path: Path, size: Size) -> None:
    """Write a Qwen3 with fixed random weights, nearly uniform: log-probs are about -log(vocabulary)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=size.hidden // 4,
        tie_word_embeddings=False,
        initializer_range=0.0005,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)


def make_batch(rows: int, response: int, vocabulary: int, seed: int = 1) -> Any:
    """A batch as the V1 trainer sends it, jagged: responses of half to all of ``response`` tokens, heavy-tailed |d|."""
    from tensordict import NonTensorStack, TensorDict
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def heavy_tailed(count: int) -> torch.Tensor:
        return 0.003 * torch.exp(1.5 * normal(count)) * normal(count).sign()

    def jagged(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    lengths = torch.randint(response // 2, response + 1, (rows,), generator=generator).tolist()
    drifts = heavy_tailed(rows)
    total = [PROMPT + length for length in lengths]
    ids = [torch.randint(0, vocabulary, (n,), generator=generator) for n in total]
    fields = {
        "input_ids": ids,
        "position_ids": [torch.arange(n) for n in total],
        "prompts": [row[:PROMPT] for row in ids],
        "responses": [row[PROMPT:] for row in ids],
        "response_mask": [torch.ones(n, dtype=torch.long) for n in lengths],
        "loss_mask": [torch.cat([torch.zeros(PROMPT), torch.ones(n)]).long() for n in lengths],
        "old_log_probs": [
            heavy_tailed(n) + drift - math.log(vocabulary) for n, drift in zip(lengths, drifts, strict=True)
        ],
        "advantages": [normal(1).expand(n).clone() for n in lengths],
    }
    batch = TensorDict({name: jagged(values) for name, values in fields.items()}, batch_size=rows)
    versions = [{"min_global_steps": 0, "max_global_steps": 0} for _ in range(rows)]
    batch["extra_fields"] = NonTensorStack(*versions)
    tu.assign_non_tensor(batch, temperature=1.0, calculate_entropy=False, global_batch_size=rows)
    return batch


class Actor:
    """verl's worker and the configuration of its actor.

    Args:
        model_dir: where the model is, or is written.
        size: of the model.
        changes: further Hydra overrides.
    """

    def __init__(self, model_dir: Path, size: Size, changes: tuple[str, ...] = ()) -> None:
        import plain_actor_step as plain

        if not (model_dir / "config.json").exists():
            make_model(model_dir, size)
        with _registry_untouched():
            self.worker = plain.make_worker(model_dir, ["actor_rollout_ref.actor.optim.lr=0", *changes])
        self.worker.engine.note_weight_sync(0)  # the version of every sample, so that lags are counted too
        self.config = self.worker.loss_fn.keywords["config"]
        self.gradients: torch.Tensor | None = None

    def use(self, loss: str, sat: Mapping[str, Any] | None = None) -> None:
        """Exchange the loss."""
        from verl.workers.config import PolicyLossConfig
        from verl.workers.utils.losses import ppo_loss

        from verl_sat.config import SATPolicyLossConfig

        ours = loss.startswith("sat_")
        policy_loss = (
            SATPolicyLossConfig(loss_mode=loss, sat=dict(sat or {})) if ours else PolicyLossConfig(loss_mode=loss)
        )
        config = copy.deepcopy(self.config)
        changes = {"policy_loss": policy_loss, "loss_agg_mode": OWN_AGG.get(loss, "seq-mean-token-mean")}
        for name, value in changes.items():
            object.__setattr__(config, name, value)  # verl freezes it
        self.worker.set_loss_fn(partial(ppo_loss, config=config))

    def step(self, batch: Any, micro_batch_size: int) -> dict[str, Any]:
        """One optimizer step on the whole batch.

        Returns:
            Metrics as verl's worker gives them.
        """
        from verl.utils import tensordict_utils as tu

        batch = batch.clone(recurse=False)
        rows = batch.batch_size[0]
        tu.assign_non_tensor(batch, use_dynamic_bsz=False, micro_batch_size_per_gpu=micro_batch_size)
        tu.assign_non_tensor(batch, mini_batch_size=rows, epochs=1)
        return dict(tu.get(self.worker.train_mini_batch(batch), "metrics"))

    @contextlib.contextmanager
    def recording_gradients(self) -> Iterator[None]:
        """Keep the gradient that each optimizer step found, as one flat tensor in ``gradients``."""
        engine = self.worker.engine
        original = engine.optimizer_step

        def optimizer_step() -> float:
            grads = (parameter.grad for parameter in engine.module.parameters())
            whole = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads)
            self.gradients = torch.cat([grad.detach().flatten().float().cpu() for grad in whole])
            return original()

        engine.optimizer_step = optimizer_step
        try:
            yield
        finally:
            del engine.optimizer_step


@contextlib.contextmanager
def _registry_untouched() -> Iterator[None]:
    """`plain.make_worker` registers verl's engine for the CPU; here verl is to find what the plugin registered."""
    from verl.workers.engine import EngineRegistry

    register, EngineRegistry.register = EngineRegistry.register, lambda **_: lambda cls: cls
    try:
        yield
    finally:
        EngineRegistry.register = register


def start_process_group(backend: str) -> None:
    """One rank, without a port."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.distributed.init_process_group(backend, rank=0, world_size=1, store=torch.distributed.HashStore())


def begin(doc: str) -> str:
    """Start of a script: its ``--device`` (cuda or cpu), verl with the plugin, and a process group of one rank.

    Args:
        doc: the script's docstring; its first line describes the script.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    device = parser.parse_args().device
    if device == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"  # verl asks for it when it is imported
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(0)
    import verl  # noqa: F401  (loads the plugin before any engine)

    start_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    return device
