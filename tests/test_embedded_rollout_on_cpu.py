"""The Hugging Face rollout server, driven as verl drives it (without Ray around it)."""

import asyncio

import pytest
import torch
from verl.workers.config import RolloutConfig
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from verl_sat.embedded.model import build_model, build_tokenizer, save
from verl_sat.embedded.rollout import HFServer, HFServerAdapter, fuse_expert_weights
from verl_sat.embedded.rollout_settings import ServerSettings

PROMPT = [1, 5, 9, 12]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save(tmp_path_factory.mktemp("model"), build_model(seed=3), build_tokenizer()))


def make_config(**changes):
    values = dict(
        name="hf",
        dtype="float32",
        prompt_length=16,
        response_length=12,
        max_num_seqs=64,
        ignore_eos=True,
        tensor_model_parallel_size=1,
        logprobs_mode="processed_logprobs",
        custom={"gather_window_s": 0.01},
    )
    return RolloutConfig(**{**values, **changes})


def drive(model_path, scenario, **changes):
    """Run ``await scenario(server)`` on a fresh server."""

    async def main():
        server = HFServer(make_config(**changes), model_path)
        await server.ready()
        try:
            return await asyncio.wait_for(scenario(server), timeout=60)
        finally:
            server._loop_task.cancel()

    return asyncio.run(main())


def ask(server, prompt=PROMPT, **params):
    return server.generate(list(prompt), {"logprobs": True, **params}, request_id="r")


def test_answers_carry_tokens_log_probs_and_the_version(model_path):
    async def scenario(server):
        await server.abort_all_requests()
        await server.load_weights(dict(server.model.state_dict()), global_steps=7)
        await server.resume_generation()
        return await asyncio.gather(*[ask(server) for _ in range(4)])

    outputs = drive(model_path, scenario)
    assert all(o.stop_reason == "completed" and o.extra_fields["global_steps"] == 7 for o in outputs)
    assert all(len(o.token_ids) == len(o.log_probs) == 12 for o in outputs)
    assert len({tuple(o.token_ids) for o in outputs}) > 1  # the same prompt asked again is another sample


def test_same_seed_and_version_give_the_same_samples_whatever_the_arrival(model_path):
    prompts = [[1, 5, 9], [1, 5, 10, 11], [2, 3], [1, 5, 9]]

    async def together(server):
        return await asyncio.gather(*[ask(server, p) for p in prompts])

    async def one_by_one(server):
        return [await ask(server, p) for p in prompts]

    first, second = drive(model_path, together), drive(model_path, one_by_one)
    assert [o.token_ids for o in first] == [o.token_ids for o in second]
    other_seed = drive(model_path, together, seed=43)
    assert [o.token_ids for o in first] != [o.token_ids for o in other_seed]


def test_abort_hands_back_partial_answers_and_keeps_the_queue(model_path):
    async def scenario(server):
        running = [asyncio.create_task(ask(server)) for _ in range(2)]
        while server._idle.is_set():
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.15)  # some tokens, far from all 12
        waiting = asyncio.create_task(ask(server, [3, 4]))
        await asyncio.sleep(0)
        await server.abort_all_requests()
        aborted = await asyncio.gather(*running)
        assert not waiting.done()
        await server.load_weights(dict(server.model.state_dict()), global_steps=1)
        await server.resume_generation()
        return aborted, await waiting

    aborted, queued = drive(model_path, scenario, custom={"gather_window_s": 0.0, "token_delay_s": 0.05})
    assert all(o.stop_reason == "aborted" and 0 < len(o.token_ids) < 12 for o in aborted)
    assert all(len(o.token_ids) == len(o.log_probs) for o in aborted)
    assert all(o.extra_fields["global_steps"] is None for o in aborted)  # no weights had been sent yet
    assert queued.stop_reason == "completed" and queued.extra_fields["global_steps"] == 1


def test_rejecting_gate_sends_requests_back(model_path):
    async def scenario(server):
        await server.abort_all_requests(reject_request=True)
        rejected = await ask(server)
        await server.resume_generation()
        return rejected, await ask(server)

    rejected, answered = drive(model_path, scenario)
    assert rejected.stop_reason == "aborted" and rejected.token_ids == []
    assert answered.stop_reason == "completed"


def test_weights_of_verls_fsdp_engine_load_and_change_the_answers(model_path):
    # verl sends per-expert tensors; transformers 5 holds packed ones.
    other = build_model(seed=4)
    sent = dict(unfuse_moe_params(iter(other.state_dict().items()), "qwen3_moe"))
    assert any(".experts.0.gate_proj.weight" in name for name in sent)
    fused = fuse_expert_weights(sent)
    for name, tensor in other.state_dict().items():
        assert torch.equal(fused[name], tensor), name

    async def scenario(server):
        before = await ask(server)
        await server.abort_all_requests()
        await server.load_weights(sent, global_steps=1)
        await server.resume_generation()
        for name, tensor in server.model.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name
        return before, await ask(server)

    before, after = drive(model_path, scenario)
    assert before.token_ids != after.token_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "missing.*model.norm.weight"),
        (lambda w: w.update(extra=torch.zeros(1)), "unexpected.*extra"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight: shape \(3,\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(model_path, change, message):
    async def scenario(server):
        await server.abort_all_requests()
        weights = dict(server.model.state_dict())
        change(weights)
        with pytest.raises(RuntimeError, match=message):
            await server.load_weights(weights, global_steps=1)
        assert server.global_steps is None

    drive(model_path, scenario)


def test_bf16_server_casts_weights_and_still_reports_fp32_log_probs(model_path):
    async def scenario(server):
        await server.abort_all_requests()
        await server.load_weights(dict(build_model(seed=4).state_dict()), global_steps=1)
        await server.resume_generation()
        assert {p.dtype for p in server.model.parameters()} == {torch.bfloat16}
        return await ask(server)

    output = drive(model_path, scenario, dtype="bfloat16")
    assert all(value <= 0 for value in output.log_probs)


def test_resume_after_abort_through_verls_client_budget(model_path):
    # verl's FullyAsyncLLMServerClient asks again with prompt + tokens and what is left of the budget.
    async def scenario(server):
        return await ask(server, PROMPT + [7, 8], max_tokens=10)

    assert len(drive(model_path, scenario).token_ids) == 10


def test_two_replicas_do_not_repeat_each_other(model_path):
    async def first_of(rank):
        server = HFServer(make_config(), model_path, replica_rank=rank)
        await server.ready()
        try:
            return (await ask(server)).token_ids
        finally:
            server._loop_task.cancel()

    assert asyncio.run(first_of(0)) != asyncio.run(first_of(1))


def test_a_caller_that_went_away_does_not_stop_the_others(model_path):
    async def scenario(server):
        gone = asyncio.create_task(ask(server, [10_000]))  # its batch will fail
        while server._idle.is_set():
            await asyncio.sleep(0.001)
        gone.cancel()
        return await ask(server)

    assert drive(model_path, scenario).stop_reason == "completed"


def test_nobody_waits_for_a_sampling_loop_that_is_gone(model_path):
    async def scenario(server):
        def broken():
            raise ZeroDivisionError("broken")

        server._take_batch = broken
        with pytest.raises(RuntimeError, match="sampling loop .* ended.*ZeroDivisionError"):
            await ask(server)
        with pytest.raises(RuntimeError, match="sampling loop"):
            await ask(server)

    drive(model_path, scenario)


def test_a_gate_that_opens_and_closes_at_once_stays_closed(model_path):
    async def scenario(server):
        await server.abort_all_requests()
        waiting = asyncio.create_task(ask(server))
        await asyncio.sleep(0.05)
        await asyncio.gather(server.resume_generation(), server.abort_all_requests())
        await asyncio.sleep(0.1)
        await server.load_weights(dict(server.model.state_dict()), global_steps=1)  # nothing may be running
        assert not waiting.done()
        await server.resume_generation()
        return await waiting

    assert drive(model_path, scenario).extra_fields["global_steps"] == 1


def test_a_failing_batch_fails_its_callers_and_not_the_server(model_path):
    async def scenario(server):
        with pytest.raises(Exception, match="index out of range"):
            await ask(server, [10_000])
        return await ask(server)

    assert drive(model_path, scenario).stop_reason == "completed"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"image_data": [1]}, "text"),
        ({"prompt_ids": [1] * 40}, "max_model_len"),
        ({"sampling_params": {"min_p": 0.5}}, "min_p"),
    ],
)
def test_what_the_server_cannot_do_is_refused(model_path, kwargs, message):
    async def scenario(server):
        with pytest.raises(ValueError, match=message):
            await server.generate(**{"prompt_ids": PROMPT, "sampling_params": {}, "request_id": "r", **kwargs})

    drive(model_path, scenario)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float16"}, "rollout.dtype"),
        ({"logprobs_mode": "raw_logits"}, "rollout.logprobs_mode"),
        ({"custom": {"gather_window": 1}}, "rollout.custom.gather_window: unknown"),
        ({"custom": {"token_delay_s": -1}}, "rollout.custom.token_delay_s=-1"),
        ({"custom": {"token_delay_s": True}}, "rollout.custom.token_delay_s=True"),
        ({"custom": {"token_delay_s": float("inf")}}, "rollout.custom.token_delay_s=inf"),
        ({"custom": 5}, "rollout.custom=5"),
        ({"tensor_model_parallel_size": 2}, "rollout.tensor_model_parallel_size=2"),
    ],
)
def test_bad_settings_name_their_key(model_path, changes, message):
    with pytest.raises(ValueError, match=message):
        HFServer(make_config(**changes), model_path)


def test_settings_default_without_a_custom_block():
    assert ServerSettings.from_custom(None) == ServerSettings()


def test_adapter_refuses_delta_updates():
    with pytest.raises(NotImplementedError, match="delta_flush"):
        asyncio.run(HFServerAdapter(0).update_weights([], wire_format="delta_flush"))


def test_routes_come_only_when_asked_for_and_with_a_column_for_every_layer(tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **{**build_model(seed=1).config.to_dict(), "mlp_only_layers": [1], "dtype": "float32"},
    )
    dense_second = str(save(tmp_path, Qwen3MoeForCausalLM._from_config(config), build_tokenizer()))

    async def scenario(server):
        return await ask(server)

    output = drive(dense_second, scenario, enable_rollout_routing_replay=True)
    assert output.routed_experts.shape == (len(PROMPT) + len(output.token_ids) - 1, 4, 2)
    assert not output.routed_experts[:, 1].any()
    for layer in (0, 2, 3):
        assert (output.routed_experts[:, layer, 0] != output.routed_experts[:, layer, 1]).all()
    assert drive(dense_second, scenario).routed_experts is None
