"""Replay in verl's actor worker: the routes of the batch are the ones that the routers use, and the metrics say so.

`tests/scripts/replay_steps.py` runs verl's `TrainingWorker` on this plugin's FSDP engine, alone and as two ranks, over
samples whose routes were recorded by plain passes of the same model. The first of its four layers is dense.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "scripts" / "replay_steps.py"
ROWS, MOE_LAYERS = 8, 3
ALTERED_SAMPLE, ALTERED_ROW = 2, 5
MISSING = {1: (3, 4), 5: (0, 1, 2)}
NATS = 3e-6  # log-probs of about 4 nats in fp32, from differently padded passes
MODE_KEY = "actor_rollout_ref.actor.fsdp_config.router_replay.mode"
FLAG_KEY = "actor_rollout_ref.rollout.enable_rollout_routing_replay"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    made = {}
    for world_size in (1, 2):
        out = tmp_path_factory.mktemp(f"ranks{world_size}")
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(world_size), str(out)], capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
        made[world_size] = [torch.load(out / f"results_{rank}.pt") for rank in range(world_size)]
    return made


def all_log_probs(results, world_size, scenario):
    return [row for rank in results[world_size] for row in rank[scenario]["log_probs"]]


def far(a, b):
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("world_size", [1, 2])
def test_own_routes_change_nothing_and_all_are_replayed(results, world_size):
    plain = results[1][0]["plain"]
    assert results[1][0]["layers"] == (1, 2, 3)
    assert far(all_log_probs(results, world_size, "own"), plain["native"]) < NATS
    for rank in results[world_size]:
        metrics = rank["own"]["metrics"]
        assert metrics["actor/r3/replayed_frac"] == 1.0
        assert metrics["actor/r3/native_frac"] == 0.0
        assert metrics["actor/r3/disagreement_frac"] == 0.0
        assert metrics["actor/r3/bytes_per_token"] == 2 * 4  # two bytes a layer, four layers


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_altered_route_changes_its_row_and_no_earlier_one(results, world_size):
    plain = results[1][0]["plain"]
    log_probs = all_log_probs(results, world_size, "altered")
    for number, (got, native) in enumerate(zip(log_probs, plain["native"], strict=True)):
        if number != ALTERED_SAMPLE:
            assert float((got - native).abs().max()) < NATS
            continue
        # row r of the input gives the log-prob of token r + 1, which is entry r here
        assert float((got - native)[:ALTERED_ROW].abs().max()) < NATS
        assert float((got - native)[ALTERED_ROW].abs()) > 100 * NATS
    assert far(log_probs, plain["altered"]) < NATS
    expected = 1 / (MOE_LAYERS * sum(length - 1 for length in plain["lengths"]))
    metrics = results[world_size][0]["altered"]["metrics"]
    # the change in layer 2 moves the hidden states of layer 3 too, and with them maybe its own choices
    assert expected * 0.99 <= metrics["actor/r3/disagreement_frac"] <= 12 * expected
    assert metrics["actor/r3/replayed_frac"] == 1.0


@pytest.mark.parametrize("layout", ["one call", "call per sample", "dynamic", "packed, one sample", "bucketed"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_R18_replay_does_not_depend_on_the_layout_of_the_batch(results, world_size, layout):
    assert far(all_log_probs(results, world_size, f"altered, {layout}"), results[1][0]["plain"]["altered"]) < NATS
    reference = results[1][0]["altered"]["gradient"]
    native = results[1][0]["own"]["gradient"]
    gradient = results[world_size][0][f"altered, {layout}"]["gradient"]
    scale = float(reference.abs().max())
    assert float((gradient - reference).abs().max()) < 1e-5 * scale
    assert float((gradient - native).abs().max()) > 1e-3 * scale


def test_R18_ulysses_slices_routes_as_it_slices_tokens(results):
    """By hand: the packed rows, an even number, halved; the last row of each sample and the padding are native."""
    first, second = (rank["ulysses"] for rank in results[2])
    total = sum(first["lengths"])
    assert total % 2 == first["pad_size"] == 1  # 7 padded to 8, so to speak
    codes = torch.cat([first["codes"], second["codes"]])
    tokens = torch.cat([first["tokens"], second["tokens"]])
    lasts = torch.tensor(first["lengths"]).cumsum(0) - 1
    native = torch.zeros(total + 1, dtype=torch.bool)
    native[lasts] = native[-1] = True
    named = torch.stack([tokens // 8, tokens % 8], -1) + 1
    for layer in (1, 2, 3):
        assert torch.equal(codes[~native, layer], named[~native])
        assert not codes[native, layer].any()
    assert torch.equal(torch.cat([first["counted"], second["counted"]]), ~native)


@pytest.mark.parametrize("world_size", [1, 2])
def test_R14_gradient_checkpointing_replays_in_recompute(results, world_size):
    reference = results[1][0]["altered"]["gradient"]
    gradient = results[world_size][0]["altered, checkpointed"]["gradient"]
    assert float((gradient - reference).abs().max()) < 1e-5 * float(reference.abs().max())
    metrics = results[world_size][0]["altered, checkpointed"]["metrics"]
    assert metrics == pytest.approx(results[1][0]["altered"]["metrics"])  # recompute is not counted twice


@pytest.mark.parametrize("world_size", [1, 2])
def test_R06_rows_without_a_record_are_native_not_expert_0(results, world_size):
    plain = results[1][0]["plain"]
    assert far(all_log_probs(results, world_size, "holes"), plain["native"]) < NATS
    assert far(all_log_probs(results, world_size, "zeroed"), plain["native"]) > 100 * NATS  # what expert 0 would do
    rows = sum(length - 1 for length in plain["lengths"])
    missing = sum(len(rows_) for rows_ in MISSING.values())
    metrics = results[world_size][0]["holes"]["metrics"]
    assert metrics["actor/r3/replayed_frac"] == pytest.approx(1 - missing / rows)
    assert metrics["actor/r3/native_frac"] == pytest.approx(missing / rows)
    assert metrics["actor/r3/native/unreached_frac"] == pytest.approx(missing / rows)


@pytest.mark.parametrize("world_size", [1, 2])
def test_R05_padding_samples_are_not_expected(results, world_size):
    assert results[world_size][0]["padding"]["metrics"]["actor/r3/replayed_frac"] == 1.0


@pytest.mark.parametrize("world_size", [1, 2])
def test_native_rows_are_told_apart_by_reason(results, world_size):
    lengths = results[1][0]["plain"]["lengths"]
    rows = sum(length - 1 for length in lengths)
    metrics = results[world_size][0]["reasons"]["metrics"]
    assert metrics["actor/r3/native/rejected_frac"] == pytest.approx(2 * ROWS / rows)
    assert metrics["actor/r3/native/absent_frac"] == pytest.approx((rows - 4 * ROWS) / rows)
    assert metrics["actor/r3/replayed_frac"] == pytest.approx(2 * ROWS / rows)
    assert metrics["actor/r3/native/lost_frac"] == pytest.approx(0.0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_R23_a_batch_without_routes_is_an_error_at_its_stage(results, world_size):
    errors = results[world_size][0]["no field"]
    for stage, name in (("infer", "compute_log_prob"), ("train", "update_actor")):
        assert errors[stage].startswith(f"ReplayError: {name}")
        assert MODE_KEY in errors[stage] and FLAG_KEY in errors[stage]


@pytest.mark.parametrize("world_size", [1, 2])
def test_R18_routes_of_another_form_than_the_tokens_are_refused(results, world_size):
    errors = results[world_size][0]["wrong form"]
    assert all(error.startswith("ReplayError") for error in errors.values()), errors
    assert "jagged" in errors["dense"] and "rows for" in errors["rows"] and "int16" in errors["width"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_mini_batch_that_failed_is_not_counted_into_the_next(results, world_size):
    found = results[world_size][0]["failed in the middle"]
    assert "in the middle" in found["error"]
    assert found["metrics"] == results[1][0]["own"]["metrics"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_R22_nothing_replayed_is_an_error_before_the_first_update(results, world_size):
    for rank in results[world_size]:
        for scenario in ("disabled hook", "nothing recorded"):
            assert rank[scenario]["train"].startswith("ReplayError"), rank[scenario]
            assert MODE_KEY in rank[scenario]["train"] and FLAG_KEY in rank[scenario]["train"]
    metrics = results[world_size][0]["disabled hook, later"]["metrics"]
    assert metrics["actor/r3/replayed_frac"] == 0.0
    assert metrics["actor/r3/native/lost_frac"] == 1.0


@pytest.mark.parametrize("world_size", [1, 2])
def test_R21_the_actor_as_reference_routes_natively(results, world_size):
    assert far(all_log_probs(results, world_size, "reference"), results[1][0]["plain"]["native"]) < NATS
    assert results[world_size][0]["reference without field"]["error"] == ""


def batch_of(fields):
    """Two samples of three and four tokens; layer 0 dense, rows 0 and 1 of each recorded in layer 1."""
    from tensordict import TensorDict

    def jagged(values, dtype=torch.long):
        return torch.nested.as_nested_tensor([torch.tensor(v).to(dtype) for v in values], layout=torch.jagged)

    recorded = [[[0], [0x0201]]] * 2
    routes = [recorded + [[[0], [0]]], recorded + [[[0], [0]]] * 2]
    data = TensorDict(
        {
            "input_ids": jagged([[1, 2, 3], [1, 2, 3, 4]]),
            "response_mask": jagged([[1], [1, 1]]),
            "routed_experts": jagged(routes, torch.int16),
        },
        batch_size=2,
    )
    for key, value in fields.items():
        data[key] = value
    return data


def described(*runs):
    rows = sum(count for _, count in runs)
    return {"engine": "x", "why": [list(run) for run in runs], "versions": [[1, rows]], "rejected": {}}


def test_the_array_decides_what_is_there_and_the_rollout_why_the_rest_is_not(caplog):
    from tensordict import NonTensorData, NonTensorStack

    from verl_sat.engine.replay import expected_of

    counts = ("rows", "recorded", "absent", "rejected")

    def seen(**fields):
        expected = expected_of(batch_of(fields), layer=1)
        return tuple(getattr(expected, name) for name in counts)

    stack = [described((0, 2)), described((0, 2), (2, 1))]
    assert seen(extra_fields=NonTensorStack(*[{"routes": row} for row in stack])) == (5, 4, 0, 1)
    assert seen(routes=NonTensorStack(*stack)) == (5, 4, 0, 1)  # a column of its own, as legacy trainers make it
    assert seen(extra_fields=NonTensorData({"routes": described((0, 2), (1, 1))}, batch_size=[2])) == (5, 4, 1, 0)
    assert caplog.text == ""
    # an announced row that is not there is lost, not forgotten
    assert seen(extra_fields=NonTensorStack({"routes": described((0, 2))}, {"routes": described((0, 3))})) == (
        5,
        5,
        0,
        0,
    )
    assert caplog.text == ""
    # of another turn: says less than the array holds
    assert seen(extra_fields=NonTensorStack(*[{"routes": described((0, 1))}] * 2)) == (5, 4, 0, 0)
    assert "did not announce" in caplog.text
    assert seen() == (5, 4, 0, 0)
    assert "without a word" in caplog.text


def test_R22_a_mini_batch_without_expected_rows_does_not_disarm_the_guard():
    from verl_sat.engine.replay import RouteReplay, r3_metrics
    from verl_sat.router_replay.hook import ReplayError

    replay = RouteReplay.__new__(RouteReplay)
    replay._replayed_before = False
    replay._check(r3_metrics([0.0] * 7 + [80.0, 10.0], 2))  # nothing but padding
    with pytest.raises(ReplayError, match="lost 100%"):
        replay._check(r3_metrics([0.0, 0.0, 20.0, 10.0, 10.0, 0.0, 0.0, 80.0, 10.0], 2))


def test_reasons_never_become_negative():
    """What the rollout said of its rows may contradict the array; the parts still add up."""
    from verl_sat.engine.replay import REASONS, r3_metrics

    values = r3_metrics([30.0, 0.0, 30.0, 10.0, 0.0, 0.0, 0.0, 80.0, 10.0], layers=3)  # all replayed, none announced
    assert values["actor/r3/replayed_frac"] == 1.0
    assert all(values[f"actor/r3/native/{name}_frac"] == 0.0 for name in REASONS)
    values = r3_metrics([12.0, 3.0, 30.0, 10.0, 7.0, 1.0, 1.0, 80.0, 10.0], layers=3)
    assert values["actor/r3/disagreement_frac"] == pytest.approx(3 / 12)
    parts = [values[f"actor/r3/native/{name}_frac"] for name in REASONS]  # 4 of 10 rows replayed, 7 announced
    assert parts == pytest.approx([0.1, 0.1, 0.1, 0.3])
    assert sum(parts) == pytest.approx(values["actor/r3/native_frac"])
