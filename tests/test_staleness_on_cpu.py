"""Lag accounting: versions and optimizer updates, from the samples' own tags."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_sat.staleness import VersionClock, count_lags, lag_metrics


def metrics_of(clock, versions, trained=None):
    counts = count_lags(clock, versions, trained or [True] * len(versions))
    return lag_metrics(counts.as_sums(), counts.oldest)


def run_clock(parameter_sync_step, cycles, extra_updates=0):
    """A trainer that sends version 0, then takes K steps and sends the next version, and so on."""
    clock = VersionClock()
    clock.note_sync(0)
    for version in range(1, cycles + 1):
        for _ in range(parameter_sync_step):
            clock.note_update()
        clock.note_sync(version)
    for _ in range(extra_updates):
        clock.note_update()
    return clock


def test_A01_oldest_version_drives_the_lag():
    # Trainer at version 9; one sample began under version 3. Its newest version (7) plays no part.
    metrics = metrics_of(run_clock(1, 9), [3, 9, 9, 9])
    assert metrics["actor/staleness/versions"] == pytest.approx(6 / 4)
    assert metrics["actor/staleness/versions_oldest"] == 6


def test_A03_versions_and_updates_are_two_units():
    # parameter_sync_step 4, lag 2 versions, third local update: 2 versions, 2*4+2 = 10 updates.
    metrics = metrics_of(run_clock(4, 5, extra_updates=2), [3, 3])
    assert metrics["actor/staleness/versions"] == 2
    assert metrics["actor/staleness/updates"] == 10


def test_A04_lag_comes_from_tags_not_from_the_configuration():
    metrics = metrics_of(run_clock(1, 1), [0, 0])
    assert metrics["actor/staleness/versions"] == 1


def test_A06_no_sample_at_all_gives_finite_metrics_and_no_lag():
    metrics = metrics_of(run_clock(1, 3), [1, 2], trained=[False, False])
    assert metrics == {"actor/staleness/unknown_frac": 0.0}


def test_A08_resume_at_version_100_reports_lag_0_and_1(caplog):
    clock = VersionClock()
    clock.note_sync(100)  # verl sends the restored weights before the first step
    assert metrics_of(clock, [100])["actor/staleness/versions"] == 0
    clock.note_update()
    clock.note_sync(101)
    metrics = metrics_of(clock, [100, 101])
    assert metrics["actor/staleness/versions"] == 0.5
    assert metrics["actor/staleness/updates_censored_frac"] == 0
    with caplog.at_level(logging.WARNING):
        restored = metrics_of(clock, [98])  # generated before the resume: 3 versions, at least 1 update
    assert restored["actor/staleness/versions"] == 3
    assert restored["actor/staleness/updates"] == 1
    assert restored["actor/staleness/updates_censored_frac"] == 1
    assert "lower bound" in caplog.text


def test_version_zero_is_known_and_none_is_missing(caplog):
    with caplog.at_level(logging.WARNING):
        metrics = metrics_of(run_clock(1, 2), [0, None])
    assert metrics["actor/staleness/versions"] == 2
    assert metrics["actor/staleness/unknown_frac"] == 0.5
    assert "no weight version" in caplog.text


def test_only_unknown_samples_report_no_lag_rather_than_zero():
    metrics = metrics_of(run_clock(1, 2), [None, None])
    assert metrics == {"actor/staleness/unknown_frac": 1.0}


def test_before_the_first_sync_everything_is_unknown():
    assert metrics_of(VersionClock(), [0, 1]) == {"actor/staleness/unknown_frac": 1.0}


def test_padding_rows_do_not_count():
    with_padding = metrics_of(run_clock(1, 4), [4, 0, 0], trained=[True, False, False])
    assert with_padding == metrics_of(run_clock(1, 4), [4])


def test_warnings_come_once(caplog):
    clock = run_clock(1, 2)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            metrics_of(clock, [None, 1])
    assert len(caplog.records) == 1


@given(
    updates_per_version=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    data=st.data(),
)
def test_counts_equal_the_literal_sums(updates_per_version, data):
    clock = VersionClock()
    clock.note_sync(0)
    sent_at = {0: 0}
    total = 0
    for version, updates in enumerate(updates_per_version, start=1):
        for _ in range(updates):
            clock.note_update()
        total += updates
        clock.note_sync(version)
        sent_at[version] = total
    last = len(updates_per_version)
    rows = data.draw(st.lists(st.tuples(st.none() | st.integers(0, last), st.booleans()), max_size=20))
    counts = count_lags(clock, [version for version, _ in rows], [trained for _, trained in rows])
    known = [version for version, trained in rows if trained and version is not None]
    assert counts.known == len(known)
    assert counts.unknown == sum(trained for _, trained in rows) - len(known)
    assert counts.versions == sum(last - version for version in known)
    assert counts.updates == sum(total - sent_at[version] for version in known)
    assert counts.oldest == max((last - version for version in known), default=0)


@given(st.lists(st.integers(0, 9), min_size=2, max_size=20), st.integers(1, 19))
def test_counts_add_over_ranks(versions, cut):
    clock = run_clock(2, 9, extra_updates=1)
    cut = min(cut, len(versions))
    parts = [count_lags(clock, part, [True] * len(part)) for part in (versions[:cut], versions[cut:])]
    sums = [a + b for a, b in zip(*(part.as_sums() for part in parts), strict=True)]
    assert lag_metrics(sums, max(part.oldest for part in parts)) == metrics_of(clock, versions)


def test_M03_no_key_is_reduced_by_its_name():
    metrics = metrics_of(run_clock(1, 2), [0, None])
    assert not [key for key in metrics for word in ("min", "max", "sum", "total") if word in key]
