"""How stale a job's samples will be, from its configuration alone, and the configuration for a wanted lag.

Two units (see :mod:`verl_sat.staleness`): *versions* are weight transfers to the rollout engine, *updates* optimizer
steps. With K weight-changing updates between two transfers and W batches in flight, a sample is W versions and
``W * K + k`` updates old at update k of a cycle. A lag of L updates can therefore be made in two ways:

* *constant*: K = 1, W = L. Every sample is L versions, L updates old.
* *broadcast*, as arXiv 2607.18722 draws it (Figure 1): K = L, W = 1. Weights are sent every L updates and the next L
  batches are generated meanwhile: every sample is 1 version, L to 2L - 1 updates old.

What is typical is not what is largest: verl's own samplers bound it only by ``max_off_policy_threshold``
(`verl/trainer/ppo/v1/replay_buffer.py`), or not at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from verl_sat.preflight_job import SAMPLER, Job

THRESHOLD = f"{SAMPLER}.max_off_policy_threshold"
MODES = ("separate_async", "colocate_async", "sync", "one_step_off", "fully_async")


class LagError(ValueError):
    """A setting of the lag that verl would refuse. The text begins with the key."""


@dataclass(frozen=True)
class LagAccount:
    """The lag of a configuration.

    Attributes:
        mode: ``separate_async``, ``colocate_async``, ``sync``, ``one_step_off`` or ``fully_async``.
        updates_per_version: K, optimizer updates between two weight transfers: mini-batches times epochs.
        mini_batches: mini-batches between two weight transfers.
        epochs: passes over each.
        batches_in_flight: W as configured.
        versions: typical version lag of a sample, once the ramp is over.
        updates: smallest and largest typical lag in updates. For a whole number of batches in flight these are the
            lags at the first and at the last update of a cycle.
        versions_bound: largest version lag that can still be trained on; None if nothing bounds it.
        ramp_steps: trainer steps before the lag is reached (the first ones have only version 0 to train on).
        exact: this plugin's exact-lag sampler is configured: typical is then also the smallest and the largest.
        notes: what else there is to know, in sentences.
    """

    mode: str
    updates_per_version: int
    mini_batches: int
    epochs: int
    batches_in_flight: float
    versions: float
    updates: tuple[int, int]
    versions_bound: int | None
    ramp_steps: int
    exact: bool
    notes: tuple[str, ...] = field(default=())

    @property
    def updates_bound(self) -> int | None:
        """Largest lag in updates that is still trained on; None if nothing bounds it."""
        if self.versions_bound is None:
            return None
        return (self.versions_bound + 1) * self.updates_per_version - 1

    @property
    def kind(self) -> str:
        """``on_policy``, ``constant`` (all samples equally many updates old) or ``broadcast`` (they are not)."""
        first, last = self.updates
        if last == 0:
            return "on_policy"
        return "constant" if first == last else "broadcast"

    @property
    def name(self) -> str:
        """What a recipe of this lag is called: ``lag8`` is the paper's (broadcast), ``lag8_constant`` is not."""
        nominal = self.updates[0]
        return f"lag{nominal}_constant" if self.kind == "constant" and nominal > 1 else f"lag{nominal}"

    @property
    def summary(self) -> str:
        """One line."""
        first, last = self.updates
        updates = count(first, "update") if first == last else f"{first} to {last} updates"
        text = (
            f"{self.mode}: {'exactly' if self.exact else 'typically'} {count(self.versions, 'version')}, {updates} old"
        )
        if not self.exact and self.mode != "sync":
            bound = self.versions_bound
            text += "; nothing bounds it" if bound is None else (
                f"; at most {count(bound, 'version')}, {self.updates_bound} updates")  # fmt: skip
        if self.ramp_steps:
            text += f"; reached after {count(self.ramp_steps, 'step')}"
        return text


def account(config: Any) -> LagAccount:
    """Account for the lag of a composed configuration.

    Args:
        config: of any of verl's trainers (DictConfig, mapping or `Job`).
    Raises:
        LagError: for a setting that verl would refuse; names the key.
    """
    job = config if isinstance(config, Job) else Job.read(config)
    mode = job.mode if job.trainer == "v1" else job.trainer
    if job.trainer == "v1" and mode in ("separate_async", "colocate_async"):
        return _asynchronous(job, mode)
    if mode == "one_step_off":
        return _one_step_off(job)
    if mode == "fully_async":
        return _fully_async(job)
    if job.trainer == "v1" and mode != "sync":
        raise LagError(f"trainer.v1.trainer_mode: {mode!r}: expected sync, colocate_async or separate_async")
    return _synchronous(job)


def _epochs(job: Job) -> int:
    return _whole(job, "actor_rollout_ref.actor.ppo_epochs", 1, at_least=1)


def _asynchronous(job: Job, mode: str) -> LagAccount:
    separate = mode == "separate_async"
    block = f"trainer.v1.{mode}"
    in_flight = job.get(f"{block}.num_warmup_batches", 0)
    if isinstance(in_flight, bool) or not isinstance(in_flight, int | float) or not 0 <= in_flight < math.inf:
        raise LagError(f"{block}.num_warmup_batches: {in_flight!r}: expected a number of batches, 0 or more")
    if separate:
        mini_batches = _whole(job, f"{block}.parameter_sync_step", 1, at_least=1)
    else:
        mini_batches = _mini_batches_of_a_step(job)
    epochs = _epochs(job)
    per_version = mini_batches * epochs
    exact = job.our_sampler
    if exact and in_flight != int(in_flight):
        raise LagError(f"{block}.num_warmup_batches: {in_flight!r}: an exact lag is a whole number of batches")
    notes = []
    threshold, strategy = job.get(THRESHOLD), job.get(f"{SAMPLER}.max_off_policy_strategy", "drop")
    if strategy not in ("drop", "wait"):
        raise LagError(f"{SAMPLER}.max_off_policy_strategy: {strategy!r}: expected drop or wait")
    if threshold is not None:
        threshold = _whole(job, THRESHOLD, 8, at_least=1)
    versions: float = in_flight
    bound = None
    if in_flight == 0:
        # A step submits one batch and trains one batch; what is evicted or fails is replaced one for one.
        bound = 0
        notes.append("no batch in flight: a step waits for its own groups, generation and training do not overlap")
    elif threshold is not None and strategy == "drop":
        # A group submitted at step s is dropped at step t once t - s + 1 > threshold.
        bound = threshold - 1
        if in_flight > bound and not exact:
            versions = bound
            notes.append(
                f"{THRESHOLD}={threshold} drops groups that are {threshold} versions old and generates others in their "
                f"place: the lag is pinned at {bound} instead of {in_flight:g}, and that work is thrown away (null, or "
                f"{math.ceil(in_flight) + 1} and more, keeps it)"
            )
        elif not exact:
            notes.append(
                f"a group that is not finished {count(bound, 'step')} after its submission is thrown away: hard "
                "prompts, whose responses are long, are trained on less often "
                f"({SAMPLER}.max_off_policy_strategy=wait keeps them)"
            )
    elif threshold is not None:
        blocks_at, batches = threshold - 1, math.ceil(in_flight)
        # At a step's sampling every group of age blocks_at or more is finished, and at most `batches` batches of them
        # are left (the step's own batch is of age 0): oldest first, one batch a step.
        bound = blocks_at + batches - 1 if blocks_at else batches
        waits = (
            f"{SAMPLER}.max_off_policy_strategy=wait drops nothing and does not cap the lag: while a group that is "
            f"{count(blocks_at, 'version')} old is in flight, a step waits for it"
        )
        if bound > max(blocks_at, batches):
            waits += f"; where several batches of such groups finish together, the last is {bound} when it is trained"
        notes.append(waits)
    elif not exact:
        notes.append(f"{THRESHOLD}=null: how old a straggler may be is bounded by nothing")
    if exact:
        bound = int(in_flight)
        notes.append("exact-lag sampler: no weight transfer meets a running request, so a response has one version")
    elif in_flight:
        notes.append(
            "verl's own sampler takes what is finished: where generation is slower than training the lag is lower, and "
            "a weight transfer in the middle of a response mixes versions within it (the oldest counts)"
        )
    if in_flight != int(in_flight):
        notes.append(
            f"{in_flight:g} batches in flight: samples are {math.floor(in_flight)} or {math.ceil(in_flight)} versions "
            "old"
        )
    return LagAccount(
        mode=mode,
        updates_per_version=per_version,
        mini_batches=mini_batches,
        epochs=epochs,
        batches_in_flight=in_flight,
        versions=versions,
        updates=_typical_updates(versions, mini_batches, epochs)
        if separate
        else (_typical_updates(versions, 1, per_version)),
        versions_bound=bound,
        ramp_steps=math.ceil(versions),
        exact=exact,
        notes=tuple(notes),
    )


def _typical_updates(versions: float, draws: int, updates: int) -> tuple[int, int]:
    """Smallest and largest lag where a cycle draws its samples ``draws`` times, oldest first, ``updates`` each."""
    # Of a fractional lag, the older samples are those of the first draws.
    older = round(versions * draws, 9)  # 0.14 * 50 is not 7
    return math.floor(older) * updates, (math.ceil(older) + draws) * updates - 1


def _mini_batches_of_a_step(job: Job) -> int:
    batch, mini = job.get("data.train_batch_size"), job.get("actor_rollout_ref.actor.ppo_mini_batch_size")
    if not isinstance(batch, int) or not isinstance(mini, int) or mini < 1:
        return 1
    return max(1, batch // mini)


def _synchronous(job: Job) -> LagAccount:
    mini_batches, epochs = _mini_batches_of_a_step(job), _epochs(job)
    per_version = mini_batches * epochs
    notes = ()
    if per_version > 1:
        notes = (
            f"a batch is generated by the newest weights, but makes {per_version} updates ({mini_batches} mini-batches "
            f"x {epochs} epochs): the last of them sees samples that are {per_version - 1} updates old",
        )
    return LagAccount("sync", per_version, mini_batches, epochs, 0, 0, (0, per_version - 1), 0, 0, False, notes)


def _one_step_off(job: Job) -> LagAccount:
    mini_batches, epochs = _mini_batches_of_a_step(job), _epochs(job)
    per_version = mini_batches * epochs
    notes = ("a batch is generated while the one before is trained, and weights wait for it: always one version",)
    updates = (per_version, 2 * per_version - 1)
    return LagAccount("one_step_off", per_version, mini_batches, epochs, 1, 1, updates, 1, 1, False, notes)


def _fully_async(job: Job) -> LagAccount:
    block = "async_training"
    steps = _whole(job, f"{block}.trigger_parameter_sync_step", 4, at_least=1)
    batches = _whole(job, f"{block}.require_batches", 1, at_least=1)
    epochs = _epochs(job)
    fraction = job.get(f"{block}.staleness_threshold", 0.1)
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or fraction < 0:
        raise LagError(f"{block}.staleness_threshold: {fraction!r}: expected a share of a cycle's samples, 0 or more")
    mini_batches = steps * batches
    per_version = mini_batches * epochs
    share = f"{fraction:g} x {mini_batches} mini-batches"
    notes = [
        f"{block}.staleness_threshold={fraction:g} is no number of versions: when weights are sent, at most that share "
        f"of a cycle's samples ({share}) may be queued or in flight, so at most so many are one version older"
    ]
    partial = job.get(f"{block}.partial_rollout", True)
    if fraction > 1:
        notes.append(f"what is left over lasts {count(math.ceil(fraction), 'cycle')}")
    if fraction == 0:
        # fully_async_rollouter.py: as many samples are begun as a cycle trains, then it pauses until the transfer.
        notes.append("0: nothing is in flight when weights are sent, generation waits for each transfer")
    elif partial:
        notes.append(
            f"{block}.partial_rollout: a response goes on under newer weights, so nothing bounds the age of its oldest "
            "tokens"
        )
    notes.append("verl announces this trainer as deprecated; separate_async takes its place")
    bound = math.ceil(fraction) if fraction == 0 or not partial else None
    return LagAccount(
        mode="fully_async",
        updates_per_version=per_version,
        mini_batches=mini_batches,
        epochs=epochs,
        batches_in_flight=fraction,
        versions=fraction,
        updates=_typical_updates(fraction, steps, batches * epochs),
        versions_bound=bound,
        ramp_steps=math.ceil(fraction),
        exact=False,
        notes=tuple(notes),
    )


def _whole(job: Job, key: str, default: int, at_least: int) -> int:
    value = job.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise LagError(f"{key}: {value!r}: expected a whole number, {at_least} or more")
    return value


def count(number: float, noun: str) -> str:
    """A number and what it counts, in words: ``1 version``, ``8 batches``."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:g} {noun if number == 1 else plural}"


# --- the inverse --------------------------------------------------------------------------------------------------


def plan(kind: str, lag: int) -> tuple[int, int]:
    """K and W for a lag of ``lag`` updates (lag 0 is K = 1, W = 0: generate, then train).

    Raises:
        ValueError: for a kind that is neither ``constant`` nor ``broadcast``, or a negative lag.
    """
    if isinstance(lag, bool) or not isinstance(lag, int) or lag < 0:
        raise ValueError(f"lag={lag}: expected a whole number, 0 or more")
    if kind == "constant":
        return 1, lag
    if kind == "broadcast":
        return max(lag, 1), min(lag, 1)
    raise ValueError(f"lag kind {kind!r}: expected constant or broadcast")


def overrides_for(
    lag: int,
    unit: str = "updates",
    kind: str = "broadcast",
    mini_batch_size: int | None = None,
    exact: bool = True,
    updates_per_version: int = 1,
) -> list[str]:
    """Overrides of ``verl.trainer.main_ppo`` for a wanted lag in ``separate_async``.

    Args:
        lag: the lag.
        unit: ``updates``, or ``versions`` (W; K is then ``updates_per_version``).
        kind: ``broadcast`` or ``constant``, of a lag in updates; with an ``exact`` lag of 1 or 0 they are the same.
        mini_batch_size: prompts of a mini-batch, to give ``data.train_batch_size`` as well.
        exact: with this plugin's sampler; otherwise verl's, with a threshold that lets such samples live.
        updates_per_version: K for a lag in versions.
    Raises:
        ValueError: for anything that is not a lag.
    """
    if unit == "versions":
        cycle, in_flight = updates_per_version, plan("constant", lag)[1]
        if isinstance(cycle, bool) or not isinstance(cycle, int) or cycle < 1:
            raise ValueError(f"updates_per_version={cycle}: expected a whole number, 1 or more")
    elif unit == "updates":
        cycle, in_flight = plan(kind, lag)
    else:
        raise ValueError(f"unit {unit!r}: expected updates or versions")
    block = "trainer.v1.separate_async"
    found = [
        "trainer.use_v1=True",
        "trainer.v1.trainer_mode=separate_async",
        f"{block}.parameter_sync_step={cycle}",
        f"{block}.num_warmup_batches={in_flight}",
    ]
    if mini_batch_size is not None:
        if isinstance(mini_batch_size, bool) or not isinstance(mini_batch_size, int) or mini_batch_size < 1:
            raise ValueError(f"mini_batch_size={mini_batch_size}: expected a whole number, 1 or more")
        found.append(f"data.train_batch_size={cycle * mini_batch_size}")
    if exact:
        sampler = f"{SAMPLER}.custom_sampler"
        found += [f"{sampler}.path=pkg://verl_sat.sampler", f"{sampler}.name=ExactLagReplayBuffer", f"{THRESHOLD}=null"]
    else:
        found.append(f"{THRESHOLD}=null")
    return found
