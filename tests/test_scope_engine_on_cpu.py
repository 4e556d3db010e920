"""The trust region does not depend on how the batch was split: scopes of the quantile in verl's real actor worker.

`tests/scripts/scope_steps.py` runs all scenarios below with verl's `TrainingWorker` and `ppo_loss` on this plugin's
FSDP engine: once alone, once as two data-parallel ranks (gloo). Every mini-batch has 16 responses, so the splits are
named by calls x rows of one rank: 1x16, 4x4, 16x1 alone are 1x8, 2x4, 8x1 on two ranks.

The literal reference stands here: log-probs of a plain forward pass per response, absolute log-ratios sorted, the
ceil(0.9 n)-th. The first mini-batch is built so that the response and the token *at* the gate would be clipped if it
counted as stale: a gate that is off by one rounding shows in the gradient.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "scripts" / "scope_steps.py"
LOSSES = ("sat_grpo", "sat_gspo")
SCOPES = ("micro_batch", "dp_group", "mini_batch", "running")
WIDER = SCOPES[1:]
SPLITS = {
    1: ("1x16", "4x4", "4x4 shuffled", "16x1", "dynamic"),
    2: ("1x8", "2x4", "2x4 shuffled", "8x1", "dynamic"),
}
ALL_SPLITS = [(size, split) for size, splits in SPLITS.items() for split in splits]
WHOLE = {1: "1x16", 2: "1x8"}
SEVERAL = {1: "4x4", 2: "2x4"}
ODD = ("second_rank_masked", "calls_masked", "all_masked", "nan", "infinite", "unrecorded", "padded", "first")
ALPHA, RADIUS = 0.9, 0.2
SCOPE_KEY = "actor_rollout_ref.actor.policy_loss.sat.scope"
ENGINES = {
    "sat": "verl_sat.engine.fsdp.SATFSDPEngine",
    "verl": "verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead",
}
# log-probs of about 4 nats in fp32, from differently padded forward passes
NATS = 2e-6
ROUNDING = 4e-6


def step(*batches, split, **more):
    layout, _, shuffled = split.partition(" ")
    return {"batches": list(batches), "split": layout, "shuffled": bool(shuffled), **more}


def scenarios(world_size):
    several, whole = SEVERAL[world_size], WHOLE[world_size]

    def scenario(name, loss, *steps, engine="sat", fresh=False, **sat):
        return {"name": name, "loss": loss, "sat": sat, "engine": engine, "fresh": fresh, "steps": steps}

    made = [
        scenario(f"{loss} {engine}", loss, step("first", split=several), engine=engine)
        for loss in ("vanilla", "gspo")
        for engine in ENGINES
    ]
    for loss in LOSSES:
        made.append(scenario(f"{loss} none", loss, step("first", split=whole), kernel="none", scope="micro_batch"))
        made.append(scenario(f"{loss} q given", loss, step("first", split=several), q=0.05, scope="mini_batch"))
        made.append(
            scenario(
                f"{loss} moving",
                loss,
                step("first", split=several, lr=0.02),
                step("second", split=several, observe=True),
                fresh=True,
                scope="mini_batch",
            )
        )
        for name, more in (("plain", {"plain": True}), ("entropy", {"entropy": True})) if world_size == 1 else ():
            made.append(scenario(f"{loss} {name}", loss, step("first", split=several, **more), scope="mini_batch"))
        for sign in "+-" if world_size == 1 else "":
            rounded = step("first", split=several, rounding=float(f"{sign}{ROUNDING}"))
            made.append(scenario(f"{loss} rounding {sign}", loss, rounded, scope="mini_batch"))
        for split in ("uneven", "roomy"):
            made.append(scenario(f"{loss} mini_batch {split}", loss, step("first", split=split), scope="mini_batch"))
        for scope in SCOPES[:3]:
            for split in SPLITS[world_size]:
                made.append(scenario(f"{loss} {scope} {split}", loss, step("first", split=split), scope=scope))
        for split in SPLITS[world_size]:
            steps = [step(name, split=split) for name in ("first", "second")]
            made.append(scenario(f"{loss} running {split}", loss, *steps, fresh=True, scope="running"))
        together = step("first", "second", "third", split="dynamic")
        made.append(scenario(f"{loss} running together", loss, together, fresh=True, scope="running"))
        disturbed = [
            step("first", split=several),
            step("third", split=several, fail_at=2),
            step("third", split=several, infer="log_probs"),
            step("third", split=several, infer="loss"),
            step("second", split=several),
        ]
        made.append(scenario(f"{loss} running disturbed", loss, *disturbed, fresh=True, scope="running"))
        for scope in SCOPES if world_size == 2 else ():
            odd = [step(batch, split="2x5" if batch == "padded" else "2x4") for batch in ODD]
            made.append(scenario(f"{loss} odd {scope}", loss, *odd, fresh=True, scope=scope))
        for scope in WIDER:
            made.append(
                scenario(f"{loss} direct {scope}", loss, step("first", split=several, direct=True), scope=scope)
            )
        for scope in (*WIDER, "auto"):
            once = scope in ("dp_group", "mini_batch")
            steps = [step(name, split=several) for name in (("first",) if once else ("first", "second"))]
            named = f"{loss} verl {scope}"
            made.append(scenario(named, loss, *steps, engine="verl", fresh=True, scope=scope))
        made.append(scenario(f"{loss} auto", loss, step("first", split=several), scope="auto"))
    return made


class Run:
    """What `scope_steps.py` wrote for one number of ranks."""

    def __init__(self, folder, world_size):
        result = json.loads((folder / "results.json").read_text())
        self.world_size, self.ranks, self.batches = world_size, result["ranks"], result["batches"]
        self.gradients = torch.load(folder / "gradients.pt")

    def steps(self, name):
        """Per step, what each rank saw."""
        return list(zip(*(rank[name] for rank in self.ranks), strict=True))

    def good(self, name, number=0):
        """What each rank saw in a step that must have worked."""
        seen = self.steps(name)[number]
        for rank in seen:
            assert rank["error"] is None, rank["traceback"]
        return seen

    def gradient(self, name, number=0, mini_batch=0):
        self.good(name, number)
        return self.gradients[f"{name}/{number}/{mini_batch}"]

    def metric(self, name, key, number=0, mini_batch=0):
        """Values of all calls on all ranks, flat."""
        return [v for rank in self.good(name, number) for v in rank["metrics"][mini_batch][f"actor/sat/{key}"]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scope")

    def run(world_size):
        out = folder / str(world_size)
        out.mkdir()
        (out / "scenarios.json").write_text(json.dumps(scenarios(world_size)))
        environment = {key: value for key, value in os.environ.items() if not key.startswith("VERL_")}
        environment |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_PLUGINS": "verl_sat", "OMP_NUM_THREADS": "1"}
        command = [SCRIPT, out / "model", world_size, out / "scenarios.json", out]
        with open(out / "stderr", "w") as stderr:
            try:
                code = subprocess.run(
                    [sys.executable, *map(str, command)],
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    timeout=400,
                ).returncode
            except subprocess.TimeoutExpired:
                code = "timeout: a rank waits for another"
        log = (out / "stderr").read_text()
        last = [line for line in log.splitlines() if line.startswith("scenario ")][-1:]
        assert code == 0, f"{world_size} ranks: {code}, in {last}\n{log[-3000:]}"
        return Run(out, world_size)

    # One after the other: on two cores, three processes are slower than one and then two.
    return {world_size: run(world_size) for world_size in (1, 2)}


# --- the literal formula -----------------------------------------------------------------------------------------


def observed_staleness(rows, loss, log_probs=None):
    """|d| of each active token, as the definitions have it; per response its mean, once a token.

    Left out are NaN, and old log-probs of exactly 0, which were never recorded.
    """
    values = []
    for row in rows:
        current = row["log_probs"] if log_probs is None else log_probs[row["number"]]
        d = [p - m for p, m, active in zip(current, row["old_log_probs"], row["mask"], strict=True) if active and m]
        if loss == "sat_gspo" and d:
            d = [sum(d) / len(d)] * len(d)
        low, high = (-20, 10) if loss == "sat_gspo" else (-20, 20)
        values += [abs(min(max(x, low), high)) for x in d if not math.isnan(x)]
    return values


def literal_quantile(values):
    """The ceil(alpha n)-th smallest; 0 of nothing."""
    return sorted(values)[math.ceil(ALPHA * len(values) - 1e-9) - 1] if values else 0.0


def reference(run, batch, loss):
    return literal_quantile(observed_staleness(run.batches[batch], loss))


def call_references(run, name, batch, loss, over_ranks, number=0):
    """Literal quantile of every call of a step, flat over ranks: of the call's rows, or of both ranks' together."""
    rows = {row["number"]: row for row in run.batches[batch]}
    calls = [seen["calls"][0] for seen in run.good(name, number)]
    per_call = list(zip(*calls, strict=True))
    chosen = []
    for rank in range(len(calls)):
        for index, own in enumerate(calls[rank]):
            numbers = [n for other in per_call[index] for n in other] if over_ranks else own
            chosen.append(literal_quantile(observed_staleness([rows[n] for n in numbers], loss)))
    return chosen


def difference(a, b):
    """Largest difference relative to the largest element."""
    assert a.abs().max() > 0.01  # an all-zero gradient would agree with anything
    return float((a - b).abs().max() / a.abs().max())


# --- the data can tell -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
def test_the_batch_is_sensitive_to_the_gate(runs, loss):
    rows = runs[1].batches["first"]
    assert len(rows) == 16 and len({len(row["response"]) for row in rows}) > 5
    assert runs[2].batches["first"] == rows
    assert any(0 in row["mask"] and 1 in row["mask"] for row in rows)
    values = observed_staleness(rows, loss)
    q = literal_quantile(values)
    # No other staleness so near that rounding could swap them ...
    assert min(abs(v - q) for v in set(values) - {q}) > 100 * NATS
    # ... and whoever stands at the gate pushes outward, clipped if contracted to a half and not clipped otherwise.
    at_gate = [
        (d, advantage)
        for row in rows
        for d, advantage in signed_staleness(row, loss)
        if abs(d) == pytest.approx(q, abs=1e-9)
    ]
    assert at_gate
    assert all(d * a > 0 and RADIUS / 2 < abs(math.expm1(d)) < RADIUS for d, a in at_gate)


def signed_staleness(row, loss):
    pairs = [
        (p - m, a)
        for p, m, a, active in zip(row["log_probs"], row["old_log_probs"], row["advantages"], row["mask"], strict=True)
        if active
    ]
    if loss == "sat_gspo":
        mean = sum(d for d, _ in pairs) / len(pairs)
        return [(mean, a) for _, a in pairs]
    return pairs


@pytest.mark.parametrize("loss", LOSSES)
def test_gates_open_and_clips_occur(runs, loss):
    run = runs[1]
    for name in (f"{loss} micro_batch 1x16", f"{loss} mini_batch 4x4", f"{loss} mini_batch 16x1"):
        assert max(run.metric(name, "stale_frac")) > 0, name
        assert max(run.metric(name, "intercepted_frac")) > 0, name
    assert difference(run.gradient(f"{loss} mini_batch 4x4"), run.gradient(f"{loss} none")) > 0.01


@pytest.mark.parametrize("loss", LOSSES)
def test_splits_disagree_where_each_call_takes_its_own_quantile(runs, loss):
    """The counter-check: the same comparison as below finds a difference where there is one."""
    run = runs[1]
    whole = run.gradient(f"{loss} micro_batch 1x16")
    assert min(difference(whole, run.gradient(f"{loss} micro_batch {split}")) for split in SPLITS[1][1:]) > 1e-3
    assert difference(whole, runs[2].gradient(f"{loss} micro_batch 1x8")) > 1e-3


# --- mini_batch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size, split", ALL_SPLITS)
@pytest.mark.parametrize("loss", LOSSES)
def test_mini_batch_gradient_is_that_of_one_call(runs, loss, world_size, split):
    run, name = runs[world_size], f"{loss} mini_batch {split}"
    # One call of the loss on the whole mini-batch, where the call's own quantile is the definition.
    whole = f"{loss} micro_batch 1x16"
    expected, got = runs[1].gradient(whole), run.gradient(name)
    assert difference(expected, got) < 1e-6
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-7)
    for seen in run.good(name):
        assert seen["loss"] == pytest.approx(runs[1].good(whole)[0]["loss"], abs=1e-6)
        assert "x" not in split or len(seen["calls"][0]) == int(split.partition("x")[0])
    assert run.metric(name, "quantile") == pytest.approx(runs[1].metric(whole, "quantile") * _calls(run, name))


def _calls(run, name):
    return sum(len(seen["calls"][0]) for seen in run.good(name))


@pytest.mark.parametrize("world_size, split", ALL_SPLITS)
@pytest.mark.parametrize("loss", LOSSES)
def test_mini_batch_quantile_is_the_literal_one(runs, loss, world_size, split):
    run, name = runs[world_size], f"{loss} mini_batch {split}"
    got = run.metric(name, "quantile")
    assert len(set(got)) == 1  # the same number, to the bit, in every call on every rank
    assert got[0] == pytest.approx(reference(run, "first", loss), abs=NATS)


@pytest.mark.parametrize("world_size", [1, 2])
def test_dynamic_batches_are_several_and_uneven(runs, world_size):
    seen = runs[world_size].good("sat_gspo mini_batch dynamic")
    sizes = [len(call) for rank in seen for call in rank["calls"][0]]
    assert len(sizes) > world_size and sum(sizes) == 16


@pytest.mark.parametrize("loss", LOSSES)
def test_ranks_that_would_split_differently_agree(runs, loss):
    """With a token budget that one rank's share fits in and the other's does not, both make two calls."""
    run, name = runs[2], f"{loss} mini_batch uneven"
    tokens = [
        sum(len(row["prompt"]) + len(row["response"]) for row in rows)
        for rows in (run.batches["first"][:8], run.batches["first"][8:])
    ]
    assert min(tokens) <= sum(tokens) // 2 < max(tokens)
    assert [len(seen["calls"][0]) for seen in run.good(name)] == [2, 2]
    assert run.metric(name, "quantile") == pytest.approx([reference(run, "first", loss)] * 4, abs=NATS)
    assert difference(runs[1].gradient(f"{loss} micro_batch 1x16"), run.gradient(name)) < 1e-6


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_token_budget_for_all_costs_no_pass(runs, loss, world_size):
    run, name = runs[world_size], f"{loss} mini_batch roomy"
    assert [seen["forwards"] for seen in run.good(name)] == [1] * world_size
    assert run.metric(name, "quantile") == pytest.approx([reference(run, "first", loss)] * world_size, abs=NATS)
    assert difference(runs[1].gradient(f"{loss} micro_batch 1x16"), run.gradient(name)) < 1e-6


@pytest.mark.parametrize("sign", ["+", "-"])
@pytest.mark.parametrize("loss", LOSSES)
def test_rounding_of_the_pass_ahead_opens_no_gate(runs, loss, sign):
    """Whoever stands at the gate is not stale, also where the pass ahead saw it a little below."""
    run, name = runs[1], f"{loss} rounding {sign}"
    exact = reference(run, "first", loss)
    assert [abs(q - exact) for q in run.metric(name, "quantile")] == pytest.approx(
        [ROUNDING] * _calls(run, name), abs=NATS
    )
    assert difference(runs[1].gradient(f"{loss} micro_batch 1x16"), run.gradient(name)) < 1e-6


@pytest.mark.parametrize("loss", LOSSES)
def test_the_plain_formula_agrees_under_mini_batch(runs, loss):
    run, fast = runs[1], f"{loss} mini_batch {SEVERAL[1]}"
    assert difference(run.gradient(fast), run.gradient(f"{loss} plain")) < 1e-6
    for one, other in zip(run.good(fast), run.good(f"{loss} plain"), strict=True):
        for key, values in one["metrics"][0].items():
            assert other["metrics"][0][key] == pytest.approx(values, abs=1e-6), key


@pytest.mark.parametrize("loss", LOSSES)
def test_the_pass_ahead_takes_nothing_from_the_calls(runs, loss):
    """It leaves out the entropy; the calls after it do not."""
    run = runs[1]
    for seen in run.good(f"{loss} entropy"):
        entropy = seen["metrics"][0]["actor/entropy_loss"]
        assert len(entropy) == len(seen["calls"][0]) and all(v > 0 for v in entropy)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("loss", LOSSES)
def test_mini_batch_reads_the_weights_of_its_own_step(runs, loss, world_size):
    run = runs[world_size]
    run.good(f"{loss} moving", 0)
    moved = run.good(f"{loss} moving", 1)
    log_probs = {int(number): values for seen in moved for number, values in seen["log_probs"].items()}
    now = literal_quantile(observed_staleness(run.batches["second"], loss, log_probs))
    assert abs(now - reference(run, "second", loss)) > 100 * NATS  # the first step did change the weights
    used = run.metric(f"{loss} moving", "quantile", 1)
    assert used == pytest.approx([now] * len(used), abs=NATS)


@pytest.mark.parametrize("world_size, split", ALL_SPLITS)
@pytest.mark.parametrize("loss", LOSSES)
def test_mini_batch_costs_one_more_pass_and_none_for_a_single_call(runs, loss, world_size, split):
    run = runs[world_size]
    for seen in run.good(f"{loss} mini_batch {split}"):
        calls, rows = len(seen["calls"][0]), 16 // world_size
        assert seen["forward_rows"] == (rows if calls == 1 else 2 * rows)
        assert seen["forwards"] == (calls if calls == 1 else 2 * calls)
        assert seen["backwards"] == calls
        # the pass ahead is one of evaluation, and the model trains again after it
        ahead = seen["forwards"] - calls
        assert seen["modes"] == [[False, False]] * ahead + [[True, True]] * calls


@pytest.mark.parametrize("world_size", [1, 2])
def test_sequence_gates_open_for_calls_of_one_row_under_mini_batch_only(runs, world_size):
    single = SPLITS[world_size][3]
    stale = runs[world_size].metric(f"sat_gspo mini_batch {single}", "stale_frac")
    assert sum(stale) / len(stale) > 0
    assert set(runs[world_size].metric(f"sat_gspo micro_batch {single}", "stale_frac")) == {0.0}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_configured_q_comes_before_any_scope(runs, loss, world_size):
    run, name = runs[world_size], f"{loss} q given"
    assert run.metric(name, "quantile") == pytest.approx([0.05] * _calls(run, name))
    for seen in run.good(name):  # nothing to find out, so no pass for it
        assert seen["forwards"] == len(seen["calls"][0])


# --- micro_batch and dp_group ------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size, split", ALL_SPLITS)
@pytest.mark.parametrize("scope", ["micro_batch", "dp_group"])
@pytest.mark.parametrize("loss", LOSSES)
def test_quantile_of_each_call_is_the_literal_one(runs, loss, scope, world_size, split):
    run, name = runs[world_size], f"{loss} {scope} {split}"
    expected = call_references(run, name, "first", loss, over_ranks=scope == "dp_group")
    assert run.metric(name, "quantile") == pytest.approx(expected, abs=NATS)
    for seen in run.good(name):
        assert seen["forwards"] == len(seen["calls"][0])  # no extra pass


@pytest.mark.parametrize("split", SPLITS[2])
@pytest.mark.parametrize("loss", LOSSES)
def test_dp_group_is_the_same_number_on_both_ranks(runs, loss, split):
    one, other = (seen["metrics"][0]["actor/sat/quantile"] for seen in runs[2].good(f"{loss} dp_group {split}"))
    assert one == other
    own = [seen["metrics"][0]["actor/sat/quantile"] for seen in runs[2].good(f"{loss} micro_batch {split}")]
    assert own[0] != own[1]  # or nothing was shared


@pytest.mark.parametrize("split", SPLITS[1])
@pytest.mark.parametrize("loss", LOSSES)
def test_dp_group_of_one_rank_is_micro_batch(runs, loss, split):
    run = runs[1]
    assert run.metric(f"{loss} dp_group {split}", "quantile") == run.metric(f"{loss} micro_batch {split}", "quantile")
    torch.testing.assert_close(
        run.gradient(f"{loss} dp_group {split}"), run.gradient(f"{loss} micro_batch {split}"), rtol=0, atol=0
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_dp_group_over_one_call_a_rank_is_mini_batch(runs, loss):
    run = runs[2]
    torch.testing.assert_close(
        run.gradient(f"{loss} dp_group 1x8"), run.gradient(f"{loss} mini_batch 1x8"), rtol=0, atol=0
    )


# --- running -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size, split", ALL_SPLITS)
@pytest.mark.parametrize("loss", LOSSES)
def test_running_uses_the_quantile_of_the_mini_batch_before(runs, loss, world_size, split):
    run, name = runs[world_size], f"{loss} running {split}"
    for number, before in enumerate((None, "first")):
        q = 0.0 if before is None else reference(run, before, loss)
        used = run.metric(name, "quantile", number)
        assert used == pytest.approx([q] * len(used), abs=NATS) and len(set(used)) == 1
        stale = run.metric(name, "stale_frac", number)
        assert (max(stale) > 0) == (before is not None)
        assert (min(run.metric(name, "inert", number)) == 1) == (before is None)
        for seen in run.good(name, number):
            assert seen["forwards"] == len(seen["calls"][0])  # no extra pass


@pytest.mark.parametrize("world_size, split", ALL_SPLITS)
@pytest.mark.parametrize("loss", LOSSES)
def test_running_is_independent_of_the_split(runs, loss, world_size, split):
    for number in range(2):
        expected = runs[1].gradient(f"{loss} running 1x16", number)
        assert difference(expected, runs[world_size].gradient(f"{loss} running {split}", number)) < 1e-6


@pytest.mark.parametrize("loss", LOSSES)
def test_running_starts_with_the_nominal_interval(runs, loss):
    inert, nominal = runs[1].gradient(f"{loss} running 1x16"), runs[1].gradient(f"{loss} none")
    torch.testing.assert_close(inert, nominal, rtol=0, atol=0)
    assert difference(inert, runs[1].gradient(f"{loss} mini_batch 1x16")) > 0.01


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("loss", LOSSES)
def test_running_counts_mini_batches_not_calls_of_the_worker(runs, loss, world_size):
    run, name = runs[world_size], f"{loss} running together"
    for mini_batch, before in enumerate((None, "first", "second")):
        used = run.metric(name, "quantile", 0, mini_batch)
        assert used == pytest.approx([reference(run, before, loss) if before else 0.0] * len(used), abs=NATS)
        if mini_batch < 2:
            one_by_one = run.gradient(f"{loss} running dynamic", mini_batch)
            torch.testing.assert_close(run.gradient(name, 0, mini_batch), one_by_one, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_failed_mini_batch_and_forward_passes_leave_running_as_it_was(runs, loss, world_size):
    run, name = runs[world_size], f"{loss} running disturbed"
    failed = run.steps(name)[1]
    assert all("the loss failed on purpose" in seen["error"] for seen in failed)
    assert all(len(seen["calls"][0]) == 2 for seen in failed)  # one call of it had gone through
    run.good(name, 2)
    # A loss without an optimizer step: there is no mini-batch to count, and it is said.
    assert all(SCOPE_KEY in seen["error"] for seen in run.steps(name)[3])
    used = run.metric(name, "quantile", 4)
    assert used == pytest.approx([reference(run, "first", loss)] * len(used), abs=NATS)
    undisturbed = run.gradient(f"{loss} running {SEVERAL[world_size]}", 1)
    torch.testing.assert_close(run.gradient(name, 4), undisturbed, rtol=0, atol=0)


# --- nothing active, padding, NaN --------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("loss", LOSSES)
def test_ranks_and_calls_with_nothing_active_join(runs, loss, scope):
    """That the steps came back at all is half of it: a collective that one rank left out would have timed out."""
    run, name = runs[2], f"{loss} odd {scope}"
    assert len(run.steps(name)) == len(ODD)
    for number, batch in enumerate(ODD):
        seen = run.good(name, number)
        assert len({str(rank["loss"]) for rank in seen}) == len({str(rank["grad_norm"]) for rank in seen}) == 1
        if batch != "nan":
            assert all(math.isfinite(v) for rank in seen for v in rank["loss"] + rank["grad_norm"])
            assert run.gradient(name, number).isfinite().all()
    assert run.gradient(name, ODD.index("all_masked")).abs().max() == 0


@pytest.mark.parametrize("batch", ODD)
@pytest.mark.parametrize("loss", LOSSES)
def test_mini_batch_statistic_counts_active_tokens_only(runs, loss, batch):
    run, name = runs[2], f"{loss} odd mini_batch"
    used = run.metric(name, "quantile", ODD.index(batch))
    assert used == pytest.approx([reference(run, batch, loss)] * len(used), abs=NATS)


@pytest.mark.parametrize("scope", ["micro_batch", "dp_group"])
@pytest.mark.parametrize("batch", ODD)
@pytest.mark.parametrize("loss", LOSSES)
def test_call_statistics_count_active_tokens_only(runs, loss, batch, scope):
    run, name, number = runs[2], f"{loss} odd {scope}", ODD.index(batch)
    expected = call_references(run, name, batch, loss, scope == "dp_group", number)
    assert run.metric(name, "quantile", number) == pytest.approx(expected, abs=NATS)


@pytest.mark.parametrize("loss", LOSSES)
def test_running_statistic_counts_active_tokens_only(runs, loss):
    run, name = runs[2], f"{loss} odd running"
    for number, before in enumerate(ODD[:-1], start=1):
        used = run.metric(name, "quantile", number)
        assert len(set(used)) == 1
        # a mini-batch without an active token leaves the level as it was
        last = "calls_masked" if before == "all_masked" else before
        assert used[0] == pytest.approx(reference(run, last, loss), abs=NATS), before


@pytest.mark.parametrize("loss", LOSSES)
def test_padding_rows_do_not_count(runs, loss):
    run, name = runs[2], f"{loss} odd mini_batch"
    padded, plain = ODD.index("padded"), ODD.index("first")
    assert len(run.batches["padded"]) == 20
    assert run.metric(name, "quantile", padded)[0] == pytest.approx(run.metric(name, "quantile", plain)[0], abs=NATS)
    assert difference(run.gradient(name, plain), run.gradient(name, padded)) < 1e-6


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_nan_on_one_rank_reaches_no_statistic_and_stops_no_rank_alone(runs, loss, scope):
    run, name, number = runs[2], f"{loss} odd {scope}", ODD.index("nan")
    seen = run.good(name, number)
    assert all(math.isnan(rank["loss"][0]) for rank in seen)  # never turned into a 0 in silence
    nonfinite = [rank["metrics"][0]["actor/sat/nonfinite_frac"] for rank in seen]
    assert sum(v > 0 for values in nonfinite for v in values) == 1  # one call of one rank
    assert max(nonfinite[-1]) > 0
    quantiles = [rank["metrics"][0]["actor/sat/quantile"] for rank in seen]
    assert all(math.isfinite(q) for values in quantiles for q in values)
    if scope != "micro_batch":
        assert all(values == quantiles[0] for values in quantiles)


# --- where a scope cannot be had ---------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("scope", WIDER)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_scope_outside_any_engine_is_an_error(runs, loss, scope, world_size):
    for seen in runs[world_size].steps(f"{loss} direct {scope}")[0]:
        assert seen["error"] is not None and SCOPE_KEY in seen["error"], seen["error"]
        assert scope in seen["error"]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("loss", LOSSES)
def test_mini_batch_under_another_engine_is_an_error_before_any_gradient(runs, loss, world_size):
    run, name = runs[world_size], f"{loss} verl mini_batch"
    for ranks in run.steps(name):
        for seen in ranks:
            assert seen["engine"] == ENGINES["verl"]
            assert seen["error"] is not None and SCOPE_KEY in seen["error"], seen["error"]
            assert "mini_batch" in seen["error"]
            assert seen["backwards"] == 0
    assert not [key for key in run.gradients if key.startswith(name)]  # no optimizer step either


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("loss", LOSSES)
def test_dp_group_works_under_another_engine(runs, loss, world_size):
    run, name, ours = runs[world_size], f"{loss} verl dp_group", f"{loss} dp_group {SEVERAL[world_size]}"
    assert run.good(name)[0]["engine"] == ENGINES["verl"]
    assert run.metric(name, "quantile") == run.metric(ours, "quantile")
    torch.testing.assert_close(run.gradient(name), run.gradient(ours), rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("loss", LOSSES)
def test_running_works_under_another_engine(runs, loss, world_size):
    run, ours = runs[world_size], f"{loss} running {SEVERAL[world_size]}"
    for number in range(2):
        name = f"{loss} verl running"
        assert run.metric(name, "quantile", number) == run.metric(ours, "quantile", number)
        torch.testing.assert_close(run.gradient(name, number), run.gradient(ours, number), rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "loss, engine, scope",
    [
        ("sat_grpo", "sat", "micro_batch"),
        ("sat_gspo", "sat", "mini_batch"),
        ("sat_grpo", "verl", "micro_batch"),
        ("sat_gspo", "verl", "running"),
    ],
)
def test_auto_is_resolved_by_loss_and_engine(runs, loss, engine, scope, world_size):
    run = runs[world_size]
    name = f"{loss} auto" if engine == "sat" else f"{loss} verl auto"
    expected = f"{loss} {scope} {SEVERAL[world_size]}"
    for number in range(len(run.steps(name))):
        assert run.good(name, number)[0]["engine"] == ENGINES[engine]
        if number < len(run.steps(expected)):
            assert run.metric(name, "quantile", number) == run.metric(expected, "quantile", number)
            torch.testing.assert_close(run.gradient(name, number), run.gradient(expected, number), rtol=0, atol=0)
    if scope == "running":
        assert max(run.metric(name, "stale_frac", 0)) == 0 < max(run.metric(name, "stale_frac", 1))


# --- everything else ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("loss", ["vanilla", "gspo"])
def test_off_means_off(runs, loss, world_size):
    """A loss of verl on our engine: verl's own engine's gradient to the bit, and no forward pass more."""
    run = runs[world_size]
    ours, theirs = run.good(f"{loss} sat"), run.good(f"{loss} verl")
    assert (ours[0]["engine"], theirs[0]["engine"]) == (ENGINES["sat"], ENGINES["verl"])
    torch.testing.assert_close(run.gradient(f"{loss} sat"), run.gradient(f"{loss} verl"), rtol=0, atol=0)
    for one, other in zip(ours, theirs, strict=True):
        assert one["forwards"] == other["forwards"] == len(one["calls"][0]) == int(SEVERAL[world_size][0])
        assert one["metrics"] == other["metrics"]


def test_every_call_of_every_scope_reports_the_same_finite_keys(runs):
    from verl_sat.metrics import METRIC_KEYS

    sets, checked = set(), set()
    for run in runs.values():
        for scenario in scenarios(run.world_size):
            if not scenario["loss"].startswith("sat_"):
                continue
            for seen in (seen for ranks in run.steps(scenario["name"]) for seen in ranks):
                for calls, metrics in zip(seen["calls"], seen["metrics"], strict=False):
                    sat = {key: values for key, values in metrics.items() if key in METRIC_KEYS or "/sat/" in key}
                    assert all(len(values) == len(calls) for values in sat.values()), scenario["name"]
                    assert all(math.isfinite(v) for values in sat.values() for v in values), scenario["name"]
                    sets.add(frozenset(sat))
                    checked.add(scenario["sat"]["scope"])
    assert checked == {"auto", *SCOPES}
    assert sets == {frozenset(METRIC_KEYS)}
