"""One command that runs verl's asynchronous trainer on a CPU and says what happened.

``examples/quickstart.sh`` makes the environment and calls this module. It prepares the model and the
data, composes and checks verl's configuration, runs ``python -m verl.trainer.main_ppo`` as a child
process, shows its progress and ends with a table and ``summary.json``.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from verl_sat import lag
from verl_sat.embedded import summary
from verl_sat.embedded.progress import ProgressView, RunLog
from verl_sat.embedded.rollout_settings import check_rollout_config

SAT_GROUPS = {"sat_grpo": "grpo", "sat_gspo": "gspo"}
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MINI_BATCH_PROMPTS = 16  # of the group profile=cpu
SEQUENCE_LOSSES = {"gspo"}  # verl's own losses that want a sequence-level aggregation

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(highlight=False)


class LagKind(str, Enum):
    """How a lag of L arises; see :mod:`verl_sat.lag`."""

    constant = "constant"
    broadcast = "broadcast"


class Replay(str, Enum):
    """Whether the experts that the rollout chose are replayed in training."""

    R3 = "R3"
    disabled = "disabled"


class RolloutDtype(str, Enum):
    """Precision of the rollout's model; the trainer's is fp32."""

    fp32 = "fp32"
    bf16 = "bf16"


DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16"}  # verl's


class QuickstartError(RuntimeError):
    """Something the user can change; shown as one message, without a traceback."""


@dataclass(frozen=True)
class Settings:
    """What the command line asked for."""

    lag: int
    lag_kind: str
    loss: str
    steps: int
    seed: int
    out: Path
    overrides: tuple[str, ...]
    replay: str = "R3"
    rollout_dtype: str = "fp32"


def quoted(value: object) -> str:
    """A value as a Hydra string, whatever is in it: a path may hold ``=``, ``,`` or a blank."""
    text = str(value).replace("'", "\\'").replace("${", "\\${")
    return f"'{text}'"


def build_overrides(settings: Settings, job: object) -> list[str]:
    """Hydra overrides of ``verl.trainer.main_ppo`` for these settings, the user's own last."""
    actor = "actor_rollout_ref.actor"
    overrides = ["hydra.searchpath=[pkg://verl_sat.conf]", "+profile=cpu"]
    if settings.loss in SAT_GROUPS:
        overrides.append(f"+sat={SAT_GROUPS[settings.loss]}")
    else:
        overrides += [
            f"{actor}.policy_loss.loss_mode={settings.loss}",
            "algorithm.rollout_correction.bypass_mode=True",
        ]
        if settings.loss in SEQUENCE_LOSSES:
            overrides.append(f"{actor}.loss_agg_mode=seq-mean-token-mean")
    if settings.replay == "R3":
        overrides.append("+r3=fsdp")
    overrides += [
        f"actor_rollout_ref.rollout.dtype={DTYPE_NAMES[settings.rollout_dtype]}",
        f"actor_rollout_ref.model.path={quoted(job.model_path)}",
        f"data.train_files={quoted(job.train_file)}",
        f"data.val_files={quoted(job.test_file)}",
        f"data.max_prompt_length={job.max_prompt_length}",
        f"data.max_response_length={job.max_response_length}",
        f"reward.custom_reward_function.path={quoted(job.reward_file)}",
        f"reward.custom_reward_function.name={job.reward_name}",
        f"{actor}.optim.lr={job.learning_rate}",
        f"trainer.total_training_steps={settings.steps}",
        "trainer.project_name=verl-sat",
        f"trainer.experiment_name={quoted(settings.out.name)}",
        f"trainer.default_local_dir={quoted(settings.out / 'checkpoints')}",
        f"data.seed={settings.seed}",
        f"{actor}.data_loader_seed={settings.seed}",
        f"actor_rollout_ref.rollout.seed={settings.seed}",
        *lag.overrides_for(settings.lag, kind=settings.lag_kind, mini_batch_size=MINI_BATCH_PROMPTS),
        f"hydra.run.dir={quoted(settings.out / 'hydra')}",
        *settings.overrides,
    ]
    return overrides


def own_environment(out: Path) -> dict[str, str]:
    """What verl's processes need in the environment; Ray hands it on to the workers that it starts here."""
    return {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_PLUGINS": "verl_sat",
        # verl 0.9.1 passes print's `flush` to logger.info in separate_async without a hybrid engine: at INFO
        # that is a TypeError.
        "VERL_LOGGING_LEVEL": "WARNING",
        "VERL_FILE_LOGGER_PATH": str(out / "metrics.jsonl"),
        "OMP_NUM_THREADS": "1",  # two processes compute at a time, and results do not depend on the core count
        "PYTHONUNBUFFERED": "1",
        "RAY_ADDRESS": "local",  # a Ray of its own, never a cluster that happens to run
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def compose_config(overrides: list[str]):
    """verl's configuration for these overrides, checked as verl's driver would check it.

    Raises:
        QuickstartError: Hydra cannot compose it, the preflight refuses it, or a field is invalid.
    """
    os.environ.update({key: own_environment(Path("."))[key] for key in ("VERL_PLATFORM", "VERL_LOGGING_LEVEL")})
    import verl.trainer
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.utils.config import omega_conf_to_dataclass

    from verl_sat import preflight

    config_dir = str(Path(verl.trainer.__file__).parent / "config")
    try:
        with initialize_config_dir(config_dir, version_base=None):
            config = compose("ppo_trainer", overrides=[o for o in overrides if not o.startswith("hydra.run.dir")])
        preflight.run(config)
        loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
        if loss_mode not in POLICY_LOSS_REGISTRY:
            raise QuickstartError(
                f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode}: unknown loss; "
                f"known: {', '.join(sorted(POLICY_LOSS_REGISTRY))}"
            )
        omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        _check_sizes(config)
    except (HydraException, OmegaConfBaseException, ValueError, TypeError, AssertionError) as error:
        raise QuickstartError(_root_cause(error)) from error
    return config, [finding for finding in preflight.check(config) if finding.level == "warning"], OmegaConf


def _check_sizes(config) -> None:
    """What verl or the rollout would refuse minutes later.

    Raises:
        ValueError: naming the key to change.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if rollout.name == "hf":
        check_rollout_config(rollout)
        if config.actor_rollout_ref.hybrid_engine:
            raise ValueError("actor_rollout_ref.hybrid_engine=True: the hf rollout runs beside the trainer; set False")
    sync_step = config.trainer.v1.separate_async.parameter_sync_step
    if config.data.train_batch_size != sync_step * actor.ppo_mini_batch_size:
        raise ValueError(
            f"data.train_batch_size={config.data.train_batch_size}: expected parameter_sync_step * ppo_mini_batch_size "
            f"= {sync_step * actor.ppo_mini_batch_size}"
        )
    per_rank, rest = divmod(actor.ppo_mini_batch_size * rollout.n, config.trainer.n_gpus_per_node)
    if not actor.use_dynamic_bsz and (rest or per_rank % actor.ppo_micro_batch_size_per_gpu):
        raise ValueError(
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={actor.ppo_micro_batch_size_per_gpu}: expected a "
            f"divisor of the {per_rank} responses of a mini-batch on one rank"
        )


def _root_cause(error: BaseException) -> str:
    """The message a user can act on: Hydra wraps ours in the path of the failed instantiation."""
    while error.__cause__ is not None and str(error.__cause__):
        error = error.__cause__
    return str(error).strip() or repr(error)


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end."""

    def __init__(self, number: int, _frame: object = None) -> None:
        super().__init__(number)
        self.exit_status = 128 + number


def _raise_stopped(number: int, frame: object) -> None:
    raise Stopped(number)


class Job:
    """verl's driver as a child process in a process group of its own."""

    def __init__(self, overrides: list[str], out: Path) -> None:
        self.command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]
        self.log_path = out / "verl.log"
        self._log = self.log_path.open("wb")
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **own_environment(out)},
            start_new_session=True,
        )

    def poll(self) -> int | None:
        return self.process.poll()

    def _kill(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # Ray's own processes end with their parent

    def stop(self, patience_s: float = 20.0) -> None:
        """End it as Ctrl-C would, so that Ray stops its workers; then less politely. Impatience kills."""
        for received in STOP_SIGNALS:
            signal.signal(received, self._kill)
        for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is not None:
                break
            with contextlib.suppress(ProcessLookupError):
                if sent is signal.SIGINT:
                    self.process.send_signal(sent)
                else:
                    os.killpg(self.process.pid, sent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=patience_s)
        self.close()

    def close(self) -> None:
        self._log.close()


def prepare_job(out: Path, seed: int, on_progress: Callable[[str], None]):
    """Model, data and reward under ``out/job``, made anew for every run."""
    import torch
    from transformers.utils import logging as transformers_logging

    from verl_sat.embedded.warm_start import WarmStartError, prepare

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)  # the rounding, and with it the warm start, depends on the number of threads
    try:
        return prepare(out / "job", seed=seed, on_progress=on_progress)
    except WarmStartError as error:
        raise QuickstartError(f"{error} (--seed {seed})") from error


def make_room(out: Path, resuming: bool) -> None:
    """Make the folder and clear an earlier run's files; verl's file logger truncates, so a resume keeps the lines."""
    out.mkdir(parents=True, exist_ok=True)
    metrics = out / "metrics.jsonl"
    if resuming and metrics.exists():
        with (out / "metrics.previous.jsonl").open("ab") as previous:
            previous.write(metrics.read_bytes())
    for stale in ("metrics.jsonl", "summary.json", "config.yaml", "command.sh", "verl.log"):
        (out / stale).unlink(missing_ok=True)


def run(settings: Settings) -> int:
    """Run one job from beginning to end; returns the exit status."""
    out = settings.out
    for received in STOP_SIGNALS:
        signal.signal(received, _raise_stopped)
    clock = summary.StageClock()
    view = ProgressView(console)

    # Cheap checks first: a wrong key should cost neither a warm start nor the results of an earlier run.
    with clock.stage("check"):
        view.stage("checking the configuration")
        config, _, _ = compose_config(build_overrides(settings, _PLACEHOLDER_JOB))
    try:
        make_room(out, resuming=config.trainer.resume_mode != "disable")
    except OSError as error:
        raise QuickstartError(f"--out {out}: {error.strerror or error}") from error
    with clock.stage("prepare"):
        view.stage("building model and data, warm start")
        job = prepare_job(out, settings.seed, view.note)
    overrides = build_overrides(settings, job)
    config, warnings, omegaconf = compose_config(overrides)
    omegaconf.save(config, out / "config.yaml", resolve=True)
    for finding in warnings:
        view.warn(str(finding))
    view.steps = int(config.trainer.total_training_steps)

    child = Job(overrides, out)
    exports = [f"export {name}={shlex.quote(value)}" for name, value in own_environment(out).items()]
    (out / "command.sh").write_text("\n".join([*exports, shlex.join(child.command), ""]), encoding="utf-8")
    log = RunLog(out / "metrics.jsonl", child.log_path)
    status, returncode = "completed", 0
    started = time.monotonic()
    try:
        view.stage("starting Ray and verl's processes")
        while child.poll() is None:
            view.update(log.poll())
            time.sleep(0.25)
        view.update(log.poll())
        returncode = child.poll() or 0
        status = "completed" if returncode == 0 else "failed"
    except Stopped as stopped:
        status, returncode = "interrupted", stopped.exit_status
        view.stage("interrupted: stopping verl and Ray")
        child.stop()
        view.update(log.poll())
    finally:
        child.stop()
        view.close()
    clock.add_run(started, log.first_step_at, time.monotonic())

    result = summary.build(
        status=status,
        settings=settings,
        config=config,
        records=log.records,
        seconds=clock.seconds,
        prepared_reward=job.reward,
        warnings=[str(finding) for finding in warnings] + log.warnings(),
    )
    summary.write(result, out / "summary.json")
    summary.print_table(console, result, out)
    if status == "failed":
        reason = log.failure_reason()
        console.print(f"verl failed (exit status {returncode})", style="bold red")
        console.print(f"the whole log is {child.log_path}", markup=False, soft_wrap=True)
        console.print(reason, markup=False, soft_wrap=True)
    return returncode


@dataclass(frozen=True)
class _Placeholder:
    """Stands in for the prepared job where only the configuration's shape is checked."""

    model_path: str = "/nonexistent/model"
    train_file: str = "/nonexistent/train.parquet"
    test_file: str = "/nonexistent/test.parquet"
    reward_file: str = "pkg://verl_sat.embedded.task"
    reward_name: str = "compute_score"
    max_prompt_length: int = 18
    max_response_length: int = 12
    learning_rate: float = 1e-4


_PLACEHOLDER_JOB = _Placeholder()


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="Hydra overrides of verl's configuration.")] = None,
    lag_: Annotated[int, typer.Option("--lag", min=0, help="Lag L of the samples, in optimizer updates.")] = 8,
    lag_kind: Annotated[
        LagKind, typer.Option(help="constant: every sample is L updates old; broadcast: weights are sent every L.")
    ] = LagKind.constant,
    loss: Annotated[str, typer.Option(help="Policy loss: sat_gspo, sat_grpo, or any that verl has registered.")] = (
        "sat_gspo"
    ),
    steps: Annotated[int, typer.Option(min=1, help="Trainer steps.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Seed of model, data and sampling.")] = 1,
    replay: Annotated[
        Replay, typer.Option(help="R3: the experts that the rollout chose are replayed in training.")
    ] = Replay.R3,
    rollout_dtype: Annotated[
        RolloutDtype, typer.Option(help="Precision of the rollout; bf16 shows the mismatch of a real engine.")
    ] = RolloutDtype.fp32,
    out: Annotated[Path | None, typer.Option(help="Folder to write to (out/LOSS-KIND-lagL-seedN).")] = None,
) -> None:
    """Run verl's separate_async trainer on this machine's CPU with a tiny MoE model."""
    name = f"{loss}-{lag_kind.value}-lag{lag_}-seed{seed}"
    settings = Settings(
        lag=lag_,
        lag_kind=lag_kind.value,
        loss=loss,
        steps=steps,
        seed=seed,
        out=(out or Path("out") / name).resolve(),
        overrides=tuple(overrides or ()),
        replay=replay.value,
        rollout_dtype=rollout_dtype.value,
    )
    try:
        raise typer.Exit(run(settings))
    except QuickstartError as error:
        console.print("error:", style="bold red", end=" ")
        console.print(str(error), markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except Stopped as stopped:
        console.print("interrupted")
        raise typer.Exit(stopped.exit_status) from None


if __name__ == "__main__":
    app()
