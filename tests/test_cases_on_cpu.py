"""Cases of `CASES.md` that need verl's own V1 trainer code, replay buffer and TransferQueue around ours.

The rows below go the way of an asynchronous job: groups in TransferQueue, verl's buffer or our sampler, the padding
rows that verl adds, the trainer's choice of the old log-prob, and `ppo_loss` of the worker. Only the model is missing:
its log-probs are given. What a single module holds is tested beside that module.
"""

import threading
from types import SimpleNamespace

import pytest
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss

from verl_sat.config import SATPolicyLossConfig
from verl_sat.engine.fsdp import rows_with_tokens, sample_versions
from verl_sat.metrics import METRIC_KEYS
from verl_sat.sampler import INEXACT_KEY, ExactLagReplayBuffer
from verl_sat.staleness import VersionClock, count_lags, lag_metrics

LOSSES = {"sat_grpo": "token-mean", "sat_gspo": "seq-mean-token-mean"}
PROMPT = 3
EOS = 1


pytestmark = pytest.mark.usefixtures("empty_queue")


# --- a batch on its way through verl ----------------------------------------------------------------------------


def put_rollouts(rollout_log_probs, versions, without=()):
    """Trajectories as verl's agent loop stores them; ``without`` are rows whose log-probs were lost on the way."""
    keys, tags = [], []
    for row, (log_probs, version) in enumerate(zip(rollout_log_probs, versions, strict=True)):
        length = len(log_probs)
        prompt, response = torch.full((PROMPT,), 5), torch.full((length,), 7)
        fields = {
            "prompts": prompt,
            "responses": response,
            "input_ids": torch.cat([prompt, response]),
            "attention_mask": torch.ones(PROMPT + length, dtype=torch.long),
            "position_ids": torch.arange(PROMPT + length),
            "response_mask": torch.ones(length, dtype=torch.long),
            "rm_scores": torch.zeros(length),
            "extra_fields": {"min_global_steps": version, "max_global_steps": version},
        }
        if row not in without:
            fields["rollout_log_probs"] = torch.tensor(log_probs)
        tag = {"seq_len": PROMPT + length, "min_global_steps": version, "max_global_steps": version}
        tq.kv_put(key=f"u{row}_0_0", partition_id="train", fields=fields, tag=tag)
        keys.append(f"u{row}_0_0")
        tags.append(tag)
    return KVBatchMeta(partition_id="train", keys=keys, tags=tags, extra_info={})


def put_field(batch, name, rows):
    """A further field, a row of numbers per trajectory."""
    nested = torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)
    tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=tu.get_tensordict({name: nested}))


def trainer(bypass, current=None):
    """verl's separate_async trainer with nothing but what the choice of the old log-prob reads.

    ``current``: log-probs per row that its worker computes with the weights of the cycle's start (decoupled mode).
    """
    self = object.__new__(PPOTrainerSeparateAsync)
    self.local_trigger_step = 0
    self.config = OmegaConf.create(
        {
            "algorithm": {"rollout_correction": {"bypass_mode": bypass}},
            "actor_rollout_ref": {
                "actor": {"loss_agg_mode": "token-mean", "loss_scale_factor": None},
                "rollout": {"temperature": 1.0, "calculate_log_probs": True},
            },
        }
    )

    def compute_log_prob(batch):
        # As the worker returns it: a value per token of prompt and response, shifted left by one.
        rows = [[0.0] * (PROMPT - 1) + row + [0.0] for row in current]
        put_field(batch, "log_probs", rows)
        put_field(batch, "entropy", rows)
        return batch

    self.actor_rollout_wg = SimpleNamespace(save_model_to_cpu=lambda step: None, compute_log_prob=compute_log_prob)
    return self


def read(batch, without=()):
    """A batch from the queue with the batch-wide counts of `ROLLOUT` that verl's engine adds, as ppo_loss gets it."""
    fields = {"prompts", "responses", "response_mask", "old_log_probs", "advantages"} - set(without)
    data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=sorted(fields))
    counts = dict(dp_size=1, batch_num_tokens=sum(map(len, ROLLOUT)), global_batch_size=len(ROLLOUT))
    for key, value in counts.items():
        tu.assign_non_tensor_data(data, key, value)
    return data


def worker_loss(name, data, log_probs, **sat):
    """(loss, gradient per row, metrics) of verl's ppo_loss, with a model's log-probs."""
    leaves = [torch.tensor(row, requires_grad=True) for row in log_probs]
    prompts = data["prompts"].offsets().diff().tolist()
    output = [torch.cat([torch.zeros(p - 1), row, torch.zeros(1)]) for p, row in zip(prompts, leaves, strict=True)]
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=LOSSES[name],
        policy_loss=SATPolicyLossConfig(loss_mode=name, sat=sat),
    )
    model_output = {"log_probs": torch.nested.as_nested_tensor(output, layout=torch.jagged)}
    loss, metrics = ppo_loss(config=config, model_output=model_output, data=data)
    loss.backward()
    return loss.item(), [row.grad for row in leaves], {key: metrics[key].aggregate() for key in METRIC_KEYS}


ROLLOUT = [[-1.0, -2.0, -0.5, -1.5], [-0.7, -1.1, -2.2], [-1.3, -0.9]]
OLD = [[value - 0.1 for value in row] for row in ROLLOUT]
CURRENT = [[-1.2, -1.9, -0.5, -1.4], [-0.6, -1.6, -2.2], [-1.3, -1.0]]


def mean_distance(ours, theirs):
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("name", LOSSES)
def test_M07_which_pair_the_ratio_statistics_compare_follows_the_mode(name):
    """Bypass: current against rollout. Decoupled: current against old, and verl itself logs old against rollout."""
    batch = put_rollouts(ROLLOUT, [0, 0, 0])
    put_field(batch, "advantages", [[1.0] * len(row) for row in ROLLOUT])
    of_trainer = {}
    trainer(bypass=True)._compute_old_log_prob(batch, of_trainer)
    bypass = worker_loss(name, read(batch), CURRENT)[2]
    assert bypass["actor/sat/abs_log_ratio"] == pytest.approx(mean_distance(CURRENT, ROLLOUT), rel=1e-5)
    assert of_trainer == {}  # verl has nothing to say about the engine in bypass mode; this metric does

    trainer(bypass=False, current=OLD)._compute_old_log_prob(batch, of_trainer)
    decoupled = worker_loss(name, read(batch), CURRENT)[2]
    assert decoupled["actor/sat/abs_log_ratio"] == pytest.approx(mean_distance(CURRENT, OLD), rel=1e-5)
    assert decoupled.keys() == bypass.keys()
    assert decoupled["actor/sat/abs_log_ratio"] != pytest.approx(bypass["actor/sat/abs_log_ratio"], rel=0.05)
    assert of_trainer["training/rollout_probs_diff_valid"] == 1 and of_trainer["training/rollout_probs_diff_mean"] > 0


@pytest.mark.parametrize("lost", [[0, 1, 2], [1]], ids=["all", "one"])
def test_A13_rollout_log_probs_that_vanish_mid_run_stop_the_step_and_are_named(lost):
    batch = put_rollouts(ROLLOUT, [0, 0, 0], without=lost)
    put_field(batch, "advantages", [[1.0] * len(row) for row in ROLLOUT])
    with pytest.raises(KeyError, match="rollout_log_probs"):
        trainer(bypass=True)._compute_old_log_prob(batch, {})


@pytest.mark.parametrize("name", LOSSES)
def test_A13_a_batch_without_old_log_probs_stops_in_the_worker_and_names_them(name):
    batch = put_rollouts(ROLLOUT, [0, 0, 0])
    put_field(batch, "advantages", [[1.0] * len(row) for row in ROLLOUT])
    with pytest.raises(KeyError, match="old_log_probs"):
        worker_loss(name, read(batch, without=["old_log_probs"]), CURRENT)


@pytest.mark.parametrize("name", LOSSES)
def test_M06_the_padding_rows_that_verl_adds_change_nothing(name):
    """Three responses filled up to five by verl: loss, gradient, metrics and lag are those of the three."""
    batch = put_rollouts(ROLLOUT, [7, 8, 8])
    padded = upsample_batch_to_divisible_size(batch, 5, EOS)
    assert len(padded) == 5
    trainer(bypass=True)._compute_old_log_prob(padded, {})
    advantages = [[1.0] * 4, [-2.0] * 3, [0.5] * 2]
    put_field(padded, "advantages", [*advantages, [9.0], [-9.0]])  # whatever stands there must not count
    loss, grad, values = worker_loss(name, read(batch), CURRENT, quantile=0.5)
    padded_loss, padded_grad, padded_values = worker_loss(name, read(padded), [*CURRENT, [-30.0], [30.0]], quantile=0.5)
    assert loss != 0 and values["actor/sat/stale_frac"] > 0
    assert padded_loss == pytest.approx(loss, rel=1e-6) and padded_values == pytest.approx(values, rel=1e-6)
    for ours, theirs in zip(grad, padded_grad[:3], strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-9)
    assert not padded_grad[3].any() and not padded_grad[4].any()
    # They carry the tags of the row that they were copied from, and are no samples.
    assert lag_of(padded, trainer_version=9) == lag_of(batch, trainer_version=9)


# --- the lag of a batch -----------------------------------------------------------------------------------------


def lag_of(batch, trainer_version, updates_per_version=1):
    """Lag metrics of a batch from the queue, as the engine reads it."""
    clock = VersionClock()
    for version in range(trainer_version + 1):
        clock.note_sync(version)
        if version < trainer_version:
            for _ in range(updates_per_version):
                clock.note_update()
    fields = ["extra_fields", "response_mask"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=fields)
    counts = count_lags(clock, sample_versions(data), rows_with_tokens(data["response_mask"]))
    return lag_metrics(counts.as_sums(), counts.oldest)


def test_P05_the_version_of_a_sample_travels_in_extra_fields_and_is_never_assumed():
    """Lag 0 and lag 8 side by side, and a sample without a version: seen, seen, and counted as unknown."""
    batch = put_rollouts(ROLLOUT, [8, 0, None])
    lag = lag_of(batch, trainer_version=8, updates_per_version=4)
    assert lag["actor/staleness/versions_oldest"] == 8
    assert lag["actor/staleness/versions"] == 4  # of the two that are known, not of three with a 0 made up
    assert lag["actor/staleness/updates"] == 16
    assert lag["actor/staleness/unknown_frac"] == pytest.approx(1 / 3)
    known_by_none = lag_of(put_rollouts(ROLLOUT, [None] * 3), trainer_version=8)
    assert known_by_none == {"actor/staleness/unknown_frac": 1.0}


@pytest.mark.parametrize("name", LOSSES)
def test_P06_a_loss_call_asks_no_other_process(name, monkeypatch):
    def asked(*args, **kwargs):
        raise AssertionError("the loss waited for another process")

    batch = put_rollouts(ROLLOUT, [0, 0, 0])
    put_field(batch, "advantages", [[1.0] * len(row) for row in ROLLOUT])
    trainer(bypass=True)._compute_old_log_prob(batch, {})
    data = read(batch)
    with monkeypatch.context() as patch:
        for waiting in ("get", "wait", "get_actor"):
            patch.setattr(ray, waiting, asked)
        loss, _, _ = worker_loss(name, data, CURRENT)
    assert loss != 0


# --- every sample too old ---------------------------------------------------------------------------------------


def submit(uids, step):
    tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in uids]
    tq.kv_batch_put(keys=list(uids), partition_id="train", tags=tags)


def finish(uids, version):
    tag = {"min_global_steps": version, "max_global_steps": version}
    tq.kv_batch_put(keys=[f"{uid}_0_0" for uid in uids], partition_id="train", tags=[dict(tag) for _ in uids])
    for uid in uids:
        tq.kv_put(key=uid, partition_id="train", tag={"status": "finished"})


@pytest.mark.parametrize("buffer_class", [ReplayBufferAsync, ExactLagReplayBuffer])
def test_A06_with_all_of_8_samples_too_old_the_step_waits_for_8_new_ones(buffer_class):
    """No batch of padding, no made-up lag: 8 are evicted and said so, 8 asked for, and those are what is trained."""
    step, old, new = 6, [f"old{i}" for i in range(8)], [f"new{i}" for i in range(8)]
    submit(old, step=1)
    finish(old, version=0)
    asked, timers = [], []

    def refill(count):
        asked.append(count)
        submit(new[:count], step)
        timers.append(threading.Timer(0.3, finish, args=(new[:count], step - 1)))
        timers[-1].start()

    buffer = buffer_class(
        trainer_mode="separate_async",
        trainer_config=OmegaConf.create({"num_warmup_batches": 0}),
        max_off_policy_threshold=1,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create({}),
        poll_interval=0.02,
        refill_fn=refill,
    )
    batch, metrics = buffer.sample(global_steps=step, partition_id="train", batch_size=8)
    for timer in timers:
        timer.join()
    assert asked == [8]
    assert {key.partition("_")[0] for key in batch.keys} == set(new) and len(batch) == 8
    assert metrics["training/off_policy/evicted_samples"] == 8
    assert metrics["training/off_policy/evicted_samples_staleness/mean"] == step  # verl counts both ends
    assert not any(tag.get("is_padding") for tag in batch.tags)
    assert {tag["min_global_steps"] for tag in batch.tags} == {step - 1}
    if buffer_class is ExactLagReplayBuffer:
        assert metrics[INEXACT_KEY] == 0
