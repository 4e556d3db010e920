"""Every shipped recipe: it composes, verl takes it, the doctor finds nothing, and it is as stale as its name says."""

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_sat import lag
from verl_sat.composition import compose
from verl_sat.doctor import child, keys
from verl_sat.doctor.examine import examine

ROOT = Path(__file__).parent.parent
RECIPES = sorted(p for p in ROOT.glob("recipes/*/*.yaml") if not p.stem.startswith("_") and p.stem != "model")
NAMED = [p for p in RECIPES if p.stem.startswith("lag")]
MOE = ROOT / "recipes" / "qwen3_30b_a3b"
ARMS = sorted(p.stem for p in (ROOT / "verl_sat" / "conf" / "arm").glob("*.yaml"))
MODEL_CONFIG = ROOT / "tests" / "data" / "qwen3_30b_a3b_base"


def arguments_of(path):
    return ["--config-dir", str(path.parent), "--config-name", path.stem]


@functools.cache
def config_of(path):
    return compose(arguments_of(path)).config


def name_of(path):
    return f"{path.parent.name}/{path.stem}"


@pytest.fixture(autouse=True)
def on_the_platform_of_the_recipe(request, monkeypatch):
    """The embedded recipe belongs to the CPU platform, the others do not."""
    path = request.node.callspec.params.get("path") if hasattr(request.node, "callspec") else None
    if path is not None and path.parent.name == "embedded":
        monkeypatch.setenv("VERL_PLATFORM", "cpu")
    else:
        monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.delenv("VERL_LOGGING_LEVEL", raising=False)


def require_healthy(arguments, model_config=None):
    """The doctor has nothing to say, and verl's own checks and dataclasses take it."""
    examination = examine(arguments, model_config, start_child=False)
    assert examination.exit_status == 0, [str(finding) for finding in examination.findings]
    composed = examination.composed
    in_dataclasses = [
        key for key in keys.extra_keys(composed) if keys.parent_is_dataclass(composed.config, key)
    ]  # fmt: skip
    resolved = OmegaConf.create(OmegaConf.to_container(composed.config, resolve=True))
    assert child._fields(resolved, in_dataclasses) == []
    not_checked = []
    assert list(child._validate(resolved, not_checked)) == [] and not_checked == []
    return resolved


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_a_recipe_is_healthy(path):
    config = require_healthy(arguments_of(path))
    cycle = config.trainer.v1.separate_async.parameter_sync_step
    assert config.data.train_batch_size == cycle * config.actor_rollout_ref.actor.ppo_mini_batch_size
    updates = 40 if path.stem == "embedded" else 544
    assert config.trainer.total_training_steps * cycle == updates


@pytest.mark.parametrize("path", NAMED, ids=name_of)
def test_A03_a_name_says_the_lag_that_the_accounting_computes(path):
    account = lag.account(config_of(path))
    assert re.match(r"lag\d+(_constant)?(?=_(sat_)?g)", path.stem).group(0) == account.name
    assert account.exact
    versions, updates = {"lag1": (1, (1, 1)), "lag8": (1, (8, 15)), "lag8_constant": (8, (8, 8))}[account.name]
    assert (account.versions, account.updates) == (versions, updates)


@pytest.mark.parametrize("path", NAMED, ids=name_of)
def test_a_name_says_the_arm_and_the_replay(path):
    config = config_of(path)
    loss = re.search(r"(sat_gspo|sat_grpo|gspo|grpo)", path.stem).group(0)
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == loss
    assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay == ("_r3" in path.stem)
    assert config.trainer.experiment_name == path.stem
    if path.parent == MOE:
        engine = "fsdp2" if path.stem.endswith("_fsdp2") else "megatron"
        assert config.actor_rollout_ref.actor.strategy == engine


TABLE = {  # arm -> loss, aggregation, bypass, weights, radii
    "grpo": ("vanilla", "token-mean", True, None, 0.2),
    "gspo": ("gspo", "seq-mean-token-mean", True, None, 0.2),
    "grpo_tis": ("vanilla", "token-mean", False, "token", 0.2),
    "gspo_tis": ("gspo", "seq-mean-token-mean", False, "token", 0.2),
    "dppo": ("dppo_tv", "token-mean", True, None, 0.001),
    "sat_grpo": ("sat_grpo", "token-mean", True, None, 0.2),
    "sat_gspo": ("sat_gspo", "seq-mean-token-mean", True, None, 0.2),
    "grpo_fixed_eps": ("vanilla", "token-mean", True, None, 0.05),
    "gspo_fixed_eps": ("gspo", "seq-mean-token-mean", True, None, 0.006),
}


def test_every_arm_is_in_the_table_and_in_the_script():
    assert sorted(TABLE) == ARMS
    assert sorted(re.search(r'^arms="(.*)"$', (MOE / "run.sh").read_text(), flags=re.M).group(1).split()) == ARMS


@pytest.mark.parametrize("replay", ["R3", "none"])
@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_with_and_without_replay(arm, replay):
    engine = ("megatron", "fsdp2")[(ARMS.index(arm) + (replay == "R3")) % 2]  # each arm meets both
    group = {"megatron": "megatron", "fsdp2": "fsdp"}[engine] if replay == "R3" else "none"
    config = require_healthy([*arguments_of(MOE / f"{engine}.yaml"), f"arm={arm}", f"r3={group}"], MODEL_CONFIG)
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    found = (actor.policy_loss.loss_mode, actor.loss_agg_mode, correction.bypass_mode, correction.rollout_is)
    assert (*found, actor.clip_ratio_low) == TABLE[arm]
    assert actor.clip_ratio_high == actor.clip_ratio_low
    assert correction.rollout_is_threshold == 2.0
    assert config.actor_rollout_ref.rollout.calculate_log_probs
    assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay == (replay == "R3")


@pytest.mark.parametrize("which", ["lag1", "lag8", "lag8_constant"])
def test_lengths_are_in_optimizer_updates(which):
    config = compose([*arguments_of(MOE / "megatron.yaml"), f"lag={which}"]).config
    steps, every, save = {"lag1": (544, 5, 40), "lag8": (68, 1, 5), "lag8_constant": (544, 5, 40)}[which]
    trainer = config.trainer
    assert (trainer.total_training_steps, trainer.test_freq, trainer.save_freq) == (steps, every, save)


@pytest.mark.parametrize("engine", ["megatron", "fsdp2"])
def test_the_papers_setting_to_the_last_figure(engine):
    config = compose(arguments_of(MOE / f"{engine}.yaml")).config
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen3-30B-A3B-Base"
    assert actor.ppo_mini_batch_size * rollout.n == 4096 and rollout.n == 16
    assert (actor.optim.lr, list(actor.optim.betas)) == (1e-6, [0.9, 0.98])
    assert actor.optim.lr_warmup_steps == -1 and actor.optim.lr_warmup_steps_ratio == 0
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (True, 1e-3, "low_var_kl")
    assert (actor.entropy_coeff, actor.clip_ratio_low, actor.clip_ratio_high, actor.ppo_epochs) == (0, 0.2, 0.2, 1)
    sat = actor.policy_loss.sat
    assert (sat.kernel, sat.exponent, sat.quantile) == ("hill", 2.0, 0.9)
    assert (rollout.temperature, rollout.top_p, rollout.top_k) == (1.0, 1.0, -1)
    assert (rollout.name, rollout.gpu_memory_utilization) == ("sglang", 0.85)
    validation = rollout.val_kwargs
    assert (validation.n, validation.do_sample, validation.top_p) == (16, True, 1.0)
    assert config.algorithm.norm_adv_by_std_in_grpo and config.algorithm.adv_estimator == "grpo"
    lengths = config.data.max_prompt_length + config.data.max_response_length
    assert lengths == rollout.max_model_len == 32768
    if engine == "megatron":
        megatron, optim = actor.megatron, actor.optim
        sizes = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
        assert [megatron[f"{name}_parallel_size"] for name in sizes] == [4, 1, 1, 4, 1]
        assert megatron.sequence_parallel and megatron.dtype == "bfloat16"
        assert megatron.override_ddp_config.grad_reduce_in_fp32
        assert megatron.override_transformer_config.attention_softmax_in_fp32
        assert actor.ppo_max_token_len_per_gpu == 32768
        betas = optim.override_optimizer_config
        assert (betas.adam_beta1, betas.adam_beta2) == (0.9, 0.98)
        assert (config.trainer.n_gpus_per_node, rollout.n_gpus_per_node) == (4, 4)


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/*/REQUIRED_VERL.txt")), ids=lambda p: p.parent.name)
def test_D02_the_required_verl_is_the_one_that_was_tested(path):
    entries = dict(line.split("=", 1) for line in path.read_text().splitlines() if not line.startswith("#"))
    assert set(entries) == {"UPSTREAM", "MODE", "TAG", "PIP_INSTALL", "NOTES", "REFRESH"}
    assert entries["TAG"] == f"v{version('verl')}"
    assert entries["PIP_INSTALL"] == f'pip install "verl=={version("verl")}"'


# --- scripts ------------------------------------------------------------------------------------------------------


@pytest.fixture
def scripts_environment(tmp_path):
    """An environment in which ``python3 -m verl.trainer.main_ppo`` writes down its arguments."""
    shim = tmp_path / "bin"
    shim.mkdir()
    file = tmp_path / "arguments.json"
    program = f"import json, sys; open({str(file)!r}, 'w').write(json.dumps(sys.argv[3:]))"
    starter = f'#!/bin/sh\nif [ "$2" = verl.trainer.main_ppo ]; then exec {sys.executable} -c "$PROGRAM" "$@"; fi\n'
    (shim / "python3").write_text(starter + f'exec {sys.executable} "$@"\n')
    (shim / "verl-sat").write_text(f'#!/bin/sh\nexec {sys.executable} -m verl_sat.cli "$@" --fast\n')
    for program_file in shim.iterdir():
        program_file.chmod(0o755)
    environment = {**os.environ, "PATH": f"{shim}:{os.environ['PATH']}", "PROGRAM": program, "OUT": str(tmp_path / "o")}
    return environment, file


def run_script(path, environment, *arguments, **variables):
    return subprocess.run(
        ["bash", str(path), *arguments], env={**environment, **variables}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("variables", "name", "cycle", "warmup"),
    [
        ({}, "lag8_sat_gspo_r3_seed1", 8, 1),
        ({"LAG": "4", "LAG_KIND": "constant", "ARM": "gspo_tis", "REPLAY": "none", "SEED": "3"},
         "lag4_constant_gspo_tis_seed3", 1, 4),
        ({"LAG": "0", "ENGINE": "fsdp2"}, "lag0_sat_gspo_r3_fsdp2_seed1", 1, 0),
    ],
    ids=["defaults", "constant", "on-policy"],
)  # fmt: skip
def test_the_script_starts_what_it_prints(variables, name, cycle, warmup, scripts_environment):
    environment, file = scripts_environment
    done = run_script(MOE / "run.sh", environment, "trainer.save_freq=7", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    started = json.loads(file.read_text())
    (printed,) = (line for line in done.stdout.splitlines() if line.startswith("python3 -m verl.trainer.main_ppo"))
    assert shlex.split(printed)[3:] == started
    config = compose(started).config
    assert config.trainer.experiment_name == name and config.trainer.save_freq == 7
    mode = config.trainer.v1.separate_async
    assert (mode.parameter_sync_step, mode.num_warmup_batches) == (cycle, warmup)
    assert name.startswith(lag.account(config).name)
    require_healthy(started)


@pytest.mark.parametrize(
    "variables",
    [{"ARM": "ppo"}, {"LAG": "eight"}, {"LAG_KIND": "both"}, {"ENGINE": "fsdp"}, {"REPLAY": "R2"}],
    ids=lambda variables: next(iter(variables)),
)
def test_the_script_names_the_variable_that_is_wrong(variables, scripts_environment):
    environment, file = scripts_environment
    done = run_script(MOE / "run.sh", environment, **variables)
    ((name, value),) = variables.items()
    assert done.returncode == 2 and f"error: {name}={value}: " in done.stderr
    assert not file.exists()


def test_the_script_does_not_start_what_would_fail(scripts_environment):
    environment, file = scripts_environment
    done = run_script(MOE / "run.sh", environment, "trainer.v1.sampler.max_off_policy_threshold=1")
    assert done.returncode == 2 and "max_off_policy_threshold" in done.stdout
    assert not file.exists()


def test_a_dry_run_starts_nothing(scripts_environment):
    environment, file = scripts_environment
    done = run_script(MOE / "run.sh", environment, DRY_RUN="1")
    assert done.returncode == 0 and "nothing wrong was found" in done.stdout
    assert not file.exists()


EXISTING = ROOT / "examples" / "existing_job"


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_existing_job_is_healthy_before_and_after(when, engine, scripts_environment):
    environment, file = scripts_environment
    done = run_script(EXISTING / f"{when}_{engine}.sh", environment)
    assert done.returncode == 0, done.stderr
    config = require_healthy(json.loads(file.read_text()), MODEL_CONFIG)
    ours = when == "after"
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == ("sat_gspo" if ours else "gspo")
    assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay == ours


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_the_shown_difference_is_the_difference(engine):
    shown = (EXISTING / "README.md").read_text().split(f"<!-- diff:begin {engine} -->\n```diff\n")[1].split("\n```")[0]
    files = [EXISTING / f"{when}_{engine}.sh" for when in ("before", "after")]
    lines = subprocess.run(["diff", "-U0", *files], capture_output=True, text=True).stdout.splitlines()
    assert shown.splitlines() == [line for line in lines if not line.startswith(("---", "+++", "@@"))]


# --- snippets in the documentation --------------------------------------------------------------------------------

A_JOB = [
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.name=sglang",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
    "trainer.v1.trainer_mode=separate_async",
    "data.train_batch_size=1024",
    "algorithm.adv_estimator=grpo",
]
"""What stands for "<your overrides>"."""


def snippets():
    for document in [ROOT / "README.md", *sorted(ROOT.glob("recipes/**/*.md")), *sorted(ROOT.glob("examples/**/*.md"))]:
        blocks = re.findall(r"```bash\n(.*?)```", document.read_text(), flags=re.S)
        for number, block in enumerate(blocks):
            for line in block.replace("\\\n", " ").splitlines():
                if "main_ppo" not in line and "doctor" not in line:
                    continue
                words = shlex.split(line, comments=True)
                for program in ("verl.trainer.main_ppo", "doctor"):
                    if program in words:
                        arguments = words[words.index(program) + 1 :]
                        arguments = arguments[: arguments.index(";")] if ";" in arguments else arguments
                        label = f"{document.relative_to(ROOT)}-{number}-{program}"
                        yield pytest.param(arguments, line, id=label)


@pytest.mark.parametrize(("arguments", "line"), snippets())
def test_every_command_in_the_documentation_composes(arguments, line, monkeypatch):
    monkeypatch.chdir(ROOT)
    for name, value in re.findall(r"\b(VERL_[A-Z_]+)=(\S+)", line):
        monkeypatch.setenv(name, value)
    given = []
    model_config = None
    while arguments:
        word, *arguments = arguments
        if word in ("...", "ARGUMENTS"):
            continue
        if word == "<your" or word == "overrides>":
            given += A_JOB if word == "<your" else []
        elif word == "--model-config":
            model_config, *arguments = MODEL_CONFIG, *arguments[1:]
        else:
            given.append(word)
    if "+r3=megatron" in given and not any("config-name" in word for word in given):
        given = [word for word in given if "strategy" not in word] + ["model_engine=megatron"]
    examination = examine(given, model_config, start_child=False)
    errors = [str(finding) for finding in examination.findings if finding.level == "error"]
    if "max_off_policy_threshold=8" in line:
        assert errors
    else:
        assert not errors, errors


# --- and for real ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    command = [sys.executable, "-m", "verl_sat.embedded.warm_start", str(folder), "--seed", "1"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder


@pytest.mark.embedded
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(MOE / "lag8_sat_gspo_r3_fsdp2.yaml", id="lag8_sat_gspo_r3_fsdp2", marks=pytest.mark.long),
        pytest.param(MOE / "lag1_gspo_r3_fsdp2.yaml", id="lag1_gspo_r3_fsdp2", marks=pytest.mark.long),
    ],
)
def test_a_recipe_trains_for_two_steps_with_model_and_engines_exchanged(path, tiny_job, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    exchanged = [
        "+profile=cpu_engine",  # engines
        f"actor_rollout_ref.model.path={tiny_job}/model",
        f"data.train_files={tiny_job}/train.parquet",
        f"data.val_files={tiny_job}/test.parquet",
        "reward.custom_reward_function.path=pkg://verl_sat.embedded.task",  # of these data
        *("data.max_prompt_length=18", "data.max_response_length=12", "actor_rollout_ref.rollout.max_model_len=32"),
        # sizes: 4 x 4 responses an update, no Ulysses groups on one rank
        *("actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=4"),
        *(f"actor_rollout_ref.{role}.fsdp_config.ulysses_sequence_parallel_size=1" for role in ("actor", "ref")),
        "actor_rollout_ref.rollout.val_kwargs.n=2",
        "trainer.total_training_steps=2",
        f"trainer.default_local_dir={tmp_path}/checkpoints",
        f"hydra.run.dir={tmp_path}/hydra",
    ]
    environment = {
        **os.environ,
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "RAY_ADDRESS": "local",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments_of(path), *exchanged]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    base, first, second = (json.loads(line)["data"] for line in metrics.read_text().splitlines())
    assert "val-core/verl_sat/running_sum/acc/mean@2" in base
    versions, updates = {"lag8_sat_gspo_r3_fsdp2": (1, 11.5), "lag1_gspo_r3_fsdp2": (1, 1)}[path.stem]
    assert second["actor/staleness/versions"] == versions and second["actor/staleness/updates"] == updates
    assert first["actor/r3/replayed_frac"] == second["actor/r3/replayed_frac"] == 1
    assert ("actor/sat/quantile" in second) == ("sat" in path.stem)
    assert second["actor/kl_loss"] > 0
