"""The exact-lag sampler on verl's real replay buffer, TransferQueue and Ray."""

import logging
import random
import threading
import time
from types import SimpleNamespace

import pytest
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

from verl_sat import _compat
from verl_sat import sampler as sampler_module
from verl_sat.sampler import INEXACT_KEY, WAIT_TIMER, ExactLagReplayBuffer

GROUP = 2


pytestmark = pytest.mark.usefixtures("empty_queue")


def make_sampler(sampler=ExactLagReplayBuffer, lag=2, mode="separate_async", kwargs=None, **changes):
    values = dict(
        trainer_mode=mode,
        trainer_config=OmegaConf.create({"num_warmup_batches": lag, **changes.pop("trainer", {})}),
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create(kwargs or {"poll_interval": 0.01}),
        refill_fn=None,
    )
    return sampler(**{**values, **changes})


def submit(uids, step):
    tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in uids]
    tq.kv_batch_put(keys=list(uids), partition_id="train", tags=tags)


def finish(uid, version, status="finished", end_version=None, sessions=(0, 1)):
    keys = [f"{uid}_{session}_0" for session in sessions]
    tag = {"min_global_steps": version, "max_global_steps": version if end_version is None else end_version}
    if keys:
        tq.kv_batch_put(keys=keys, partition_id="train", tags=[dict(tag) for _ in keys])
    tq.kv_put(key=uid, partition_id="train", tag={"status": status})


class Servers:
    """Rollout servers in a thread: every group takes its time and notes the versions that it began and ended with.

    Groups of `held` go on until they are let go, or for 10 s where a test would wait for ever.
    """

    def __init__(self, seconds, fail=()):
        self.seconds, self.fail, self.held = seconds, set(fail), set()
        self.version, self.running, self.closed = 0, {}, False
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def submit(self, uids, step):
        submit(uids, step)
        now = time.monotonic()
        with self.lock:
            self.running |= {uid: (now + self.seconds(uid), self.version) for uid in uids}

    def update_weights(self, version):
        with self.lock:
            self.version = version
        return {}

    def _serve(self):
        while not self.closed:
            now = time.monotonic()
            with self.lock:
                ready = {
                    uid: began
                    for uid, (due, began) in self.running.items()
                    if due <= now and (uid not in self.held or due + 10 <= now)
                }
                for uid, began in ready.items():
                    del self.running[uid]
                    failed = uid in self.fail
                    sessions = () if failed else (0, 1)
                    finish(uid, began, "failure" if failed else "finished", self.version, sessions)
            time.sleep(0.002)


class Run:
    """verl's order of events in `separate_async`, with its own `on_step_end`, and training that takes no time."""

    def __init__(self, lag, sync_step=1, seconds=lambda uid: 0.02, fail=(), group_count=2, steps=99, buffer=None):
        self.sync_step, self.group_count, self.count = sync_step, group_count, 0
        self.servers = Servers(seconds, fail)
        self.buffer = (buffer or make_sampler)(lag=lag, kwargs={"poll_interval": 0.002}, refill_fn=self.add)
        self.trainer = object.__new__(PPOTrainerSeparateAsync)
        self.trainer.__dict__ |= dict(
            replay_buffer=self.buffer,
            prev_step_profile=False,
            hybrid_rollout_config=SimpleNamespace(enable_switch=False),
            standalone_checkpoint_manager=self.servers,
            global_steps=1,
            total_training_steps=steps,
        )
        self.add(lag * sync_step * group_count)

    def add(self, count):
        uids = [f"p{self.count + i}" for i in range(count)]
        self.count += count
        if uids:
            self.servers.submit(uids, self.trainer.global_steps)
        return count

    def begin(self):
        self.trainer.timing_raw = {}
        self.add(self.sync_step * self.group_count)

    def sample(self):
        return self.buffer.sample(self.trainer.global_steps, "train", self.group_count)

    def end(self):
        self.trainer.on_step_end()
        self.trainer.global_steps += 1

    def step(self):
        """Version lags of the samples (oldest, newest), uids in order, share of inexact ones."""
        self.begin()
        lags, uids, inexact = set(), [], []
        for _ in range(self.sync_step):
            batch, metrics = self.sample()
            version = self.trainer.global_steps - 1
            lags |= {version - tag[f"{end}_global_steps"] for tag in batch.tags for end in ("min", "max")}
            uids += dict.fromkeys(key.split("_")[0] for key in batch.keys)
            inexact.append(metrics[INEXACT_KEY])
            tq.kv_clear(partition_id="train", keys=batch.keys)
        self.end()
        return lags, uids, inexact

    def close(self):
        self.servers.closed = True
        self.servers.thread.join()


@pytest.fixture
def runs():
    """Starts runs, and ends them."""
    started = []

    def start(*args, **kwargs):
        started.append(Run(*args, **kwargs))
        return started[-1]

    yield start
    for run in started:
        run.close()


def ragged(uid):
    """Some groups take many times as long as others, whatever the order [s]."""
    return random.Random(uid).choice([0.0, 0.0, 0.01, 0.02, 0.15])


class Undrained(ExactLagReplayBuffer):
    """The sampler in a trainer whose weight transfer does not wait."""

    before_transfer = None


class Careless(Undrained):
    """... and which does not notice."""

    def _begin_step(self, global_steps):
        self._waits_for_all = False


# --- generation and training overlap, and the lag is exact -------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("sync_step", [1, 4, 8])
def test_the_lag_is_exact_for_slow_and_quick_groups(runs, lag, sync_step):
    run = runs(lag, sync_step, seconds=ragged)
    steps = [run.step() for _ in range(lag + 3)]
    assert [step[0] for step in steps] == [{min(lag, s)} for s in range(lag + 3)]
    assert {share for step in steps for share in step[2]} == {0}
    assert sum((step[1] for step in steps), []) == [f"p{i}" for i in range((lag + 3) * sync_step * 2)]


def test_A04_without_the_wait_before_a_transfer_the_lag_is_not_exact(runs):
    """The counter-check: the same run, and versions are mixed within groups."""
    run = runs(1, seconds=ragged, group_count=4, buffer=lambda **changes: make_sampler(Careless, **changes))
    steps = [run.step() for _ in range(6)]
    assert any(lags != {1} for lags, _, _ in steps[1:])
    assert sum(share for step in steps for share in step[2]) > 0


def test_a_batch_is_handed_out_while_the_newest_is_still_running_and_a_transfer_waits_for_it(runs):
    run = runs(1)
    run.step()  # a drain has to be seen first
    run.servers.held = {"p4", "p5"}
    run.begin()
    run.sample()
    assert set(run.servers.running) == {"p4", "p5"}
    sent = []
    run.servers.update_weights = lambda version: sent.append((version, set(run.servers.running)))
    threading.Timer(0.2, run.servers.held.clear).start()
    run.end()
    assert sent == [(2, set())]
    assert run.trainer.timing_raw[WAIT_TIMER] > 0.15 and set(run.trainer.timing_raw) == {"update_weights", WAIT_TIMER}


def test_with_lag_0_a_sub_step_begins_when_its_own_groups_are_finished(runs):
    run = runs(0, sync_step=2)
    run.step()
    run.servers.held = {"p6", "p7"}
    run.begin()
    first, _ = run.sample()
    assert set(run.servers.running) == {"p6", "p7"}
    run.servers.held.clear()
    second, _ = run.sample()
    assert [{key.split("_")[0] for key in batch.keys} for batch in (first, second)] == [{"p4", "p5"}, {"p6", "p7"}]


def test_a_transfer_that_did_not_wait_is_noticed_and_the_lag_stays_exact(runs, caplog):
    run = runs(1, seconds=ragged, buffer=lambda **changes: make_sampler(Undrained, **changes))
    with caplog.at_level(logging.WARNING, logger=sampler_module.logger.name):
        steps = [run.step() for _ in range(4)]
    assert [step[0] for step in steps] == [{0}, {1}, {1}, {1}]
    assert caplog.text.count("without waiting for the requests in flight") == 1


def test_after_the_last_step_nobody_waits(runs):
    run = runs(1, steps=2)
    run.step()
    run.servers.held = {"p4", "p5"}
    run.begin()
    run.sample()
    run.end()
    assert set(run.servers.running) == {"p4", "p5"} and WAIT_TIMER not in run.trainer.timing_raw


def test_other_samplers_see_nothing_of_it():
    class Sender:
        def update_weights(self, version):
            sent.append(version)

    sent, trainer = [], object.__new__(PPOTrainerSeparateAsync)
    trainer.__dict__ |= dict(
        replay_buffer=object.__new__(ReplayBufferAsync),
        prev_step_profile=False,
        hybrid_rollout_config=SimpleNamespace(enable_switch=False),
        standalone_checkpoint_manager=Sender(),
        timing_raw={},
        global_steps=3,
    )
    trainer.on_step_end()
    assert sent == [3] and set(trainer.timing_raw) == {"update_weights"}


def test_a_checkpoint_has_nothing_unfinished_in_it(runs):
    """verl re-issues what is unfinished after a resume, by weights that are newer than the lag wants."""
    assert "drain_before_checkpoint" in getattr(PPOTrainer._save_checkpoint, _compat._MARK)
    run = runs(1, steps=1)  # the last step too: a resume may have more
    run.servers.held = {"p4", "p5"}
    run.begin()
    run.sample()
    run.add(2)
    threading.Timer(0.2, run.servers.held.clear).start()
    saved = []
    _compat._drain_before_checkpoint(lambda trainer: saved.append(dict(run.servers.running)))(run.trainer)
    assert saved == [{}] and run.trainer.timing_raw[WAIT_TIMER] > 0.15


def test_after_a_resume_the_restored_groups_have_the_lag():
    """Version 6 was restored, with the two groups that version 5 generated for step 7."""
    buffer = make_sampler(lag=1)
    submit(["a", "b"], step=6)
    for uid in ("a", "b"):
        finish(uid, version=5)
    submit(["c", "d"], step=7)
    timers = [threading.Timer(0.1, finish, args=(uid, 6)) for uid in ("c", "d")]
    for timer in timers:
        timer.start()
    batch, metrics = buffer.sample(global_steps=7, partition_id="train", batch_size=2)
    for timer in timers:
        timer.join()
    assert {key[0] for key in batch.keys} == {"a", "b"} and metrics[INEXACT_KEY] == 0


# --- failures ----------------------------------------------------------------------------------------------------


def test_a_failed_group_at_the_head_is_replaced_and_the_next_in_order_taken(runs):
    run = runs(1, seconds=ragged, fail=["p0", "p5"])
    steps = [run.step() for _ in range(4)]
    assert [step[0] for step in steps] == [{0}, {1}, {1}, {1}]
    assert {share for step in steps for share in step[2]} == {0}
    taken = sum((step[1] for step in steps), [])
    assert taken[:2] == ["p1", "p2"] and "p5" not in taken
    assert taken == sorted(taken, key=lambda uid: int(uid[1:]))


def test_what_failed_before_a_transfer_is_generated_anew_by_the_same_weights_and_reported(runs):
    run = runs(1, fail=["p4"], seconds=lambda uid: 0.05)
    run.step()
    run.step()  # p4 is of this step's batch; p6 takes its place before version 2 is sent
    run.begin()
    batch, metrics = run.sample()
    assert {key.split("_")[0] for key in batch.keys} == {"p5", "p6"}
    assert {tag["min_global_steps"] for tag in batch.tags} == {1}
    assert metrics[INEXACT_KEY] == 0
    assert metrics["training/rollout_failure/evicted_samples"] == 1


def test_generation_that_always_fails_stops_the_job_before_a_transfer_too(runs, monkeypatch):
    monkeypatch.setattr(sampler_module, "MAX_FAILED_IN_A_ROW", 3)
    run = runs(1, seconds=lambda uid: 0.01)
    run.step()
    run.servers.fail = {f"p{i}" for i in range(4, 99)}
    run.begin()
    run.sample()
    with pytest.raises(RuntimeError, match="failed to generate"):
        run.trainer.on_step_end()


# --- order, versions, refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["separate_async", "colocate_async"])
def test_it_waits_for_the_groups_in_flight(mode):
    """In colocate_async always, in separate_async in the first step of a process."""
    submit(["a", "b", "c"], step=1)
    finish("a", 0)
    finish("b", 0)
    buffer = make_sampler(mode=mode)
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
        ({"trainer": {"hybrid_rollout": {"enable_switch": True}}}, "Set trainer.v1.separate_async.hybrid_rollout.ena"),
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
