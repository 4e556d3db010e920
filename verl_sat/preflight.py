"""What stops a job before it starts.

The driver is the one place that sees the whole configuration: workers see only ``actor_rollout_ref``, and a
loss does not even know whether it runs in bypass mode. So whatever would leave SAT lost (another loss is
trained) or meaningless (every ratio is 1) is found here, before a worker starts, and each finding names the
full key and the value to set.

`check` is a pure function of the composed configuration and never raises; `run` raises or logs what it found.
A configuration without any of our names, and without replay of routes, has no findings.
"""

from __future__ import annotations

import logging
from typing import Any

from hydra.errors import CompactHydraException

from verl_sat.lag import LagError, account, count
from verl_sat.once import first_time, warn_once
from verl_sat.preflight_async import ASYNC_RULES
from verl_sat.preflight_job import Finding, Job
from verl_sat.preflight_r3 import R3_RULES, asks_for_replay, describe_replay
from verl_sat.preflight_rules import RULES, lost_to_bypass_rewrite
from verl_sat.preflight_scope import describe_scope

__all__ = ["Finding", "SATPreflightError", "check", "describe", "lost_to_bypass_rewrite", "run"]

logger = logging.getLogger(__name__)


class SATPreflightError(ValueError, CompactHydraException):
    """The configuration would lose SAT or make it meaningless.

    Hydra prints an exception of this kind as its text alone, without a traceback (``HYDRA_FULL_ERROR=1`` shows it).
    """

    def __init__(self, findings: list[Finding] | str) -> None:
        if isinstance(findings, str):  # from a pickle: exceptions are rebuilt from their text
            super().__init__(findings)
            return
        count = f"{len(findings)} error" + ("s" if len(findings) != 1 else "")
        lines = [f"verl-sat: this job was not started ({count} in its configuration)", *map(str, findings)]
        super().__init__("\n".join(lines))


def check(config: Any, any_job: bool = False) -> list[Finding]:
    """Find what would lose SAT or replay of routes, or make them meaningless.

    Args:
        config: the composed configuration of any of verl's trainers (DictConfig or mapping). Keys may be missing.
        any_job: also look at a job without anything of ours, for what stops any asynchronous job.
    Returns:
        Findings, errors first. Empty if the configuration names nothing of ours and asks for no replay, unless
        ``any_job``.
    """
    job = Job.read(config)
    ours, replay = job.concerns_us, asks_for_replay(job)
    rules = (RULES if ours else ()) + (R3_RULES if replay else ()) + (ASYNC_RULES if ours or replay or any_job else ())
    findings: list[Finding] = []
    for rule in rules:
        try:
            findings.extend(rule(job))
        except Exception as error:  # a rule that cannot be evaluated must not stop a job that would run
            _warn_once(f"preflight rule {rule.__name__} could not be evaluated: {type(error).__name__}: {error}")
    return sorted(findings, key=lambda finding: finding.level != "error")


def run(config: Any) -> None:
    """Check a configuration in the driver: raise for errors, log each warning once, say what will run.

    Args:
        config: as for `check`.
    Raises:
        SATPreflightError: with a line per error.
    """
    findings = check(config)
    for finding in findings:
        if finding.level == "warning":
            _warn_once(str(finding).removeprefix("warning: "))
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        raise SATPreflightError(errors)
    job = Job.read(config)
    if job.sat:
        _say_once(f"[verl-sat] {describe(job)}")
    replay = describe_replay(job)
    if replay:
        _say_once(f"[verl-sat] {replay}")


def _warn_once(text: str) -> None:
    warn_once(logger, text, "%s", text)


def _say_once(text: str) -> None:
    if first_time((__name__, text)):
        print(text, flush=True)  # as verl's own "[validate_config] ..." line, which INFO logging would hide


def describe(job: Job | Any) -> str:
    """One line that says which loss runs against which denominator at which lag.

    Args:
        job: a configuration as for `check`.
    """
    job = job if isinstance(job, Job) else Job.read(job)
    denominator = "the rollout engine's (bypass)" if job.bypass else "recomputed by the trainer (decoupled)"
    text = f"loss {job.loss_mode}, kernel {job.kernel}, old_log_prob {denominator}{describe_scope(job)}"
    if job.trainer == "v1" and job.is_async:
        try:
            found = account(job)
        except LagError:
            return text  # verl says it
        first, last = found.updates
        updates = f"{first}" if first == last else f"{first} to {last}"
        text += f", {job.mode}: typical lag {count(found.versions, 'version')}, {updates} optimizer updates"
    return text
