"""What a configuration says of R3, the replay of the rollout's routes: who asks for it, by which key."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from packaging.version import InvalidVersion, Version

from verl_sat.preflight_job import Job, as_override
from verl_sat.preflight_scope import ACTOR, STRATEGY
from verl_sat.router_replay.client import FLAG_KEY, OUR_STRATEGIES

ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
VERLS_OWN = ("megatron", "veomni")
"""Strategies of the actor on which verl itself replays."""

# Where the actor's engine of a strategy has its settings; elsewhere the block is called as the strategy.
_BLOCKS = {"fsdp": "fsdp_config", "fsdp2": "fsdp_config", "fsdp_turbo": "fsdp_config"}


def replay_modes(job: Job) -> dict[str, Any]:
    """Full key -> value of every ``router_replay.mode`` in the configuration, whether or not anything reads it."""
    found = dict(_find_modes(OmegaConf.to_container(job.config, resolve=False), ""))
    return {key: job.get(key) if isinstance(value, str) and "${" in value else value for key, value in found.items()}


def _find_modes(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, value in node.items() if isinstance(node, Mapping) else ():
        key = f"{path}.{name}" if path else str(name)
        if name != "router_replay":
            yield from _find_modes(value, key)
        elif isinstance(value, Mapping):
            yield f"{key}.mode", value.get("mode")
        elif value is not None:
            yield key, value


def own_key(job: Job) -> str:
    """Key of the mode that the actor's own engine reads."""
    strategy = str(job.get(STRATEGY, "fsdp"))
    return f"{ACTOR}.{_BLOCKS.get(strategy, strategy)}.router_replay.mode"


def own_mode(job: Job) -> Any:
    """The mode that the actor's own engine reads."""
    return job.get(own_key(job), "disabled")


def asks_for_replay(job: Job) -> bool:
    """Whether a mode or the rollout's flag is set anywhere. If not, none of the rules below has a say."""
    return bool(job.get(FLAG_KEY, False)) or any(mode not in (None, "disabled") for mode in replay_modes(job).values())


def replays(job: Job) -> bool:
    """Whether the actor's own engine is asked for R3."""
    return own_mode(job) == "R3"


def on_fsdp(job: Job) -> bool:
    """Whether the plugin's engine would replay, where it runs."""
    return job.get(STRATEGY) in OUR_STRATEGIES


def is_actors(key: str) -> bool:
    """Whether a key is one of the actor's."""
    return key.startswith(f"{ACTOR}.")


def override(job: Job, key: str, value: Any) -> str:
    """As it has to be typed: a key that is not there takes a ``+`` (verl's FSDP configuration names no such block)."""
    return f"{'' if job.has(key) else '+'}{key}={as_override(value)}"


def group_of(job: Job) -> str:
    """In brackets, the config group that sets both keys; empty for engines without one."""
    group = {"fsdp_config": "fsdp", "megatron": "megatron"}.get(own_key(job).split(".")[2])
    return f" (hydra.searchpath=[pkg://verl_sat.conf] +r3={group} sets both keys)" if group else ""


def describe_replay(job: Job) -> str:
    """One line that says whose routes are replayed where; empty where none are.

    Args:
        job: a configuration without errors.
    """
    if not records(job):
        return ""
    who = "verl-sat's FSDP engine" if on_fsdp(job) else f"verl's own {job.get(STRATEGY)} engine"
    return f"R3: routes of {job.get(f'{ROLLOUT}.name')} replayed by {who}, in the actor alone"


def records(job: Job) -> bool:
    """Whether both keys are set: routes are recorded to be replayed."""
    return replays(job) and bool(job.get(FLAG_KEY, False))


def model_config(job: Job) -> tuple[str, dict[str, Any]] | None:
    """Key of the model's path and its parsed ``config.json``; None where it is not on this machine."""
    for key in (f"{MODEL}.hf_config_path", f"{MODEL}.path"):
        path = job.get(key)
        if path:
            file = Path(str(path)) / "config.json"
            return (key, json.loads(file.read_text())) if file.is_file() else None
    return None


def installed(name: str) -> str | None:
    """Version of an engine's package; None where the driver has none, which says nothing of the workers."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_older(version: str, than: str) -> bool:
    """Whether a version is certainly older than another; builds before a release count as that release."""
    try:
        return Version(version).release < Version(than).release
    except InvalidVersion:
        return False
