"""The quickstart: its plan of a lag, its errors, its summary; and real runs of verl's asynchronous trainer."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_sat import lag
from verl_sat.composition import compose
from verl_sat.embedded import quickstart as quickstart_module
from verl_sat.embedded import summary
from verl_sat.embedded.progress import RunLog

JOB = (
    *("model_path", "train_file", "test_file", "max_prompt_length", "max_response_length"),
    *("reward_file", "reward_name", "learning_rate"),
)
SCHEMA = {
    "schema_version": int,
    "status": str,
    "steps": {"requested": int, "completed": int},
    "seed": int,
    "lag": {
        "kind": str,
        "configured": {"versions": int, "updates": int, "updates_oldest": int, "ramp_steps": int},
        "achieved": {
            "versions": float,
            "versions_oldest": float,
            "updates": float,
            "unknown_frac": float,
            "inexact_frac": float,
            "steps_measured": int,
        },
    },
    "loss": {
        "name": str,
        "loss_agg_mode": str,
        "clip_ratio_low": float,
        "clip_ratio_high": float,
        "bypass_mode": bool,
        "sat": dict,
    },
    "replay": {
        "mode": str,
        "rollout_dtype": str,
        "replayed_frac": float | None,
        "disagreement_frac": float | None,
        "bytes_per_token": float | None,
    },
    "reward": {"warm_start": float, "first": float, "last": float, "window_steps": int},
    "seconds": {"check": float, "prepare": float, "start": float, "train": float},
    "versions": dict,
    "overrides": list,
    "warnings": list,
}


def check_schema(value, schema, path=""):
    if isinstance(schema, dict):
        assert list(value) == list(schema), path
        for key in schema:
            check_schema(value[key], schema[key], f"{path}/{key}")
    elif value is not None:  # what was not measured is null
        assert isinstance(value, schema), (path, value)


def quickstart(*arguments, timeout=400):
    return subprocess.run(
        [sys.executable, "-m", "verl_sat.embedded.quickstart", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "COLUMNS": "200"},
    )


def read_run(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return lines, json.loads((out / "summary.json").read_text())


# ---- what a lag means


@pytest.mark.parametrize(
    ("kind", "wanted", "sync_step", "warmup", "versions", "updates"),
    [
        ("constant", 0, 1, 0, 0, (0, 0)),
        ("constant", 1, 1, 1, 1, (1, 1)),
        ("constant", 8, 1, 8, 8, (8, 8)),
        ("broadcast", 0, 1, 0, 0, (0, 0)),
        ("broadcast", 1, 1, 1, 1, (1, 1)),
        ("broadcast", 8, 8, 1, 1, (8, 15)),
    ],
)
def test_the_overrides_of_a_lag_make_that_lag(kind, wanted, sync_step, warmup, versions, updates):
    settings = quickstart_module.Settings(wanted, kind, "sat_gspo", 3, 1, Path("out/x"), ())
    overrides = quickstart_module.build_overrides(settings, SimpleNamespace(**dict.fromkeys(JOB, "x")))
    config = compose(overrides).config
    mode = config.trainer.v1.separate_async
    assert (mode.parameter_sync_step, mode.num_warmup_batches) == (sync_step, warmup)
    account = lag.account(config)
    assert (account.versions, account.updates, account.ramp_steps) == (versions, updates, warmup)
    assert account.exact
    # verl: train_batch_size == parameter_sync_step * ppo_mini_batch_size
    assert (
        config.data.train_batch_size == sync_step * 16 == sync_step * config.actor_rollout_ref.actor.ppo_mini_batch_size
    )


@pytest.mark.parametrize(("kind", "wanted"), [("constant", -1), ("steady", 1)])
def test_a_lag_that_is_none_is_refused(kind, wanted):
    with pytest.raises(ValueError, match="lag"):
        lag.overrides_for(wanted, kind=kind)


# ---- the summary


class _Settings:
    lag, lag_kind, loss, steps, seed, overrides = 2, "constant", "sat_grpo", 5, 7, ("a.b=1",)


def make_config(with_sat=True, sync_step=1, warmup=2, epochs=1):
    policy_loss = {"loss_mode": "sat_grpo", **({"sat": {"quantile": 0.9}} if with_sat else {})}
    actor = {"policy_loss": policy_loss, "loss_agg_mode": "token-mean", "clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
    actor["ppo_epochs"] = epochs
    correction = {"rollout_correction": {"bypass_mode": True}}
    trainer = {
        "total_training_steps": 25,
        "v1": {
            "trainer_mode": "separate_async",
            "separate_async": {"parameter_sync_step": sync_step, "num_warmup_batches": warmup},
        },
    }
    actor["fsdp_config"] = {"router_replay": {"mode": "R3"}}
    roles = {"actor": actor, "rollout": {"dtype": "float32"}}
    return OmegaConf.create({"actor_rollout_ref": roles, "algorithm": correction, "trainer": trainer})


def make_records(rewards, versions):
    rows = zip(rewards, versions, strict=True)
    return [
        {
            "step": step,
            "data": {
                "actor/pg_loss": 0.1,
                "critic/score/mean": reward,
                "actor/staleness/unknown_frac": 0.0,
                **(
                    {} if version is None else {"actor/staleness/versions": version, "actor/staleness/updates": version}
                ),
            },
        }
        for step, (reward, version) in enumerate(rows, start=1)
    ]


def build(records, **changes):
    values = dict(
        status="completed",
        settings=_Settings(),
        config=make_config(),
        records=records,
        seconds={"check": 1.0, "prepare": 1.0, "start": 1.0, "train": 1.0},
        prepared_reward=0.4,
        warnings=["w", "w"],
    )
    return summary.build(**{**values, **changes})


def test_summary_has_the_frozen_schema():
    result = build(make_records([0.1] * 5, [0.0, 1.0, 2.0, 2.0, 2.0]))
    check_schema(result, SCHEMA)
    assert summary.SCHEMA_VERSION == 2  # a changed schema raises it, and this test with it


def test_summary_measures_the_lag_after_the_ramp_and_the_reward_at_both_ends():
    rewards = [i / 100 for i in range(25)]
    result = build(make_records(rewards, [0.0, 1.0] + [2.0] * 23))
    assert result["lag"]["achieved"]["versions"] == 2.0
    assert result["lag"]["achieved"]["steps_measured"] == 23
    assert result["reward"]["first"] == pytest.approx(sum(rewards[:10]) / 10)
    assert result["reward"]["last"] == pytest.approx(sum(rewards[-10:]) / 10)
    assert result["warnings"] == ["w"]


def test_summary_reads_lag_and_steps_from_the_configuration_that_ran():
    # Overrides on the command line may differ from --lag and --steps.
    result = build(make_records([0.1] * 3, [0.0] * 3), config=make_config(sync_step=2, warmup=1, epochs=2))
    configured = result["lag"]["configured"]
    assert configured == {"versions": 1, "updates": 4, "updates_oldest": 7, "ramp_steps": 1}
    assert result["steps"] == {"requested": 25, "completed": 3}


def test_summary_of_a_resumed_run_counts_steps_by_their_label():
    resumed = [{**record, "step": record["step"] + 10} for record in make_records([0.1] * 3, [2.0] * 3)]
    result = build(resumed)
    assert result["steps"]["completed"] == 13
    assert result["lag"]["achieved"]["steps_measured"] == 3  # the ramp was over before the resume


def test_summary_writes_null_for_what_json_has_no_word_for(tmp_path):
    config = make_config()
    config.actor_rollout_ref.actor.clip_ratio_high = float("inf")
    summary.write(build(make_records([0.1], [0.0]), config=config), tmp_path / "summary.json")
    assert json.loads((tmp_path / "summary.json").read_text())["loss"]["clip_ratio_high"] is None


@pytest.mark.parametrize("name", ["a=b,c d", "mü(1)[x]{y}~#", "it's", "${x}", "1e5", "null", 'q"q'])
def test_a_folder_of_any_name_reaches_the_configuration(tmp_path, name):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (override,) = OverridesParser.create().parse_overrides([f"x={quickstart_module.quoted(name)}"])
    assert OmegaConf.create({"x": override.value()}).x == name


def test_a_resume_keeps_the_lines_that_verls_logger_would_cut(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("first\n")
    quickstart_module.make_room(tmp_path, resuming=True)
    (tmp_path / "metrics.jsonl").write_text("second\n")
    quickstart_module.make_room(tmp_path, resuming=True)
    assert (tmp_path / "metrics.previous.jsonl").read_text() == "first\nsecond\n"
    assert not (tmp_path / "metrics.jsonl").exists()


def test_summary_of_a_run_that_never_trained_has_nulls_not_zeros(tmp_path):
    result = build([{"step": 0, "data": {"val-core/x": 1.0}}], status="failed", config=make_config(with_sat=False))
    assert result["steps"]["completed"] == 0
    assert result["lag"]["achieved"]["versions"] is None
    assert result["reward"]["first"] is None
    assert result["loss"]["sat"] is None
    check_schema(result, SCHEMA)
    summary.write(result, tmp_path / "summary.json")


# ---- reading a run


def test_log_takes_in_whole_lines_only(tmp_path):
    metrics, log = tmp_path / "metrics.jsonl", tmp_path / "verl.log"
    reader = RunLog(metrics, log)
    assert reader.poll().records == []
    metrics.write_text('{"step":1,"data":{}}\n{"step":2,"da')
    assert [r["step"] for r in reader.poll().records] == [1]
    with metrics.open("a") as file:
        file.write('ta":{}}\n')
    assert [r["step"] for r in reader.poll().records] == [1, 2]


def test_log_finds_our_warnings_and_the_root_of_a_failure(tmp_path):
    log = tmp_path / "verl.log"
    log.write_text(
        "\x1b[36m(WorkerDict pid=12, ip=1.2.3.4)\x1b[0m WARNING:2026-01-01:verl-sat: 3 samples carry no version\n"
        "(WorkerDict pid=13) WARNING:2026-01-01:verl-sat: 3 samples carry no version\n"
        "WARNING:2026-01-01:somebody else\n"
        "Traceback (most recent call last):\n"
        "ray.exceptions.RayTaskError(ValueError): ray::f() (pid=1)\n"
        "(f pid=1) ValueError: trainer.v1.x=3 is wrong\n"
    )
    reader = RunLog(tmp_path / "metrics.jsonl", log)
    assert reader.warnings() == ["warning: 3 samples carry no version"]
    assert reader.failure_reason() == "ValueError: trainer.v1.x=3 is wrong"


# ---- errors before anything starts

SAT = "actor_rollout_ref.actor.policy_loss.sat"
REPLAY_MODE = "actor_rollout_ref.actor.fsdp_config.router_replay.mode"
REPLAY_FLAG = "actor_rollout_ref.rollout.enable_rollout_routing_replay"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([f"++{SAT}.quantile=1.5"], [f"{SAT}.quantile: 1.5", "(0, 1]"]),
        ([f"++{SAT}.quantil=0.5"], [f"{SAT}.quantil", "quantile"]),
        ([f"{SAT}.kernel=hil"], [f"{SAT}.kernel", "hill"]),
        (["--loss", "sat_grop"], ["loss_mode", "sat_grop", "sat_grpo"]),
        (["--loss", "vanilla", f"++{SAT}.quantile=0.5"], [SAT, "vanilla"]),
        (["actor_rollout_ref.actor.no_such_key=1"], ["no_such_key"]),
        (["trainer.v1.sampler.max_off_policy_threshold=8"], ["max_off_policy_threshold", "8"]),
        (["algorithm.filter_groups.enable=True"], ["filter_groups"]),
        (["actor_rollout_ref.rollout.dtype=float16"], ["rollout.dtype='float16'", "bfloat16"]),
        (["actor_rollout_ref.rollout.custom.token_delay_s=-1"], ["rollout.custom.token_delay_s=-1"]),
        (["foo[bold]=1"], ["foo[bold]=1"]),
        (["trainer.n_gpus_per_node=2"], ["ppo_micro_batch_size_per_gpu", "64"]),
        (["data.train_batch_size=8"], ["data.train_batch_size: 8", "16"]),
        (["actor_rollout_ref.rollout.tensor_model_parallel_size=2"], ["tensor_model_parallel_size", "2 GPUs"]),
        (["--lag", "-1"], ["--lag"]),
        (["--lag-kind", "steady"], ["--lag-kind"]),
        (["--replay", "R2"], ["--replay"]),
        (["++actor_rollout_ref.rollout.enable_rollout_routing_replay=False"], [REPLAY_MODE, REPLAY_FLAG]),
        (["--replay", "disabled", "++actor_rollout_ref.rollout.enable_rollout_routing_replay=True"], [REPLAY_MODE]),
        ([f"{REPLAY_MODE}=R4"], [REPLAY_MODE, "R4"]),
    ],
)
def test_a_mistake_is_one_readable_error_that_names_the_key(tmp_path, arguments, words):
    done = quickstart("--out", tmp_path / "run", *arguments)
    text = done.stdout + done.stderr
    assert done.returncode != 0
    assert "Traceback" not in text
    flat = " ".join(text.replace("│", " ").split())
    for word in words:
        assert word in flat, text
    assert not (tmp_path / "run").exists()  # and nothing of an earlier run would have been touched


def test_an_output_folder_that_cannot_be_made_is_said_so(tmp_path):
    (tmp_path / "file").write_text("")
    done = quickstart("--out", tmp_path / "file" / "run")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "--out" in done.stdout


# ---- real runs


@pytest.mark.embedded
def test_lag_1_reports_finite_metrics_and_achieves_the_lag(tmp_path):
    done = quickstart("--lag", 1, "--steps", 4, "--loss", "sat_grpo", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines, result = read_run(tmp_path)
    check_schema(result, SCHEMA)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    from verl_sat.metrics import METRIC_KEYS

    staleness = [f"actor/staleness/{n}" for n in ("versions", "versions_oldest", "updates", "unknown_frac")]
    for line in lines:
        for key in [*METRIC_KEYS, *staleness]:
            assert math.isfinite(line["data"][key]), key
        assert line["data"]["actor/staleness/unknown_frac"] == 0
        assert line["data"]["actor/sat/nonfinite_frac"] == 0
        assert line["data"]["actor/r3/replayed_frac"] == 1
        assert line["data"]["actor/r3/bytes_per_token"] == 8  # 4 layers, two one-byte codes each
    assert [line["data"]["actor/staleness/versions"] for line in lines] == [0, 1, 1, 1]
    # the same weights in fp32 choose the same experts; one version later some choices differ
    assert [line["data"]["actor/r3/disagreement_frac"] > 0 for line in lines] == [False, True, True, True]
    assert result["replay"]["mode"] == "R3" and result["replay"]["replayed_frac"] == 1
    # On-policy and fp32 on both sides, the ratio of the first step is 1 up to rounding.
    assert lines[0]["data"]["actor/sat/abs_log_ratio"] < 1e-5
    assert lines[1]["data"]["actor/sat/abs_log_ratio"] > 1e-4
    assert result["status"] == "completed"
    assert result["lag"]["achieved"] == {**result["lag"]["achieved"], "versions": 1.0, "updates": 1.0}
    assert 0.2 <= result["reward"]["warm_start"] <= 0.7
    assert OmegaConf.load(tmp_path / "config.yaml").actor_rollout_ref.actor.policy_loss.loss_mode == "sat_grpo"


@pytest.mark.embedded
def test_broadcast_lag_is_one_version_and_L_to_2L_minus_1_updates_in_decoupled_mode_too(tmp_path):
    # K=2 without bypass: verl restores a snapshot for old_log_probs, which must be a copy: ppo_kl is not 0.
    done = quickstart(
        *("--lag", 2, "--lag-kind", "broadcast", "--loss", "vanilla", "--steps", 3, "--out", tmp_path),
        "algorithm.rollout_correction.bypass_mode=False",
        "actor_rollout_ref.actor.use_kl_loss=True",  # a reference worker, forward only
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines, result = read_run(tmp_path)
    assert result["lag"]["configured"] == {"versions": 1, "updates": 2, "updates_oldest": 3, "ramp_steps": 1}
    for line in lines[1:]:
        assert line["data"]["actor/r3/replayed_frac"] == 1  # in the log-prob pass as well, or it would have failed
        assert line["data"]["actor/staleness/versions"] == 1
        assert line["data"]["actor/staleness/updates"] == pytest.approx(2.5)  # sub-steps 2 and 3, averaged
        assert line["data"]["actor/staleness/inexact_frac"] == 0
        assert abs(line["data"]["actor/ppo_kl"]) > 1e-7
    assert result["loss"] == {**result["loss"], "name": "vanilla", "sat": None, "bypass_mode": False}


@pytest.mark.embedded
def test_achieved_lag_is_measured_not_echoed(tmp_path):
    """verl's own sampler and slow generation: configured 8, and nowhere near it; rollouts span versions."""
    done = quickstart(
        *("--lag", 8, "--steps", 11, "--loss", "sat_gspo", "--out", tmp_path),
        "trainer.v1.sampler.custom_sampler.path=null",
        "trainer.v1.sampler.custom_sampler.name=null",
        "trainer.v1.sampler.sampler_kwargs={}",
        "actor_rollout_ref.rollout.max_num_seqs=64",
        "actor_rollout_ref.rollout.custom.token_delay_s=0.15",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines, result = read_run(tmp_path)
    assert result["lag"]["configured"]["versions"] == 8
    assert result["lag"]["achieved"]["versions"] < 6
    for line in lines:  # verl counts the same thing on its side
        ours, verls = (
            line["data"][k] for k in ("actor/staleness/versions", "training/off_policy/trajectory_staleness_worst/mean")
        )
        assert ours == pytest.approx(verls)
    assert max(line["data"]["training/off_policy/trajectory_spans/max"] for line in lines) > 1


@pytest.mark.embedded
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything_and_still_writes_a_summary(tmp_path, sent, status):
    process = subprocess.Popen(
        [sys.executable, "-m", "verl_sat.embedded.quickstart", "--lag", "1", "--steps", "500", "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 300
    while not ((tmp_path / "metrics.jsonl").exists() and (tmp_path / "metrics.jsonl").stat().st_size):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.5)
    children = running_with(str(tmp_path))
    assert children  # verl's driver names the folder in its command line
    process.send_signal(sent)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == status, output
    assert "Traceback" not in output
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "interrupted"
    time.sleep(3)
    assert not running_with(str(tmp_path))


def running_with(text):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                environment = (entry / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if text in command or f"VERL_FILE_LOGGER_PATH={text}" in environment:
                found.append((int(entry.name), command[:80]))
    return found
