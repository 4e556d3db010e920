"""``summary.json``: what a quickstart run was and did, in a schema that a test freezes.

The schema is described in ``examples/README.md``; a change of it raises :data:`SCHEMA_VERSION`.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from verl_sat import lag as accounting

SCHEMA_VERSION = 2
REWARD_KEY = "critic/score/mean"
REWARD_WINDOW = 10
_PACKAGES = ("verl-sat", "verl", "torch", "transformers", "ray", "tensordict", "TransferQueue", "numpy")


class StageClock:
    """Wall time by stage [s]."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a block as stage ``name``."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = time.monotonic() - start

    def add_run(self, started: float, first_step: float | None, ended: float) -> None:
        """Split the child process's time at its first trained step: ``start`` and ``train``."""
        self.seconds["start"] = (first_step or ended) - started
        self.seconds["train"] = ended - first_step if first_step else 0.0


def trained(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines that trained (a validation before the first step has no actor keys)."""
    return [record for record in records if "actor/pg_loss" in record["data"]]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _column(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


def _achieved(rows: Sequence[Mapping[str, Any]], ramp_steps: int) -> dict[str, Any]:
    """Lag as measured from the samples' version tags, after the ramp of the start."""
    steady = [row["data"] for row in rows if row["step"] > ramp_steps]
    oldest = _column(steady, "actor/staleness/versions_oldest")
    return {
        "versions": _mean(_column(steady, "actor/staleness/versions")),
        "versions_oldest": max(oldest) if oldest else None,
        "updates": _mean(_column(steady, "actor/staleness/updates")),
        "unknown_frac": _mean(_column(steady, "actor/staleness/unknown_frac")),
        "inexact_frac": _mean(_column(steady, "actor/staleness/inexact_frac")),
        "steps_measured": len(_column(steady, "actor/staleness/versions")),
    }


def _replay(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """What the routers reported (``actor/r3/*``), means over all steps; None where nothing was replayed."""
    data = [row["data"] for row in rows]
    return {
        name: _mean(_column(data, f"actor/r3/{name}"))
        for name in ("replayed_frac", "disagreement_frac", "bytes_per_token")
    }


def build(
    *,
    status: str,
    settings: Any,
    config: Any,
    records: Sequence[Mapping[str, Any]],
    seconds: Mapping[str, float],
    prepared_reward: float,
    warnings: Sequence[str],
) -> dict[str, Any]:
    """Assemble the summary.

    Args:
        status: ``completed``, ``failed`` or ``interrupted``.
        settings: what the command line asked for (lag, lag_kind, loss, steps, seed, overrides).
        config: verl's composed configuration, after all overrides.
        records: lines of ``metrics.jsonl``.
        seconds: wall time by stage [s].
        prepared_reward: reward measured after the warm start.
        warnings: this plugin's warnings.
    """
    rows = trained(records)
    plan = accounting.account(config)
    rewards = _column([row["data"] for row in rows], REWARD_KEY)
    actor = config.actor_rollout_ref.actor
    sat = actor.policy_loss.get("sat", None)
    return {
        "schema_version": SCHEMA_VERSION,
        "status": status,
        "steps": {
            "requested": int(config.trainer.total_training_steps),
            "completed": rows[-1]["step"] if rows else 0,
        },
        "seed": settings.seed,
        "lag": {
            "kind": settings.lag_kind,
            "configured": {
                "versions": plan.versions,
                "updates": plan.updates[0],
                "updates_oldest": plan.updates[1],
                "ramp_steps": plan.ramp_steps,
            },
            "achieved": _achieved(rows, plan.ramp_steps),
        },
        "loss": {
            "name": actor.policy_loss.loss_mode,
            "loss_agg_mode": actor.loss_agg_mode,
            "clip_ratio_low": actor.clip_ratio_low,
            "clip_ratio_high": actor.clip_ratio_high,
            "bypass_mode": config.algorithm.rollout_correction.bypass_mode,
            "sat": None if sat is None else OmegaConf.to_container(sat, resolve=True),
        },
        "replay": {
            "mode": (actor.fsdp_config.get("router_replay", None) or {}).get("mode", "disabled"),
            "rollout_dtype": config.actor_rollout_ref.rollout.dtype,
            **_replay(rows),
        },
        "reward": {
            "warm_start": prepared_reward,
            "first": _mean(rewards[:REWARD_WINDOW]),
            "last": _mean(rewards[-REWARD_WINDOW:]),
            "window_steps": min(REWARD_WINDOW, len(rewards)),
        },
        "seconds": {**{name: round(value, 3) for name, value in seconds.items()}},
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "overrides": list(settings.overrides),
        "warnings": list(dict.fromkeys(warnings)),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write(summary: Mapping[str, Any], path: Path) -> None:
    """Write the summary as JSON (null for inf and NaN: strict readers must be able to read it)."""
    path.write_text(json.dumps(_finite(summary), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(console: Console, summary: Mapping[str, Any], out: Path) -> None:
    """The short table at the end of a run."""

    def show(value: float | None, digits: int = 3) -> str:
        return "not measured" if value is None else f"{value:.{digits}f}"

    configured, achieved = summary["lag"]["configured"], summary["lag"]["achieved"]
    reward, seconds = summary["reward"], summary["seconds"]
    updates = f"{configured['updates']}"
    if configured["updates_oldest"] != configured["updates"]:
        updates += f" to {configured['updates_oldest']}"
    title = f"{summary['loss']['name']}, {summary['lag']['kind']} lag: {summary['status']}"
    table = Table(show_header=False, title=title)
    table.add_row("steps", f"{summary['steps']['completed']} of {summary['steps']['requested']}")
    table.add_row(
        f"reward, first and last {reward['window_steps']} steps", f"{show(reward['first'])} -> {show(reward['last'])}"
    )
    table.add_row("lag configured", f"{configured['versions']} versions, {updates} updates")
    table.add_row(
        f"lag achieved (from step {configured['ramp_steps'] + 1})",
        "not measured"
        if achieved["versions"] is None
        else f"{show(achieved['versions'], 2)} versions, {show(achieved['updates'], 2)} updates",
    )
    replay = summary["replay"]
    table.add_row(
        f"routes replayed ({replay['mode']})",
        "none"
        if replay["replayed_frac"] is None
        else f"{replay['replayed_frac']:.1%}, the router would choose otherwise in {replay['disagreement_frac']:.1%}",
    )
    table.add_row("seconds", ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()))
    table.add_row("warnings", str(len(summary["warnings"])))
    console.print(table)
    for warning in summary["warnings"]:
        console.print(warning, style="yellow", markup=False, soft_wrap=True)
    files = ("summary.json", "metrics.jsonl", "config.yaml", "command.sh", "verl.log")
    console.print(
        f"in {out}: {', '.join(name for name in files if (out / name).exists())}", markup=False, soft_wrap=True
    )
