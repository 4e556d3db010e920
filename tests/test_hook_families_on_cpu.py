"""The hook over every mixture-of-experts family of the installed transformers.

Replaying its own record must not change a bit. For other routes, what a router makes of them is compared with the
family's formula, written out below.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from moe_families import EXPERTS, TOP_K, families, more_families
from moe_replay import ROWS, backward, build, forward, hooked, outcome, router_parameters, table
from torch import Tensor, nn

ALL = {**families(), **more_families()}
REFUSED = {
    "doge": "DogeCDMoE (model.layers.0.mlp)",
    "ernie4_5_vl_moe": "vision_moe",
    "jetmoe": "two routers",
    "nllb_moe": "NllbMoeTop2Router",
    "phimoe": "PhimoeTopKRouter",
    "switch_transformers": "SwitchTransformersTop1Router",
}
EXACT = sorted(ALL.keys() - REFUSED.keys())
NO_LANGUAGE_MODEL = {"vitpose_backbone": "experts for data sets, not chosen by a router"}


@pytest.mark.parametrize("name", EXACT)
def test_R24_own_routes_give_the_same_bits(name):
    row = outcome(name)
    rows = ROWS * len(row.layers)
    assert not row.refused
    assert row.exact and row.counts == (rows, 0, rows)
    assert row.checkpointed
    assert row.router_gradient


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    assert REFUSED[name] in outcome(name).refused


def test_every_family_of_transformers_is_here():
    folder = Path(transformers.__file__).parent / "models"
    found = set()
    for path in folder.glob("*/modeling_*.py"):
        if re.search(r"^class \w*(Experts|MoE|Moe|MoeBlock|SparseMLP|CDMoE)\w*\(nn\.Module", path.read_text(), re.M):
            found.add(path.parent.name)
    ours = {name.partition(",")[0] for name in ALL}
    assert found == ours | NO_LANGUAGE_MODEL.keys()
    assert len({name.partition(",")[0] for name in EXACT}) >= 23


def test_the_table_has_a_line_for_each():
    lines = table().splitlines()
    assert len(lines) == 2 + len(ALL) and "NOT EXACT" not in table()
    assert sum("| exact |" in line for line in lines) == len(EXACT)


# --- other routes -------------------------------------------------------------------------------------------------

Weights = Callable[[Tensor, Tensor, nn.Module], Tensor]
"""(logits ``[rows, experts]``, ids ``[rows, top_k]``, module that routes) -> weights ``[rows, top_k]``."""


def normalised(weights: Tensor, epsilon: float = 0.0) -> Tensor:
    return weights / (weights.sum(-1, keepdim=True) + epsilon)


def softmax(normalise: bool | str) -> Weights:
    """Softmax over all experts; then the chosen, divided by their sum or not (or as a flag of the router says)."""

    def weights(logits: Tensor, ids: Tensor, module: nn.Module) -> Tensor:
        chosen = (logits.exp() / logits.exp().sum(-1, keepdim=True)).gather(1, ids)
        divide = getattr(module, normalise) if isinstance(normalise, str) else normalise
        return normalised(chosen) if divide else chosen

    return weights


def scaled_softmax(logits: Tensor, ids: Tensor, module: nn.Module) -> Tensor:
    return softmax(False)(logits, ids, module) * module.routed_scaling_factor


def softmax_of_chosen(logits: Tensor, ids: Tensor, module: nn.Module) -> Tensor:
    chosen = logits.gather(1, ids).exp()
    return normalised(chosen)


def sigmoid(epsilon: float | None, scale: str = "routed_scaling_factor") -> Weights:
    """Sigmoid of each; the chosen, divided by their sum (unless a flag says no), times a factor; no bias in them."""

    def weights(logits: Tensor, ids: Tensor, module: nn.Module) -> Tensor:
        chosen = (1.0 / (1.0 + (-logits).exp())).gather(1, ids)
        if epsilon is not None and getattr(module, "norm_topk_prob", True):
            chosen = normalised(chosen, epsilon)
        return chosen * getattr(module, scale, 1.0)

    return weights


def mistral(logits: Tensor, ids: Tensor, module: nn.Module) -> Tensor:
    return softmax("norm_topk_prob")(logits, ids, module) * module.routed_scaling_factor


def deepseek_v4(logits: Tensor, ids: Tensor, module: nn.Module) -> Tensor:
    return normalised(torch.log1p(logits.exp()).sqrt().gather(1, ids)) * module.routed_scaling_factor


def gemma4(logits: Tensor, ids: Tensor, module: nn.Module) -> Tensor:
    return softmax(True)(logits, ids, module) * module.per_expert_scale[ids]


def cohere2(logits: Tensor, ids: Tensor, module: nn.Module) -> Tensor:
    if module.expert_selection_fn == "sigmoid":
        return sigmoid(0.0)(logits, ids, module)
    return softmax_of_chosen(logits, ids, module)


def laguna(logits: Tensor, ids: Tensor, module: nn.Module) -> Tensor:
    cap = module.router_logit_softcapping
    return sigmoid(0.0)(torch.tanh(logits / cap) * cap if cap > 0 else logits, ids, module)


FORMULAS: dict[str, Weights] = {
    **dict.fromkeys(
        ["qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "qwen3_next", "mellum"], softmax("norm_topk_prob")
    ),
    **dict.fromkeys(["qwen3_5_moe", "qwen3_vl_moe", "qwen3_omni_moe", "mixtral", "minimax"], softmax(True)),
    **dict.fromkeys(["hunyuan_v1_moe", "ernie4_5_moe", "dbrx"], softmax(True)),
    **dict.fromkeys(["deepseek_v2", "deepseek_ocr2", "longcat_flash"], scaled_softmax),
    **dict.fromkeys(["gpt_oss", "granitemoe", "granitemoeshared", "granitemoehybrid", "aria"], softmax_of_chosen),
    **dict.fromkeys(["deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa"], sigmoid(1e-20)),
    **dict.fromkeys(["dots1", "exaone_moe", "solar_open", "nemotron_h"], sigmoid(1e-20)),
    "openai_privacy_filter": lambda logits, ids, module: softmax_of_chosen(logits, ids, module) / TOP_K,
    "jamba": softmax(False),
    "gemma4": gemma4,
    "mistral4": mistral,
    "cohere2_moe": cohere2,
    "minimax_m2": sigmoid(0.0),
    "lfm2_moe": sigmoid(1e-6),
    "afmoe": sigmoid(1e-20, "route_scale"),
    "hy_v3": sigmoid(1e-20, "router_scaling_factor"),
    "llama4": sigmoid(None),
    "laguna": laguna,
    "deepseek_v4": deepseek_v4,
}


class Spy:
    """Stands under the hook: what a router's function was given, and what it made of it."""

    def __init__(self, site) -> None:
        self.module = site.module
        self.inputs: tuple = ()
        self.result: tuple = ()
        method = "forward" if site.method == "get_topk_indices" else site.method
        original = getattr(site.module, method)

        def run(*args, **kwargs):
            self.inputs, self.result = args, original(*args, **kwargs)
            return self.result

        setattr(site.module, method, run)

    def logits(self, matrix: nn.Parameter) -> Tensor:
        """``[rows, experts]``, literally: given, or from hidden states."""
        given = self.inputs[-1] if self.inputs[-1].shape[-1] == EXPERTS and self.inputs[-1].dim() > 1 else None
        if given is not None:
            return given.reshape(-1, EXPERTS)
        hidden = self.inputs[0].reshape(-1, self.inputs[0].shape[-1])
        if hasattr(self.module, "scalar_root_size"):  # gemma4 scales before its projection
            root = (hidden.square().mean(-1, keepdim=True) + self.module.eps).sqrt()
            hidden = hidden / root * self.module.scale * self.module.scalar_root_size
        bias = getattr(self.module, "bias", None)
        return hidden @ matrix.t() + (0.0 if bias is None else bias)

    def used(self, wanted: Tensor, missing: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(ids, weights), each ``[rows, top_k]``, from what the function returned.

        Args:
            wanted: recorded ids, ``[rows, top_k]``.
            missing: rows without a record, ``[rows]``.
            logits: ``[rows, experts]``; granite and llama4 choose by them, and do not return the ids.
        """
        result = self.result
        ids = torch.where(missing[:, None], logits.topk(TOP_K).indices, wanted)
        if len(result) == 5:  # granite: gates in the order of their experts
            order, _, gates, sizes, _ = result
            assert sizes == torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()
            return ids, torch.zeros_like(gates).index_put((order,), gates).reshape(-1, TOP_K)
        small = [tensor.reshape(-1, TOP_K) for tensor in result if tensor.shape[-1] == TOP_K]
        if not small:  # llama4: a score for each expert, those not chosen zero
            scores = result[0]
            assert torch.equal((scores > 0).sum(-1), torch.full((len(scores),), TOP_K))
            return ids, scores.gather(1, ids)
        ids, weights = sorted(small, key=torch.is_floating_point)
        assert torch.equal(ids[~missing], wanted[~missing])
        return ids, weights


@pytest.mark.parametrize("name", EXACT)
def test_R16_R17_other_routes_equal_the_formula(name):
    model = build(name)
    plain = hooked(model)
    with plain.record() as recording, torch.no_grad():
        native_logits = forward(model)
    routes = recording.routes().long()
    plain.remove()
    spies = {site.layer: Spy(site) for site in plain.sites}
    hook = hooked(model)
    matrices = router_parameters(hook)
    changed, missing = torch.arange(ROWS) % 3 == 0, torch.arange(ROWS) % 3 == 1
    other = torch.rand(ROWS, len(hook.layers), EXPERTS, generator=torch.Generator().manual_seed(5)).argsort(-1)
    codes = torch.where(changed[:, None, None], other[..., :TOP_K], routes) + 1
    codes[missing] = 0
    with hook.replay(codes.to(torch.uint8), layers=hook.layers) as replaying:
        logits = forward(model)
    assert not torch.equal(logits, native_logits)
    replayed, disagreeing, counted = replaying.counts.tolist()
    assert counted == ROWS * len(hook.layers) and replayed == int((~missing).sum()) * len(hook.layers)
    assert int(changed.sum()) * 0.8 < disagreeing <= replayed
    for column, layer in enumerate(hook.layers):
        spy, matrix = spies[layer], matrices[layer]
        scores = spy.logits(matrix).float()
        ids, weights = spy.used(codes[:, column] - 1, missing, scores)
        expected = FORMULAS[name.partition(",")[0]](scores, ids, spy.module)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        slope = torch.linspace(-1.0, 1.0, weights.numel()).reshape(weights.shape)
        of_router = torch.autograd.grad((weights * slope).sum(), matrix, retain_graph=True)[0]
        of_formula = torch.autograd.grad((expected * slope).sum(), matrix, retain_graph=True)[0]
        assert of_router.abs().max() > 0
        torch.testing.assert_close(of_router, of_formula, rtol=1e-4, atol=1e-5)
    found = backward(model, logits)
    gates = {id(parameter) for parameter in matrices.values()}
    assert all(found[key].abs().max() > 0 for key, parameter in model.named_parameters() if id(parameter) in gates)
