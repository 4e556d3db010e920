"""The doctor's examination: compose, ask the preflight, ask verl in a process of its own, collect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_sat import lag, preflight
from verl_sat.composition import Composed, CompositionError, compose
from verl_sat.doctor import child, keys
from verl_sat.doctor.facts import Fact, describe, installed_versions
from verl_sat.preflight_job import LOSS_MODE, Finding, Job
from verl_sat.preflight_r3_job import MODEL

CHILD_SECONDS = 180

NO_CONFIG = "config"
"""Key of findings about the composition as a whole."""


@dataclass
class Examination:
    """All that the doctor found.

    Attributes:
        findings: errors first.
        facts: heading and text, in order.
        versions: of packages; None where one is not on this machine.
        plugin: how the plugin was loaded, in one line.
        composed: what was examined; None if the arguments make no configuration.
    """

    findings: list[Finding]
    facts: list[Fact] = field(default_factory=list)
    versions: dict[str, str | None] = field(default_factory=installed_versions)
    plugin: str = "not tried"
    composed: Composed | None = None

    @property
    def exit_status(self) -> int:
        """0 nothing wrong, 1 warnings, 2 errors: it would fail, or silently not do what was asked."""
        levels = {finding.level for finding in self.findings}
        return 2 if "error" in levels else 1 if "warning" in levels else 0

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "schema_version": 1,
            "exit_status": self.exit_status,
            "versions": self.versions,
            "plugin": self.plugin,
            "facts": [{"about": heading, "text": text} for heading, text in self.facts],
            "findings": [asdict(finding) for finding in self.findings],
        }


def examine(arguments: list[str], model_config: Path | None = None, start_child: bool = True) -> Examination:
    """Examine a job.

    Args:
        arguments: as for ``python -m verl.trainer.main_ppo``.
        model_config: the model's ``config.json``, or a folder with one, where the model itself is not on this machine.
        start_child: import verl in a process of its own; without it verl's own checks are left out.
    """
    try:
        composed = compose(arguments)
        _give_model_config(composed, model_config)
    except CompositionError as error:
        return Examination([Finding("error", NO_CONFIG, str(error))])
    job = Job.read(composed.config)
    findings = list(preflight.check(composed.config, any_job=True))
    findings += _unresolved(composed)
    extra = keys.extra_keys(composed)
    in_dataclasses = [key for key in extra if keys.parent_is_dataclass(composed.config, key)]
    findings += keys.unread_keys(composed.config, [key for key in extra if key not in in_dataclasses])
    said = [finding.key for finding in findings if finding.level == "error"]
    answer: dict[str, Any] = {}
    plugin = "not tried"
    if start_child:
        # What is wrong already would only be said again, less clearly.
        answer = _ask_verl(composed, [key for key in in_dataclasses if key not in said], validate=not said)
        plugin, more = _plugin(answer, job)
        findings += more
        findings += [Finding(**finding) for finding in answer.get("findings", ()) if finding["key"] not in said]
    examination = Examination(_sorted(findings), plugin=plugin, composed=composed)
    examination.facts = describe(job, answer.get("losses", {}))
    examination.facts += _lag(job, examination)
    examination.facts += [("not checked", f"a package is not here: {text}") for text in answer.get("not_checked", ())]
    handed_on = keys.handed_on_keys(composed)
    if handed_on:
        names = ", ".join(key.rpartition(".")[2] for key in handed_on)
        examination.facts.append(("handed on", f"only the engines know these keys, not checked here: {names}"))
    return examination


def _give_model_config(composed: Composed, path: Path | None) -> None:
    if path is None:
        return
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file() or path not in (folder, folder / "config.json"):
        raise CompositionError(f"--model-config {path}: expected a file config.json, or a folder that holds one")
    with open_dict(composed.config):
        OmegaConf.update(composed.config, f"{MODEL}.hf_config_path", str(folder))


def _unresolved(composed: Composed) -> Iterator[Finding]:
    """Interpolations that point nowhere; verl resolves the whole configuration before it starts."""
    try:
        OmegaConf.to_container(composed.config, resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or NO_CONFIG
        yield Finding("error", str(key), f"it cannot be resolved: {' '.join(str(error).split())}")


def _ask_verl(composed: Composed, in_dataclasses: list[str], validate: bool) -> dict[str, Any]:
    try:
        config = OmegaConf.to_container(composed.config, resolve=True)
    except OmegaConfBaseException:
        config, validate = OmegaConf.to_container(composed.config, resolve=False), False
    question = json.dumps({"config": config, "keys": in_dataclasses, "validate": validate}, default=str)
    command = [sys.executable, "-m", "verl_sat.doctor.child"]
    environment = {**os.environ, "VERL_LOGGING_LEVEL": os.environ.get("VERL_LOGGING_LEVEL", "WARNING")}
    try:
        done = subprocess.run(
            command, input=question, capture_output=True, text=True, timeout=CHILD_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"no answer within {CHILD_SECONDS} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith(child.MARK)]
    if not lines:
        return {"failure": f"exit status {done.returncode}: {' '.join(done.stderr.split())[-500:]}"}
    return json.loads(lines[-1].removeprefix(child.MARK))


def _plugin(answer: dict[str, Any], job: Job) -> tuple[str, list[Finding]]:
    """How a fresh process took the plugin, and what follows from it for this job."""
    if "failure" in answer:
        text = f"verl could not be imported here: {answer['failure']}"
        return text, [Finding("error" if job.concerns_us else "warning", "verl", text)]
    found: list[Finding] = []
    seconds = answer["seconds_to_import_verl"]
    if answer["plugin_failures"]:
        text = f"refused to load: {'; '.join(answer['plugin_failures'])}"
    elif not answer["plugin_loaded_by_verl"]:
        policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
        text = f"verl does not load it (VERL_USE_EXTERNAL_PLUGINS={policy})"
        if job.concerns_us:
            found.append(Finding("error", "VERL_USE_EXTERNAL_PLUGINS", text, "VERL_USE_EXTERNAL_PLUGINS=auto"))
    else:
        text = f"loaded by a fresh verl process (import of verl {seconds:.1f} s)"
    if job.loss_mode not in answer["losses"] and not job.sat:  # a rule says it of ours
        known = ", ".join(sorted(answer["losses"]))
        found.append(Finding("error", LOSS_MODE, f"verl has no loss {job.loss_mode!r}; it has {known}"))
    return text, found


def _lag(job: Job, examination: Examination) -> list[Fact]:
    try:
        account = lag.account(job)
    except ValueError as error:
        key, _, message = str(error).partition(": ")
        if not any(finding.key == key for finding in examination.findings):
            examination.findings = _sorted([*examination.findings, Finding("error", key, message or str(error))])
        return []
    return [("lag", account.summary), *(("lag", note) for note in account.notes)]


def _sorted(findings: list[Finding]) -> list[Finding]:
    return sorted(dict.fromkeys(findings), key=lambda finding: finding.level != "error")
