"""A tiny Qwen3-MoE and its character tokenizer, for verl without a GPU.

The policy is a real ``Qwen3MoeForCausalLM`` (grouped-query attention, RoPE, top-2 of 8
experts) so that everything verl does by model type, continuous-token prompts, per-expert
weight names, router replay, happens here as it does with a 30B model. Only the sizes are
small: half a million parameters, a vocabulary of 64, one token per character.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging as hf_logging

PAD_TOKEN = "<|endoftext|>"
BOS_TOKEN = "<|im_start|>"
EOS_TOKEN = "<|im_end|>"
UNK_TOKEN = "<|unk|>"
ROLES = ("system", "user", "assistant", "tool")
CHARACTERS = "\n 0123456789abcdefghijklmnopqrstuvwxyz+-*/=,.;:?!()<>_'\""

VOCAB_SIZE = 64
MAX_POSITIONS = 256

# ChatML. verl picks its Qwen prompt builder from the model type, and that builder asks for
# <|im_end|> and for a newline that is one token.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the character tokenizer with a ChatML chat template.

    Every character of ``CHARACTERS`` is one token, a role name is one token (a prompt is
    otherwise mostly the word "assistant"), and everything else is ``<|unk|>``. Text over
    ``CHARACTERS`` survives encoding and decoding unchanged.

    Returns:
        A fast tokenizer of ``VOCAB_SIZE`` tokens with pad, bos, eos and unk set, padding on the left.
    """
    vocab = {token: i for i, token in enumerate([PAD_TOKEN, BOS_TOKEN, EOS_TOKEN, UNK_TOKEN, *ROLES, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=UNK_TOKEN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([PAD_TOKEN, BOS_TOKEN, EOS_TOKEN, UNK_TOKEN])
    backend.add_tokens([AddedToken(role, normalized=False) for role in ROLES])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        unk_token=UNK_TOKEN,
        padding_side="left",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(
    seed: int,
    *,
    num_layers: int = 4,
    hidden_size: int = 64,
    num_experts: int = 8,
    experts_per_token: int = 2,
) -> Qwen3MoeForCausalLM:
    """Build the tiny policy with random weights that depend on ``seed`` alone.

    Args:
        seed: seed of the weights; the global random state is left as it was.
        num_layers: transformer layers, each with a mixture of experts.
        hidden_size: width of the residual stream and of an expert; a multiple of 32.
        num_experts: experts in a layer.
        experts_per_token: experts a token is sent to.
    Returns:
        The model on the CPU, fp32, with sdpa attention, in training mode.
    Raises:
        ValueError: if ``hidden_size`` is not a positive multiple of 32.
    """
    if hidden_size <= 0 or hidden_size % 32:
        raise ValueError(f"hidden_size must be a positive multiple of 32, got {hidden_size}")
    head_dim = 16
    heads = hidden_size // head_dim
    vocab = build_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        moe_intermediate_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=head_dim,
        num_experts=num_experts,
        num_experts_per_tok=experts_per_token,
        norm_topk_prob=True,
        max_position_embeddings=MAX_POSITIONS,
        # Three times Qwen's value: at this width the usual 0.02 spends a third of the warm start growing the weights.
        initializer_range=0.06,
        # Tied, so that verl builds the module with real tensors and never on the meta device.
        tie_word_embeddings=True,
        use_cache=True,
        pad_token_id=vocab.pad_token_id,
        bos_token_id=vocab.bos_token_id,
        eos_token_id=vocab.eos_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # transformers' default for experts, grouped_mm, is also the fastest on a CPU; batched_mm, which copies
        # the expert weights per token, is tens of times slower.
        model = Qwen3MoeForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    model.generation_config = GenerationConfig(
        pad_token_id=vocab.pad_token_id, bos_token_id=vocab.bos_token_id, eos_token_id=vocab.eos_token_id
    )
    return model


def save(directory: str | Path, model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Write model and tokenizer as a checkpoint that the Auto classes load offline.

    Args:
        directory: created if it is not there.
        model: the policy.
        tokenizer: its tokenizer.
    Returns:
        ``directory`` as an absolute path.
    """
    directory = Path(directory).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    # One small shard: a progress bar would only disturb the caller's own display.
    shows_progress = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        model.save_pretrained(directory)
    finally:
        if shows_progress:
            hf_logging.enable_progress_bar()
    tokenizer.save_pretrained(directory)
    return directory
