"""Route records in verl's rollout client: from what an engine returned to what the batch carries.

verl's client (`verl/workers/rollout/llm_server.py`) joins the segments of a partial rollout by their last rows and the
agent loops hand its array on (`verl/experimental/agent_loop`). That is right as long as every segment brings exactly
one row per token but the last, and as long as a row that nobody recorded reads as such. So each segment is checked,
filled up and encoded here, before verl joins anything. What verl's zero fill later adds reads as "not recorded" as well
(`record.py`, transport).

Only for jobs whose FSDP engine replays (:func:`seam_for`); for Megatron and VeOmni verl's plain ids stay as they are.

What cannot be seen in the array goes into ``extra_fields["routes"]``, as run lengths: why rows are missing and which
version of the weights routed each row (:func:`describe`).
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl_sat.once import warn_once
from verl_sat.router_replay.engines import decode_array
from verl_sat.router_replay.layout import MoELayout
from verl_sat.router_replay.record import (
    Missing,
    RouteHeader,
    RouteRecord,
    RouteRejected,
    expand_runs,
    fit,
    from_transport,
    merge_turns,
    missing,
    run_lengths,
    to_transport,
)

logger = logging.getLogger(__name__)

INFO_FIELD = "routes"
"""Key in a sample's ``extra_fields``."""
REJECTED_FIELD = "routes_rejected"
"""Key in a segment's ``extra_fields`` under which a server says why it dropped what the engine returned."""
OUR_STRATEGIES = ("fsdp", "fsdp2")
FLAG_KEY = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
MODE_KEY = "actor_rollout_ref.actor.fsdp_config.router_replay.mode"


@dataclass(frozen=True)
class RowInfo:
    """What the array cannot say about its rows.

    Attributes:
        why: `Missing` of each row, uint8 ``[rows]``.
        versions: version of the weights that routed each row, int64 ``[rows]``; -1 unknown.
        engine: name and version of the rollout engine.
        rejected: reasons of rejected records with the number of rows they cost.
    """

    why: np.ndarray
    versions: np.ndarray
    engine: str = ""
    rejected: dict[str, int] = field(default_factory=dict)

    @classmethod
    def empty(cls) -> RowInfo:
        """Of no rows."""
        return cls(np.zeros(0, np.uint8), np.zeros(0, np.int64))

    def append(self, later: RowInfo, rows: int) -> RowInfo:
        """With the last ``rows`` rows of a later segment behind these, as verl joins the arrays themselves."""
        kept = len(later.why) - rows
        return RowInfo(
            np.concatenate([self.why, later.why[kept:]]),
            np.concatenate([self.versions, later.versions[kept:]]),
            self.engine or later.engine,
            dict(Counter(self.rejected) + Counter(later.rejected)),
        )

    def describe(self) -> dict[str, Any]:
        """Plain Python, small: run lengths ``[[value, rows], ...]``."""
        return {
            "engine": self.engine,
            "why": run_lengths(self.why),
            "versions": run_lengths(self.versions),
            "rejected": dict(self.rejected),
        }

    @classmethod
    def parse(cls, described: dict[str, Any]) -> RowInfo:
        """The inverse of :meth:`describe`."""
        return cls(
            expand_runs(described["why"], np.uint8),
            expand_runs(described["versions"], np.int64),
            described["engine"],
            dict(described["rejected"]),
        )


def _name(header: RouteHeader) -> str:
    return header.engine if header.engine_version is None else f"{header.engine} {header.engine_version}"


class RouteSeam:
    """Turns one segment of an engine into the rows that verl joins and carries.

    Args:
        layout: of the model.
        engine: ``actor_rollout_ref.rollout.name``.
        engine_version: installed version, None where it is not known in this process.
    """

    def __init__(self, layout: MoELayout, engine: str, engine_version: str | None = None) -> None:
        self.layout = layout
        self.engine = engine
        self.engine_version = engine_version
        self.header = RouteHeader(layout, tuple(range(layout.num_layers)), engine, engine_version)

    def take(self, output: Any, prompt_ids: Sequence[int], request_id: str = "") -> RowInfo:
        """Check and encode the routes of one segment, in place.

        Args:
            output: verl's ``TokenOutput``; ``routed_experts`` is replaced by int16 transport
                ``[prompt + new tokens - 1, layers, width]``, always an array.
            prompt_ids: tokens that were sent.
            request_id: for messages.

        Returns:
            What the array cannot say about its rows.
        """
        record, rejected = self._record(output, prompt_ids, request_id)
        output.routed_experts = to_transport(record)
        return RowInfo(record.why_missing, record.versions, _name(self.header), rejected)

    def _record(self, output: Any, prompt_ids: Sequence[int], sample: str) -> tuple[RouteRecord, dict[str, int]]:
        num_prompt, num_new = len(prompt_ids), len(output.token_ids)
        version = output.extra_fields.get("global_steps")
        rows = max(num_prompt + num_new - 1, 0)
        refused = output.extra_fields.pop(REJECTED_FIELD, None)
        if refused is None:
            try:
                record = decode_array(
                    output.routed_experts,
                    self.layout,
                    engine=self.engine,
                    engine_version=self.engine_version,
                    num_prompt=num_prompt,
                    num_new=num_new,
                    version=version,
                    sample=sample,
                    token_ids=[*prompt_ids, *output.token_ids],
                )
                if record.num_rows and not record.recorded.any() and num_new:
                    warn_once(
                        logger,
                        "absent",
                        "%s returned no routes for a request of %d + %d tokens, although %s is True; its rows are "
                        "routed natively in training and counted in actor/r3/native/absent_frac",
                        self.engine,
                        num_prompt,
                        num_new,
                        FLAG_KEY,
                    )
                return fit(record, rows), {}
            except RouteRejected as error:
                refused = f"{error.reason}: {error}"
        reason = refused.partition(":")[0]
        warn_once(
            logger,
            ("rejected", reason),
            "routes of %s rejected, the rows are routed natively in training and counted in "
            "actor/r3/native/rejected_frac: %s",
            self.engine,
            refused,
        )
        return missing(self.layout, rows, Missing.REJECTED, version=version), {reason: rows}

    def empty(self, rows: int) -> np.ndarray:
        """Transport of ``rows`` rows of which nothing is recorded."""
        return to_transport(missing(self.layout, rows, Missing.ABSENT))


# --- which jobs ---------------------------------------------------------------------------------------------------


def replays_here(config: Any) -> bool:
    """Whether this job's routes are replayed by our FSDP engine.

    Args:
        config: verl's whole configuration.
    """
    actor_rollout = config.get("actor_rollout_ref") if hasattr(config, "get") else None
    actor = None if actor_rollout is None else actor_rollout.get("actor")
    if not actor or not actor_rollout.get("rollout", {}).get("enable_rollout_routing_replay", False):
        return False
    if actor.get("strategy") not in OUR_STRATEGIES:
        return False
    replay = (actor.get("fsdp_config") or {}).get("router_replay") or {}
    return replay.get("mode") == "R3"


def seam_for(client: Any) -> RouteSeam | None:
    """The seam of a client of verl's, None where routes are not replayed by our engine. Made once per client."""
    seam = client.__dict__.get("_verl_sat_routes", False)
    if seam is False:
        seam = _make_seam(client.config) if replays_here(client.config) else None
        client._verl_sat_routes = seam
    return seam


def _make_seam(config: Any) -> RouteSeam:
    from transformers import AutoConfig
    from verl.utils.fs import copy_to_local

    model = config.actor_rollout_ref.model
    path = copy_to_local(model.get("hf_config_path") or model.path, use_shm=model.get("use_shm", False))
    hf_config = AutoConfig.from_pretrained(path, trust_remote_code=model.get("trust_remote_code", False))
    engine = config.actor_rollout_ref.rollout.name
    try:
        engine_version = importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        engine_version = None
    return RouteSeam(MoELayout.from_config(hf_config), engine, engine_version)


# --- around verl's client (called from `verl_sat/_compat.py`) -----------------------------------------------------

_segments: ContextVar[list[tuple[RowInfo, int]] | None] = ContextVar("verl_sat_segments", default=None)
_turn: ContextVar[list[RowInfo] | None] = ContextVar("verl_sat_turn", default=None)


async def after_segment(client: Any, output: Any, prompt_ids: Sequence[int], request_id: str, params: Any) -> None:
    """One answer of a server arrived (``LLMServerClient.generate``)."""
    if "prompt_logprobs" in (params or {}):  # a teacher's forward pass, nothing is sampled
        return
    seam = seam_for(client)
    if seam is None:
        return
    # 0.1 s for 32k tokens of 48 layers, in which the other requests of this event loop would stand still
    info = await asyncio.to_thread(seam.take, output, prompt_ids, str(request_id))
    segments = _segments.get()
    if segments is not None:
        segments.append((info, len(output.token_ids)))
    else:
        _finish(output, info)


@contextmanager
def joining() -> Iterator[list[tuple[RowInfo, int]]]:
    """Around a client that joins segments itself (``FullyAsyncLLMServerClient.generate``)."""
    token = _segments.set([])
    try:
        yield _segments.get()
    finally:
        _segments.reset(token)


def after_joining(client: Any, output: Any, segments: list[tuple[RowInfo, int]], num_prompt: int) -> None:
    """verl joined the segments of a partial rollout: the same for what the array cannot say.

    Raises:
        RuntimeError: if the joined array has not one row per token but the last; verl joins otherwise than this
            plugin was written for.
    """
    seam = seam_for(client)
    if seam is None or not segments:
        return
    info = None
    for segment, num_new in segments:
        if num_new:  # verl skips the others
            info = segment if info is None else info.append(segment, num_new)
    rows = max(num_prompt + len(output.token_ids) - 1, 0)
    if info is None:  # nothing was sampled at all
        output.routed_experts, info = seam.empty(rows), fit_info(segments[0][0], rows)
    if len(output.routed_experts) != rows or len(info.why) != rows:
        raise RuntimeError(
            f"a partial rollout of {num_prompt} + {len(output.token_ids)} tokens was joined to "
            f"{len(output.routed_experts)} rows of routes, not {rows}: verl's client changed "
            "(verl_sat/router_replay/client.py)"
        )
    _finish(output, info)


def _finish(output: Any, info: RowInfo) -> None:
    output.extra_fields[INFO_FIELD] = info.describe()
    turn = _turn.get()
    if turn is not None:
        turn.append(info)


def fit_info(info: RowInfo, rows: int) -> RowInfo:
    """Cut to ``rows`` rows, or filled up with rows that no engine reached."""
    more = max(rows - len(info.why), 0)
    return RowInfo(
        np.concatenate([info.why[:rows], np.full(more, Missing.UNREACHED, np.uint8)]),
        np.concatenate([info.versions[:rows], np.full(more, -1, np.int64)]),
        info.engine,
        info.rejected,
    )


# --- around verl's tool loop --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TurnMemory:
    """What is known of a trajectory after a turn.

    Attributes:
        tokens: token ids that were sent and sampled, in order.
        record: their routes, ``len(tokens) - 1`` rows.
        rejected: reasons of rejected records so far, with rows.
    """

    tokens: list[int]
    record: RouteRecord
    rejected: dict[str, int]

    def info(self) -> RowInfo:
        """What the array cannot say."""
        header = self.record.header
        return RowInfo(self.record.why_missing, self.record.versions, _name(header), self.rejected)


@contextmanager
def one_turn() -> Iterator[list[RowInfo]]:
    """Collects what the client says about the routes of a turn."""
    token = _turn.set([])
    try:
        yield _turn.get()
    finally:
        _turn.reset(token)


def shared_prefix(first: Sequence[int], later: Sequence[int]) -> int:
    """Number of leading tokens that two sequences share."""
    length = min(len(first), len(later))
    differs = np.flatnonzero(np.asarray(first[:length]) != np.asarray(later[:length]))
    return int(differs[0]) if len(differs) else length


def add_turn(memory: TurnMemory | None, turn: TurnMemory) -> TurnMemory:
    """Keep the first captured rows of a trajectory; a later turn adds only what was not covered.

    An engine returns the whole conversation anew on every turn, its earlier rows routed by newer weights, while the
    log-probs of those tokens stay those of the earlier turn. A chat template may rewrite the end of a turn when it
    appends a tool's reply: rows are kept as far as the tokens are the same.

    Args:
        memory: of the turns before, None on the first.
        turn: the later turn alone.
    """
    if memory is None:
        return turn
    record = merge_turns(memory.record, turn.record, shared_prefix(memory.tokens, turn.tokens))
    return TurnMemory(turn.tokens, record, dict(Counter(memory.rejected) + Counter(turn.rejected)))


_MEMORY = "_verl_sat_turns"


def after_turn(loop: Any, agent_data: Any, turn: list[RowInfo]) -> None:
    """The tool loop has generated (``ToolAgentLoop._handle_generating_state``): join this turn's rows to the earlier.

    Args:
        loop: verl's ``ToolAgentLoop``.
        agent_data: verl's ``AgentData``; its ``prompt_ids`` are all tokens so far, this turn's included.
        turn: from :func:`one_turn`; empty where routes are not replayed by our engine.
    """
    if not turn:
        return
    info = turn[-1]
    header = seam_for(loop.server_manager).header
    record = from_transport(agent_data.routed_experts, header, info.versions, info.why)
    this = TurnMemory(list(agent_data.prompt_ids), record, info.rejected)
    memory = add_turn(agent_data.__dict__.get(_MEMORY), this)
    agent_data.__dict__[_MEMORY] = memory
    agent_data.routed_experts = to_transport(memory.record)
    agent_data.extra_fields[INFO_FIELD] = memory.info().describe()
