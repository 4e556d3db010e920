"""Over which tokens the gate's quantile is taken: what surrounds a loss call, and what the call takes from it.

verl calls a loss once per micro-batch and tells it nothing of the rest. A quantile of that call alone depends on how
the mini-batch was split, and at sequence level opens for nobody when a micro-batch holds few responses. So there are
four scopes:

- ``micro_batch``: the call itself;
- ``dp_group``: the calls of all data-parallel ranks for this micro-batch, one all-reduced histogram;
- ``mini_batch``: all responses of the optimizer step, found by one forward pass before the first micro-batch. Needs
  the engine of this plugin, which sees the mini-batch before it is split;
- ``running``: the previous mini-batch over all ranks. Costs nothing and needs nothing of the engine. The first
  mini-batch of a process, after a start or a resume, keeps the nominal interval.

An :class:`OptimizerStep` is open while verl's ``BaseEngine.train_batch`` runs (a guarded wrap in ``_compat.py``), and
the losses find it here. Every decision below depends on settings, or on what all ranks agreed on, and never on the data
of one: all take part in the same collectives, also those without an active token, and none raises alone.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from verl_sat.once import first_time, warn_once
from verl_sat.order_statistic import Observations, radix_quantile
from verl_sat.scope_facts import DYNAMIC_CP_KEY, SCOPE_KEY
from verl_sat.trust_region import GateLevel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from verl_sat.config import SATConfig

logger = logging.getLogger(__name__)


class ScopeError(RuntimeError):
    """The configured scope cannot be had where the loss was called; raised on every rank."""


class Level(NamedTuple):
    """A gate level of a scope wider than the call; 0-dim tensors.

    Attributes:
        gate: the level.
        sequences: responses that it was taken over.
        opens: bool, something in the scope lies beyond the gate. Of a call's few responses perhaps none does, and SAT
            is not inert for that.
    """

    gate: GateLevel
    sequences: torch.Tensor
    opens: torch.Tensor


@dataclass
class OptimizerStep:
    """What surrounds the loss calls of one mini-batch.

    Attributes:
        engine: verl's engine.
        sees_mini_batch: the engine is this plugin's, and fills ``level`` or ``single_call``.
        level: of scope ``mini_batch``, found before the first call.
        single_call: the mini-batch is one micro-batch on every rank, so the call's own quantile over all ranks is
            that of the mini-batch and no forward pass is needed.
        observed: what the calls observed and how many responses were in it, for ``running``.
    """

    engine: Any
    sees_mini_batch: bool = False
    level: Level | None = None
    single_call: bool = False
    calls: int = 0
    observed: dict[_Kind, list[tuple[Observations, torch.Tensor]]] = field(default_factory=dict)

    @property
    def group(self) -> ProcessGroup | None:
        """Data-parallel ranks of the engine; None for one rank alone."""
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return None
        group = self.engine.get_data_parallel_group()
        return None if group is None or torch.distributed.get_world_size(group) == 1 else group

    @property
    def dynamic_context_parallel(self) -> bool:
        """Megatron hands ranks different numbers of micro-batches, and responses to several ranks."""
        return bool(getattr(getattr(self.engine, "engine_config", None), "dynamic_context_parallel", False))


_current: ContextVar[OptimizerStep | None] = ContextVar("verl_sat_optimizer_step", default=None)
# What `running` keeps apart: losses at sequence level and not, and quantiles of different levels.
_Kind = tuple[bool, float]
# The levels that the last mini-batch of an engine leaves for the next; they go with the engine.
_previous: weakref.WeakKeyDictionary[Any, dict[_Kind, Level]] = weakref.WeakKeyDictionary()


@contextmanager
def optimizer_step(engine: Any) -> Iterator[OptimizerStep]:
    """Surround the loss calls of one mini-batch; within another one of the same engine it is that one.

    Args:
        engine: verl's engine; hashable, with ``get_data_parallel_group``.

    Yields:
        The step. If it ends without an exception, its observations become the level of the engine's next one.
    """
    present = _current.get()
    if present is not None and present.engine is engine:
        yield present
        return
    step = OptimizerStep(engine, sees_mini_batch=bool(getattr(engine, "provides_mini_batch_scope", False)))
    token = _current.set(step)
    try:
        yield step
    finally:
        _current.reset(token)
    _close(step)


def _close(step: OptimizerStep) -> None:
    """Leave the quantile of this mini-batch, over all ranks, to the next one."""
    # Empty without a call of ours with scope `running`: on every rank, since settings decide.
    for kind, observed in step.observed.items():
        found = radix_quantile([bag for bag, _ in observed], level=kind[1], group=step.group)
        sequences = torch.stack([count for _, count in observed]).sum()
        if step.group is not None:
            torch.distributed.all_reduce(sequences, group=step.group)
        q = found.value
        levels = _previous.setdefault(step.engine, {})
        if kind in levels:  # a mini-batch without an active token says nothing
            q = torch.where(found.observed > 0, q, levels[kind].gate.q)
            sequences = torch.where(found.observed > 0, sequences, levels[kind].sequences)
        # Of the mini-batch that will use it nothing is known yet: a level above 0 opens for somebody, in expectation.
        levels[kind] = Level(GateLevel(q, q), sequences, q > 0)


def current() -> OptimizerStep | None:
    """The step in which this thread calls a loss, None outside."""
    return _current.get()


def is_adaptive(sat: SATConfig) -> bool:
    """Whether a quantile decides anything: not with a fixed q, without contraction, or with a gate that never opens."""
    return sat.q is None and sat.kernel != "none" and sat.quantile < 1


def resolve(sat: SATConfig, sequence_level: bool, step: OptimizerStep | None) -> str:
    """The scope that a call uses.

    Args:
        sat: settings, adaptive.
        sequence_level: the call is one of ``sat_gspo``.
        step: from :func:`current`.

    Returns:
        ``micro_batch``, ``dp_group``, ``mini_batch`` or ``running``; what ``auto`` became is printed once.

    Raises:
        ScopeError: the configured scope cannot be had here; names the key and what to set.
    """
    scope = sat.scope
    if scope == "auto":
        scope = "micro_batch" if not sequence_level else "running"
        if sequence_level and step is None:
            scope = "micro_batch"
            warn_once(
                logger,
                "outside",
                "sat_gspo was called outside an optimizer step of a verl engine, where there is no wider scope: "
                "its quantile is over this call's responses alone",
            )
        elif sequence_level and step.sees_mini_batch:
            scope = "mini_batch"
    if scope == "micro_batch":
        return scope
    if step is None:
        raise ScopeError(
            f"{SCOPE_KEY}={sat.scope}: the loss was called outside an optimizer step of a verl engine, where only "
            "'micro_batch' can be had"
        )
    if scope == "mini_batch" and not step.sees_mini_batch:
        engine = type(step.engine)
        raise ScopeError(
            f"{SCOPE_KEY}={sat.scope} needs the FSDP engine of verl-sat, and this job runs {engine.__module__}."
            f"{engine.__qualname__}: set {SCOPE_KEY}=running, or actor_rollout_ref.actor.strategy=fsdp2"
        )
    if step.dynamic_context_parallel:
        raise ScopeError(
            f"{SCOPE_KEY}={sat.scope} (here {scope}): with {DYNAMIC_CP_KEY}=True ranks see different numbers of "
            f"micro-batches, and a collective would wait for ever: set {DYNAMIC_CP_KEY}=False or "
            f"{SCOPE_KEY}=micro_batch"
        )
    return scope


def level_for_call(
    sat: SATConfig,
    sequence_level: bool,
    observe: Callable[[], tuple[Observations, torch.Tensor]],
    like: torch.Tensor,
) -> tuple[Level | None, str]:
    """The gate level that a call is given, if its scope is wider than itself.

    Args:
        sat: settings.
        sequence_level: the call is one of ``sat_gspo``.
        observe: makes the exact observations of the call and counts its responses; called where they are needed.
        like: tensor whose dtype and device the level gets.

    Returns:
        The level, None where the call has to take its own; and the scope.

    Raises:
        ScopeError: as :func:`resolve`.
    """
    if not is_adaptive(sat):
        return None, "micro_batch"
    step = current()
    scope = resolve(sat, sequence_level, step)
    _say_once(step, sat, sequence_level, scope)
    if scope == "micro_batch":
        return None, scope
    step.calls += 1
    if scope == "running":
        zero = like.new_zeros(())
        nothing_yet = Level(GateLevel(zero, zero), zero, zero > 0)
        level = _previous.get(step.engine, {}).get((sequence_level, sat.quantile), nothing_yet)
    elif scope == "dp_group" or step.single_call:
        if step.single_call and step.calls > 1:
            raise ScopeError(f"{SCOPE_KEY}={sat.scope}: the engine announced one micro-batch and the loss saw a second")
        bag, sequences = observe()
        level = quantile_level([bag], sequences, sat.quantile, step.group)
    elif step.level is not None:
        level = step.level
    else:
        raise ScopeError(
            f"{SCOPE_KEY}={sat.scope} (here {scope}): the engine could not see the settings of the loss, as with a "
            f"loss function other than verl's: set {SCOPE_KEY}=running"
        )
    q, threshold = (value.to(like.dtype) for value in level.gate)
    return level._replace(gate=GateLevel(q, threshold)), scope


def quantile_level(
    bags: list[Observations],
    sequences: torch.Tensor,
    quantile: float,
    group: ProcessGroup | None,
    between: bool = False,
) -> Level:
    """A level from observations, pooled over ranks.

    Args:
        bags: as ``radix_quantile``.
        sequences: responses in them, 0-dim.
        quantile: level of the quantile.
        group: ranks to pool, None for this process alone.
        between: put the threshold half-way to the next larger observation, for a level that meets log-probs of
            another forward pass (``GateLevel``).
    """
    found = radix_quantile(bags, quantile, group, with_following=True)
    if group is not None:
        sequences = sequences.clone()
        torch.distributed.all_reduce(sequences, group=group)
    threshold = found.value + (found.following - found.value) / 2 if between else found.value
    return Level(GateLevel(found.value, threshold), sequences, (found.value > 0) & found.following.isfinite())


def remember(sat: SATConfig, sequence_level: bool, bag: Observations, sequences: torch.Tensor) -> None:
    """Keep what a call with scope ``running`` observed, for the mini-batch after this one.

    Args:
        sat: settings.
        sequence_level: the call is one of ``sat_gspo``.
        bag: the exact observations of the call.
        sequences: responses in it, 0-dim.
    """
    current().observed.setdefault((sequence_level, sat.quantile), []).append((bag, sequences))


def _say_once(step: OptimizerStep | None, sat: SATConfig, sequence_level: bool, scope: str) -> None:
    engine = None if step is None else type(step.engine).__name__
    if not first_time((__name__, sat.scope, sequence_level, scope, engine)):
        return
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    text = f"[verl-sat] {'sat_gspo' if sequence_level else 'sat_grpo'}: quantile over scope {scope}"
    if sat.scope == "auto":
        text += " (auto)"
    if engine is not None:
        text += f", engine {engine}"
    if scope != "micro_batch":
        group = step.group
        text += f", data-parallel ranks {1 if group is None else torch.distributed.get_world_size(group)}"
    if scope == "running":
        text += "; the first mini-batch after a start or a resume keeps the nominal interval"
    print(text, flush=True)  # as verl's own start-up lines, which INFO logging would hide
