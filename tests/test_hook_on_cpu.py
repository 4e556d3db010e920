"""The hook on small models: what it forces, what it leaves alone, and what a backward repeats."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from toy_moe import EXPERTS, HIDDEN, KINDS, TOP_K, ToyBlock, ToyModel

from verl_sat.router_replay.hook import ReplayError, RouterHook, UnsupportedRouterError

ROWS = 20
install = functools.partial(RouterHook.install, num_experts=EXPERTS, top_k=TOP_K)
CHECKPOINTS = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "non-reentrant": functools.partial(checkpoint, use_reentrant=False),
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def hidden_states(seed: int = 0, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def random_codes(seed: int = 1, rows: int = ROWS, layers: int = 3, experts: int = EXPERTS) -> Tensor:
    scores = torch.rand(rows, layers, experts, generator=torch.Generator().manual_seed(seed))
    return (scores.argsort(-1)[..., :TOP_K] + 1).to(torch.uint8)


def encode(ids: Tensor) -> Tensor:
    return (ids + 1).to(torch.uint8)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor], **tolerance: float) -> None:
    assert first.keys() == second.keys() and first
    for name in first:
        torch.testing.assert_close(first[name], second[name], **{"rtol": 0.0, "atol": 0.0, **tolerance})


def literal(model: ToyModel, hidden: Tensor, ids: Tensor) -> Tensor:
    """The toy model with given experts, written out: ids ``[rows, layers, top_k]``."""
    for number, layer in enumerate(model.layers):
        scores = (hidden @ layer.router.weight.t()).softmax(-1)
        weights = scores.gather(1, ids[:, number])
        if layer.router.kind == "normalising":
            weights = weights / weights.sum(-1, keepdim=True)
        if layer.router.kind == "grouped":
            weights = weights * 2.5
        out = torch.zeros_like(hidden)
        for expert, matrix in enumerate(layer.experts):
            out = out + (weights * (ids[:, number] == expert)).sum(-1, keepdim=True) * (hidden @ matrix)
        hidden = hidden + out
    return hidden


def qwen(layers: int = 2, **fields: object) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        **fields,
    )
    model = transformers.Qwen3MoeForCausalLM(config).train()
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            nn.init.normal_(parameter)
    return model


# --- record and replay --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_R24_own_routes_give_the_same_bits(kind):
    model = ToyModel((kind,) * 3)
    plain = model(hidden_states())
    plain.square().sum().backward()
    expected = gradients(model)
    hook = install(model)
    with hook.record() as recording:
        recorded = model(hidden_states())
    assert torch.equal(recorded, plain)
    routes = recording.routes()
    assert routes.dtype == torch.int16 and routes.shape == (ROWS, 3, TOP_K)
    with hook.replay(encode(routes)) as replaying:
        out = model(hidden_states())
    out.square().sum().backward()
    assert torch.equal(out, plain)
    assert_same(gradients(model), expected)
    assert replaying.counts.tolist() == [3 * ROWS, 0, 3 * ROWS]


@pytest.mark.parametrize("kind", KINDS)
def test_R24_other_routes_equal_the_formula_in_outputs_and_gradients(kind):
    model = ToyModel((kind,) * 3)
    codes = random_codes()
    reference = literal(model, hidden_states(), codes.long() - 1)
    reference.square().sum().backward()
    expected = gradients(model)
    hook = install(model)
    with hook.replay(codes) as replaying:
        out = model(hidden_states())
    out.square().sum().backward()
    torch.testing.assert_close(out, reference, rtol=1e-5, atol=1e-6)
    found = gradients(model)
    assert_same(found, expected, rtol=1e-4, atol=1e-5)
    assert all(found[f"layers.{n}.router.weight"].abs().max() > 0 for n in range(3))
    replayed, disagreeing, counted = replaying.counts.tolist()
    assert replayed == counted == 3 * ROWS and 0 < disagreeing <= replayed


MASKS = {
    "masked_fill": lambda scores, kept: scores.masked_fill(~kept, 0.0),
    "masked_fill_": lambda scores, kept: scores.clone().masked_fill_(~kept, 0.0),
    "torch.masked_fill": lambda scores, kept: torch.masked_fill(scores, ~kept, float("-inf")),
    "where scalar": lambda scores, kept: torch.where(kept, scores, 0.0),
    "where zeros": lambda scores, kept: torch.where(kept, scores, torch.zeros_like(scores)),
    "where zeros first": lambda scores, kept: torch.where(~kept, torch.full_like(scores, -1.0), scores),
    "method where": lambda scores, kept: scores.where(kept, torch.zeros(())),
    "times bool": lambda scores, kept: scores * kept,
    "bool times": lambda scores, kept: kept * scores,
    "times float": lambda scores, kept: scores * torch.zeros_like(scores).masked_fill(kept, 1.0),
    "mul": lambda scores, kept: torch.mul(scores, kept),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("grad", [True, False])
def test_R17_the_mask_of_losing_groups_does_not_reach_the_weights(mask, grad):
    model = ToyModel(("grouped",) * 3, mask=MASKS[mask])
    hook = install(model)
    codes = random_codes()
    with torch.set_grad_enabled(grad), hook.replay(codes):
        out = model(hidden_states())
    torch.testing.assert_close(out, literal(model, hidden_states(), codes.long() - 1), rtol=1e-5, atol=1e-6)


class Logits(nn.Module):
    """A model of one layer whose router takes its logits from outside."""

    def __init__(self, route) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].mlp = Route(route)

    def forward(self, logits: Tensor):
        return self.layers[0].mlp(logits)


class Route(nn.Module):
    def __init__(self, route) -> None:
        super().__init__()
        self.route = route

    def forward(self, logits: Tensor):
        return self.route(logits, functools.partial(torch.topk))  # a call of topk that the code shows


def test_R16_weights_come_from_dense_scores():
    def route(logits, topk):
        values, ids = topk(logits.softmax(-1), 2, dim=-1)
        return values / values.sum(-1, keepdim=True), ids

    model = Logits(route)
    hook = RouterHook.install(model, num_experts=4, top_k=2)
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], requires_grad=True)
    with hook.replay(torch.tensor([[[3, 4]]], dtype=torch.uint8)) as replaying:
        weights, ids = model(logits)
    assert ids.tolist() == [[2, 3]] and replaying.counts.tolist() == [1, 1, 1]
    torch.testing.assert_close(weights, torch.tensor([[0.731, 0.269]]), rtol=0.0, atol=5e-4)
    weights[0, 0].backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.0, 0.0, 0.197, -0.197]]), rtol=0.0, atol=5e-4)


def test_R17_a_bias_of_selection_stays_out_of_the_weights():
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0])

    def route(logits, topk):
        scores = logits.sigmoid()
        ids = topk(scores + bias, k=2, dim=1, sorted=False)[1]
        weights = scores.gather(1, ids)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, ids

    model = Logits(route)
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    native_weights, native_ids = model(logits)
    assert set(native_ids[0].tolist()) == {0, 3}
    hook = RouterHook.install(model, num_experts=4, top_k=2)
    for ids in (native_ids, torch.tensor([[1, 2]])):
        with hook.replay((ids + 1).to(torch.uint8).unsqueeze(1)) as replaying:
            weights, used = model(logits)
        assert torch.equal(used, ids)
        s = logits.sigmoid()[0, ids[0]]
        torch.testing.assert_close(weights[0], 2.5 * s / s.sum(), rtol=0.0, atol=1e-6)
    assert torch.equal(native_weights, model(logits)[0])
    assert replaying.counts.tolist() == [1, 1, 1]


@pytest.mark.parametrize("experts", [255, 300, 40_000])
def test_codes_of_many_experts_are_the_bits_of_uint16(experts):
    model = Logits(lambda logits, topk: topk(logits, 2, -1))
    hook = RouterHook.install(model, num_experts=experts, top_k=2)
    logits = torch.randn(3, experts)
    ids = torch.tensor([[0, experts - 1], [experts - 1, experts - 2], [5, 7]])
    codes = (ids + 1).to(torch.uint8) if experts <= 255 else (ids + 1).to(torch.uint16).view(torch.int16)
    with hook.replay(codes.unsqueeze(1)):
        values, used = model(logits)
    assert torch.equal(used, ids) and torch.equal(values, logits.gather(1, ids))
    with hook.record() as recording:
        model(logits)
    assert torch.equal(recording.routes()[:, 0].long(), logits.topk(2).indices)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.topk(x, 2),
        lambda x: torch.topk(input=x, k=2, dim=1),
        lambda x: x.topk(2, dim=-1, sorted=False),
        lambda x: x.topk(2, 1, True, True),
        lambda x: tuple(y.t() for y in torch.topk(x.t(), 2, dim=0)),
        lambda x: tuple(y.flatten(0, 1) for y in x.unsqueeze(0).topk(2)),
    ],
)
def test_every_form_of_the_call(call):
    model = Logits(lambda logits, topk: call(logits))
    hook = RouterHook.install(model, num_experts=4, top_k=2)
    logits, ids = torch.randn(5, 4), torch.tensor([[3, 0], [1, 2], [2, 1], [0, 3], [3, 1]])
    with hook.replay(encode(ids).unsqueeze(1)):
        values, used = model(logits)
    assert torch.equal(used, ids) and torch.equal(values, logits.gather(1, ids))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.booleans(), min_size=6, max_size=6), st.integers(0, 1000))
def test_rows_without_a_record_are_native(recorded, seed):
    model = ToyModel(("plain",))
    hook = install(model)
    x = hidden_states(seed, 6)
    codes = random_codes(seed, 6, 1)
    kept = torch.tensor(recorded)
    codes[~kept] = 0
    codes[~kept, :, 0] = codes[~kept, :, 0] + seed % 2  # half a row is no record
    with hook.record() as seen:
        native = model(x)
    with hook.replay(codes) as replaying:
        forced = model(x)
    assert torch.equal(forced[~kept], native[~kept])
    reference = literal(model, x, torch.where(kept[:, None, None], codes.long() - 1, seen.routes().long()))
    torch.testing.assert_close(forced, reference, rtol=1e-5, atol=1e-6)
    assert replaying.counts.tolist()[0::2] == [sum(recorded), 6]


# --- which rows, which layers -------------------------------------------------------------------------------------


def test_R05_padding_rows_are_routed_natively():
    model = ToyModel()
    hook = install(model)
    with hook.record() as recording:
        model(hidden_states())
    codes = encode(recording.routes())
    padded = torch.cat([hidden_states(), hidden_states(9, 64)])
    native = model(padded)
    with hook.record() as inner:
        model(padded)
    longer = torch.nn.functional.pad(codes, (0, 0, 0, 0, 0, 64))
    with hook.replay(longer) as replaying:
        out = model(padded)
    with hook.replay(longer, counted=torch.arange(84) < ROWS) as counting:
        model(padded)
    assert torch.equal(out, native)
    torch.testing.assert_close(out[:ROWS].square().sum(), model(hidden_states()).square().sum())
    assert counting.counts.tolist() == [3 * ROWS, 0, 3 * ROWS]
    assert replaying.counts.tolist() == [3 * ROWS, 0, 3 * 84]
    pad_ids = inner.routes()[ROWS:]
    assert (pad_ids[..., 0] != pad_ids[..., 1]).all()  # no made-up ids: no expert twice in a row
    assert len(pad_ids[:, 0].unique()) > TOP_K  # and not one expert for all


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_and_packed_inputs_are_the_same_rows(side):
    model = qwen()
    hook = install(model)
    lengths, longest = (5, 8, 3), 8
    samples = [torch.randint(1, 32, (length,), generator=torch.Generator().manual_seed(length)) for length in lengths]
    codes = [random_codes(length, length, 2) for length in lengths]
    packed_logits = []
    for ids, code in zip(samples, codes, strict=True):
        with hook.replay(code):
            packed_logits.append(model(ids.unsqueeze(0)).logits[0])
    batch, mask = torch.zeros(3, longest, dtype=torch.long), torch.zeros(3, longest, dtype=torch.long)
    rows = torch.zeros(3, longest, 2, TOP_K, dtype=torch.uint8)
    for i, (ids, code) in enumerate(zip(samples, codes, strict=True)):
        where = slice(0, len(ids)) if side == "right" else slice(longest - len(ids), longest)
        batch[i, where], mask[i, where], rows[i, where] = ids, 1, code
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    with hook.replay(rows.flatten(0, 1), counted=mask.flatten().bool()) as replaying:
        logits = model(batch, attention_mask=mask, position_ids=position_ids).logits
    for i in range(3):
        torch.testing.assert_close(logits[i][mask[i].bool()], packed_logits[i], rtol=1e-4, atol=1e-5)
    assert replaying.counts.tolist()[0::2] == [2 * 16, 2 * 16]


def test_R18_another_number_of_rows_is_an_error_with_both():
    hook = install(model := ToyModel())
    with pytest.raises(ReplayError, match=r"20 rows.*have 19"):
        with hook.replay(random_codes(rows=19)):
            model(hidden_states())
    assert hook._active("test") is None


def test_R19_of_two_models_the_one_that_was_given_is_replayed():
    first, second = ToyModel(), ToyModel()
    hook = install(second)
    assert not any("forward" in module.__dict__ for module in first.modules())
    codes = random_codes()
    with hook.replay(codes) as replaying:
        out = second(hidden_states())
        first(hidden_states())
    assert replaying.counts.tolist()[0] == 3 * ROWS
    torch.testing.assert_close(out, literal(second, hidden_states(), codes.long() - 1), rtol=1e-5, atol=1e-6)


def test_R03_multi_token_prediction_stays_native():
    model = ToyModel(("plain",) * 4, mtp=True)
    hook = install(model)
    assert hook.layers == (0, 1, 2, 3)
    assert hook.left_native == {"mtp.0.router": "multi-token prediction"}
    seen = {}
    model.mtp[0].router.register_forward_hook(lambda module, args, out: seen.update(hidden=args[0], ids=out[1]))
    with hook.replay(random_codes(layers=4)) as replaying:
        model(hidden_states())
    assert replaying.counts.tolist()[0] == 4 * ROWS
    assert torch.equal(seen["ids"], model.mtp[0].router(seen["hidden"])[1])


def test_columns_are_absolute_layer_numbers():
    model = qwen(4, mlp_only_layers=[0, 2])
    hook = install(model)
    assert hook.layers == (1, 3)
    tokens = torch.arange(1, 11).unsqueeze(0)
    codes = random_codes(rows=10, layers=4)
    with hook.replay(codes) as replaying:
        full = model(tokens).logits
    assert replaying.counts.tolist()[0::2] == [20, 20]
    with hook.replay(codes[:, [3, 1]], layers=(3, 1)):
        assert torch.equal(model(tokens).logits, full)
    with pytest.raises(ReplayError, match=r"no column for the routers of layers \[3\]"):
        with hook.replay(codes[:, :3]):
            pass


def test_R26_the_fraction_of_disagreement():
    model = ToyModel(("plain", "plain"))
    hook = install(model)
    x = hidden_states(rows=100)
    with hook.record() as recording:
        model(x)
    codes = encode(recording.routes())
    with hook.replay(codes.flip(-1)) as replaying:  # the same sets, in another order
        model(x)
    assert replaying.counts.tolist() == [200, 0, 200]
    last = codes[:10, 1, 0].long() - 1
    unused = (last.unsqueeze(-1) + torch.arange(1, 4)) % EXPERTS
    free = (unused.unsqueeze(-1) != (codes[:10, 1].long() - 1).unsqueeze(1)).all(-1)
    codes[:10, 1, 0] = encode(unused.gather(1, free.int().argmax(1, keepdim=True)).squeeze(1))
    with hook.replay(codes) as replaying:
        model(x)
    replayed, disagreeing, counted = replaying.counts.tolist()
    assert disagreeing / replayed == 0.05 and counted == 200


# --- installing, nesting, removing --------------------------------------------------------------------------------


def test_R20_nothing_is_left_on_the_model():
    model = qwen()
    tokens = torch.arange(1, 11).unsqueeze(0)
    plain = model(tokens).logits
    before = {name: (type(module), dict(module.__dict__)) for name, module in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    hook = install(model)
    assert torch.equal(model(tokens).logits, plain)  # installed, nothing open
    assert_same(model.state_dict(), state)
    model.gradient_checkpointing_enable()
    with hook.replay(random_codes(rows=10, layers=2)):
        model(tokens)
    assert torch.equal(model(tokens).logits, plain)
    model.gradient_checkpointing_disable()
    hook.remove()
    model.gradient_checkpointing_disable()
    for name, module in model.named_modules():
        kind, attributes = before[name]
        assert type(module) is kind
        added = module.__dict__.keys() - attributes.keys()
        assert all("require_grads" in key or "gradient_checkpointing" in key for key in added)  # transformers' own
        assert not any(type(value).__module__.startswith("verl_sat") for value in module.__dict__.values())
    assert torch.equal(model(tokens).logits, plain)
    with pytest.raises(ReplayError, match="not installed"):
        with hook.record():
            pass


def test_R21_nested_use_restores_what_it_found():
    hook = install(model := ToyModel())
    x, codes, others = hidden_states(), random_codes(), random_codes(5)
    native, forced = model(x), literal(model, x, codes.long() - 1)
    with hook.replay(codes):
        first = model(x)
        with hook.native():
            assert torch.equal(model(x), native)
        with pytest.raises(KeyError), hook.replay(others):
            raise KeyError
        with hook.record() as recording:
            assert torch.equal(model(x), native)
        with hook.replay(others):
            assert not torch.equal(model(x), first)
        assert torch.equal(model(x), first)
    assert recording.routes().shape[0] == ROWS
    torch.testing.assert_close(first, forced, rtol=1e-5, atol=1e-6)
    assert torch.equal(model(x), native) and hook._active("test") is None


def test_threads_do_not_see_each_other():
    hook = install(model := ToyModel())
    native, found = model(hidden_states()), {}
    with hook.replay(random_codes()):
        thread = threading.Thread(target=lambda: found.update(out=model(hidden_states())))
        thread.start()
        thread.join()
        assert not torch.equal(model(hidden_states()), native)
    assert torch.equal(found["out"], native)


def test_one_hook_for_a_model_and_none_over_it():
    hook = install(model := ToyModel())
    with pytest.raises(ReplayError, match="has a hook already"):
        install(model)
    ours = model.layers[0].router.forward
    model.layers[0].router.forward = lambda x: ours(x)
    with pytest.raises(ReplayError, match="was set anew"):
        hook.remove()
    model.layers[0].router.forward = ours
    hook.remove()
    install(model).remove()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_no_hook(duplicate):
    model = qwen()
    if duplicate is copy.deepcopy:  # transformers' own hook for checkpointing cannot be pickled
        model.gradient_checkpointing_enable()
    hook = install(model)
    tokens = torch.arange(1, 11).unsqueeze(0)
    native = model(tokens).logits
    with hook.replay(random_codes(rows=10, layers=2)) as replaying:
        forced = model(tokens).logits
        twin = duplicate(model)
        assert torch.equal(twin(tokens).logits, native)
    assert not torch.equal(forced, native) and replaying.counts.tolist()[0] == 20
    with torch.no_grad():
        twin.model.layers[0].mlp.gate.weight.zero_()
    assert torch.equal(model(tokens).logits, native)  # nor is a router of the one called by the other
    assert not torch.equal(twin(tokens).logits, native)


def test_a_layer_that_makes_no_choice_is_an_error():
    hook = install(model := ToyModel())
    codes = random_codes()
    with pytest.raises(ReplayError, match=r"layers \[0, 1, 2\] made fewer"):
        with hook.replay(codes):
            pass
    skip, model.layers[1].forward = model.layers[1].forward, lambda x: x
    with pytest.raises(ReplayError, match=r"layers \[1\] made fewer"):
        with hook.replay(codes):
            model(hidden_states())
    model.layers[1].forward = skip
    wrong = RouterHook(model, num_experts=EXPERTS + 1, top_k=TOP_K)
    assert wrong.layers == hook.layers
    hook.remove()
    hook = RouterHook.install(model, num_experts=EXPERTS + 1, top_k=TOP_K)
    with pytest.raises(ReplayError, match=r"ToyRouter.forward \(layers.0.router\) made no top-2 over 9 experts"):
        with hook.record():
            model(hidden_states())


@pytest.mark.parametrize(
    "codes, counted",
    [
        (random_codes().long(), None),
        (random_codes()[0], None),
        (random_codes()[..., :1], None),
        (random_codes(), torch.ones(ROWS)),
        (random_codes(), torch.ones(ROWS - 1, dtype=torch.bool)),
    ],
)
def test_codes_of_another_form_are_refused(codes, counted):
    hook = install(ToyModel())
    with pytest.raises(ReplayError, match="must be"):
        with hook.replay(codes, counted=counted):
            pass


def test_R24_routers_that_cannot_be_forced_are_refused_by_name():
    class SoftGate(nn.Module):
        def forward(self, x):
            return x.softmax(-1)

    class Soft(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = SoftGate(), nn.ModuleList()

    model = ToyModel()
    model.layers[1] = Soft()
    with pytest.raises(UnsupportedRouterError, match=r"Soft \(layers.1\): experts, but no top-k.*SoftGate"):
        install(model)
    model = ToyModel()
    model.layers[1].second = ToyBlock()
    with pytest.raises(UnsupportedRouterError, match="layer 1 has two routers, ToyRouter"):
        install(model)
    with pytest.raises(UnsupportedRouterError, match="Linear: no router"):
        install(nn.Linear(2, 2))


# --- backward -----------------------------------------------------------------------------------------------------


def frozen_gradients(codes: list[Tensor], **fields: object) -> dict[str, Tensor]:
    """Of the toy model without checkpointing, routes written into the formula, summed over micro-batches."""
    torch.manual_seed(3)
    model = ToyModel(**fields)
    for seed, code in enumerate(codes):
        literal(model, hidden_states(seed), code.long() - 1).square().sum().backward()
    return gradients(model)


@pytest.mark.parametrize("implementation", CHECKPOINTS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["B0 B1", "B1 B0"])
@pytest.mark.parametrize("where", ["same thread", "another thread", "while another is open"])
def test_R14_recompute_repeats_its_own_micro_batch(implementation, order, where):
    torch.manual_seed(3)
    model = ToyModel()
    hook = install(model)
    original = CHECKPOINTS[implementation]
    model.recompute = hook.bind_checkpoint(original)
    codes = [random_codes(7), random_codes(8)]
    losses, handles = [], []
    for seed, code in enumerate(codes):
        with hook.replay(code) as replaying:
            losses.append(model(hidden_states(seed)).square().sum())
        handles.append(replaying)
    counts = [replaying.counts.clone() for replaying in handles]

    def backward() -> None:
        for number in order:
            losses[number].backward()

    if where == "another thread":
        failures: list[BaseException] = []

        def run() -> None:
            try:
                backward()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert not failures, failures
    elif where == "while another is open":
        with hook.replay(random_codes(9)):
            model(hidden_states(5))
            backward()
    else:
        backward()
    assert_same(gradients(model), frozen_gradients(codes), rtol=1e-4, atol=1e-5)
    assert [replaying.counts.tolist() for replaying in handles] == [count.tolist() for count in counts]


def near_ties(model: ToyModel) -> Tensor:
    """Hidden states whose scores in layer 0 are all but equal: only a feature that its router does not see is large."""
    with torch.no_grad():
        model.layers[0].router.weight[:, 0] = 0.0
        x = hidden_states()
        x[:, 1:] *= 1e-5
    return x


@pytest.mark.parametrize("implementation", CHECKPOINTS)
def test_R14_noise_on_recompute_changes_no_expert(implementation):
    torch.manual_seed(3)
    model = ToyModel(noise=1e-4)
    x = near_ties(model)
    hook = install(model)
    model.recompute = hook.bind_checkpoint(CHECKPOINTS[implementation])
    seen: list[tuple[int, Tensor]] = []
    for number, layer in enumerate(model.layers):
        layer.router.register_forward_hook(lambda module, args, out, number=number: seen.append((number, out[1])))
    codes = random_codes(7)
    codes[::3] = 0  # native rows repeat their forward too
    with hook.replay(codes):
        loss = model(x).square().sum()
    forward = dict(seen)
    seen.clear()
    loss.backward()
    assert sorted(number for number, _ in seen) == [0, 1, 2]
    for number, ids in seen:
        assert torch.equal(ids, forward[number])
    found = gradients(model)
    used = torch.stack([forward[number] for number in range(3)], dim=1)
    literal(model, x, used).square().sum().backward()
    assert_same(found, gradients(model), rtol=1e-2, atol=5e-3)


def test_R14_without_binding_the_noise_does_flip_experts():
    """What the test above would miss if its model had no near ties."""
    torch.manual_seed(3)
    model = ToyModel(noise=1e-4, checkpoint=CHECKPOINTS["non-reentrant"])
    x = near_ties(model)
    seen: list[Tensor] = []
    model.layers[0].router.register_forward_hook(lambda module, args, out: seen.append(out[1]))
    model(x).square().sum().backward()
    native = (seen[0] != seen[1]).any(-1)
    assert len(seen) == 2 and native[::3].any()


@pytest.mark.parametrize("implementation", CHECKPOINTS)
def test_R14_an_unbound_recompute_is_an_error_and_not_native(implementation):
    model = ToyModel(checkpoint=CHECKPOINTS[implementation])
    hook = install(model)
    model(hidden_states()).square().sum().backward()  # never replayed: nothing to repeat
    with hook.replay(random_codes()):
        loss = model(hidden_states()).square().sum()
        with pytest.raises(ReplayError, match=r"hook.bind\(function\)"):
            loss.backward(retain_graph=True)
    loss = model(hidden_states()).square().sum()
    with pytest.raises(ReplayError, match=r"ToyRouter.forward \(layers.2.router\).*hook.bind"):
        loss.backward()


def test_R14_a_hook_removed_before_the_backward_is_an_error():
    model = ToyModel()
    hook = install(model)
    model.recompute = hook.bind_checkpoint(CHECKPOINTS["non-reentrant"])
    with hook.replay(random_codes()):
        loss = model(hidden_states()).square().sum()
    hook.remove()
    with pytest.raises(ReplayError, match="removed before"):
        loss.backward()


@pytest.mark.parametrize("implementation", CHECKPOINTS)
def test_R14_checkpoints_inside_checkpoints(implementation):
    torch.manual_seed(3)
    model = ToyModel()
    hook = install(model)
    bound = hook.bind_checkpoint(CHECKPOINTS[implementation])
    model.recompute = bound
    codes = [random_codes(7), random_codes(8)]
    losses = []
    for seed, code in enumerate(codes):
        with hook.replay(code):
            losses.append(bound(model, hidden_states(seed)).square().sum())
    for loss in reversed(losses):
        loss.backward()
    assert_same(gradients(model), frozen_gradients(codes), rtol=1e-4, atol=1e-5)


def test_R14_recording_under_checkpointing_records_once():
    model = ToyModel(noise=1e-6)
    hook = install(model)
    model.recompute = hook.bind_checkpoint(CHECKPOINTS["non-reentrant"])
    with hook.record() as recording:
        first = model(hidden_states(0)).square().sum()
        second = model(hidden_states(1)).square().sum()
    (first + second).backward()
    assert [tuple(ids.shape) for ids in recording.per_forward()] == [(ROWS, 3, TOP_K)] * 2
    assert recording.routes().shape == (2 * ROWS, 3, TOP_K)


def test_a_bound_function_runs_later_under_what_was_active():
    hook = install(model := ToyModel())
    codes, native = random_codes(), model(hidden_states())
    with hook.replay(codes):
        forced = model(hidden_states())
        bound = hook.bind(model)
    free = hook.bind(model)
    assert torch.equal(model(hidden_states()), native)
    assert torch.equal(bound(hidden_states()), forced)
    with hook.replay(codes):
        model(hidden_states())
        assert torch.equal(free(hidden_states()), native)


def test_codes_live_until_the_backward_and_not_longer():
    model = ToyModel()
    hook = install(model)
    model.recompute = hook.bind_checkpoint(CHECKPOINTS["non-reentrant"])
    codes = random_codes()
    alive = weakref.ref(codes)
    with hook.replay(codes) as replaying:
        loss = model(hidden_states()).square().sum()
    del codes
    gc.collect()
    assert alive() is not None
    loss.backward()
    del loss
    gc.collect()
    assert alive() is None and replaying.counts.tolist()[0] == 3 * ROWS


HF_CHECKPOINTS = [
    "transformers",
    "transformers, enabled after",
    "transformers, reentrant",
    "CheckpointWrapper",
    "verl's offload",
]


def offloading(layers: nn.ModuleList) -> None:
    """verl's activation offload with checkpointing, its transfers (CUDA streams) left out."""
    from verl.utils.activation_offload import ActivationHandler, FSDPParameterFilter

    handler = ActivationHandler(contextlib.nullcontext(), lambda out: out, FSDPParameterFilter(), True)
    for layer in layers:
        handler.wrap_module_forward_method(layer)


@pytest.mark.parametrize("kind", HF_CHECKPOINTS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["B0 B1", "B1 B0"])
def test_R14_checkpoint_functions_of_the_model_are_found(kind, order):
    tokens = [torch.arange(1, 11).unsqueeze(0), torch.arange(11, 21).unsqueeze(0)]
    codes = [random_codes(seed, 10, 2) for seed in (7, 8)]
    found = {}
    for checkpointed in (False, True):
        model = qwen(use_cache=False)
        model.enable_input_require_grads()
        if checkpointed and kind == "transformers":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if checkpointed and kind == "CheckpointWrapper":
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

            apply_activation_checkpointing(model, check_fn=set(model.model.layers).__contains__)
        if checkpointed and kind == "verl's offload":
            offloading(model.model.layers)
        hook = install(model)
        assert hook.layers == (0, 1)
        if checkpointed and kind == "transformers, enabled after":
            with hook.replay(codes[0]):
                model(tokens[0])
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if checkpointed and kind == "transformers, reentrant":
            model.gradient_checkpointing_enable({"use_reentrant": True})
        calls = []
        hook.sites[0].module.register_forward_hook(lambda *args, calls=calls: calls.append(1))
        losses = []
        for ids, code in zip(tokens, codes, strict=True):
            with hook.replay(code) as replaying:
                losses.append(model(ids).logits.square().sum())
        for number in order:
            losses[number].backward()
        assert len(calls) == (4 if checkpointed else 2)  # it did recompute
        assert replaying.counts.tolist()[0::2] == [20, 20]
        # a wrapper adds a name of its own to the path
        found[checkpointed] = {
            name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in gradients(model).items()
        }
    assert_same(found[True], found[False], rtol=1e-5, atol=1e-6)


def test_native_training_of_a_checkpointed_model_goes_on():
    model = qwen()
    hook = install(model)
    tokens = torch.arange(1, 11).unsqueeze(0)
    model(tokens).logits.square().sum().backward()
    expected = gradients(model)
    model.gradient_checkpointing_enable()
    with hook.replay(random_codes(rows=10, layers=2)):
        model(tokens).logits.square().sum().backward()
    gradients(model)
    model(tokens).logits.square().sum().backward()
    assert_same(gradients(model), expected, rtol=1e-5, atol=1e-6)


# --- ways to run --------------------------------------------------------------------------------------------------


class NoSync(TorchDispatchMode):
    """Refuses what makes the host wait for a device."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "_unique2", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        assert name not in self.FORBIDDEN, name
        if name.startswith("index"):  # by a boolean mask: its size has to be known
            assert not any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1] or ()), name
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("kind", KINDS)
def test_no_router_makes_the_host_wait(kind):
    model = ToyModel((kind,) * 3)
    hook = install(model)
    counted = torch.arange(ROWS) < 15
    with NoSync():
        with hook.record() as recording:
            model(hidden_states())
        recording.routes()
        with hook.replay(random_codes(), counted=counted) as replaying:
            out = model(hidden_states())
        out.square().sum().backward()
    assert replaying.counts.tolist()[0::2] == [45, 45]
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoSync():
        replaying.counts[0].item()


def test_a_device_without_values_routes_too():
    """On the meta device whatever reads a value raises."""
    model = ToyModel().to("meta")
    hook = install(model)
    with hook.replay(random_codes().to("meta"), counted=torch.ones(ROWS, dtype=torch.bool, device="meta")) as replaying:
        model(hidden_states().to("meta"))
    assert replaying.counts.device.type == "meta"


def test_bf16_autocast():
    model = qwen()
    hook = install(model)
    tokens = torch.arange(1, 11).unsqueeze(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model(tokens).logits
        plain.float().square().sum().backward()
        expected = gradients(model)
        model.gradient_checkpointing_enable()
        with hook.record() as recording:
            assert torch.equal(model(tokens).logits, plain)
        with hook.replay(encode(recording.routes())) as replaying:
            out = model(tokens).logits
    out.float().square().sum().backward()
    assert torch.equal(out, plain) and replaying.counts.tolist() == [20, 0, 20]
    assert_same(gradients(model), expected)


@pytest.mark.parametrize("when", ["installed before", "installed after"])
def test_compiled(when):
    torch._dynamo.reset()
    model = ToyModel()
    codes = random_codes()
    hook = install(model) if when == "installed before" else None
    compiled = torch.compile(model, backend="aot_eager")
    x = hidden_states()
    torch.testing.assert_close(compiled(x), model(x))
    if hook is None:
        hook = install(compiled)
    assert hook.layers == (0, 1, 2)
    for code in (codes, random_codes(5)):
        with hook.replay(code) as replaying:
            out = compiled(x)
        out.square().sum().backward()
        found = gradients(model)
        reference = literal(model, x, code.long() - 1)
        torch.testing.assert_close(out, reference, rtol=1e-5, atol=1e-6)
        reference.square().sum().backward()
        assert_same(found, gradients(model), rtol=1e-4, atol=1e-5)
        assert replaying.counts.tolist()[0] == 3 * ROWS
    with hook.native():
        torch.testing.assert_close(compiled(x), model(x))


def sharded(rank: int, world_size: int, store: str) -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    torch.manual_seed(3)
    model = ToyModel()
    torch.manual_seed(3)
    whole = ToyModel()
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    hook = install(model)
    fully_shard(model, mesh=mesh)  # the class is swapped, once before and once after the hook
    assert isinstance(model.layers[0], FSDPModule) and "forward" in model.layers[0].router.__dict__
    model.recompute = hook.bind_checkpoint(CHECKPOINTS["non-reentrant"])
    codes = [random_codes(10 * rank + number) for number in range(2)]
    losses = []
    for number, code in enumerate(codes):
        with hook.replay(code) as replaying:
            losses.append(model(hidden_states(10 * rank + number)).square().sum())
    assert replaying.counts.tolist()[0::2] == [3 * ROWS, 3 * ROWS]
    for loss in reversed(losses):
        loss.backward()
    for other in range(world_size):
        for number in range(2):
            seed = 10 * other + number
            reference = literal(whole, hidden_states(seed), random_codes(seed).long() - 1)
            (reference.square().sum() / world_size).backward()
    expected = gradients(whole)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name], rtol=1e-4, atol=1e-5)
    hook.remove()
    assert "forward" not in model.layers[0].router.__dict__
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [1, 2])
def test_fsdp2(world_size, tmp_path):
    mp.spawn(sharded, (world_size, str(tmp_path / "store")), nprocs=world_size)
