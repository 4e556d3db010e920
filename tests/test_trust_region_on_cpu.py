"""The trust region against reference vectors, a token-by-token reference, and the claims made for it.

Covered: numbers of tests/data/vectors.json (all cases, the micro-batch split, the table of effective radii), the
properties of Proposition 4.1 and the equivalence with a plain clip, dtypes, absence of host copies.
Not covered: verl's signature, aggregation and metrics (test_policy_loss_on_cpu.py).
"""

import ast
import math
import pathlib

import pytest
import sat_reference
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import verl_sat
from verl_sat import trust_region as tr

VECTORS = sat_reference.load_vectors()
KERNELS = ("hill", "hill_excess", "inverse_power", "none")


def run(
    case_inputs, *, dtype=torch.float64, sequence_level=False, level=0.9, q=None, low=0.2, high=0.2, dual=None, **kernel
):
    """All steps of the module in order, as the losses do it, on (log_prob, old_log_prob, advantages, mask) lists."""
    log_prob, old, adv, mask = (torch.tensor(x, dtype=dtype) for x in case_inputs)
    log_prob.requires_grad_()
    mask = mask.bool()
    log_ratio = tr.token_log_ratio(log_prob, old, mask)
    if sequence_level:
        mean = tr.mean_log_ratio(log_ratio, mask)
        ratio = tr.straight_through_ratio(log_ratio, mean)
        d = torch.where(mask, mean.detach().clamp(*tr.SEQUENCE_LOG_RATIO_LIMITS).unsqueeze(-1), 0.0)
    else:
        clamped = log_ratio.clamp(-tr.LOG_RATIO_LIMIT, tr.LOG_RATIO_LIMIT)
        ratio, d = clamped.exp(), clamped.detach()
    q = tr.inverse_cdf_quantile(d.abs(), mask, level) if q is None else torch.tensor(q, dtype=dtype)
    region = tr.sat_trust_region(d, q, clip_ratio_low=low, clip_ratio_high=high, **kernel)
    out = tr.surrogate(ratio, torch.where(mask, adv, 0.0), region.lower, region.upper, dual)
    return log_prob, mask, d, q, region, out


def mean_of(values, mask, mode):
    """Literal aggregation over active tokens; 0 for none."""
    if mode == "token-mean":
        return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)
    lengths = mask.sum(-1)
    rows = torch.where(mask, values, 0.0).sum(-1) / lengths.clamp(min=1)
    return rows.sum() / (lengths > 0).sum().clamp(min=1)


# --- reference vectors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_vectors(case, dtype, tolerance):
    args, expect = case["args"], case["expect"]
    log_prob, mask, d, q, region, out = run(
        [case[key] for key in ("log_prob", "old_log_prob", "advantages", "mask")],
        dtype=dtype,
        sequence_level=args["level"] == "sequence",
        level=args["alpha"],
        q=args["q"],
        low=args["el"],
        high=args["eh"],
        dual=args["dual"],
        kernel=sat_reference.KERNEL_OF_FORM[args["form"]],
    )
    loss = mean_of(out.loss, mask, args["agg"])
    loss.backward()

    def close(value, key, sure=True):
        wanted = torch.tensor(expect[key], dtype=torch.float64)
        value = torch.where(torch.as_tensor(sure), value.detach().double(), wanted)
        # rtol too: losses near 100 occur
        torch.testing.assert_close(value, wanted, rtol=tolerance, atol=tolerance, msg=lambda m: f"{key}: {m}")

    # given_q has |d| = 0.02 + 2e-17 against q = 0.02: in fp32 the inputs decide the gate the other way
    exact = torch.tensor(case["log_prob"]).double() - torch.tensor(case["old_log_prob"]).double()
    sure = dtype == torch.float64 or case["name"] != "given_q" or ((exact.abs() - expect["q"]).abs() > 1e-6)
    close(q, "q")
    close(loss, "loss")
    close(log_prob.grad, "grad")
    close(region.contraction, "contraction", sure)
    close(region.lower, "lower_bound", sure)
    close(region.upper, "upper_bound", sure)
    if sure is True:
        close(mean_of(region.stale.to(dtype), mask, "token-mean"), "gate_rate")
    assert out.loss.dtype == region.lower.dtype == q.dtype == dtype


def test_micro_batch_split():
    split = VECTORS["micro_batch_split"]
    d = torch.tensor(split["d"], dtype=torch.float64)
    old = torch.full_like(d, split["old_log_prob"])

    def gradient(rows, q):
        log_prob = (old + d)[rows].requires_grad_()
        mask = torch.ones_like(log_prob, dtype=torch.bool)
        log_ratio = tr.token_log_ratio(log_prob, old[rows], mask)
        own_q = tr.inverse_cdf_quantile(log_ratio.abs(), mask, split["alpha"])
        region = tr.sat_trust_region(
            log_ratio.detach(), own_q if q is None else q, clip_ratio_low=0.2, clip_ratio_high=0.2
        )
        advantages = torch.full_like(log_prob, split["advantages"])
        out = tr.surrogate(log_ratio.exp(), advantages, region.lower, region.upper)
        (out.loss.sum() / d.numel()).backward()
        return own_q, log_prob.grad

    def same(value, wanted):
        torch.testing.assert_close(value, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)

    q, grad = gradient(slice(0, 2), None)
    same(q, split["q_global"])
    same(grad, split["grad_full"])
    # A given q makes the gradient independent of the split; each part's own q does not.
    parts = [gradient(slice(i, i + 1), q) for i in range(2)]
    same(torch.cat([g for _, g in parts]), split["grad_parts_with_global_q"])
    own = [gradient(slice(i, i + 1), None) for i in range(2)]
    same(torch.stack([q for q, _ in own]), split["q_own"])
    same(torch.cat([g for _, g in own]), split["grad_parts_with_own_q"])
    assert not torch.equal(torch.cat([g for _, g in own]), grad)


@pytest.mark.parametrize("row", VECTORS["eps_eff_table"], ids=lambda row: f"{row['form']}-{row['q']}")
def test_effective_radii_table(row):
    low, high = tr.effective_radii(
        row["q"],
        clip_ratio_low=row["eps_low"],
        clip_ratio_high=row["eps_high"],
        kernel=sat_reference.KERNEL_OF_FORM[row["form"]],
    )
    assert low == pytest.approx(row["eps_eff_low"], abs=1e-12)
    assert high == pytest.approx(row["eps_eff_high"], abs=1e-12)


def test_effective_radii_at_the_edges():
    radii = dict(clip_ratio_low=0.2, clip_ratio_high=0.28)
    assert tr.effective_radii(0.0, **radii) == (0.2, 0.28)  # gate shut
    assert tr.effective_radii(0.3, **radii) == (0.2, 0.28)  # PPO clips first on both sides
    assert tr.effective_radii(0.01, kernel="none", **radii) == (0.2, 0.28)
    low, high = tr.effective_radii(0.23, **radii)  # between -log(0.8) = 0.223 and log(1.28) = 0.247
    assert low == 0.2 and high == pytest.approx(math.expm1(0.23), abs=1e-12)
    # a power beyond a float is full contraction, and a lower radius of 1 or more has no log radius
    low, high = tr.effective_radii(1e-30, clip_ratio_low=1.5, clip_ratio_high=0.2, exponent=12.0)
    assert 0 <= low < 1e-17 and 0 <= high < 1e-17
    low, _ = tr.effective_radii(0.5, clip_ratio_low=1.5, clip_ratio_high=0.2, kernel="hill_excess")
    assert 1 - math.exp(-0.5) < low < 1.5


# --- properties -------------------------------------------------------------------------------------------------


@st.composite
def batches(draw, width=32):
    """(log_prob, old_log_prob, advantages, mask): up to 3 x 7 tokens, ties, zeros, long tails, empty rows."""
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    scale = draw(st.sampled_from([1e-3, 0.03, 0.3, 3.0]))
    small = st.floats(-1, 1, width=width)

    def matrix(elements):
        return [[draw(elements) for _ in range(columns)] for _ in range(rows)]

    old = matrix(st.floats(-3, -0.5, width=width))
    d = matrix(st.one_of(small.map(lambda x: x * scale), st.sampled_from([0.0, 0.1, -0.1, 0.19, -0.21, 25.0, -25.0])))
    log_prob = [[o + x for o, x in zip(*pair, strict=True)] for pair in zip(old, d, strict=True)]
    advantages = matrix(st.one_of(st.sampled_from([0.0, 1.0, -1.0]), st.floats(-3, 3, width=width)))
    mask = matrix(st.sampled_from([1.0, 1.0, 1.0, 0.0]))
    return log_prob, old, advantages, mask


RULES = st.fixed_dictionaries(
    {
        "level": st.sampled_from([0.07, 0.3, 0.5, 0.7, 0.9, 1.0]),
        "kernel": st.sampled_from(KERNELS),
        "exponent": st.sampled_from([0.5, 1.0, 2.0, 5.0]),
        "low": st.sampled_from([3e-4, 0.1, 0.2]),
        "high": st.sampled_from([4e-4, 0.2, 0.28]),
        "dual": st.sampled_from([None, 3.0]),
        "q": st.sampled_from([None, None, 0.0, 0.02, 1.0]),
        "sequence_level": st.booleans(),
    }
)
DTYPES = st.sampled_from([torch.float32, torch.float64])


@settings(max_examples=80, deadline=None)
@given(batches(), RULES)
def test_agrees_with_the_token_by_token_reference(batch, rule):
    log_prob, mask, d, q, region, out = run(batch, **rule)
    wanted = sat_reference.sat(*batch, **rule)
    torch.where(mask, out.loss, 0.0).sum().backward()
    for name, value in {
        "q": q,
        "contraction": region.contraction,
        "lower": region.lower,
        "upper": region.upper,
        "loss": torch.where(mask, out.loss, 0.0).detach(),
    }.items():
        torch.testing.assert_close(value, torch.tensor(wanted[name], dtype=torch.float64), rtol=1e-9, atol=1e-9)
    # Gradients and flags jump where a ratio sits on an endpoint (then PPO and SAT agree on the loss): leave those out.
    ratio = d.exp()
    edge = (
        ((ratio - region.lower).abs() < 1e-9)
        | ((ratio - region.upper).abs() < 1e-9)
        | ((d.abs() - q).abs() < 1e-12)
        | (d.abs() >= tr.LOG_RATIO_LIMIT)
        | ((ratio - 10.0) >= math.exp(10) - 10 - 1e-6)
    )
    sure = mask & ~edge & (torch.tensor(batch[2], dtype=torch.float64) != 0)
    grad = torch.tensor(wanted["grad"], dtype=torch.float64)
    torch.testing.assert_close(log_prob.grad[sure], grad[sure], rtol=1e-9, atol=1e-12)
    assert torch.equal(out.clipped[sure], torch.tensor(wanted["clipped"])[sure])
    assert torch.equal(out.dual_clipped[sure], torch.tensor(wanted["dual_clipped"])[sure])
    assert not log_prob.grad[~mask].any()


def plain_ppo(batch, rule, dtype, low=None, high=None):
    """The same tokens under plain PPO (kernel none), with given radii."""
    rule = {**rule, "kernel": "none", "low": rule["low"] if low is None else low}
    rule["high"] = rule["high"] if high is None else high
    log_prob, mask, _, _, _, out = run(batch, dtype=dtype, **rule)
    torch.where(mask, out.loss, 0.0).sum().backward()
    return torch.where(mask, out.loss, 0.0).detach(), log_prob.grad


def sat_against_ppo(batch, rule, dtype):
    log_prob, mask, d, q, region, out = run(batch, dtype=dtype, **rule)
    torch.where(mask, out.loss, 0.0).sum().backward()
    loss, grad = torch.where(mask, out.loss, 0.0).detach(), log_prob.grad
    return mask, d, q, region, loss, grad, *plain_ppo(batch, rule, dtype)


@settings(max_examples=80, deadline=None)
@given(batches(), RULES, DTYPES)
def test_containment(batch, rule, dtype):
    _, mask, _, _, region, _ = run(batch, dtype=dtype, **rule)
    # in the dtype's own arithmetic, to the bit
    low = torch.tensor(1 - rule["low"], dtype=dtype)
    high = torch.tensor(1 + rule["high"], dtype=dtype)
    assert ((low <= region.lower) & (region.lower <= 1) & (1 <= region.upper) & (region.upper <= high)).all()
    assert ((0 <= region.contraction) & (region.contraction <= 1)).all()
    # only one endpoint of a token ever moves
    assert not ((region.lower > low) & (region.upper < high)).any()
    assert not region.stale[~mask].any()


@settings(max_examples=80, deadline=None)
@given(batches(), RULES, DTYPES)
def test_pessimism(batch, rule, dtype):
    """The surrogate (minus the loss) is never above PPO's."""
    _, _, _, _, loss, _, ppo_loss, _ = sat_against_ppo(batch, rule, dtype)
    assert (-loss <= -ppo_loss).all()


@settings(max_examples=80, deadline=None)
@given(batches(), RULES, DTYPES)
def test_pull_back_tokens_are_ppos_to_the_bit(batch, rule, dtype):
    """d * A < 0: the update brings the token back, so nothing changes."""
    mask, d, _, _, loss, grad, ppo_loss, ppo_grad = sat_against_ppo(batch, rule, dtype)
    pull_back = d * torch.tensor(batch[2], dtype=dtype) < 0
    assert torch.equal(loss[pull_back], ppo_loss[pull_back])
    assert torch.equal(grad[pull_back], ppo_grad[pull_back])


@settings(max_examples=80, deadline=None)
@given(batches(), RULES, DTYPES)
def test_gradient_is_ppos_or_zero(batch, rule, dtype):
    *_, grad, _, ppo_grad = sat_against_ppo(batch, rule, dtype)
    assert ((grad == ppo_grad) | (grad == 0)).all()


@settings(max_examples=120, deadline=None)
@given(batches(), RULES)
def test_sat_and_ppo_differ_exactly_on_the_set_of_eq_21(batch, rule):
    mask, d, _, region, _, grad, _, ppo_grad = sat_against_ppo(batch, rule, torch.float64)
    advantages, ratio = torch.tensor(batch[2], dtype=torch.float64), d.exp()
    c, low, high = region.contraction, rule["low"], rule["high"]
    band = torch.where(
        advantages > 0,
        (1 + high * c < ratio) & (ratio < 1 + high),
        (advantages < 0) & (1 - low < ratio) & (ratio < 1 - low * c),
    )
    edges = [1 + high * c, 1 + torch.full_like(c, high), 1 - low * c, 1 - torch.full_like(c, low)]
    assume(not any(((ratio - edge).abs() < 1e-12)[mask & region.stale].any() for edge in edges))
    assume(not (advantages.abs() * ratio < 1e-300)[mask & (advantages != 0)].any())  # gradients that round to 0
    assert torch.equal((grad != ppo_grad) & mask, band & mask)


@settings(max_examples=150, deadline=None)
@given(batches(), RULES)
def test_gradient_equals_a_plain_clip_with_the_effective_radii(batch, rule):
    mask, d, q, region, _, grad, _, ppo_grad = sat_against_ppo(batch, rule, torch.float64)
    radii = dict(clip_ratio_low=rule["low"], clip_ratio_high=rule["high"])
    any_stale = bool(region.stale.any())
    low, high = rule["low"], rule["high"]
    inert = tr.is_inert(float(q), any_stale, low, high)
    if not inert:
        low, high = tr.effective_radii(float(q), kernel=rule["kernel"], exponent=rule["exponent"], **radii)
    else:
        assert torch.equal(grad, ppo_grad)
    ratio = d.exp()
    # tokens on an effective endpoint: at the gate it is a tie that rounding decides
    assume(not ((ratio - 1 - high).abs() < 1e-11)[mask & (d > 0)].any())
    assume(not ((1 - low - ratio).abs() < 1e-11)[mask & (d < 0)].any())
    _, equivalent = plain_ppo(batch, rule, torch.float64, low=low, high=high)
    assert torch.equal(grad, equivalent)


def test_equivalence_is_not_vacuous():
    """A batch where SAT, PPO and the equivalent clip are three different things in loss, two in gradient."""
    torch.manual_seed(0)
    d = 0.05 * torch.randn(64, 64, dtype=torch.float64)
    old = torch.full_like(d, -1.0)
    batch = [x.tolist() for x in (old + d, old, torch.randn_like(d), torch.ones_like(d))]
    rule = dict(level=0.9, kernel="hill", exponent=2.0, low=0.2, high=0.2, dual=None, q=None, sequence_level=False)
    _, _, q, region, _, grad, _, ppo_grad = sat_against_ppo(batch, rule, torch.float64)
    low, high = tr.effective_radii(float(q), clip_ratio_low=0.2, clip_ratio_high=0.2)
    assert not tr.is_inert(float(q), True, 0.2, 0.2) and max(low, high) < 0.15
    _, equivalent = plain_ppo(batch, rule, torch.float64, low=low, high=high)
    assert torch.equal(grad, equivalent)
    assert (grad != ppo_grad).sum() > 50


@settings(max_examples=100, deadline=None)
@given(
    q=st.floats(1e-6, 0.5),
    kernel=st.sampled_from(["hill", "hill_excess", "inverse_power"]),
    exponent=st.floats(0.2, 6),
    low=st.floats(1e-4, 0.9),
    high=st.floats(1e-4, 2.0),
)
def test_effective_radius_is_where_the_contracted_clip_starts(q, kernel, exponent, low, high):
    """Just inside the radius a ratio is not clipped, just outside it is: by the literal gate and kernel."""
    eff_low, eff_high = tr.effective_radii(
        q, clip_ratio_low=low, clip_ratio_high=high, kernel=kernel, exponent=exponent
    )
    assert 0 < eff_low <= low and 0 < eff_high <= high

    def clipped(d):
        c = sat_reference.psi(abs(d), q, kernel, exponent) if abs(d) > q else 1.0
        return math.exp(d) > 1 + high * c if d > 0 else math.exp(d) < 1 - low * c

    x_low, x_high = -math.log1p(-eff_low), math.log1p(eff_high)
    assert clipped(x_high * 1.0001) and not clipped(x_high * 0.9999)
    assert clipped(-x_low * 1.0001) and not clipped(-x_low * 0.9999)


@settings(max_examples=50, deadline=None)
@given(batches(), RULES, st.randoms())
def test_permutation_and_padding_change_nothing(batch, rule, random):
    _, mask, _, q, region, out = run(batch, **rule)
    rows = list(range(len(batch[0])))
    random.shuffle(rows)
    # three more columns and one more row of masked garbage
    padded = []
    for matrix, garbage in zip(batch, (float("nan"), float("inf"), float("-inf"), 0.0), strict=True):
        width = len(matrix[0]) + 3
        padded.append([matrix[b] + [garbage] * 3 for b in rows] + [[garbage] * width])
    log_prob, padded_mask, _, padded_q, padded_region, padded_out = run(padded, **rule)
    # Not to the bit: sums, exp and pow round differently in a vector's body and in its tail.
    torch.testing.assert_close(padded_q, q, rtol=1e-12, atol=1e-15)
    columns = len(batch[0][0])
    sure = mask[rows] & (rule["sequence_level"] is False)  # a mean that rounds differently may pass the strict gate
    assert torch.equal(padded_region.stale[:-1, :columns][sure], region.stale[rows][sure])
    for value, padded_value in (region.contraction, padded_region.contraction), (out.loss, padded_out.loss):
        torch.testing.assert_close(padded_value[:-1, :columns][sure], value[rows][sure], rtol=1e-12, atol=1e-15)
    assert not padded_region.stale[~padded_mask].any()
    torch.where(padded_mask, padded_out.loss, 0.0).sum().backward()
    assert log_prob.grad.isfinite().all() and not log_prob.grad[~padded_mask].any()


# --- the quantile -----------------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 20, width=32), st.integers(0, 4)), min_size=1, max_size=30),
    st.sampled_from([0.001, 0.01, 0.07, 0.1, 0.29, 1 / 3, 0.5, 0.57, 0.7, 0.9, 0.95, 0.999, 1.0]),
    DTYPES,
)
def test_quantile_is_the_inverse_cdf(observations, level, dtype):
    values = torch.tensor([v for v, _ in observations], dtype=dtype)
    counts = torch.tensor([n for _, n in observations])
    repeated = [v for v, n in observations for _ in range(n)]
    q = tr.inverse_cdf_quantile(values, counts, level)
    assert q.dtype == dtype and q.dim() == 0
    assert q.item() == sat_reference.quantile(repeated, 1 / 3 if level == 1 / 3 else level)
    if repeated:
        assert q.item() in repeated
        # at most a share 1 - level lies strictly above
        assert sum(v > q.item() for v in repeated) <= (1 - level) * len(repeated) + 1e-9


@pytest.mark.parametrize("level", [0.07, 0.29, 0.57, 0.58, 0.7, 0.9, 0.14, 0.28, 0.55, 0.56])
@pytest.mark.parametrize("n", [10, 100, 1000])
def test_quantile_rank_is_not_moved_by_rounding(level, n):
    """0.07 * 100 is 7.000000000000001 as a float: the 7th smallest is meant, not the 8th."""
    values = torch.randperm(n).double() + 1
    rank = -(-round(level * 100) * n // 100)
    assert tr.inverse_cdf_quantile(values, torch.ones(n, dtype=torch.bool), level).item() == rank


def test_quantile_of_nothing_is_zero_and_of_one_is_itself():
    values = torch.tensor([[0.3, float("nan")]])
    assert tr.inverse_cdf_quantile(values, torch.zeros(1, 2, dtype=torch.bool), 0.9).item() == 0
    assert tr.inverse_cdf_quantile(values[:, :0], torch.zeros(1, 0, dtype=torch.bool), 0.9).item() == 0
    assert tr.inverse_cdf_quantile(values, torch.tensor([[True, False]]), 0.9).item() == pytest.approx(0.3)


@pytest.mark.long
def test_M05_quantile_of_17_million_tokens():
    """torch.quantile refuses more than 2**24 values on the oldest supported torch."""
    n = 17_000_000
    values = torch.arange(n, dtype=torch.float32).flip(0) / n
    q = tr.inverse_cdf_quantile(values, torch.ones(n, dtype=torch.bool), 0.9)
    assert q.item() == pytest.approx(0.9, abs=1e-6)


def test_M05_torch_quantile_is_not_called():
    sources = sorted(pathlib.Path(verl_sat.__file__).parent.rglob("*.py"))
    assert len(sources) > 5
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called = ast.unparse(node.func)
                if not called.startswith(("np.", "numpy.")):  # host-side reports may
                    assert node.func.attr not in ("quantile", "nanquantile"), f"{path}:{node.lineno} {called}"


# --- numerics ---------------------------------------------------------------------------------------------------


def test_L09_sequence_ratio_is_the_mean_not_the_sum():
    log_prob = torch.full((1, 2000), -1.0, dtype=torch.float64)
    mask = torch.ones(1, 2000, dtype=torch.bool)
    log_ratio = tr.token_log_ratio(log_prob + 0.005, log_prob, mask)
    ratio = tr.straight_through_ratio(log_ratio, tr.mean_log_ratio(log_ratio, mask))
    torch.testing.assert_close(ratio, torch.full_like(ratio, math.exp(0.005)))
    assert math.exp(2000 * 0.005) > 22000  # what the sum would give


def test_tensor_bounds_pass_the_whole_gradient_at_a_tie():
    """A ratio exactly on an endpoint is not clipped; minimum(maximum()) would pass half its gradient."""
    ratio = torch.tensor([1.2, 0.8, 1.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
    out = tr.surrogate(ratio, advantages, torch.full_like(ratio, 0.8), torch.full_like(ratio, 1.2))
    out.loss.sum().backward()
    assert ratio.grad.tolist() == [-1.0, 1.0, -1.0]
    assert not out.clipped.any()


def test_L06_masked_overflow_leaves_no_trace():
    old = torch.zeros(1, 3) - 1
    log_prob = (old + torch.tensor([[0.0, 0.0, 100.0]])).requires_grad_()
    mask = torch.tensor([[True, True, False]])
    ratio = tr.token_log_ratio(log_prob, old, mask).exp()
    out = tr.surrogate(ratio, torch.ones(1, 3), torch.full((1, 3), 0.8), torch.full((1, 3), 1.2))
    loss = torch.where(mask, out.loss, 0.0).sum() / 2
    loss.backward()
    assert loss.item() == -1.0
    assert log_prob.grad.tolist() == [[-0.5, -0.5, 0.0]]


def test_no_value_is_copied_to_the_host():
    """On the meta device there are no values: whatever needed one would raise."""
    log_prob, old, adv = (torch.randn(4, 8, device="meta") for _ in range(3))
    mask = torch.ones(4, 8, dtype=torch.bool, device="meta")
    log_ratio = tr.token_log_ratio(log_prob, old, mask)
    mean = tr.mean_log_ratio(log_ratio, mask)
    for d, counts, ratio in [
        (log_ratio, mask, log_ratio.exp()),
        (mean, mask.sum(-1), tr.straight_through_ratio(log_ratio, mean)),
    ]:
        q = tr.inverse_cdf_quantile(d.abs(), counts, 0.9)
        region = tr.sat_trust_region(log_ratio, q, clip_ratio_low=0.2, clip_ratio_high=0.2)
        assert tr.surrogate(ratio, adv, region.lower, region.upper, 3.0).loss.is_meta
    with pytest.raises(RuntimeError):
        log_ratio.sum().item()  # the guard does guard


def test_imports_no_verl():
    tree = ast.parse(pathlib.Path(tr.__file__).read_text())
    modules = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    modules += [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert not [m for m in modules if m.startswith("verl")], modules
