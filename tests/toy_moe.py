"""A mixture-of-experts model in plain torch: three ways of scoring, a multi-token-prediction layer, checkpointing.

Small enough to write every formula out beside it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

HIDDEN, EXPERTS, TOP_K = 6, 8, 2
KINDS = ("normalising", "plain", "grouped")


class ToyRouter(nn.Module):
    """Scores, chooses, weighs.

    Args:
        kind: "normalising" (softmax, top-k, divided by their sum), "plain" (softmax, top-k) or "grouped" (softmax; two
            of four groups stay, by their best expert; scores of the others are masked; top-k; times 2.5).
        mask: how the grouped router masks: (scores, kept bool) -> scores.
    """

    def __init__(self, kind: str, mask: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.kind = kind
        self.mask = mask or (lambda scores, kept: scores.masked_fill(~kept, 0.0))
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = (hidden @ self.weight.t()).softmax(-1)
        if self.kind == "grouped":
            best = scores.view(-1, 4, EXPERTS // 4).max(-1).values
            groups = torch.topk(best, 2, dim=-1).indices
            kept = torch.zeros_like(best).scatter_(1, groups, 1).unsqueeze(-1).expand(-1, 4, EXPERTS // 4)
            scores = self.mask(scores, kept.reshape(-1, EXPERTS).bool())
        weights, ids = scores.topk(TOP_K, dim=-1)
        if self.kind == "normalising":
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * (2.5 if self.kind == "grouped" else 1.0), ids


class ToyBlock(nn.Module):
    """Router and experts; an expert is a square matrix."""

    def __init__(self, kind: str = "normalising", **router: object) -> None:
        super().__init__()
        self.router = ToyRouter(kind, **router)
        self.experts = nn.ParameterList(nn.Parameter(0.5 * torch.randn(HIDDEN, HIDDEN)) for _ in range(EXPERTS))

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, HIDDEN)
        weights, ids = self.router(flat)
        each = torch.stack([flat @ expert for expert in self.experts], dim=1)
        out = (each.gather(1, ids.unsqueeze(-1).expand(-1, -1, HIDDEN)) * weights.unsqueeze(-1)).sum(1)
        return hidden + out.reshape(hidden.shape)


class ToyMTPBlock(ToyBlock):
    """A layer that predicts a further token; it numbers itself like a decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_number = 1


class ToyModel(nn.Module):
    """Blocks one behind the other, with hidden states for input.

    Args:
        kinds: of its layers.
        checkpoint: ``(function, x) -> y`` around every layer, None for none; kept where the hook does not look.
        noise: added to a layer's input when it is recomputed in backward.
        mtp: whether a multi-token-prediction layer follows.
    """

    def __init__(
        self,
        kinds: tuple[str, ...] = ("normalising",) * 3,
        checkpoint: Callable | None = None,
        noise: float = 0.0,
        mtp: bool = False,
        **router: object,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ToyBlock(kind, **router) for kind in kinds)
        self.mtp = nn.ModuleList([ToyMTPBlock()] if mtp else [])
        self.recompute = checkpoint
        self.noise = noise

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = self._run(layer, hidden)
        for layer in self.mtp:
            hidden = layer(hidden)
        return hidden

    def _run(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            if self.noise and torch._C._current_graph_task_id() != -1:
                x = x + self.noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(99))
            return layer(x)

        return run(hidden) if self.recompute is None else self.recompute(run, hidden)
