"""What a model's configuration says of its experts: how many, how many a token takes, and in which layers.

A record of routes is laid out, narrowed and checked by the configuration alone, never by the data: two engines, or two
batches, then agree on dtype and shape without talking to each other. Read from a Hugging Face configuration object or
from the dictionary of a ``config.json``; imports no framework.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

EXPERT_FIELDS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_K_FIELDS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)  # not "top_k": a sampling parameter in many configurations
LAYER_FIELDS = ("num_hidden_layers", "n_layers", "num_layers")
TEXT_CONFIGS = ("text_config", "thinker_config", "llm_config", "language_config", "language_model_config")
EXPERT_CONFIGS = ("ffn_config",)
SWITCHES = ("enable_moe_block", "is_moe")
"""Flags that turn the experts of a family off although their number is given."""

SPARSE = ("sparse", "moe")
EVERY_LAYER = frozenset(
    """
    aria aria_text dbrx flex_olmo gemma4 gemma4_text gpt_oss granitemoe granitemoehybrid
    granitemoeshared hunyuan_v1_moe jetmoe longcat_flash minimax minimax_m2 mixtral olmoe phimoe qwen3_5_moe
    qwen3_5_moe_text solar_open
    """.split()
)
"""Model types that build experts in every layer and whose configuration has no field to say otherwise."""

MAX_EXPERTS = 2**16 - 1


class NotMoEError(ValueError):
    """The configuration describes a model without experts to choose from."""


@dataclass(frozen=True)
class MoELayout:
    """Experts of a model.

    Attributes:
        num_experts: routed experts that a router chooses from, in one layer. Shared experts are not chosen.
        top_k: experts that a token takes in one layer.
        num_layers: all hidden layers, dense ones included; extra layers for multi-token prediction are not.
        moe_layers: absolute numbers of the layers with a router, in order; None where the configuration does not tell.
        model_type: as the configuration names it, for messages.
    """

    num_experts: int
    top_k: int
    num_layers: int
    moe_layers: tuple[int, ...] | None
    model_type: str

    def __post_init__(self) -> None:
        if not 2 <= self.num_experts <= MAX_EXPERTS:
            raise ValueError(f"{self.model_type}: {self.num_experts} experts; 2 to {MAX_EXPERTS} can be recorded")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"{self.model_type}: top-{self.top_k} of {self.num_experts} experts")
        if self.num_layers < 1:
            raise ValueError(f"{self.model_type}: {self.num_layers} layers")
        layers = self.moe_layers
        if layers is not None and (
            not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= self.num_layers
        ):
            raise ValueError(
                f"{self.model_type}: MoE layers {layers} are not increasing numbers in [0, {self.num_layers})"
            )

    @property
    def code_dtype(self) -> np.dtype:
        """Narrowest unsigned dtype that holds every expert id and "not recorded" besides."""
        return np.dtype(np.uint8 if self.num_experts <= np.iinfo(np.uint8).max else "<u2")

    @property
    def transport_width(self) -> int:
        """int16 numbers that carry the choice of one token in one layer."""
        return (self.top_k * self.code_dtype.itemsize + 1) // 2

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's codes as stored, all layers."""
        return self.num_layers * self.top_k * self.code_dtype.itemsize

    @classmethod
    def from_config(cls, config: Any) -> MoELayout:
        """Read a Hugging Face configuration.

        Args:
            config: ``PretrainedConfig`` or the dictionary of a ``config.json``; the text model may be nested
                (``text_config``, ``thinker_config.text_config``, ``llm_config``, ``language_config``).

        Raises:
            NotMoEError: no experts; names the model type and the fields that were looked for.
            ValueError: experts that cannot be recorded: no top-k, a top-k that differs between layers, too many.
        """
        model_type = str(_get(config, "model_type") or type(config).__name__)
        for part in _parts(config):
            num_experts = _uniform(part, EXPERT_FIELDS, model_type)
            if num_experts is not None and num_experts > 1 and _enabled(part):
                break
        else:
            raise NotMoEError(
                f"{model_type} has no experts to choose from: looked for {', '.join(EXPERT_FIELDS)} (more than one, "
                f"not switched off by {' or '.join(SWITCHES)}) in the configuration and in its "
                f"{', '.join(TEXT_CONFIGS + EXPERT_CONFIGS)}. Routing replay needs a mixture-of-experts model"
            )
        top_k = _uniform(part, TOP_K_FIELDS, model_type)
        if top_k is None:
            raise ValueError(
                f"{model_type} has {num_experts} experts, but none of {', '.join(TOP_K_FIELDS)} says how many a "
                "token takes"
            )
        num_layers = _num_layers(part)
        if num_layers is None:
            raise ValueError(f"{model_type}: none of {', '.join(LAYER_FIELDS)} says how many layers there are")
        # experts that pass their input on are chosen like any other
        num_experts += int(_get(part, "zero_expert_num") or 0)
        layers = _moe_layers(part, num_layers)
        if layers is not None and not layers:
            raise NotMoEError(f"{model_type} has {num_experts} experts, but none of its {num_layers} layers uses them")
        return cls(num_experts, top_k, num_layers, None if layers is None else tuple(layers), model_type)


# --- reading ------------------------------------------------------------------------------------------------------


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _parts(config: Any) -> Iterator[Any]:
    """The configuration and the nested ones that may describe the language model, outermost first."""
    yield config
    for name in TEXT_CONFIGS:
        nested = _get(config, name)
        if nested is not None and nested is not config:
            yield from _parts(nested)


def _first(config: Any, names: Sequence[str]) -> Any:
    for holder in (config, *(_get(config, name) for name in EXPERT_CONFIGS)):
        for name in names:
            value = None if holder is None else _get(holder, name)
            if value is not None:
                return value
    return None


def _uniform(config: Any, names: Sequence[str], model_type: str) -> int | None:
    """A number that some configurations give per layer; it must be the same for all."""
    value = _first(config, names)
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(set(value)) != 1:
            raise ValueError(
                f"{model_type}: {names[0]} differs between layers ({sorted(set(value))}); only routes of one shape are "
                "recorded"
            )
        value = value[0]
    return None if value is None else int(value)


def _enabled(config: Any) -> bool:
    return all(_get(config, switch) is not False for switch in SWITCHES)


def _num_layers(config: Any) -> int | None:
    if _get(config, "model_type") == "longcat_flash":  # its num_hidden_layers counts attention blocks, two a layer
        names: Sequence[str] = ("num_layers",)
    else:
        names = LAYER_FIELDS
    for name in names:
        value = _get(config, name)
        if value is not None:
            return int(value)
    pattern = _block_types(config)
    return None if pattern is None else len(pattern)


def _block_types(config: Any) -> list[str] | None:
    """What each layer is, in families whose layers are either attention, state space, dense or experts."""
    types = _get(config, "layers_block_type") or _get(config, "layer_types")
    if types is None and isinstance(_get(config, "hybrid_override_pattern"), str):
        types = ["moe" if letter == "E" else "other" for letter in _get(config, "hybrid_override_pattern")]
    return list(types) if types is not None and "moe" in types else None


def _moe_layers(config: Any, num_layers: int) -> list[int] | None:
    """Layers with a router, by the most explicit field there is; None if there is none."""
    layers = range(num_layers)

    def where(marks: Sequence[Any], field: str) -> list[int]:
        if len(marks) != num_layers:
            raise ValueError(f"{_get(config, 'model_type')}: {field} has {len(marks)} entries for {num_layers} layers")
        return [layer for layer in layers if marks[layer]]

    if _get(config, "model_type") in EVERY_LAYER:
        return list(layers)
    types = _get(config, "mlp_layer_types")
    if types is not None:  # "hash_moe" looks its experts up by token id: nothing is chosen
        return where([kind in SPARSE for kind in types], "mlp_layer_types")
    for field in ("moe_layers", "moe_layers_enum"):
        named = _get(config, field)
        if named is not None:
            return sorted(int(layer) for layer in (named.split(",") if isinstance(named, str) else named))
    types = _block_types(config)
    if types is not None:
        return where([kind == "moe" for kind in types], "layers_block_type")
    period = _get(config, "expert_layer_period")
    if period is not None:
        return [layer for layer in layers if layer % period == (_get(config, "expert_layer_offset") or 0)]
    step = _get(config, "interleave_moe_layer_step")
    if step is not None:
        return list(range(step - 1, num_layers, step)) if step > 0 else []
    start = _get(config, "moe_layer_start_index")
    if start is not None:
        end = _get(config, "moe_layer_end_index")
        end = num_layers - 1 if end is None or end == -1 else end
        interval = _get(config, "moe_layer_interval") or 1
        return [layer for layer in layers if start <= layer <= end and (layer + 1) % interval == 0]
    hashed = _get(config, "num_hash_layers")
    if hashed is not None:
        return list(layers[hashed:])
    return _after_dense_layers(config, num_layers)


def _after_dense_layers(config: Any, num_layers: int) -> list[int] | None:
    """Layers with a router where the configuration names or counts the dense ones."""
    layers = range(num_layers)
    frequency = _get(config, "moe_layer_freq")
    if isinstance(frequency, Sequence) and not isinstance(frequency, str):
        if len(frequency) != num_layers:
            raise ValueError(
                f"{_get(config, 'model_type')}: moe_layer_freq has {len(frequency)} entries for {num_layers} layers"
            )
        return [layer for layer in layers if frequency[layer]]
    for field in ("first_k_dense_replace", "num_dense_layers"):
        dense = _get(config, field)
        if dense is not None:
            return [layer for layer in layers if layer >= dense and layer % (frequency or 1) == 0]
    dense, step = _get(config, "mlp_only_layers"), _get(config, "decoder_sparse_step")
    if dense is not None or step is not None:
        return [layer for layer in layers if layer not in (dense or ()) and (layer + 1) % (step or 1) == 0]
    return None
