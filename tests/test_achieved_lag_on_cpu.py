"""The achieved lag of a step's samples, from their tags; verl's trainer is real where one is needed."""

import logging
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.utils import MetricsAggregator
from verl.utils.metric import reduce_metrics

from verl_sat import _compat, achieved_lag
from verl_sat.achieved_lag import BUCKETS, Cycle, after_metrics, step_metrics

KEY = "actor/staleness/"


def row(version, newest=None, tokens=10, **more):
    newest = version if newest is None else newest
    return {"min_global_steps": version, "max_global_steps": newest, "response_len": tokens, **more}


def measure(tags, trainer_version, cycle=None, keys=None):
    keys = keys or [f"g{i}_0_0" for i in range(len(tags))]
    found = step_metrics(keys, tags, trainer_version, cycle or Cycle(groups=len(tags)))
    assert all(key.startswith(KEY) and isinstance(value, float) for key, value in found.items())
    return {key.removeprefix(KEY): value for key, value in found.items()}


def histogram(found, name):
    return {key.rpartition("/")[2]: value for key, value in found.items() if key.startswith(f"{name}/") and value}


# --- one step ----------------------------------------------------------------------------------------------------


def test_A01_a_response_of_two_versions_is_reported_by_its_oldest_and_by_its_newest():
    """10 tokens at version 3 and 2 at version 7, trainer at 9: the tags do not say where the border is (5.33)."""
    found = measure([row(3, newest=7, tokens=12)], trainer_version=9)
    assert found["versions"] == found["versions_oldest"] == found["versions_token_mean"] == 6
    assert found["versions_newest"] == found["versions_newest_token_mean"] == 2
    assert found["mixed_versions_frac"] == 1
    # Where each turn is a row of its own (an agent loop that returns several outputs) the tokens' mean is exact.
    turns = measure([row(3, tokens=10), row(7, tokens=2)], trainer_version=9, keys=["g_0_0", "g_0_1"])
    assert turns["versions_token_mean"] == pytest.approx(5.333, abs=1e-3)
    assert turns["mixed_versions_frac"] == 0


def test_histograms_are_shares_of_samples_and_of_tokens():
    tags = [row(20, tokens=10), row(20, tokens=10), row(12, tokens=20), row(11, tokens=40), row(3, tokens=20)]
    found = measure(tags, trainer_version=20)
    assert histogram(found, "versions_hist") == {"v0": 0.4, "v8": 0.2, "v9_to_16": 0.2, "v17_on": 0.2}
    assert histogram(found, "versions_token_hist") == {"v0": 0.2, "v8": 0.2, "v9_to_16": 0.4, "v17_on": 0.2}
    assert found["versions"] == pytest.approx((8 + 9 + 17) / 5)
    assert found["versions_token_mean"] == pytest.approx((8 * 20 + 9 * 40 + 17 * 20) / 100)
    assert found["versions_oldest"] == 17


def test_every_bucket_is_there_in_every_step():
    found = measure([row(1)], trainer_version=1)
    for name, letter in (("versions_hist", "v"), ("versions_token_hist", "v"), ("updates_token_hist", "u")):
        assert [key for key in found if key.startswith(f"{name}/")] == [f"{name}/{letter}{b}" for b in BUCKETS]


def test_A03_versions_and_updates_are_two_units():
    """parameter_sync_step 4, two versions old: 8 updates at the first sub-step, 2*4+2 = 10 at the third."""
    tags = [row(3) for _ in range(8)]
    keys = [f"g{i}_{session}_0" for i in range(4) for session in range(2)]
    found = measure(tags, trainer_version=5, cycle=Cycle(sub_steps=4, groups=1), keys=keys)
    assert histogram(found, "versions_hist") == {"v2": 1}
    assert histogram(found, "updates_hist") == {"u8": 0.25, "u9_to_16": 0.75}
    assert found["updates"] == found["updates_token_mean"] == (8 + 9 + 10 + 11) / 4
    (third,) = Cycle(sub_steps=4).updates_since(np.array([3]), np.array([2]), trainer_version=5)
    assert third == 10


def test_epochs_and_mini_batches_of_a_sub_step_are_updates_too():
    # K=2, each of 2 mini-batches x 3 epochs = 6 updates; sub-step 1 of a sample that is one version old: 18.
    found = measure([row(4), row(4)], trainer_version=5, cycle=Cycle(sub_steps=2, updates=6, groups=1))
    assert histogram(found, "updates_hist") == {"u9_to_16": 0.5, "u17_on": 0.5}
    assert found["updates_token_mean"] == (12 + 18) / 2  # at the start of each
    assert found["updates"] == 15 + 2.5  # over its updates, as our engine averages


def test_updates_of_a_critic_warmup_did_not_happen():
    cycle = Cycle(sub_steps=2, critic_warmup=5)  # steps 1 to 4 train the critic only, so versions 0 to 4 are one
    versions, sub_steps = np.array([0, 4, 5]), np.array([1, 1, 1])
    assert cycle.updates_since(versions[:2], sub_steps[:2], trainer_version=3).tolist() == [0, 0]
    assert cycle.updates_since(versions, sub_steps, trainer_version=6).tolist() == [5, 5, 3]


def test_A04_lag_comes_from_tags_not_from_the_configuration():
    assert measure([row(0)], trainer_version=1)["versions"] == 1


def test_A06_no_sample_at_all_gives_finite_metrics_and_no_lag():
    assert measure([row(1, is_padding=True)] * 3, 7) == {"unknown_frac": 0, "negative_frac": 0}


def test_padding_does_not_count():
    real = [row(4), row(2)]
    padded = measure([real[0], row(0, tokens=1, is_padding=True), real[1]], 5, Cycle(groups=2))
    assert padded == measure(real, 5)


def test_a_sample_without_a_version_is_unknown_and_one_from_the_future_negative(caplog):
    with caplog.at_level(logging.WARNING):
        found = measure([row(0), row(None), row(3, newest=6), row(4)], trainer_version=5)
    assert (found["unknown_frac"], found["negative_frac"]) == (0.25, 0.25)
    assert found["versions"] == 3  # of 5 and 1
    assert "1 of 4 samples are of a version that is newer than the trainer's (6 against 5)" in caplog.text


def test_samples_without_a_length_are_not_weighted(caplog):
    tag = row(1)
    del tag["response_len"]
    with caplog.at_level(logging.WARNING):
        found = measure([tag, row(2)], trainer_version=2)
    assert found["versions"] == 0.5 and not [key for key in found if "token" in key]
    assert "response_len" in caplog.text


def test_sub_steps_are_told_by_their_groups_whatever_the_order_and_number_of_rows():
    """Each sub-step has two groups of any number of rows, in any order, and padding at its end or within."""
    pad = {"is_padding": True}
    rows = [("a_0_0", 0), ("b_0_0", 0), ("a_0_1", 0), ("pad1_0_0", -1), ("d_1_0", 1), ("c_0_0", 1), ("d_0_0", 1)]
    keys, expected = zip(*rows, strict=True)
    tags = [pad if step < 0 else {} for step in expected]
    assert Cycle(sub_steps=2, groups=2).sub_step_of_rows(keys, tags).tolist() == list(expected)
    assert Cycle(sub_steps=1, groups=1).sub_step_of_rows(keys, tags).tolist() == [min(step, 0) for step in expected]
    assert Cycle(sub_steps=3, groups=2).sub_step_of_rows(keys, tags) is None


def test_without_the_sub_steps_the_lag_in_updates_is_left_out_and_said(caplog):
    with caplog.at_level(logging.WARNING):
        found = measure([row(1)] * 3, trainer_version=2, cycle=Cycle(sub_steps=2, groups=2))
    assert found["versions"] == 1 and not [key for key in found if key.startswith("updates")]
    assert "3 rows are not of 2 x 2 groups" in caplog.text


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5), st.integers(1, 99)), min_size=1, max_size=20),
    sub_steps=st.integers(1, 8),
    updates=st.integers(1, 4),
)
def test_the_figures_equal_the_literal_sums(rows, sub_steps, updates):
    now = 35
    rows = rows * sub_steps
    tags = [row(oldest, oldest + span, tokens) for oldest, span, tokens in rows]
    groups = len(rows) // sub_steps
    found = measure(tags, now, Cycle(sub_steps=sub_steps, updates=updates, groups=groups))
    total = sum(tokens for _, _, tokens in rows)
    assert found["versions_token_mean"] == pytest.approx(sum((now - o) * t for o, _, t in rows) / total)
    assert found["versions_newest"] == pytest.approx(sum(now - o - s for o, s, _ in rows) / len(rows))
    assert found["mixed_versions_frac"] == pytest.approx(sum(s > 0 for _, s, _ in rows) / len(rows))
    ages = [((now - o) * sub_steps + i // groups) * updates for i, (o, _, _) in enumerate(rows)]
    assert found["updates_token_mean"] == pytest.approx(
        sum(a * t for a, (_, _, t) in zip(ages, rows, strict=True)) / total
    )
    young = sum(t for a, (_, _, t) in zip(ages, rows, strict=True) if a <= 16) / total
    shares = histogram(found, "updates_token_hist")
    assert sum(shares.values()) == pytest.approx(1)
    assert shares.get("u17_on", 0) == pytest.approx(1 - young, abs=1e-9)


def test_M03_no_key_is_reduced_by_its_name():
    found = step_metrics(["a_0_0"], [row(0)], 3, Cycle())
    found[achieved_lag.ERRORS_KEY] = 0.0
    pairs = {key: [value, value + 2] for key, value in found.items()}
    assert reduce_metrics(dict(pairs)) == {key: value + 1 for key, value in found.items()}
    aggregator = MetricsAggregator()
    for i in range(2):
        aggregator.add_step_metrics({key: values[i] for key, values in pairs.items()}, sample_count=1)
    assert aggregator.get_aggregated_metrics() == {key: value + 1 for key, value in found.items()}


# --- in verl's trainer -------------------------------------------------------------------------------------------


def make_trainer(loss="sat_gspo", lag=1, sync_step=1, exact=False, mode="separate_async", **sampler):
    block = {"num_warmup_batches": lag, "parameter_sync_step": sync_step}
    sampler = {"max_off_policy_threshold": 8, "max_off_policy_strategy": "drop", **sampler}
    if exact:
        sampler["custom_sampler"] = {"path": "pkg://verl_sat.sampler", "name": "ExactLagReplayBuffer"}
    actor = {"policy_loss": {"loss_mode": loss}, "ppo_mini_batch_size": 4, "ppo_epochs": 1}
    trainer = object.__new__(PPOTrainerSeparateAsync)
    trainer.config = OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": actor},
            "data": {"train_batch_size": 4 * sync_step},
            "trainer": {"critic_warmup": 0, "v1": {"trainer_mode": mode, mode: block, "sampler": sampler}},
        }
    )
    trainer.parameter_sync_step = sync_step
    return trainer


def step(trainer, number, versions, metrics=None):
    """The metrics of a step whose samples are of ``versions``, without the common prefix."""
    metrics = {} if metrics is None else metrics
    tags = [row(version) for version in versions]
    keys = [f"g{number}x{i}_0_0" for i in range(len(tags))]
    after_metrics(trainer, KVBatchMeta(partition_id="train", keys=keys, tags=tags), metrics, number)
    return {key.removeprefix(KEY): value for key, value in metrics.items()}


def test_verls_metrics_get_the_lag_and_what_workers_measured_stays():
    found = step(make_trainer(), 3, [1, 1, 1, 0], {f"{KEY}versions": 7.0, "actor/pg_loss": 0.5})
    assert found["actor/pg_loss"] == 0.5 and found["versions"] == 7
    assert histogram(found, "versions_hist") == {"v1": 0.75, "v2": 0.25}
    assert found["versions_oldest"] == 2 and found["report_errors"] == 0


def test_a_job_that_does_not_concern_us_gets_nothing():
    assert step(make_trainer(loss="vanilla"), 3, [1] * 4) == {}
    assert "versions" in step(make_trainer(loss="vanilla", exact=True), 3, [1] * 4)


def test_A08_after_a_resume_the_lag_is_taken_against_the_version_that_was_sent():
    trainer = make_trainer()
    # Version 100 was restored and sent. The first resumed step is 101: fresh samples are of lag 0, restored ones of 1.
    assert histogram(step(trainer, 101, [100, 100, 99, 99]), "versions_hist") == {"v0": 0.5, "v1": 0.5}
    # A step that is counted twice: 103 follows, but what was last sent is 101, and the fresh samples say so too.
    assert histogram(step(trainer, 103, [101, 101, 100, 100]), "versions_hist") == {"v0": 0.5, "v1": 0.5}
    assert step(trainer, 104, [103] * 4)["versions"] == 0
    assert step(trainer, 105, [106] * 4)["negative_frac"] == 1


def test_a_failure_does_not_end_the_run_and_is_counted_and_said_once(caplog):
    trainer = make_trainer()
    broken = SimpleNamespace(keys=["a_0_0"], tags=[None])
    metrics = {}
    with caplog.at_level(logging.WARNING):
        for number in (1, 2):
            after_metrics(trainer, broken, metrics, number)
    assert metrics == {achieved_lag.ERRORS_KEY: 2.0}
    assert len(caplog.records) == 1 and "AttributeError" in caplog.text
    assert step(trainer, 3, [2] * 4)["report_errors"] == 2
    unreadable = make_trainer(lag=-1)
    assert step(unreadable, 1, [0] * 4) == {"report_errors": 1} == step(unreadable, 2, [0] * 4)


def test_the_wrap_adds_to_what_verl_computes_and_passes_its_arguments_on():
    assert "achieved_lag" in getattr(PPOTrainer._compute_metrics, _compat._MARK)
    seen = []
    wrapped = _compat._report_achieved_lag(lambda *arguments: seen.append(arguments))
    trainer, metrics = make_trainer(), {}
    batch = KVBatchMeta(partition_id="train", keys=["a_0_0"], tags=[row(0)])
    wrapped(trainer, batch, metrics, {"step": 1.0}, global_steps=2, epoch=0)
    assert seen == [(trainer, batch, metrics, {"step": 1.0}, 2, 0)]
    assert metrics[f"{KEY}versions"] == 1


# --- configured against achieved ---------------------------------------------------------------------------------


def warnings_of(caplog, trainer, lag_of_step, steps, first=1):
    with caplog.at_level(logging.WARNING, logger=achieved_lag.logger.name):
        for number in range(first, steps + 1):
            step(trainer, number, [number - 1 - min(lag, number - 1) for lag in lag_of_step(number)])
    return [record.getMessage() for record in caplog.records]


def test_A12_a_lag_of_8_that_stays_between_0_and_1_is_said_once(caplog):
    trainer = make_trainer(lag=8, max_off_policy_threshold=None)
    (message,) = warnings_of(caplog, trainer, lambda number: [0, 0, 1, 1], 60)
    assert message.startswith("verl-sat: the lag stays away from the configured one")
    assert "0.50 versions old on average (v0 50%, v1 50%), configured are 8 versions" in message
    assert "generation is slower than training" in message
    for key in (
        "trainer.v1.separate_async.num_warmup_batches=8",
        "trainer.v1.separate_async.parameter_sync_step=1",
        "trainer.v1.sampler.max_off_policy_threshold=null",
        "rollout GPUs",
    ):
        assert key in message


def test_the_comparison_begins_after_the_ramp_and_takes_20_steps(caplog):
    trainer = make_trainer(lag=8, max_off_policy_threshold=None)
    assert warnings_of(caplog, trainer, lambda number: [0] * 4, 27) == []
    assert len(warnings_of(caplog, make_trainer(lag=8, max_off_policy_threshold=None), lambda n: [0] * 4, 28)) == 1


def test_a_lag_far_above_is_said_too(caplog):
    (message,) = warnings_of(caplog, make_trainer(lag=1, max_off_policy_threshold=None), lambda n: [1, 2, 3, 4], 30, 5)
    assert "2.50 versions old on average (v1 25%, v2 25%, v3 25%, v4 25%), configured are 1 version " in message
    assert "responses take longer than a step" in message
    assert "what bounds it is trainer.v1.sampler.max_off_policy_threshold=null" in message


@pytest.mark.parametrize(
    ("lag", "achieved", "far"),
    [(0, [0, 0, 0, 2], False), (0, [0, 0, 1, 2], True), (8, [6] * 4, False), (8, [5] * 4, True)],
)
def test_what_is_far(caplog, lag, achieved, far):
    """More than a quarter of the configured lag, and more than half a version."""
    trainer = make_trainer(lag=lag, max_off_policy_threshold=None)
    assert len(warnings_of(caplog, trainer, lambda number: achieved, 40)) == far


def test_a_threshold_that_pins_the_lag_is_what_is_expected(caplog):
    """The preflight has said that lag 8 becomes 7."""
    assert warnings_of(caplog, make_trainer(lag=8, max_off_policy_threshold=8), lambda number: [7] * 4, 40) == []


def test_a_noisy_lag_around_the_configured_one_is_not_far(caplog):
    draw = random.Random(0)
    trainer = make_trainer(lag=3, max_off_policy_threshold=None)
    assert warnings_of(caplog, trainer, lambda number: draw.choices([1, 2, 3, 4, 5], k=4), 60) == []
