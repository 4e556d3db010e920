"""Whether a record can be what a router chose for these tokens.

Every shape can be right and the content wrong: engines return zeros where a kernel bypasses the capture, repeat rows,
or count rows otherwise. What cannot have come from a router is refused here; what can but did not (the routes of older
weights, say) only shows in the share of disagreement during training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from verl_sat.router_replay.layout import MoELayout
from verl_sat.router_replay.record import RouteRecord, RouteRejected

IDENTICAL_ROWS = 50
"""Length from which a run of equal rows is taken for a fault of the capture."""
IDENTICAL_BITS = 32.0
"""A row must be able to take 2^32 values before equal rows say anything: a small router may be constant."""


def check(
    record: RouteRecord, num_tokens: int, sample: str = "", token_ids: Sequence[int] | None = None
) -> RouteRecord:
    """Refuse a record that does not fit its tokens, or that no router can have produced.

    - Rows: ``num_tokens`` or one less (the last sampled token has none).
    - All zero: where a layer takes several experts, all of them expert 0 in every row means that nothing was captured.
      A layer that takes one may choose expert 0 throughout; only if all layers do, over at least 32 rows x layers, it
      is refused.
    - Duplicates: the same expert twice in a row and layer.
    - Identical rows: runs of ``IDENTICAL_ROWS`` rows that are equal in all layers. Equal tokens in a row are really
      routed alike (attention over equal values gives that value), so where the tokens are known, a run is accepted
      unless its token changes ``IDENTICAL_ROWS / 2`` times. Nothing is concluded where all layers together can choose
      in less than 2^``IDENTICAL_BITS`` ways.

    Args:
        record: to be checked.
        num_tokens: tokens of the sample, prompt included.
        sample: for messages.
        token_ids: of the sample, ``[num_tokens]``; None if unknown, and a run of equal tokens is refused as well.

    Returns:
        The record itself.

    Raises:
        RouteRejected: with reason rows, all_zero, duplicate or identical_rows.
    """
    if record.num_rows not in (num_tokens, num_tokens - 1):
        raise RouteRejected(sample, "rows", f"{record.num_rows} rows for {num_tokens} tokens")
    kept = record.recorded
    codes = record.codes if kept.all() else record.codes[kept]
    layout = record.header.layout
    columns = np.flatnonzero(codes.any(axis=(0, 2)))  # dense layers hold nothing
    if len(columns) < codes.shape[1]:
        codes = codes[:, columns]
    if not codes.size:
        return record
    numbers = np.asarray(record.header.layers)[columns]
    _check_zeros(codes, numbers, layout, sample)
    _check_duplicates(codes, numbers, np.flatnonzero(kept), sample)
    _check_identical(codes, np.flatnonzero(kept), layout, sample, token_ids)
    return record


def _check_zeros(codes: np.ndarray, numbers: np.ndarray, layout: MoELayout, sample: str) -> None:
    zero = (codes == 1).all(axis=(0, 2))
    if layout.top_k == 1 and not (zero.all() and zero.size * len(codes) >= 32):
        return
    if zero.any():
        which = "all" if zero.all() else f"{int(zero.sum())}: {numbers[zero].tolist()}"
        raise RouteRejected(
            sample,
            "all_zero",
            f"in {which} of {zero.size} MoE layers every one of {len(codes)} rows is expert 0, {layout.top_k} times",
        )


def _check_duplicates(codes: np.ndarray, numbers: np.ndarray, rows: np.ndarray, sample: str) -> None:
    top_k = codes.shape[-1]
    planes = np.ascontiguousarray(np.moveaxis(codes, -1, 0))  # whole planes are compared, several times faster
    twice = np.zeros(codes.shape[:2], bool)
    for i in range(top_k):
        for j in range(i):
            twice |= planes[i] == planes[j]
    if twice.any():
        row, column = (int(at[0]) for at in np.nonzero(twice))
        raise RouteRejected(
            sample,
            "duplicate",
            f"{int(twice.sum())} of {twice.size} rows x layers name an expert twice, the first is row {rows[row]}, "
            f"layer {numbers[column]}: {(codes[row, column].astype(int) - 1).tolist()}",
        )


def _check_identical(
    codes: np.ndarray, rows: np.ndarray, layout: MoELayout, sample: str, token_ids: Sequence[int] | None
) -> None:
    bits = codes.shape[1] * math.log2(math.comb(layout.num_experts, layout.top_k))
    if len(codes) < IDENTICAL_ROWS or bits < IDENTICAL_BITS:
        return
    same = (codes[1:] == codes[:-1]).all(axis=(1, 2)) & (np.diff(rows) == 1)
    starts, lengths = _true_runs(same)
    long = lengths + 1 >= IDENTICAL_ROWS
    starts, lengths = starts[long], lengths[long] + 1
    if token_ids is not None and len(starts):
        tokens = np.asarray(token_ids)
        changes = np.concatenate([[0], np.cumsum(tokens[1:] != tokens[:-1])])
        first, last = rows[starts], rows[starts + lengths - 1]
        varied = changes[last] - changes[first] >= IDENTICAL_ROWS // 2  # a neighbour of a run may be routed like it
        starts, lengths = starts[varied], lengths[varied]
    if len(starts):
        raise RouteRejected(
            sample,
            "identical_rows",
            f"{int(lengths[0])} rows from row {int(rows[starts[0]])} on, of {len(codes)}, are the same in all "
            f"{codes.shape[1]} MoE layers",
        )


def _true_runs(flags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of the runs of True."""
    edges = np.diff(np.concatenate([[0], flags.astype(np.int8), [0]]))
    starts = np.flatnonzero(edges == 1)
    return starts, np.flatnonzero(edges == -1) - starts
