"""Keys that nobody reads: what a configuration has beyond verl's own, and whether anything takes it.

verl accepts any key that is added with ``+``, and most of its configuration is read by name with a default, so a
misspelt key is a setting that silently stays at its default. Three kinds of extra keys are told apart:

* below a block that is handed on as it is (``engine_kwargs``, ``override_transformer_config``, ...): not verl's to
  know;
* below a block that becomes a dataclass (it has a ``_target_``): the worker raises a TypeError unless there is such a
  field (:mod:`verl_sat.doctor.child` knows the fields);
* elsewhere: read only if verl's source mentions that name at all.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_sat.composition import Composed, compose, verl_config_dir
from verl_sat.preflight_job import SAT_BLOCK, Finding

HANDED_ON = (
    "engine_kwargs",
    "custom",
    "override_config",
    "override_transformer_config",
    "override_ddp_config",
    "override_mcore_model_config",
    "override_optimizer_config",
    "mbridge_config",
    "sampler_kwargs",
    "reward_kwargs",
    "apply_chat_template_kwargs",
    "ray_init",
    "wrap_policy",
    "mixed_precision",
    "mm_processor_kwargs",
    "kw_args",
    "backend",
)
"""Names of blocks whose content verl hands to somebody else (an engine, Ray, a function of the user's) as it is."""


def extra_keys(composed: Composed) -> list[str]:
    """Keys of a configuration, not below a block that is handed on, that verl's own composition does not have.

    The highest new key of a block stands for all below it.
    """
    config = composed.config
    engine = OmegaConf.select(config, "model_engine", default="dp")
    reference = _reference(str(engine), _family(config))
    return list(_extra(_plain(config), _plain(reference), ""))


def _family(config: DictConfig) -> str:
    if "async_training" in config:
        return "fully_async"
    return "one_step_off" if OmegaConf.select(config, "rollout.nnodes") is not None else "v1"


@cache
def _reference(model_engine: str, family: str) -> DictConfig:
    if family == "v1":
        return compose([f"model_engine={model_engine}"]).config
    package = {"fully_async": "fully_async_policy", "one_step_off": "one_step_off_policy"}[family]
    prefix = {"fully_async": "fully_async_ppo", "one_step_off": "one_step_off_ppo"}[family]
    name = f"{prefix}_megatron_trainer" if model_engine == "megatron" else f"{prefix}_trainer"
    folder = verl_config_dir(f"verl.experimental.{package}")
    own = verl_config_dir()
    return compose(["--config-path", str(folder), "--config-name", name, f"hydra.searchpath=[file://{own}]"]).config


def _plain(config: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(config, resolve=False)


def _extra(node: Mapping, reference: Any, path: str) -> Iterator[str]:
    known = reference if isinstance(reference, Mapping) else {}
    for name, value in node.items():
        key = f"{path}.{name}" if path else str(name)
        if name in HANDED_ON:
            continue
        if name not in known:
            yield key
        elif isinstance(value, Mapping):
            yield from _extra(value, known[name], key)


def parent_is_dataclass(config: DictConfig, key: str) -> bool:
    """Whether the block that holds a key names the dataclass that it becomes."""
    parent = OmegaConf.select(config, key.rpartition(".")[0]) if "." in key else config
    return isinstance(parent, DictConfig) and "_target_" in parent


def unread_keys(config: DictConfig, keys: list[str]) -> Iterator[Finding]:
    """Findings about extra keys whose name occurs nowhere in the installed sources of verl.

    Args:
        config: the composition.
        keys: extra keys outside dataclasses.
    """
    words = None
    for key in keys:
        if key == SAT_BLOCK or key.startswith(f"{SAT_BLOCK}."):
            continue  # checked by rules of its own, which say more
        words = words if words is not None else _words_of_sources()
        name = key.rpartition(".")[2]
        if name in words:
            continue
        yield unread(config, key, _siblings(config, key))


def unread(config: DictConfig, key: str, known: list[str]) -> Finding:
    """The finding about one such key: what was probably meant, and how to write it.

    Args:
        config: the composition.
        key: the full key.
        known: names that are read in its place.
    """
    parent, _, name = key.rpartition(".")
    value = OmegaConf.select(config, key, throw_on_resolution_failure=False)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    prefix = f"{parent}." if parent else ""
    if not close:
        return Finding("error", key, "nobody reads this key: leave it out")
    shown = "..." if isinstance(value, DictConfig) else value
    return Finding(
        "error",
        key,
        f"nobody reads this key; did you mean {prefix}{close[0]}?",
        f"{prefix}{close[0]}={shown} in its place",
    )


def handed_on_keys(composed: Composed) -> list[str]:
    """Keys that verl hands on as they are, beyond its own defaults: only an engine can say whether it knows them."""
    config = composed.config
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    engine = OmegaConf.select(config, f"{rollout}.name", default=None)
    blocks = [f"{rollout}.engine_kwargs.{engine}", f"{actor}.optim.override_optimizer_config"]
    if OmegaConf.select(config, f"{actor}.strategy", default=None) == "megatron":
        names = ("override_transformer_config", "override_ddp_config", "override_mcore_model_config")
        blocks += [f"{actor}.megatron.{name}" for name in names]
    reference = _reference(str(OmegaConf.select(config, "model_engine", default="dp")), _family(config))
    found = []
    for block in blocks:
        node, known = OmegaConf.select(config, block), OmegaConf.select(reference, block)
        known = known if isinstance(known, DictConfig) else {}
        found += [f"{block}.{name}" for name in node if name not in known] if isinstance(node, DictConfig) else []
    return found


def _siblings(config: DictConfig, key: str) -> list[str]:
    parent = OmegaConf.select(config, key.rpartition(".")[0]) if "." in key else config
    return [str(name) for name in parent if str(name) != key.rpartition(".")[2]]


@cache
def _words_of_sources() -> frozenset[str]:
    words: set[str] = set()
    spec = importlib.util.find_spec("verl")
    for location in spec.submodule_search_locations if spec else ():
        for file in Path(location).rglob("*.py"):
            words.update(re.findall(r"[A-Za-z_]\w+", file.read_text(errors="ignore")))
    return frozenset(words)
