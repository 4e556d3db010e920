"""From what each rollout engine returns to a checked record.

==========  =========================================================================================================
SGLang      ``meta_info["routed_experts"]``: base64 of little-endian int32, flat ``[rows, all hidden layers, top_k]``,
            dense layers zero; one row per token but the last, from ``routed_experts_start_len`` on. Without a new
            token 0.5.12 returns one row per prompt token and 0.5.23 one less. No key where the request did not ask, or
            was aborted before it ran.
vLLM        an array ``[rows, layers, top_k]`` on the completion. Some versions and modes return zeros throughout
            without a word: refused, whatever the version.
hf          the embedded rollout of this plugin: an array, from the hook that also replays.
==========  =========================================================================================================

Imports no engine.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from packaging.version import InvalidVersion, Version

from verl_sat.router_replay.checks import check
from verl_sat.router_replay.layout import MoELayout
from verl_sat.router_replay.record import Missing, RouteRecord, RouteRejected, missing, place


@dataclass(frozen=True)
class Support:
    """Which versions of an engine return routes that can be used.

    Attributes:
        tested: versions whose payload was decoded; anything else is a caution.
        oldest: older ones are refused; None where the engine comes with this plugin.
        why_oldest: in words.
    """

    tested: tuple[str, ...]
    oldest: str | None
    why_oldest: str = ""


SUPPORT = {
    "sglang": Support(("0.5.12", "0.5.23"), "0.5.12", "older ones return routes in another form"),
    "vllm": Support(("0.30.0",), "0.22.0", "verl itself asks for this version where routes are recorded"),
    "hf": Support((), None),
}


class EngineUnsupported(ValueError):
    """A rollout engine, or a version of one, from which no routes can be had."""


def check_engine_version(name: str, version: str | None) -> str | None:
    """Whether routes of this engine can be used.

    Args:
        name: ``actor_rollout_ref.rollout.name``.
        version: installed version, None if it is not installed in this process.

    Returns:
        None if this very version was tested, else a sentence of caution.

    Raises:
        EngineUnsupported: an unknown engine, or a version that is too old; says which are known.
    """
    support = SUPPORT.get(name)
    if support is None:
        raise EngineUnsupported(
            f"routing replay cannot read the routes of rollout engine '{name}'; "
            f"actor_rollout_ref.rollout.name must be one of {', '.join(sorted(SUPPORT))}"
        )
    if support.oldest is None:
        return None
    tested = " and ".join(support.tested)
    if version is None:
        return f"the version of {name} is not known here; routes were tested with {tested}"
    try:
        parsed = Version(version)
    except InvalidVersion:
        return f"{name} {version} is not a version that can be compared; routes were tested with {tested}"
    # a build of the oldest version before its release counts as that version
    if parsed.release < Version(support.oldest).release:
        raise EngineUnsupported(
            f"routing replay needs {name} >= {support.oldest} ({support.why_oldest}); installed is {version}. "
            f"Upgrade it, or switch routing replay off"
        )
    if any(parsed.public == known for known in support.tested):
        return None
    return (
        f"routes were tested with {name} {tested}, not with the installed {version}: every record is checked, and what "
        "fails is routed natively and counted"
    )


def decode_sglang(
    payload: str | bytes | None,
    layout: MoELayout,
    *,
    num_prompt: int,
    num_new: int,
    start_len: int = 0,
    engine_version: str | None = None,
    version: int | None = None,
    sample: str = "",
    finish_reason: str | None = None,
    token_ids: Sequence[int] | None = None,
) -> RouteRecord:
    """A record from SGLang's payload.

    Args:
        payload: ``meta_info["routed_experts"]``, base64; None if the key is absent.
        layout: of the model.
        num_prompt: tokens of the prompt.
        num_new: tokens sampled.
        start_len: ``routed_experts_start_len`` of the request: rows before it were not asked for and are missing.
        engine_version: SGLang's.
        version: of the weights, None if unknown.
        sample: for messages.
        finish_reason: for messages.
        token_ids: prompt and new tokens, for the check of identical rows.

    Returns:
        ``num_prompt + num_new - 1`` rows, or one more; all missing if the payload is absent.

    Raises:
        RouteRejected: the payload cannot be read, does not fit the tokens or is no router's choice.
    """
    num_tokens = num_prompt + num_new
    if payload is None:
        rows = max(num_tokens - 1, 0)
        return missing(layout, rows, Missing.ABSENT, version=version, engine="sglang", engine_version=engine_version)
    flat = _int32(payload, sample)
    ended = "" if finish_reason is None else f", finished by {finish_reason}"
    request = f"{num_prompt} + {num_new} tokens from row {start_len} on{ended}"
    rows, rest = divmod(flat.size, layout.num_layers * layout.top_k)
    if rest:
        raise RouteRejected(
            sample,
            "layers",
            f"{flat.size} expert ids for {request} are not rows of {layout.num_layers} layers x top-{layout.top_k}",
        )
    if rows not in (max(num_tokens - 1 - start_len, 0), num_tokens - start_len):
        raise RouteRejected(sample, "rows", f"{rows} rows for {request}")
    record = RouteRecord.from_ids(
        flat.reshape(rows, layout.num_layers, layout.top_k),
        layout,
        engine="sglang",
        engine_version=engine_version,
        version=version,
        sample=sample,
    )
    return check(place(record, start_len), num_tokens, sample, token_ids)


def _int32(payload: str | bytes, sample: str) -> np.ndarray:
    """Whole numbers of a base64 payload, read-only."""
    if not isinstance(payload, str | bytes):
        raise RouteRejected(sample, "dtype", f"the payload is a {type(payload).__name__}, not base64 text")
    try:
        raw = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RouteRejected(
            sample, "dtype", f"the payload of {len(payload)} characters is not base64 ({error})"
        ) from None
    if len(raw) % 4:
        raise RouteRejected(sample, "dtype", f"the payload holds {len(raw)} bytes, not whole int32 numbers")
    return np.frombuffer(raw, "<i4")


def decode_array(
    ids: Any,
    layout: MoELayout,
    *,
    engine: str,
    num_prompt: int,
    num_new: int,
    engine_version: str | None = None,
    version: int | None = None,
    sample: str = "",
    token_ids: Sequence[int] | None = None,
) -> RouteRecord:
    """A record from an array of expert ids: vLLM, the embedded rollout, or verl's server over SGLang.

    Args:
        ids: whole numbers ``[rows, layers, top_k]``, numpy or a tensor; None if the engine returned none.
        layout: of the model.
        engine: ``actor_rollout_ref.rollout.name``.
        num_prompt: tokens of the prompt.
        num_new: tokens sampled.
        engine_version: the engine's.
        version: of the weights, None if unknown.
        sample: for messages.
        token_ids: prompt and new tokens, for the check of identical rows.

    Returns:
        ``num_prompt + num_new - 1`` rows, or one more; all missing if there are none.

    Raises:
        RouteRejected: see :meth:`RouteRecord.from_ids` and :func:`~verl_sat.router_replay.checks.check`.
    """
    num_tokens = num_prompt + num_new
    if ids is None:
        rows = max(num_tokens - 1, 0)
        return missing(layout, rows, Missing.ABSENT, version=version, engine=engine, engine_version=engine_version)
    try:
        ids = ids.detach().cpu().numpy() if hasattr(ids, "detach") else np.asarray(ids)
    except (TypeError, ValueError) as error:  # bf16, a ragged list
        raise RouteRejected(sample, "dtype", f"{type(ids).__name__} is no array of expert ids ({error})") from None
    record = RouteRecord.from_ids(
        ids, layout, engine=engine, engine_version=engine_version, version=version, sample=sample
    )
    return check(record, num_tokens, sample, token_ids)
