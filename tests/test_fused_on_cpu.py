"""The fast path against the plain formula: same loss, gradient and metrics; same bits where nothing is contracted."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig

from verl_sat import fused, once, policy_loss
from verl_sat.config import SATPolicyLossConfig
from verl_sat.trust_region import GateLevel

VERLS = {"sat_grpo": "vanilla", "sat_gspo": "gspo"}
LOSSES = tuple(VERLS)


def config(name, sat=None, rows=4, **actor):
    result = ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=SATPolicyLossConfig(loss_mode=name, sat=sat or {}),
        **actor,
    )
    result.global_batch_info.update(dp_size=1, batch_num_tokens=50, global_batch_size=rows, loss_scale_factor=None)
    return result


def run(name, batch, actor, implementation, agg="token-mean", with_old=False):
    """(loss, gradients, metrics); the fast path must have been taken, or the plain formula, as asked."""
    old, log_prob, advantages, mask = batch
    log_prob = log_prob.clone().requires_grad_()
    old = old.clone().requires_grad_(with_old)
    taken = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_SAT_LOSS", implementation)
        for function in ("_fast_path", "_plain_formula"):
            original = getattr(policy_loss, function)

            def noted(call, level, _original=original, _name=function):
                result = _original(call, level)
                if result is not None:
                    taken.append(_name)
                return result

            patch.setattr(policy_loss, function, noted)
        loss, metrics = get_policy_loss_fn(name)(old, log_prob, advantages, mask, agg, actor)
    loss.backward()
    return loss.detach(), log_prob.grad, metrics, old.grad, taken


def assert_agree(name, batch, actor, agg="token-mean", dtype=torch.float32):
    fast, plain = (run(name, batch, actor, which, agg) for which in ("fast", "plain"))
    assert fast[4] == ["_fast_path"] and plain[4] == ["_plain_formula"]
    tolerance = dict(rtol=1e-12, atol=1e-13) if dtype == torch.float64 else dict(rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(fast[0], plain[0], **tolerance)
    torch.testing.assert_close(fast[1], plain[1], **tolerance)
    # A mean radius is eps * (1 - mean of 1 - c): rounding of the order of eps, which is up to 4 here.
    assert fast[2] == pytest.approx(plain[2], rel=tolerance["rtol"], abs=10 * tolerance["atol"])
    return fast


def batch_of(seed, rows=4, columns=12, noise=0.1, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, columns, generator=g, dtype=dtype) - 0.01
    offset = noise * torch.randn(rows, 1, generator=g, dtype=dtype)
    log_prob = old + offset + noise * torch.randn(rows, columns, generator=g, dtype=dtype)
    advantages = torch.randn(rows, columns, generator=g, dtype=dtype)
    advantages[torch.rand(rows, columns, generator=g) < 0.1] = 0.0
    mask = torch.arange(columns) < torch.randint(0, columns + 1, (rows, 1), generator=g)
    return old, log_prob, advantages, mask


@pytest.mark.parametrize("name", LOSSES)
def test_agrees_with_the_plain_formula(name):
    @settings(max_examples=80, deadline=None)
    @given(
        seed=st.integers(0, 10**6),
        kernel=st.sampled_from(["hill", "hill_excess", "inverse_power", "none"]),
        exponent=st.sampled_from([0.5, 1.0, 2.0, 3.7]),
        quantile=st.sampled_from([0.3, 0.7, 0.9, 1.0]),
        q=st.sampled_from([None, None, 0.0, 0.05, 3.0]),
        q_min=st.sampled_from([0.0, 0.03]),
        bound=st.sampled_from([None, 0.0, 0.5]),
        noise=st.sampled_from([0.0, 0.01, 0.1, 0.8]),
        radii=st.sampled_from([(0.2, 0.2), (3e-4, 4e-4), (0.0, 0.3), (0.9, 2.0), (1.5, 4.0)]),
        dtype=st.sampled_from([torch.float32, torch.float64]),
        agg=st.sampled_from(["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"]),
    )
    def check(seed, kernel, exponent, quantile, q, q_min, bound, noise, radii, dtype, agg):
        sat = dict(kernel=kernel, exponent=exponent, quantile=quantile, q=q, q_min=q_min, advantage_clip_high=bound)
        actor = config(name, sat, clip_ratio_low=radii[0], clip_ratio_high=radii[1], clip_ratio_c=1.7)
        assert_agree(name, batch_of(seed, noise=noise, dtype=dtype), actor, agg, dtype)

    check()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("rows, columns", [(3, 70_000), (40, 5_000), (1, 1), (200, 1)])
def test_blocks_join_without_a_seam(name, rows, columns):
    """More than a block, a row longer than a block, a last block that is shorter."""
    batch = batch_of(1, rows, columns)
    fast = assert_agree(name, batch, config(name, rows=rows))
    one_block = pytest.MonkeyPatch()
    with one_block.context() as patch:
        patch.setattr(fused, "CPU_BLOCK", 10**9)
        whole = run(name, batch, config(name, rows=rows), "fast")
    assert torch.equal(fast[0], whole[0]) and torch.equal(fast[1], whole[1])
    assert fast[2] == pytest.approx(whole[2], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("agg", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_to_the_bit_verls_without_contraction_also_at_ties(name, agg):
    """Ratios exactly on an endpoint, on the dual clip's, and a last bit to either side; advantages of every kind."""
    for endpoint in (0.8, 1.2, 3.0, 1.0):
        edge = torch.tensor(endpoint).log()
        steps = torch.stack([edge + k * torch.finfo(torch.float32).eps / 2 for k in range(-6, 7)])
        old = torch.zeros(2 * len(steps), 6) - 1.0
        log_prob = old + torch.cat([steps, steps]).unsqueeze(-1)
        advantages = torch.tensor([2.0, -2.0, 0.0, 1e-30, -1e-30, 0.3]).repeat(len(old), 1)
        mask = torch.ones_like(old, dtype=torch.bool)
        actor = config(name, dict(kernel="none"), rows=len(old))
        fast = run(name, (old, log_prob, advantages, mask), actor, "fast", agg)
        assert fast[4] == ["_fast_path"]
        x = log_prob.clone().requires_grad_()
        loss, metrics = get_policy_loss_fn(VERLS[name])(old, x, advantages, mask, agg, actor)
        loss.backward()
        assert torch.equal(loss.detach(), fast[0]) and torch.equal(x.grad, fast[1])
        assert {key: fast[2][key] for key in metrics} == metrics


def test_the_gradient_of_old_log_prob_is_the_plain_ones():
    """verl's vanilla lets it through; nobody trains it, but a loss that drops it differs from its reference."""
    batch = batch_of(3)
    fast, plain = (run("sat_grpo", batch, config("sat_grpo"), which, with_old=True) for which in ("fast", "plain"))
    torch.testing.assert_close(fast[3], plain[3], rtol=2e-6, atol=1e-8)
    assert fast[3].any() and run("sat_grpo", batch, config("sat_grpo"), "fast")[3] is None


@pytest.mark.parametrize("name", LOSSES)
def test_a_threshold_above_q_shuts_the_gate_up_to_it(name):
    """What a look ahead passes on: q for the kernel, the threshold for the gate."""
    batch = batch_of(4, rows=20, columns=30)
    mask = batch[3]
    first = fused.log_ratio(batch[1], batch[0], mask, name == "sat_gspo", policy_loss.MISSING_LOG_PROB)
    size = first.size if first.mean is None else first.mean.abs().unsqueeze(-1).expand_as(first.size)
    q = size[mask].median()
    numbers = fused.Settings(0.2, 0.2, None, "hill", 2.0, policy_loss.MISSING_LOG_PROB)
    terms = fused.token_terms if name == "sat_grpo" else fused.sequence_terms
    threshold = q * 1.3
    stale = terms(first, batch[2], GateLevel(q, threshold), numbers).sums["stale_frac"]
    assert stale == ((size > threshold) & mask).sum() < ((size > q) & mask).sum()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "spoil",
    ["nan log_prob", "inf old_log_prob", "nan advantage", "beyond the clamp", "missing", "nan in the padding"],
)
def test_what_it_does_not_take_goes_to_the_plain_formula_once(name, spoil, caplog):
    old, log_prob, advantages, mask = batch_of(5, rows=6)
    mask[0] = True
    mask[1] = False
    if spoil == "nan log_prob":
        log_prob[0, 0] = torch.nan
    elif spoil == "inf old_log_prob":
        old[0, 0] = -torch.inf
    elif spoil == "nan advantage":
        advantages[0, 0] = torch.nan
    elif spoil == "beyond the clamp":
        log_prob[0] = old[0] + 21
    elif spoil == "missing":
        old[0, 0], log_prob[0, 0] = 0.0, -7.0
    else:
        log_prob[1] = torch.nan
    batch, actor = (old, log_prob, advantages, mask), config(name, rows=6)
    once.forget()
    with caplog.at_level(logging.WARNING):
        fast, plain, _ = (run(name, batch, actor, which) for which in ("fast", "plain", "fast"))
    assert fast[4] == plain[4] == ["_plain_formula"]
    assert len([r for r in caplog.records if "a second time, by the plain formula" in r.getMessage()]) == 1
    assert torch.equal(fast[0].nan_to_num(7.0), plain[0].nan_to_num(7.0)) and fast[2] == plain[2]
    assert torch.equal(fast[1].nan_to_num(7.0), plain[1].nan_to_num(7.0))


@pytest.mark.parametrize("name", LOSSES)
def test_a_certain_token_stays_on_the_fast_path(name):
    """Old log-probs of exactly 0 are common and agreed with; only a contradicted one is a fill value."""
    old, log_prob, advantages, mask = batch_of(6)
    old[:, ::2] = 0.0
    log_prob[:, ::2] = -0.02
    log_prob[:, 1] = old[:, 1] - 5.0  # a steep drop at a token that was not certain
    old[0, 0] = 1e-7  # rounded up
    mask[0, 0] = True
    old[:, -1], mask[:, -1] = 1.0, False  # whatever the padding holds
    assert_agree(name, (old, log_prob, advantages, mask), config(name))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("radii", [(0.2, 1e9), (0.2, 5.0), (1e6, 0.2)])
def test_radii_that_switch_a_clip_off_keep_the_other_side_exact(name, radii):
    """`1 + eps - eps * (1 - c)` would cancel: such calls go to the plain formula."""
    d = torch.full((20, 1), 1e-6)
    d[-1] = -0.5
    old = torch.full((20, 1), -1.0)
    batch = (old, old + d, torch.ones(20, 1), torch.ones(20, 1, dtype=torch.bool))
    actor = config(name, rows=20, clip_ratio_low=radii[0], clip_ratio_high=radii[1])
    fast, plain = (run(name, batch, actor, which) for which in ("fast", "plain"))
    assert fast[4] == ["_plain_formula"] and torch.equal(fast[1], plain[1]) and fast[1][-1] != 0


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_an_infinite_advantage_is_counted_although_it_is_clipped(name, value):
    old, log_prob, advantages, mask = batch_of(12)
    mask[0, 0] = True
    advantages[0, 0] = value
    actor = config(name, dict(advantage_clip_low=-5, advantage_clip_high=5))
    fast, plain = (run(name, (old, log_prob, advantages, mask), actor, which) for which in ("fast", "plain"))
    assert fast[2] == plain[2] and fast[2]["actor/sat/nonfinite_frac"] > 0 and fast[0].isfinite()


def test_advantages_with_a_gradient_get_it(monkeypatch):
    monkeypatch.setenv("VERL_SAT_LOSS", "fast")
    old, log_prob, advantages, mask = batch_of(13)
    advantages.requires_grad_()
    get_policy_loss_fn("sat_grpo")(old, log_prob, advantages, mask, "token-mean", config("sat_grpo"))[0].backward()
    assert advantages.grad.any()


@pytest.mark.parametrize("name", LOSSES)
def test_a_second_derivative_is_refused_by_name_and_plain_has_one(name, monkeypatch):
    old, log_prob, advantages, mask = batch_of(7)
    for implementation in ("fast", "plain"):
        monkeypatch.setenv("VERL_SAT_LOSS", implementation)
        x = log_prob.clone().requires_grad_()
        loss, _ = get_policy_loss_fn(name)(old, x, advantages, mask, "token-mean", config(name))
        if implementation == "fast":
            with pytest.raises(RuntimeError, match="second derivative.*VERL_SAT_LOSS=plain"):
                torch.autograd.grad(loss, x, create_graph=True)
        else:
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            (second,) = torch.autograd.grad(gradient.sum(), x)
            assert second.any()


@pytest.mark.parametrize("name", LOSSES)
def test_inputs_are_left_as_they_were(name):
    batch = batch_of(8)
    copies = [x.clone() for x in batch]
    run(name, batch, config(name), "fast")
    assert all(torch.equal(x, copy) for x, copy in zip(batch, copies, strict=True))


@pytest.mark.parametrize("name", LOSSES)
def test_two_backwards_of_a_retained_graph_are_equal(name, monkeypatch):
    monkeypatch.setenv("VERL_SAT_LOSS", "fast")
    old, log_prob, advantages, mask = batch_of(9)
    x = log_prob.clone().requires_grad_()
    loss, _ = get_policy_loss_fn(name)(old, x, advantages, mask, "token-mean", config(name))
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * first)


@pytest.mark.parametrize("value", ["", "fast", "PLAIN", "slow"])
def test_the_switch_knows_two_words(value, monkeypatch):
    """A misspelt switch must not pass for the one that was meant."""
    monkeypatch.setenv("VERL_SAT_LOSS", value)
    arguments = (*batch_of(10), "token-mean", config("sat_grpo"))
    if value in ("", "fast"):
        get_policy_loss_fn("sat_grpo")(*arguments)
    else:
        with pytest.raises(ValueError, match="VERL_SAT_LOSS.*'fast' or 'plain'"):
            get_policy_loss_fn("sat_grpo")(*arguments)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("implementation", ["fast", "plain"])
def test_autocast_around_the_loss_changes_nothing(name, implementation):
    """verl calls the loss inside the model's autocast."""
    batch = batch_of(11, rows=20, columns=50)
    expected = run(name, batch, config(name), implementation)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(name, batch, config(name), implementation)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]) and found[2] == expected[2]


@pytest.mark.parametrize(
    "reason, sat, actor, weighted, dtype",
    [
        ("correction weights", {}, {}, True, torch.float32),
        ("advantage_clip_scope=stale", dict(advantage_clip_high=1, advantage_clip_scope="stale"), {}, False, None),
        ("a clip ratio beyond 4", {}, dict(clip_ratio_high=5.0), False, None),
        ("dtypes torch.float32, torch.float32, torch.float64", {}, {}, False, torch.float64),
    ],
)
def test_the_slower_formula_is_said_once_with_its_reason(reason, sat, actor, weighted, dtype, caplog, monkeypatch):
    monkeypatch.delenv("VERL_SAT_LOSS", raising=False)
    old, log_prob, advantages, mask = batch_of(14)
    advantages = advantages.to(dtype or torch.float32)
    weights = torch.ones_like(old) if weighted else None

    def warned():
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                settings = config("sat_grpo", sat, **actor)
                get_policy_loss_fn("sat_grpo")(old, log_prob, advantages, mask, "token-mean", settings, weights)
        return [r.getMessage() for r in caplog.records if "by the plain formula" in r.getMessage()]

    (message,) = warned()
    assert reason in message
    once.forget()
    monkeypatch.setenv("VERL_SAT_LOSS", "plain")  # asked for, so nothing to say
    assert warned() == []
