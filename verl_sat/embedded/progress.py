"""Reading a run while it runs, and showing it in a person's terms."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_RAY_PREFIX = re.compile(r"^\([^)]*pid=\d+[^)]*\)\s*")
_ERROR_LINE = re.compile(r"^\s*(?:[\w.]+\.)?(\w*(?:Error|Exception))\b.*?:\s*(\S.*)$")
_MAX_REASON_LINES = 12

# What verl and Ray print when they get there, in this order.
_MILESTONES = (
    ("Started a local Ray instance", "starting verl's workers (trainer, rollout server, data plane)"),
    ("LLMServerManager: [", "rollout server is up, first responses are being sampled"),
)


class RunLog:
    """Follows ``metrics.jsonl`` (verl's file logger) and the log of verl's processes."""

    def __init__(self, metrics_path: Path, log_path: Path) -> None:
        self.metrics_path = metrics_path
        self.log_path = log_path
        self.records: list[dict[str, Any]] = []
        self.first_step_at: float | None = None
        self.stage: str | None = None
        self._read = 0
        self._rest = b""

    def poll(self) -> RunLog:
        """Take in what was written since the last call."""
        if self.metrics_path.exists():
            with self.metrics_path.open("rb") as file:
                file.seek(self._read)
                chunk = file.read()
            self._read += len(chunk)
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                self.records.append(json.loads(line))
                if self.first_step_at is None and "actor/pg_loss" in self.records[-1]["data"]:
                    self.first_step_at = time.monotonic()
        if not self.records:
            self.stage = self._milestone()
        return self

    def _milestone(self) -> str | None:
        text = self._text()
        reached = [stage for marker, stage in _MILESTONES if marker in text]
        return reached[-1] if reached else None

    def _text(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path.exists() else ""

    def _lines(self) -> list[str]:
        return [_RAY_PREFIX.sub("", _ANSI.sub("", line)) for line in self._text().splitlines()]

    def warnings(self) -> list[str]:
        """This plugin's own warnings of any of verl's processes, each once, in order."""
        found: dict[str, None] = {}
        for line in self._lines():
            if line.startswith(("WARNING", "ERROR")) and "verl-sat: " in line:
                found["warning: " + line.partition("verl-sat: ")[2].strip()] = None
        return list(found)

    def failure_reason(self) -> str:
        """The most telling lines of a failed run: the preflight's text, else the last exception's."""
        lines = self._lines()
        for start, line in enumerate(lines):
            if "verl-sat: this job was not started" in line:
                return "\n".join(lines[start : start + _MAX_REASON_LINES]).strip()
        errors = [line.strip() for line in lines if _ERROR_LINE.match(line) and "UserWarning" not in line]
        root = [line for line in errors if not line.startswith("ray.")]
        return (root or errors or lines[-3:] or ["no output"])[-1]


def _show(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


class ProgressView:
    """A progress bar on a terminal, a line per step elsewhere (a log file, CI)."""

    def __init__(self, console: Console, steps: int = 0) -> None:
        self.console = console
        self.steps = steps
        self._shown = 0
        self._stage = ""
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._started = time.monotonic()

    def stage(self, text: str) -> None:
        """A new stage begins."""
        if text != self._stage:
            self._stage = text
            self.console.print(f"[{time.monotonic() - self._started:5.0f} s] {text}", markup=False)

    def note(self, text: str) -> None:
        """A detail of the current stage; only shown on a terminal."""
        if self.console.is_terminal:
            self.console.print(f"          {text}", style="dim", markup=False)

    def warn(self, text: str) -> None:
        """Something the user should know."""
        self.console.print(text, style="yellow", markup=False, soft_wrap=True)

    def update(self, log: RunLog) -> None:
        """Show the stage or the steps that ``log`` has reached."""
        if not log.records:
            if log.stage:
                self.stage(log.stage)
            return
        for record in log.records[self._shown :]:
            self._step(record, log)
        self._shown = len(log.records)

    def _step(self, record: dict[str, Any], log: RunLog) -> None:
        step, data = record["step"], record["data"]
        if "actor/pg_loss" not in data:
            return  # a validation before the first step
        self.stage("training")
        done = sum("actor/pg_loss" in r["data"] for r in log.records)
        elapsed = time.monotonic() - (log.first_step_at or self._started)
        left = elapsed / max(done - 1, 1) * (self.steps - step) if done > 1 else None
        text = (
            f"reward {_show(data.get('critic/score/mean'))}  "
            f"lag {_show(data.get('actor/staleness/versions'), 1)} versions, "
            f"{_show(data.get('actor/staleness/updates'), 1)} updates  "
            f"eps_eff {_show(data.get('actor/sat/eps_eff_low'))}/{_show(data.get('actor/sat/eps_eff_high'))}  "
            f"replayed {_show(data.get('actor/r3/replayed_frac'))}  "
            f"left {'-' if left is None else f'{left:.0f} s'}"
        )
        if not self.console.is_terminal:
            self.console.print(f"step {step}/{self.steps}  {text}", markup=False, soft_wrap=True)
            return
        if self._bar is None:
            count = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20))
            self._bar = Progress(*count, TextColumn("{task.description}"), console=self.console)
            self._bar.start()
            self._task = self._bar.add_task("", total=self.steps)
        self._bar.update(self._task, completed=step, description=text)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
