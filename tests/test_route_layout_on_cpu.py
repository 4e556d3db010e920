"""Experts as configurations name them: read right for every family that instantiates small, against its own modules."""

import json
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import transformers
from moe_families import EXPERTS, LAYERS, TOP_K, families

from verl_sat.router_replay.layout import MoELayout, NotMoEError

FAMILIES = families()
EXPERT_MODULE = re.compile(r"(?:layers|blocks)\.(\d+)\.(?:.*\.)?(?:experts|block_sparse_moe)$")


def layers_with_a_router(model):
    """From the module tree alone; a router that looks experts up by token id does not choose."""
    found = set()
    for name, module in model.named_modules():
        match = EXPERT_MODULE.search(name)
        if match and "vis" not in name:
            parent = model.get_submodule(name.rpartition(".")[0])
            if "Hash" not in type(getattr(parent, "gate", module)).__name__:
                found.add(int(match[1]))
    return tuple(sorted(found))


@pytest.mark.parametrize("family", FAMILIES)
def test_layout_is_that_of_the_modules(family):
    model_class, config = FAMILIES[family]()
    with torch.device("meta"):
        model = getattr(transformers, model_class)(config)
    layout = MoELayout.from_config(config)
    assert layout.moe_layers == layers_with_a_router(model) != ()
    assert (layout.num_experts, layout.top_k, layout.num_layers) == (EXPERTS, TOP_K, LAYERS)
    assert layout.model_type == config.model_type


def test_families_have_dense_layers_or_the_layers_above_show_little():
    dense = [name for name, make in FAMILIES.items() if len(MoELayout.from_config(make()[1]).moe_layers) < LAYERS]
    assert len(dense) >= 20 and len(FAMILIES) >= 40


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_configuration_reads_the_same(family, tmp_path):
    config = FAMILIES[family]()[1]
    layout = MoELayout.from_config(config)
    assert MoELayout.from_config(config.to_dict()) == layout
    config.save_pretrained(tmp_path)
    assert MoELayout.from_config(json.loads((tmp_path / "config.json").read_text())) == layout


def raw(**fields):
    return {"model_type": "any", "num_hidden_layers": 6, "num_experts": 8, "num_experts_per_tok": 2, **fields}


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, None),  # nothing says which
        ({"model_type": "mixtral"}, (0, 1, 2, 3, 4, 5)),
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 4]}, (1, 2, 3, 5)),
        ({"mlp_only_layers": [0]}, (1, 2, 3, 4, 5)),
        ({"first_k_dense_replace": 3}, (3, 4, 5)),
        ({"first_k_dense_replace": 0}, (0, 1, 2, 3, 4, 5)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 1}, (1, 2, 3, 4, 5)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4)),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, (1, 2, 4, 5)),
        ({"num_dense_layers": 2}, (2, 3, 4, 5)),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "dense", "hash_moe", "moe"]}, (1, 2, 5)),
        ({"mlp_layer_types": ["dense"] + ["sparse"] * 5, "first_k_dense_replace": 3}, (1, 2, 3, 4, 5)),
        ({"interleave_moe_layer_step": 2}, (1, 3, 5)),
        ({"moe_layers": [4, 1]}, (1, 4)),
        ({"moe_layers_enum": "4,5"}, (4, 5)),
        ({"layers_block_type": ["mamba", "moe", "attention", "moe", "mlp", "moe"]}, (1, 3, 5)),
        ({"layer_types": ["full_attention"] * 6, "first_k_dense_replace": 5}, (5,)),
        ({"hybrid_override_pattern": "MEM*-E"}, (1, 5)),
        ({"expert_layer_period": 3, "expert_layer_offset": 1}, (1, 4)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 2}, (1, 3, 5)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 1}, (1, 2, 3)),
        ({"num_hash_layers": 2}, (2, 3, 4, 5)),
    ],
)
def test_R01_the_layers_of_a_plain_config_json(fields, layers):
    assert MoELayout.from_config(raw(**fields)).moe_layers == layers


@pytest.mark.parametrize(
    ("fields", "experts", "top_k"),
    [
        ({"num_experts": 64, "moe_topk": [8] * 6}, 64, 8),  # per layer, the same
        ({"n_routed_experts": 256, "num_experts_per_token": 8, "n_shared_experts": 1}, 256, 8),
        ({"num_local_experts": 16, "num_experts_per_tok": 1}, 16, 1),
        ({"moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2}, 64, 6),
        ({"moe_num_experts": 48, "moe_top_k": 3}, 48, 3),
        ({"num_experts": 128, "top_k_experts": 8, "top_k": 50}, 128, 8),
        ({"num_experts": 128, "num_experts_per_tok": 8, "top_k": 50, "num_nextn_predict_layers": 1}, 128, 8),
        ({"n_routed_experts": 512, "zero_expert_num": 256, "moe_topk": 12}, 768, 12),
        ({"ffn_config": {"moe_num_experts": 16, "moe_top_k": 4}}, 16, 4),
    ],
)
def test_names_of_the_numbers(fields, experts, top_k):
    layout = MoELayout.from_config({"model_type": "any", "num_hidden_layers": 6, **fields})
    assert (layout.num_experts, layout.top_k, layout.num_layers) == (experts, top_k, 6)


@pytest.mark.parametrize(
    "path", [["text_config"], ["thinker_config", "text_config"], ["llm_config"], ["language_config"]]
)
def test_C06_experts_of_a_nested_text_model_are_found(path):
    config = {"model_type": "text", "num_hidden_layers": 3, "num_experts": 128, "num_experts_per_tok": 8}
    for name in reversed(path):
        config = {"model_type": "outer", name: config, "num_hidden_layers": 99, "vision_config": {"num_experts": 5}}
    config["talker_config"] = {"text_config": {"num_experts": 7, "num_experts_per_tok": 2, "num_hidden_layers": 2}}
    layout = MoELayout.from_config(config)
    assert (layout.num_experts, layout.top_k, layout.num_layers, layout.model_type) == (128, 8, 3, "outer")


def test_C06_a_whole_omni_model_is_read_for_its_thinker():
    config = transformers.Qwen3OmniMoeConfig(
        thinker_config={"text_config": {"num_experts": 64, "num_experts_per_tok": 4, "num_hidden_layers": 5}},
        talker_config={"text_config": {"num_experts": 32, "num_experts_per_tok": 2, "num_hidden_layers": 3}},
    )
    layout = MoELayout.from_config(config)
    assert (layout.num_experts, layout.top_k, layout.num_layers) == (64, 4, 5)


@pytest.mark.parametrize(
    "config",
    [
        transformers.Qwen3Config(),
        transformers.LlamaConfig(),
        transformers.Qwen3VLConfig(),
        transformers.Gemma4TextConfig(),
        {**raw(), "num_experts": 0},
        {**raw(), "num_experts": 1},
        {**raw(), "num_experts": None},
        raw(enable_moe_block=False),
        raw(is_moe=False),
        raw(first_k_dense_replace=6),
        raw(mlp_only_layers=list(range(6))),
        raw(interleave_moe_layer_step=0),
    ],
    ids=lambda config: getattr(config, "model_type", None) or json.dumps(config)[-50:],
)
def test_C06_a_dense_model_is_refused_at_once_and_by_name(config):
    begin = time.perf_counter()
    with pytest.raises(NotMoEError) as error:
        MoELayout.from_config(config)
    assert time.perf_counter() - begin < 1.0
    name = config["model_type"] if isinstance(config, dict) else config.model_type
    assert name in str(error.value) and ("num_experts" in str(error.value) or "layers" in str(error.value))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_experts_per_tok": None}, "num_experts_per_tok, num_experts_per_token"),
        ({"num_experts_per_tok": [2, 2, 4]}, r"differs between layers \(\[2, 4\]\)"),
        ({"num_experts": [8, 16]}, "differs between layers"),
        ({"num_experts_per_tok": 9}, "top-9 of 8"),
        ({"num_experts": 65536}, "65536 experts"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"mlp_layer_types": ["sparse"] * 5}, "5 entries for 6 layers"),
        ({"moe_layer_freq": [1] * 7}, "7 entries for 6 layers"),
        ({"moe_layers": [1, 6]}, r"\[0, 6\)"),
    ],
)
def test_what_cannot_be_recorded_is_refused(fields, says):
    with pytest.raises(ValueError, match=says) as error:
        MoELayout.from_config(raw(**fields))
    assert not isinstance(error.value, NotMoEError) and "any" in str(error.value)


def layout(experts=128, top_k=8, layers=48):
    return MoELayout(experts, top_k, layers, tuple(range(layers)), "any")


def test_R12_the_dtype_follows_from_the_number_of_experts():
    """255 experts leave one value of uint8 for "not recorded", 256 do not."""
    assert layout(experts=255).code_dtype == np.uint8
    assert layout(experts=256).code_dtype == np.uint16
    assert layout(experts=65535).code_dtype == np.uint16
    with pytest.raises(ValueError, match="65536"):
        layout(experts=65536)


def test_R25_bytes_of_a_token():
    assert layout().bytes_per_token == 48 * 8 == 384
    assert layout(experts=512, top_k=10).bytes_per_token == 48 * 10 * 2
    assert [layout(top_k=k).transport_width for k in (1, 2, 3, 8)] == [1, 1, 2, 4]
    assert [layout(experts=512, top_k=k).transport_width for k in (1, 2, 3)] == [1, 2, 3]


def test_layout_is_read_without_any_framework():
    code = (
        "import sys, verl_sat.router_replay.layout, verl_sat.router_replay.record, verl_sat.router_replay.engines; "
        "print({'torch', 'transformers', 'verl', 'sglang', 'vllm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr
