"""Staleness accounting: how old the samples of a mini-batch are, in versions and in optimizer updates.

Two units, because several optimizer updates can run for one version (``parameter_sync_step`` K):

* a *version* is one weight transfer to the rollout engine. The trainer's version is the last one it
  sent; a sample's is ``min_global_steps``, the oldest weights that sampled a token of it
  (`verl/workers/rollout/llm_server.py`);
* an *update* is one optimizer step. A sample's update lag is the number of optimizer steps taken since
  its version was sent: W versions of K updates, and k more at sub-step k of the current version.

Version 0 is a version (the initial weights); ``None`` is a sample without a tag, counted in
``unknown_frac`` and left out of every lag.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from verl_sat.once import warn_once

logger = logging.getLogger(__name__)

PREFIX = "actor/staleness"


@dataclass
class VersionClock:
    """The trainer's side of the lag: its last version, and when (in updates) each version was sent.

    One for each engine. After a resume the history starts anew: the age in updates of a sample that an
    earlier process generated is then a lower bound (``updates_censored_frac`` says for how many).
    """

    version: int | None = None
    updates: int = 0
    _updates_at: dict[int, int] = field(default_factory=dict)

    def note_sync(self, version: int | None) -> None:
        """The weights as they are now are sent to the rollout engine under ``version``."""
        if version is None:
            return
        self.version = version
        self._updates_at[version] = self.updates

    def note_update(self) -> None:
        """One optimizer step was taken."""
        self.updates += 1

    def age(self, version: int) -> tuple[int, int, bool]:
        """Age of a sample of ``version``: versions, updates, and whether the updates are a lower bound."""
        assert self.version is not None, "no version was sent yet"
        sent_at = self._updates_at.get(version)
        return self.version - version, self.updates - (sent_at or 0), sent_at is None


@dataclass(frozen=True)
class LagCounts:
    """Sums over the samples of one rank's mini-batch; they add over ranks, ``oldest`` takes the largest."""

    known: int
    unknown: int
    versions: int
    updates: int
    censored: int
    oldest: int

    def as_sums(self) -> list[float]:
        """What adds over ranks, in the order that :func:`lag_metrics` takes it."""
        return [float(x) for x in (self.known, self.unknown, self.versions, self.updates, self.censored)]


def count_lags(clock: VersionClock, versions: Sequence[int | None], trained: Sequence[bool]) -> LagCounts:
    """Count the lags of a mini-batch.

    Args:
        clock: the trainer's clock.
        versions: ``min_global_steps`` of each sample, None where the tag is missing.
        trained: False for padding rows (they copy a real row's tags and carry no token).
    """
    real = [version for version, row in zip(versions, trained, strict=True) if row]
    if clock.version is None:
        return LagCounts(0, len(real), 0, 0, 0, 0)
    ages = [clock.age(version) for version in real if version is not None]
    return LagCounts(
        known=len(ages),
        unknown=len(real) - len(ages),
        versions=sum(age[0] for age in ages),
        updates=sum(age[1] for age in ages),
        censored=sum(age[2] for age in ages),
        oldest=max((age[0] for age in ages), default=0),
    )


def lag_metrics(sums: Sequence[float], oldest: float) -> dict[str, float]:
    """Metrics of a mini-batch from the counts of all ranks.

    Args:
        sums: :meth:`LagCounts.as_sums`, added over ranks.
        oldest: :attr:`LagCounts.oldest`, the largest over ranks.

    Returns:
        ``actor/staleness/versions`` (mean), ``versions_oldest``, ``updates`` (mean),
        ``updates_censored_frac`` and ``unknown_frac``. Without one known version the lags are left out
        (a made-up 0 would read as on-policy) and ``unknown_frac`` is 1; without any sample it is 0.
    """
    known, unknown, versions, updates, censored = sums
    metrics = {f"{PREFIX}/unknown_frac": unknown / max(known + unknown, 1.0)}
    if unknown:
        warn_once(
            logger,
            "unknown",
            f"{unknown:.0f} of {known + unknown:.0f} samples carry no weight version (min_global_steps): their lag is "
            f"not counted ({PREFIX}/unknown_frac). The rollout server must report extra_fields.global_steps.",
        )
    if censored:
        warn_once(
            logger,
            "censored",
            f"{censored:.0f} samples were generated before this process started (a resume): their lag in optimizer "
            f"updates is a lower bound ({PREFIX}/updates_censored_frac).",
        )
    if known:
        metrics[f"{PREFIX}/versions"] = versions / known
        metrics[f"{PREFIX}/versions_oldest"] = float(oldest)
        metrics[f"{PREFIX}/updates"] = updates / known
        metrics[f"{PREFIX}/updates_censored_frac"] = censored / known
    return metrics
