"""What replay costs: bytes per token, time and memory of a training step of verl's worker, on the CPU.

No assertion on a time; asserted are sizes, and that the replay which is timed did happen.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import harness
import pytest

from verl_sat.router_replay.layout import MoELayout

SCRIPT = Path(__file__).parent / "replay_times.py"
EMBEDDED = {"hidden": 64, "expert": 64, "layers": 4, "experts": 8, "top_k": 2}
LARGER = {"hidden": 256, "expert": 128, "layers": 6, "experts": 64, "top_k": 8}
ROWS = 16
ITEMS = [
    dict(model=model, rows=ROWS, response=response, micro_batches=count, rounds=rounds)
    for model, response, rounds in ((EMBEDDED, 128, 10), (LARGER, 64, 6))
    for count in (1, 4, 16)
]
MODELS = {  # layers, experts, top-k
    "Qwen3-30B-A3B": (48, 128, 8),
    "Qwen3-235B-A22B": (94, 128, 8),
    "DeepSeek-V3": (61, 256, 8),
    "gpt-oss-120b": (36, 128, 4),
    "embedded": (4, 8, 2),
}


def name(model):
    return f"{model['layers']} layers, {model['experts']} experts, top-{model['top_k']}"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    command = [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("replay")), json.dumps(ITEMS)]
    variables = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_PLUGINS": "verl_sat", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("RESULT ")[2])


def test_bytes_per_token(report):
    rows = []
    for model, (layers, experts, top_k) in MODELS.items():
        layout = MoELayout(experts, top_k, layers, None, model)
        ids = layers * top_k
        cells = [layout.bytes_per_token, 2 * ids, 8 * ids, f"{layout.bytes_per_token * 32768 / harness.MIB:.1f}"]
        rows.append([model, f"{layers} x {top_k} of {experts}", *cells])
    assert rows[0][2:5] == [384, 768, 3072]
    head = ["model", "layers x top-k of experts", "here [B]", "verl, int16 [B]", "verl, int64 [B]", "32k tokens [MiB]"]
    report.table("Routes of a token", head, rows, "As stored in the data plane and shipped to the trainer.")


def test_step(report, measured):
    rows = []
    for item, found in zip(ITEMS, measured, strict=True):
        assert found["metrics"]["actor/r3/replayed_frac"] == [1.0]
        times = harness.Times(found["rounds"])
        peak = found["peak"]["R3"] / found["peak"]["native"]
        cells = [times.spread("native").text(0), times.ratio("R3", "native").text(), f"{peak:.3f}"]
        rows.append([name(item["model"]), item["micro_batches"], *cells])
    head = ["model", "micro-batches", "native [ms]", "time, R3 / native", "peak memory, R3 / native"]
    title = f"Training step of {ROWS} responses of up to 128 (4 layers) or 64 tokens (6 layers)"
    report.table(title, head, rows, "Median and quartiles of interleaved rounds, 1 thread.", measured)
