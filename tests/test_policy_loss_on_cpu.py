"""The losses through verl's registry, with verl's ActorConfig and its own losses beside them.

Covered: reference vectors with verl's aggregation; equality with vanilla / gspo to the last bit where nothing is
contracted; NaN, inf, masked garbage, empty batches, 16 bit; aggregation; the call signature; both batch layouts of
verl's worker; the number of device-to-host transfers. Not covered: the trust region itself
(test_trust_region_on_cpu.py), and the metrics' names and reduction (test_metrics_on_cpu.py).
"""

import logging
import math
import subprocess
import sys

import pytest
import sat_reference
import torch
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from verl_sat import metrics, once, order_statistic, policy_loss
from verl_sat.config import SATPolicyLossConfig
from verl_sat.metrics import METRIC_KEYS, SHARED_METRICS

VECTORS = sat_reference.load_vectors()
LOSSES = {"sat_grpo": "vanilla", "sat_gspo": "gspo"}
AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
OWN_AGG = {"sat_grpo": "token-mean", "sat_gspo": "seq-mean-token-mean"}


@pytest.fixture(autouse=True, params=["fast", "plain"])
def implementation(request, monkeypatch):
    """Every test of this file, for the fast path and for the plain formula."""
    monkeypatch.setenv("VERL_SAT_LOSS", request.param)
    return request.param


def actor_config(loss_mode="sat_grpo", *, sat=None, info=None, policy=None, **actor):
    """verl's real dataclass, with the plugin's block inside."""
    if policy is None:
        policy = SATPolicyLossConfig(loss_mode=loss_mode, sat=sat or {})
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy, **{"clip_ratio": 0.2, **actor}
    )
    config.global_batch_info.update(info or {})
    return config


def call(name, batch, config, agg="token-mean", weights=None, grad=True):
    """(loss, gradient, metrics) of a registered loss on (old_log_prob, log_prob, advantages, response_mask)."""
    old, log_prob, advantages, mask = batch
    log_prob = log_prob.detach().clone().requires_grad_()
    loss, values = get_policy_loss_fn(name)(
        old_log_prob=old,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode=agg,
        config=config,
        rollout_is_weights=weights,
    )
    loss.backward()
    return loss.detach(), log_prob.grad, values


def random_batch(seed=0, rows=24, columns=40, noise=0.1, dtype=torch.float32, mask_dtype=torch.bool):
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, columns, generator=g, dtype=dtype) - 0.01
    # per-response offsets, so that the sequence level has something to clip too
    offset = 1.5 * noise * torch.randn(rows, 1, generator=g, dtype=dtype)
    log_prob = old + offset + noise * torch.randn(rows, columns, generator=g, dtype=dtype)
    advantages = torch.randn(rows, 1, generator=g, dtype=dtype).expand(rows, columns).contiguous()
    lengths = torch.randint(1, columns + 1, (rows, 1), generator=g)
    mask = (torch.arange(columns) < lengths).to(mask_dtype)
    return old, log_prob, advantages, mask


def assert_same(result, expected, implementation):
    """To the last bit by the plain formula; to rounding where the fast path left only one of the two to it."""
    (loss, grad, values), (other_loss, other_grad, other_values) = result, expected
    if implementation == "plain":
        assert loss == other_loss and torch.equal(grad, other_grad) and values == other_values
        return
    torch.testing.assert_close(loss, other_loss, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(grad, other_grad, rtol=1e-6, atol=1e-8)
    assert values == pytest.approx(other_values, rel=1e-6, abs=1e-7)


def tokens(d, advantages=1.0, mask=None, dtype=torch.float32):
    """A batch from a list of rows of log-ratios; the old log-prob is -2."""
    d = torch.tensor(d, dtype=dtype)
    old = torch.full_like(d, -2.0)
    advantages = torch.as_tensor(advantages, dtype=dtype).expand_as(d).contiguous()
    return old, old + d, advantages, torch.ones_like(d, dtype=torch.bool) if mask is None else torch.tensor(mask) > 0


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.name.startswith("verl_sat") and r.levelno == logging.WARNING]


def assert_finite_metrics(values):
    assert tuple(values) == METRIC_KEYS
    assert all(type(v) is float and math.isfinite(v) for v in values.values()), values


# --- reference vectors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_vectors_through_the_registry(case, dtype):
    args, expect = case["args"], case["expect"]
    name = "sat_gspo" if args["level"] == "sequence" else "sat_grpo"
    config = actor_config(
        name,
        sat=dict(quantile=args["alpha"], kernel=sat_reference.KERNEL_OF_FORM[args["form"]], q=args["q"]),
        clip_ratio_low=args["el"],
        clip_ratio_high=args["eh"],
        clip_ratio_c=1e9 if args["dual"] is None else args["dual"],  # verl has no way to switch it off
        info=dict(batch_num_tokens=1, global_batch_size=1) if case["name"] == "all_masked" else None,
    )
    batch = [torch.tensor(case[k], dtype=dtype) for k in ("old_log_prob", "log_prob", "advantages", "mask")]
    loss, grad, values = call(name, batch, config, agg=args["agg"])

    # verl's seq-mean modes add 1e-8 to the length
    tolerance = 1e-6 if dtype == torch.float32 else 1e-8 if args["agg"] != "token-mean" else 1e-12
    wanted_grad = torch.tensor(expect["grad"], dtype=torch.float64)
    assert loss.item() == pytest.approx(expect["loss"], rel=tolerance, abs=tolerance)
    torch.testing.assert_close(grad.double(), wanted_grad, rtol=tolerance, atol=tolerance)
    measured = {
        "quantile": "q",
        "stale_frac": "gate_rate",
        "contraction_strongest": "min_contraction",
        "radius_low": "mean_lower_radius",
        "radius_high": "mean_upper_radius",
        "abs_log_ratio": "mean_abs_log_ratio",
    }
    if dtype == torch.float32 and case["name"] == "given_q":
        # |d| is 0.02 + 2e-17 and q 0.02: rounding the inputs to fp32 decides that token's gate the other way
        measured = {"quantile": "q", "abs_log_ratio": "mean_abs_log_ratio"}
    for ours, theirs in measured.items():
        assert values[f"actor/sat/{ours}"] == pytest.approx(expect[theirs], rel=tolerance, abs=tolerance), ours
    assert_finite_metrics(values)


# --- equality with verl -----------------------------------------------------------------------------------------


def assert_same_as_verl(name, batch, config, **kwargs):
    loss, grad, values = call(name, batch, config, **kwargs)
    verl_loss, verl_grad, verl_values = call(LOSSES[name], batch, config, **kwargs)
    assert loss.dtype == verl_loss.dtype and loss.item() == verl_loss.item()
    assert torch.equal(grad, verl_grad)
    assert {key: values[key] for key in SHARED_METRICS} == verl_values
    return loss, grad, values


@pytest.mark.parametrize("agg", AGG_MODES)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.int64])
def test_L15_without_staleness_the_loss_is_verls_to_the_bit(name, agg, mask_dtype):
    """Lag 0: old and current log-probs are the same numbers."""
    old, _, advantages, mask = random_batch(1, mask_dtype=mask_dtype)
    batch = (old, old.clone(), advantages, mask)
    _, grad, values = assert_same_as_verl(name, batch, actor_config(name), agg=agg)
    assert grad.any() and values["actor/sat/inert"] == 1 and values["actor/pg_clipfrac"] == 0


@pytest.mark.parametrize("sat", [dict(kernel="none"), dict(quantile=1.0), dict(q=30.0), dict(q=0.0), dict(q_min=30)])
@pytest.mark.parametrize("agg", AGG_MODES)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_L15_with_contraction_off_the_loss_is_verls_to_the_bit(name, agg, sat, seed):
    """Stale data, but nothing to contract: kernel none, quantile 1, an explicit q that no token reaches."""
    batch = random_batch(seed, noise=[0.2, 0.4, 2.0][seed], mask_dtype=[torch.bool, torch.float32, torch.int64][seed])
    info = [None, dict(batch_num_tokens=777, global_batch_size=31, dp_size=2), dict(loss_scale_factor=100)][seed]
    weights = None if seed == 0 else torch.rand(batch[0].shape, generator=torch.Generator().manual_seed(seed))
    radii = dict(clip_ratio_low=0.2, clip_ratio_high=0.28) if seed else {}
    config = actor_config(name, sat=sat, info=info, **radii)
    _, grad, values = assert_same_as_verl(name, batch, config, agg=agg, weights=weights)
    # not for want of anything to compare: something was clipped, something was not
    assert grad.any() and 0 < values["actor/pg_clipfrac"] < 1
    assert values["actor/sat/inert"] == 1 and values["actor/sat/intercepted_frac"] == 0


@pytest.mark.parametrize("name", LOSSES)
def test_with_contraction_the_loss_is_not_verls(name):
    batch = random_batch(0, rows=100, noise=0.06)
    config = actor_config(name)
    loss, grad, values = call(name, batch, config, agg=OWN_AGG[name])
    verl_loss, verl_grad, _ = call(LOSSES[name], batch, config, agg=OWN_AGG[name])
    assert loss != verl_loss and not torch.equal(grad, verl_grad)
    assert values["actor/sat/intercepted_frac"] > 0


@pytest.mark.parametrize("name", LOSSES)
def test_radii_fall_back_to_clip_ratio_as_in_verl(name):
    config = actor_config(name, sat=dict(kernel="none"), clip_ratio=0.07, clip_ratio_low=None, clip_ratio_high=None)
    _, _, values = assert_same_as_verl(name, random_batch(3), config)
    assert values["actor/sat/radius_low"] == values["actor/sat/radius_high"] == 0.07


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_that_of_a_plain_clip_with_the_effective_radii(name):
    """The logged eps_eff_low/high, put into verl's own loss, give SAT's gradient (fp64)."""
    batch = random_batch(5, rows=40, noise=0.04, dtype=torch.float64)
    _, grad, values = call(name, batch, actor_config(name), agg=OWN_AGG[name])
    low, high = values["actor/sat/eps_eff_low"], values["actor/sat/eps_eff_high"]
    assert low < 0.2 and high < 0.2 and values["actor/sat/inert"] == 0
    # the gate is strict, so a token exactly on it stays: a hair of room against rounding
    plain = actor_config(name, clip_ratio_low=low + 1e-12, clip_ratio_high=high + 1e-12)
    _, verl_grad, verl_values = call(LOSSES[name], batch, plain, agg=OWN_AGG[name])
    assert torch.equal(grad, verl_grad)
    assert values["actor/pg_clipfrac"] == pytest.approx(verl_values["actor/pg_clipfrac"], abs=1e-6)


# --- rows of the case list --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "d, advantage, clipped", [(2e-4, 1, 0), (2e-4, -1, 0), (5e-4, 1, 1), (5e-4, -1, 0), (-5e-4, 1, 0), (-5e-4, -1, 1)]
)
def test_L01_clip_fraction_by_side(d, advantage, clipped):
    config = actor_config("sat_gspo", clip_ratio_low=3e-4, clip_ratio_high=4e-4)
    _, _, values = call("sat_gspo", tokens([[d] * 100], advantage), config, agg="seq-mean-token-mean")
    assert values["actor/sat/clipfrac_high"] == (clipped if advantage > 0 else 0)
    assert values["actor/sat/clipfrac_low"] == (clipped if advantage < 0 else 0)
    assert values["actor/pg_clipfrac"] == clipped
    assert values["actor/sat/eps_eff_low"] == 3e-4 and values["actor/sat/eps_eff_high"] == 4e-4


@pytest.mark.parametrize("name", LOSSES)
def test_L03_micro_batches_add_up_to_the_mini_batch(name, caplog):
    """4 tokens of loss 1 and 1 token of loss 3: 7 / 5 = 1.4. A mean of the two means would be 2."""
    a, b = tokens([[0.0] * 4], -1.0), tokens([[0.0, 0.0, 0.0, 0.0]], -3.0, mask=[[1, 0, 0, 0]])
    config = actor_config(name, info=dict(batch_num_tokens=5))
    with caplog.at_level(logging.WARNING):
        with_counts = [call(name, batch, config)[0].item() for batch in (a, b)]
        assert sum(with_counts) == pytest.approx(1.4)
        assert not [w for w in warnings_of(caplog) if "batch_num_tokens" in w]
        without = [call(name, batch, actor_config(name))[0].item() for batch in (a, b)]
    assert sum(without) / 2 == pytest.approx(2.0)
    assert len([w for w in warnings_of(caplog) if "batch_num_tokens" in w]) == 1
    # several ranks and no global count: verl refuses
    with pytest.raises(ValueError, match="batch_num_tokens"):
        call(name, a, actor_config(name, info=dict(dp_size=2)))


@pytest.mark.parametrize("name", LOSSES)
def test_L04_scale_factor_makes_the_loss_independent_of_padding(name, caplog):
    rows = [[0.01, -0.02, 0.03], [0.02, 0.01, 0.0]]
    batches = [tokens([r + [0.0] * (w - 3) for r in rows], mask=[[1] * 3 + [0] * (w - 3)] * 2) for w in (8, 16)]
    mode = "seq-mean-token-sum-norm"
    with caplog.at_level(logging.WARNING):
        fixed = actor_config(name, loss_scale_factor=8)
        narrow, wide = (call(name, batch, fixed, agg=mode)[0].item() for batch in batches)
        assert narrow == pytest.approx(wide, rel=1e-6)
        assert not [w for w in warnings_of(caplog) if "loss_scale_factor" in w]
        narrow, wide = (call(name, batch, actor_config(name), agg=mode)[0].item() for batch in batches)
        assert wide == pytest.approx(narrow / 2, rel=1e-6)
    assert len([w for w in warnings_of(caplog) if "loss_scale_factor" in w and "padd" in w]) == 1


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("agg", AGG_MODES)
def test_padding_changes_nothing(name, agg):
    old, log_prob, advantages, mask = random_batch(7)
    config = actor_config(name, loss_scale_factor=100)
    loss, grad, values = call(name, (old, log_prob, advantages, mask), config, agg=agg)
    garbage = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, 0.0]).expand(24, 5)
    padded = [torch.cat([x, garbage], dim=1) for x in (old, log_prob, advantages)]
    padded.append(torch.cat([mask, torch.zeros(24, 5, dtype=torch.bool)], dim=1))
    # two whole rows of garbage as well
    row = torch.full((2, 45), float("nan"))
    padded = [torch.cat([x, row.to(x.dtype) if x.dtype != torch.bool else row > 0]) for x in padded]
    weights = torch.ones(26, 45)
    weights[:, 40:] = float("nan")
    wide_loss, wide_grad, wide_values = call(name, padded, config, agg=agg, weights=weights)
    torch.testing.assert_close(wide_loss, loss, rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(wide_grad[:24, :40], grad, rtol=1e-5, atol=1e-8)
    assert not wide_grad[:, 40:].any() and not wide_grad[24:].any()
    assert wide_values == pytest.approx(values, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_permutation_of_responses_changes_nothing(name):
    batch = random_batch(8, dtype=torch.float64)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    loss, grad, values = call(name, batch, actor_config(name), agg=OWN_AGG[name])
    shuffled = call(name, [x[order] for x in batch], actor_config(name), agg=OWN_AGG[name])
    torch.testing.assert_close(shuffled[0], loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(shuffled[1], grad[order], rtol=1e-12, atol=0)
    assert shuffled[2] == pytest.approx(values, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("extreme", [100.0, -100.0, float("inf"), -float("inf")])
def test_L05_extreme_log_probs_stay_finite(name, extreme):
    batch = tokens([[0.01, extreme, -0.02]] + [[0.01, 0.0, 0.02]] * 3, [[1.0], [-1.0], [1.0], [-1.0]])
    loss, grad, values = call(name, batch, actor_config(name))
    assert loss.isfinite() and grad.isfinite().all()
    assert_finite_metrics(values)
    assert values["actor/sat/quantile"] <= 20
    assert values["actor/sat/nonfinite_frac"] == (0 if math.isfinite(extreme) else pytest.approx(1 / 12))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("where", ["old_log_prob", "log_prob", "advantages", "rollout_is_weights"])
def test_L05_an_active_nan_is_loud_and_counted(name, where, caplog):
    old, log_prob, advantages, mask = random_batch(9)
    # a token that every fraction would count: clipped above, its advantage clipped
    log_prob[3, 0], advantages[3] = old[3, 0] + 1.0, 2.0
    config = actor_config(name, sat=dict(advantage_clip_high=0.5))
    weights = torch.ones_like(old)
    tensors = dict(old_log_prob=old, log_prob=log_prob, advantages=advantages, rollout_is_weights=weights)
    batch = (old, log_prob, advantages, mask)
    clean = call(name, batch, config, weights=weights)
    tensors[where][3, 0] = float("nan")
    with caplog.at_level(logging.WARNING):
        loss, _, values = call(name, batch, config, weights=weights)
        call(name, batch, config, weights=weights)
    assert loss.isnan() and clean[0].isfinite()
    assert_finite_metrics(values)
    assert values["actor/sat/nonfinite_frac"] == pytest.approx(1 / mask.sum().item())
    assert len([w for w in warnings_of(caplog) if "nonfinite_frac" in w]) == 1
    # metrics are those of the batch without the token; without the response where its mean is lost
    lost = mask.clone()
    if name == "sat_gspo" and where in ("old_log_prob", "log_prob"):
        lost[3] = False
    else:
        lost[3, 0] = False
    if name == "sat_grpo" or not lost[3].any():
        tensors[where][3, 0] = 1.0
        _, _, without = call(name, (old, log_prob, advantages, lost), config, weights=weights)
        without.pop("actor/sat/nonfinite_frac"), values.pop("actor/sat/nonfinite_frac")
        assert values == pytest.approx(without, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("agg", AGG_MODES)
def test_L06_masked_garbage_never_reaches_loss_or_gradient(name, agg, implementation):
    old, log_prob, advantages, mask = random_batch(10)
    config = actor_config(name, loss_scale_factor=40)
    clean = call(name, (old, log_prob, advantages, mask), config, agg=agg)
    for value in (float("nan"), float("inf"), -float("inf"), 100.0):
        dirty = [torch.where(mask, x, value) for x in (old, log_prob, advantages)]
        weights = torch.where(mask, torch.ones_like(old), value)
        loss, grad, values = call(name, (*dirty, mask), config, agg=agg, weights=weights)
        assert_same((loss, grad, values), clean, implementation)
        assert not grad[~mask].any()
        loss, grad, values = call(name, (*dirty, mask), config, agg=agg)
        assert_same((loss, grad, values), clean, implementation)
        assert not grad[~mask].any()


def test_L06_masked_overflow_has_gradient_zero():
    old, log_prob, advantages, _ = tokens([[0.0, 0.0, 100.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    loss, grad, _ = call("sat_grpo", (old, log_prob, advantages, mask), actor_config())
    assert loss.item() == -1.0 and grad.tolist() == [[-0.5, -0.5, 0.0]]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("agg", AGG_MODES)
@pytest.mark.parametrize("info", [dict(batch_num_tokens=10, global_batch_size=4), dict(batch_num_tokens=0), {}])
def test_L08_nothing_active_is_a_graph_connected_zero(name, agg, info):
    """Padding rows that verl adds itself; also with a global count of 0, and without any."""
    old, log_prob, advantages, _ = random_batch(11, rows=2, columns=3)
    config = actor_config(name, info={**info, "global_batch_size": info.get("global_batch_size", 0)} if info else None)
    loss, grad, values = call(name, (old, log_prob, advantages, torch.zeros(2, 3)), config, agg=agg)
    assert loss.item() == 0.0 and grad is not None and not grad.any()
    assert_finite_metrics(values)
    assert values["actor/sat/quantile"] == 0 and values["actor/sat/inert"] == 1
    assert values["actor/sat/eps_eff_low"] == values["actor/sat/radius_high"] == 0.2
    assert values["actor/sat/contraction_mean"] == values["actor/sat/contraction_strongest"] == 1


@pytest.mark.parametrize("name", LOSSES)
def test_A06_an_empty_batch_gives_defined_statistics(name):
    """Every sample was dropped and only padding is left: same keys, finite values, no update."""
    old, log_prob, advantages, _ = random_batch(12, rows=8)
    empty = torch.zeros_like(old, dtype=torch.bool)
    config = actor_config(name, info=dict(batch_num_tokens=0, global_batch_size=8, dp_size=1))
    loss, grad, values = call(name, (old, log_prob * float("nan"), advantages, empty), config)
    assert loss.item() == 0 and not grad.any()
    assert_finite_metrics(values)
    # a response length of 0, too
    none = [x[:, :0] for x in (old, log_prob, advantages, empty)]
    loss, _, values = call(name, none, config)
    assert loss.item() == 0
    assert_finite_metrics(values)


def test_L09_sequence_ratio_is_length_normalised():
    _, _, values = call("sat_gspo", tokens([[0.005] * 2000]), actor_config("sat_gspo"), agg="seq-mean-token-mean")
    assert values["actor/sat/quantile"] == pytest.approx(0.005, rel=1e-3)
    loss, _, _ = call("sat_gspo", tokens([[0.005] * 2000]), actor_config("sat_gspo"), agg="seq-mean-token-mean")
    assert loss.item() == pytest.approx(-1.005, abs=1e-4)  # the sum would give exp(10), clipped at 1.2


def test_L10_responses_weigh_equally_in_the_groups_mode(caplog):
    """Lengths 10 and 1000, same ratio and advantage: equal weight per response; token-mean honoured, one warning."""
    mask = [[1] * 10 + [0] * 990, [1] * 1000]
    batch = tokens([[0.01] * 1000] * 2, mask=mask)
    with caplog.at_level(logging.WARNING):
        _, grad, _ = call("sat_gspo", batch, actor_config("sat_gspo"), agg="seq-mean-token-mean")
        assert grad[0].sum().item() == pytest.approx(grad[1].sum().item(), rel=1e-4)
        assert not [w for w in warnings_of(caplog) if "responses no longer weigh equally" in w]
        for _ in range(2):
            _, grad, _ = call("sat_gspo", batch, actor_config("sat_gspo"), agg="token-mean")
    assert grad[1].sum().item() == pytest.approx(100 * grad[0].sum().item(), rel=1e-4)
    assert len([w for w in warnings_of(caplog) if "responses no longer weigh equally" in w]) == 1


def test_L12_dual_clip_bounds_the_loss_in_sat_grpo_only():
    batch = tokens([[math.log(50.0)]], -1.0)
    loss, grad, values = call("sat_grpo", batch, actor_config("sat_grpo", clip_ratio_c=3.0))
    assert loss.item() == 3.0 and not grad.any() and values["actor/pg_clipfrac_lower"] == 1
    loss, grad, values = call("sat_gspo", batch, actor_config("sat_gspo", clip_ratio_c=3.0))
    assert loss.item() == pytest.approx(50.0, rel=1e-5) and grad.any() and values["actor/pg_clipfrac_lower"] == 0
    # a contracted trust region does not loosen it
    stale = tokens([[math.log(50.0)] + [0.001] * 19], -1.0)
    _, grad, values = call("sat_grpo", stale, actor_config("sat_grpo"))
    assert values["actor/sat/stale_frac"] > 0 and grad[0, 0] == 0
    assert values["actor/pg_clipfrac_lower"] == pytest.approx(1 / 20)


@pytest.mark.parametrize("clip_ratio_c", [1.0, 0.5, None, float("nan")])
def test_dual_clip_out_of_range_is_refused(clip_ratio_c):
    with pytest.raises(ValueError, match="actor_rollout_ref.actor.clip_ratio_c"):
        call("sat_grpo", tokens([[0.1]]), actor_config("sat_grpo", clip_ratio_c=clip_ratio_c))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("agg", AGG_MODES)
def test_L13_correction_weights_multiply_the_loss(name, agg, implementation):
    batch = random_batch(13)
    loss, grad, values = call(name, batch, actor_config(name), agg=agg)
    half = call(name, batch, actor_config(name), agg=agg, weights=torch.full_like(batch[0], 0.5))
    assert_same(half, (loss / 2, grad / 2, values), implementation)


def advantages_of_group(size, successes):
    """verl's own GRPO advantages of one prompt's group."""
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    rewards = torch.zeros(size, 4)
    rewards[:successes, -1] = 1.0
    advantages, _ = compute_grpo_outcome_advantage(
        token_level_rewards=rewards, response_mask=torch.ones(size, 4), index=torch.zeros(size).numpy()
    )
    return advantages


@pytest.mark.parametrize("name", LOSSES)
def test_L17_advantage_clip_bounds_a_single_success_of_64(name):
    advantages = advantages_of_group(64, 1)
    assert advantages[0, 0].item() == pytest.approx(7.87, abs=0.01)
    old = torch.full_like(advantages, -1.0)
    batch = (old, old.clone(), advantages, torch.ones_like(advantages))
    config = actor_config(name, sat=dict(advantage_clip_low=-5, advantage_clip_high=5))
    _, grad, values = call(name, batch, config)
    assert grad[0, 0].item() == pytest.approx(-5.0 / 256) and values["actor/sat/advantage_clipfrac"] == 1 / 64
    assert torch.equal(grad[1:], call(name, batch, actor_config(name))[1][1:])
    # off: verl's own loss; and a group of 8 is below the bound
    assert_same_as_verl(name, batch, actor_config(name))
    small = advantages_of_group(8, 1)
    assert small[0, 0].item() == pytest.approx(2.47, abs=0.01)
    batch = (old[:8], old[:8].clone(), small, torch.ones_like(small))
    _, _, values = assert_same_as_verl(name, batch, config)
    assert values["actor/sat/advantage_clipfrac"] == 0


def test_L17_advantage_clip_on_a_plain_loss_and_on_stale_tokens(caplog):
    batch = tokens([[0.001] * 18 + [0.05, -0.05]], 8.0)
    plain = actor_config(sat=dict(kernel="none", advantage_clip_high=5.0))
    loss, _, values = call("sat_grpo", batch, plain)
    literal = call("vanilla", (batch[0], batch[1], batch[2].clamp(max=5.0), batch[3]), plain)
    assert loss == literal[0] and values["actor/sat/advantage_clipfrac"] == 1
    stale = actor_config(sat=dict(advantage_clip_high=5.0, advantage_clip_scope="stale"))
    _, grad, values = call("sat_grpo", batch, stale)
    assert values["actor/sat/advantage_clipfrac"] == values["actor/sat/stale_frac"] == pytest.approx(2 / 20)
    assert grad[0, -1].item() == pytest.approx(-5.0 * math.exp(-0.05) / 20, rel=1e-5)
    assert grad[0, 0].item() == pytest.approx(-8.0 * math.exp(0.001) / 20, rel=1e-5)
    with caplog.at_level(logging.WARNING):
        sat = dict(kernel="none", advantage_clip_high=5.0, advantage_clip_scope="stale")
        assert call("sat_grpo", batch, actor_config(sat=sat))[2]["actor/sat/advantage_clipfrac"] == 0
    assert [w for w in warnings_of(caplog) if "clips no advantage" in w]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("agg", AGG_MODES)
@pytest.mark.parametrize("columns", [slice(0, 40), slice(3, 9)], ids=["response", "run"])
def test_L18_unrecorded_old_log_probs_are_reported_and_left_out(name, agg, columns, caplog, implementation):
    """True log-prob about -10.8, stored 0.0: a ratio of 2e-5 that is nobody's staleness."""
    old, log_prob, advantages, mask = random_batch(14)
    mask[2] = True
    log_prob[2, columns] = -0.5  # easy tokens of the same unrecorded run
    log_prob[2, columns.start] = -10.8
    old[2, columns] = 0.0
    config = actor_config(name, loss_scale_factor=40)
    with caplog.at_level(logging.WARNING):
        loss, grad, values = call(name, (old, log_prob, advantages, mask), config, agg=agg)
        call(name, (old, log_prob, advantages, mask), config, agg=agg)
    lost = columns.stop - columns.start
    assert values["actor/sat/missing_log_prob_frac"] == pytest.approx(lost / mask.sum().item())
    assert len([w for w in warnings_of(caplog) if "calculate_log_probs" in w]) == 1
    assert not grad[2, columns].any()
    without = mask.clone()
    without[2, columns] = False
    literal = call(name, (old, log_prob, advantages, without), config, agg=agg)
    values.pop("actor/sat/missing_log_prob_frac"), literal[2].pop("actor/sat/missing_log_prob_frac")
    assert_same((loss, grad, values), literal, implementation)


@pytest.mark.parametrize("name", LOSSES)
def test_L18_a_certain_token_is_not_a_missing_one(name):
    """Engines do report exactly 0.0 for tokens of probability 1; the current policy then agrees."""
    old, log_prob, advantages, mask = random_batch(15)
    old[:, ::3] = 0.0
    log_prob[:, ::3] = -0.01
    _, _, values = call(name, (old, log_prob, advantages, mask), actor_config(name))
    assert values["actor/sat/missing_log_prob_frac"] == 0
    assert_same_as_verl(name, (old, log_prob, advantages, mask), actor_config(name, sat=dict(kernel="none")))


def test_L18_shape_gaps_are_an_error():
    old, log_prob, advantages, mask = random_batch(16)
    with pytest.raises(ValueError, match=r"old_log_prob \(24, 39\).*log_prob \(24, 40\)"):
        call("sat_grpo", (old[:, :39], log_prob, advantages, mask), actor_config())
    with pytest.raises(ValueError, match=r"old_log_prob \(1, 40\)"):
        call("sat_grpo", (old[:1], log_prob, advantages, mask), actor_config())


@pytest.mark.parametrize("name", LOSSES)
def test_P04_further_keywords_are_ignored_and_required_ones_named(name):
    old, log_prob, advantages, mask = random_batch(17)
    kwargs = dict(old_log_prob=old, log_prob=log_prob, advantages=advantages, response_mask=mask)
    loss_fn, config = get_policy_loss_fn(name), actor_config(name)
    loss, values = loss_fn(**kwargs, loss_agg_mode="token-mean", config=config)
    again, more = loss_fn(**kwargs, loss_agg_mode="token-mean", config=config, rollout_log_probs=old, foo=object())
    assert loss == again and values == more
    for missing in kwargs:
        rest = {key: value for key, value in kwargs.items() if key != missing}
        with pytest.raises(TypeError, match=f"'{missing}'"):
            loss_fn(**rest, config=config)
        with pytest.raises(ValueError, match=f"^{missing} is required"):
            loss_fn(**rest, **{missing: None}, config=config)
    with pytest.raises(ValueError, match="config is required"):
        loss_fn(**kwargs)
    with pytest.raises(ValueError, match="clip_ratio_low"):
        loss_fn(**kwargs, config=actor_config(name, clip_ratio_low=-0.1))
    with pytest.raises(ValueError, match="loss_agg_mode"):
        loss_fn(**kwargs, loss_agg_mode="token-median", config=config)


def test_stock_policy_loss_config_gives_the_papers_defaults():
    """The one-flag start: loss_mode alone, verl's own dataclass."""
    batch = random_batch(18)
    stock = actor_config(policy=PolicyLossConfig(loss_mode="sat_grpo"))
    assert call("sat_grpo", batch, stock)[2] == call("sat_grpo", batch, actor_config("sat_grpo"))[2]


@pytest.mark.parametrize("name", LOSSES)
def test_q_and_q_min_reach_the_gate(name):
    batch = random_batch(19)
    plain = call(name, batch, actor_config(name))[2]["actor/sat/quantile"]
    given = call(name, batch, actor_config(name, sat=dict(q=0.05)))[2]
    assert given["actor/sat/quantile"] == pytest.approx(0.05)
    floor = call(name, batch, actor_config(name, sat=dict(q_min=plain * 1.5)))[2]
    assert floor["actor/sat/quantile"] == pytest.approx(plain * 1.5)
    assert floor["actor/sat/stale_frac"] < given["actor/sat/stale_frac"]
    both = call(name, batch, actor_config(name, sat=dict(q=0.01, q_min=0.04)))[2]
    assert both["actor/sat/quantile"] == pytest.approx(0.04)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_computed_in_fp32_with_one_warning(name, dtype, caplog):
    batch = random_batch(20)
    low = [x.to(dtype) if x.dtype == torch.float32 else x for x in batch]
    with caplog.at_level(logging.WARNING):
        loss, grad, values = call(name, low, actor_config(name))
        call(name, low, actor_config(name))
    same = call(name, [x.float() if x.is_floating_point() else x for x in low], actor_config(name))
    assert loss == same[0] and loss.dtype == torch.float32 and values == same[2]
    assert grad.dtype == dtype and torch.equal(grad, same[1].to(dtype))
    assert len([w for w in warnings_of(caplog) if str(dtype) in w]) == 1
    # a 16-bit mask cannot count past 256 (bf16) or 2048
    wide = random_batch(21, rows=4, columns=2600, mask_dtype=dtype)
    for agg in AGG_MODES:
        reference = call(name, (*wide[:3], wide[3].bool()), actor_config(name), agg=agg)
        assert call(name, wide, actor_config(name), agg=agg)[0] == reference[0]


@pytest.mark.parametrize("name", LOSSES)
def test_fp64_stays_fp64(name):
    loss, grad, _ = call(name, random_batch(22, dtype=torch.float64), actor_config(name))
    assert loss.dtype == grad.dtype == torch.float64


def test_few_responses_at_sequence_level_are_warned_about_once(caplog):
    """Section 4 of the paper leaves the scope open; with few responses a sequence-level gate opens for nobody."""

    def warned(rows, name="sat_gspo", **sat):
        once.forget()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                values = call(name, random_batch(23, rows=rows), actor_config(name, sat=sat), agg=OWN_AGG[name])[2]
        return len([w for w in warnings_of(caplog) if "ppo_micro_batch_size_per_gpu" in w]), values

    count, values = warned(1)
    assert count == 1 and values["actor/sat/stale_frac"] == 0 and values["actor/sat/inert"] == 1
    assert warned(8)[0] == 1
    assert warned(16)[0] == 0
    assert warned(8, q=0.1)[0] == warned(8, kernel="none")[0] == warned(8, quantile=1)[0] == 0
    assert warned(8, name="sat_grpo")[0] == 0
    # padding rows are no responses, and only padding is no reason to warn
    once.forget()
    caplog.clear()
    old, log_prob, advantages, mask = random_batch(23, rows=20)
    call("sat_gspo", (old, log_prob, advantages, mask & False), actor_config("sat_gspo"), agg="seq-mean-token-mean")
    assert not [w for w in warnings_of(caplog) if "ppo_micro_batch_size_per_gpu" in w]
    mask[10:] = False
    call("sat_gspo", (old, log_prob, advantages, mask), actor_config("sat_gspo"), agg="seq-mean-token-mean")
    assert [w for w in warnings_of(caplog) if "10 responses" in w]


def test_C08_radii_of_plain_gspo_habits_are_inert():
    """3e-4 / 4e-4: PPO clips before the gate opens, so contraction changes nothing; 0.2 is the paper's setting."""
    batch = random_batch(24, rows=32, noise=0.02)
    tiny = actor_config("sat_gspo", clip_ratio_low=3e-4, clip_ratio_high=4e-4)
    _, grad, values = call("sat_gspo", batch, tiny, agg="seq-mean-token-mean")
    assert values["actor/sat/inert"] == 1 and values["actor/sat/stale_frac"] > 0
    assert values["actor/sat/eps_eff_low"] == 3e-4 and values["actor/sat/eps_eff_high"] == 4e-4
    assert torch.equal(grad, call("gspo", batch, tiny, agg="seq-mean-token-mean")[1]) and grad.any()
    _, _, values = call("sat_gspo", batch, actor_config("sat_gspo"), agg="seq-mean-token-mean")
    assert values["actor/sat/inert"] == 0 and values["actor/sat/eps_eff_low"] < 0.2


@pytest.mark.parametrize("name", LOSSES)
def test_P05_staleness_is_seen_without_any_further_field(name):
    """A batch of lag 0 and lag 8 side by side: the loss reads it from the log-probs that verl does pass."""
    batch = random_batch(25, rows=32, noise=0.0)
    stale_rows = torch.arange(32) % 8 == 7
    batch[1][stale_rows] += 0.1
    config = actor_config(name, sat=dict(quantile=0.7))
    # rounding of log_prob - old_log_prob is not staleness: that is what q_min is for
    config = actor_config(name, sat=dict(quantile=0.5, q_min=1e-4))
    _, _, values = call(name, batch, config, agg=OWN_AGG[name])
    stale = stale_rows.unsqueeze(-1) & batch[3]
    assert values["actor/sat/stale_frac"] == pytest.approx((stale.sum() / batch[3].sum()).item()) and stale.any()
    assert values["actor/sat/abs_log_ratio"] == pytest.approx(0.1 * values["actor/sat/stale_frac"], rel=1e-3)


# --- verl's worker ----------------------------------------------------------------------------------------------


def worker_batch(batch, nested):
    """(model_output, data) as verl's engine hands them to ppo_loss: jagged in V1, padded in the legacy layout."""
    old, log_prob, advantages, mask = batch
    lengths = mask.sum(-1).tolist()
    prompt = 3

    def jagged(rows):
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    # model output: one log-prob per token of prompt + response, shifted left by one
    output = [torch.cat([torch.zeros(prompt - 1), log_prob[b, :n], torch.zeros(1)]) for b, n in enumerate(lengths)]
    fields = dict(response_mask=mask, old_log_probs=old, advantages=advantages)
    if nested:
        data = {key: jagged([x[b, :n] for b, n in enumerate(lengths)]) for key, x in fields.items()}
        data["prompts"] = jagged([torch.ones(prompt, dtype=torch.long) for _ in lengths])
        data["responses"] = jagged([torch.ones(n, dtype=torch.long) for n in lengths])
    else:
        data = dict(fields)
        data["prompts"] = torch.ones(len(lengths), prompt, dtype=torch.long)
        data["responses"] = torch.ones_like(mask, dtype=torch.long)
        data["attention_mask"] = torch.cat([torch.ones(len(lengths), prompt), mask], dim=1).long()
    data = TensorDict(data, batch_size=[len(lengths)])
    counts = dict(dp_size=1, batch_num_tokens=sum(lengths), global_batch_size=len(lengths))
    for key, value in counts.items():
        tu.assign_non_tensor_data(data, key, value)
    return {"log_probs": jagged(output)}, data


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("nested", [True, False])
def test_A14_both_batch_layouts_of_verls_worker_give_the_same_loss(name, nested):
    batch = random_batch(26, columns=12)
    config = actor_config(name, loss_agg_mode=OWN_AGG[name])
    model_output, data = worker_batch(batch, nested)
    loss, values = ppo_loss(config=config, model_output=model_output, data=data)
    direct, _, direct_values = call(name, batch, config, agg=OWN_AGG[name])
    torch.testing.assert_close(loss, direct, rtol=1e-6, atol=0)
    for key in METRIC_KEYS:
        assert isinstance(values[key], Metric) and values[key].aggregation == AggregationType.MEAN
        assert values[key].aggregate() == pytest.approx(direct_values[key], rel=1e-5, abs=1e-7)
    assert direct_values["actor/sat/stale_frac"] > 0


# --- transfers --------------------------------------------------------------------------------------------------


class CountHostReads(TorchDispatchMode):
    """Counts the operators that read a value on the host."""

    def __init__(self):
        super().__init__()
        self.reads = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"):
            self.reads.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sat", [{}, dict(advantage_clip_high=1, advantage_clip_scope="stale"), dict(q=0.1, q_min=0.2)])
def test_M08_one_device_to_host_transfer_per_call(name, sat, weighted, monkeypatch):
    """On the path of an accelerator: on a CPU, where reading is free, the quantile reads."""
    monkeypatch.setattr(order_statistic, "reads_are_free", lambda tensor: False)
    copies = []
    for method in ("tolist", "cpu", "item", "numpy", "__float__", "__int__", "__bool__", "__index__"):
        original = getattr(torch.Tensor, method)

        def counted(self, *args, _name=method, _original=original, **kwargs):
            copies.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, method, counted)
    old, log_prob, advantages, mask = random_batch(27)
    config = actor_config(name, sat=sat, info=dict(batch_num_tokens=100, global_batch_size=24))
    with CountHostReads() as mode:
        get_policy_loss_fn(name)(
            old, log_prob.requires_grad_(), advantages, mask, "token-mean", config, old.exp() if weighted else None
        )
    assert copies == ["tolist"] and mode.reads == []
    # the counters do count: verl's own loss reads three values
    copies.clear()
    with CountHostReads() as mode:
        get_policy_loss_fn(LOSSES[name])(old, log_prob, advantages, mask, "token-mean", config)
    assert copies == ["item"] * 3 and len(mode.reads) == 3


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("agg", AGG_MODES)
def test_M08_nothing_but_the_transfer_needs_a_value(name, agg, monkeypatch):
    """On the meta device every other read would raise."""

    def no_values(values, sums=None, count=None):
        values = {**values, **(sums or {})}
        assert all(v.is_meta and v.dim() == 0 for v in values.values()) and (not sums or count.is_meta)
        return dict.fromkeys(values, 0.0)

    monkeypatch.setattr(policy_loss, "to_host", no_values)
    batch = [x.to("meta") for x in random_batch(28)]
    for sat, weights in (
        (dict(advantage_clip_low=-1, advantage_clip_scope="stale"), torch.ones(24, 40, device="meta")),
        (dict(advantage_clip_low=-1), None),
        (dict(kernel="inverse_power"), None),
    ):
        loss, values = get_policy_loss_fn(name)(*batch, agg, actor_config(name, sat=sat), rollout_is_weights=weights)
        assert loss.is_meta and tuple(values) == METRIC_KEYS


def test_M08_to_host_is_exact_for_fp32_and_fp64():
    values = {"a": torch.tensor(0.1), "b": torch.tensor(True), "c": torch.tensor(3)}
    assert metrics.to_host(values) == {"a": torch.tensor(0.1).item(), "b": 1.0, "c": 3.0}
    values["d"] = torch.tensor(0.1, dtype=torch.float64)
    assert metrics.to_host(values)["d"] == 0.1


# --- imports ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["config", "policy_loss"])
def test_any_module_may_be_imported_before_verl(module):
    """Importing verl loads the plugin, which imports the losses: no order may leave it with half a module."""
    code = (
        f"import verl_sat.{module}\n"
        "from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as registry\n"
        "from verl_sat import policy_loss\n"
        "assert registry['sat_grpo'] is policy_loss.compute_policy_loss_sat_grpo\n"
        "assert registry['sat_gspo'] is policy_loss.compute_policy_loss_sat_gspo\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "ERROR" not in done.stderr, done.stderr


@pytest.mark.parametrize("module", ["policy_loss", "metrics", "trust_region", "advantage"])
def test_the_method_does_not_import_verl(module):
    code = f"import sys, verl_sat.{module}; assert 'verl' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


# --- documentation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("lr, updates", [(40.0, 1), (0.0, 4), (40.0, 4)])
def test_D01_when_a_clip_fraction_of_zero_is_right(name, lr, updates):
    """One update per batch: 0. Four at learning rate 0: 0. Four at a real one: 0 first, then what the data says."""
    torch.manual_seed(0)
    logits = torch.randn(16, 10, requires_grad=True)
    actions = torch.distributions.Categorical(logits=logits.detach()).sample((30,)).T  # (16, 30)
    old = logits.log_softmax(-1).gather(1, actions).detach()
    advantages, mask = torch.randn(16, 1).expand(16, 30).contiguous(), torch.ones(16, 30)
    optimizer, fractions = torch.optim.SGD([logits], lr=lr), []
    for _ in range(updates):
        log_prob = logits.log_softmax(-1).gather(1, actions)
        loss, values = get_policy_loss_fn(name)(old, log_prob, advantages, mask, OWN_AGG[name], actor_config(name))
        fractions.append(values["actor/pg_clipfrac"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert fractions[0] == 0
    assert any(fractions) == (lr > 0 and updates > 1), fractions


def test_reference_aggregation_is_verls():
    """The helper of the vector tests against verl's agg_loss."""
    values, mask = torch.randn(5, 6, dtype=torch.float64), torch.rand(5, 6) < 0.7
    for mode in ("token-mean", "seq-mean-token-mean"):
        literal = sat_reference.aggregate(values.tolist(), mask.tolist(), mode)
        assert agg_loss(values, mask, mode).item() == pytest.approx(literal, rel=1e-7)


def test_a_nan_advantage_in_a_stale_response_is_left_out_of_the_metrics():
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    old, mask = torch.full((20, 4), -1.0), torch.ones(20, 4)
    log_prob = old + torch.arange(20).unsqueeze(-1) * 1e-3  # the last two responses are beyond the gate
    advantages = torch.ones(20, 4)
    advantages[19, 0] = torch.nan
    loss, metrics = policy_loss.compute_policy_loss_sat_gspo(
        old_log_prob=old, log_prob=log_prob, advantages=advantages, response_mask=mask, config=config
    )
    assert loss.isnan()
    assert metrics["actor/sat/nonfinite_frac"] == pytest.approx(1 / 80)
    # The ceil(0.9 * 79) = 72nd token is the last of the 18th response: 4 + 3 tokens of the last two are stale.
    assert metrics["actor/sat/stale_frac"] == pytest.approx(7 / 79)
