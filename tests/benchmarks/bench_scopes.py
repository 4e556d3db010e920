"""What each scope of the quantile costs on a training step of verl's worker with this plugin's engine, on the CPU.

A step is all that `TrainingWorker.train_mini_batch` does: forward, loss and backward of every micro-batch, gradient
norm, optimizer. No assertion on a time; asserted is the number of forward passes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import harness
import pytest
from harness import LOSSES

SCRIPT = Path(__file__).parent / "scope_times.py"
SCOPES = ("micro_batch", "dp_group", "running", "mini_batch")
ROWS, RESPONSE, ROUNDS = 32, 128, 5
MICRO_BATCHES = (1, 2, 4, 8, 32)


def item(loss, micro_batches, response=RESPONSE, rounds=ROUNDS):
    return dict(loss=loss, rows=ROWS, response=response, micro_batches=micro_batches, rounds=rounds)


BY_MICRO_BATCHES = [item("sat_gspo", count) for count in MICRO_BATCHES]
BY_TOKENS = [item("sat_gspo", 4, 64), item("sat_gspo", 4, 256, rounds=3)]
BY_LOSS = [item("sat_grpo", 4)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Results by item; one process runs them all."""
    plan = [*BY_MICRO_BATCHES, *BY_TOKENS, *BY_LOSS]
    command = [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("scopes") / "model"), json.dumps(plan)]
    variables = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_PLUGINS": "verl_sat", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.rpartition("RESULT ")[2])
    assert result["engine"] == "verl_sat.engine.fsdp.SATFSDPEngine"
    return {json.dumps(item): found for item, found in zip(plan, result["results"], strict=True)}


def show(report, title, items, key, head, measured):
    """A row per item: verl's time and the ratio of each scope to it. Returns the ratios of ``sat_gspo`` by scope."""
    rows, series, data, refused = [], {}, [], set()
    for each in items:
        found = measured[json.dumps(each)]
        times = harness.Times(found["rounds"])
        cells = [f"{each['loss']} / {LOSSES[each['loss']]}", each[key], times.spread("verl").text(0)]
        for scope in SCOPES:
            if scope in found["refused"]:
                refused.add(f"refused: {scope}: {found['refused'][scope]}")
                cells.append("refused")
                continue
            ratio = times.ratio(scope, "verl")
            cells.append(ratio.text())
            if each["loss"] == "sat_gspo":
                series.setdefault(scope, []).append((each[key], ratio))
        rows.append(cells)
        data.append({**each, **found})
    rounds = " to ".join(str(count) for count in sorted({each["rounds"] for each in items}))
    note = f"Scopes as ratios to verl's loss. Median and quartiles of {rounds} interleaved rounds, 1 thread."
    report.table(title, ["loss", head, "verl's loss [ms]", *SCOPES], rows, note, data)
    print("\n".join(sorted(refused)))
    return series


def test_by_micro_batches(report, measured):
    title = f"Training step of {ROWS} responses of {RESPONSE // 2} to {RESPONSE} tokens"
    series = show(report, title, BY_MICRO_BATCHES + BY_LOSS, "micro_batches", "micro-batches", measured)
    y = "time of a training step / with verl's gspo"
    report.plot("micro_batches", harness.line_plot(series, x="micro-batches", y=y, title=title))


def test_by_tokens(report, measured):
    items = sorted([*BY_TOKENS, item("sat_gspo", 4)], key=lambda each: each["response"])
    title = f"Training step of {ROWS} responses in 4 micro-batches"
    series = show(report, title, items, "response", "longest response", measured)
    y = "time of a training step / with verl's gspo"
    report.plot("tokens", harness.line_plot(series, x="longest response [tokens]", y=y, title=title))


def test_number_of_forward_passes(measured):
    """One per micro-batch; `mini_batch` up to as many more (its own may be larger), none for a single micro-batch."""
    for key, found in measured.items():
        count = json.loads(key)["micro_batches"]
        for case, forwards in found["forwards"].items():
            if case == "mini_batch" and count > 1:
                assert count < forwards <= 2 * count, (key, case)
            else:
                assert forwards == count, (key, case)
