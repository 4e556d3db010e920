"""The one FSDP engine of this plugin: verl's, with the lag and the gate level of each mini-batch, and replay of routes.

A subclass of verl's ``FSDPEngineWithLMHead`` (`verl/workers/engine/fsdp/transformer_impl.py`), plain
verl in everything that is not configured. It is the single place for what needs to see a whole
mini-batch before it is split: ``data`` in :meth:`SATFSDPEngine.forward_backward_batch` is this rank's
whole mini-batch and the data-parallel group is at hand.

Importing this module registers it: for ``device="cpu"`` on the CPU platform, where verl has no FSDP engine of its own,
and otherwise for NVIDIA's CUDA through verl's vendor key, which verl looks up before its own entry for the device. The
plugin imports it when verl imports its own FSDP engine.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_sat import scope
from verl_sat._compat import cpu_profile
from verl_sat.engine.look_ahead import look_ahead, sat_settings
from verl_sat.engine.replay import RouteReplay, expected_of, per_sample, replay_of
from verl_sat.staleness import VersionClock, count_lags, lag_metrics

logger = logging.getLogger(__name__)


def sample_versions(data: TensorDict) -> list[int | None]:
    """``min_global_steps`` of each row of a batch, None where it is missing."""
    rows = per_sample(data, "extra_fields")
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
    """verl's FSDP engine that knows the version of its weights and looks at a mini-batch before it is split."""

    # What `verl_sat.scope` asks an engine, without importing this class.
    provides_mini_batch_scope = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.version_clock = VersionClock()
        self.route_replay: RouteReplay | None = None
        self._running_forward: tuple[ExitStack, bool] | None = None
        self._as_reference = False

    def initialize(self) -> None:
        """As verl's; with ``router_replay.mode=R3`` the routers of the module can be forced from here on."""
        super().initialize()
        self.route_replay = replay_of(self)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """As verl's; without its LoRA adapter the actor's module is the reference, which routes natively."""
        before, self._as_reference = self._as_reference, True
        try:
            with super().disable_adapter():
                yield
        finally:
            self._as_reference = before

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
        """As verl's; when training with a SAT loss, finds the gate level of scope ``mini_batch`` first.

        Training also reports ``actor/staleness/*``: with a SAT loss, and with any loss on the CPU platform. Other jobs
        on a GPU keep verl's metrics as they are.
        """
        replay = None if self._as_reference else self.route_replay
        if replay is not None:
            replay.require_routes(data, "compute_log_prob" if forward_only else "update_actor")
        if forward_only:
            return super().forward_backward_batch(data, loss_function, forward_only=True)
        measured = get_device_name() == "cpu" or sat_settings(loss_function) is not None
        lag = self._lag_metrics(data) if measured else {}
        # Usually open already, around the optimizer step (verl_sat/_compat.py).
        with scope.optimizer_step(self) as step:
            look_ahead(step, data, loss_function, self._log_probs_ahead)
            output = super().forward_backward_batch(data, loss_function, forward_only=False)
        measured_metrics = dict(lag)
        if replay is not None:
            # Before verl takes the optimizer step: a job that replays nothing must not train on.
            group = self.get_data_parallel_group()
            measured_metrics |= replay.metrics(
                expected_of(data, replay.hook.layers[0]), group, sliced=self.use_ulysses_sp
            )
        output["metrics"].update({key: [value] for key, value in measured_metrics.items()})
        return output

    def forward_step(self, micro_batch: TensorDict, loss_function: Callable | None, forward_only: bool) -> Any:
        """As verl's; with R3 the module runs under the routes of the micro-batch, except as a LoRA job's reference."""
        if self.route_replay is None or self._as_reference:
            return super().forward_step(micro_batch, loss_function, forward_only)
        with ExitStack() as stack:
            self._running_forward = stack, not forward_only
            try:
                return super().forward_step(micro_batch, loss_function, forward_only)
            finally:
                self._running_forward = None

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict, dict]:
        """As verl's; the one place that knows how the tokens were padded and sliced, so the routes are taken here."""
        model_inputs, output_args = super().prepare_model_inputs(micro_batch)
        if self._running_forward is not None:
            stack, count = self._running_forward
            stack.enter_context(
                self.route_replay.micro_batch(micro_batch, model_inputs, output_args, self.use_ulysses_sp, count)
            )
        return model_inputs, output_args

    @torch.no_grad()
    def _log_probs_ahead(self, data: TensorDict) -> dict[str, Any]:
        # As verl's own log-prob passes. In training mode its activation offload would wait for a backward pass.
        training = self.module.training
        self.module.eval()
        try:
            return super().forward_backward_batch(data, None, forward_only=True)
        finally:
            self.module.train(training)

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


def register(device: str, vendor: str | None = None) -> None:
    """Register the engine for ``fsdp`` and ``fsdp2``. Idempotent.

    Args:
        device: ``cpu``, or ``cuda`` with a vendor (verl has an entry of its own for every vendor).
        vendor: ``nvidia``; None registers for the device.
    """
    key = (device, vendor) if vendor else device
    engines = EngineRegistry._engines.get("language_model", {})
    free = []
    for backend in ("fsdp", "fsdp2"):
        taken = engines.get(backend, {}).get(key)
        if taken is None:
            free.append(backend)
        elif taken is not SATFSDPEngine:
            logger.warning(
                "verl-sat: the engine of %s on %s is %s.%s already; scope mini_batch and actor/staleness/* are not to "
                "be had in such a job",
                backend,
                key,
                taken.__module__,
                taken.__qualname__,
            )
    if free:
        EngineRegistry.register(model_type="language_model", backend=free, device=device, vendor=vendor)(SATFSDPEngine)


# Here, not in the hook that imports this module: if somebody imports it first, the hook runs in the middle of that.
register("cpu") if cpu_profile() else register("cuda", "nvidia")
