"""verl's own SGLang server, its real code, on what SGLang really returned.

SGLang itself is not installed here: verl's module is imported over a package of names (`sglang_names.py`), its server
is made without starting an engine, and a tokenizer manager hands out recorded answers. Everything between the request
and verl's `TokenOutput` is verl's code and ours.
"""

import asyncio
import base64
import inspect
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sglang_names
import torch
from transformers import Qwen3MoeConfig, Qwen3VLMoeConfig
from verl.workers.config import RolloutConfig

from verl_sat import _compat
from verl_sat.router_replay import sglang_server
from verl_sat.router_replay.client import REJECTED_FIELD, RouteSeam
from verl_sat.router_replay.layout import MoELayout, NotMoEError
from verl_sat.router_replay.record import Missing

DATA = Path(__file__).parent / "data"
PAYLOADS = {version: json.loads((DATA / f"sglang_{version}.json").read_text()) for version in ("0.5.12", "0.5.23")}
# verl never asks for a part of the rows
CASES = [
    (version, case["name"])
    for version, payload in PAYLOADS.items()
    for case in payload["cases"]
    if not case["routed_experts_start_len"] and case["routed_experts"] is not None
]
BOTH = pytest.mark.parametrize("skip_tokenizer_init", [True, False])
TEXT = dict(
    num_hidden_layers=4,
    num_experts=16,
    num_experts_per_tok=4,
    mlp_only_layers=[],
    decoder_sparse_step=1,
    vocab_size=512,
)


@pytest.fixture(scope="module")
def module():
    """verl's module. verl and with it the plugin are loaded, so importing it is what arms the wrap in a real job."""
    with sglang_names.installed("0.5.12") as verls:
        yield verls


@pytest.fixture
def sglang(module, monkeypatch):
    """The package of names, to set its version."""
    import sglang

    monkeypatch.setattr(sglang, "__version__", "0.5.12")
    return sglang


def case_of(version, name):
    return next(case for case in PAYLOADS[version]["cases"] if case["name"] == name)


def ids_by_hand(payload, layers=4, top_k=4):
    """Without the code under test: every four bytes are a number, low byte first."""
    raw = base64.b64decode(payload)
    numbers = [int.from_bytes(raw[i : i + 4], "little", signed=True) for i in range(0, len(raw), 4)]
    rows = [numbers[i : i + layers * top_k] for i in range(0, len(numbers), layers * top_k)]
    return [[row[i : i + top_k] for i in range(0, layers * top_k, top_k)] for row in rows]


def encoded(ids):
    return base64.b64encode(np.ascontiguousarray(ids, "<i4").tobytes()).decode()


class Manager:
    """Hands out recorded answers, of the form that SGLang's tokenizer manager yields."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests = []
        self.closed = 0

    async def generate_request(self, request, http_request):
        assert http_request is None
        self.requests.append(request)
        try:
            yield self.answers.pop(0)
        finally:
            self.closed += 1


def answer_of(case, **changes):
    log_probs = case["output_logprobs"] or []
    meta_info = {
        "id": "r",
        "finish_reason": case["finish_reason"],
        "prompt_tokens": len(case["prompt_ids"]),
        "output_token_logprobs": [(p, t, None) for p, t in zip(log_probs, case["output_ids"], strict=False)],
    }
    if case["routed_experts"] is not None:
        meta_info["routed_experts"] = case["routed_experts"]
    return {"output_ids": list(case["output_ids"]), "meta_info": meta_info, "text": "", **changes}


def server_of(module, *answers, flag=True, skip=True, hf_config=None, role="null"):
    """verl's server without an engine: `__init__` and `launch_server` would start one."""
    server = object.__new__(module.SGLangHttpServer)
    server.config = RolloutConfig(
        name="sglang",
        max_model_len=512,
        prompt_length=128,
        response_length=64,
        skip_tokenizer_init=skip,
        enable_rollout_routing_replay=flag,
    )
    server.model_config = SimpleNamespace(
        hf_config=hf_config or Qwen3MoeConfig(**TEXT), lora_rank=0, lora={}, lora_adapter_path=None
    )
    server.tokenizer_manager = Manager(*answers)
    server.global_steps = 7
    server.replica_rank = 0
    server._disaggregation_role = role
    server._disaggregation_bootstrap_port = None
    server._pd_decode_peers = []
    server._pd_bootstrap_host = None
    return server


def ask(server, case, generate=None, **params):
    params = {"max_new_tokens": 6, "logprobs": True, **params}
    generate = type(server).generate if generate is None else generate
    return asyncio.run(generate(server, case["prompt_ids"], params, "request-1"))


def verls_own(server):
    return inspect.unwrap(type(server).generate)


# --- what verl does by itself -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", PAYLOADS)
def test_verl_by_itself_cannot_read_what_sglang_returns(module, version):
    case = case_of(version, "cold")
    server = server_of(module, answer_of(case), skip=True)
    with pytest.raises(AttributeError, match="'str' object has no attribute 'numpy'"):
        ask(server, case, verls_own(server))
    server = server_of(module, answer_of(case), skip=False)
    with pytest.raises(ModuleNotFoundError, match="routed_experts_capturer"):
        ask(server, case, verls_own(server))


def test_the_wrap_is_in_place_since_verl_imported_the_module(module):
    assert "routes_of_sglang" in getattr(module.SGLangHttpServer.generate, _compat._MARK)
    entry = next(patch for patch in _compat.LEDGER if patch.name == "routes_of_sglang")
    original = inspect.unwrap(module.SGLangHttpServer.generate)
    assert tuple(inspect.signature(original).parameters) == entry.parameters
    assert inspect.signature(module.SGLangHttpServer.generate) == inspect.signature(original)  # what Ray reads


def test_another_parameter_list_is_refused(module, monkeypatch):
    entry = next(patch for patch in _compat.LEDGER if patch.name == "routes_of_sglang")

    async def generate(self, prompt_ids, sampling_params, request_id, priority=0):
        raise AssertionError

    monkeypatch.setattr(module.SGLangHttpServer, "generate", generate)
    with pytest.raises(_compat.CompatError, match="priority"):
        _compat.apply(entry, module)
    assert module.SGLangHttpServer.generate is generate


# --- routes -------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(("version", "name"), CASES)
def test_R04_routes_of_real_answers(module, sglang, version, name, skip_tokenizer_init):
    sglang.__version__ = version
    case = case_of(version, name)
    server = server_of(module, answer_of(case), skip=skip_tokenizer_init)
    output = ask(server, case)
    expected = np.array(ids_by_hand(case["routed_experts"]))
    assert output.routed_experts.dtype == np.uint8  # 16 experts
    np.testing.assert_array_equal(output.routed_experts, expected)
    prompt, new = len(case["prompt_ids"]), len(case["output_ids"])
    assert len(output.routed_experts) in ((prompt + new - 1,) if new else (prompt, prompt - 1))
    assert output.token_ids == case["output_ids"] and output.stop_reason == "length"
    assert output.log_probs == (case["output_logprobs"] or [])
    assert output.extra_fields == {"global_steps": 7}
    assert [request.return_routed_experts for request in server.tokenizer_manager.requests] == [True]
    # verl's two readers (agent_loop.py): neither warns, neither changes a number
    assert output.routed_experts.flags.writeable
    ids = torch.from_numpy(output.routed_experts).to(torch.int16)
    assert torch.equal(ids, torch.tensor(output.routed_experts, dtype=torch.int16))
    np.testing.assert_array_equal(ids.numpy(), expected)


@BOTH
def test_everything_but_routes_is_what_verl_returns_without_them(module, skip_tokenizer_init):
    case = case_of("0.5.12", "chunked_prefill")
    with_routes = server_of(module, answer_of(case), skip=skip_tokenizer_init)
    without = server_of(module, answer_of(case), skip=skip_tokenizer_init, flag=False)
    output, plain = ask(with_routes, case), ask(without, case, verls_own(without))
    assert plain.routed_experts is None
    output.routed_experts = None
    assert output == plain
    (asked,), (plainly,) = with_routes.tokenizer_manager.requests, without.tokenizer_manager.requests
    asked.return_routed_experts = False
    assert asked == plainly
    assert with_routes.config.enable_rollout_routing_replay is True  # read by others, never written


def test_off_the_original_gets_its_own_arguments(module, monkeypatch):
    calls = []

    async def original(self, *args, **kwargs):
        calls.append((self, args, kwargs))
        return "verl's"

    monkeypatch.setattr(sglang_server, "generate", lambda *a, **k: pytest.fail("not asked for"))
    server = server_of(module, flag=False)
    wrapped = _compat._routes_of_sglang(original)
    ids, params = [1, 2], {}
    assert asyncio.run(wrapped(server, ids, params, request_id="r", bootstrap_room=3)) == "verl's"
    ((self, args, kwargs),) = calls
    assert self is server and args[0] is ids and args[1] is params and kwargs == dict(request_id="r", bootstrap_room=3)
    assert "_verl_sat_layout" not in vars(server)


def test_a_teachers_request_asks_as_well(module):
    """A 0.5.12 engine dies of requests with and without routes in one batch."""
    case = case_of("0.5.12", "no_new_token")
    log_probs = [(None, case["prompt_ids"][0], None)] + [(-1.0, token, None) for token in case["prompt_ids"][1:]]
    answer = answer_of(case)
    answer["meta_info"]["input_token_logprobs"] = log_probs
    server = server_of(module, answer)
    output = ask(server, case, max_new_tokens=0, prompt_logprobs=0)
    (request,) = server.tokenizer_manager.requests
    assert request.return_routed_experts and request.logprob_start_len == 0
    assert len(output.extra_fields["prompt_logprobs"]) == len(case["prompt_ids"])
    assert len(output.routed_experts) == len(case["prompt_ids"])


def test_many_requests_at_once_keep_their_own_routes(module):
    cases = [case_of("0.5.12", name) for name in ("cold", "batch_1", "prompt_of_one", "chunked_prefill")]

    class Slow(Manager):
        async def generate_request(self, request, http_request):
            case = next(case for case in cases if case["prompt_ids"] == request.input_ids)
            await asyncio.sleep(0.001 * len(case["output_ids"] * 3) if case is cases[0] else 0)
            yield answer_of(case)

    server = server_of(module)
    server.tokenizer_manager = Slow()

    async def together():
        asks = [server.generate(case["prompt_ids"], {"max_new_tokens": 6}, str(i)) for i, case in enumerate(cases)]
        return await asyncio.gather(*asks)

    for output, case in zip(asyncio.run(together()), cases, strict=True):
        np.testing.assert_array_equal(output.routed_experts, ids_by_hand(case["routed_experts"]))


def test_the_engines_generator_is_closed_as_before(module):
    case = case_of("0.5.12", "cold")
    wrapped, plain = server_of(module, answer_of(case)), server_of(module, answer_of(case), flag=False)
    ask(wrapped, case)
    ask(plain, case)
    assert wrapped.tokenizer_manager.closed == plain.tokenizer_manager.closed == 1


@pytest.mark.parametrize(
    ("num_experts", "dtype"), [(16, np.uint8), (256, np.uint8), (257, np.int16), (40000, np.int32)]
)
def test_R12_narrowest_dtype_that_torch_takes_by_the_configuration(module, num_experts, dtype):
    """The dtype follows from the number of experts, not from the ids: these are all small but for the last."""
    case = dict(case_of("0.5.12", "cold"))
    ids = np.array(ids_by_hand(case["routed_experts"]))
    ids[3, 2] = [num_experts - 1, 0, 1, 2]
    case["routed_experts"] = encoded(ids)
    server = server_of(module, answer_of(case), hf_config=Qwen3MoeConfig(**{**TEXT, "num_experts": num_experts}))
    routes = ask(server, case).routed_experts
    assert routes.dtype == dtype
    np.testing.assert_array_equal(routes, ids)
    np.testing.assert_array_equal(torch.from_numpy(routes), ids)


def test_dense_layers_stay_zero_as_sglang_returns_them(module):
    case = dict(case_of("0.5.12", "cold"))
    ids = np.array(ids_by_hand(case["routed_experts"]))
    ids[:, [0, 2]] = 0
    case["routed_experts"] = encoded(ids)
    server = server_of(module, answer_of(case), hf_config=Qwen3MoeConfig(**{**TEXT, "mlp_only_layers": [0, 2]}))
    np.testing.assert_array_equal(ask(server, case).routed_experts, ids)


@BOTH
def test_layers_and_top_k_of_a_nested_text_configuration(module, skip_tokenizer_init):
    hf_config = Qwen3VLMoeConfig(text_config=TEXT)
    assert not hasattr(hf_config, "num_experts_per_tok")  # why verl's own code could not have done it
    case = case_of("0.5.12", "cold")
    server = server_of(module, answer_of(case), skip=skip_tokenizer_init, hf_config=hf_config)
    np.testing.assert_array_equal(ask(server, case).routed_experts, ids_by_hand(case["routed_experts"]))


def test_the_routes_reach_our_engine_and_other_engines_alike(module):
    """Plain ids, for Megatron and VeOmni; where our engine replays, the client encodes them."""
    case = case_of("0.5.23", "cold")
    output = ask(server_of(module, answer_of(case)), case)
    expected = np.array(ids_by_hand(case["routed_experts"]))
    np.testing.assert_array_equal(output.routed_experts, expected)
    info = RouteSeam(MoELayout(16, 4, 4, (0, 1, 2, 3), "qwen3_moe"), "sglang").take(output, case["prompt_ids"])
    assert not info.why.any() and not info.rejected and set(info.versions) == {7}
    codes = output.routed_experts.view(np.uint8).reshape(expected.shape)
    np.testing.assert_array_equal(codes, expected + 1)


# --- no routes ----------------------------------------------------------------------------------------------------


@BOTH
def test_aborted_in_the_queue(module, caplog, skip_tokenizer_init):
    case = {**case_of("0.5.12", "cold"), "output_ids": [], "output_logprobs": None, "routed_experts": None}
    case["finish_reason"] = {"type": "abort", "message": "aborted"}
    with caplog.at_level(logging.WARNING):
        output = ask(server_of(module, answer_of(case), skip=skip_tokenizer_init), case)
    assert output.routed_experts is None and output.token_ids == [] and output.stop_reason == "abort"
    assert output.extra_fields == {"global_steps": 7}
    assert "verl-sat" not in caplog.text  # nothing was sampled, nothing is lost


def test_tokens_without_routes_are_said_once(module, caplog):
    case = case_of("0.5.12", "flag_not_requested")
    server = server_of(module, answer_of(case), answer_of(case))
    with caplog.at_level(logging.WARNING):
        outputs = [ask(server, case), ask(server, case)]
    assert all(output.routed_experts is None and output.token_ids == case["output_ids"] for output in outputs)
    assert caplog.text.count("returned no routes") == 1


def test_aborted_while_it_ran_keeps_the_rows_of_its_tokens(module):
    case = {**case_of("0.5.12", "cold"), "finish_reason": {"type": "abort"}}
    output = ask(server_of(module, answer_of(case)), case)
    assert output.stop_reason == "abort"
    np.testing.assert_array_equal(output.routed_experts, ids_by_hand(case["routed_experts"]))


def test_rows_of_tokens_that_verl_drops_are_dropped_with_them(module):
    case = case_of("0.5.12", "cold")
    answer = answer_of(case)
    answer["meta_info"]["output_token_logprobs"].pop()
    output = ask(server_of(module, answer), case)
    assert output.token_ids == []  # verl's rule for log-probs that do not fit
    expected = ids_by_hand(case["routed_experts"])[: len(case["prompt_ids"])]
    np.testing.assert_array_equal(output.routed_experts, expected)
    layout = MoELayout(16, 4, 4, (0, 1, 2, 3), "qwen3_moe")
    assert not RouteSeam(layout, "sglang").take(output, case["prompt_ids"]).rejected


@BOTH
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda ids: encoded(ids[:-2]), "rows"),
        (lambda ids: encoded(ids)[:-8], "dtype"),
        (lambda ids: encoded(np.concatenate([ids.ravel(), [1]])), "layers"),
        (lambda ids: encoded(np.where(ids == ids[5, 1, 0], 16, ids)), "range"),
        (lambda ids: encoded(np.zeros_like(ids)), "all_zero"),
        (lambda ids: encoded(np.repeat(ids[..., :1], 4, axis=-1)), "duplicate"),
        (lambda ids: "no base64!", "dtype"),
        (lambda ids: torch.zeros(17, 4, 4), "dtype"),
    ],
    ids=["short", "cut", "one_id_more", "id_16_of_16", "zeros", "duplicates", "no_base64", "a_tensor"],
)
def test_what_fails_the_checks_costs_the_routes_but_not_the_request(module, caplog, spoil, reason, skip_tokenizer_init):
    case = case_of("0.5.12", "cold")
    ids = np.array(ids_by_hand(case["routed_experts"]))
    spoiled = {**case, "routed_experts": spoil(ids)}
    server = server_of(module, answer_of(spoiled), answer_of(spoiled), answer_of(case), skip=skip_tokenizer_init)
    with caplog.at_level(logging.WARNING):
        output, again, right = ask(server, case), ask(server, case), ask(server, case)
    for refused in (output, again):
        assert refused.routed_experts is None
        assert refused.token_ids == case["output_ids"] and refused.log_probs == case["output_logprobs"]
        assert refused.extra_fields[REJECTED_FIELD].startswith(f"{reason}: routes of sample request-1")
    assert caplog.text.count("rejected, the request is returned without") == 1
    assert REJECTED_FIELD not in right.extra_fields and len(right.routed_experts) == 17
    # and the client counts it
    seam = RouteSeam(MoELayout(16, 4, 4, (0, 1, 2, 3), "qwen3_moe"), "sglang")
    info = seam.take(output, case["prompt_ids"])
    assert info.rejected == {reason: 17} and (info.why == Missing.REJECTED).all() and not output.routed_experts.any()


def test_a_dense_model_is_an_error_before_anything_is_sampled(module):
    from transformers import Qwen3Config

    case = case_of("0.5.12", "cold")
    server = server_of(module, answer_of(case), hf_config=Qwen3Config())
    with pytest.raises(NotMoEError, match="qwen3 has no experts"):
        ask(server, case)
    assert not server.tokenizer_manager.requests


def test_verls_own_errors_pass(module):
    server = server_of(module)
    with pytest.raises(ValueError, match="exceeds the model's maximum context length"):
        ask(server, {"prompt_ids": [1] * 600})


# --- versions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "said"), [("0.5.12", 0), ("0.5.23", 0), ("0.5.17", 1), ("0.6.0rc1", 1)])
def test_untested_versions_are_decoded_with_a_word_of_caution(module, sglang, caplog, version, said):
    sglang.__version__ = version
    case = case_of("0.5.12", "cold")
    server = server_of(module, answer_of(case), answer_of(case))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            np.testing.assert_array_equal(ask(server, case).routed_experts, ids_by_hand(case["routed_experts"]))
    assert caplog.text.count(f"with the installed {version}") == said


def test_older_versions_are_left_to_verls_own_code(module, sglang, caplog):
    """Before 0.5.12 routes came as a tensor, which verl reads."""
    sglang.__version__ = "0.5.9"
    case = case_of("0.5.12", "cold")
    ids = torch.tensor(ids_by_hand(case["routed_experts"]), dtype=torch.int32)
    answers = [answer_of({**case, "routed_experts": ids}) for _ in range(2)]
    server = server_of(module, *answers)
    with caplog.at_level(logging.WARNING):
        outputs = [ask(server, case), ask(server, case)]
    for output in outputs:
        np.testing.assert_array_equal(output.routed_experts, ids)
    assert caplog.text.count("left to verl's own code") == 1


# --- a pair of servers, one for prompts and one for answers -------------------------------------------------------


def paired(module, prefill_answer, decode_answer):
    prefill = server_of(module, prefill_answer, role="prefill")
    decode = server_of(module, decode_answer, role="decode")
    remote = lambda *args, **kwargs: decode.generate(*args, **kwargs)  # noqa: E731
    prefill._pd_decode_peers = [SimpleNamespace(generate=SimpleNamespace(remote=remote))]
    prefill._pd_bootstrap_host, prefill._disaggregation_bootstrap_port = "host", 1
    return prefill, decode


def test_the_answer_of_the_other_server_is_handed_on_as_it_is(module):
    """The decode server never ran the prompt: its rows for it are those of earlier requests, and it says so itself."""
    case = case_of("0.5.12", "cold")
    prefill, decode = paired(module, answer_of(case_of("0.5.12", "one_new_token")), answer_of(case))
    output = ask(prefill, case)
    assert output.token_ids == case["output_ids"]
    assert output.routed_experts is None and output.extra_fields[REJECTED_FIELD].startswith("join: ")
    for server, suffix in ((prefill, "_P"), (decode, "_D")):
        (request,) = server.tokenizer_manager.requests
        assert request.return_routed_experts and request.rid == f"request-1{suffix}"
        assert request.bootstrap_host == "host" and request.bootstrap_room is not None


def test_what_the_other_server_delivered_is_not_overwritten(module):
    case = case_of("0.5.12", "cold")
    prefill, _ = paired(module, answer_of(case_of("0.5.12", "one_new_token")), answer_of(case))
    delivered = object()

    async def peer(*args, **kwargs):
        return delivered

    prefill._pd_decode_peers = [SimpleNamespace(generate=SimpleNamespace(remote=peer))]
    assert ask(prefill, case) is delivered
