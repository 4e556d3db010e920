"""Records on their way through verl's own client, agent loops, data plane and padding, up to the batch of the engine.

The servers are stand-ins that answer with given tokens and routes; everything after them is verl's code.
"""

import asyncio
import copy
import types

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import open_dict
from transformers import Qwen3MoeConfig
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import AgentData, ToolAgentLoop
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_sat.embedded.model import build_tokenizer
from verl_sat.router_replay import client as seam
from verl_sat.router_replay.layout import MoELayout
from verl_sat.router_replay.record import RouteHeader, from_transport

LAYERS, EXPERTS, TOP_K = 4, 8, 2


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    Qwen3MoeConfig(
        num_hidden_layers=LAYERS, num_experts=EXPERTS, num_experts_per_tok=TOP_K, mlp_only_layers=[0]
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def config(model_path):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                "hydra.searchpath=[pkg://verl_sat.conf]",
                "+r3=fsdp",
                f"actor_rollout_ref.model.path={model_path}",
                "actor_rollout_ref.rollout.name=hf",
                "actor_rollout_ref.rollout.prompt_length=16",
                "actor_rollout_ref.rollout.response_length=8",
                "actor_rollout_ref.rollout.calculate_log_probs=True",
            ],
        )


def changed(config, key, value):
    config = copy.deepcopy(config)
    with open_dict(config):
        node = config
        *path, last = key.split(".")
        for name in path:
            node = node[name]
        node[last] = value
    return config


def routes_of(first, rows):
    """Ids ``[rows, LAYERS, TOP_K]`` that name their row: expert (first + row) and the next; the dense layer zeros."""
    ids = (first + np.arange(rows)[:, None, None] + np.arange(TOP_K)) % EXPERTS
    ids = np.broadcast_to(ids, (rows, LAYERS, TOP_K)).astype(np.int32).copy()
    ids[:, 0] = 0
    return ids


def decoded(transport):
    """Ids of a transport array by hand: -1 where nothing is recorded."""
    assert transport.dtype in (np.int16, torch.int16)
    array = transport.numpy() if isinstance(transport, torch.Tensor) else transport
    codes = np.ascontiguousarray(array).view(np.uint8)[..., :TOP_K]
    return codes.astype(int) - 1


class Server:
    """Answers in order; each answer is (tokens, routes, version, stop reason)."""

    def __init__(self, *answers, extra=None):
        self.answers, self.extra, self.prompts = list(answers), extra or {}, []

    @property
    def generate(self):
        return types.SimpleNamespace(remote=self._generate)

    async def _generate(self, prompt_ids, **_):
        self.prompts.append(list(prompt_ids))
        tokens, routes, version, reason = self.answers.pop(0)
        return TokenOutput(
            token_ids=list(tokens),
            log_probs=[-1.0] * len(tokens),
            routed_experts=routes,
            stop_reason=reason,
            extra_fields={"global_steps": version, **self.extra},
        )


def make_client(cls, config, server):
    client = cls(config)

    async def acquire(request_id, **_):
        return "server", server

    client._acquire_server = acquire
    client._release_server = lambda *_, **__: None
    return client


def ask(cls, config, server, prompt=(5, 6, 7), **params):
    client = make_client(cls, config, server)
    return asyncio.run(
        client.generate("r", prompt_ids=list(prompt), sampling_params={"logprobs": True, "max_tokens": 8, **params})
    )


@pytest.fixture(autouse=True)
def no_pause_after_an_abort(monkeypatch):
    sleep = asyncio.sleep

    async def at_once(_):
        await sleep(0)  # others get their turn

    monkeypatch.setattr("verl.workers.rollout.llm_server.asyncio.sleep", at_once)


CLIENTS = [LLMServerClient, FullyAsyncLLMServerClient]


@pytest.mark.parametrize("cls", CLIENTS)
def test_a_whole_answer_is_encoded_row_by_row(config, cls):
    ids = routes_of(2, 6)
    ids.flags.writeable = False
    output = ask(cls, config, Server(([1, 2, 3, 4], ids, 7, "completed")))
    np.testing.assert_array_equal(decoded(output.routed_experts)[:, 1:], ids[:, 1:])
    assert (decoded(output.routed_experts)[:, 0] == -1).all()  # the dense layer
    info = output.extra_fields["routes"]
    assert info["why"] == [[0, 6]] and info["versions"] == [[7, 6]] and info["engine"].startswith("hf")


@pytest.mark.parametrize("cls", CLIENTS)
def test_without_routes_the_sample_carries_rows_that_read_as_missing(config, cls, caplog):
    output = ask(cls, config, Server(([1, 2], None, 7, "completed")))
    assert output.routed_experts.shape[0] == 4 and not output.routed_experts.any()
    assert output.extra_fields["routes"]["why"] == [[1, 4]]
    assert "enable_rollout_routing_replay" in caplog.text


@pytest.mark.parametrize("cls", CLIENTS)
def test_what_is_invalid_is_rejected_and_said(config, cls, caplog):
    zeros = np.zeros((4, LAYERS, TOP_K), np.int32)  # a backend that bypasses the capture
    output = ask(cls, config, Server(([1, 2], zeros, 7, "completed")))
    assert not output.routed_experts.any()
    info = output.extra_fields["routes"]
    assert info["why"] == [[2, 4]] and sum(info["rejected"].values()) == 4
    assert "rejected" in caplog.text


def test_a_server_that_rejected_says_why(config):
    server = Server(([1, 2], None, 7, "completed"), extra={"routes_rejected": "rows: 3 rows for 2 tokens"})
    info = ask(LLMServerClient, config, server).extra_fields["routes"]
    assert info["rejected"] == {"rows": 4}


@pytest.mark.parametrize("cls", CLIENTS)
@pytest.mark.parametrize(
    "key, value",
    [
        ("actor_rollout_ref.rollout.enable_rollout_routing_replay", False),
        ("actor_rollout_ref.actor.fsdp_config.router_replay.mode", "disabled"),
        ("actor_rollout_ref.actor.strategy", "megatron"),
    ],
)
def test_elsewhere_verl_gets_what_the_engine_returned(config, cls, key, value):
    ids = routes_of(2, 6)
    output = ask(cls, changed(config, key, value), Server(([1, 2, 3, 4], ids, 7, "completed")))
    assert output.routed_experts is ids
    assert "routes" not in output.extra_fields


def test_a_teacher_has_no_routes(config):
    output = ask(LLMServerClient, config, Server(([1], None, None, "completed")), prompt_logprobs=0)
    assert output.routed_experts is None and "routes" not in output.extra_fields


def test_R09_a_resumed_rollout_keeps_the_rows_of_the_first_version(config):
    first, second = routes_of(1, 4), routes_of(5, 6)
    server = Server(([1, 2], first, 3, "aborted"), ([3, 4], second, 4, "completed"))
    output = ask(FullyAsyncLLMServerClient, config, server)
    assert server.prompts[1] == [5, 6, 7, 1, 2]
    # by hand: 4 rows of version 3, the last two of version 4
    np.testing.assert_array_equal(decoded(output.routed_experts)[:, 1:], np.concatenate([first, second[-2:]])[:, 1:])
    assert output.extra_fields["routes"]["versions"] == [[3, 4], [4, 2]]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_segment_without_routes_is_missing_and_not_relabelled(config, lost):
    routes = [routes_of(1, 4), routes_of(5, 6)]
    routes[lost] = None
    server = Server(([1, 2], routes[0], 3, "aborted"), ([3, 4], routes[1], 4, "completed"))
    output = ask(FullyAsyncLLMServerClient, config, server)
    got = decoded(output.routed_experts)
    if lost == 0:
        assert (got[:4] == -1).all()
        np.testing.assert_array_equal(got[4:, 1:], routes[1][4:, 1:])
    else:
        np.testing.assert_array_equal(got[:4, 1:], routes[0][:, 1:])
        assert (got[4:] == -1).all()
    assert output.extra_fields["routes"]["why"] == ([[1, 4], [0, 2]] if lost == 0 else [[0, 4], [1, 2]])


def test_aborted_in_the_queue_costs_nothing(config):
    whole = routes_of(1, 4)
    server = Server(([], None, 3, "aborted"), ([1, 2], whole, 4, "completed"))
    output = ask(FullyAsyncLLMServerClient, config, server)
    np.testing.assert_array_equal(decoded(output.routed_experts)[:, 1:], whole[:, 1:])
    assert output.extra_fields["routes"]["versions"] == [[4, 4]]


@pytest.mark.parametrize("cls", CLIENTS)
def test_nothing_sampled_still_carries_the_field(config, cls):
    output = ask(cls, config, Server(([], None, 3, "completed")))
    assert output.routed_experts.dtype == np.int16 and output.routed_experts.shape[0] == 2


def test_requests_that_run_side_by_side_do_not_mix(config):
    """Eight partial rollouts through one client, their segments interleaved; one of them fails."""

    class Servers:
        """One server for all; a request is told by its first token."""

        @property
        def generate(self):
            return types.SimpleNamespace(remote=self._generate)

        async def _generate(self, prompt_ids, **_):
            number, sampled = prompt_ids[0], len(prompt_ids) - 3
            for _ in range(number % 3 + 1):
                await asyncio.sleep(0)
            if number == 5 and sampled:
                raise RuntimeError("server gone")
            rows = len(prompt_ids) + 1
            return TokenOutput(
                token_ids=[1, 2],
                log_probs=[-1.0, -1.0],
                routed_experts=routes_of(number, rows),
                stop_reason="completed" if sampled else "aborted",
                extra_fields={"global_steps": 10 * number + sampled},
            )

    async def main():
        client = make_client(FullyAsyncLLMServerClient, config, Servers())
        params = {"logprobs": True, "max_tokens": 8}
        calls = [client.generate("r", prompt_ids=[n, 6, 7], sampling_params=params) for n in range(8)]
        return await asyncio.gather(*calls, return_exceptions=True)

    outputs = asyncio.run(main())
    for number, output in enumerate(outputs):
        if number == 5:
            assert isinstance(output, RuntimeError)
            continue
        assert output.extra_fields["routes"]["versions"] == [[10 * number, 4], [10 * number + 2, 2]]
        np.testing.assert_array_equal(decoded(output.routed_experts)[:, 1:], routes_of(number, 6)[:, 1:])


# --- agent loops --------------------------------------------------------------------------------------------------


def agent_loop(cls, config, server, client_cls=FullyAsyncLLMServerClient):
    async def make():
        return cls(
            trainer_config=DictConfigWrap(config),
            server_manager=make_client(client_cls, config, server),
            tokenizer=build_tokenizer(),
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(config.data),
            hf_model_type="qwen3",
        )

    return make()


def run_single_turn(config, server):
    async def main():
        loop = await agent_loop(SingleTurnAgentLoop, config, server)
        return await loop.run({"logprobs": True}, raw_prompt=[{"role": "user", "content": "2"}])

    return asyncio.run(main())


def test_R11_routes_are_cut_with_the_response(config):
    server = Server(([1] * 12, None, 3, "completed"))
    output = run_single_turn(config, server)
    prompt = len(output.prompt_ids)
    server = Server(([1] * 12, routes_of(0, prompt + 11), 3, "completed"))
    output = run_single_turn(config, server)
    assert len(output.response_ids) == 8
    assert output.routed_experts.shape[0] == prompt + 8
    np.testing.assert_array_equal(decoded(output.routed_experts)[:, 1:], routes_of(0, prompt + 8)[:, 1:])


def test_R07_the_first_captured_rows_of_a_trajectory_win(config):
    """Two turns of verl's tool loop; the engine returns the whole conversation anew on the second."""
    first, second = routes_of(1, 4), routes_of(5, 9)
    server = Server(([11, 12], first, 3, "completed"), ([14, 15], second, 4, "completed"))

    async def main():
        loop = await agent_loop(ToolAgentLoop, config, server)
        data = AgentData([], None, None, None, None, {}, "r", {})
        data._active_tools = {}
        data.prompt_ids = [5, 6, 7]
        await loop._handle_generating_state(data, {"logprobs": True}, ignore_termination=True)
        assert data.prompt_ids == [5, 6, 7, 11, 12]
        data.prompt_ids = data.prompt_ids + [20, 21, 22]  # the tool's reply
        await loop._handle_generating_state(data, {"logprobs": True}, ignore_termination=True)
        return data

    data = asyncio.run(main())
    assert server.prompts[1] == [5, 6, 7, 11, 12, 20, 21, 22]
    expected = np.concatenate([first, second[4:]])  # by hand: rows 0..3 of turn one, the rest of turn two
    np.testing.assert_array_equal(decoded(data.routed_experts)[:, 1:], expected[:, 1:])
    info = data.extra_fields["routes"]
    assert info["versions"] == [[3, 4], [4, 5]] and info["why"] == [[0, 9]]


def test_R08_rows_are_kept_only_as_far_as_the_tokens_are_the_same():
    header = RouteHeader(MoELayout(EXPERTS, TOP_K, LAYERS, None, "x"), tuple(range(LAYERS)))

    def turn(tokens, value, version, missing=()):
        why = np.array([1 if row in missing else 0 for row in range(len(tokens) - 1)], np.uint8)
        transport = np.where(why[:, None, None] == 0, np.full((len(why), LAYERS, 1), value, np.int16), 0)
        versions = np.full(len(why), version, np.int64)
        return seam.TurnMemory(tokens, from_transport(transport.astype(np.int16), header, versions, why), {"range": 1})

    memory = seam.add_turn(None, turn([1, 2, 3, 4], 0x0201, 3))
    merged = seam.add_turn(memory, turn([1, 2, 9, 4, 5], 0x0403, 4))  # the template rewrote the third token
    assert merged.record.codes[:, 0, 0].tolist() == [1, 1, 3, 3]
    assert merged.record.versions.tolist() == [3, 3, 4, 4]
    assert merged.rejected == {"range": 2}
    # what an earlier turn missed, a later one may fill
    merged = seam.add_turn(turn([1, 2, 3], 0x0201, 3, missing=(1,)), turn([1, 2, 3, 4], 0x0403, 4))
    assert merged.record.versions.tolist() == [3, 4, 4]


# --- data plane and padding ---------------------------------------------------------------------------------------


def test_R06_missing_rows_survive_as_dict_data_plane_and_padding(config, empty_queue):
    """verl's as_dict, TransferQueue and synthetic padding samples: all that they fill in reads as not recorded."""
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    samples = [run_single_turn(config, Server(([1, 2, 3], None, 3, "completed")))]
    prompt = len(samples[0].prompt_ids)
    full = routes_of(0, prompt + 2)
    samples.append(run_single_turn(config, Server(([1, 2, 3], full, 3, "completed"))))
    # a tool's reply after the last generation: two tokens that no engine ever saw
    answered = samples[1]
    samples.append(
        answered.model_copy(
            update={
                "response_ids": answered.response_ids + [8, 9],
                "response_mask": answered.response_mask + [0, 0],
                "response_logprobs": answered.response_logprobs + [0.0, 0.0],
            }
        )
    )
    fields = []
    for sample in samples:
        field = sample.as_dict()
        field["input_ids"] = torch.cat([field["prompts"], field["responses"]])
        field["position_ids"] = torch.arange(len(field["input_ids"]))
        field["loss_mask"] = field["response_mask"]
        field.pop("multi_modal_data", None)  # as verl's worker does
        fields.append(field)
    keys = ["a_0_0", "b_0_0", "c_0_0"]
    tags = [{"status": "success"}] * 3
    empty_queue.kv_batch_put(keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id="train")
    batch = KVBatchMeta(keys=keys, tags=[dict(t) for t in tags], partition_id="train")
    batch = upsample_batch_to_divisible_size(batch, 4, eos_token_id=2)
    data = empty_queue.kv_batch_get(keys=batch.keys, partition_id="train")
    none, all_, tail, padding = (decoded(row) for row in data["routed_experts"].unbind())
    assert none.shape[0] == prompt + 3 and (none == -1).all()
    np.testing.assert_array_equal(all_[:-1, 1:], full[:, 1:])
    assert (all_[-1] == -1).all()
    np.testing.assert_array_equal(tail[: prompt + 2, 1:], full[:, 1:])
    assert (tail[prompt + 2 :] == -1).all()
    assert (padding == -1).all()
    assert data["routed_experts"].dtype == torch.int16
