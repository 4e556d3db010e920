"""``verl-sat doctor``: each kind of finding with its key and value, nothing on healthy jobs, and the exit statuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl_sat.composition import CompositionError, compose
from verl_sat.doctor.examine import examine

ROOT = Path(__file__).parent.parent
RECIPE = ["--config-dir", str(ROOT / "recipes" / "qwen3_30b_a3b"), "--config-name", "lag8_sat_gspo_r3"]
FSDP = [*RECIPE[:3], "lag8_sat_gspo_r3_fsdp2"]
MODEL_CONFIG = ROOT / "tests" / "data" / "qwen3_30b_a3b_base"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("VERL_PLATFORM", "VERL_LOGGING_LEVEL", "VERL_USE_EXTERNAL_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("override", "key", "remedy"),
    [
        (
            "+trainer.total_training_step=5",
            "trainer.total_training_step",
            "trainer.total_training_steps=5 in its place",
        ),
        ("+data.trian_files=x", "data.trian_files", "data.train_files=x in its place"),
        ("+zznobody.reads.this=1", "zznobody", ""),
        ("data.train_batch_size=1024", "data.train_batch_size", "data.train_batch_size=2048"),
        (f"{ROLLOUT}.checkpoint_engine.backend=naive", f"{ROLLOUT}.checkpoint_engine.backend", "nccl"),
        (f"{ROLLOUT}.nnodes=0", f"{ROLLOUT}.nnodes", f"{ROLLOUT}.nnodes=1"),
        (f"{ACTOR}.ppo_max_token_len_per_gpu=16384", f"{ACTOR}.ppo_max_token_len_per_gpu", "=32768"),
        (f"{ACTOR}.megatron.tensor_model_parallel_size=3", f"{ACTOR}.megatron.tensor_model_parallel_size", ""),
        (f"{ROLLOUT}.tensor_model_parallel_size=3", f"{ROLLOUT}.tensor_model_parallel_size", ""),
        (
            "ray_kwargs.ray_init.runtime_env.env_vars.VERL_LOGGING_LEVEL=INFO",
            "actor_rollout_ref.hybrid_engine",
            "env_vars.VERL_LOGGING_LEVEL=WARNING",
        ),
        ("trainer.v1.sampler.max_off_policy_threshold=1", "trainer.v1.sampler.max_off_policy_threshold", "=null"),
        ("trainer.v1.separate_async.num_warmup_batches=-1", "trainer.v1.separate_async.num_warmup_batches", ""),
        (f"{ACTOR}.policy_loss.sat.quantile=1.5", f"{ACTOR}.policy_loss.sat.quantile", "quantile=0.9"),
        ("trainer.device=cpu", "trainer.device", ""),
        (
            "trainer.v1.separate_async.hybrid_rollout.enable_switch=True",
            "trainer.v1.separate_async.hybrid_rollout.enable_switch",
            "enable_switch=False",
        ),
        (f"{ROLLOUT}.enable_rollout_routing_replay=False", f"{ROLLOUT}.enable_rollout_routing_replay", "=True"),
        ("trainer.v1.separate_async.parameter_sync_step=0", "trainer.total_training_steps", ""),
    ],
)
def test_an_error_names_its_key_and_the_value(override, key, remedy):
    found = examine([*RECIPE, override], start_child=False)
    errors = [finding for finding in found.findings if finding.level == "error"]
    assert found.exit_status == 2 and key in [finding.key for finding in errors], errors
    assert any(remedy in finding.remedy for finding in errors if finding.key == key)


@pytest.mark.parametrize(
    ("override", "key", "remedy"),
    [
        (f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_p", f"{ROLLOUT}.top_p=1.0"),
        (f"{ACTOR}.clip_ratio_low=3e-4", f"{ACTOR}.clip_ratio_low", "0.2"),
        (f"{ACTOR}.loss_agg_mode=token-mean", f"{ACTOR}.loss_agg_mode", "seq-mean-token-mean"),
        (f"{ACTOR}.optim.override_optimizer_config.adam_beta2=0.99", f"{ACTOR}.optim.betas", "adam_beta2=0.98"),
        ("data.max_response_length=30721", "data.max_response_length", "=30720"),
        ("sampler=verl", "trainer.v1.trainer_mode", "ExactLagReplayBuffer"),
    ],
)
def test_a_warning_names_its_key_and_the_value(override, key, remedy):
    more = [f"{ACTOR}.ppo_max_token_len_per_gpu=40000"] if "response_length" in override else []
    found = examine([*RECIPE, override, *more], start_child=False)
    assert found.exit_status == 1, found.findings
    assert any(finding.key == key and remedy in finding.remedy for finding in found.findings), found.findings


def test_A10_asynchronous_checkpoints_on_fsdp():
    found = examine([*FSDP, f"{ACTOR}.checkpoint.async_save=True"], start_child=False)
    assert [finding.key for finding in found.findings] == [f"{ACTOR}.checkpoint.async_save"] and found.exit_status == 1
    assert examine([*RECIPE, f"{ACTOR}.checkpoint.async_save=True"], start_child=False).exit_status == 0


def test_a_model_that_is_not_there_by_its_config(tmp_path):
    facts = dict(examine(FSDP, MODEL_CONFIG, start_child=False).facts)
    # 48 layers x top-8, a byte each: 384 B a token; 32,768 tokens: 12 MiB; 2,048 x 16 responses: 384 GiB
    assert "384 ids a token" in facts["routes"] and "12.0 MiB a response, at most 384 GiB" in facts["routes"]
    assert "768 B a token" in str(examine(RECIPE, MODEL_CONFIG, start_child=False).facts)
    assert "give it with --model-config" in dict(examine(FSDP, start_child=False).facts)["routes"]
    too_long = examine([*FSDP, f"{ROLLOUT}.max_model_len=40960"], MODEL_CONFIG / "config.json", start_child=False)
    assert [finding.key for finding in too_long.findings] == [f"{ROLLOUT}.max_model_len"]
    dense = tmp_path / "config.json"
    dense.write_text('{"model_type": "qwen3", "num_hidden_layers": 4}')
    assert examine(FSDP, dense, start_child=False).exit_status == 2
    assert "expected a file config.json" in str(examine(FSDP, tmp_path / "no", start_child=False).findings[0])


def test_what_a_job_will_do_is_said():
    facts = examine(RECIPE, start_child=False).facts
    text = "\n".join(f"{heading}: {line}" for heading, line in facts)
    for words in (
        "loss: sat_gspo",
        "denominator: the rollout engine's log-probs",
        "scope: quantile over scope running (auto): 4096 responses",
        "replay: rollout: sglang",
        "replay: actor: verl's own replay on megatron",
        "evaluation: every 1 trainer steps, 8 optimizer updates, 16 samples",
        "lag: separate_async: exactly 1 version, 8 to 15 updates old",
        "handed on: only the engines know these keys",
    ):
        assert words in text, text
    tis = examine([*RECIPE, "arm=grpo_tis"], start_child=False).facts
    assert ("denominator", "importance weights per token, truncated at 2.0: pi_old / mu") in tis


def test_a_plain_job_of_verls_is_examined_too():
    found = examine(["trainer.v1.trainer_mode=separate_async", f"{ROLLOUT}.name=vllm"], start_child=False)
    keys = {finding.key for finding in found.findings}
    assert {f"{ROLLOUT}.nnodes", f"{ROLLOUT}.checkpoint_engine.backend"} <= keys and found.exit_status == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config-name", "nope"], "nope"),
        (["--config-dir", "/nowhere"], "--config-dir /nowhere"),
        (["trainer.nnodes"], "trainer.nnodes"),
        (["--multirun", "trainer.nnodes=1"], "--multirun"),
        (["+trainer.nnodes=2"], "trainer.nnodes"),
    ],
)
def test_arguments_that_make_no_configuration(arguments, words):
    with pytest.raises(CompositionError, match=words):
        compose(arguments)
    assert examine(arguments, start_child=False).exit_status == 2


def command(*arguments, **environment):
    import os

    line = [sys.executable, "-m", "verl_sat.cli", "doctor", *arguments]
    return subprocess.run(line, capture_output=True, text=True, env={**os.environ, **environment}, timeout=200)


def test_the_command_with_a_fresh_process_of_verl():
    done = command(*RECIPE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loaded by a fresh verl process" in done.stdout and "nothing wrong was found" in done.stdout
    assert "verl_sat.policy_loss.compute_policy_loss_sat_gspo" in done.stdout.replace("\n", " ")
    assert "no fault of this job" in done.stdout  # sglang, megatron: not on this machine


def test_the_command_finds_what_only_verl_knows():
    typo = command("--json", *RECIPE, f"+{ACTOR}.cliip_ratio_c=5")
    (finding,) = json.loads(typo.stdout)["findings"]
    assert typo.returncode == 2 and finding["key"] == f"{ACTOR}.cliip_ratio_c"
    assert finding["remedy"] == f"{ACTOR}.clip_ratio_c=5 in its place"
    refused = command("--json", *RECIPE, f"{ACTOR}.loss_agg_mode=seqmean", VERL_USE_EXTERNAL_PLUGINS="none")
    result = json.loads(refused.stdout)
    keys = [finding["key"] for finding in result["findings"]]
    assert refused.returncode == 2 and "VERL_USE_EXTERNAL_PLUGINS" in keys and "does not load it" in result["plugin"]
    assert any("Invalid loss_agg_mode: seqmean" in finding["message"] for finding in result["findings"])


def test_a_package_that_is_not_here_is_no_fault_of_the_job():
    # verl asks vLLM for its LoRA ranks while it validates; vLLM is not on this machine.
    job = ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.model.lora_rank=8", "data.train_batch_size=1024",
           f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1",
           "algorithm.adv_estimator=grpo"]  # fmt: skip
    found = examine(job)
    assert found.exit_status == 0, found.findings
    assert any(heading == "not checked" and "vllm" in text for heading, text in found.facts), found.facts
