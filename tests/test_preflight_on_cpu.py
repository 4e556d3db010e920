"""The driver's preflight, on real configurations: verl's own YAML composed by Hydra, with the overrides a user types.

Covers every rule of `verl_sat/preflight.py` in both directions (found, and not found where it must not be), all trainer
configurations that verl ships, and what a user sees on the command line. Not covered here: the option values themselves
(`verl_sat/config.py` has its own tests), only that all wrong ones are reported at once.
"""

import copy
import functools
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict
from verl.trainer.ppo import core_algos
from verl.utils import config as verl_config

from verl_sat import _compat, preflight, preflight_rules

VERL = Path(verl.__file__).parent
SHIPPED = {
    "ppo_trainer": VERL / "trainer/config",
    "ppo_megatron_trainer": VERL / "trainer/config",
    "_generated_ppo_trainer": VERL / "trainer/config",
    "_generated_ppo_megatron_trainer": VERL / "trainer/config",
    "_generated_ppo_veomni_trainer": VERL / "trainer/config",
    "_generated_ppo_torchtitan_trainer": VERL / "trainer/config",
    "fully_async_ppo_trainer": VERL / "experimental/fully_async_policy/config",
    "fully_async_ppo_megatron_trainer": VERL / "experimental/fully_async_policy/config",
    "one_step_off_ppo_trainer": VERL / "experimental/one_step_off_policy/config",
    "one_step_off_ppo_megatron_trainer": VERL / "experimental/one_step_off_policy/config",
}
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
SAT = "actor_rollout_ref.actor.policy_loss.sat"
BYPASS = "algorithm.rollout_correction.bypass_mode"
# A V1 asynchronous job at lag 1 (K=1, W=1), one mini-batch a step.
CYCLE, MINI, BATCH = (
    "trainer.v1.separate_async.parameter_sync_step",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "data.train_batch_size",
)
LAG_1 = {
    "trainer.v1.trainer_mode": "separate_async",
    "trainer.v1.separate_async.parameter_sync_step": 1,
    "data.train_batch_size": 32,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
}


@functools.cache
def _composed(name, overrides):
    with initialize_config_dir(str(SHIPPED[name]), version_base=None):
        return compose(
            name,
            overrides=[
                "hydra.searchpath=[pkg://verl.trainer.config,pkg://verl_sat.conf]",
                "actor_rollout_ref.rollout.name=vllm",
                *overrides,
            ],
        )


def job(*overrides, name="ppo_trainer", **changes):
    """A composed configuration. ``overrides`` go through Hydra; ``changes`` (dots as ``__``) are set afterwards."""
    config = copy.deepcopy(_composed(name, overrides))
    return changed(config, {key.replace("__", "."): value for key, value in changes.items()})


def changed(config, changes):
    with open_dict(config):
        for key, value in changes.items():
            OmegaConf.update(config, key, value, force_add=True)
        _complete(config, changes)
    return config


def _complete(config, changes):
    if OmegaConf.select(config, "trainer.v1.trainer_mode", default=None) == "separate_async":
        # what verl asserts of such a job, where a test says nothing of it
        rollout = "actor_rollout_ref.rollout"
        cycle, mini = OmegaConf.select(config, CYCLE), OmegaConf.select(config, MINI)
        batch = cycle * mini if isinstance(cycle, int) and isinstance(mini, int) else None
        for key, value in {
            f"{rollout}.nnodes": 1,
            f"{rollout}.checkpoint_engine.backend": "nccl",
            BATCH: batch,
        }.items():
            if value is not None and (key not in changes or changes.get(key) == LAG_1.get(key)):
                OmegaConf.update(config, key, value, force_add=True)


def async_job(loss="grpo", changes=None):
    """A V1 asynchronous job at lag 1 with a shipped group."""
    return changed(job(f"+sat={loss}"), {**LAG_1, **(changes or {})})


def keys(config, level):
    return [finding.key for finding in preflight.check(config) if finding.level == level]


def errors(config):
    return keys(config, "error")


def warnings(config):
    return keys(config, "warning")


def texts(config):
    return "\n".join(map(str, preflight.check(config)))


# --- off means off, and never a crash ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_nothing_is_said_about_a_configuration_of_verls_own(name, caplog):
    config = job(name=name)
    before = OmegaConf.to_yaml(config)
    assert preflight.check(config) == []
    preflight.run(config)
    assert not caplog.records
    assert OmegaConf.to_yaml(config) == before


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
@pytest.mark.parametrize("name", SHIPPED)
def test_every_rule_can_be_evaluated_on_every_shipped_trainer(name, loss, caplog):
    config = changed(
        job(name=name),
        {LOSS_MODE: f"sat_{loss}", f"{SAT}.quantile": 0.8, "actor_rollout_ref.rollout.temperature": 0.7},
    )
    with caplog.at_level(logging.WARNING):
        assert preflight.check(config)  # the sat block on the stock class is wrong everywhere
    assert "could not be evaluated" not in caplog.text


@pytest.mark.parametrize("config", [{}, {"actor_rollout_ref": None}, {"trainer": {"v1": "sync"}}])
def test_missing_keys_are_not_a_crash(config, caplog):
    assert preflight.check(config) == []
    config = changed(OmegaConf.create(config), {LOSS_MODE: "sat_grpo"})
    preflight.check(config)
    assert "could not be evaluated" not in caplog.text


def test_a_rule_that_breaks_is_said_once_and_stops_nothing(monkeypatch, caplog):
    def broken(job):
        raise KeyError("surprise")

    monkeypatch.setattr(preflight, "RULES", (broken, preflight_rules._gspo_aggregation))
    config = async_job("gspo", {"actor_rollout_ref.actor.loss_agg_mode": "token-mean"})
    preflight.run(config)
    preflight.run(config)
    assert caplog.text.count("preflight rule broken could not be evaluated: KeyError") == 1
    assert caplog.text.count("does not weigh responses equally") == 1


def test_foreign_losses_and_samplers_are_none_of_our_business():
    config = job(
        actor_rollout_ref__actor__policy_loss__loss_mode="gspo",
        actor_rollout_ref__actor__policy_loss__q=1,
        trainer__v1__sampler__custom_sampler__path="pkg://somebody.sampler",
        trainer__v1__sampler__custom_sampler__name="Theirs",
        algorithm__filter_groups__enable=True,
        algorithm__rollout_correction__bypass_mode=True,
        actor_rollout_ref__rollout__calculate_log_probs=False,
    )
    assert preflight.check(config) == []


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_C01_the_shipped_group_has_no_findings_and_reaches_the_dataclass(loss, caplog, capsys):
    config = async_job(loss)
    assert preflight.check(config) == []
    preflight.run(config)
    assert not caplog.records
    assert f"loss sat_{loss}" in capsys.readouterr().out
    policy_loss = verl_config.omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)
    assert type(policy_loss).__name__ == "SATPolicyLossConfig"
    assert core_algos.get_policy_loss_fn(policy_loss.loss_mode).__module__ == "verl_sat.policy_loss"


def test_one_flag_alone_is_enough():
    assert preflight.check(changed(job(), {**LAG_1, LOSS_MODE: "sat_gspo", BYPASS: True, **GSPO_AGG})) == []


GSPO_AGG = {"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean"}


# --- the loss and its block --------------------------------------------------------------------------------------


def test_C01_every_wrong_option_is_an_error_with_its_full_key():
    config = async_job(changes={f"{SAT}.quantile": 1.5, f"{SAT}.kernel": "hil", f"{SAT}.exponnent": 3})
    assert errors(config) == [f"{SAT}.quantile", f"{SAT}.kernel", f"{SAT}.exponnent"]
    lines = texts(config).splitlines()
    assert lines[0].startswith(f"error: {SAT}.quantile: 1.5 ") and lines[0].endswith(f"; set {SAT}.quantile=0.9")
    assert "did you mean 'hill'" in lines[1] and "did you mean 'exponent'" in lines[2]


@pytest.mark.parametrize("name", ["sat_grop", "sat-gspo", "SAT_GRPO", "satgspo", "sat_dapo"])
def test_P06_an_unknown_sat_loss_fails_in_the_driver(name):
    config = async_job(changes={LOSS_MODE: name})
    assert errors(config) == [LOSS_MODE]
    assert "did you mean 'sat_g" in texts(config)


@pytest.mark.parametrize("name", ["vanilla", "gspo", "sapo", "bypass_mode"])
def test_a_block_that_no_loss_reads_is_an_error(name):
    assert errors(async_job(changes={LOSS_MODE: name})) == [LOSS_MODE]
    assert errors(async_job(changes={LOSS_MODE: name, SAT: None})) == []


def test_the_stock_class_with_a_block_is_an_error_that_names_the_group_and_the_class():
    config = changed(job(), {**LAG_1, LOSS_MODE: "sat_grpo", BYPASS: True, f"{SAT}.quantile": 0.8})
    target = "actor_rollout_ref.actor.policy_loss._target_"
    assert errors(config) == [target]
    assert f"{target}=verl_sat.config.SATPolicyLossConfig" in texts(config) and "+sat=grpo" in texts(config)
    with pytest.raises(Exception, match="unexpected keyword argument 'sat'"):  # what the user would meet otherwise
        verl_config.omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)
    assert errors(changed(config, {target: "verl_sat.config.SATPolicyLossConfig"})) == []


@pytest.mark.parametrize("key", ["sat", "r3"])
def test_C01_a_group_that_landed_at_the_top_level_is_an_error(key):
    config = changed(job(), {key: {"actor_rollout_ref": {"actor": {}}}})
    assert errors(config) == [key] and "@package _global_" in texts(config)


@pytest.mark.parametrize("key", ["actor_rollout_ref.actor.sat", "actor_rollout_ref.sat", "algorithm.sat"])
def test_a_block_in_the_wrong_place_is_an_error(key):
    config = changed(job(), {f"{key}.quantile": 0.8, f"{key}.q": None})
    assert errors(config) == [key]
    assert texts(config).endswith(f"set +{SAT}.quantile=0.8 +{SAT}.q=null")


def test_an_option_one_level_too_high_is_an_error():
    config = async_job(changes={"actor_rollout_ref.actor.policy_loss.quantile": 0.8})
    assert errors(config) == ["actor_rollout_ref.actor.policy_loss.quantile"]
    assert f"set +{SAT}.quantile=0.8" in texts(config)


# --- the denominator ---------------------------------------------------------------------------------------------


def test_C03_bypass_keeps_the_loss_on_v1_and_is_refused_on_the_legacy_trainers():
    assert errors(async_job()) == []
    assert errors(async_job(changes={"trainer.use_v1": False})) == [BYPASS]
    for name in ("fully_async_ppo_trainer", "one_step_off_ppo_trainer"):  # both have bypass_mode=True in their YAML
        config = job(name=name, actor_rollout_ref__actor__policy_loss__loss_mode="sat_grpo")
        assert BYPASS in errors(config)
        assert "trainer.v1.trainer_mode=separate_async" in texts(config)


@pytest.mark.parametrize("loss", ["sat_grpo", "sat_gspo"])
def test_C03_the_rewrite_itself_is_refused_where_no_preflight_ran(loss):
    import torch
    from verl import DataProto
    from verl.trainer.ppo import rollout_corr_helper

    def batch():
        return DataProto.from_dict({"rollout_log_probs": torch.zeros(1, 2)})

    policy_loss = OmegaConf.create({"loss_mode": loss})
    with pytest.raises(preflight.SATPreflightError, match=loss):
        rollout_corr_helper.apply_bypass_mode(batch(), None, policy_loss)
    assert policy_loss.loss_mode == loss
    plain = OmegaConf.create({"loss_mode": "vanilla"})
    data = batch()
    rollout_corr_helper.apply_bypass_mode(batch=data, rollout_corr_config=None, policy_loss_config=plain)
    assert plain.loss_mode == "bypass_mode" and "old_log_probs" in data.batch


def test_A13_log_probs_are_demanded_exactly_where_they_are_needed():
    key = "actor_rollout_ref.rollout.calculate_log_probs"
    assert errors(async_job(changes={key: False})) == [key]
    decoupled = {key: False, BYPASS: False, "trainer.v1.separate_async.parameter_sync_step": 4}
    decoupled["data.train_batch_size"] = 128
    assert errors(async_job(changes=decoupled)) == []
    assert errors(async_job(changes={**decoupled, "algorithm.rollout_correction.rollout_is": "token"})) == [key]
    assert errors(job(**{key.replace(".", "__"): False})) == []  # SAT off: no demand


@pytest.mark.parametrize("key", ["rollout_is", "rollout_rs"])
def test_L13_both_corrections_at_once_are_an_error_that_says_what_happens(key):
    key = f"algorithm.rollout_correction.{key}"
    config = async_job(changes={key: "token"})
    assert errors(config) == [key]
    assert "V1 trainer ignores" in texts(config) and f"set {key}=null" in texts(config)


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({}, "error"),
        ({"trainer.v1.trainer_mode": "colocate_async"}, "error"),
        # colocate_async recomputes pi_old with the current weights in every sub-step, so K does not help
        (
            {
                "trainer.v1.trainer_mode": "colocate_async",
                "trainer.v1.colocate_async.parameter_sync_step": 4,
                "data.train_batch_size": 128,
            },
            "error",
        ),
        ({"trainer.v1.trainer_mode": "sync"}, "warning"),
        ({"trainer.v1.trainer_mode": "sync", "trainer.use_v1": False}, "warning"),
        ({"actor_rollout_ref.actor.ppo_epochs": 2}, None),
        ({"trainer.v1.separate_async.parameter_sync_step": 4, "data.train_batch_size": 128}, None),
        ({"trainer.v1.trainer_mode": "sync", "data.train_batch_size": 64}, None),
        ({"trainer.v1.trainer_mode": "colocate_async", "data.train_batch_size": 64}, None),
    ],
)
def test_L14_a_ratio_that_is_always_one_stops_an_asynchronous_job(changes, level):
    config = async_job(changes={BYPASS: False, **changes})
    found = [f for f in preflight.check(config) if "every ratio is 1" in f.message]
    assert [f.level for f in found] == ([level] if level else [])
    if found:
        assert found[0].key == BYPASS and f"{BYPASS}=True" in found[0].remedy


def test_L14_a_ratio_that_is_always_one_on_fully_async():
    plain = {LOSS_MODE: "sat_grpo", BYPASS: False}
    config = changed(job(name="fully_async_ppo_trainer"), plain)
    assert errors(config) == []  # four mini-batches share pi_old by default
    config = changed(config, {"async_training.trigger_parameter_sync_step": 1})
    assert errors(config) == [BYPASS] and "trigger_parameter_sync_step=4" in texts(config)


def test_L14_without_contraction_there_is_no_noise_to_gate():
    for changes in ({f"{SAT}.kernel": "none"}, {f"{SAT}.quantile": 1.0}):
        assert errors(async_job(changes={BYPASS: False, **changes})) == []
        assert warnings(async_job(changes={BYPASS: False, **changes})) == [BYPASS]
        assert warnings(async_job(changes={BYPASS: False, "trainer.v1.trainer_mode": "sync", **changes})) == []


def test_L14_decoupled_asynchronous_training_is_told_what_d_misses():
    changes = {BYPASS: False, "trainer.v1.separate_async.parameter_sync_step": 4, "data.train_batch_size": 128}
    config = async_job(changes=changes)
    assert (errors(config), warnings(config)) == ([], [BYPASS])
    assert "mismatch of engine and routing are not in it (nothing corrects for it)" in texts(config)
    corrected = async_job(changes={**changes, "algorithm.rollout_correction.rollout_is": "token"})
    assert "importance weights correct for it" in texts(corrected)


def test_A15_a_snapshot_that_is_never_used_is_named():
    key = "trainer.v1.separate_async.parameter_sync_step"
    config = async_job(changes={BYPASS: False, "actor_rollout_ref.actor.ppo_epochs": 2})
    assert key in warnings(config) and f"set {BYPASS}=True" in texts(config)
    more = {BYPASS: False, key: 4, "data.train_batch_size": 128}
    assert key not in warnings(async_job(changes=more))
    assert warnings(async_job()) == []


ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"temperature": 0.7}, []),  # processed_logprobs are taken after the temperature
        ({"temperature": 0.7, "logprobs_mode": "raw_logprobs"}, ["logprobs_mode"]),
        ({"logprobs_mode": "raw_logprobs"}, []),
        ({"logprobs_mode": "processed_logits"}, ["logprobs_mode"]),
        # engine_kwargs win over the key of verl
        (
            {"temperature": 0.7, "engine_kwargs.vllm.logprobs_mode": "raw_logprobs"},
            ["engine_kwargs.vllm.logprobs_mode"],
        ),
        ({"temperature": 0.7, "name": "sglang", "logprobs_mode": "raw_logprobs"}, []),  # sglang does not read it
        ({"temperature": 0.7, "name": "trtllm"}, ["temperature"]),
        ({"name": "trtllm"}, []),
        ({"top_p": 0.95}, ["top_p"]),
        ({"top_k": 50}, ["top_k"]),
        ({"top_k": 0}, []),
        ({"top_p": 1, "top_k": -1}, []),
    ],
)
def test_L19_log_probs_that_are_not_of_the_distribution_the_trainer_computes(changes, found):
    changes = {f"{ROLLOUT}.{key}": value for key, value in changes.items()}
    assert warnings(async_job(changes=changes)) == [f"{ROLLOUT}.{key}" for key in found]
    decoupled = {**changes, BYPASS: False, "trainer.v1.trainer_mode": "sync", "data.train_batch_size": 64}
    assert warnings(async_job(changes=decoupled)) == []  # the trainer computes both sides


def test_L19_sglang_told_to_return_log_probs_before_the_temperature(monkeypatch):
    changes = {f"{ROLLOUT}.name": "sglang", f"{ROLLOUT}.temperature": 0.7}
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    assert warnings(async_job(changes=changes)) == [f"{ROLLOUT}.temperature"]
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "0")
    assert warnings(async_job(changes=changes)) == []


# --- radii and aggregation ---------------------------------------------------------------------------------------

LOW, HIGH = "actor_rollout_ref.actor.clip_ratio_low", "actor_rollout_ref.actor.clip_ratio_high"


def test_C08_the_radii_of_plain_gspo_make_sat_gspo_inert():
    assert warnings(async_job("gspo", {LOW: 3e-4, HIGH: 4e-4})) == [LOW]
    assert "clip_ratio_low=0.0003, clip_ratio_high=0.0004" in texts(async_job("gspo", {LOW: 3e-4, HIGH: 4e-4}))
    assert warnings(async_job("gspo", {LOW: 0.2, HIGH: 0.2})) == []
    assert warnings(async_job("grpo", {LOW: 3e-4, HIGH: 4e-4})) == []
    assert warnings(async_job("gspo", {LOW: 3e-4, HIGH: 4e-4, f"{SAT}.kernel": "none"})) == []


def test_L10_another_aggregation_under_gspo_is_said_and_kept():
    key = "actor_rollout_ref.actor.loss_agg_mode"
    assert warnings(async_job("gspo", {key: "token-mean"})) == [key]
    assert warnings(async_job("grpo", {key: "token-mean"})) == []


def test_L04_an_aggregation_that_depends_on_padding_is_named():
    agg, factor = "actor_rollout_ref.actor.loss_agg_mode", "actor_rollout_ref.actor.loss_scale_factor"
    config = async_job(changes={agg: "seq-mean-token-sum-norm"})
    assert warnings(config) == [factor]
    assert texts(config).endswith(f"set {factor}=512")
    assert warnings(async_job(changes={agg: "seq-mean-token-sum-norm", factor: 512})) == []


# --- sampler and lag ---------------------------------------------------------------------------------------------

SAMPLER = "trainer.v1.sampler"
EXACT = {
    f"{SAMPLER}.custom_sampler.path": "pkg://verl_sat.sampler",
    f"{SAMPLER}.custom_sampler.name": "ExactLagReplayBuffer",
    f"{SAMPLER}.max_off_policy_threshold": None,
}
WARMUP = "trainer.v1.separate_async.num_warmup_batches"


@pytest.mark.parametrize("key", ["algorithm.filter_groups.enable", f"{SAMPLER}.sync_refill_failed_groups"])
def test_a_custom_sampler_loses_settings_in_silence(key):
    assert errors(async_job(changes=EXACT)) == []
    assert errors(async_job(changes={**EXACT, key: True})) == [key]
    theirs = {f"{SAMPLER}.custom_sampler.path": "x.py", f"{SAMPLER}.custom_sampler.name": "Theirs", key: True}
    assert errors(async_job(changes=theirs)) == [key]
    assert errors(async_job(changes={key: True})) == []
    assert errors(changed(job(), {**LAG_1, **EXACT, key: True})) == [key]  # our sampler with a loss of verl


def test_our_sampler_needs_both_path_and_name_and_an_asynchronous_trainer():
    assert errors(async_job(changes={**EXACT, f"{SAMPLER}.custom_sampler.path": None})) == [
        f"{SAMPLER}.custom_sampler.path"
    ]
    sync = {**EXACT, "trainer.v1.trainer_mode": "sync"}
    assert errors(async_job(changes=sync)) == [f"{SAMPLER}.custom_sampler.name"]


def test_a_constant_lag_beyond_the_threshold_is_capped():
    key = f"{SAMPLER}.max_off_policy_threshold"
    assert warnings(async_job(changes={WARMUP: 8})) == [key]  # verl's default threshold is 8
    assert "stays below 8" in texts(async_job(changes={WARMUP: 8}))
    assert warnings(async_job(changes={WARMUP: 7})) == []
    assert warnings(async_job(changes={WARMUP: 8, key: 9})) == []
    assert warnings(async_job(changes={WARMUP: 8, key: None})) == []
    assert warnings(async_job(changes={WARMUP: 8, f"{SAMPLER}.max_off_policy_strategy": "wait"})) == []
    assert errors(async_job(changes={**EXACT, WARMUP: 8, key: 8})) == [key]
    assert errors(async_job(changes={**EXACT, WARMUP: 8})) == []


def test_D04_the_lag_of_a_configuration_in_versions_and_updates():
    assert "typical lag 1 version, 1 optimizer updates" in preflight.describe(async_job())
    assert "typical lag 7 versions, 7 optimizer updates" in preflight.describe(
        async_job(changes={WARMUP: 8})
    )  # evicted
    assert "typical lag 8 versions, 8 optimizer updates" in preflight.describe(
        async_job(changes={WARMUP: 8, "trainer.v1.sampler.max_off_policy_threshold": None})
    )
    broadcast = {"trainer.v1.separate_async.parameter_sync_step": 8, "data.train_batch_size": 256}
    assert "typical lag 1 version, 8 to 15 optimizer updates" in preflight.describe(async_job(changes=broadcast))


# --- where the plugin is -----------------------------------------------------------------------------------------

ENV = "ray_kwargs.ray_init.runtime_env.env_vars"


def test_P02_a_plugin_that_other_raylets_will_not_find(monkeypatch):
    assert errors(async_job(changes={"trainer.nnodes": 2})) == []  # the entry point is installed and used
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    assert warnings(async_job()) == [LOSS_MODE]
    two_nodes = async_job(changes={"trainer.nnodes": 2})
    assert errors(two_nodes) == [LOSS_MODE]
    assert "on every node" in texts(two_nodes)
    assert texts(two_nodes).endswith(f"set +{ENV}.VERL_USE_EXTERNAL_MODULES=verl_sat.plugin")
    passed_on = {"trainer.nnodes": 2, f"{ENV}.VERL_USE_EXTERNAL_MODULES": "verl_sat.plugin"}
    assert preflight.check(async_job(changes=passed_on)) == []
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other, verl_sat")
    assert preflight.check(two_nodes) == []


def test_P01_a_plugin_that_could_not_be_loaded_stops_a_sat_job_only(monkeypatch):
    monkeypatch.setattr(_compat, "FAILURES", ["ImportError: no such thing"])
    assert errors(async_job()) == [LOSS_MODE] and "no such thing" in texts(async_job())
    assert preflight.check(job()) == []


# --- what the user sees ------------------------------------------------------------------------------------------


def test_run_raises_all_errors_and_logs_each_warning_once(caplog):
    config = async_job("gspo", {LOW: 3e-4, HIGH: 4e-4, f"{ROLLOUT}.top_p": 0.9})
    preflight.run(config)
    preflight.run(copy.deepcopy(config))
    assert [r.levelname for r in caplog.records] == ["WARNING", "WARNING"]
    assert f"{ROLLOUT}.top_p: 0.9" in caplog.text

    config = changed(config, {f"{SAT}.quantile": 0, "sat": {"x": 1}})
    with pytest.raises(preflight.SATPreflightError) as caught:
        preflight.run(config)
    assert isinstance(caught.value, ValueError)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3 and "2 errors" in lines[0]
    assert all(line.startswith("error: ") for line in lines[1:])
    again = pickle.loads(pickle.dumps(caught.value))  # Ray pickles what a task raises
    assert isinstance(again, preflight.SATPreflightError) and str(again) == str(caught.value)


def test_validate_config_of_verl_runs_the_preflight_first():
    config = async_job(changes={f"{SAT}.quantile": 1.5})
    with pytest.raises(preflight.SATPreflightError, match="quantile"):
        verl_config.validate_config(config=config, use_reference_policy=False, use_critic=False)
    with pytest.raises(preflight.SATPreflightError, match="quantile"):
        verl.utils.validate_config(config, False, False)


def _command_line(module, *overrides, tmp_path):
    base = [
        "data.train_files=none",
        "data.val_files=none",
        "actor_rollout_ref.model.path=none",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        "algorithm.adv_estimator=grpo",
        f"hydra.run.dir={tmp_path}",
    ]
    return subprocess.run(
        [sys.executable, "-m", module, *base, *overrides],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "VERL_USE_EXTERNAL_PLUGINS": "auto"},
    )


def test_C01_a_wrong_option_on_the_command_line_is_one_readable_error(tmp_path):
    group = ["hydra.searchpath=[pkg://verl_sat.conf]", "+sat=gspo", f"{SAT}.quantile=1.5"]
    done = _command_line("verl.trainer.main_ppo", *group, tmp_path=tmp_path)
    assert done.returncode == 1
    assert f"error: {SAT}.quantile: 1.5 is not allowed: expected a number in (0, 1]" in done.stderr
    assert "Traceback" not in done.stderr


def test_C03_fully_async_stops_in_its_driver_before_ray_starts(tmp_path):
    group = ["hydra.searchpath=[pkg://verl.trainer.config,pkg://verl_sat.conf]", "+sat=gspo"]
    module = "verl.experimental.fully_async_policy.fully_async_main"
    done = _command_line(module, *group, tmp_path=tmp_path)
    assert done.returncode == 1
    assert f"error: {BYPASS}: in bypass mode fully_async_policy replaces loss_mode=sat_gspo" in done.stderr
    assert "ray init kwargs" not in done.stdout and "Traceback" not in done.stderr


# --- found by trying to break it ---------------------------------------------------------------------------------


def test_distillation_without_task_rewards_would_drop_the_loss():
    key = "distillation.distillation_loss.use_task_rewards"
    assert key in errors(async_job("gspo", {"distillation.enabled": True, key: False}))
    assert key not in errors(async_job("gspo", {"distillation.enabled": True, key: True}))
    assert key not in errors(async_job("gspo", {"distillation.enabled": False, key: False}))


@pytest.mark.parametrize("name", [name for name in SHIPPED if "async" in name or "one_step" in name])
def test_the_remedy_of_a_finding_does_not_lead_to_the_opposite_finding(name):
    config = job("+sat=gspo", name=name)
    decoupled = texts(changed(copy.deepcopy(config), {BYPASS: False}))
    assert BYPASS in errors(changed(config, {BYPASS: True}))
    for line in decoupled.splitlines():
        if "; set " in line and f"{BYPASS}=True" in line:
            assert "verl.trainer.main_ppo" in line


@pytest.mark.parametrize(
    ("key", "value", "right"),
    [
        ("actor_rollout_ref.policy_loss.loss_mode", "sat_gspo", LOSS_MODE),
        ("actor.policy_loss.loss_mode", "sat_gspo", LOSS_MODE),
        ("actor_rollout_ref.policy_loss.sat.quantile", 0.5, f"{SAT}.quantile=0.5"),
        ("policy_loss.sat.quantile", 0.5, f"{SAT}.quantile=0.5"),
        ("actor_rollout_ref.ref.sat.quantile", 0.5, f"{SAT}.quantile=0.5"),
        ("actor_rollout_ref.actor.sat.quantile", 0.5, f"{SAT}.quantile=0.5"),
    ],
)
@pytest.mark.parametrize("with_sat", [False, True])
def test_what_landed_in_a_wrong_place_is_an_error_wherever_it_is(key, value, right, with_sat):
    config = changed(async_job("gspo") if with_sat else job(), {key: value})
    wrong = key if key.endswith("loss_mode") else key.removesuffix(".quantile")
    assert wrong in errors(config)
    assert right in texts(config)


def test_a_block_of_somebody_elses_named_sat_is_left_alone():
    assert preflight.check(changed(job(), {"data.custom.sat.path": "x"})) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [("clip_ratio_low", -0.2), ("clip_ratio_high", "0.2"), ("clip_ratio_high", float("inf")), ("clip_ratio_c", 1.0)],
)
def test_clip_ratios_that_the_loss_will_refuse(key, value):
    full = f"actor_rollout_ref.actor.{key}"
    assert full in errors(async_job("grpo", {full: value}))
    assert f"actor_rollout_ref.actor.{key}" not in errors(async_job("grpo"))


@pytest.mark.parametrize(
    ("options", "key"), [({"q": 0.3}, "q"), ({"q_min": 0.5}, "q_min"), ({"q": 0.0}, "q"), ({"q": 0.1}, None)]
)
def test_a_gate_level_that_never_acts_is_warned_about(options, key):
    found = warnings(async_job("grpo", {f"{SAT}.{name}": value for name, value in options.items()}))
    assert found == ([] if key is None else [f"{SAT}.{key}"])


@pytest.mark.parametrize(
    ("changes", "lag"),
    [
        ({"trainer.v1.separate_async.parameter_sync_step": 4, "data.train_batch_size": 1024}, "4 to 7"),
        (
            {
                "trainer.v1.separate_async.parameter_sync_step": 4,
                "data.train_batch_size": 1024,
                "actor_rollout_ref.actor.ppo_epochs": 2,
            },
            "8 to 15",
        ),
        ({"trainer.v1.trainer_mode": "colocate_async", "data.train_batch_size": 1024}, "4 to 7"),
    ],
)
def test_the_announced_lag_counts_mini_batches_and_epochs(changes, lag):
    config = async_job("grpo", {"actor_rollout_ref.actor.ppo_mini_batch_size": 256, **changes})
    assert f"{lag} optimizer updates" in preflight.describe(config)


def test_a_legacy_trainer_chosen_by_a_falsy_value_is_a_legacy_trainer():
    assert BYPASS in errors(async_job("grpo", {"trainer.use_v1": 0}))


@pytest.mark.parametrize("name", ["sat", "SAT", "gspo_sat"])
def test_half_a_name_is_an_error_before_the_workers_say_so(name):
    assert LOSS_MODE in errors(changed(job(), {LOSS_MODE: name}))
