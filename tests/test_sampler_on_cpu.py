"""The exact-lag sampler on verl's real replay buffer, TransferQueue and Ray."""

import logging
import random
import threading
import time

import pytest
import transfer_queue as tq
from omegaconf import OmegaConf

from verl_sat import sampler as sampler_module
from verl_sat.sampler import INEXACT_KEY, ExactLagReplayBuffer

GROUP = 2


pytestmark = pytest.mark.usefixtures("empty_queue")


def make_sampler(lag=2, mode="separate_async", kwargs=None, **changes):
    values = dict(
        trainer_mode=mode,
        trainer_config=OmegaConf.create({"num_warmup_batches": lag}),
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create(kwargs or {"poll_interval": 0.01}),
        refill_fn=None,
    )
    return ExactLagReplayBuffer(**{**values, **changes})


def submit(uids, step):
    tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in uids]
    tq.kv_batch_put(keys=list(uids), partition_id="train", tags=tags)


def finish(uid, version, status="finished", end_version=None, sessions=(0, 1)):
    keys = [f"{uid}_{session}_0" for session in sessions]
    tag = {"min_global_steps": version, "max_global_steps": version if end_version is None else end_version}
    if keys:
        tq.kv_batch_put(keys=keys, partition_id="train", tags=[dict(tag) for _ in keys])
    tq.kv_put(key=uid, partition_id="train", tag={"status": status})


def test_it_waits_for_the_groups_in_flight():
    submit(["a", "b", "c"], step=1)
    finish("a", 0)
    finish("b", 0)
    buffer = make_sampler()
    timer = threading.Timer(0.5, finish, args=("c", 0))
    started = time.monotonic()
    timer.start()
    batch, metrics = buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    assert time.monotonic() - started > 0.45  # two were there at once; verl's own buffer returns then
    assert {key.split("_")[0] for key in batch.keys} == {"a", "b"}
    assert metrics[INEXACT_KEY] == 0


def test_batches_come_in_the_order_of_submission_whatever_the_order_of_completion():
    uids = [f"u{i:02d}x" for i in range(12)]
    random.Random(1).shuffle(uids)
    submit(uids[:8], step=1)
    submit(uids[8:], step=2)
    finished = list(uids)
    random.Random(2).shuffle(finished)
    for uid in finished:
        finish(uid, 0, sessions=(1, 0))
    buffer = make_sampler()
    taken = []
    for _ in range(3):
        batch, _ = buffer.sample(global_steps=1, partition_id="train", batch_size=4)
        taken += batch.keys
    assert taken == [f"{uid}_{session}_0" for uid in uids for session in range(GROUP)]


def test_lag_is_exact_over_a_run():
    """verl's own order of events with W=2: submit, sample, update, send the version."""
    lag, buffer, seen = 2, make_sampler(lag=2), []
    submit([f"w{i}" for i in range(2 * lag)], step=1)
    for i in range(2 * lag):
        finish(f"w{i}", version=0)
    for step in range(1, 8):
        submit([f"s{step}-{i}" for i in range(2)], step=step)
        for i in range(2):
            finish(f"s{step}-{i}", version=step - 1)
        batch, metrics = buffer.sample(global_steps=step, partition_id="train", batch_size=2)
        assert metrics[INEXACT_KEY] == 0
        seen.append({step - 1 - tag["min_global_steps"] for tag in batch.tags})
    assert seen == [{0}, {1}] + [{2}] * 5


def test_a_sample_of_another_version_is_counted_and_said_once(caplog):
    submit(["a", "b"], step=1)
    finish("a", version=3)
    finish("b", version=2, end_version=3)
    with caplog.at_level(logging.WARNING, logger=sampler_module.logger.name):
        _, metrics = make_sampler(lag=2).sample(global_steps=6, partition_id="train", batch_size=2)
    assert metrics[INEXACT_KEY] == 0.5
    assert "2 of 4 samples are not of version 3 (lag 2)" in caplog.text


def test_a_sample_without_a_version_is_inexact():
    submit(["a"], step=1)
    finish("a", version=None)
    _, metrics = make_sampler(lag=0).sample(global_steps=1, partition_id="train", batch_size=1)
    assert metrics[INEXACT_KEY] == 1


def test_generation_that_always_fails_stops_the_job(monkeypatch):
    monkeypatch.setattr(sampler_module, "MAX_FAILED_IN_A_ROW", 3)
    counter = iter(range(100))

    def refill(count):
        for uid in [f"f{next(counter)}" for _ in range(count)]:
            submit([uid], step=1)
            finish(uid, 0, status="failure", sessions=())

    submit(["older"], step=1)
    finish("older", 0)  # with a lag above 1 there are always some
    refill(2)
    with pytest.raises(RuntimeError, match="failed to generate"):
        make_sampler(refill_fn=refill).sample(global_steps=1, partition_id="train", batch_size=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "sync"}, "trainer_mode=sync"),
        ({"lag": 1.5}, "num_warmup_batches=1.5"),
        ({"lag": 8, "max_off_policy_threshold": 8}, "max_off_policy_threshold=8"),
        ({"kwargs": {"poll": 1}}, r"unknown keys \['poll'\]"),
        ({"filter_groups_metric": "reward"}, "algorithm.filter_groups.enable=False"),
        ({"sync_refill_failed_groups": True}, "sync_refill_failed_groups=False"),
    ],
)
def test_what_would_break_the_lag_or_be_lost_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_sampler(**change)


def test_threshold_above_the_lag_is_fine():
    assert make_sampler(lag=8, max_off_policy_threshold=9).lag == 8
