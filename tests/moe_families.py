"""One tiny configuration for each mixture-of-experts family of the installed transformers that instantiates small.

Four layers, eight experts, two of them chosen per token, a hidden size of 32 and a vocabulary of 64, where the family
allows it; a dense layer wherever its configuration can name one, so that a layer number and a position among the MoE
layers are different things.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

LAYERS, EXPERTS, TOP_K = 4, 8, 2
VOCABULARY, HIDDEN = 64, 32

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
QWEN = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K}
ROUTED = {
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}

Family = Callable[[], tuple[str, Any]]


def _family(model_class: str, config_class: str, *without: str, **fields: Any) -> Family:
    def make() -> tuple[str, Any]:
        sizes = {name: value for name, value in SIZES.items() if name not in without}
        return model_class, getattr(transformers, config_class)(**{**sizes, **fields})

    return make


def _nested(model_class: str, config_class: str, text: dict[str, Any], **fields: Any) -> Family:
    """A vision-language family; its vision tower is small too, and not run."""

    def make() -> tuple[str, Any]:
        return model_class, getattr(transformers, config_class)(text_config={**SIZES, **text}, **fields)

    return make


VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}
DENSE_FIRST = ["dense"] + ["sparse"] * (LAYERS - 1)


def families() -> dict[str, Family]:
    """Name of each family -> a callable that makes the name of its model class in transformers and a tiny config."""
    latent = {**ROUTED, **LATENT}
    return {
        "qwen2_moe": _family(
            "Qwen2MoeForCausalLM", "Qwen2MoeConfig", **QWEN, shared_expert_intermediate_size=16, mlp_only_layers=[0]
        ),
        "qwen3_moe": _family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **QWEN, mlp_only_layers=[1]),
        "qwen3_next": _family(
            "Qwen3NextForCausalLM",
            "Qwen3NextConfig",
            **QWEN,
            shared_expert_intermediate_size=16,
            mlp_only_layers=[2],
            linear_num_value_heads=2,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
        "qwen3_5_moe": _nested(
            "Qwen3_5MoeForConditionalGeneration",
            "Qwen3_5MoeConfig",
            {
                **QWEN,
                "shared_expert_intermediate_size": 16,
                "linear_num_value_heads": 2,
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
            },
            vision_config=VISION,
        ),
        "qwen3_vl_moe": _nested(
            "Qwen3VLMoeForConditionalGeneration",
            "Qwen3VLMoeConfig",
            {**QWEN, "mlp_only_layers": [0], "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}},
            vision_config=VISION,
        ),
        "qwen3_omni_moe": _nested(
            "Qwen3OmniMoeThinkerForConditionalGeneration",
            "Qwen3OmniMoeThinkerConfig",
            {**QWEN, "mlp_only_layers": [0], "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}},
            vision_config=VISION,
            audio_config={
                "num_mel_bins": 16,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 16,
                "d_model": 16,
                "output_dim": HIDDEN,
                "downsample_hidden_size": 8,
                "max_source_positions": 16,
            },
        ),
        "mixtral": _family("MixtralForCausalLM", "MixtralConfig", **LOCAL),
        "olmoe": _family("OlmoeForCausalLM", "OlmoeConfig", **QWEN),
        "flex_olmo": _family("FlexOlmoForCausalLM", "FlexOlmoConfig", **QWEN),
        "gpt_oss": _family("GptOssForCausalLM", "GptOssConfig", **LOCAL),
        "deepseek_v2": _family(
            "DeepseekV2ForCausalLM", "DeepseekV2Config", **{**latent, "head_dim": 8}, first_k_dense_replace=1
        ),
        "deepseek_v3": _family(
            "DeepseekV3ForCausalLM", "DeepseekV3Config", **{**latent, "head_dim": 8}, first_k_dense_replace=2
        ),
        "deepseek_v4": _family(
            "DeepseekV4ForCausalLM",
            "DeepseekV4Config",
            **{**ROUTED, "num_key_value_heads": 1},
            mlp_layer_types=["hash_moe"] + ["moe"] * (LAYERS - 1),
            layer_types=["sliding_attention"] * LAYERS,
            q_lora_rank=16,
            o_groups=2,
            o_lora_rank=16,
            index_n_heads=2,
            index_head_dim=16,
            index_topk=4,
        ),
        "glm4_moe": _family("Glm4MoeForCausalLM", "Glm4MoeConfig", **ROUTED, first_k_dense_replace=1),
        "glm4_moe_lite": _family("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", "head_dim", **latent),
        "glm4v_moe": _nested(
            "Glm4vMoeForConditionalGeneration",
            "Glm4vMoeConfig",
            {
                **ROUTED,
                "first_k_dense_replace": 1,
                "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "partial_rotary_factor": 1.0},
            },
            vision_config={**VISION, "image_size": 16},
        ),
        "glm_moe_dsa": _family(
            "GlmMoeDsaForCausalLM",
            "GlmMoeDsaConfig",
            "head_dim",
            **latent,
            index_topk=4,
            index_n_heads=2,
            index_head_dim=16,
            mlp_layer_types=DENSE_FIRST,
        ),
        "granitemoe": _family("GraniteMoeForCausalLM", "GraniteMoeConfig", **LOCAL),
        "granitemoeshared": _family(
            "GraniteMoeSharedForCausalLM", "GraniteMoeSharedConfig", **LOCAL, shared_intermediate_size=16
        ),
        "granitemoehybrid": _family(
            "GraniteMoeHybridForCausalLM",
            "GraniteMoeHybridConfig",
            **LOCAL,
            shared_intermediate_size=16,
            layer_types=["attention"] * LAYERS,
            mamba_n_heads=4,
        ),
        "ernie4_5_moe": _family(
            "Ernie4_5_MoeForCausalLM",
            "Ernie4_5_MoeConfig",
            moe_num_experts=EXPERTS,
            moe_k=TOP_K,
            moe_intermediate_size=16,
            moe_layer_start_index=1,
            moe_layer_interval=2,
        ),
        "hunyuan_v1_moe": _family("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Config", num_experts=EXPERTS, moe_topk=TOP_K),
        "minimax": _family("MiniMaxForCausalLM", "MiniMaxConfig", **LOCAL, block_size=8),
        "minimax_m2": _family("MiniMaxM2ForCausalLM", "MiniMaxM2Config", **LOCAL, rotary_dim=16),
        "phimoe": _family("PhimoeForCausalLM", "PhimoeConfig", **LOCAL),
        "jetmoe": _family(
            "JetMoeForCausalLM", "JetMoeConfig", "head_dim", "num_attention_heads", **LOCAL, kv_channels=16
        ),
        "dots1": _family("Dots1ForCausalLM", "Dots1Config", **ROUTED, first_k_dense_replace=1),
        "llama4": _family(
            "Llama4ForCausalLM",
            "Llama4TextConfig",
            num_local_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            intermediate_size_mlp=32,
            interleave_moe_layer_step=2,
        ),
        "jamba": _family(
            "JambaForCausalLM",
            "JambaConfig",
            num_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            use_mamba_kernels=False,
            mamba_d_state=4,
            mamba_dt_rank=4,
            attn_layer_period=2,
            attn_layer_offset=0,
        ),
        "lfm2_moe": _family(
            "Lfm2MoeForCausalLM",
            "Lfm2MoeConfig",
            "head_dim",
            **QWEN,
            num_dense_layers=1,
            layer_types=["conv", "full_attention", "conv", "full_attention"],
        ),
        "nemotron_h": _family(
            "NemotronHForCausalLM",
            "NemotronHConfig",
            "num_hidden_layers",
            **ROUTED,
            layers_block_type=["mamba", "moe", "attention", "moe"],
            moe_shared_expert_intermediate_size=16,
            mamba_num_heads=4,
            mamba_head_dim=16,
            n_groups=1,
            ssm_state_size=8,
            use_mamba_kernels=False,
        ),
        "longcat_flash": _family(
            "LongcatFlashForCausalLM",
            "LongcatFlashConfig",
            "head_dim",
            **LATENT,
            head_dim=8,
            num_hidden_layers=2 * LAYERS,
            num_layers=LAYERS,
            n_routed_experts=EXPERTS - 2,
            zero_expert_num=2,
            moe_topk=TOP_K,
            ffn_hidden_size=32,
            expert_ffn_hidden_size=16,
        ),
        "dbrx": lambda: (
            "DbrxForCausalLM",
            transformers.DbrxConfig(
                d_model=HIDDEN,
                n_heads=2,
                n_layers=LAYERS,
                max_seq_len=128,
                vocab_size=VOCABULARY,
                attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
                ffn_config={
                    "hidden_size": HIDDEN,
                    "ffn_hidden_size": 32,
                    "moe_num_experts": EXPERTS,
                    "moe_top_k": TOP_K,
                },
            ),
        ),
        "afmoe": _family("AfmoeForCausalLM", "AfmoeConfig", **QWEN, num_dense_layers=1),
        "exaone_moe": _family("ExaoneMoeForCausalLM", "ExaoneMoeConfig", **QWEN, first_k_dense_replace=1),
        "mellum": _family("MellumForCausalLM", "MellumConfig", **QWEN, mlp_layer_types=DENSE_FIRST),
        "solar_open": _family("SolarOpenForCausalLM", "SolarOpenConfig", **ROUTED),
        "laguna": _family("LagunaForCausalLM", "LagunaConfig", **QWEN, shared_expert_intermediate_size=16),
        "hy_v3": _family("HYV3ForCausalLM", "HYV3Config", **QWEN),
        "mistral4": _family("Mistral4ForCausalLM", "Mistral4Config", "head_dim", **latent, first_k_dense_replace=1),
        "cohere2_moe": _family("Cohere2MoeForCausalLM", "Cohere2MoeConfig", **QWEN, first_k_dense_replace=1),
        "aria": _family("AriaTextForCausalLM", "AriaTextConfig", moe_num_experts=EXPERTS, moe_topk=TOP_K),
        "gemma4": _family(
            "Gemma4ForCausalLM",
            "Gemma4TextConfig",
            enable_moe_block=True,
            num_experts=EXPERTS,
            top_k_experts=TOP_K,
            moe_intermediate_size=16,
            hidden_size_per_layer_input=0,
            global_head_dim=16,
        ),
    }


GROUPS = {"n_group": 4, "topk_group": 2}


def more_families() -> dict[str, Family]:
    """What the families above can also be set to, and models of which only a part is a language model."""
    latent = {**ROUTED, **LATENT, "head_dim": 8}
    return {
        "deepseek_v2, groups": _family(
            "DeepseekV2ForCausalLM",
            "DeepseekV2Config",
            **{**latent, **GROUPS},
            topk_method="group_limited_greedy",
            routed_scaling_factor=16.0,
            first_k_dense_replace=1,
        ),
        "deepseek_v3, groups": _family(
            "DeepseekV3ForCausalLM", "DeepseekV3Config", **{**latent, **GROUPS}, first_k_dense_replace=1
        ),
        "mistral4, groups": _family(
            "Mistral4ForCausalLM",
            "Mistral4Config",
            **{**latent, **GROUPS, "head_dim": 16},
            norm_topk_prob=True,
            first_k_dense_replace=1,
        ),
        "qwen3_moe, normalised": _family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **QWEN, norm_topk_prob=True),
        "cohere2_moe, sigmoid": _family(
            "Cohere2MoeForCausalLM",
            "Cohere2MoeConfig",
            **QWEN,
            expert_selection_fn="sigmoid",
            norm_topk_prob=True,
            first_k_dense_replace=1,
        ),
        "qwen3_omni_moe, with talker": lambda: (
            "Qwen3OmniMoeForConditionalGeneration",
            transformers.Qwen3OmniMoeConfig(
                thinker_config=families()["qwen3_omni_moe"]()[1].to_dict(),
                talker_config={
                    "text_config": {**SIZES, **QWEN, "mlp_only_layers": [], "shared_expert_intermediate_size": 16},
                    "code_predictor_config": SIZES,
                    "thinker_hidden_size": HIDDEN,
                    "num_code_groups": 2,
                    "spatial_merge_size": 2,
                },
                code2wav_config={
                    "hidden_size": 16,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 1,
                    "num_key_value_heads": 1,
                    "intermediate_size": 16,
                    "codebook_size": 8,
                    "num_quantizers": 1,
                    "decoder_dim": 16,
                },
            ),
        ),
        "deepseek_ocr2": _nested(
            "DeepseekOcr2ForConditionalGeneration",
            "DeepseekOcr2Config",
            {**ROUTED, "mlp_layer_types": DENSE_FIRST},
            vision_config={
                "sam_config": {
                    "hidden_size": 32,
                    "output_channels": 16,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "image_size": 64,
                    "mlp_dim": 32,
                    "downsample_channels": [16, 32],
                    "global_attn_indexes": [0],
                },
                "encoder_config": SIZES,
            },
        ),
        "openai_privacy_filter": _family(
            "OpenAIPrivacyFilterForTokenClassification", "OpenAIPrivacyFilterConfig", **LOCAL
        ),
        "ernie4_5_vl_moe": _nested(
            "Ernie4_5_VLMoeForConditionalGeneration",
            "Ernie4_5_VLMoeConfig",
            {
                "moe_num_experts": EXPERTS,
                "moe_k": TOP_K,
                "moe_intermediate_size": [16, 16],
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]},
            },
            vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "patch_size": 4},
        ),
        "doge": _family(
            "DogeForCausalLM", "DogeConfig", is_moe=True, num_experts=2 * EXPERTS, num_experts_per_tok=TOP_K
        ),
        "switch_transformers": lambda: (
            "SwitchTransformersForConditionalGeneration",
            transformers.SwitchTransformersConfig(
                vocab_size=VOCABULARY,
                d_model=HIDDEN,
                d_kv=16,
                d_ff=32,
                num_layers=2,
                num_heads=2,
                num_sparse_encoder_layers=1,
                num_sparse_decoder_layers=1,
                num_experts=EXPERTS,
            ),
        ),
        "nllb_moe": lambda: (
            "NllbMoeForConditionalGeneration",
            transformers.NllbMoeConfig(
                vocab_size=VOCABULARY,
                d_model=HIDDEN,
                encoder_layers=2,
                decoder_layers=2,
                encoder_ffn_dim=32,
                decoder_ffn_dim=32,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                num_experts=EXPERTS,
                encoder_sparse_step=1,
                decoder_sparse_step=1,
            ),
        ),
    }


if __name__ == "__main__":
    from moe_replay import table

    print(table())
