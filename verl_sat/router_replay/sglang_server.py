"""Routes of SGLang, out of verl's own SGLang server.

verl 0.9.1 asks SGLang for routes and cannot read the answer: since 0.5.12 it is base64 text, on which verl calls
``.numpy()`` (``skip_tokenizer_init=True``), or which it reads with a module that SGLang has moved
(``verl/workers/rollout/sglang_rollout/async_sglang_server.py``). So verl's ``generate`` runs here on a stand-in for its
server whose configuration reads as if no routes were wanted, while every request asks for them all the same, and the
answer's are decoded afterwards. What comes out is what verl meant to return: plain expert ids, for whichever engine
trains.

Routes that fail the checks do not cost the request: it is returned without, and says why in its ``extra_fields``, where
the client counts it (:data:`~verl_sat.router_replay.client.REJECTED_FIELD`).

Called from `verl_sat/_compat.py`, only where ``enable_rollout_routing_replay`` is set.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np

from verl_sat.once import warn_once
from verl_sat.router_replay.client import FLAG_KEY, REJECTED_FIELD
from verl_sat.router_replay.engines import EngineUnsupported, check_engine_version, decode_sglang
from verl_sat.router_replay.layout import MoELayout
from verl_sat.router_replay.record import RouteRecord, RouteRejected, truncate

logger = logging.getLogger(__name__)

_DECODE_ROLE = "decode"
"""Role of the server of a prefill/decode pair that samples, but never ran the prompt."""


async def generate(original: Callable[..., Awaitable[Any]], server: Any, *args: Any, **kwargs: Any) -> Any:
    """verl's ``SGLangHttpServer.generate`` with routes that can be read.

    Args:
        original: verl's function.
        server: verl's server, with ``config.enable_rollout_routing_replay`` set.
        *args: as verl's.
        **kwargs: as verl's.

    Returns:
        verl's ``TokenOutput``. ``routed_experts`` is an integer array ``[rows, all hidden layers, top_k]`` of expert
        ids (dense layers zero), one row per token of prompt and answer but the last, in the narrowest dtype that torch
        takes (:func:`ids_dtype`); None where the engine gave none or they were rejected.

    Raises:
        NotMoEError: the model has no experts, so there are no routes to return.
    """
    version = getattr(sys.modules.get("sglang"), "__version__", None)
    try:
        caution = check_engine_version("sglang", version)
    except EngineUnsupported as error:
        warn_once(logger, "version", "%s. Its routes are left to verl's own code", error)
        return await original(server, *args, **kwargs)
    if caution is not None:
        warn_once(logger, "version", "%s", caution)
    layout = _layout_of(server)
    watched = _WatchedServer(server)
    output = await original(watched, *args, **kwargs)
    answer = watched.answer
    if answer is None:  # the other server of a prefill/decode pair answered, by this very function
        return output
    try:
        # megabytes for a long answer: not in the loop that serves all other requests
        record = await asyncio.to_thread(_decode, answer, server, layout, version, output)
    except RouteRejected as error:
        warn_once(
            logger,
            ("rejected", error.reason),
            "routes of SGLang %s rejected, the request is returned without: %s",
            version,
            error,
        )
        output.routed_experts = None
        output.extra_fields[REJECTED_FIELD] = f"{error.reason}: {error}"
        return output
    if not record.recorded.any():
        if output.token_ids:
            warn_once(
                logger,
                "absent",
                "SGLang %s returned no routes for a request of %d + %d tokens, although %s is True",
                version,
                answer.num_prompt,
                answer.num_new,
                FLAG_KEY,
            )
        output.routed_experts = None
    else:
        output.routed_experts = plain_ids(record)
    return output


def ids_dtype(num_experts: int) -> np.dtype:
    """Narrowest dtype that holds every expert id and that torch takes and casts to int16, as verl does."""
    if num_experts <= 2**8:
        return np.dtype(np.uint8)
    return np.dtype(np.int16 if num_experts <= 2**15 else np.int32)


def plain_ids(record: RouteRecord) -> np.ndarray:
    """Expert ids ``[rows, layers, top_k]`` of a record, 0 in dense layers, in a new array of :func:`ids_dtype`."""
    codes = record.codes
    ids = codes - (codes != 0).astype(codes.dtype)
    return ids.astype(ids_dtype(record.header.layout.num_experts))


def _layout_of(server: Any) -> MoELayout:
    """Experts of the server's model; read once per server."""
    layout = server.__dict__.get("_verl_sat_layout")
    if layout is None:
        layout = MoELayout.from_config(server.model_config.hf_config)
        server._verl_sat_layout = layout
    return layout


def _decode(answer: _Answer, server: Any, layout: MoELayout, version: str | None, output: Any) -> RouteRecord:
    sample = str(answer.request_id)
    if answer.payload is not None and getattr(server, "_disaggregation_role", None) == _DECODE_ROLE:
        raise RouteRejected(
            sample,
            "join",
            f"the decode server of a prefill/decode pair did not run the {answer.num_prompt} tokens of the prompt; "
            "what it returns for them are rows of earlier requests",
        )
    record = decode_sglang(
        answer.payload,
        layout,
        num_prompt=answer.num_prompt,
        num_new=answer.num_new,
        engine_version=version,
        version=output.extra_fields.get("global_steps"),
        sample=sample,
        finish_reason=output.stop_reason,
        token_ids=answer.token_ids,
    )
    # verl drops the tokens of an answer whose log-probs do not fit; their rows go by the same rule
    return truncate(record, answer.num_prompt + len(output.token_ids))


class _Answer:
    """What is kept of one request and its answer."""

    def __init__(self, request: Any) -> None:
        self.request_id = request.rid
        self.prompt = list(request.input_ids)
        self.payload: str | None = None
        self.new: list[int] = []

    def take(self, output: Any) -> None:
        """Keep tokens and routes of what the engine yields; a later chunk replaces an earlier one."""
        self.payload = (output.get("meta_info") or {}).get("routed_experts")
        self.new = list(output.get("output_ids") or [])

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)

    @property
    def num_new(self) -> int:
        return len(self.new)

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt, *self.new]


# --- stand-ins: everything is the original's, but for one thing each ----------------------------------------------


class _WatchedServer:
    """verl's server, whose configuration does not ask for routes and whose requests do."""

    def __init__(self, server: Any) -> None:
        vars(self).update(_server=server, config=_NoRoutesWanted(server.config), answer=None)

    @property
    def tokenizer_manager(self) -> _AskingManager:
        return _AskingManager(self._server.tokenizer_manager, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "answer":
            vars(self)[name] = value
        else:
            setattr(self._server, name, value)


class _NoRoutesWanted:
    """verl's rollout configuration with ``enable_rollout_routing_replay`` off."""

    enable_rollout_routing_replay = False

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


class _AskingManager:
    """SGLang's tokenizer manager, of which every request asks for routes."""

    def __init__(self, manager: Any, watched: _WatchedServer) -> None:
        self._manager = manager
        self._watched = watched

    def generate_request(self, request: Any, *args: Any, **kwargs: Any) -> _KeptChunks:
        request.return_routed_experts = True
        self._watched.answer = answer = _Answer(request)
        return _KeptChunks(self._manager.generate_request(request, *args, **kwargs), answer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class _KeptChunks:
    """An asynchronous generator whose chunks are looked at as they pass; it lives as long as the original."""

    def __init__(self, chunks: AsyncIterator[Any], answer: _Answer) -> None:
        self._chunks = chunks
        self._answer = answer

    def __aiter__(self) -> _KeptChunks:
        return self

    async def __anext__(self) -> Any:
        chunk = await self._chunks.__anext__()
        self._answer.take(chunk)
        return chunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chunks, name)
