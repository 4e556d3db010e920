"""The lag that a step's samples really had, on every engine: from their tags, in the driver.

Our FSDP engine reports the lag of the mini-batches that it trains (:mod:`verl_sat.staleness`); on Megatron and the
others nobody does. verl's trainer has what it takes: the tags of every sample of a step, where
`verl/trainer/ppo/v1/agent_loop_tq.py` writes the oldest and the newest version that sampled a token of it, and its
length.

What cannot be had: the tags say between which versions a response was generated, not how many of its tokens each of
them sampled. Ten tokens of version 3 and two of version 7, trained at version 9, are 6 versions old by the oldest and
2 by the newest; that their tokens are 5.33 old on average is nowhere on record. So each is reported, by oldest and by
newest version: the truth is between the two, and they are the same where ``mixed_versions_frac`` is 0. Token weights
count a response's tokens, those that a tool wrote included.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from verl_sat.lag import THRESHOLD, LagAccount, account, count
from verl_sat.once import warn_once
from verl_sat.preflight_job import SAMPLER, Job
from verl_sat.staleness import PREFIX

logger = logging.getLogger(__name__)

BUCKETS = (*(str(age) for age in range(9)), "9_to_16", "17_on")
WINDOW = 20
"""Steps over which the achieved lag is compared with the configured one."""

ERRORS_KEY = f"{PREFIX}/report_errors"


@dataclass(frozen=True)
class Cycle:
    """What happens between two weight transfers.

    Attributes:
        sub_steps: K, batches that are sampled and trained one after another (``parameter_sync_step``).
        updates: optimizer updates of each: mini-batches times epochs.
        groups: prompts of each.
        critic_warmup: first trainer step that updates the actor (``trainer.critic_warmup``).
    """

    sub_steps: int = 1
    updates: int = 1
    groups: int = 1
    critic_warmup: int = 0

    def sub_step_of_rows(self, keys: Sequence[str], tags: Sequence[Mapping[str, Any]]) -> np.ndarray | None:
        """In which sub-step each row of a step's batch was trained; None where that cannot be told.

        verl joins the sub-steps' batches in order (`trainer_base.py`, ``step``), but reorders each and pads it, and a
        group may have any number of rows. What is fixed is the number of groups of each, and none is in two.

        Args:
            keys: ``uid_session_index`` of each row.
            tags: its tag.
        Returns:
            int array (rows,); -1 for padding.
        """
        groups: dict[str, int] = {}
        found = np.full(len(keys), -1)
        for row, (key, tag) in enumerate(zip(keys, tags, strict=True)):
            if not tag.get("is_padding", False):
                found[row] = groups.setdefault(key.rsplit("_", 2)[0], len(groups)) // self.groups
        if self.sub_steps == 1:
            return np.minimum(found, 0)
        return found if len(groups) == self.sub_steps * self.groups else None

    def updates_since(self, versions: np.ndarray, sub_steps: np.ndarray, trainer_version: int) -> np.ndarray:
        """Optimizer updates between ``versions`` and the start of ``sub_steps`` of the cycle after ``trainer_version``.

        A version lag of W is W * K * updates, and k * updates more at sub-step k.
        """
        first = max(self.critic_warmup - 1, 0)  # versions up to this one have the weights of version 0
        cycles = max(trainer_version, first) - np.maximum(versions, first)
        sub_steps = sub_steps if trainer_version >= first else np.zeros_like(sub_steps)
        return (cycles * self.sub_steps + sub_steps) * self.updates


def step_metrics(
    keys: Sequence[str], tags: Sequence[Mapping[str, Any]], trainer_version: int, cycle: Cycle
) -> dict[str, float]:
    """Metrics of the samples of one trainer step.

    Args:
        keys: ``uid_session_index`` of each row, in the order of the step's batch.
        tags: its tag: ``min_global_steps``, ``max_global_steps``, ``response_len``, ``is_padding``.
        trainer_version: the version that the trainer had last sent when the step began.
        cycle: K, and what a sub-step is.

    Returns:
        Under ``actor/staleness/``: ``unknown_frac`` and ``negative_frac`` of all samples; of those that are neither,
        if there is one: ``versions``, ``versions_oldest``, ``versions_newest``, ``mixed_versions_frac``, ``updates``
        and histograms, each with token weights too.
    """
    real = [row for row, tag in enumerate(tags) if not tag.get("is_padding", False)]
    known = [row for row in real if None not in (_oldest(tags[row]), _newest(tags[row]))]
    oldest = np.array([_oldest(tags[row]) for row in known], dtype=int)
    newest = np.array([_newest(tags[row]) for row in known], dtype=int)
    past = newest <= trainer_version
    metrics = {
        f"{PREFIX}/unknown_frac": 1 - len(known) / max(len(real), 1) if real else 0.0,
        f"{PREFIX}/negative_frac": float((~past).sum()) / max(len(real), 1),
    }
    if not past.all():
        warn_once(
            logger,
            "negative",
            "%d of %d samples are of a version that is newer than the trainer's (%d against %d): the trainer's count "
            "of its steps is not that of its weight transfers, and the lag of these samples is left out "
            "(%s/negative_frac)",
            *((~past).sum(), len(real), newest.max(), trainer_version, PREFIX),
        )
    rows, oldest, newest = np.array(known, dtype=int)[past], oldest[past], newest[past]
    if not rows.size:
        return metrics
    lags = trainer_version - oldest
    tokens = _tokens([tags[row] for row in rows])
    metrics[f"{PREFIX}/versions"] = float(lags.mean())
    metrics[f"{PREFIX}/versions_oldest"] = float(lags.max())
    metrics[f"{PREFIX}/versions_newest"] = float((trainer_version - newest).mean())
    metrics[f"{PREFIX}/mixed_versions_frac"] = float((oldest != newest).mean())
    metrics |= _shares("versions", "v", lags, tokens)
    if tokens is not None:
        metrics[f"{PREFIX}/versions_newest_token_mean"] = float(np.average(trainer_version - newest, weights=tokens))
    sub_steps = cycle.sub_step_of_rows(keys, tags)
    if sub_steps is None:
        warn_once(
            logger,
            "sub-steps",
            "a step's %d rows are not of %d x %d groups (a group without a response?): which of its updates trained "
            "which is unknown, and the lag in updates is left out of such steps",
            *(len(real), cycle.sub_steps, cycle.groups),
        )
        return metrics
    ages = cycle.updates_since(oldest, sub_steps[rows], trainer_version)
    # Several mini-batches and epochs of a sub-step each find a sample one update older: on average half of them.
    metrics[f"{PREFIX}/updates"] = float(ages.mean()) + (cycle.updates - 1) / 2
    return metrics | _shares("updates", "u", ages, tokens)


def _oldest(tag: Mapping[str, Any]) -> int | None:
    return tag.get("min_global_steps")


def _newest(tag: Mapping[str, Any]) -> int | None:
    return tag.get("max_global_steps")


def _tokens(tags: Sequence[Mapping[str, Any]]) -> np.ndarray | None:
    lengths = [tag.get("response_len") for tag in tags]
    if None in lengths or not sum(lengths):
        warn_once(logger, "lengths", "samples carry no length (response_len): their lag is not weighted by tokens")
        return None
    return np.array(lengths, dtype=float)


def _shares(unit: str, letter: str, ages: np.ndarray, tokens: np.ndarray | None) -> dict[str, float]:
    """Histograms of ``ages`` by samples and by tokens, as shares, and their mean by tokens."""
    bucket = np.digitize(ages, [1, 2, 3, 4, 5, 6, 7, 8, 9, 17])
    found = {}
    for name, weights in (("hist", np.ones(len(ages))), ("token_hist", tokens)):
        if weights is not None:
            shares = np.bincount(bucket, weights=weights, minlength=len(BUCKETS)) / weights.sum()
            found |= {f"{PREFIX}/{unit}_{name}/{letter}{b}": float(x) for b, x in zip(BUCKETS, shares, strict=True)}
    if tokens is not None:
        found[f"{PREFIX}/{unit}_token_mean"] = float(np.average(ages, weights=tokens))
    return found


# --- configured against achieved ---------------------------------------------------------------------------------


@dataclass
class Watch:
    """Says once where the achieved lag stays far from the configured one.

    Attributes:
        job: the configuration.
        configured: its account.
    """

    job: Job
    configured: LagAccount
    _steps: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in the metrics of a step."""
        if not self.job.is_async or step <= self.configured.ramp_steps or f"{PREFIX}/versions" not in metrics:
            return
        self._steps.append(metrics)
        if len(self._steps) < WINDOW:
            return
        wanted, achieved = float(self.configured.versions), self._mean("versions")
        if abs(achieved - wanted) > max(0.5, 0.25 * wanted):
            warn_once(logger, "far", "%s", self._message(wanted, achieved))

    def _mean(self, name: str) -> float:
        return sum(metrics[f"{PREFIX}/{name}"] for metrics in self._steps) / len(self._steps)

    def _message(self, wanted: float, achieved: float) -> str:
        block = f"trainer.v1.{self.configured.mode}"
        shares = [(f"v{bucket}", self._mean(f"versions_hist/v{bucket}")) for bucket in BUCKETS]
        shown = ", ".join(f"{name} {share:.0%}" for name, share in shares if share)
        threshold = f"{THRESHOLD}={self.job.get(THRESHOLD, 'null')}"
        if self.job.get(THRESHOLD) is not None:
            threshold += f", {self.job.get(f'{SAMPLER}.max_off_policy_strategy', 'drop')}"
        if self.configured.exact:
            cause = "the exact-lag sampler was to prevent that; see its warnings and actor/staleness/inexact_frac"
        elif achieved < wanted:
            cause = (
                "probably generation is slower than training (the trainer takes what is finished, and the batches in "
                "flight are used up: more rollout GPUs, or shorter responses), or groups are evicted and generated "
                f"anew by newer weights ({threshold}), or fewer batches were put in flight than that. The exact-lag "
                f"sampler pins it ({SAMPLER}.custom_sampler.path=pkg://verl_sat.sampler, name=ExactLagReplayBuffer)"
            )
        else:
            cause = (
                "probably responses take longer than a step and end under newer weights (their oldest version counts: "
                "more rollout GPUs, or shorter responses), or more batches are in flight than that (a resume); what "
                f"bounds it is {threshold}"
            )
        return (
            f"the lag stays away from the configured one: over the last {WINDOW} steps samples were {achieved:.2f} "
            f"versions old on average ({shown}), configured are {count(wanted, 'version')} "
            f"({block}.num_warmup_batches={self.configured.batches_in_flight:g}, "
            f"{block}.parameter_sync_step={self.job.get(f'{block}.parameter_sync_step', 1)}); {cause}"
        )


# --- in verl's trainer -------------------------------------------------------------------------------------------


@dataclass
class _Report:
    """What is remembered of one trainer."""

    watch: Watch | None = None  # None: the job does not concern us
    cycle: Cycle = field(default_factory=Cycle)
    sent: int | None = None  # the version that was last sent
    errors: int = 0

    @classmethod
    def of(cls, trainer: Any) -> _Report:
        job = Job.read(trainer.config)
        if not job.concerns_us:
            return cls()
        configured, sub_steps = account(job), int(trainer.parameter_sync_step)
        cycle = Cycle(
            sub_steps=sub_steps,
            updates=max(1, configured.updates_per_version // sub_steps),
            groups=max(1, int(job.get("data.train_batch_size", sub_steps)) // sub_steps),
            critic_warmup=int(job.get("trainer.critic_warmup", 0)),
        )
        return cls(Watch(job, configured), cycle)


_reports: WeakKeyDictionary[Any, _Report] = WeakKeyDictionary()


def after_metrics(trainer: Any, batch: Any, metrics: dict[str, Any], global_steps: int) -> None:
    """Add the achieved lag to the metrics of a step, in a job with a loss or the sampler of this plugin. Never raises.

    What the workers measured stays as it is (our FSDP engine's ``versions``, ``versions_oldest``, ``updates`` and
    ``unknown_frac``). A failure is warned of once and counted in ``actor/staleness/report_errors``.

    Args:
        trainer: verl's V1 trainer, after the weight transfer of the step.
        batch: KVBatchMeta of all samples of the step, its sub-steps' batches one after another.
        metrics: verl's, changed in place.
        global_steps: the step.
    """
    report = _reports.get(trainer)
    try:
        if report is None:
            # An empty one first: a configuration that cannot be read is not read again at each step.
            report = _reports[trainer] = _Report()
            report = _reports[trainer] = _Report.of(trainer)
        if report.watch is not None:
            _add(report, batch, metrics, global_steps)
    except Exception as error:  # a measurement must not end a training run
        report = _reports[trainer] = report or _Report()
        report.errors += 1
        warn_once(
            logger,
            "failed",
            "the achieved lag could not be reported at step %s (%s: %s); training goes on without it (%s)",
            *(global_steps, type(error).__name__, error, ERRORS_KEY),
        )
    if report.errors or report.watch is not None:
        metrics[ERRORS_KEY] = float(report.errors)


def _add(report: _Report, batch: Any, metrics: dict[str, Any], global_steps: int) -> None:
    # What was sent, not the step's number: a resume may count a step twice. Only before the first step of a process
    # is the number all there is (verl sends the restored step's number, and counts on from it).
    version = global_steps - 1 if report.sent is None else report.sent
    report.sent = global_steps
    found = step_metrics(batch.keys, batch.tags, version, report.cycle)
    for key, value in found.items():
        metrics.setdefault(key, value)
    report.watch.look(global_steps, found)
