"""The tiny policy and its tokenizer, through the doors verl uses: Auto classes, prompt builder, agent loop."""

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeForCausalLM

from verl_sat.embedded.model import CHARACTERS, ROLES, VOCAB_SIZE, build_model, build_tokenizer, save

TOKENIZER = build_tokenizer()
QUESTION = [{"role": "user", "content": "3+4+5="}]
PROMPT = "<|im_start|>user\n3+4+5=<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model") / "tiny", build_model(3), build_tokenizer())


def test_model_is_a_small_mixture_of_experts():
    model = build_model(1)
    config = model.config
    assert isinstance(model, Qwen3MoeForCausalLM)
    assert config.model_type == "qwen3_moe" and config.architectures in (None, ["Qwen3MoeForCausalLM"])
    assert config.num_hidden_layers >= 4 and config.num_experts == 8 and config.num_experts_per_tok == 2
    assert config.norm_topk_prob and config.tie_word_embeddings
    assert config.vocab_size == VOCAB_SIZE == len(TOKENIZER)
    assert all(layer.mlp.experts.num_experts == 8 for layer in model.model.layers)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert config._attn_implementation == "sdpa"
    assert model.num_parameters() < 1_000_000


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(123)
    expected = torch.rand(3)
    torch.manual_seed(123)
    first = build_model(1).state_dict()
    assert torch.equal(torch.rand(3), expected)  # the caller's random state is untouched
    again, other = build_model(1).state_dict(), build_model(2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.layers.0.mlp.gate.weight"], other["model.layers.0.mlp.gate.weight"])


@pytest.mark.parametrize("hidden_size", [0, -32, 40])
def test_hidden_size_is_checked(hidden_size):
    with pytest.raises(ValueError, match=f"hidden_size must be .* got {hidden_size}"):
        build_model(1, hidden_size=hidden_size)


def test_auto_classes_load_the_checkpoint(checkpoint, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=False)
    built = build_model(3).state_dict()
    loaded = model.state_dict()
    assert type(model) is Qwen3MoeForCausalLM and loaded.keys() == built.keys()
    assert all(torch.equal(loaded[name], built[name]) for name in built)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    assert tokenizer.decode(tokenizer.encode("3+4 = 7,\n")) == "3+4 = 7,\n"
    config = AutoConfig.from_pretrained(checkpoint)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(config, name) == getattr(model.generation_config, name) == getattr(tokenizer, name)


def test_special_tokens_differ_and_ids_fill_the_vocabulary():
    special = [TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id, TOKENIZER.unk_token_id]
    assert len(set(special)) == 4
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(VOCAB_SIZE))


@given(st.text(alphabet=CHARACTERS, max_size=40))
def test_text_survives_the_round_trip(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == text
    if not any(role in text for role in ROLES):
        assert len(ids) == len(text)


@given(st.text(max_size=20))
def test_any_text_can_be_encoded(text):
    assert all(0 <= token < VOCAB_SIZE for token in TOKENIZER.encode(text))


def test_unknown_characters_are_one_unknown_token_each():
    assert TOKENIZER.encode("7é٣") == [TOKENIZER.convert_tokens_to_ids("7"), *[TOKENIZER.unk_token_id] * 2]


def test_chat_template_is_chatml():
    messages = [{"role": "system", "content": "add"}, *QUESTION]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    assert text == "<|im_start|>system\nadd<|im_end|>\n<|im_start|>user\n3+4+5=<|im_end|>\n"
    assert TOKENIZER.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True) == PROMPT


def test_prompt_builder_of_the_model_type_accepts_the_tokenizer(checkpoint):
    from verl.utils import hf_processor, hf_tokenizer
    from verl.utils.tokenizer.continuous_token import QwenContinuousTokenBuilder
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    tokenizer = hf_tokenizer(str(checkpoint))
    assert hf_processor(str(checkpoint)) is None
    builder = create_continuous_token_builder(tokenizer, hf_model_type="qwen3_moe", chat_template_kwargs={})
    assert type(builder) is QwenContinuousTokenBuilder
    prompt = builder.build_initial_tokens(QUESTION)
    assert tokenizer.decode(prompt) == PROMPT

    # A second turn goes through the builder's boundary repair: the newline after <|im_end|> is put back.
    answer = tokenizer.encode("7,12<|im_end|>")
    history = [*QUESTION, {"role": "assistant", "content": "7,12"}]
    merged = builder.merge_context_tokens(history, [*history, {"role": "user", "content": "1+1="}], prompt + answer)
    expected = PROMPT + "7,12<|im_end|>\n<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(merged.token_ids) == expected


def test_single_turn_agent_loop_runs(checkpoint):
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
    from verl.utils import hf_tokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.workers.rollout.replica import TokenOutput

    tokenizer = hf_tokenizer(str(checkpoint))
    answer = tokenizer.encode("7,12<|im_end|>")

    class Server:
        async def generate(self, *, prompt_ids, **kwargs):
            self.prompt_ids = prompt_ids
            return TokenOutput(token_ids=answer, log_probs=[-0.5] * len(answer), stop_reason="completed")

    async def rollout():
        server = Server()
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"prompt_length": 18, "response_length": 12}}})
        loop = SingleTurnAgentLoop(
            trainer_config=DictConfigWrap(config),
            server_manager=server,
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(OmegaConf.create({})),
            hf_model_type="qwen3_moe",
        )
        return server, await loop.run({}, raw_prompt=QUESTION)

    server, output = asyncio.run(rollout())
    assert tokenizer.decode(server.prompt_ids) == tokenizer.decode(output.prompt_ids) == PROMPT
    assert output.response_ids == answer
    assert output.response_mask == [1] * len(answer) and output.response_logprobs == [-0.5] * len(answer)
