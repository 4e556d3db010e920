"""The two kinds of lag of the quickstart, as overrides of verl's configuration.

With K = ``parameter_sync_step`` (optimizer updates for one weight transfer) and W =
``num_warmup_batches`` (batches in flight) a sample is W versions, W*K + k updates old at sub-step k:

* *constant* lag L: K=1, W=L. Every sample is L versions, L updates old.
* *broadcast* lag L (the paper's): K=L, W=1. Weights are sent every L updates and the next L batches are
  generated meanwhile: every sample is 1 version, L to 2L-1 updates old.

Lag 0 is K=1, W=0 in both: generate, then train, on-policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MINI_BATCH_PROMPTS = 16


@dataclass(frozen=True)
class LagPlan:
    """K and W, and what they mean for a sample once the start is over."""

    parameter_sync_step: int
    num_warmup_batches: int
    updates_per_batch: int = 1  # more with several epochs

    @classmethod
    def from_config(cls, config: Any) -> LagPlan:
        """K and W as they stand in verl's composed configuration, after all overrides."""
        mode = config.trainer.v1.separate_async
        return cls(mode.parameter_sync_step, mode.num_warmup_batches, config.actor_rollout_ref.actor.ppo_epochs)

    @property
    def versions(self) -> int:
        """Version lag of every sample."""
        return self.num_warmup_batches

    @property
    def updates(self) -> tuple[int, int]:
        """Smallest and largest lag in optimizer updates (the trainer's metric averages over a batch's epochs)."""
        per_version = self.parameter_sync_step * self.updates_per_batch
        start = self.num_warmup_batches * per_version
        return start, start + per_version - 1

    @property
    def ramp_steps(self) -> int:
        """Trainer steps before the lag is reached: the first ones have only version 0 to train on."""
        return self.num_warmup_batches


def plan(kind: str, lag: int) -> LagPlan:
    """K and W for a lag of ``lag`` updates.

    Raises:
        ValueError: for a kind that is neither ``constant`` nor ``broadcast``, or a negative lag.
    """
    if lag < 0:
        raise ValueError(f"lag={lag}: expected 0 or more")
    if kind == "constant":
        return LagPlan(parameter_sync_step=1, num_warmup_batches=lag)
    if kind == "broadcast":
        return LagPlan(parameter_sync_step=max(lag, 1), num_warmup_batches=min(lag, 1))
    raise ValueError(f"lag kind {kind!r}: expected constant or broadcast")


def overrides(kind: str, lag: int) -> list[str]:
    """Overrides of ``verl.trainer.main_ppo`` on top of the group ``profile=cpu``."""
    wanted = plan(kind, lag)
    return [
        f"trainer.v1.separate_async.parameter_sync_step={wanted.parameter_sync_step}",
        f"trainer.v1.separate_async.num_warmup_batches={wanted.num_warmup_batches}",
        f"data.train_batch_size={wanted.parameter_sync_step * MINI_BATCH_PROMPTS}",
    ]
