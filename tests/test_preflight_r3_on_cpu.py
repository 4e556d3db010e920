"""The driver's preflight on R3: verl's own YAML composed by Hydra, with the groups and overrides a user types.

Covers every rule of `verl_sat/preflight_r3*.py` in both directions, both config groups down to verl's dataclasses, and
jobs that ask for no replay, which none of it touches. Versions of engines that are not installed here are given to the
rules by name. Not covered: what can only be seen when a model is built or a batch arrives (the hook and the engine have
tests of their own).
"""

import functools
import importlib.metadata
import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
import verl
from hydra import compose, initialize_config_dir
from moe_families import families, more_families
from omegaconf import OmegaConf, open_dict
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import EngineRouterReplayConfig, FSDPEngineConfig, McoreEngineConfig

from verl_sat import _compat, preflight, preflight_r3, preflight_r3_job, preflight_rules
from verl_sat.router_replay.routers import UnsupportedRouterError, find_routers

VERL = Path(verl.__file__).parent
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
FLAG = f"{ROLLOUT}.enable_rollout_routing_replay"
FSDP_MODE = f"{ACTOR}.fsdp_config.router_replay.mode"
MEGATRON_MODE = f"{ACTOR}.megatron.router_replay.mode"
VEOMNI_MODE = f"{ACTOR}.veomni.router_replay.mode"
LOOK_ALIKE = f"{ACTOR}.router_replay.mode"
BYPASS = "algorithm.rollout_correction.bypass_mode"
LOAD_METRICS = f"{ROLLOUT}.moe_load_balance_metrics_interval"
PATH = "actor_rollout_ref.model.path"
KWARGS = f"{ROLLOUT}.engine_kwargs"
MTP = "actor_rollout_ref.model.mtp"
NAMES = {"fsdp": "ppo_trainer", "megatron": "ppo_megatron_trainer"}
FULLY_ASYNC = "fully_async_ppo_megatron_trainer"

DENSE = {"model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 64}
SPARSE = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2}
IMAGES = {"model_type": "qwen3_vl_moe", "text_config": SPARSE | {"num_experts": 128}, "vision_config": {"depth": 2}}


@functools.cache
def composed(name, *overrides):
    folder = "experimental/fully_async_policy/config" if name.startswith("fully_async") else "trainer/config"
    with initialize_config_dir(str(VERL / folder), version_base=None):
        return compose(
            name,
            overrides=[
                "hydra.searchpath=[pkg://verl.trainer.config,pkg://verl_sat.conf]",
                f"{ROLLOUT}.name=vllm",
                f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
                *overrides,
            ],
        )


def job(changes=None, *overrides, name="ppo_trainer"):
    config = composed(name, *overrides).copy()
    with open_dict(config):
        for key, value in (changes or {}).items():
            OmegaConf.update(config, key, value, force_add=True)
        if OmegaConf.select(config, "trainer.v1.trainer_mode", default=None) == "separate_async":
            # what verl asserts of such a job, and is not the subject here
            OmegaConf.update(config, f"{ROLLOUT}.nnodes", 1)
            OmegaConf.update(config, f"{ROLLOUT}.checkpoint_engine.backend", "nccl")
    return config


def r3(engine="fsdp", changes=None):
    """A job with a shipped group."""
    return job(changes, f"+r3={engine}", name=NAMES[engine])


def veomni(changes=None):
    return job({VEOMNI_MODE: "R3", FLAG: True, **(changes or {})}, name="_generated_ppo_veomni_trainer")


def keys(config, level):
    return [finding.key for finding in preflight.check(config) if finding.level == level]


def errors(config):
    return keys(config, "error")


def warnings(config):
    return keys(config, "warning")


def texts(config):
    return "\n".join(map(str, preflight.check(config)))


@pytest.fixture
def model(tmp_path):
    """Writes a `config.json` and returns its folder, as a path that is on this machine."""

    def write(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return write


@pytest.fixture
def versions(monkeypatch):
    """Sets what `importlib.metadata` says is installed, over what is."""
    real, given = importlib.metadata.version, {}

    def version(name):
        if name in given:
            return given[name]
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    return given


# --- off means off ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {LOAD_METRICS: 5, f"{ROLLOUT}.multi_turn.enable": True, f"{ROLLOUT}.disaggregation.enabled": True},
        {f"{KWARGS}.sglang.enable_hierarchical_cache": True, f"{ROLLOUT}.name": "trtllm"},
        {f"{MTP}.enable": True, f"{MTP}.enable_rollout": True, f"{MTP}.enable_train": True},
        {FSDP_MODE: "disabled", FLAG: False},
        {"trainer.v1.trainer_mode": "separate_async", "trainer.v1.separate_async.num_warmup_batches": 20},
    ],
)
@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer", "_generated_ppo_veomni_trainer", FULLY_ASYNC])
def test_a_job_that_asks_for_no_replay_is_left_alone(name, changes, model, caplog, capsys):
    config = job({PATH: model(DENSE), **changes}, name=name)
    assert preflight.check(config) == []
    preflight.run(config)
    assert not caplog.records and "R3" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["ppo_megatron_trainer", "_generated_ppo_veomni_trainer"])
def test_a_plain_r2_job_of_verls_is_left_alone(name):
    key = MEGATRON_MODE if "megatron" in name else VEOMNI_MODE
    assert preflight.check(job({key: "R2"}, name=name)) == []


def test_an_r3_job_with_another_loss_is_not_asked_about_sat():
    changes = {
        "trainer.v1.trainer_mode": "separate_async",
        "trainer.v1.separate_async.num_warmup_batches": 20,
        f"{ROLLOUT}.calculate_log_probs": False,
    }
    assert preflight.check(r3("fsdp", changes)) == []


@pytest.mark.parametrize("config", [{}, {"actor_rollout_ref": None}, {"trainer": {"v1": "sync"}}])
@pytest.mark.parametrize("asked", [{FLAG: True}, {FSDP_MODE: "R3"}, {f"{ACTOR}.strategy": "megatron", FLAG: True}])
def test_missing_keys_are_not_a_crash(config, asked, caplog):
    config = OmegaConf.create(config)
    for key, value in asked.items():
        OmegaConf.update(config, key, value, force_add=True)
    assert preflight.check(config)
    assert "could not be evaluated" not in caplog.text


@pytest.mark.parametrize("name", ["_generated_ppo_torchtitan_trainer", FULLY_ASYNC, *NAMES.values()])
def test_every_rule_can_be_evaluated(name, model, caplog):
    everything = {
        key: "R3" for key in (FSDP_MODE, MEGATRON_MODE, VEOMNI_MODE, f"{ACTOR}.torchtitan.router_replay.mode")
    }
    with caplog.at_level(logging.WARNING):
        assert preflight.check(job({FLAG: True, PATH: model(IMAGES), **everything}, name=name))
    assert "could not be evaluated" not in caplog.text


# --- the groups ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
@pytest.mark.parametrize("with_sat", [False, True])
def test_a_group_sets_both_keys_for_the_actor_alone(engine, with_sat, caplog, capsys):
    sat = {"trainer.v1.trainer_mode": "sync"}
    config = job(sat, *(["+sat=gspo"] if with_sat else []), f"+r3={engine}", name=NAMES[engine])
    found = preflight.check(config)
    assert [f for f in found if not (with_sat and "ppo_mini_batch_size" in f.key)] == []
    preflight.run(config)
    who = {"fsdp": "verl-sat's FSDP engine", "megatron": "verl's own megatron engine"}[engine]
    assert f"R3: routes of vllm replayed by {who}" in capsys.readouterr().out
    assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay is True
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor).engine
    assert type(actor) is {"fsdp": FSDPEngineConfig, "megatron": McoreEngineConfig}[engine]
    assert type(actor.router_replay) is EngineRouterReplayConfig and actor.router_replay.mode == "R3"
    others = {"fsdp": ("ref.fsdp_config", "critic.fsdp"), "megatron": ("ref.megatron", "critic.megatron")}[engine]
    for place in (f"actor_rollout_ref.{others[0]}", others[1]):
        assert omega_conf_to_dataclass(OmegaConf.select(config, place)).router_replay.mode == "disabled"


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_a_group_lists_every_key_of_verls_block_and_switches_off_without_a_plus(engine):
    block = FSDP_MODE if engine == "fsdp" else MEGATRON_MODE
    config = job({}, f"+r3={engine}", f"{block}=disabled", f"{FLAG}=False", name=NAMES[engine])
    assert preflight.check(config) == []
    fields = set(EngineRouterReplayConfig.__dataclass_fields__) - {"_target_", "extra"}
    assert fields <= set(OmegaConf.select(config, block.removesuffix(".mode")))
    path = Path(preflight_r3.__file__).parent / "conf/r3" / f"{engine}.yaml"
    lines = path.read_text().splitlines()
    assert lines[0] == "# @package _global_"  # else everything lands below a top-level key `r3`
    for number, line in enumerate(lines):
        if line.strip().split(":")[0] in {*fields, "enable_rollout_routing_replay"}:
            assert lines[number - 1].strip().startswith("#"), line


# --- the two keys -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_C05_R3_without_the_rollouts_flag_is_an_error_that_names_both_keys(engine):
    config = r3(engine, {FLAG: False})
    assert errors(config) == [FLAG]
    mode = FSDP_MODE if engine == "fsdp" else MEGATRON_MODE
    text = texts(config)
    assert f"{mode}=R3" in text and f"set {FLAG}=True, or {mode}=disabled" in text and f"+r3={engine}" in text


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("ppo_trainer", f"+{FSDP_MODE}"),
        ("ppo_megatron_trainer", MEGATRON_MODE),
        ("_generated_ppo_veomni_trainer", VEOMNI_MODE),
    ],
)
def test_C05_the_flag_without_R3_is_an_error_unless_the_routes_feed_metrics(name, mode):
    config = job({FLAG: True}, name=name)
    assert errors(config) == [FLAG] and f"set {mode}=R3, or {FLAG}=False" in texts(config)
    measured = job({FLAG: True, LOAD_METRICS: 1}, name=name)
    assert (errors(measured), warnings(measured)) == ([], [FLAG])
    assert LOAD_METRICS in texts(measured)


def test_C05_the_remedy_composes_as_it_is_printed():
    """A user copies it behind the command line."""
    remedy = [finding.remedy for finding in preflight.check(job({FLAG: True}))][0].split(",")[0]
    assert preflight.check(job({}, remedy, f"{FLAG}=True")) == []


@pytest.mark.parametrize("mode", ["R4", "r3", "record", True])
@pytest.mark.parametrize(("engine", "key"), [("fsdp", FSDP_MODE), ("megatron", MEGATRON_MODE)])
def test_a_mode_that_does_not_exist_is_an_error_with_its_key_and_the_modes(engine, key, mode):
    config = r3(engine, {key: mode})
    assert errors(config) == [key]
    allowed = "disabled or R3" if engine == "fsdp" else "disabled or R2 or R3"
    assert f"{mode!r} is no mode: expected {allowed} as spelt" in texts(config)
    assert texts(config).endswith(f"set {key}=R3")


def test_a_wrong_mode_without_the_dataclass_reaches_verls_FSDP_engine_unchecked():
    """Why the preflight looks: verl builds the configuration and is content."""
    config = job({}, f"+{FSDP_MODE}=R4", f"{FLAG}=True")
    assert omega_conf_to_dataclass(config.actor_rollout_ref.actor).engine.router_replay == {"mode": "R4"}
    assert errors(config) == [FSDP_MODE]


def test_a_wrong_mode_of_the_reference_is_found_too():
    key = "actor_rollout_ref.ref.megatron.router_replay.mode"
    config = job({key: "R4"}, name="ppo_megatron_trainer")
    assert errors(config) == [key] and f"set {key}=disabled" in texts(config)


def test_a_mode_in_the_place_of_its_block_is_an_error():
    key = FSDP_MODE.removesuffix(".mode")
    config = job({key: "R3"})
    assert errors(config) == [key] and "with the key `mode`" in texts(config)


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("ppo_trainer", MEGATRON_MODE, FSDP_MODE),
        ("ppo_trainer", VEOMNI_MODE, FSDP_MODE),
        ("ppo_megatron_trainer", FSDP_MODE, MEGATRON_MODE),
        ("_generated_ppo_veomni_trainer", MEGATRON_MODE, VEOMNI_MODE),
        ("ppo_trainer", LOOK_ALIKE, FSDP_MODE),
        ("ppo_megatron_trainer", LOOK_ALIKE, MEGATRON_MODE),
    ],
)
def test_a_mode_in_a_block_that_is_not_read_is_an_error_that_names_the_right_key(name, wrong, right):
    for flag in (True, False):
        config = job({wrong: "R3", FLAG: flag}, name=name)
        assert errors(config) == [wrong]
        assert f"The engine reads {right}" in texts(config) and f"{right}=R3 in its place" in texts(config)


@pytest.mark.parametrize("group", [("megatron", "ppo_trainer", "fsdp"), ("fsdp", "ppo_megatron_trainer", "megatron")])
def test_the_group_of_another_engine_is_refused_and_the_right_one_named(group):
    wrong, name, right = group
    config = job({}, f"+r3={wrong}", name=name)
    assert len(errors(config)) == 1 and f"+r3={right} sets both keys" in texts(config)
    with pytest.raises(Exception, match="unexpected keyword argument"):  # what the user would meet otherwise
        omega_conf_to_dataclass(config.actor_rollout_ref.actor)


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_the_look_alike_at_odds_with_the_engines_key_is_an_error(engine):
    config = r3(engine, {LOOK_ALIKE: "disabled"})
    assert errors(config) == [LOOK_ALIKE]
    assert (FSDP_MODE if engine == "fsdp" else MEGATRON_MODE) in texts(config)
    with pytest.raises(Exception, match="unexpected keyword argument 'router_replay'"):
        omega_conf_to_dataclass(config.actor_rollout_ref.actor)


@pytest.mark.parametrize("place", ["actor_rollout_ref.ref.megatron", "critic.megatron"])
def test_a_mode_of_another_role_has_no_effect_and_is_said(place):
    key = f"{place}.router_replay.mode"
    assert warnings(r3("megatron", {key: "R3"})) == [key]
    alone = job({key: "R3", FLAG: True}, name="ppo_megatron_trainer")
    assert key in errors(alone) and f"{MEGATRON_MODE}=R3" in texts(alone)


# --- R2 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_C05_R2_is_not_available_on_fsdp(strategy):
    config = job({FSDP_MODE: "R2", f"{ACTOR}.strategy": strategy})
    assert errors(config) == [FSDP_MODE] and f"R2 is not available with strategy {strategy}" in texts(config)


@pytest.mark.parametrize(
    ("name", "key"), [("ppo_megatron_trainer", MEGATRON_MODE), ("_generated_ppo_veomni_trainer", VEOMNI_MODE)]
)
def test_C05_R2_with_the_rollouts_flag_or_with_bypass_is_an_error(name, key):
    config = job({key: "R2", FLAG: True}, name=name)
    assert errors(config) == [FLAG] and f"{key}=R2" in texts(config)
    config = job({key: "R2", BYPASS: True}, name=name)
    assert errors(config) == [BYPASS] and f"{key}=R2" in texts(config)


def test_C05_R2_on_an_asynchronous_trainer_that_bypasses_by_default():
    assert errors(job({MEGATRON_MODE: "R2"}, name=FULLY_ASYNC)) == [BYPASS]


# --- who replays --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_R22_our_engine_replays_on_nvidia_and_the_cpu_only(strategy, monkeypatch):
    for device in ("cuda", "cpu"):
        monkeypatch.setenv("VERL_PLATFORM", device)
        assert errors(r3("fsdp", {f"{ACTOR}.strategy": strategy, "trainer.device": device})) == []
    config = r3("fsdp", {f"{ACTOR}.strategy": strategy, "trainer.device": "npu"})
    assert errors(config) == [FSDP_MODE] and "trainer.device=npu" in texts(config) and "ignores it" in texts(config)
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "amd")
    assert errors(r3("fsdp", {f"{ACTOR}.strategy": strategy})) == [FSDP_MODE]


def test_R22_strategies_without_replay_are_refused_by_name():
    config = r3("fsdp", {f"{ACTOR}.strategy": "fsdp_turbo"})
    assert errors(config) == [f"{ACTOR}.strategy"]
    assert "fsdp_turbo accepts" in texts(config) and f"{ACTOR}.strategy=fsdp2" in texts(config)
    key = f"{ACTOR}.torchtitan.router_replay.mode"
    config = job({key: "R3", FLAG: True}, name="_generated_ppo_torchtitan_trainer")
    assert errors(config) == [f"{ACTOR}.strategy"] and f"{key}=R3" in texts(config)


def test_R22_a_plugin_that_is_not_everywhere_would_replay_nothing(monkeypatch):
    monkeypatch.setattr(preflight_rules, "_entry_point_is_used", lambda: False)
    assert warnings(r3("fsdp")) == [FSDP_MODE]
    several = r3("fsdp", {"trainer.nnodes": 2})
    assert errors(several) == [FSDP_MODE] and "VERL_USE_EXTERNAL_MODULES=verl_sat.plugin" in texts(several)
    told = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES"
    assert preflight.check(r3("fsdp", {"trainer.nnodes": 2, told: "verl_sat.plugin"})) == []
    assert preflight.check(r3("megatron", {"trainer.nnodes": 2})) == []  # verl's own replay needs no plugin


def test_R22_a_plugin_that_could_not_be_loaded_is_an_error(monkeypatch):
    monkeypatch.setattr(_compat, "FAILURES", ["verl 0.10 is not supported"])
    assert errors(r3("fsdp")) == [FSDP_MODE] and "verl 0.10 is not supported" in texts(r3("fsdp"))
    assert errors(r3("megatron")) == []


def test_verls_load_metrics_would_read_codes():
    assert errors(r3("fsdp", {LOAD_METRICS: 10})) == [LOAD_METRICS]
    assert errors(r3("fsdp", {LOAD_METRICS: 0})) == errors(r3("megatron", {LOAD_METRICS: 10})) == []


# --- the model ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_C06_R3_on_a_dense_model_is_an_error_within_a_second(engine, model):
    config = r3(engine, {PATH: model(DENSE)})
    start = time.perf_counter()
    found = errors(config)
    assert time.perf_counter() - start < 1
    assert found == [PATH]
    text = texts(config)
    assert (
        "qwen3 has no experts" in text and FLAG in text and (FSDP_MODE if engine == "fsdp" else MEGATRON_MODE) in text
    )


@pytest.mark.parametrize("config", [SPARSE, IMAGES])
def test_C06_experts_are_found_in_nested_configurations_too(config, model):
    assert preflight.check(r3("fsdp", {PATH: model(config)})) == []


def test_C06_the_path_of_the_configuration_counts_before_that_of_the_weights(model):
    key = "actor_rollout_ref.model.hf_config_path"
    assert errors(r3("fsdp", {PATH: "somebody/model", key: model(DENSE)})) == [key]


@pytest.mark.parametrize("path", ["somebody/model", "hdfs://there/model", "~/models/x", None])
def test_C06_a_model_that_is_not_here_is_not_judged(path, caplog):
    assert preflight.check(r3("fsdp", {PATH: path})) == []
    assert not caplog.records


def test_C06_experts_that_cannot_be_recorded_are_an_error_where_we_record(model):
    uneven = {**SPARSE, "num_experts_per_tok": [1, 2, 2, 2]}
    assert errors(r3("fsdp", {PATH: model(uneven)})) == [PATH]
    assert "differs between layers" in texts(r3("fsdp", {PATH: model(uneven)}))
    assert errors(r3("megatron", {PATH: model(uneven)})) == []


def test_R24_the_model_types_that_are_refused_are_those_that_the_hook_refuses(model):
    """Both lists name each other: a family that becomes possible has to leave the list."""
    refused = set()
    for make in {**families(), **more_families()}.values():
        model_class, config = make()
        with torch.device("meta"):
            built = getattr(transformers, model_class)(config)
        try:
            find_routers(built)
        except UnsupportedRouterError:
            refused.add(config.model_type)
    encoder_decoders = {"switch_transformers", "nllb-moe"}  # verl trains none
    assert refused - encoder_decoders == set(preflight_r3.REFUSED_MODELS)


@pytest.mark.parametrize("model_type", preflight_r3.REFUSED_MODELS)
def test_R24_a_model_whose_routers_cannot_be_forced_is_refused_by_name(model_type, model):
    config = {**SPARSE, "model_type": model_type}
    assert errors(r3("fsdp", {PATH: model(config)})) == [PATH]
    assert model_type in texts(r3("fsdp", {PATH: model(config)}))
    assert errors(r3("megatron", {PATH: model(config)})) == []


def test_R18_images_and_ulysses_together_are_refused(model):
    for key in (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", f"{ACTOR}.ulysses_sequence_parallel_size"):
        config = r3("fsdp", {PATH: model(IMAGES), key: 2})
        assert errors(config) == [key] and "vision_config" in texts(config)
        assert preflight.check(r3("fsdp", {PATH: model(SPARSE), key: 2})) == []
    assert preflight.check(r3("fsdp", {PATH: model(IMAGES)})) == []


# --- the rollout engine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
@pytest.mark.parametrize(
    ("name", "version", "level", "says"),
    [
        ("vllm", "0.21.0", "error", ">= 0.22"),
        ("vllm", "0.21.2rc1", "error", ">= 0.22"),
        ("vllm", "0.30.0", None, ""),
        ("vllm", "0.24.0", "warning", "0.24.0"),
        ("vllm", None, None, ""),
        ("sglang", "0.5.11", "error", ">= 0.5.12"),
        ("sglang", "0.5.12", None, ""),
        ("sglang", "0.5.23", None, ""),
        ("sglang", "0.5.18", "warning", "0.5.18"),
        ("sglang", None, None, ""),
        ("hf", None, None, ""),
        ("trtllm", None, "error", "rollout engine 'trtllm'"),
    ],
)
def test_C07_engines_and_versions_that_return_no_routes(engine, name, version, level, says, versions):
    if version is not None:
        versions[name] = version
    config = r3(engine, {f"{ROLLOUT}.name": name})
    assert [(f.level, f.key) for f in preflight.check(config)] == ([(level, f"{ROLLOUT}.name")] if level else [])
    assert says in texts(config)


@pytest.mark.parametrize(
    ("name", "key", "value", "level"),
    [
        ("sglang", f"{ROLLOUT}.disaggregation.enabled", True, "error"),
        ("vllm", f"{ROLLOUT}.disaggregation.enabled", True, "error"),
        ("vllm", f"{KWARGS}.vllm.kv_transfer_config", {"kv_connector": "NixlConnector"}, "error"),
        ("vllm", f"{KWARGS}.vllm.kv_offloading_size", 16, "error"),
        ("sglang", f"{KWARGS}.sglang.disaggregation_mode", "decode", "error"),
        ("sglang", f"{KWARGS}.sglang.enable_hierarchical_cache", True, "warning"),
        ("sglang", f"{KWARGS}.sglang.enable_lmcache", True, "warning"),
        ("vllm", f"{KWARGS}.vllm.moe_backend", "flashinfer_trtllm", "warning"),
        ("sglang", f"{KWARGS}.sglang.moe_runner_backend", "flashinfer_trtllm", "warning"),
        # without a meaning for the engine that runs, or harmless
        ("sglang", f"{KWARGS}.vllm.kv_transfer_config", {"kv_connector": "NixlConnector"}, None),
        ("vllm", f"{KWARGS}.sglang.enable_hierarchical_cache", True, None),
        ("sglang", f"{KWARGS}.sglang.disaggregation_mode", "null", None),
        ("sglang", f"{KWARGS}.sglang.moe_runner_backend", "triton", None),
        ("vllm", f"{ROLLOUT}.enable_prefix_caching", True, None),  # verl empties it with every weight update
        ("vllm", f"{ROLLOUT}.enforce_eager", False, None),
    ],
)
def test_C07_settings_of_the_engine_that_spoil_routes(name, key, value, level):
    config = r3("fsdp", {f"{ROLLOUT}.name": name, key: value})
    assert [(f.level, f.key) for f in preflight.check(config)] == ([(level, key)] if level else [])


@pytest.mark.parametrize(
    ("name", "version", "level"),
    [
        ("sglang", "0.5.12", "error"),
        ("sglang", "0.5.23", None),
        ("sglang", None, "warning"),
        ("vllm", "0.22.0", "error"),
        ("vllm", "0.30.0", None),
        ("vllm", None, "warning"),
        ("hf", None, None),
    ],
)
def test_R27_a_draft_model_that_may_write_over_the_routes(name, version, level, versions):
    if version is not None:
        versions[name] = version
    key = f"{MTP}.enable_rollout"
    config = r3("fsdp", {f"{ROLLOUT}.name": name, f"{MTP}.enable": True, key: True})
    assert [f.level for f in preflight.check(config) if f.key == key] == ([level] if level else [])
    assert key not in errors(r3("fsdp", {f"{ROLLOUT}.name": name, key: True}))  # MTP as a whole is off


@pytest.mark.parametrize(
    ("name", "option", "value", "found"),
    [
        ("sglang", "speculative_algorithm", "EAGLE", True),
        ("sglang", "speculative_algorithm", "NGRAM", False),
        ("vllm", "speculative_config", {"method": "mtp", "num_speculative_tokens": 1}, True),
        ("vllm", "speculative_config", {"method": "ngram", "num_speculative_tokens": 4}, False),
    ],
)
def test_R27_a_draft_model_of_the_engines_own_settings(name, option, value, found):
    key = f"{KWARGS}.{name}.{option}"
    assert warnings(r3("fsdp", {f"{ROLLOUT}.name": name, key: value})) == ([key] if found else [])


# --- where verl replays -------------------------------------------------------------------------------------------

OVERRIDES = f"{ACTOR}.megatron.override_transformer_config"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({f"{OVERRIDES}.moe_router_fusion": True}, f"{OVERRIDES}.moe_router_fusion"),
        ({f"{OVERRIDES}.moe_router_fusion": False}, None),
        ({"actor_rollout_ref.model.use_remove_padding": False}, "actor_rollout_ref.model.use_remove_padding"),
        ({f"{ACTOR}.megatron.use_remove_padding": False}, None),  # the worker overwrites it with the model's
        ({f"{ACTOR}.megatron.pad_to_length": True}, f"{ACTOR}.megatron.pad_to_length"),
        (
            {f"{ACTOR}.megatron.sequence_parallel": False, f"{ACTOR}.megatron.tensor_model_parallel_size": 2},
            f"{ACTOR}.megatron.sequence_parallel",
        ),
        ({f"{ACTOR}.megatron.sequence_parallel": False}, None),
        ({f"{ACTOR}.megatron.tensor_model_parallel_size": 2}, None),
    ],
)
def test_C07_megatron_settings_under_which_verls_replay_goes_wrong(changes, key):
    config = r3("megatron", changes)
    assert errors(config) == ([] if key is None else [key])
    assert key is None or f"set {key}=" in texts(config)
    assert preflight.check(r3("megatron", {**changes, MEGATRON_MODE: "disabled", FLAG: False})) == []


def test_C07_padded_tokens_on_veomni_and_on_fsdp():
    key = "actor_rollout_ref.model.use_remove_padding"
    assert errors(veomni({key: False})) == [key]
    assert errors(veomni()) == errors(r3("fsdp", {key: False})) == []


def test_R03_multi_token_prediction_in_training(model):
    key = f"{MTP}.enable_train"
    on = {f"{MTP}.enable": True, key: True}
    assert (errors(r3("megatron", on)), warnings(r3("megatron", on))) == ([], [key])
    assert errors(r3("megatron", {**on, PATH: model(IMAGES)})) == [key]
    assert preflight.check(r3("megatron", {key: True})) == preflight.check(r3("fsdp", on)) == []


@pytest.mark.parametrize(
    ("version", "config", "changes", "found"),
    [
        ("0.18.0", {**SPARSE, "scoring_func": "sigmoid"}, {}, True),
        ("0.18.0rc3", {**SPARSE, "model_type": "deepseek_v3"}, {}, True),
        ("0.18.0", {"text_config": {**SPARSE, "scoring_func": "sigmoid"}, "model_type": "kimi_vl"}, {}, True),
        ("0.17.2", {**SPARSE, "scoring_func": "sigmoid"}, {}, False),
        ("0.18.0", SPARSE, {}, False),
        ("0.18.0", {**SPARSE, "scoring_func": "sigmoid"}, {f"{OVERRIDES}.moe_router_dtype": "fp32"}, False),
        (None, {**SPARSE, "scoring_func": "sigmoid"}, {}, False),
    ],
)
def test_sigmoid_routers_under_verls_patch_of_a_newer_megatron(version, config, changes, found, versions, model):
    if version is not None:
        versions["megatron-core"] = version
    key = f"{OVERRIDES}.moe_router_dtype"
    job_ = r3("megatron", {PATH: model(config), **changes})
    assert warnings(job_) == ([key] if found else [])
    assert not found or f"set +{key}=fp32" in texts(job_)


@pytest.mark.parametrize("make", [functools.partial(r3, "megatron"), veomni])
def test_R06_R07_R09_rows_without_routes_are_named_where_nothing_counts_them(make):
    turns, mode = f"{ROLLOUT}.multi_turn.enable", "trainer.v1.trainer_mode"
    assert preflight.check(make()) == []
    assert warnings(make({turns: True})) == [turns] and "expert 0" in texts(make({turns: True}))
    for trainer in ("separate_async", "colocate_async"):
        assert warnings(make({mode: trainer})) == [mode]
    assert preflight.check(r3("fsdp", {turns: True, mode: "separate_async"})) == []


def test_R09_partial_rollouts_of_the_fully_asynchronous_trainer():
    key, on = "async_training.partial_rollout", {MEGATRON_MODE: "R3", FLAG: True}
    assert warnings(job(on, name=FULLY_ASYNC)) == [key]
    assert warnings(job({**on, key: False}, name=FULLY_ASYNC)) == []


# --- as a user meets it -------------------------------------------------------------------------------------------


@pytest.mark.long
def test_R22_the_command_stops_with_both_keys_and_no_traceback():
    command = [
        sys.executable, "-m", "verl.trainer.main_ppo", "hydra.searchpath=[pkg://verl_sat.conf]", "+r3=fsdp",
        f"{ROLLOUT}.name=vllm", f"{FLAG}=False", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "this job was not started (1 error in its configuration)" in said
    assert f"error: {FLAG}: {FSDP_MODE}=R3" in said and "Traceback" not in said


def test_a_mode_by_interpolation_is_resolved():
    config = job({FSDP_MODE: "${trainer.my_mode}", "trainer.my_mode": "R3"})
    assert preflight_r3_job.asks_for_replay(preflight.Job.read(config))
    assert errors(config) == [FLAG]
