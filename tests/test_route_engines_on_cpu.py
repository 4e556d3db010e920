"""What rollout engines return, decoded: real payloads of two SGLang versions, and arrays as vLLM returns them."""

import base64
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from verl_sat.router_replay.engines import (
    SUPPORT,
    EngineUnsupported,
    check_engine_version,
    decode_array,
    decode_sglang,
)
from verl_sat.router_replay.layout import MoELayout
from verl_sat.router_replay.record import Missing, RouteRejected

DATA = Path(__file__).parent / "data"
PAYLOADS = {version: json.loads((DATA / f"sglang_{version}.json").read_text()) for version in ("0.5.12", "0.5.23")}
CASES = [(version, case["name"]) for version, payload in PAYLOADS.items() for case in payload["cases"]]
LAYOUT = MoELayout(16, 4, 4, (0, 1, 2, 3), "qwen3_moe")


def case_of(version, name):
    return next(case for case in PAYLOADS[version]["cases"] if case["name"] == name)


def decoded(case, layout=LAYOUT, **changes):
    arguments = {
        "payload": case["routed_experts"],
        "num_prompt": len(case["prompt_ids"]),
        "num_new": len(case["output_ids"]),
        "start_len": case["routed_experts_start_len"],
        "finish_reason": case["finish_reason"]["type"],
        "token_ids": case["prompt_ids"] + case["output_ids"],
        "sample": case["name"],
        "version": 7,
        **changes,
    }
    return decode_sglang(layout=layout, **arguments)


def ids_by_hand(payload, layers=4, top_k=4):
    """Without the code under test: every four bytes are a number, low byte first."""
    raw = base64.b64decode(payload)
    numbers = [int.from_bytes(raw[i : i + 4], "little", signed=True) for i in range(0, len(raw), 4)]
    rows = [numbers[i : i + layers * top_k] for i in range(0, len(numbers), layers * top_k)]
    return [[row[i : i + top_k] for i in range(0, layers * top_k, top_k)] for row in rows]


def encoded(ids):
    return base64.b64encode(np.ascontiguousarray(ids, "<i4").tobytes()).decode()


def refused(reason, call, *args, **kwargs):
    with pytest.raises(RouteRejected) as caught:
        call(*args, **kwargs)
    assert caught.value.reason == reason, caught.value
    return str(caught.value)


def test_the_payloads_are_what_the_tests_below_think_they_are():
    names = [{name for version, name in CASES if version == which} for which in PAYLOADS]
    assert names[0] == names[1]
    assert {"cold", "chunked_prefill", "no_new_token", "start_len_equals_prompt", "flag_not_requested"} <= names[0]
    for version, payload in PAYLOADS.items():
        assert (payload["num_experts"], payload["top_k"], payload["num_hidden_layers"]) == (16, 4, 4)
        assert payload["sglang"] == version and len(payload["cases"]) == 14


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize(("version", "name"), [c for c in CASES if c[1] != "flag_not_requested"])
def test_R04_real_payloads_row_by_row(version, name, as_bytes):
    case = case_of(version, name)
    start, tokens = case["routed_experts_start_len"], len(case["prompt_ids"]) + len(case["output_ids"])
    payload = case["routed_experts"].encode() if as_bytes else case["routed_experts"]
    record = decoded(case, payload=payload, engine_version=version)
    expected = ids_by_hand(case["routed_experts"])
    # a row per token but the last; 0.5.12 returns one for every prompt token if nothing was sampled
    assert record.num_rows == start + len(expected) == tokens - (name != "no_new_token" or version == "0.5.23")
    assert (record.codes[start:].astype(int) - 1).tolist() == expected
    assert not record.codes[:start].any() and (record.why_missing[:start] == Missing.ABSENT).all()
    assert record.recorded[start:].all() and record.codes.dtype == np.uint8
    assert (record.versions[start:] == 7).all() and (record.versions[:start] == -1).all()
    assert (record.header.engine, record.header.engine_version) == ("sglang", version)


@pytest.mark.parametrize(("version", "name"), [c for c in CASES if c[1] != "flag_not_requested"])
def test_real_payloads_are_what_transformers_chooses_on_the_same_tokens(version, name):
    """Row r of the record is token r, column l layer l: 92 to 100 % of the sets agree; shifted by a row, far fewer."""
    case = case_of(version, name)
    record = decoded(case)
    theirs = np.sort(np.array(case["transformers_routes"])[: record.num_rows], -1)
    ours = np.sort(record.codes.astype(int) - 1, -1)
    kept = record.recorded
    agree = (ours == theirs).all(-1)[kept].mean()
    assert agree > 0.916  # of 24 rows x layers in the shortest case two differ
    if kept.sum() >= 10:
        assert (ours[1:] == theirs[:-1]).all(-1)[kept[1:]].mean() < 0.5
        assert (ours == np.roll(theirs, 1, axis=1)).all(-1)[kept].mean() < 0.5


@pytest.mark.parametrize("version", PAYLOADS)
def test_R06_a_payload_that_is_not_there_is_missing_and_not_expert_0(version):
    case = case_of(version, "flag_not_requested")
    assert case["routed_experts"] is None
    record = decoded(case, engine_version=version)
    assert record.num_rows == len(case["prompt_ids"]) + len(case["output_ids"]) - 1
    assert not record.codes.any() and (record.why_missing == Missing.ABSENT).all()
    assert (record.versions == 7).all() and record.header.engine_version == version


@pytest.mark.parametrize(("num_prompt", "num_new"), [(12, 0), (12, 3), (0, 0), (1, 0)])
def test_aborted_in_the_queue_is_missing(num_prompt, num_new):
    for record in (
        decode_sglang(None, LAYOUT, num_prompt=num_prompt, num_new=num_new, finish_reason="abort"),
        decode_array(None, LAYOUT, engine="vllm", num_prompt=num_prompt, num_new=num_new),
    ):
        assert record.num_rows == max(num_prompt + num_new - 1, 0)
        assert (record.why_missing == Missing.ABSENT).all() and (record.versions == -1).all()


@pytest.mark.parametrize("version", PAYLOADS)
def test_rows_that_do_not_fit_the_tokens_are_refused_with_their_counts(version):
    case = case_of(version, "cold")  # 12 + 6 tokens, 17 rows
    decoded(case, num_new=5)  # as many rows as tokens
    for num_new in (4, 7):
        said = refused("rows", decoded, case, num_new=num_new)
        assert f"17 rows for 12 + {num_new} tokens from row 0 on, finished by length" in said and "cold" in said
    refused("rows", decoded, case, start_len=2)
    late = case_of(version, "start_len_equals_prompt")
    refused("rows", decoded, late, start_len=0)


@pytest.mark.parametrize("version", PAYLOADS)
def test_another_models_layout_is_refused(version):
    case = case_of(version, "cold")
    refused("layers", decoded, case, MoELayout(16, 4, 5, None, "m"))
    refused("layers", decoded, case, MoELayout(16, 3, 5, None, "m"))
    said = refused("rows", decoded, case, MoELayout(16, 8, 4, None, "m"), payload=encoded(np.zeros((18, 4, 4))))
    assert "9 rows" in said
    assert "8 experts, 0 to 7" in refused("range", decoded, case, MoELayout(8, 4, 4, (0, 1, 2, 3), "m"))


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        ("not base64!", "not base64"),
        ("abc", "not base64"),
        ("täx=", "not base64"),
        (base64.b64encode(b"12345"), "5 bytes, not whole int32"),
        ([1, 2], "a list, not base64 text"),
        (np.zeros((17, 4, 4), np.int32), "a ndarray, not base64 text"),
    ],
)
def test_what_is_no_payload_is_refused(payload, says):
    assert says in refused("dtype", decoded, case_of("0.5.12", "cold"), payload=payload)


def test_an_empty_payload_counts_as_no_rows():
    assert decode_sglang("", LAYOUT, num_prompt=1, num_new=0).num_rows == 0
    assert "0 rows" in refused("rows", decode_sglang, "", LAYOUT, num_prompt=5, num_new=0)
    after = decode_sglang("", LAYOUT, num_prompt=5, num_new=0, start_len=5)  # nothing beyond the prompt was asked for
    assert after.num_rows == 5 and not after.recorded.any()


@pytest.mark.parametrize("version", PAYLOADS)
def test_corrupted_payloads_are_refused(version):
    case = case_of(version, "chunked_prefill")
    ids = np.array(ids_by_hand(case["routed_experts"]))
    for reason, change in (
        ("range", lambda ids: ids.__setitem__((30, 2, 1), 16)),
        ("range", lambda ids: ids.__setitem__((30, 2, 1), -1)),
        ("duplicate", lambda ids: ids.__setitem__((30, 2, 1), ids[30, 2, 0])),
        ("duplicate", lambda ids: ids.__setitem__(30, 0)),
        ("all_zero", lambda ids: ids.__setitem__(slice(None), 0)),
        ("all_zero", lambda ids: ids.__setitem__((slice(None), 3), 0)),
        ("identical_rows", lambda ids: ids.__setitem__(slice(20, 70), ids[20].copy())),
    ):
        bad = ids.copy()
        change(bad)
        assert "chunked_prefill" in refused(reason, decoded, case, payload=encoded(bad))
    decoded(case, payload=encoded(ids))


def test_R01_dense_layers_are_zero_rows_in_the_payload():
    """As SGLang fills them; a copy of the model with two dense layers in front."""
    layout = MoELayout(16, 4, 6, (2, 3, 4, 5), "dense_first")
    case = case_of("0.5.23", "cold")
    moe = np.array(ids_by_hand(case["routed_experts"]))
    ids = np.concatenate([np.zeros((17, 2, 4), int), moe], 1)
    record = decoded(case, layout, payload=encoded(ids))
    assert not record.codes[:, :2].any()
    assert np.array_equal(record.codes[:, 2:].astype(int) - 1, moe)


# --- arrays -----------------------------------------------------------------------------------------------------------


def read_only(ids):
    ids = ids.copy()
    ids.flags.writeable = False
    return ids


@pytest.mark.parametrize("make", [np.asarray, read_only, torch.as_tensor], ids=["numpy", "read_only", "torch"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "hf"])
def test_R28_arrays_of_any_integer_dtype(make, dtype, engine):
    case = case_of("0.5.23", "cold")
    ids = np.array(ids_by_hand(case["routed_experts"])).astype(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = make(ids)
        record = decode_array(source, LAYOUT, engine=engine, num_prompt=12, num_new=6, version=3, engine_version="1")
    assert np.array_equal(record.codes.astype(int) - 1, ids) and np.array_equal(np.asarray(source), ids)
    assert (record.versions == 3).all() and record.header.engine == engine and record.header.engine_version == "1"


def test_R04_arrays_with_a_row_for_every_token_or_one_less():
    ids = np.array(ids_by_hand(case_of("0.5.23", "cold")["routed_experts"]))
    assert decode_array(ids, LAYOUT, engine="vllm", num_prompt=12, num_new=5).num_rows == 17
    for num_new in (4, 7):
        said = refused("rows", decode_array, ids, LAYOUT, engine="vllm", num_prompt=12, num_new=num_new, sample="q")
        assert f"17 rows for {12 + num_new} tokens" in said and "q" in said


def test_zeros_of_an_engine_that_captured_nothing_are_refused_whatever_the_version():
    for version in (None, "0.24.0", "0.30.0", "9.9"):
        zeros = np.zeros((17, 4, 4), np.uint8)
        said = refused(
            "all_zero", decode_array, zeros, LAYOUT, engine="vllm", num_prompt=12, num_new=6, engine_version=version
        )
        assert "eager" in said


def test_R01_an_array_of_moe_layers_only():
    layout = MoELayout(16, 4, 6, (2, 3, 4, 5), "dense_first")
    ids = np.array(ids_by_hand(case_of("0.5.23", "cold")["routed_experts"]))
    record = decode_array(ids, layout, engine="vllm", num_prompt=12, num_new=6)
    assert not record.codes[:, :2].any() and np.array_equal(record.codes[:, 2:].astype(int) - 1, ids)
    refused("layers", decode_array, ids[:, :3], layout, engine="vllm", num_prompt=12, num_new=6)


@pytest.mark.parametrize("ids", [torch.zeros(3, 2, 2, dtype=torch.bfloat16), [[[1, 2]], [[1]]], object()])
def test_what_is_no_array_is_rejected_and_does_not_kill_the_request(ids):
    layout = MoELayout(16, 2, 2, (0, 1), "m")
    refused("dtype", decode_array, ids, layout, engine="vllm", num_prompt=3, num_new=1)


def test_R27_a_neighbour_that_is_routed_like_a_run_of_one_token_does_not_condemn_it():
    layout = MoELayout(64, 8, 12, tuple(range(12)), "m")
    ids = np.broadcast_to(np.arange(8), (61, 12, 8))
    arguments = {"engine": "vllm", "num_prompt": 61, "num_new": 1}
    assert decode_array(ids, layout, **arguments, token_ids=[5] + [7] * 61).recorded.all()
    refused("identical_rows", decode_array, ids, layout, **arguments, token_ids=list(range(62)))


def test_R27_tokens_are_handed_to_the_check():
    layout = MoELayout(64, 8, 12, tuple(range(12)), "m")
    ids = np.broadcast_to(np.arange(8), (60, 12, 8))
    for call, source in ((decode_array, ids), (decode_sglang, encoded(ids))):
        arguments = {"num_prompt": 60, "num_new": 1, **({"engine": "vllm"} if call is decode_array else {})}
        refused("identical_rows", call, source, layout, **arguments)
        refused("identical_rows", call, source, layout, **arguments, token_ids=list(range(61)))
        assert call(source, layout, **arguments, token_ids=[5] * 61).recorded.all()


# --- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "version"), [("sglang", "0.5.12"), ("sglang", "0.5.23"), ("vllm", "0.30.0"), ("hf", None), ("hf", "5.1")]
)
def test_tested_versions_say_nothing(engine, version):
    assert check_engine_version(engine, version) is None


@pytest.mark.parametrize(
    ("engine", "version"),
    [
        ("sglang", "0.5.15"),
        ("sglang", "0.5.24"),
        ("sglang", "0.5.12.post1"),
        ("sglang", "0.5.12rc1"),
        ("sglang", "0.6"),
        ("vllm", "0.22.0"),
        ("vllm", "0.22.0rc1+cpu"),
        ("vllm", "0.32.0"),
        ("sglang", None),
        ("vllm", "built-by-hand"),
    ],
)
def test_other_versions_are_a_word_of_caution(engine, version):
    said = check_engine_version(engine, version)
    assert engine in said and all(tested in said for tested in SUPPORT[engine].tested)
    assert version is None or version in said


@pytest.mark.parametrize(
    ("engine", "version", "says"),
    [
        ("sglang", "0.5.11", "sglang >= 0.5.12"),
        ("sglang", "0.4.9.post6", "installed is 0.4.9.post6"),
        ("vllm", "0.21.9", "vllm >= 0.22.0"),
        ("trtllm", "1.0", "hf, sglang, vllm"),
    ],
)
def test_old_versions_and_other_engines_are_refused(engine, version, says):
    with pytest.raises(EngineUnsupported, match=says.replace(".", r"\.")) as error:
        check_engine_version(engine, version)
    assert engine in str(error.value)


def test_a_local_build_of_a_tested_version_is_that_version():
    assert check_engine_version("vllm", "0.30.0+cpu") is None
