"""What a composed configuration says about a SAT job, read leniently, and how a finding about it looks."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

LOSSES = ("sat_grpo", "sat_gspo")

POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
LOSS_MODE = f"{POLICY_LOSS}.loss_mode"
SAT_BLOCK = f"{POLICY_LOSS}.sat"
SAT_TARGET = "verl_sat.config.SATPolicyLossConfig"
CORRECTION = "algorithm.rollout_correction"
BYPASS = f"{CORRECTION}.bypass_mode"
CALCULATE_LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs"
SAMPLER = "trainer.v1.sampler"
SEPARATE_ASYNC = "trainer.use_v1=True trainer.v1.trainer_mode=separate_async"

# The keys of SPEC's options that are nobody else's when found directly under `policy_loss`.
OPTION_NAMES = (
    "quantile",
    "kernel",
    "exponent",
    "scope",
    "q",
    "q_min",
    "advantage_clip_low",
    "advantage_clip_high",
    "advantage_clip_scope",
)


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a configuration.

    Attributes:
        level: ``error`` stops the job, ``warning`` is logged once.
        key: full configuration key that it is about.
        message: what is wrong, and what would happen.
        remedy: ``key=value`` overrides that mend it, separated by blanks; empty if there is no single one.
    """

    level: Literal["error", "warning"]
    key: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level}: {self.key}: {self.message}" + (f"; set {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Job:
    """The facts that the rules ask for, read leniently: a key that is missing or cannot be resolved is None."""

    config: DictConfig
    loss_mode: str
    trainer: Literal["v1", "legacy", "fully_async", "one_step_off"]
    mode: str

    @staticmethod
    def read(config: Any) -> Job:
        config = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
        loss_mode = select(config, LOSS_MODE)
        if select(config, "async_training") is not None:
            trainer = "fully_async"
        elif select(config, "rollout.nnodes") is not None:
            trainer = "one_step_off"
        else:
            trainer = "v1" if select(config, "trainer.use_v1", True) else "legacy"  # verl tests its truth
        return Job(
            config=config,
            loss_mode=loss_mode if isinstance(loss_mode, str) else "",
            trainer=trainer,
            mode=str(select(config, "trainer.v1.trainer_mode", "sync")),
        )

    def get(self, key: str, default: Any = None) -> Any:
        return select(self.config, key, default)

    @property
    def sat(self) -> bool:
        """The job asks for a loss of ours, perhaps misspelt."""
        folded = self.loss_mode.lower().replace("-", "_")
        return folded.startswith("sat_") or folded in ("sat", "grpo_sat", "gspo_sat")

    @property
    def concerns_us(self) -> bool:
        return bool(
            self.sat
            or looks_like_ours(self.loss_mode)
            or any(self.has(key) for key in ("sat", "r3", SAT_BLOCK))
            or self.misplaced
            or str(self.get(f"{POLICY_LOSS}._target_", "")).startswith("verl_sat.")
            or self.our_sampler
        )

    @property
    def misplaced(self) -> dict[str, Any]:
        """Key -> value of every block of our options, and every loss name of ours, that verl does not read."""
        return dict(_find_misplaced(OmegaConf.to_container(self.config, resolve=False), ""))

    def has(self, key: str) -> bool:
        """Whether the key is there, whatever its value (a group that sets nothing is still a group)."""
        parent, _, name = key.rpartition(".")
        node = self.config if not parent else self.get(parent)
        return isinstance(node, DictConfig) and name in node.keys()

    @property
    def bypass(self) -> bool:
        return bool(self.get(BYPASS, False))

    @property
    def kernel(self) -> Any:
        return self.get(f"{SAT_BLOCK}.kernel", "hill")

    @property
    def contracts(self) -> bool:
        """False for an advantage clip on a plain loss (``kernel=none`` or ``quantile=1``): nothing is gated."""
        return self.kernel != "none" and self.get(f"{SAT_BLOCK}.quantile", 0.9) != 1

    @property
    def is_async(self) -> bool:
        if self.trainer == "v1":
            return "async" in self.mode
        return self.trainer in ("fully_async", "one_step_off")

    @property
    def sync_step(self) -> int:
        """K: optimizer updates (mini-batches) per weight transfer."""
        if self.trainer == "fully_async":
            return int(self.get("async_training.trigger_parameter_sync_step", 1))
        if self.trainer == "v1":
            return int(self.get(f"trainer.v1.{self.mode}.parameter_sync_step", 1))
        return 1

    @property
    def warmup_batches(self) -> float:
        """W: batches in flight before training starts."""
        return float(self.get(f"trainer.v1.{self.mode}.num_warmup_batches", 0) or 0)

    @property
    def updates_per_version(self) -> int:
        """Optimizer updates of a V1 trainer for one weight transfer: mini-batches of a step times epochs."""
        mini, batch = self.get("actor_rollout_ref.actor.ppo_mini_batch_size"), self.get("data.train_batch_size")
        mini_batches = max(1, int(batch) // int(mini)) if mini and batch else self.sync_step
        return mini_batches * int(self.get("actor_rollout_ref.actor.ppo_epochs", 1))

    @property
    def updates_per_old_log_prob(self) -> int | None:
        """Decoupled mode: optimizer updates that share one policy as pi_old. With 1, the ratio is always 1."""
        mini = self.get("actor_rollout_ref.actor.ppo_mini_batch_size")
        epochs = int(self.get("actor_rollout_ref.actor.ppo_epochs", 1))
        if self.trainer == "fully_async":
            return int(self.get("async_training.require_batches", 1)) * epochs * self.sync_step
        batch = self.get("data.train_batch_size")
        if not mini or not batch:
            return None
        updates = max(1, int(batch) // self.sync_step // int(mini)) * epochs
        # Only separate_async keeps the weights of the cycle's first sub-step for the later ones
        # (trainer_separate_async.py, _compute_old_log_prob); the others take the current weights each time.
        return updates * self.sync_step if self.mode == "separate_async" and self.trainer == "v1" else updates

    @property
    def our_sampler(self) -> bool:
        path = str(self.get(f"{SAMPLER}.custom_sampler.path") or "")
        return "verl_sat" in path or self.get(f"{SAMPLER}.custom_sampler.name") == "ExactLagReplayBuffer"


def _find_misplaced(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, value in node.items() if isinstance(node, Mapping) else ():
        key = f"{path}.{name}" if path else str(name)
        block = name == "sat" and isinstance(value, Mapping) and path
        if block and key != SAT_BLOCK and (path.startswith("actor_rollout_ref") or set(value) & set(OPTION_NAMES)):
            yield key, value
        elif name == "loss_mode" and key != LOSS_MODE and str(value).startswith("sat_"):
            yield key, value
        elif key != SAT_BLOCK:
            yield from _find_misplaced(value, key)


def select(config: DictConfig, key: str, default: Any = None) -> Any:
    try:
        value = OmegaConf.select(config, key, default=default)
    except Exception:  # missing mandatory values and interpolations that point nowhere are "not set" here
        return default
    return default if value is None else value


def as_override(value: Any) -> str:
    return "null" if value is None else str(value)


def looks_like_ours(loss_mode: str) -> bool:
    folded = loss_mode.lower().replace("-", "_")
    return folded not in LOSSES and bool(difflib.get_close_matches(folded, LOSSES, cutoff=0.8))
