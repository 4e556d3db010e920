"""Settings of the SAT losses: dataclasses on verl's ``BaseConfig``, every field checked when it is made.

They hang below ``actor_rollout_ref.actor.policy_loss`` through Hydra's ``_target_``, which is how verl turns its YAML
into dataclasses. verl freezes such objects but checks no types (``quantile=zzz`` would reach the loss), so this module
does, and every error says the full key, the value and what is allowed.

Three ways lead here: Hydra instantiates ``SATPolicyLossConfig`` (the nested ``sat`` block arrives as a plain mapping);
the driver's preflight calls ``validate_sat_block`` on the raw block; the losses call ``get_sat_config``.
"""

import difflib
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.base_config import BaseConfig
from verl.workers.config import PolicyLossConfig

from verl_sat.trust_region import KERNELS

POLICY_LOSS_KEY = "actor_rollout_ref.actor.policy_loss"
SAT_KEY = f"{POLICY_LOSS_KEY}.sat"
LOSS_MODE_PREFIX = "sat_"

SCOPES = ("auto", "micro_batch", "dp_group", "mini_batch", "running")
ADVANTAGE_CLIP_SCOPES = ("all", "stale")


class SATConfigError(ValueError):
    """A setting of the plugin is misspelt, of the wrong type or out of range; the message names its full key."""


def _number(allowed: str, test: Callable[[float], bool], optional: bool = False) -> Callable[[str, Any], float | None]:
    """Rule for a finite number; ints become floats, booleans and numeric strings are refused."""

    def rule(key: str, value: Any) -> float | None:
        if value is None and optional:
            return None
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not test(value):
            raise SATConfigError(f"{key}={value!r} is not allowed: expected {allowed}.")
        return float(value)

    return rule


def _choice(*allowed: str) -> Callable[[str, Any], str]:
    """Rule for one of a few words."""

    def rule(key: str, value: Any) -> str:
        if isinstance(value, str) and value in allowed:
            return value
        raise SATConfigError(f"{key}={value!r} is not allowed:{_did_you_mean(value, allowed)} expected {_or(allowed)}.")

    return rule


def _did_you_mean(value: Any, allowed: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.5)
    return f" did you mean {close[0]!r}?" if close else ""


def _or(words: tuple[str, ...]) -> str:
    return ", ".join(repr(word) for word in words[:-1]) + f" or {words[-1]!r}"


_RULES: dict[str, Callable[[str, Any], Any]] = {
    "quantile": _number("a number in (0, 1]; 1 turns contraction off", lambda x: 0 < x <= 1),
    "kernel": _choice(*KERNELS),
    "exponent": _number("a number > 0", lambda x: x > 0),
    "scope": _choice(*SCOPES),
    "q": _number("a number >= 0, or null for the quantile of the batch", lambda x: x >= 0, optional=True),
    "q_min": _number("a number >= 0", lambda x: x >= 0),
    "advantage_clip_low": _number("a number <= 0, or null for no lower bound", lambda x: x <= 0, optional=True),
    "advantage_clip_high": _number("a number >= 0, or null for no upper bound", lambda x: x >= 0, optional=True),
    "advantage_clip_scope": _choice(*ADVANTAGE_CLIP_SCOPES),
}


@dataclass
class SATConfig(BaseConfig):
    """Settings of the staleness-adaptive trust region (arXiv 2607.18722, Sec. 4).

    The radii, the dual clip and the aggregation are verl's own keys: ``clip_ratio_low``, ``clip_ratio_high``,
    ``clip_ratio_c``, ``loss_agg_mode``.

    Args:
        quantile: level of the gate, in (0, 1]; 1 turns contraction off (Eq. 14).
        kernel: ``hill`` is the paper's; ``hill_excess``, ``inverse_power`` and ``none`` are for ablation (Eq. 15).
        exponent: power of the kernel, > 0.
        scope: over which tokens the quantile is taken (``verl_sat/scope.py``): ``micro_batch``, ``dp_group``,
            ``mini_batch`` or ``running``. ``auto`` is ``micro_batch`` for ``sat_grpo``; for ``sat_gspo`` it is
            ``mini_batch`` where this plugin's engine runs and ``running`` elsewhere.
        q: gate level [nats], >= 0, used instead of the batch's quantile; null for the quantile.
        q_min: floor of the gate level [nats], >= 0: staleness at or below it is never contracted.
        advantage_clip_low: lower bound of advantages, <= 0; null for none.
        advantage_clip_high: upper bound of advantages, >= 0; null for none.
        advantage_clip_scope: ``all`` tokens or the ``stale`` ones.

    Raises:
        SATConfigError: a field has the wrong type or is out of range.
    """

    quantile: float = 0.90
    kernel: str = "hill"
    exponent: float = 2.0
    scope: str = "auto"
    q: float | None = None
    q_min: float = 0.0
    advantage_clip_low: float | None = None
    advantage_clip_high: float | None = None
    advantage_clip_scope: str = "all"

    def __post_init__(self) -> None:
        for name, value in _checked_values({name: getattr(self, name) for name in _RULES}, SAT_KEY).items():
            object.__setattr__(self, name, value)  # verl's BaseConfig is frozen once a field is set


def _checked_values(raw: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name: _RULES[name](f"{prefix}.{name}", value) for name, value in raw.items()}


def validate_sat_block(raw: Any, prefix: str = SAT_KEY) -> SATConfig:
    """Check a raw ``sat`` block, unknown keys included, and make the dataclass.

    Args:
        raw: mapping or OmegaConf node of settings; missing ones take their default. A ``_target_`` is ignored.
        prefix: full key of the block, for messages.

    Returns:
        The validated settings.

    Raises:
        SATConfigError: not a mapping, a misspelt key, a wrong type or a value out of range; names the full key.
    """
    if isinstance(raw, DictConfig):
        raw = OmegaConf.to_container(raw, resolve=True)
    if isinstance(raw, SATConfig):
        return raw
    if not isinstance(raw, Mapping):
        raise SATConfigError(f"{prefix}={raw!r} is not allowed: expected a block with the keys {', '.join(_RULES)}.")
    values = {name: value for name, value in raw.items() if name != "_target_"}
    for name in values:
        if name not in _RULES:
            hint = _did_you_mean(name, tuple(_RULES))
            raise SATConfigError(f"{prefix}.{name}: unknown key;{hint} allowed keys: {', '.join(_RULES)}.")
    return SATConfig(**_checked_values(values, prefix))


@dataclass
class SATPolicyLossConfig(PolicyLossConfig):
    """verl's policy loss settings plus the ``sat`` block.

    Args:
        loss_mode: ``sat_grpo`` or ``sat_gspo``.
        sat: the block, as a mapping or a ``SATConfig``; afterwards always a ``SATConfig``. Null is the default block
            with a SAT loss, and no block at all with any other.

    Raises:
        SATConfigError: the block is wrong, or it stands beside a loss that does not read it.
    """

    loss_mode: str = "sat_gspo"
    # Any, not SATConfig: OmegaConf would check the block first, and its message names neither key nor range.
    sat: Any = field(default_factory=dict)

    def __post_init__(self) -> None:
        uses_sat = isinstance(self.loss_mode, str) and self.loss_mode.startswith(LOSS_MODE_PREFIX)
        if self.sat is None and not uses_sat:
            return
        object.__setattr__(self, "sat", validate_sat_block({} if self.sat is None else self.sat))
        if not uses_sat:
            rewritten = (
                " (verl's legacy trainers put 'bypass_mode' there themselves when"
                " algorithm.rollout_correction.bypass_mode is on: use trainer.use_v1=True)"
                if self.loss_mode == "bypass_mode"
                else ""
            )
            raise SATConfigError(
                f"{POLICY_LOSS_KEY}.loss_mode={self.loss_mode!r} does not read the block {SAT_KEY}{rewritten}: "
                f"set loss_mode to 'sat_grpo' or 'sat_gspo', or set {SAT_KEY}=null."
            )


def get_sat_config(policy_loss: Any) -> SATConfig:
    """Settings for a loss call, from whatever verl holds under ``policy_loss``; cheap enough for every micro-batch.

    Args:
        policy_loss: ``SATPolicyLossConfig``; verl's own ``PolicyLossConfig``, or None (defaults); a mapping or
            OmegaConf node with an optional ``sat`` block (validated once per content).

    Returns:
        The validated settings.

    Raises:
        SATConfigError: the ``sat`` block of a raw mapping is wrong.
    """
    block = None if policy_loss is None else policy_loss.get("sat", None)
    if isinstance(block, SATConfig):
        return block
    if isinstance(block, DictConfig):
        block = OmegaConf.to_container(block, resolve=True)
    if not isinstance(block, Mapping):
        return _validated_once(()) if block is None else validate_sat_block(block)
    try:
        # The type is part of the key: True == 1.0 would find the entry of 1.0.
        return _validated_once(tuple((name, type(value), value) for name, value in block.items()))
    except TypeError:  # unhashable, so not a valid value either; let the rules say so
        return validate_sat_block(block)


@lru_cache(maxsize=64)
def _validated_once(items: tuple[tuple[str, type, Any], ...]) -> SATConfig:
    return validate_sat_block({name: value for name, _, value in items})


# The YAML groups, the table of options and this dataclass must name the same keys.
assert list(_RULES) == [f.name for f in fields(SATConfig) if f.name != "_target_"]
