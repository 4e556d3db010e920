"""One call of a router's function: what it chooses, and what takes the place of that.

:class:`ExpertChoice` stands between the function and its ``topk`` over the experts while it runs: the indices are
replaced, and the values are taken from the very scores that ``topk`` was given, so that softmax, normalisation, scaling
and bias stay the family's own code and the gradient reaches the router.

Torch only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class ReplayError(RuntimeError):
    """Routes could not be recorded or replayed as asked; nothing was routed otherwise in silence."""


class Choice(NamedTuple):
    """What a router chose.

    Attributes:
        ids: expert ids to use, int64 ``[rows, top_k]``.
        live: the router's own choice, int64 ``[rows, top_k]``; None where it was not computed.
        recorded: rows whose ids came from a record, bool ``[rows, 1]``; None for none.
    """

    ids: Tensor
    live: Tensor | None
    recorded: Tensor | None


Decide = Callable[[int, torch.device, Callable[[], Tensor]], Choice]
"""(rows, device, computes the live choice) -> what to use."""

_TOPK = frozenset({torch.topk, Tensor.topk})
_FILL = frozenset({torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_})
_WHERE = frozenset({torch.where, Tensor.where})
_MULTIPLY = frozenset({torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__})
_BLANK = frozenset(
    {torch.zeros_like, torch.ones_like, torch.full_like, torch.zeros, torch.ones, torch.full}
    | {Tensor.new_zeros, Tensor.new_ones, Tensor.new_full}
)


class _Unmasked(NamedTuple):
    masked: Tensor
    scores: Tensor
    keep: Tensor | None  # where zero, the mask has taken the score away; None: anywhere


class ExpertChoice(TorchFunctionMode):
    """Stands between one call of a router's function and its ``topk`` over the experts.

    A group-limited router scores groups with top-k's of other shapes; those are left alone. It then masks the scores of
    the groups that lost. For a replayed row the mask must not reach the weights (its recorded experts may lie in a
    group that loses today), so values are taken from the scores before the mask.

    Args:
        num_experts: size of the axis.
        top_k: experts for a token.
        decide: what to use.
    """

    def __init__(self, num_experts: int, top_k: int, decide: Decide) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.decide = decide
        self.choices: list[tuple[tuple[int, ...], Choice]] = []
        self._unmasked: dict[int, _Unmasked] = {}
        self._blank: dict[int, Tensor] = {}

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _TOPK:
            return self._topk(func, *args, **kwargs)
        if func is Tensor.masked_fill_ and self._over_experts(args[0]):
            scores = args[0].clone()
            result = func(*args, **kwargs)
            self._unmasked[id(result)] = _Unmasked(result, scores, None)
            return result
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self._follow(func, result, [*args, *kwargs.values()])
        return result

    def made(self) -> Choice | None:
        """The choice that the function made, None if it made none.

        Raises:
            ReplayError: it made several, and it cannot be told which is the one.
        """
        if not self.choices:
            return None
        shape, choice = self.choices[-1]
        # with one group, the top-k inside groups looks like the choice but for its extra axis, and decides nothing
        if any(earlier == shape for earlier, _ in self.choices[:-1]):
            raise ReplayError(f"{len(self.choices)} top-{self.top_k} over {self.num_experts} experts in one call")
        return choice

    def _over_experts(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.dim() > 0 and tensor.shape[-1] == self.num_experts

    def _topk(
        self,
        func: Callable,
        input: Tensor,
        k: int,
        dim: int = -1,
        largest: bool = True,
        sorted: bool = True,
        **out: Any,
    ) -> Any:
        def native() -> Any:
            return func(input, k, dim, largest, sorted, **out)

        if k != self.top_k or not largest or input.dim() == 0 or input.shape[dim] != self.num_experts or out:
            return native()

        def live() -> Tensor:
            return native().indices.movedim(dim, -1).reshape(-1, k)

        choice = self.decide(input.numel() // self.num_experts, input.device, live)
        self.choices.append((tuple(input.shape), choice))
        lead = input.movedim(dim, -1).shape[:-1]
        ids = choice.ids.reshape(*lead, k).movedim(-1, dim)
        values = input.gather(dim, ids)
        unmasked = self._unmasked.get(id(input))
        if unmasked is not None and choice.recorded is not None:
            lifted = choice.recorded.reshape(*lead, 1).movedim(-1, dim)
            if unmasked.keep is not None:
                lifted = lifted & (unmasked.keep.expand_as(input).gather(dim, ids) == 0)
            values = torch.where(lifted, unmasked.scores.gather(dim, ids), values)
        return torch.return_types.topk((values, ids))

    def _follow(self, func: Callable, result: Tensor, arguments: list[Any]) -> None:
        """Remember masks as they are made (``blank``: made of constants and indices), and scores before a mask."""
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        if func in _BLANK or (floats and all(id(tensor) in self._blank for tensor in floats)):
            self._blank[id(result)] = result
            return
        if not self._over_experts(result):
            return
        if func in _FILL:
            self._unmasked[id(result)] = _Unmasked(result, tensors[0], None)
        elif func in _WHERE:
            scores = [tensor for tensor in tensors if self._is_score(tensor, result)]
            if len(scores) == 1:
                self._unmasked[id(result)] = _Unmasked(result, scores[0], None)
        elif func in _MULTIPLY and len(tensors) == 2:
            scores = [tensor for tensor in tensors if self._is_score(tensor, result)]
            masks = [tensor for tensor in tensors if tensor.dim() and not self._is_score(tensor, tensor)]
            if len(scores) == len(masks) == 1:
                self._unmasked[id(result)] = _Unmasked(result, scores[0], masks[0])

    def _is_score(self, tensor: Tensor, result: Tensor) -> bool:
        return tensor.is_floating_point() and id(tensor) not in self._blank and tensor.shape == result.shape
