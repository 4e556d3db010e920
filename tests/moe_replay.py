"""Runs the hook over the tiny models of `moe_families.py`, and writes the table of what can be replayed.

``python tests/moe_families.py`` prints the table.
"""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import dataclass, field

import torch
import transformers
from moe_families import EXPERTS, TOP_K, VOCABULARY, families, more_families
from torch import Tensor, nn

from verl_sat.router_replay.hook import RouterHook, UnsupportedRouterError

BATCH, LENGTH = 2, 9
ROWS = BATCH * LENGTH


def build(name: str) -> nn.Module:
    """The tiny model, in training mode, with routers, biases and corrections that are not zero.

    Args:
        name: of a family or a variant of one.
    """
    torch.manual_seed(0)
    model_class, config = {**families(), **more_families()}[name]()
    model = getattr(transformers, model_class)(config).train()
    for module in model.modules():
        if hasattr(module, "num_group"):  # deepseek_v2's branch for groups reads what its block does not set
            module.num_experts = EXPERTS
    for key, value in [*model.named_parameters(), *model.named_buffers()]:
        if value.is_floating_point() and any(part in key for part in ("router", "gate.", "bias", "per_expert_scale")):
            value.detach().normal_(0.0, 0.5)
        if key.endswith("tid2eid"):
            value.copy_(torch.rand(value.shape[0], EXPERTS).argsort(-1)[:, : value.shape[1]])
    return model


def hooked(model: nn.Module) -> RouterHook:
    """With the hook, as every tiny model has eight experts and takes two."""
    return RouterHook.install(model, num_experts=EXPERTS, top_k=TOP_K)


def forward(model: nn.Module) -> Tensor:
    """Logits ``[batch, length, classes]`` of some tokens."""
    tokens = torch.randint(3, VOCABULARY - 4, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    language_model = getattr(model, "thinker", model)  # a talker beside it stays as it is
    return language_model(tokens, use_cache=False).logits


def backward(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    """Gradients of all parameters by name, of a loss that is not symmetric in anything."""
    loss = (logits * torch.linspace(-1.0, 1.0, logits.numel()).reshape(logits.shape)).sum()
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def router_parameters(hook: RouterHook) -> dict[int, nn.Parameter]:
    """Of each layer, the matrix that makes scores of hidden states."""
    matrices = {}
    for site in hook.sites:
        parent = hook.model.get_submodule(site.path.rpartition(".")[0])
        for owner in (site.module, parent):
            found = [
                parameter
                for name, parameter in owner.named_parameters()
                if parameter.dim() == 2 and parameter.shape[0] == EXPERTS and "expert" not in name.partition(".")[0]
            ]
            if found:
                matrices[site.layer] = found[0]
                break
    return matrices


@dataclass(frozen=True)
class Outcome:
    """What happened to a family.

    Attributes:
        name: of the family.
        site: class and method of its router; "" if refused.
        layers: with a router.
        left_native: routers that are left alone.
        exact: replaying its own routes gives the same bits, in logits and in all gradients.
        counts: replayed, disagreeing and counted rows x layers of that.
        checkpointed: the same under gradient checkpointing, where every layer did run again.
        router_gradient: every router has a gradient that is not zero.
        refused: why the hook refuses it, "" if it does not.
    """

    name: str
    site: str = ""
    layers: tuple[int, ...] = ()
    left_native: dict[str, str] = field(default_factory=dict)
    exact: bool = False
    counts: tuple[int, ...] = ()
    checkpointed: bool = False
    router_gradient: bool = False
    refused: str = ""


@functools.cache
def outcome(name: str) -> Outcome:
    """Run a family: natively, recorded, and replayed from its own record, then that under checkpointing."""
    model = build(name)
    native = forward_if_possible(model)
    try:
        hook = hooked(model)
    except UnsupportedRouterError as error:
        return Outcome(name, refused=str(error))
    expected = backward(model, native)
    with hook.record() as recording:
        recorded = forward(model)
    codes = (recording.routes() + 1).to(torch.uint8)
    with hook.replay(codes, layers=hook.layers) as replaying:
        replayed = forward(model)
    found = backward(model, replayed)
    exact = torch.equal(recorded, native) and torch.equal(replayed, native) and same(found, expected)
    gates = {id(parameter) for parameter in router_parameters(hook).values()}
    router_gradient = len(gates) == len(hook.layers) and all(
        found[key].abs().max() > 0 for key, parameter in model.named_parameters() if id(parameter) in gates
    )
    model.gradient_checkpointing_enable()
    runs = []
    for site in hook.sites:
        decoder_layer = model.get_submodule(re.match(r".*?\.\d+(?=\.)", site.path)[0])
        decoder_layer.register_forward_pre_hook(lambda *_: runs.append(1))
    with hook.replay(codes, layers=hook.layers):
        replayed = forward(model)
    checkpointed = torch.equal(replayed, native) and same(backward(model, replayed), expected)
    checkpointed = checkpointed and len(runs) == 2 * len(hook.sites)
    site = hook.sites[0]
    return Outcome(
        name,
        f"{type(site.module).__name__}.{site.method}",
        hook.layers,
        hook.left_native,
        exact,
        tuple(replaying.counts.tolist()),
        checkpointed,
        router_gradient,
    )


def forward_if_possible(model: nn.Module) -> Tensor | None:
    """None where a refused model wants more than tokens."""
    try:
        return forward(model)
    except (ValueError, TypeError):
        return None


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Bit by bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def table() -> str:
    """Markdown: family, the function that chooses, and whether the hook replays it exactly."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    lines = [
        "| family | the choice is made in | replay | left native |",
        "| --- | --- | --- | --- |",
    ]
    for name in sorted({**families(), **more_families()}):
        row = outcome(name)
        if row.refused:
            lines.append(f"| {name} | | refused: {row.refused} | |")
            continue
        verdict = "exact" if row.exact and row.checkpointed and row.router_gradient else "NOT EXACT"
        native = "; ".join(sorted(set(row.left_native.values())))
        lines.append(f"| {name} | `{row.site}` | {verdict} | {native} |")
    return "\n".join(lines)
