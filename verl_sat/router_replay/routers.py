"""Where a model chooses its experts.

In Hugging Face models the discrete choice of a mixture-of-experts layer is one ``topk`` over the experts, in the
forward of a router module or in a method of the block (``route_tokens_to_experts``). These functions are found by what
their code calls, in the live module tree.

Torch only: neither verl nor transformers is imported.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn

METHOD = "route_tokens_to_experts"
"""Method of an expert block that many families put the choice into."""

_CONTAINERS = ("layers", "h", "blocks", "block", "decoder_layers")
_ATTENTION = re.compile(r"Attention|Attn|Indexer|Compressor")
_FIXED_TABLE = re.compile(r"HashRouter")
_MTP = re.compile(r"(^|_)(mtp|nextn)", re.IGNORECASE)
_MTP_CLASS = re.compile(r"MTP|Mtp|NextN|MultiToken")
_NO_TEXT = re.compile(r"^(vision|visual|audio|speech|image|video|talker|code2wav|code_predictor|vit)", re.IGNORECASE)
_REFUSED = {
    "DogeCDMoE": "an expert is a pair of keys, each chosen by a top-k of its own",
}


class UnsupportedRouterError(ValueError):
    """A router whose choice cannot be forced; the message names its class and where it is."""


@dataclass(frozen=True)
class RouterSite:
    """One function that chooses experts.

    Attributes:
        module: it belongs to.
        method: its name, ``forward`` or a method that the block calls.
        layer: absolute number of the decoder layer.
        path: of the module in the model.
    """

    module: nn.Module
    method: str
    layer: int
    path: str

    def __str__(self) -> str:
        return f"{type(self.module).__name__}.{self.method} ({self.path})"


def find_routers(model: nn.Module) -> tuple[list[RouterSite], dict[str, str]]:
    """Functions that choose experts, in the order of their layers.

    Args:
        model: sharded, wrapped or compiled, as it will run.

    Returns:
        the sites, one for a layer, and the routers that stay native: path -> why.

    Raises:
        UnsupportedRouterError: no router, two on one layer, or experts without a choice that can be forced.
    """
    sites: dict[int, RouterSite] = {}
    native: dict[str, str] = {}
    owners: dict[int, tuple[str, nn.Module]] = {}
    named = dict(model.named_modules())
    for path, module in named.items():
        layer = _layer_number(path)
        if layer is None:
            continue
        owns_experts, method = _owns_experts(module), _choosing_method(type(module))
        fixed = bool(_FIXED_TABLE.search(type(module).__name__))
        if not (owns_experts or method or fixed):
            continue
        why = _why_native(path, named) or ("its choice is a fixed table of tokens" if fixed else None)
        if why:
            if method or fixed:
                native[path] = why
            continue
        if owns_experts:
            owners.setdefault(layer, (path, module))
        if method is None:
            continue
        reason = _REFUSED.get(_class_name(module))
        if reason:
            raise UnsupportedRouterError(f"{_class_name(module)} ({path}): its choice cannot be forced: {reason}")
        site = RouterSite(module, method, layer, path)
        if layer in sites:
            raise UnsupportedRouterError(
                f"layer {layer} has two routers, {sites[layer]} and {site}; a record holds one choice for a layer"
            )
        sites[layer] = site
    fixed_layers = {_layer_number(path) for path in native}
    for layer, (path, module) in owners.items():
        if layer not in sites and layer not in fixed_layers:
            raise UnsupportedRouterError(
                f"{_class_name(module)} ({path}): experts, but no top-k over them was found in {_router_name(module)}; "
                "its choice cannot be forced"
            )
    if not sites:
        raise UnsupportedRouterError(f"{_class_name(model)}: no router with a top-k over experts was found")
    return [sites[layer] for layer in sorted(sites)], native


def _class_name(module: nn.Module) -> str:
    # fully_shard swaps the class of a module for one that derives from its own
    name = type(module).__name__
    return name[4:] if name.startswith("FSDP") and len(type(module).__mro__) > 2 else name


def _layer_number(path: str) -> int | None:
    parts = path.split(".")
    indexed = [(name, index) for name, index in zip(parts, parts[1:], strict=False) if index.isdigit()]
    for name, index in indexed:
        if name in _CONTAINERS:
            return int(index)
    return int(indexed[0][1]) if indexed else None


def _why_native(path: str, named: dict[str, nn.Module]) -> str | None:
    parts = path.split(".")
    inside_layer = False  # names after a layer's number are parts of that layer: a vision expert beside a text expert
    for end, part in enumerate(parts, 1):
        if _MTP.search(part) or _MTP_CLASS.search(type(named[".".join(parts[:end])]).__name__):
            return "multi-token prediction"
        inside_layer |= part.isdigit()
        if not inside_layer and _NO_TEXT.search(part):
            return f"not the language model ({part})"
    return None


def _owns_experts(module: nn.Module) -> bool:
    for name, child in module.named_children():
        if name == "experts" or (type(child).__name__.endswith("Experts") and not name.startswith("shared")):
            return True
    return False


def _router_name(owner: nn.Module) -> str:
    for name, child in owner.named_children():
        if re.search(r"router|gate$|gating", name):
            return f"{_class_name(child)} ({name})"
    return "any function of it"


def _choosing_method(cls: type[nn.Module]) -> str | None:
    if _ATTENTION.search(cls.__name__):
        return None
    names = {name for klass in cls.__mro__ if not klass.__module__.startswith("torch.") for name in vars(klass)}
    choosing = {name for name in names if _calls_topk(getattr(cls, name, None))}
    if not choosing:
        return None
    if "forward" in choosing:
        return "forward"
    if len(choosing) == 1:
        return choosing.pop()
    return METHOD if METHOD in choosing else "forward"


def _calls_topk(function: Any, depth: int = 2) -> bool:
    function = inspect.unwrap(function) if callable(function) else function
    if not isinstance(function, FunctionType):
        return False
    for code in _codes(function.__code__):
        if "topk" in code.co_names:
            return True
        for name in code.co_names if depth else ():
            helper = function.__globals__.get(name)
            if isinstance(helper, FunctionType) and not helper.__module__.startswith("torch"):
                if _calls_topk(helper, depth - 1):
                    return True
    return False


def _codes(code: Any) -> Iterator[Any]:
    yield code
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _codes(constant)
