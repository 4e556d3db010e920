"""Record the experts that a Hugging Face model chooses, and replay recorded ones in a training forward.

Scope: any model whose routers choose by one top-k over the experts (`routers.py`). Only that choice is replaced
(`choice.py`); weights are computed from live logits by the family's own code, and the gradient reaches the router. Rows
without a record are routed natively. Other models in the process, and multi-token-prediction layers, vision and audio
towers and speech talkers of this one, are left alone.

Lifecycle: :meth:`RouterHook.install` sets one instance attribute on each router, :meth:`RouterHook.remove` takes it
away. In between, a router runs as before unless a ``with hook.record()`` or ``with hook.replay(...)`` is open in its
thread; only then something stands between it and its top-k. The routers are left out of ``torch.compile``'s graphs
while the hook is installed. A copy or a pickle of the model has no hook.

Backward: under activation checkpointing routers run again, later, maybe in another order or thread, and after the
``with`` has ended. Checkpoint functions found in the model (transformers', torch's ``CheckpointWrapper``, verl's
activation offload) are therefore bound to what is active when they are called (:meth:`RouterHook.bind`), and a
recompute repeats the very experts of its forward, the unrecorded rows' as well. A router that runs in a backward
without such a binding is an error once the hook has replayed with gradients.

Layer indexing: absolute numbers of decoder layers, from the module's path.

Positions: rows are the tokens in the order in which the router sees them, batch-major: row ``b * seq + s``.

Torch only: neither verl nor transformers is imported.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from verl_sat.router_replay.choice import Choice, ExpertChoice, ReplayError
from verl_sat.router_replay.routers import RouterSite, UnsupportedRouterError, find_routers
from verl_sat.router_replay.states import Chosen, Record, Recording, Repeat, Replay, Replaying

__all__ = ["Recording", "ReplayError", "Replaying", "RouterHook", "UnsupportedRouterError"]

_State = Record | Replay | Repeat


class _Entry(NamedTuple):
    state: _State | None  # None: native
    task: int  # backward in which it was entered, -1 outside
    sinks: tuple[Chosen, ...]  # of the bound functions that are running


class _Bound:
    """A function together with what was active when it was bound."""

    def __init__(self, hook: RouterHook, function: Callable) -> None:
        entry = hook._active(function)
        self.hook = hook
        self.function = function
        self.state = None if entry is None else entry.state
        self.outer = () if entry is None else entry.sinks
        self.chosen: Chosen | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.state is not None and not self.hook._replaced:
            raise ReplayError("the hook was removed before the backward that repeats its experts")
        task = _backward()
        state, sinks = self.state, ()
        if state is not None and task != -1 and self.chosen is not None:
            state = Repeat(self.chosen)
        elif state is not None and task == -1:
            self.chosen = {}
            sinks = (*self.outer, self.chosen)
        with self.hook._entered(_Entry(state, task, sinks)):
            return self.function(*args, **kwargs)


class _BoundCheckpoint:
    """Stands for a checkpoint function ``(function, *args, **kwargs)`` and binds what it is given."""

    def __init__(self, hook: RouterHook, checkpoint: Callable) -> None:
        self.hook = hook
        self.checkpoint = checkpoint

    def __call__(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(self.hook.bind(function), *args, **kwargs)

    def __reduce__(self) -> tuple:
        return _same, (self.checkpoint,)


def _same(value: Any) -> Any:
    return value


class _Router:
    """Stands for a router's function on one module."""

    def __init__(self, hook: RouterHook, site: RouterSite) -> None:
        self.hook = hook
        self.site = site
        self.original = getattr(site.module, site.method)
        functools.update_wrapper(self, self.original)
        self._run = torch.compiler.disable(self.run)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        entry = self.hook._active(self.site)
        if entry is None or entry.state is None:
            return self.original(*args, **kwargs)
        layer, state = self.site.layer, entry.state
        mode = ExpertChoice(self.hook.num_experts, self.hook.top_k, functools.partial(state.decide, layer))
        with mode:
            result = self.original(*args, **kwargs)
        choice = mode.made()
        if choice is None:
            raise ReplayError(
                f"{self.site} made no top-{self.hook.top_k} over {self.hook.num_experts} experts that could be "
                f"{state.verb}"
            )
        if _backward() == -1:  # not a recompute
            with torch.no_grad():
                state.commit(layer, choice)
                self.hook._pour(entry, layer, choice)
        return result

    def __reduce__(self) -> tuple:
        return _native_method, (self.site.module, self.site.method)


def _native_method(module: nn.Module, method: str) -> Callable:
    return getattr(type(module), method).__get__(module)


def _backward() -> int:
    return torch._C._current_graph_task_id()


class RouterHook:
    """Records and replays the expert choices of one model.

    Args:
        model: in the form in which it will run (sharded, wrapped); nothing is changed before :meth:`install`.
        num_experts: experts that a router chooses from.
        top_k: experts for a token.

    Attributes:
        layers: absolute numbers of the layers with a router, in order.
        sites: their routers.
        left_native: routers that are left alone, path -> why.

    Raises:
        UnsupportedRouterError: no router, two on one layer, or one whose choice cannot be forced, by name.
        ReplayError: the model has a hook already.
    """

    def __init__(self, model: nn.Module, *, num_experts: int, top_k: int) -> None:
        self.model = model
        self.num_experts = num_experts
        self.top_k = top_k
        self.sites, self.left_native = find_routers(model)
        self.layers = tuple(site.layer for site in self.sites)
        self._replayed_with_grad = False
        self._local = threading.local()
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # owner, attribute, ours, what was there

    @classmethod
    def install(cls, model: nn.Module, *, num_experts: int, top_k: int) -> RouterHook:
        """Make the hook and set it on the routers."""
        hook = cls(model, num_experts=num_experts, top_k=top_k)
        for site in hook.sites:
            if isinstance(site.module.__dict__.get(site.method), _Router):
                raise ReplayError(f"{site} has a hook already; one hook both records and replays")
        for site in hook.sites:
            hook._replace(site.module, site.method, _Router(hook, site))
        return hook

    def remove(self) -> None:
        """Leave the model as it was before :meth:`install`. Codes of a pending backward are no longer replayed.

        Raises:
            ReplayError: if somebody has set another function over the hook's since.
        """
        for owner, name, ours, _ in self._replaced:
            if isinstance(ours, _Router) and owner.__dict__.get(name) is not ours:
                raise ReplayError(f"{type(owner).__name__}.{name} was set anew after the hook; take that away first")
        for owner, name, ours, before in reversed(self._replaced):
            if owner.__dict__.get(name) is not ours:  # a checkpoint function set anew by its own code
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._replaced.clear()

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Record the choices of the forwards inside; they are the model's own.

        Raises:
            ReplayError: at the end, if a layer made another number of choices than the others.
        """
        recording = Recording(self.layers)
        with self._running(Record(recording, _ids_dtype(self.num_experts))):
            yield recording

    @contextmanager
    def replay(
        self, codes: Tensor, layers: Sequence[int] | None = None, counted: Tensor | None = None
    ) -> Iterator[Replaying]:
        """Force recorded choices in the forward inside, and in its recomputation in backward, whenever that is.

        Args:
            codes: uint8 or int16 (the bits of uint16) ``[rows, L, top_k]``: expert id + 1, or 0 for not recorded. A row
                with a zero is routed natively. Valid ids: neither range nor duplicates are looked at here.
            layers: absolute layer number of each column; default ``0 .. L-1``. Columns of other layers are ignored.
            counted: rows that enter the statistics, bool ``[rows]``; default all.

        Raises:
            ReplayError: for codes of another form; in the forward, if a router sees another number of rows; at the end,
                if not every layer made its choice.
        """
        columns = {layer: column for column, layer in enumerate(range(codes.shape[1]) if layers is None else layers)}
        self._check(codes, columns, counted)
        replaying = Replaying()
        if torch.is_grad_enabled():
            self._replayed_with_grad = True
        with self._running(Replay(codes, columns, counted, replaying, self.layers)):
            yield replaying

    @contextmanager
    def native(self) -> Iterator[None]:
        """Route natively inside, whatever is open around."""
        self._bind_checkpoints()
        with self._entered(_Entry(None, _backward(), ())):
            yield

    def bind(self, function: Callable) -> Callable:
        """The function, to run at any later time and in any thread under what is active now.

        For checkpoint functions that the hook does not find: ``checkpoint(hook.bind(layer), x)``. Called in a backward
        after it has run in a forward, it repeats the experts of that forward.
        """
        return _Bound(self, function)

    def bind_checkpoint(self, checkpoint: Callable) -> Callable:
        """A checkpoint function ``(function, *args, **kwargs)`` that binds what it is given."""
        return _BoundCheckpoint(self, checkpoint)

    # --- inside ---

    def _check(self, codes: Tensor, columns: dict[int, int], counted: Tensor | None) -> None:
        if codes.dim() != 3 or codes.dtype not in (torch.uint8, torch.int16) or codes.shape[-1] != self.top_k:
            raise ReplayError(
                f"codes to replay must be uint8 or int16 [rows, layers, {self.top_k}], not {codes.dtype} "
                f"{list(codes.shape)}"
            )
        if len(columns) != codes.shape[1]:
            raise ReplayError(f"{codes.shape[1]} columns of codes for {len(columns)} layer numbers")
        absent = [layer for layer in self.layers if layer not in columns]
        if absent:
            raise ReplayError(f"the codes have no column for the routers of layers {absent}")
        if counted is not None and (counted.dtype != torch.bool or tuple(counted.shape) != codes.shape[:1]):
            raise ReplayError(f"counted must be bool [{codes.shape[0]}], not {counted.dtype} {list(counted.shape)}")

    @contextmanager
    def _running(self, state: Record | Replay) -> Iterator[None]:
        self._bind_checkpoints()
        with self._entered(_Entry(state, _backward(), ())):
            yield
        if _backward() != -1:
            return
        counts = set(state.fired.values())
        if counts == {0} or len(counts) > 1:
            most = max(counts)
            less = [layer for layer, fired in state.fired.items() if fired < max(most, 1)]
            raise ReplayError(
                f"the routers of layers {less} made fewer choices that were {state.verb} than there were forwards "
                f"({max(most, 1)}): {dict(state.fired)}"
            )

    @contextmanager
    def _entered(self, entry: _Entry) -> Iterator[None]:
        stack = self._local.__dict__.setdefault("stack", [])
        stack.append(entry)
        try:
            yield
        finally:
            stack.pop()

    def _active(self, what: Any) -> _Entry | None:
        """What is active in this thread; in a backward, only what was entered in that backward."""
        stack, task = self._local.__dict__.get("stack"), _backward()
        entry = stack[-1] if stack else None
        if task == -1 or (entry is not None and entry.task == task):
            return entry
        if self._replayed_with_grad:
            raise ReplayError(
                f"{what} runs in a backward, and it is not known which forward this repeats: the checkpoint function "
                "that calls it is not bound. Give it `hook.bind(function)`, or set it on the module that runs the "
                "layer, where the hook finds it"
            )
        return None

    def _pour(self, entry: _Entry, layer: int, choice: Choice) -> None:
        if not entry.sinks:
            return
        compact = choice.ids.to(torch.uint8 if self.num_experts <= 256 else _ids_dtype(self.num_experts))
        for sink in entry.sinks:
            if layer in sink:
                raise ReplayError(f"layer {layer} ran twice in one bound function; bind each run by itself")
            sink[layer] = (compact, choice.recorded)

    def _replace(self, owner: Any, name: str, ours: Any) -> None:
        self._replaced.append((owner, name, ours, owner.__dict__.get(name, _ABSENT)))
        setattr(owner, name, ours)

    def _bind_checkpoints(self) -> None:
        """Bind the checkpoint functions that are set on modules now; they may have been set after the hook."""
        if not self._replaced:
            raise ReplayError("the hook is not installed")
        for owner, name in _checkpoint_functions(self.model):
            if not isinstance(getattr(owner, name), _BoundCheckpoint):
                self._forget(owner, name)
                self._replace(owner, name, _BoundCheckpoint(self, getattr(owner, name)))

    def _forget(self, owner: Any, name: str) -> None:
        # a checkpoint function of ours was replaced: what is there now is what `remove` restores
        self._replaced = [entry for entry in self._replaced if not (entry[0] is owner and entry[1] == name)]


_ABSENT = object()


def _ids_dtype(num_experts: int) -> torch.dtype:
    return torch.int16 if num_experts <= 2**15 else torch.int32


def _checkpoint_functions(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """(owner, attribute) of the checkpoint functions on the modules of a model.

    transformers sets ``_gradient_checkpointing_func``, torch's ``CheckpointWrapper`` has ``checkpoint_fn``; verl's
    activation offload (`verl/utils/activation_offload.py`) replaces a layer's forward by a closure over an object that
    has ``checkpoint_fn``.
    """
    for module in model.modules():
        own = module.__dict__
        for name in ("_gradient_checkpointing_func", "checkpoint_fn"):
            if callable(own.get(name)):
                yield module, name
        forward = own.get("forward")
        if isinstance(forward, MethodType):
            for value in inspect.getclosurevars(forward.__func__).nonlocals.values():
                if not isinstance(value, nn.Module) and callable(getattr(value, "__dict__", {}).get("checkpoint_fn")):
                    yield value, "checkpoint_fn"
