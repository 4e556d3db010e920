"""The one FSDP engine of this plugin: verl's, with the lag of each mini-batch measured.

A subclass of verl's ``FSDPEngineWithLMHead`` (`verl/workers/engine/fsdp/transformer_impl.py`), plain
verl in everything that is not configured. It is the single place for what needs to see a whole
mini-batch before it is split: ``data`` in :meth:`SATFSDPEngine.forward_backward_batch` is this rank's
whole mini-batch and the data-parallel group is at hand.

Registered for ``device="cpu"``, where verl has no FSDP engine of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils.device import get_device_id
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_sat.staleness import VersionClock, count_lags, lag_metrics


def sample_versions(data: TensorDict) -> list[int | None]:
    """``min_global_steps`` of each row of a batch, None where it is missing.

    ``extra_fields`` is a stack of per-sample dicts, each maybe wrapped as non-tensor data.
    """
    rows = [getattr(row, "data", row) for row in data["extra_fields"]]
    return [row.get("min_global_steps") if isinstance(row, dict) else None for row in rows]


def rows_with_tokens(response_mask: torch.Tensor) -> list[bool]:
    """Which rows train at least one token; verl's padding rows do not.

    Args:
        response_mask: jagged ``[batch, response]`` or padded, 0/1.
    """
    if response_mask.is_nested:
        response_mask = response_mask.to_padded_tensor(0)
    return (response_mask != 0).any(dim=-1).tolist()  # sync ok: once for a mini-batch


class SATFSDPEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine that knows the version of its weights."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.version_clock = VersionClock()

    def note_weight_sync(self, global_steps: int | None) -> None:
        """The current weights go to the rollout engine as version ``global_steps`` (see `verl_sat/_compat.py`)."""
        self.version_clock.note_sync(global_steps)

    def optimizer_step(self) -> float:
        """As verl's; counts the steps that changed the weights (verl skips a non-finite one)."""
        grad_norm = super().optimizer_step()
        if math.isfinite(grad_norm):
            self.version_clock.note_update()
        return grad_norm

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """As verl's, with ``actor/staleness/*`` beside the metrics of the loss when training."""
        lag = {} if forward_only else self._lag_metrics(data)
        output = super().forward_backward_batch(data, loss_function, forward_only=forward_only)
        output["metrics"].update({key: [value] for key, value in lag.items()})
        return output

    def _lag_metrics(self, data: TensorDict) -> dict[str, float]:
        if "extra_fields" not in data.keys() or "response_mask" not in data.keys():
            return {}  # not a batch of rollouts (supervised training)
        counts = count_lags(self.version_clock, sample_versions(data), rows_with_tokens(data["response_mask"]))
        sums = torch.tensor(counts.as_sums(), dtype=torch.float64, device=get_device_id())
        oldest = torch.tensor(float(counts.oldest), device=get_device_id())
        group = self.get_data_parallel_group()
        torch.distributed.all_reduce(sums, op=torch.distributed.ReduceOp.SUM, group=group)
        torch.distributed.all_reduce(oldest, op=torch.distributed.ReduceOp.MAX, group=group)
        return lag_metrics(sums.tolist(), float(oldest))  # sync ok: once for a mini-batch


def register() -> None:
    """Register the engine for ``fsdp`` and ``fsdp2`` on the CPU. Idempotent."""
    taken = EngineRegistry._engines.get("language_model", {}).get("fsdp2", {})
    if taken.get("cpu") is not SATFSDPEngine:
        EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(SATFSDPEngine)
