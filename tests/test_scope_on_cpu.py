"""Scopes of the quantile without a model: what a call resolves to, what `running` remembers, what is refused where.

With real engines, real splits and several ranks: `test_scope_engine_on_cpu.py`.
"""

import gc
import logging
import math
from functools import partial

import pytest
import torch
from test_preflight_on_cpu import async_job, changed, errors, job, texts, warnings
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig, McoreEngineConfig
from verl.workers.config import PolicyLossConfig as StockPolicyLoss
from verl.workers.engine.base import BaseEngine, EngineRegistry
from verl.workers.utils.losses import ppo_loss

from verl_sat import once, preflight, preflight_scope, scope
from verl_sat.config import SATConfig, SATPolicyLossConfig
from verl_sat.engine.fsdp import SATFSDPEngine, register
from verl_sat.engine.look_ahead import sat_settings
from verl_sat.order_statistic import Observations
from verl_sat.scope_facts import few_sequences

SCOPE = scope.SCOPE_KEY
STRATEGY = "actor_rollout_ref.actor.strategy"


class Engine(BaseEngine):
    """verl's engine base with a loss and no model: one 'micro-batch' for each item of the data."""

    def __init__(self, dynamic_context_parallel=False):
        self.engine_config = McoreEngineConfig(
            dynamic_context_parallel=dynamic_context_parallel,
            max_seqlen_per_dp_cp_rank=8 if dynamic_context_parallel else None,
        )
        self.steps = 0

    def get_data_parallel_group(self):
        return None

    def is_mp_src_rank_with_outputs(self):
        return False

    def optimizer_zero_grad(self):
        pass

    def optimizer_step(self):
        self.steps += 1

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        return [loss_function(*batch) for batch in data["micro_batches"]]


class OurEngine(Engine):
    provides_mini_batch_scope = True


def actor_config(name="sat_grpo", **sat):
    config = ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=SATPolicyLossConfig(loss_mode=name, sat=sat),
    )
    config.global_batch_info.update(dp_size=1, batch_num_tokens=100, global_batch_size=8, loss_scale_factor=None)
    return config


def loss_of(name="sat_grpo", **sat):
    config = actor_config(name, **sat)

    def loss(old, log_prob, advantages, mask):
        return get_policy_loss_fn(name)(old, log_prob, advantages, mask, "token-mean", config)[1]

    return loss


def batch_of(seed, rows=4, columns=10, noise=0.1, active=True):
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, columns, generator=g) - 0.01
    log_prob = old + noise * torch.randn(rows, columns, generator=g)
    mask = torch.rand(rows, columns, generator=g) < 0.8
    return old, log_prob, torch.randn(rows, columns, generator=g), mask & active


def quantile_of(batches, sequence_level=False, level=0.9):
    """Eq. 14 in the open: sorted values, the ceil(level * n)-th."""
    values = []
    for old, log_prob, _, mask in batches:
        for row, active in zip(log_prob - old, mask, strict=True):
            row = row[active]
            if sequence_level and len(row):
                row = row.mean().expand(len(row))
            values += row.abs().tolist()
    values.sort()
    return values[math.ceil(round(level * len(values), 6)) - 1]


def train(engine, loss, batches):
    return engine.train_batch({"micro_batches": batches}, loss)


# --- running ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sat_grpo", "sat_gspo"])
@pytest.mark.parametrize("implementation", ["fast", "plain"])
def test_running_takes_the_quantile_of_the_mini_batch_before(name, implementation, monkeypatch):
    monkeypatch.setenv("VERL_SAT_LOSS", implementation)
    engine, loss = Engine(), loss_of(name, scope="running")
    batches = [batch_of(seed) for seed in range(6)]
    first = train(engine, loss, batches[:2])
    assert all(m["actor/sat/quantile"] == m["actor/sat/stale_frac"] == 0 and m["actor/sat/inert"] == 1 for m in first)
    second = train(engine, loss, batches[2:5])
    expected = quantile_of(batches[:2], name == "sat_gspo")
    assert [m["actor/sat/quantile"] for m in second] == pytest.approx([expected] * 3, rel=1e-6)
    third = train(engine, loss, batches[5:])
    assert third[0]["actor/sat/quantile"] == pytest.approx(quantile_of(batches[2:5], name == "sat_gspo"), rel=1e-6)
    # another engine, and a new process, know nothing of it
    assert train(Engine(), loss, batches[:1])[0]["actor/sat/quantile"] == 0


def test_running_does_not_depend_on_the_split():
    rows = [tuple(x[i : i + 1] for x in batch_of(7, rows=8)) for i in range(8)]

    def joined(indices):
        return tuple(torch.cat([rows[i][field] for i in indices]) for field in range(4))

    found = set()
    for split in ([range(8)], [range(4), range(4, 8)], [[5, 2], [7], [0, 1, 3], [4, 6]], [[i] for i in range(8)]):
        engine, loss = Engine(), loss_of("sat_gspo", scope="running")
        train(engine, loss, [joined(part) for part in split])
        found.add(train(engine, loss, [joined(range(8))])[0]["actor/sat/quantile"])
    assert len(found) == 1


def test_running_keeps_its_level_over_an_empty_and_a_failed_mini_batch():
    engine, loss = Engine(), loss_of(scope="running")
    batch = batch_of(8)
    train(engine, loss, [batch])
    level = train(engine, loss, [batch_of(9, active=False)])[0]["actor/sat/quantile"]
    assert level == pytest.approx(quantile_of([batch]), rel=1e-6)
    assert train(engine, loss, [batch_of(10, noise=0.3)])[0]["actor/sat/quantile"] == level

    def fails(*arguments):
        loss(*arguments)
        raise RuntimeError("out of memory")

    before = train(engine, loss, [batch_of(11)])[0]["actor/sat/quantile"]
    level = quantile_of([batch_of(11)])
    with pytest.raises(RuntimeError, match="out of memory"):
        train(engine, fails, [batch_of(12, noise=0.5)])
    after = train(engine, loss, [batch])[0]["actor/sat/quantile"]
    assert before != after == pytest.approx(level, rel=1e-6)


def test_running_counts_what_the_fast_path_refused(monkeypatch):
    """A NaN sends one call to the plain formula; both leave observations to the same mini-batch."""
    engine, loss = Engine(), loss_of(scope="running")
    clean, dirty = batch_of(13), batch_of(14)
    dirty[3][0, 0] = True
    dirty[1][0, 0] = torch.nan
    train(engine, loss, [clean, dirty])
    without = dirty[3].clone()
    without[0, 0] = False
    expected = quantile_of([clean, (dirty[0], dirty[1].nan_to_num(0), dirty[2], without)])
    assert train(engine, loss, [clean])[0]["actor/sat/quantile"] == pytest.approx(expected, rel=1e-6)


def test_a_level_goes_with_its_engine():
    engine = Engine()
    train(engine, loss_of(scope="running"), [batch_of(15)])
    present = len(scope._previous)
    del engine
    gc.collect()
    assert len(scope._previous) == present - 1


# --- resolution ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sequence_level, engine, expected",
    [
        (False, Engine, "micro_batch"),
        (False, OurEngine, "micro_batch"),
        (True, Engine, "running"),
        (True, OurEngine, "mini_batch"),
    ],
)
def test_auto_depends_on_loss_and_engine(sequence_level, engine, expected):
    with scope.optimizer_step(engine()) as step:
        assert scope.resolve(SATConfig(), sequence_level, step) == expected


def test_what_auto_became_is_printed_once(capsys):
    engine, loss = Engine(), loss_of("sat_gspo")
    for seed in range(3):
        train(engine, loss, [batch_of(seed)])
    printed = [line for line in capsys.readouterr().out.splitlines() if "[verl-sat]" in line]
    assert len(printed) == 1
    assert "sat_gspo: quantile over scope running (auto), engine Engine" in printed[0]
    assert "after a start or a resume keeps the nominal interval" in printed[0]


def test_outside_an_engine_only_the_call_itself_can_be_had(caplog):
    for name in ("dp_group", "mini_batch", "running"):
        with pytest.raises(scope.ScopeError, match=rf"{SCOPE}={name}.*outside an optimizer step.*micro_batch"):
            loss_of("sat_grpo", scope=name)(*batch_of(1))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            metrics = loss_of("sat_gspo")(*batch_of(1, rows=20))
    assert metrics["actor/sat/quantile"] == pytest.approx(quantile_of([batch_of(1, rows=20)], True), rel=1e-6)
    assert len([r for r in caplog.records if "outside an optimizer step" in r.getMessage()]) == 1


def test_mini_batch_is_never_silently_something_else():
    with pytest.raises(scope.ScopeError, match=rf"{SCOPE}=mini_batch needs the FSDP engine of verl-sat.*running"):
        train(Engine(), loss_of(scope="mini_batch"), [batch_of(2)])
    # our engine, and a loss function whose settings it cannot see
    with pytest.raises(scope.ScopeError, match="could not see the settings of the loss"):
        train(OurEngine(), loss_of("sat_gspo"), [batch_of(2)])


@pytest.mark.parametrize("name, sat", [("sat_grpo", "dp_group"), ("sat_gspo", "running"), ("sat_gspo", "auto")])
def test_dynamic_context_parallel_is_refused_where_ranks_are_pooled(name, sat):
    engine = Engine(dynamic_context_parallel=True)
    with pytest.raises(scope.ScopeError, match="dynamic_context_parallel=False or .*micro_batch"):
        train(engine, loss_of(name, scope=sat), [batch_of(3)])
    train(engine, loss_of(name, scope="micro_batch"), [batch_of(3)])
    train(engine, loss_of(name, scope=sat, q=0.1), [batch_of(3)])


@pytest.mark.parametrize("sat", [dict(q=0.1), dict(kernel="none"), dict(quantile=1.0)])
def test_without_a_quantile_that_decides_anything_no_scope_costs_anything(sat, monkeypatch):
    monkeypatch.setattr(scope, "quantile_level", None)
    monkeypatch.setattr(scope, "remember", None)
    for name in ("dp_group", "running", "mini_batch"):
        train(Engine(), loss_of("sat_gspo", scope=name, **sat), [batch_of(4)])
        loss_of("sat_gspo", scope=name, **sat)(*batch_of(4))  # outside any engine


def test_running_keeps_losses_and_quantiles_apart():
    engine = Engine()
    batch = batch_of(16, rows=20)
    kinds = [("sat_grpo", 0.9), ("sat_gspo", 0.9), ("sat_gspo", 0.5)]
    for name, level in kinds:
        assert train(engine, loss_of(name, scope="running", quantile=level), [batch])[0]["actor/sat/quantile"] == 0
    for name, level in kinds:
        found = train(engine, loss_of(name, scope="running", quantile=level), [batch])[0]["actor/sat/quantile"]
        assert found == pytest.approx(quantile_of([batch], name == "sat_gspo", level), rel=1e-6)


def test_q_min_floors_every_scope():
    engine, loss = Engine(), loss_of(scope="running", q_min=0.05)
    metrics = [train(engine, loss, [batch_of(seed, noise=0.01)])[0] for seed in range(2)]
    assert [m["actor/sat/quantile"] for m in metrics] == pytest.approx([0.05, 0.05])
    assert train(engine, loss, [batch_of(5, noise=0.3)])[0]["actor/sat/quantile"] == pytest.approx(0.05)
    assert train(engine, loss, [batch_of(5)])[0]["actor/sat/quantile"] > 0.05


def test_a_threshold_lies_between_the_quantile_and_the_next_observation():
    values = torch.tensor([0.1, 0.2, 0.3, 0.3, 0.5])
    ones = torch.tensor(5)
    level = scope.quantile_level([Observations(values)], ones, 0.8, None, between=True)
    assert level.gate.q == values[2] and level.gate.threshold == pytest.approx(0.4)
    level = scope.quantile_level([Observations(values)], ones, 1.0, None, between=True)
    assert level.gate.q == 0.5 and level.gate.threshold == math.inf
    assert scope.quantile_level([Observations(values)], ones, 0.8, None).gate.threshold == values[2]


def test_a_call_without_a_stale_token_is_not_inert_for_that():
    """Three calls of which one holds everything beyond the gate: SAT acts on the mini-batch, and every call says so."""
    engine, loss = Engine(), loss_of(scope="running")
    calm, wild = batch_of(20, noise=0.01), batch_of(21, noise=0.1)
    train(engine, loss, [calm, calm, wild])
    metrics = train(engine, loss, [calm, wild])
    q = quantile_of([calm, calm, wild])
    assert [m["actor/sat/stale_frac"] > 0 for m in metrics] == [False, True] and 0.03 < q < 0.18
    assert [m["actor/sat/inert"] for m in metrics] == [0, 0]
    assert metrics[0]["actor/sat/eps_eff_low"] == metrics[1]["actor/sat/eps_eff_low"] < 0.2
    # a floor above everything in the call is not an open gate
    floored = Engine()
    loss = loss_of(scope="running", q_min=0.15)
    train(floored, loss, [calm])
    assert train(floored, loss, [calm])[0]["actor/sat/inert"] == 1


def test_steps_of_two_engines_do_not_mix():
    actor, other = Engine(), Engine()
    with scope.optimizer_step(actor) as outer:
        with scope.optimizer_step(actor) as again:
            assert again is outer
        with scope.optimizer_step(other) as inner:
            assert inner is not outer and scope.current() is inner
        assert scope.current() is outer
    assert scope.current() is None


def test_other_losses_leave_no_trace():
    engine = Engine()
    vanilla = get_policy_loss_fn("vanilla")
    config = ActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=StockPolicyLoss())
    train(engine, lambda *batch: vanilla(*batch, "token-mean", config), [batch_of(6)])
    assert engine not in scope._previous and engine.steps == 1


# --- few responses ---------------------------------------------------------------------------------------------


def test_few_sequences_follows_the_quantile():
    assert [few_sequences(q) for q in (0.5, 0.8, 0.9, 0.95, 0.99, 1.0)] == [4, 8, 16, 32, 160, 0]


@pytest.mark.parametrize(
    "name, rows, warned",
    [("micro_batch", 15, "mini_batch or running"), ("dp_group", 15, "all ranks together hold 16"), ("running", 7, "7")],
)
def test_a_scope_of_few_responses_is_warned_about_once(name, rows, warned, caplog):
    engine, loss = Engine(), loss_of("sat_gspo", scope=name)
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            train(engine, loss, [batch_of(seed, rows=rows)])
    found = [r.getMessage() for r in caplog.records if "plain GSPO" in r.getMessage()]
    assert len(found) == 1 and warned in found[0] and f"{rows} responses (scope {name})" in found[0]
    caplog.clear()
    once.forget()
    engine = Engine()
    with caplog.at_level(logging.WARNING):
        for seed in range(3):  # small calls, but running pools them
            parts = [batch_of(seed, rows=4) for _ in range(4)] if name == "running" else [batch_of(seed, rows=16)]
            train(engine, loss, parts)
    assert not [r for r in caplog.records if "plain GSPO" in r.getMessage()]


# --- the engine's part -----------------------------------------------------------------------------------------


def test_settings_are_found_in_verls_bound_loss():
    bound = partial(ppo_loss, config=actor_config("sat_gspo", quantile=0.8))
    assert sat_settings(bound)[0] == "sat_gspo" and sat_settings(bound)[1].quantile == 0.8
    assert sat_settings(partial(bound, dp_group=None))[0] == "sat_gspo"
    stock = ActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=StockPolicyLoss())
    assert sat_settings(partial(ppo_loss, config=stock)) is None
    assert sat_settings(partial(print, "x")) is None and sat_settings(print) is None and sat_settings(None) is None


def test_verls_registry_gives_our_engine_on_an_nvidia_gpu_and_verls_elsewhere(monkeypatch, caplog):
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    def engine(backend="fsdp2", model_type="language_model"):
        return EngineRegistry.get_engine_cls(model_type, backend)

    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia")
    assert engine("fsdp") is engine("fsdp2") is SATFSDPEngine  # by the plugin's hook on verl's own import
    assert engine(model_type="value_model") is not SATFSDPEngine
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "amd")
    assert engine() is FSDPEngineWithLMHead
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "npu")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "huawei")
    assert engine() is FSDPEngineWithLMHead
    # again, and where somebody was first
    register("cuda", "nvidia")
    monkeypatch.setitem(EngineRegistry._engines["language_model"]["fsdp2"], ("cuda", "nvidia"), FSDPEngineWithLMHead)
    with caplog.at_level(logging.WARNING):
        register("cuda", "nvidia")
    assert "FSDPEngineWithLMHead already" in caplog.text and "mini_batch" in caplog.text


# --- the driver's preflight ------------------------------------------------------------------------------------


def megatron(changes=None, loss="gspo"):
    config = job(f"+sat={loss}", name="ppo_megatron_trainer")
    base = {
        "trainer.v1.trainer_mode": "separate_async",
        "trainer.v1.separate_async.parameter_sync_step": 1,
        "data.train_batch_size": 32,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
        "actor_rollout_ref.rollout.n": 8,
    }
    return changed(config, {**base, **(changes or {})})


@pytest.mark.parametrize(
    "config, said",
    [
        (async_job("grpo"), "quantile over scope micro_batch (auto)"),
        (async_job("gspo"), "quantile over scope mini_batch (auto)"),
        (async_job("gspo", {SCOPE: "dp_group"}), "quantile over scope dp_group,"),
        (async_job("gspo", {"trainer.device": "npu"}), "quantile over scope running (auto)"),
        (megatron(), "quantile over scope running (auto)"),
    ],
)
def test_the_driver_says_which_scope_will_run(config, said):
    assert said in preflight.describe(config)
    q = changed(config, {"actor_rollout_ref.actor.policy_loss.sat.q": 0.1})
    assert "scope" not in preflight.describe(q)


def test_mini_batch_without_our_engine_is_an_error_at_start():
    assert SCOPE in errors(megatron({SCOPE: "mini_batch"}))
    assert f"set {SCOPE}=running" in texts(megatron({SCOPE: "mini_batch"}))
    assert SCOPE in errors(async_job("gspo", {SCOPE: "mini_batch", STRATEGY: "veomni"}))
    assert SCOPE in errors(async_job("gspo", {SCOPE: "mini_batch", "trainer.device": "npu"}))
    for strategy in ("fsdp", "fsdp2"):
        assert errors(async_job("gspo", {SCOPE: "mini_batch", STRATEGY: strategy})) == []
    for name in ("auto", "running", "dp_group", "micro_batch"):
        assert errors(megatron({SCOPE: name})) == []


@pytest.mark.parametrize("variable, value", [("VERL_ENGINE_VENDOR", "amd"), ("VERL_ENGINE_DEVICE", "npu")])
def test_the_engine_that_verl_is_told_to_take_decides(variable, value, monkeypatch):
    assert "mini_batch (auto)" in preflight.describe(async_job("gspo"))
    monkeypatch.setenv(variable, value)
    assert "running (auto)" in preflight.describe(async_job("gspo"))
    assert SCOPE in errors(async_job("gspo", {SCOPE: "mini_batch"}))


def test_dynamic_context_parallel_is_an_error_at_start():
    key = scope.DYNAMIC_CP_KEY
    for name in ("auto", "running", "dp_group"):
        assert key in errors(megatron({SCOPE: name, key: True}))
    assert errors(megatron({SCOPE: "micro_batch", key: True})) == []
    assert errors(megatron({key: True}, loss="grpo")) == []
    assert errors(megatron({key: True, "actor_rollout_ref.actor.policy_loss.sat.q": 0.1})) == []


def test_dp_group_of_one_rank_is_said():
    # the reference's layout: tensor parallel 4 on 4 GPUs
    four = {"trainer.n_gpus_per_node": 4, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 4}
    assert SCOPE in warnings(megatron({SCOPE: "dp_group", **four}))
    two = {"actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 2}
    assert "there is one" not in texts(megatron({SCOPE: "dp_group", **four, **two}))
    ulysses = {"trainer.n_gpus_per_node": 4, "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": 4}
    assert "there is one" in texts(async_job("grpo", {SCOPE: "dp_group", **ulysses}))


@pytest.mark.parametrize(
    "changes, key",
    [
        ({SCOPE: "micro_batch", preflight_scope.MICRO_BATCH_SIZE: 4}, SCOPE),
        ({SCOPE: "dp_group", preflight_scope.MICRO_BATCH_SIZE: 1, "trainer.n_gpus_per_node": 8}, SCOPE),
        ({preflight_scope.MINI_BATCH_SIZE: 2, "data.train_batch_size": 2}, preflight_scope.MINI_BATCH_SIZE),
        ({"actor_rollout_ref.actor.policy_loss.sat.quantile": 0.999}, preflight_scope.MINI_BATCH_SIZE),
    ],
)
def test_few_responses_are_said_at_start(changes, key):
    config = async_job("gspo", {"actor_rollout_ref.rollout.n": 4, **changes})
    assert key in warnings(config) and "plain GSPO" in texts(config)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {SCOPE: "micro_batch", preflight_scope.MICRO_BATCH_SIZE: 16},
        {SCOPE: "micro_batch", preflight_scope.MICRO_BATCH_SIZE: 4, "actor_rollout_ref.actor.use_dynamic_bsz": True},
        {SCOPE: "dp_group", preflight_scope.MICRO_BATCH_SIZE: 2, "trainer.n_gpus_per_node": 8},
        {SCOPE: "micro_batch", preflight_scope.MICRO_BATCH_SIZE: 4, "actor_rollout_ref.actor.policy_loss.sat.q": 0.1},
    ],
)
def test_enough_responses_are_not(changes):
    assert "plain GSPO" not in texts(async_job("gspo", {"actor_rollout_ref.rollout.n": 4, **changes}))


def test_token_level_needs_no_number_of_responses():
    assert "plain" not in texts(async_job("grpo", {preflight_scope.MICRO_BATCH_SIZE: 1}))
