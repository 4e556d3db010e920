"""Records of routes: what goes in comes out, what is wrong is named, and joins keep who chose what.

Beside each join stands a reference that walks row by row, with a row as (ids or None, version, reason).
"""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from verl_sat.router_replay.checks import check
from verl_sat.router_replay.layout import MoELayout
from verl_sat.router_replay.record import (
    REMEDIES,
    FallbackCounts,
    Missing,
    RouteHeader,
    RouteRecord,
    RouteRejected,
    codes_of,
    expand_runs,
    fit,
    from_transport,
    join_blobs,
    merge_turns,
    missing,
    pack,
    pad,
    place,
    run_lengths,
    splice,
    to_transport,
    truncate,
)

ABSENT, REJECTED, UNREACHED = Missing.ABSENT, Missing.REJECTED, Missing.UNREACHED


def layout_of(experts=8, top_k=2, layers=3, moe=None):
    return MoELayout(experts, top_k, layers, tuple(range(layers)) if moe is None else moe, "toy_moe")


def random_ids(layout, rows, seed=0, dtype=np.int32):
    """Distinct experts for each row and layer, dense layers included."""
    scores = np.random.default_rng(seed).random((rows, layout.num_layers, layout.num_experts))
    return scores.argsort(-1)[..., : layout.top_k].astype(dtype)


def record_of(ids, layout, version=None, sample="s"):
    return RouteRecord.from_ids(np.asarray(ids), layout, engine="sglang", version=version, sample=sample)


def marked(layout, rows, mark, version=None):
    """Every row routes to expert ``mark`` and the ones after it."""
    ids = (mark + np.arange(layout.top_k)) % layout.num_experts
    return record_of(np.broadcast_to(ids, (rows, layout.num_layers, layout.top_k)), layout, version)


def marks(record):
    """First expert of each row, -1 where nothing is recorded."""
    return (record.codes[:, -1, 0].astype(int) - 1).tolist()


def as_rows(record):
    """A record by the row: (ids or None, version, reason)."""
    return [
        (None if not codes.any() else (codes.astype(int) - 1).tolist(), int(version), int(why))
        for codes, version, why in zip(record.codes, record.versions, record.why_missing, strict=True)
    ]


def refused(reason, call, *args, **kwargs):
    with pytest.raises(RouteRejected) as caught:
        call(*args, **kwargs)
    error = caught.value
    assert error.reason == reason and REMEDIES[reason] in str(error) and error.detail in str(error)
    assert "sample" in str(error)
    return error


# --- in and out -----------------------------------------------------------------------------------------------------

LAYOUTS = st.builds(
    lambda experts, top_k, layers, moe: MoELayout(
        experts,
        min(top_k, experts),
        layers,
        tuple(i for i in range(layers) if moe >> i & 1) or tuple(range(layers)),
        "toy_moe",
    ),
    st.sampled_from([2, 8, 127, 128, 254, 255, 256, 257, 512, 40000, 65535]),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 31),
)


def ids_by_hand(layout, rows, seed):
    """Distinct ids, the highest among them, without an array of all experts."""
    generator = np.random.default_rng(seed)
    first = generator.integers(0, layout.num_experts, (rows, layout.num_layers, 1))
    first[:1] = layout.num_experts - 1
    return (first + np.arange(layout.top_k)) % layout.num_experts


@settings(deadline=None, max_examples=60)
@given(LAYOUTS, st.integers(0, 9), st.integers(0, 99), st.sampled_from([np.int32, np.int64, np.uint16, np.uint32]))
def test_ids_survive_record_transport_pickle_and_padding(layout, rows, seed, dtype):
    ids = ids_by_hand(layout, rows, seed).astype(dtype)
    before = ids.copy()
    record = record_of(ids, layout, version=3)
    dense = [i for i in range(layout.num_layers) if i not in layout.moe_layers]
    expected = ids.astype(np.int64)
    expected[:, dense] = -1  # dense layers hold nothing
    header = record.header
    for codes in (
        record.codes,
        codes_of(to_transport(record), layout),
        from_transport(to_transport(record), header).codes,
        pickle.loads(pickle.dumps(record)).codes,
        pad([record], rows + 2)[0, :rows],
        pad([record], rows + 2, "left")[0, 2:],
        pack([record, record])[0][rows:],
        # as verl sends it: through torch, int16 again
        codes_of(torch.as_tensor(to_transport(record)).to(torch.int16).numpy(), layout),
    ):
        assert codes.dtype == layout.code_dtype
        assert np.array_equal(codes.astype(np.int64) - 1, expected)
    assert to_transport(record).dtype == np.int16
    assert to_transport(record).shape == (rows, layout.num_layers, layout.transport_width)
    assert np.array_equal(ids, before) and record.recorded.all() and (record.versions == 3).all()


def test_R12_ids_at_the_edges_of_narrow_dtypes_are_exact():
    layout = layout_of(experts=512, top_k=6, layers=2)
    ids = np.array([[[0, 127, 128, 255, 256, 511]] * 2] * 3, np.int64)
    record = record_of(ids, layout)
    assert record.codes.dtype == np.uint16
    for again in (
        from_transport(to_transport(record), record.header),
        pickle.loads(pickle.dumps(record)),
        from_transport(np.concatenate([to_transport(record), np.zeros((2, 2, 6), np.int16)]), record.header),
    ):
        assert (again.codes[:3].astype(int) - 1).tolist() == ids.tolist()
        assert not again.codes[3:].any() and (again.why_missing[3:] == ABSENT).all()
    ids[1, 1, 5] = 512
    error = refused("range", record_of, ids, layout, sample="r7")
    assert "expert 512 in row 1 of 3, layer 1" in str(error) and "512 experts, 0 to 511" in str(error)
    assert error.sample == "r7" and "r7" in str(error)
    ids[1, 1, 5] = -1
    assert "expert -1 " in str(refused("range", record_of, ids, layout))


@pytest.mark.parametrize(("experts", "dtype"), [(255, np.uint8), (256, np.uint16)])
def test_R12_the_dtype_does_not_depend_on_the_data(experts, dtype):
    layout = layout_of(experts=experts, top_k=1)
    for ids in (np.zeros((4, 3, 1), np.int64), np.full((4, 3, 1), experts - 1, np.int64)):
        assert record_of(ids, layout).codes.dtype == dtype
        assert (record_of(ids, layout).codes.astype(int) - 1 == ids).all()
    assert missing(layout, 4).codes.dtype == dtype


def test_transport_by_hand():
    """Bytes of the codes in order, a zero byte where top_k is odd; two bytes an id above 255 experts."""
    narrow = record_of([[[4, 2, 6]]], layout_of(top_k=3, layers=1))
    assert to_transport(narrow).view(np.uint8).tolist() == [[[5, 3, 7, 0]]]
    assert to_transport(narrow).tolist() == [[[5 + 3 * 256, 7]]]
    wide = record_of([[[4, 299]]], layout_of(experts=300, layers=1))
    assert to_transport(wide).tolist() == [[[5, 300]]]
    top = record_of([[[65534]]], layout_of(experts=65535, top_k=1, layers=1))
    assert to_transport(top).tolist() == [[[-1]]]  # 65535 as int16
    transport = to_transport(narrow)
    transport[:] = 0
    assert narrow.codes.any()  # a copy


def test_transport_of_another_model_is_refused():
    layout = layout_of(top_k=3)
    with pytest.raises(ValueError, match=r"int16 \[..., 2\]"):
        codes_of(np.zeros((1, 3, 3), np.int16), layout)
    with pytest.raises(ValueError, match="int32"):
        codes_of(np.zeros((1, 3, 2), np.int32), layout)


def test_R06_what_was_never_recorded_is_not_expert_0():
    """Seven rows, rows 4 and 5 a tool's reply: their zeros read as missing, real expert 0 as expert 0."""
    layout = layout_of()
    ids = random_ids(layout, 7)
    ids[1, :, 0], ids[1, :, 1] = 0, 3
    record = record_of(ids, layout)
    carried = to_transport(record)
    carried[4:6] = 0  # as verl's zero fill leaves them
    again = from_transport(carried, record.header)
    assert np.flatnonzero(~again.recorded).tolist() == [4, 5]
    assert again.codes[1, :, 0].tolist() == [1, 1, 1]
    counts = FallbackCounts()
    counts.add_record(again)
    assert counts.as_dict() == {"absent": 2}
    assert sum(counts.values()) / again.num_rows == pytest.approx(2 / 7)


def test_R25_bytes_of_a_long_answer():
    """32,768 tokens of 48 layers x top-8 of 128 experts: 12.6 MB, an eighth of int64; padding ships nothing."""
    layout = layout_of(experts=128, top_k=8, layers=48)
    record = missing(layout, 32768)
    assert record.codes.nbytes == to_transport(record).nbytes == 32768 * 384 == 12_582_912
    assert record.codes.nbytes * 8 == 100_663_296
    assert layout.bytes_per_token / (48 * 8) <= 2
    codes, offsets = pack([missing(layout, 5), missing(layout, 1000)])
    assert codes.nbytes == 1005 * 384 and offsets.tolist() == [0, 5, 1005]
    big = layout_of(experts=512, top_k=10, layers=48)
    assert missing(big, 10).codes.nbytes == 10 * 48 * 10 * 2


def test_R28_read_only_arrays_are_taken_without_a_word_and_left_alone():
    layout = layout_of(moe=(1, 2))
    ids = random_ids(layout, 5)
    before = ids.copy()
    ids.flags.writeable = False
    frozen = np.frombuffer(ids.tobytes(), np.int32).reshape(ids.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for source in (ids, frozen):
            record = check(record_of(source, layout), 6)
            carried = to_transport(fit(record, 8))
            torch.from_numpy(carried)
            torch.from_numpy(record.codes)
            pad([record], 9)[:] = 7
            carried[:] = 7
            truncate(record, 2), splice(record, record_of(source, layout), 0), merge_turns(record, record, 5)
    assert np.array_equal(ids, before) and np.array_equal(frozen, before)
    assert np.array_equal(record.codes[:, 1:].astype(int) - 1, before[:, 1:])


# --- layers ---------------------------------------------------------------------------------------------------------


def test_R01_layers_are_mapped_by_their_absolute_number():
    """Five layers, the first two dense, layer i routed to expert i."""
    layout = MoELayout(8, 1, 5, (2, 3, 4), "toy_moe")
    every = np.broadcast_to(np.arange(5)[:, None], (6, 5, 1))
    only_moe = every[:, 2:]
    for ids in (every, only_moe):
        record = record_of(ids, layout)
        assert record.header.layers == (0, 1, 2, 3, 4)
        assert record.codes[0, :, 0].tolist() == [0, 0, 3, 4, 5]  # dense: nothing; else expert + 1
    error = refused("layers", record_of, every[:, :4], layout)
    assert "4 layers in 6 rows" in str(error) and "has 5 (3 of them MoE)" in str(error)
    for bad in (every[:, :1], np.concatenate([every, every], 1)):
        refused("layers", record_of, bad, layout)


def test_R01_without_a_map_all_layers_must_be_there():
    layout = MoELayout(8, 2, 5, None, "toy_moe")
    ids = random_ids(layout_of(layers=5), 6)
    ids[:, :2] = 0  # as engines fill dense layers
    record = check(record_of(ids, layout), 7)
    assert record.codes.any(axis=(0, 2)).tolist() == [False, False, True, True, True]
    assert "does not tell" in str(refused("layers", record_of, ids[:, 2:], layout))
    refused("all_zero", check, record_of(np.zeros_like(ids), layout), 7)


def test_what_a_dense_layer_holds_is_ignored():
    layout = layout_of(moe=(1,))
    ids = random_ids(layout, 4)
    ids[:, 0], ids[:, 2] = -7, 99
    record = check(record_of(ids, layout), 5)
    assert not record.codes[:, [0, 2]].any() and record.codes[:, 1].all()


def test_top_k_and_dtype_must_be_those_of_the_model():
    layout = layout_of()
    assert "3 experts per row and layer, toy_moe takes 2" in str(
        refused("top_k", record_of, np.zeros((4, 3, 3), int), layout)
    )
    for wrong in (np.zeros((4, 3, 2)), np.zeros((4, 3, 2), bool), np.zeros((4, 3, 2), object)):
        refused("dtype", record_of, wrong, layout)
    refused("layers", record_of, np.zeros((4, 6), int), layout)


# --- checks ---------------------------------------------------------------------------------------------------------


def test_R04_one_row_per_token_or_one_less():
    layout = layout_of()
    ids = random_ids(layout, 7)
    assert check(record_of(ids, layout), 7, "a").num_rows == 7
    last_native = fit(check(record_of(ids[:6], layout), 7, "a"), 7)
    assert last_native.recorded.tolist() == [True] * 6 + [False] and last_native.why_missing[6] == UNREACHED
    assert not last_native.codes[6].any()
    for rows in (5, 8):
        error = refused("rows", check, record_of(random_ids(layout, rows), layout), 7, "uid-3")
        assert f"{rows} rows for 7 tokens" in str(error) and "uid-3" in str(error)


def test_an_expert_twice_in_a_row_is_refused():
    layout = layout_of(experts=8, top_k=4, layers=3, moe=(0, 2))
    ids = random_ids(layout, 9)
    check(record_of(ids, layout), 9)
    for i in range(4):
        for j in range(i):
            bad = ids.copy()
            bad[5, 2, i] = bad[5, 2, j]
            error = refused("duplicate", check, record_of(bad, layout), 9)
            assert "1 of 18 rows x layers" in str(error) and "row 5, layer 2" in str(error)
            assert str(bad[5, 2].tolist()) in str(error)


def test_duplicates_are_numbered_by_the_row_of_the_token():
    layout = layout_of()
    ids = random_ids(layout, 3)
    ids[1, 1] = 5
    record = place(record_of(ids, layout), 4)
    assert "row 5, layer 1" in str(refused("duplicate", check, record, 8))


def test_an_engine_that_captured_nothing_is_refused():
    layout = layout_of(moe=(1, 2))
    refused("all_zero", check, record_of(np.zeros((4, 3, 2), int), layout), 5)
    ids = random_ids(layout, 6)
    ids[:, 2] = 0  # one MoE layer of two
    error = refused("all_zero", check, record_of(ids, layout), 7, "x")
    assert "1: [2] of 2 MoE layers every one of 6 rows is expert 0, 2 times" in str(error)
    ids = random_ids(layout, 6)
    ids[3] = 0  # one stale row
    refused("duplicate", check, record_of(ids, layout), 7)


def test_top_1_may_choose_expert_0_but_not_everywhere():
    layout = layout_of(top_k=1, layers=4)
    ids = random_ids(layout, 60)
    ids[:, 1] = 0
    check(record_of(ids, layout), 60)
    check(record_of(np.zeros((7, 4, 1), int), layout), 7)  # 28 choices: unlikely, no proof
    error = refused("all_zero", check, record_of(np.zeros((8, 4, 1), int), layout), 8)
    assert "all of 4 MoE layers" in str(error)


@settings(deadline=None, max_examples=40)
@given(LAYOUTS.filter(lambda layout: layout.num_experts > 100), st.integers(0, 70), st.integers(0, 99))
def test_R27_random_valid_routes_are_not_flagged(layout, rows, seed):
    record = record_of(ids_by_hand(layout, rows, seed), layout)
    assert check(record, rows) is record and check(record, rows + 1) is record


def test_R27_fifty_identical_rows_are_flagged():
    layout = layout_of(experts=64, top_k=8, layers=12)
    good = random_ids(layout, 60)
    check(record_of(good, layout), 61)
    for start in (0, 10):
        bad = good.copy()
        bad[start : start + 50] = bad[start]
        error = refused("identical_rows", check, record_of(bad, layout), 61, "u")
        assert f"50 rows from row {start} on, of 60, are the same in all 12 MoE layers" in str(error)
        bad[start + 25, 11, 0] = next(e for e in range(64) if e not in bad[start, 11])  # one id in one layer
        check(record_of(bad, layout), 61)
        check(record_of(np.where(np.arange(60)[:, None, None] == start, good[59], bad), layout), 61)
    shorter = good.copy()
    shorter[3:52] = shorter[3]
    check(record_of(shorter, layout), 61)


def test_R27_missing_rows_in_between_are_no_run():
    layout = layout_of(experts=64, top_k=8, layers=12)
    record = record_of(np.repeat(random_ids(layout, 1), 60, 0), layout)
    codes, why = record.codes.copy(), record.why_missing.copy()
    codes[30], why[30] = 0, ABSENT
    check(RouteRecord(record.header, codes, record.versions, why), 60)
    check(missing(layout, 60), 60)


def test_R27_equal_tokens_are_really_routed_alike():
    """Attention over equal values is that value, whatever the weights: a model's own rows are the same to the bit."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        num_hidden_layers=6,
        num_experts=32,
        num_experts_per_tok=4,
        hidden_size=32,
        moe_intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
    )
    tokens = [9] * 80 + [3, 4, 5]
    with torch.no_grad():
        outputs = Qwen3MoeForCausalLM(config).eval()(torch.tensor([tokens]), output_router_logits=True)
    ids = torch.stack([logits.topk(4).indices for logits in outputs.router_logits], 1).numpy()
    assert (np.sort(ids[:80]) == np.sort(ids[:1])).all()  # the premise
    ids[:80] = ids[0]
    record = record_of(ids, MoELayout.from_config(config))
    check(record, 83, token_ids=tokens)
    refused("identical_rows", check, record, 83)
    other = [9 + t % 7 for t in range(83)]  # the tokens change, the rows do not: copied rows
    refused("identical_rows", check, record, 83, token_ids=other)


def test_R27_a_small_router_may_be_constant():
    """Two layers with 28 choices each say nothing; eight do."""
    for layers, flagged in ((2, False), (8, True)):
        record = marked(layout_of(layers=layers), 60, 3)
        if flagged:
            refused("identical_rows", check, record, 60)
        else:
            check(record, 60)


# --- truncate, fit, place -------------------------------------------------------------------------------------------


def test_R11_routes_are_cut_like_the_response():
    layout = layout_of()
    record = record_of(random_ids(layout, 18), layout, version=2)
    cut = truncate(record, 5 + 10)
    assert as_rows(cut) == as_rows(record)[:15]
    assert as_rows(truncate(record, 99)) == as_rows(record) and truncate(record, 0).num_rows == 0


# A record of up to 6 rows that differ, with missing rows of all kinds.
ROWS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 7), st.just(0)),
        st.tuples(st.none(), st.sampled_from([ABSENT, REJECTED, UNREACHED])),
    ),
    max_size=6,
)


def built(rows, version):
    layout = layout_of(layers=2)
    record = marked(layout, len(rows), 0, version)
    codes, why = record.codes.copy(), record.why_missing.copy()
    for row, (mark, reason) in enumerate(rows):
        codes[row] = 0 if mark is None else (mark + np.arange(2)) % 8 + 1
        why[row] = reason
    return RouteRecord(record.header, codes, record.versions, why)


def unchanged(*records):
    copies = [as_rows(record) for record in records]
    return lambda: copies == [as_rows(record) for record in records]


@given(ROWS, st.integers(0, 9))
def test_fit_and_truncate_row_by_row(rows, num_tokens):
    record = built(rows, 4)
    same = unchanged(record)
    reference = as_rows(record)[:num_tokens]
    assert as_rows(truncate(record, num_tokens)) == reference
    reference = reference + [(None, -1, UNREACHED)] * (num_tokens - len(reference))
    assert as_rows(fit(record, num_tokens)) == reference
    assert fit(record, num_tokens).header == record.header and same()


@given(ROWS, st.integers(0, 3))
def test_place_row_by_row(rows, start):
    record = built(rows, 4)
    assert as_rows(place(record, start)) == [(None, -1, ABSENT)] * start + as_rows(record)


# --- splice ---------------------------------------------------------------------------------------------------------


def test_R09_a_resumed_rollout_keeps_the_rows_of_the_first_version():
    """Prompt of 3, 2 tokens under v1: 4 rows. Abort. 2 tokens under v2: 6 rows, of which the last 2 are new."""
    layout = layout_of()
    joined = splice(marked(layout, 4, 1, version=1), marked(layout, 6, 2, version=2), 2)
    assert marks(joined) == [1, 1, 1, 1, 2, 2] and joined.versions.tolist() == [1, 1, 1, 1, 2, 2]
    again = splice(joined, marked(layout, 9, 5, version=3), 3)
    assert marks(again) == [1, 1, 1, 1, 2, 2, 5, 5, 5] and again.versions.tolist() == [1] * 4 + [2] * 2 + [3] * 3


def test_R09_a_segment_without_routes_is_missing_and_not_relabelled():
    layout = layout_of()
    joined = splice(missing(layout, 4, ABSENT, version=1), marked(layout, 6, 2, version=2), 2)
    assert marks(joined) == [-1, -1, -1, -1, 2, 2] and joined.why_missing.tolist() == [ABSENT] * 4 + [0, 0]
    joined = splice(marked(layout, 4, 1, version=1), missing(layout, 6, ABSENT, version=2), 2)
    assert marks(joined) == [1, 1, 1, 1, -1, -1] and joined.versions.tolist() == [1, 1, 1, 1, 2, 2]


def test_R09_an_abort_before_the_first_token():
    """An engine may return a row for each prompt token then; the continuation adds one row less."""
    layout = layout_of()
    assert marks(splice(marked(layout, 3, 1), marked(layout, 4, 2), 2)) == [1, 1, 1, 2]
    assert marks(splice(marked(layout, 2, 1), marked(layout, 4, 2), 2)) == [1, 1, 2, 2]


@settings(max_examples=200)
@given(ROWS, ROWS, st.integers(0, 4))
def test_splice_row_by_row(old_rows, new_rows, new_tokens):
    old, new = built(old_rows, 1), built(new_rows, 2)
    same = unchanged(old, new)
    kept = as_rows(old)
    while kept and kept[-1][2] == UNREACHED:
        kept.pop()
    added = as_rows(new)[len(kept) :]
    if len(new_rows) < len(kept) or len(added) not in (new_tokens - 1, new_tokens, new_tokens + 1):
        error = refused("join", splice, old, new, new_tokens, "s4")
        assert f"{len(kept)} rows before, {len(new_rows)} after a continuation by {new_tokens} tokens" in str(error)
    else:
        assert as_rows(splice(old, new, new_tokens)) == kept + added
    assert same()


# --- turns ----------------------------------------------------------------------------------------------------------


def test_R07_the_first_captured_rows_win():
    """Turn 1 under v3; turn 2 returns the whole conversation anew under v4."""
    layout = layout_of()
    merged = merge_turns(marked(layout, 5, 1, version=3), marked(layout, 9, 2, version=4), shared=6)
    assert marks(merged) == [1] * 5 + [2] * 4 and merged.versions.tolist() == [3] * 5 + [4] * 4
    rewritten = merge_turns(marked(layout, 5, 1, version=3), marked(layout, 9, 2, version=4), shared=3)
    assert marks(rewritten) == [1] * 3 + [2] * 6


@settings(max_examples=200)
@given(ROWS, ROWS, st.integers(0, 8))
def test_merge_turns_row_by_row(first_rows, later_rows, shared):
    first, later = built(first_rows, 1), built(later_rows, 2)
    same = unchanged(first, later)
    earlier = as_rows(first)
    expected = [
        earlier[r] if r < shared and r < len(earlier) and earlier[r][2] == Missing.RECORDED else row
        for r, row in enumerate(as_rows(later))
    ]
    assert as_rows(merge_turns(first, later, shared)) == expected and same()


def test_R08_counts_decide_how_the_records_of_a_trajectory_belong_together():
    layout = layout_of()
    five, four, nine, six = (marked(layout, rows, mark) for rows, mark in ((5, 1), (4, 2), (9, 3), (6, 4)))
    assert marks(join_blobs([five, nine], 10)) == [3] * 9  # the second is whole
    assert marks(join_blobs([five, four], 10)) == [1] * 5 + [2] * 4  # only what is new
    assert marks(join_blobs([marked(layout, 5, 1), marked(layout, 5, 2)], 10)) == [1] * 5 + [2] * 5  # a row a token
    error = refused("join", join_blobs, [five, six], 10, sample="t1")
    assert "[5, 6] rows in 2 records for 10 tokens" in str(error) and "t1" in str(error)
    refused("join", join_blobs, [], 10)


def test_R08_a_rewritten_prefix_is_not_joined():
    """A chat template that rewrites the end of a turn: 5 rows of which only 4 tokens are still there."""
    layout = layout_of()
    five, four = marked(layout, 5, 1), marked(layout, 4, 2)
    assert marks(join_blobs([five, four], 10, shared=5)) == [1] * 5 + [2] * 4
    assert "share 4" in str(refused("join", join_blobs, [five, four], 10, shared=4))
    assert marks(join_blobs([five, marked(layout, 9, 3)], 10, shared=4)) == [3] * 9


# --- several samples ------------------------------------------------------------------------------------------------


@given(st.lists(ROWS, min_size=1, max_size=4), st.sampled_from(["left", "right"]), st.integers(0, 3))
def test_pad_and_pack_row_by_row(samples, side, more):
    records = [built(rows, 1) for rows in samples]
    length = max(map(len, samples)) + more
    padded = pad(records, length, side)
    codes, offsets = pack(records)
    for number, record in enumerate(records):
        blank = [[[0, 0], [0, 0]]] * (length - record.num_rows)
        own = record.codes.tolist()
        assert padded[number].tolist() == (blank + own if side == "left" else own + blank)
        assert codes[offsets[number] : offsets[number + 1]].tolist() == own
    assert offsets[-1] == len(codes) and padded.dtype == codes.dtype == np.uint8
    if length:
        with pytest.raises(ValueError, match="does not fit"):
            pad([*records, built([(1, 0)] * (length + 1), 1)], length)


def test_records_of_different_models_are_not_put_together():
    one, other = marked(layout_of(), 2, 1), marked(layout_of(experts=9), 2, 1)
    for join in (
        lambda: pack([one, other]),
        lambda: pad([one, other], 4),
        lambda: splice(one, marked(layout_of(experts=9), 3, 1), 1),
        lambda: merge_turns(one, other, 1),
        lambda: join_blobs([one, other], 4),
    ):
        with pytest.raises(ValueError, match="different models"):
            join()


def test_pad_wants_a_side_it_knows():
    with pytest.raises(ValueError, match="middle"):
        pad([marked(layout_of(), 2, 1)], 4, "middle")


# --- small things ---------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-1, 3)))
def test_run_lengths_go_round(values):
    runs = run_lengths(np.array(values, np.int64))
    assert [value for value, count in runs for _ in range(count)] == values
    assert all(a[0] != b[0] for a, b in zip(runs, runs[1:], strict=False)) and all(count > 0 for _, count in runs)
    again = expand_runs(runs, np.int64)
    assert again.tolist() == values and again.dtype == np.int64
    assert all(type(x) is int for run in runs for x in run)


def test_fallbacks_are_counted_by_reason():
    layout = layout_of()
    counts, other = FallbackCounts(), FallbackCounts()
    counts.add_record(fit(marked(layout, 3, 1), 5))
    counts.add("top_k", 7)
    counts.add("join", 0)
    other.add_record(missing(layout, 2, REJECTED))
    other.add_record(missing(layout, 4, ABSENT))
    other.add_record(fit(marked(layout, 3, 1), 4))
    counts.merge(other)
    assert counts.as_dict() == {"unreached": 3, "top_k": 7, "rejected": 2, "absent": 4}
    assert type(counts.as_dict()) is dict


def test_a_rejection_crosses_processes_whole():
    error = RouteRejected("s", "rows", "5 rows for 7 tokens")
    again = pickle.loads(pickle.dumps(error))
    assert (again.sample, again.reason, again.detail, str(again)) == ("s", "rows", "5 rows for 7 tokens", str(error))
    assert str(copy.copy(error)) == str(error) and isinstance(error, ValueError)
    assert "(unnamed)" in str(RouteRejected("", "rows", "x"))


def test_a_record_holds_what_it_says():
    layout = layout_of()
    header = RouteHeader(layout, (0, 1, 2))
    rows, versions, why = np.zeros((2, 3, 2), np.uint8), np.zeros(2, np.int64), np.zeros(2, np.uint8)
    RouteRecord(header, rows, versions, why)
    for bad in ((rows[:, :2], versions, why), (rows.astype(np.int32), versions, why), (rows, versions[:1], why)):
        with pytest.raises(ValueError):
            RouteRecord(header, *bad)
    with pytest.raises(AttributeError):
        marked(layout, 1, 1).codes = rows
