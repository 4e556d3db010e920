"""Records of routes: which experts each token took in each layer, what is missing, and which weights chose.

A record holds *codes*, an unsigned array ``[rows, layers, top_k]``: 0 means "not recorded, route natively", any other
value is the expert id plus one. So zeros, which every framework fills gaps with, never read as expert 0. The dtype
follows from the number of experts in the configuration (:class:`~verl_sat.router_replay.layout.MoELayout`), never from
the data.

Row r belongs to token r of the sample, prompt first: the experts that the token took as input. An engine has none for
the last sampled token, which nobody has run through the model yet, so a sample of n tokens comes with n - 1 rows.
Column c belongs to hidden layer ``header.layers[c]``; the columns of dense layers hold zeros.

Nothing here writes to its inputs, and no function loops over tokens. Every refusal is a :class:`RouteRejected` that
names the sample, the counts and what to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from verl_sat.router_replay.layout import MoELayout


class Missing(IntEnum):
    """Why a row is not recorded."""

    RECORDED = 0
    ABSENT = 1
    """The engine gave none."""
    REJECTED = 2
    """What the engine gave failed the checks."""
    UNREACHED = 3
    """After the engine's last row: the last sampled token, a tool's reply at the end."""


REMEDIES = {
    "rows": "an engine must return one row per token, or one less for the last sampled token",
    "layers": "rollout and training must run the same model, and the map of MoE layers must be in its configuration",
    "top_k": "rollout and training must run the same model; shared experts must not be among the recorded ones",
    "range": "rollout and training must run the same model with the same number of experts",
    "duplicate": "a router picks distinct experts: the engine's capture is broken, run it eager or try another version",
    "all_zero": "the engine's kernels bypass its capture: run it eager, with another MoE backend or another version",
    "identical_rows": "the engine's capture repeats rows (CUDA graphs, speculative decoding and KV transfer are known "
    "to): run it without, or try another version",
    "dtype": "the engine must return whole numbers",
    "join": "the parts of a trajectory must cover it exactly; its routes are dropped rather than guessed",
}


class RouteRejected(ValueError):
    """Routes that cannot be trusted, or do not belong to the tokens.

    Attributes:
        sample: which sample or request, "" if unknown.
        reason: one of the keys of ``REMEDIES``.
        detail: what was found, with counts.
    """

    def __init__(self, sample: str, reason: str, detail: str) -> None:
        self.sample, self.reason, self.detail = sample, reason, detail
        super().__init__(f"routes of sample {sample or '(unnamed)'}: {detail}; {REMEDIES[reason]}")

    def __reduce__(self) -> tuple[Any, ...]:  # it crosses processes
        return type(self), (self.sample, self.reason, self.detail)


@dataclass(frozen=True)
class RouteHeader:
    """What the columns of a record mean and where it came from.

    Attributes:
        layout: of the model.
        layers: absolute number of the hidden layer of each column.
        engine: name of the rollout engine.
        engine_version: None if unknown.
    """

    layout: MoELayout
    layers: tuple[int, ...]
    engine: str = ""
    engine_version: str | None = None


@dataclass(frozen=True, eq=False)
class RouteRecord:
    """Routes of one sample.

    Attributes:
        header: what the columns mean.
        codes: ``[rows, layers, top_k]`` of ``layout.code_dtype``; 0 not recorded, else expert id + 1.
        versions: version of the weights that chose, int64 ``[rows]``; -1 unknown.
        why_missing: :class:`Missing` of each row, uint8 ``[rows]``.
    """

    header: RouteHeader
    codes: np.ndarray
    versions: np.ndarray
    why_missing: np.ndarray

    def __post_init__(self) -> None:
        layout, rows = self.header.layout, len(self.codes)
        expected = (rows, len(self.header.layers), layout.top_k)
        if self.codes.shape != expected or self.codes.dtype != layout.code_dtype:
            raise ValueError(f"codes {self.codes.dtype} {self.codes.shape}, not {layout.code_dtype} {expected}")
        if self.versions.shape != (rows,) or self.why_missing.shape != (rows,):
            raise ValueError(f"{self.versions.shape} versions and {self.why_missing.shape} reasons for {rows} rows")

    @property
    def num_rows(self) -> int:
        """Rows, recorded or not."""
        return len(self.codes)

    @property
    def recorded(self) -> np.ndarray:
        """Which rows are recorded, bool ``[rows]``."""
        return self.why_missing == Missing.RECORDED

    @property
    def nbytes(self) -> int:
        """Bytes of codes, versions and reasons."""
        return self.codes.nbytes + self.versions.nbytes + self.why_missing.nbytes

    @classmethod
    def from_ids(
        cls,
        ids: Any,
        layout: MoELayout,
        *,
        engine: str,
        engine_version: str | None = None,
        version: int | None = None,
        sample: str = "",
    ) -> RouteRecord:
        """From expert ids, as engines return them.

        Args:
            ids: whole numbers ``[rows, layers, top_k]``; layers are all hidden layers, what dense ones hold is ignored,
                or exactly the MoE layers where the configuration names them. Never written to, and copied.
            layout: of the model.
            engine: name of the rollout engine.
            engine_version: its version.
            version: of the weights that chose, None if unknown.
            sample: for messages.

        Raises:
            RouteRejected: dtype, shape or range. What else can be wrong is for `checks.py`.
        """
        ids = np.asarray(ids)
        if ids.dtype.kind not in "iu":
            raise RouteRejected(sample, "dtype", f"expert ids are {ids.dtype}, not integers")
        if ids.ndim != 3:
            raise RouteRejected(sample, "layers", f"shape {ids.shape}, not [rows, layers, top_k]")
        if ids.shape[2] != layout.top_k:
            raise RouteRejected(
                sample, "top_k", f"{ids.shape[2]} experts per row and layer, {layout.model_type} takes {layout.top_k}"
            )
        columns, moe_ids = _moe_columns(ids, layout, sample)
        if moe_ids.size:
            low, high = int(moe_ids.min()), int(moe_ids.max())
            if low < 0 or high >= layout.num_experts:
                bad = low if low < 0 else high
                row, column, _ = (int(at[0]) for at in np.nonzero(moe_ids == bad))
                raise RouteRejected(
                    sample,
                    "range",
                    f"expert {bad} in row {row} of {len(ids)}, layer {columns[column]}; {layout.model_type} has "
                    f"{layout.num_experts} experts, 0 to {layout.num_experts - 1}",
                )
        codes = np.zeros((len(ids), layout.num_layers, layout.top_k), layout.code_dtype)
        moe_codes = moe_ids.astype(layout.code_dtype)
        moe_codes += 1
        codes[:, columns] = moe_codes
        header = RouteHeader(layout, tuple(range(layout.num_layers)), engine, engine_version)
        return cls(header, codes, _versions(len(ids), version), np.zeros(len(ids), np.uint8))


def _moe_columns(ids: np.ndarray, layout: MoELayout, sample: str) -> tuple[Sequence[int] | slice, np.ndarray]:
    """Numbers of the layers that hold experts and their ids ``[rows, MoE layers, top_k]``."""
    every, known = range(layout.num_layers), layout.moe_layers
    if ids.shape[1] == layout.num_layers:
        if known is None:  # zeros throughout cannot be a choice of several: a dense layer, unless they all are
            dense = ~ids.any(axis=(0, 2)) if layout.top_k > 1 else np.zeros(layout.num_layers, bool)
            known = every if dense.all() else tuple(np.flatnonzero(~dense).tolist())
        if len(known) == layout.num_layers:
            return every, ids
        return list(known), ids[:, list(known)]
    if known is not None and ids.shape[1] == len(known):
        return list(known), ids
    moe_only = (
        "which are the MoE layers its configuration does not tell" if known is None else f"{len(known)} of them MoE"
    )
    raise RouteRejected(
        sample,
        "layers",
        f"{ids.shape[1]} layers in {len(ids)} rows, {layout.model_type} has {layout.num_layers} ({moe_only})",
    )


def missing(
    layout: MoELayout,
    rows: int,
    why: Missing = Missing.ABSENT,
    version: int | None = None,
    *,
    engine: str = "",
    engine_version: str | None = None,
) -> RouteRecord:
    """A record of ``rows`` rows in which nothing is recorded.

    Args:
        layout: of the model.
        rows: tokens, or one less.
        why: reason, the same for all rows.
        version: of the weights that sampled, None if unknown.
        engine: name of the rollout engine.
        engine_version: its version.
    """
    header = RouteHeader(layout, tuple(range(layout.num_layers)), engine, engine_version)
    codes = np.zeros((rows, layout.num_layers, layout.top_k), layout.code_dtype)
    return RouteRecord(header, codes, _versions(rows, version), np.full(rows, why, np.uint8))


# --- shaping ------------------------------------------------------------------------------------------------------


def fit(record: RouteRecord, num_tokens: int) -> RouteRecord:
    """Cut to ``num_tokens`` rows, or filled up with rows that the engine did not reach."""
    more = num_tokens - record.num_rows
    if more <= 0:
        return truncate(record, num_tokens)
    header = record.header
    tail = missing(header.layout, more, Missing.UNREACHED)
    return _concatenate([record, RouteRecord(header, tail.codes, tail.versions, tail.why_missing)])


def place(record: RouteRecord, start: int) -> RouteRecord:
    """The record of a request that asked for rows from ``start`` on, with the rows before, which are missing."""
    if not start:
        return record
    header = record.header
    before = missing(header.layout, start, Missing.ABSENT)
    return _concatenate([RouteRecord(header, before.codes, before.versions, before.why_missing), record])


def truncate(record: RouteRecord, num_tokens: int) -> RouteRecord:
    """The first ``num_tokens`` rows, by the rule that cuts the token ids; all if there are fewer."""
    return _rows(record, slice(0, max(num_tokens, 0)))


def splice(old: RouteRecord, new: RouteRecord, new_tokens: int, sample: str = "") -> RouteRecord:
    """Join what an aborted request had recorded to what its continuation recorded.

    The continuation ran the whole prefix anew, under newer weights; the earlier rows keep what chose them when their
    tokens were sampled, and their version. Earlier rows that are missing stay missing: the newer weights' choice for
    them is not what sampled.

    Args:
        old: rows of prompt and earlier tokens, without the last sampled one.
        new: rows of the continuation from the first token of the prompt on.
        new_tokens: tokens that the continuation sampled.
        sample: for messages.

    Raises:
        RouteRejected: with reason join, if the rows that are new do not belong to the new tokens.
    """
    reached = np.flatnonzero(old.why_missing != Missing.UNREACHED)
    kept = int(reached[-1]) + 1 if len(reached) else 0
    added = new.num_rows - kept
    if abs(added - new_tokens) > 1 or added < 0:
        raise RouteRejected(
            sample, "join", f"{kept} rows before, {new.num_rows} after a continuation by {new_tokens} tokens"
        )
    return _concatenate([_rows(old, slice(0, kept)), _rows(new, slice(kept, None))])


def merge_turns(first: RouteRecord, later: RouteRecord, shared: int) -> RouteRecord:
    """Join the record of an earlier turn to that of a later one, which covers the whole conversation anew.

    Up to the tokens that both share, recorded rows of the earlier turn win: they chose when those tokens were sampled.
    Rows that it did not record, its last token and a tool's reply among them, are the later turn's, with its version.

    Args:
        first: the earlier turn, or earlier turns merged.
        later: the later turn; the result has its rows.
        shared: leading tokens that are the same in both. A chat template may rewrite the end of a turn.
    """
    shared = min(max(shared, 0), first.num_rows, later.num_rows)
    wins = first.recorded[:shared]
    codes, versions, why = later.codes.copy(), later.versions.copy(), later.why_missing.copy()
    codes[:shared][wins] = first.codes[:shared][wins]
    versions[:shared][wins] = first.versions[:shared][wins]
    why[:shared][wins] = Missing.RECORDED
    _same_columns([first, later])
    return RouteRecord(later.header, codes, versions, why)


def join_blobs(
    blobs: Sequence[RouteRecord], num_tokens: int, *, shared: int | None = None, sample: str = ""
) -> RouteRecord:
    """Records of the requests of one trajectory, in order, from a server that may send all rows or only new ones.

    Counts decide: if the last record covers the trajectory alone, it is taken; if all together do, they are joined;
    else nothing is guessed.

    Args:
        blobs: one record per request.
        num_tokens: of the trajectory.
        shared: leading tokens that are the same in the last request and those before it, None if all are.
        sample: for messages.

    Raises:
        RouteRejected: with reason join.
    """
    counts = [blob.num_rows for blob in blobs]
    fits = (num_tokens, num_tokens - 1)
    if counts and counts[-1] in fits:
        return blobs[-1]
    before = sum(counts[:-1])
    if sum(counts) in fits and (shared is None or before <= shared) and counts:
        return _concatenate(blobs)
    prefix = "" if shared is None else f", of which the requests share {shared}"
    raise RouteRejected(sample, "join", f"{counts} rows in {len(counts)} records for {num_tokens} tokens{prefix}")


def pack(records: Sequence[RouteRecord]) -> tuple[np.ndarray, np.ndarray]:
    """Codes of all samples one after the other, and where each begins.

    Returns:
        Codes ``[all rows, layers, top_k]`` and int64 offsets ``[samples + 1]``.
    """
    _same_columns(records)
    offsets = np.zeros(len(records) + 1, np.int64)
    np.cumsum([record.num_rows for record in records], out=offsets[1:])
    return np.concatenate([record.codes for record in records]), offsets


def pad(records: Sequence[RouteRecord], length: int, side: str = "right") -> np.ndarray:
    """Codes ``[samples, length, layers, top_k]``; padding rows are not recorded.

    Args:
        records: of ``length`` rows at most.
        length: rows of the result.
        side: where the padding goes, "left" or "right".

    Raises:
        ValueError: an unknown side or a record that is longer.
    """
    if side not in ("left", "right"):
        raise ValueError(f"side={side!r}, not 'left' or 'right'")
    _same_columns(records)
    codes = np.zeros((len(records), length, *records[0].codes.shape[1:]), records[0].codes.dtype)
    for row, record in zip(codes, records, strict=True):
        if record.num_rows > length:
            raise ValueError(f"a record of {record.num_rows} rows does not fit into {length}")
        start = length - record.num_rows if side == "left" else 0
        row[start : start + record.num_rows] = record.codes
    return codes


def _rows(record: RouteRecord, rows: slice) -> RouteRecord:
    return RouteRecord(record.header, record.codes[rows], record.versions[rows], record.why_missing[rows])


def _concatenate(records: Sequence[RouteRecord]) -> RouteRecord:
    _same_columns(records)
    return RouteRecord(
        records[-1].header,
        np.concatenate([record.codes for record in records]),
        np.concatenate([record.versions for record in records]),
        np.concatenate([record.why_missing for record in records]),
    )


def _same_columns(records: Sequence[RouteRecord]) -> None:
    columns = {(record.header.layout, record.header.layers) for record in records}
    if len(columns) != 1:
        raise ValueError(f"records of {len(columns)} different models or layer maps cannot be put together")


def _versions(rows: int, version: int | None) -> np.ndarray:
    return np.full(rows, -1 if version is None else version, np.int64)


# --- transport ----------------------------------------------------------------------------------------------------


def to_transport(record: RouteRecord) -> np.ndarray:
    """As verl carries it: the bytes of the codes as int16 ``[rows, layers, width]``, a copy.

    verl casts, slices, concatenates and zero-fills what it carries in ``routed_experts``
    (``verl/experimental/agent_loop/agent_loop.py``); all of that leaves these bytes alone, and its zeros read as "not
    recorded". One-byte codes go in pairs, with a zero byte where top_k is odd.
    """
    layout, codes = record.header.layout, record.codes
    width = layout.transport_width * 2 // layout.code_dtype.itemsize
    carried = np.zeros((*codes.shape[:2], width), layout.code_dtype)
    carried[..., : layout.top_k] = codes
    return carried.view("<i2")


def codes_of(transport: np.ndarray, layout: MoELayout) -> np.ndarray:
    """Codes ``[..., layers, top_k]`` of int16 transport ``[..., layers, width]``; the inverse of :func:`to_transport`.

    Raises:
        ValueError: another dtype or width.
    """
    transport = np.asarray(transport)
    if transport.dtype != np.dtype("<i2") or transport.shape[-1:] != (layout.transport_width,):
        raise ValueError(
            f"transport is {transport.dtype} {transport.shape}, not int16 [..., {layout.transport_width}] as for "
            f"{layout.num_experts} experts, top-{layout.top_k}"
        )
    return np.ascontiguousarray(transport).view(layout.code_dtype)[..., : layout.top_k]


def from_transport(
    transport: np.ndarray,
    header: RouteHeader,
    versions: np.ndarray | None = None,
    why_missing: np.ndarray | None = None,
) -> RouteRecord:
    """A record from what verl carried.

    Args:
        transport: int16 ``[rows, layers, width]``.
        header: what the columns mean.
        versions: int64 ``[rows]``, None if unknown.
        why_missing: uint8 ``[rows]``; None if unknown, and rows without any code count as ``Missing.ABSENT``.
    """
    codes = codes_of(transport, header.layout).copy()
    if versions is None:
        versions = _versions(len(codes), None)
    if why_missing is None:
        why_missing = np.where(codes.any(axis=(1, 2)), Missing.RECORDED, Missing.ABSENT).astype(np.uint8)
    return RouteRecord(header, codes, versions, why_missing)


def run_lengths(values: np.ndarray) -> list[list[int]]:
    """``[[value, how often], ...]`` of a one-dimensional array of integers: plain, and small where values repeat."""
    values = np.asarray(values)
    if not len(values):
        return []
    starts = np.concatenate([[0], np.flatnonzero(values[1:] != values[:-1]) + 1])
    counts = np.diff(np.concatenate([starts, [len(values)]]))
    return [[int(value), int(count)] for value, count in zip(values[starts], counts, strict=True)]


def expand_runs(runs: Sequence[Sequence[int]], dtype: Any) -> np.ndarray:
    """The array that :func:`run_lengths` described."""
    values = np.array([value for value, _ in runs], dtype)
    return np.repeat(values, [count for _, count in runs]) if runs else values


class FallbackCounts(Counter):
    """Rows that are routed natively although a record was asked for, by reason."""

    def add(self, reason: str, rows: int = 1) -> None:
        """Count ``rows`` rows."""
        if rows:
            self[reason] += rows

    def add_record(self, record: RouteRecord) -> None:
        """Count the missing rows of a record by the names of :class:`Missing` in lower case."""
        for why in Missing:
            if why != Missing.RECORDED:
                self.add(why.name.lower(), int((record.why_missing == why).sum()))

    def merge(self, other: FallbackCounts) -> None:
        """Add the counts of another."""
        self.update(other)

    def as_dict(self) -> dict[str, int]:
        """Plain dictionary."""
        return dict(self)
