"""SGLang's own capturer, detokenizer and extractor, and our decoder behind them: the routes that went in come out."""

import json

import environments
import numpy as np
import pytest

from verl_sat.router_replay.engines import SUPPORT, decode_sglang
from verl_sat.router_replay.layout import MoELayout
from verl_sat.router_replay.record import Missing

LAYERS, EXPERTS, TOP_K = 5, 300, 4
LENGTHS = [
    (40, 6, 0),
    (12, 1, 0),
    (1, 9, 0),
    (33, 0, 0),
    (20, 5, 20),
    (20, 5, 7),
]  # prompt, new tokens, first row asked


def routes_of(tokens, seed):
    """Distinct random experts ``[tokens, layers, top_k]``."""
    order = np.random.default_rng(seed).random((tokens, LAYERS, EXPERTS)).argsort(-1)
    return order[..., :TOP_K]


@pytest.mark.parametrize(
    ("shared_experts", "overlap"), [(0, False), (1, True)], ids=["plain", "shared_experts_and_overlap_scheduling"]
)
@pytest.mark.parametrize("version", SUPPORT["sglang"].tested)
def test_routes_go_through_sglangs_own_code(engine_python, tmp_path, version, shared_experts, overlap):
    python = engine_python("sglang", version)
    dense = [0, 3]
    routes = [routes_of(prompt + new, seed) for seed, (prompt, new, _) in enumerate(LENGTHS)]
    requests = [
        {"num_prompt": prompt, "num_new": new, "start": start, "routes": ids.tolist()}
        for (prompt, new, start), ids in zip(LENGTHS, routes, strict=True)
    ]
    job = {
        "num_layers": LAYERS,
        "top_k": TOP_K,
        "chunk": 16,
        "shared_experts": shared_experts,
        "dense_layers": dense,
        "overlap": overlap,
        "requests": requests,
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    environments.run(python, "sglang_capturer.py", tmp_path / "job.json", tmp_path / "out.json")
    out = json.loads((tmp_path / "out.json").read_text())
    assert out["sglang"] == version

    layout = MoELayout(EXPERTS, TOP_K, LAYERS, tuple(sorted(set(range(LAYERS)) - set(dense))), "test")
    for (prompt, new, start), ids, answer in zip(LENGTHS, routes, out["answers"], strict=True):
        record = decode_sglang(answer["payload"], layout, num_prompt=prompt, num_new=new, start_len=start)
        rows = prompt + new - 1
        assert record.num_rows == rows
        expected = (ids[:rows] + 1).copy()
        expected[:, dense] = 0
        expected[:start] = 0
        np.testing.assert_array_equal(record.codes, expected)
        assert (record.why_missing[:start] == Missing.ABSENT).all() and record.recorded[start:].all()
        # and as SGLang itself reads its text
        extracted = np.array(answer["extracted"]).reshape(rows - start, LAYERS, TOP_K)
        moe = list(layout.moe_layers)
        np.testing.assert_array_equal(record.codes[start:, moe].astype(int) - 1, extracted[:, moe])
