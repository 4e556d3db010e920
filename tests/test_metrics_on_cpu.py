"""Metric names, their reduction by verl's own reducers, and what each says.

Covered: the key lint, verl's two reducers by substring, weighting, extremes, padding rows, both modes of the ratio.
Not covered: the number of transfers (test_policy_loss_on_cpu.py).
"""

import math

import pytest
import sat_reference
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.v1.utils import MetricsAggregator
from verl.utils.metric import AggregationType, Metric, reduce_metrics
from verl.workers.config import ActorConfig

from verl_sat import metrics
from verl_sat.config import SATPolicyLossConfig
from verl_sat.metrics import METRIC_KEYS, PREFIX, SAT_METRICS, SHARED_METRICS


def measure(name, d, advantages=1.0, mask=None, log_prob=-2.0, actor=None, **sat):
    """Metrics of a registered loss for rows of log-ratios."""
    d = torch.tensor(d, dtype=torch.float64)
    mask = torch.ones_like(d) if mask is None else torch.tensor(mask, dtype=torch.float64)
    advantages = torch.as_tensor(advantages, dtype=torch.float64).expand_as(d)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=SATPolicyLossConfig(loss_mode=name, sat=sat),
        **(actor or {}),
    )
    current = torch.full_like(d, log_prob)
    agg = "token-mean" if name == "sat_grpo" else "seq-mean-token-mean"
    return get_policy_loss_fn(name)(current - d, current, advantages, mask, agg, config)[1]


def through_verl(micro_batches):
    """As verl's worker reduces the metrics of one optimizer step."""
    wrapped = [Metric.from_dict(values, aggregation=AggregationType.MEAN) for values in micro_batches]
    joined = wrapped[0]
    for other in wrapped[1:]:
        for key, value in other.items():
            joined[key].append(value)
    return {key: value.aggregate() for key, value in joined.items()}


def test_M03_no_key_picks_a_reduction_by_accident():
    assert set(SHARED_METRICS) == {"actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl"}
    assert METRIC_KEYS == SHARED_METRICS + tuple(PREFIX + name for name in SAT_METRICS)
    assert len(set(METRIC_KEYS)) == len(METRIC_KEYS)
    for key in METRIC_KEYS:
        assert not any(word in key for word in ("min", "max", "sum", "total")), key
        assert key.startswith("actor/")


def test_M03_both_of_verls_reducers_average_every_key():
    low, high = dict.fromkeys(METRIC_KEYS, 0.1), dict.fromkeys(METRIC_KEYS, 0.9)
    reduced = reduce_metrics({key: [low[key], high[key]] for key in METRIC_KEYS})
    assert reduced == pytest.approx(dict.fromkeys(METRIC_KEYS, 0.5))
    aggregator = MetricsAggregator()
    for values in (low, high):
        aggregator.add_step_metrics(values, sample_count=1)
    aggregated = aggregator.get_aggregated_metrics()
    assert {key: aggregated[key] for key in METRIC_KEYS} == pytest.approx(dict.fromkeys(METRIC_KEYS, 0.5))
    # the lint has a reason: a key with "min" inside is not averaged
    assert reduce_metrics({"actor/minibatch_frac": [0.1, 0.9]})["actor/minibatch_frac"] == 0.1


def test_every_metric_of_the_specification_is_there_with_a_description():
    assert set(SAT_METRICS) >= {
        "quantile",
        "stale_frac",
        "radius_low",
        "radius_high",
        "eps_eff_low",
        "eps_eff_high",
        "inert",
        "contraction_mean",
        "contraction_strongest",
        "abs_log_ratio",
        "clipfrac_high",
        "clipfrac_low",
        "intercepted_frac",
        "advantage_clipfrac",
        "nonfinite_frac",
    }
    assert all(SAT_METRICS.values())


@pytest.mark.parametrize("name", ["sat_grpo", "sat_gspo"])
def test_metrics_are_those_of_the_token_by_token_reference(name):
    generator = torch.Generator().manual_seed(3)
    d = (0.1 * torch.randn(20, 6, generator=generator, dtype=torch.float64)).tolist()
    advantages = torch.randn(20, 6, generator=generator, dtype=torch.float64).tolist()
    mask = (torch.rand(20, 6, generator=generator) < 0.8).double().tolist()
    rule = dict(low=0.1, high=0.15, level=0.7, dual=1.05 if name == "sat_grpo" else None)
    values = measure(
        name,
        d,
        advantages,
        mask,
        actor=dict(clip_ratio_low=0.1, clip_ratio_high=0.15, clip_ratio_c=1.05),
        quantile=0.7,
    )
    log_prob = [[-2.0] * 6 for _ in range(20)]
    old = [[-2.0 - x for x in row] for row in d]
    ours = sat_reference.sat(log_prob, old, advantages, mask, sequence_level=name == "sat_gspo", **rule)
    ppo = sat_reference.sat(log_prob, old, advantages, mask, sequence_level=name == "sat_gspo", kernel="none", **rule)
    active = [(b, t) for b in range(20) for t in range(6) if mask[b][t]]

    def mean(function):
        return sum(float(function(b, t)) for b, t in active) / len(active)

    contraction, clipped = ours["contraction"], ours["clipped"]
    expected = {
        "actor/pg_clipfrac": mean(lambda b, t: clipped[b][t]),
        "actor/pg_clipfrac_lower": mean(lambda b, t: ours["dual_clipped"][b][t]),
        "actor/ppo_kl": mean(lambda b, t: -d[b][t]),
        "actor/sat/quantile": ours["q"],
        "actor/sat/stale_frac": mean(lambda b, t: contraction[b][t] < 1),
        "actor/sat/radius_low": mean(lambda b, t: 1 - ours["lower"][b][t]),
        "actor/sat/radius_high": mean(lambda b, t: ours["upper"][b][t] - 1),
        "actor/sat/contraction_mean": mean(lambda b, t: contraction[b][t]),
        "actor/sat/contraction_strongest": min(contraction[b][t] for b, t in active),
        "actor/sat/abs_log_ratio": mean(lambda b, t: abs(d[b][t])),
        "actor/sat/clipfrac_high": mean(lambda b, t: clipped[b][t] and advantages[b][t] > 0),
        "actor/sat/clipfrac_low": mean(lambda b, t: clipped[b][t] and advantages[b][t] < 0),
        "actor/sat/intercepted_frac": mean(lambda b, t: clipped[b][t] and not ppo["clipped"][b][t]),
    }
    assert all(expected.values()) or name == "sat_gspo", expected  # a zero would be a weak test
    assert {key: values[key] for key in expected} == pytest.approx(expected, rel=1e-7, abs=1e-9)


def test_M01_weighting_is_a_mean_of_micro_batch_means_and_said_so():
    """10 tokens of which 40 % are clipped, 1 token of which 100 % are: verl logs 0.70, pooled it is 0.4545."""
    a = measure("sat_grpo", [[0.5] * 4 + [0.0] * 6], quantile=1)
    b = measure("sat_grpo", [[0.5]], quantile=1)
    pooled = measure("sat_grpo", [[0.5] * 4 + [0.0] * 6 + [0.5]], quantile=1)
    assert (a["actor/pg_clipfrac"], b["actor/pg_clipfrac"]) == (pytest.approx(0.4), pytest.approx(1.0))
    assert pooled["actor/pg_clipfrac"] == pytest.approx(0.4545, abs=1e-4)
    assert through_verl([a, b])["actor/pg_clipfrac"] == pytest.approx(0.70)
    assert "0.70" in metrics.__doc__ and "0.4545" in metrics.__doc__


def test_M04_an_extreme_is_not_called_one():
    """Two micro-batches with their own strongest contraction: verl averages them, and the name does not deny it."""
    a = measure("sat_grpo", [[0.01] * 9 + [0.02]])
    b = measure("sat_grpo", [[0.01] * 9 + [0.07]])
    strongest = [values["actor/sat/contraction_strongest"] for values in (a, b)]
    assert strongest == [pytest.approx(1 / 5), pytest.approx(1 / 50)]
    assert through_verl([a, b])["actor/sat/contraction_strongest"] == pytest.approx(sum(strongest) / 2)
    assert "mean of extremes" in SAT_METRICS["contraction_strongest"]
    assert not [key for key in METRIC_KEYS if "max" in key or "min" in key]


@pytest.mark.parametrize("name", ["sat_grpo", "sat_gspo"])
def test_M06_padding_rows_do_not_dilute(name):
    """3 responses clipped entirely and one fully masked row: 1.0, not 0.75."""
    values = measure(name, [[0.5, 0.5]] * 3 + [[0.0, 0.0]], mask=[[1, 1]] * 3 + [[0, 0]])
    assert values["actor/pg_clipfrac"] == pytest.approx(1.0) and values["actor/sat/clipfrac_high"] == pytest.approx(1.0)
    assert values["actor/sat/abs_log_ratio"] == pytest.approx(0.5)
    assert values["actor/ppo_kl"] == pytest.approx(-0.5)


@pytest.mark.parametrize("name", ["sat_grpo", "sat_gspo"])
def test_M07_the_ratio_statistics_are_there_in_both_modes(name):
    """Bypass: old is the engine's log-prob, 0.3 off. Decoupled: old is the trainer's own, no distance at all."""
    bypass, decoupled = measure(name, [[0.3, -0.3]]), measure(name, [[0.0, 0.0]])
    assert bypass.keys() == decoupled.keys()
    assert bypass["actor/sat/abs_log_ratio"] == pytest.approx(0.3)
    assert decoupled["actor/sat/abs_log_ratio"] == 0
    assert "old_log_prob" in metrics.__doc__ and "bypass" in metrics.__doc__ and "decoupled" in metrics.__doc__


@pytest.mark.parametrize(
    "d, actor, inert",
    [
        ([[0.01] * 9 + [0.02]], {}, 0),
        ([[0.01] * 10], {}, 1),  # ties: nothing above the gate
        ([[0.0] * 9 + [0.02]], {}, 1),  # q = 0
        ([[0.19] * 9 + [0.3]], {}, 0),  # between log(1.2) = 0.182 and -log(0.8) = 0.223: the lower side still acts
        ([[0.23] * 9 + [0.3]], {}, 1),  # beyond both: stale, but PPO clipped it already
        ([[0.001] * 9 + [0.002]], dict(clip_ratio_low=3e-4, clip_ratio_high=4e-4), 1),
    ],
)
def test_inert_and_effective_radii(d, actor, inert):
    values = measure("sat_grpo", d, actor=actor)
    assert values["actor/sat/inert"] == inert
    low, high = actor.get("clip_ratio_low", 0.2), actor.get("clip_ratio_high", 0.2)
    nominal = (values["actor/sat/eps_eff_low"], values["actor/sat/eps_eff_high"]) == (low, high)
    assert nominal == bool(inert)
    assert values["actor/sat/eps_eff_low"] <= low and values["actor/sat/eps_eff_high"] <= high


def test_small_radii_keep_their_digits_in_fp32():
    """1 - (1 - 3e-4) has an error of 1e-4 of its value in fp32; the metric is not computed that way."""
    d = torch.tensor([[0.0] * 8 + [0.001, -0.002]])
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=3e-4,
        clip_ratio_high=4e-4,
        policy_loss=SATPolicyLossConfig(loss_mode="sat_grpo", sat=dict(q=0.0005)),
    )
    current = torch.full_like(d, -2.0)
    values = get_policy_loss_fn("sat_grpo")(current - d, current, d, torch.ones_like(d), "token-mean", config)[1]
    assert values["actor/sat/radius_low"] == pytest.approx(3e-4 * (0.9 + 0.1 / 17), rel=1e-4)
    assert values["actor/sat/radius_high"] == pytest.approx(4e-4 * (0.9 + 0.1 / 5), rel=1e-4)
    assert all(type(v) is float and math.isfinite(v) for v in values.values())
