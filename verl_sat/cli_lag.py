"""``verl-sat lag``: how stale a job's samples will be, or how to make them so stale."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_sat import lag as accounting
from verl_sat import lag_words
from verl_sat.composition import CompositionError, compose
from verl_sat.lag import count
from verl_sat.preflight import check
from verl_sat.preflight_job import Job

# Keys that a refusal has to be about to be shown here; `verl-sat doctor` shows all.
_LAG_KEYS = ("trainer.v1.", "data.train_batch_size")


def lag(
    context: typer.Context,
    wanted: Annotated[int | None, typer.Option("--for", help="Print the overrides for a lag of so much.")] = None,
    unit: Annotated[str, typer.Option(help="Of --for: updates or versions.")] = "updates",
    kind: Annotated[str, typer.Option(help="Of --for: broadcast or constant.")] = "broadcast",
    mini_batch: Annotated[int | None, typer.Option(help="Of --for: prompts of a mini-batch.")] = None,
    exact: Annotated[bool, typer.Option(help="Of --for: with the exact-lag sampler.")] = True,
    updates_per_version: Annotated[int, typer.Option(help="Of --for with --unit versions: K.")] = 1,
    words: Annotated[bool, typer.Option("--words", help="What other frameworks call it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Account for the lag of a job: verl-sat lag ARGUMENTS OF verl.trainer.main_ppo.

    Exit status 0, or 2 if the arguments make no job.
    """
    console = Console(highlight=False)
    try:
        if context.args and (words or wanted is not None):
            raise ValueError(f"{context.args[0]}: --for and --words take no arguments of a job")
        _refuse_what_has_no_effect(context, wanted is not None, unit)
        if words:
            _show_words(console, as_json)
        elif wanted is not None:
            found = accounting.overrides_for(wanted, unit, kind, mini_batch, exact, updates_per_version)
            print(json.dumps(found) if as_json else "\n".join(found))
        else:
            _show_account(context.args, console, as_json)
    except (CompositionError, ValueError) as error:
        Console(stderr=True, highlight=False).print(Text(f"error: {error}"), soft_wrap=True)
        raise typer.Exit(2) from None


def _refuse_what_has_no_effect(context: typer.Context, has_for: bool, unit: str) -> None:
    given = {
        name
        for name in ("unit", "kind", "mini_batch", "exact", "updates_per_version")
        if context.get_parameter_source(name).name == "COMMANDLINE"
    }
    if given and not has_for:
        raise ValueError(f"--{min(given).replace('_', '-')} says something about --for, which was not given")
    idle = given & ({"kind"} if unit == "versions" else {"updates_per_version"})
    if idle:
        raise ValueError(f"--{min(idle).replace('_', '-')} has no effect on a lag in {unit}")


def _show_account(arguments: list[str], console: Console, as_json: bool) -> None:
    job = Job.read(compose(arguments).config)
    account = accounting.account(job)
    found = check(job.config, any_job=True)
    refused = [str(finding) for finding in found if finding.level == "error" and finding.key.startswith(_LAG_KEYS)]
    if as_json:
        derived = {name: getattr(account, name) for name in ("name", "kind", "updates_bound", "summary")}
        json.dump({"schema_version": 1, **asdict(account), **derived, "refused": refused}, sys.stdout, indent=2)
        print()
        return
    first, last = account.updates
    bound = "nothing bounds it" if account.versions_bound is None else (
        f"{count(account.versions_bound, 'version')}, {count(account.updates_bound, 'update')}")  # fmt: skip
    rows = [
        ("trainer", account.mode),
        ("K", f"{count(account.updates_per_version, 'update')} for one weight transfer "
              f"({count(account.mini_batches, 'mini-batch')} x {count(account.epochs, 'epoch')})"),
        ("W", f"{count(account.batches_in_flight, 'batch')} in flight"),
        ("typical" if not account.exact else "every sample",
         f"{count(account.versions, 'version')}, {count(first, 'update')} old"
         + (f", {last} at the last of a cycle" if first != last else "")),
        ("at most", bound),
        ("ramp", f"reached after {count(account.ramp_steps, 'trainer step')}; before, there is only version 0"
                 if account.ramp_steps else "none"),
        ("name", account.name),
    ]  # fmt: skip
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for heading, text in rows:
        table.add_row(heading, Text(text))
    for number, note in enumerate(account.notes):
        table.add_row("" if number else "notes", Text(note))
    console.print(table)
    for line in refused:
        console.print(Text(f"verl would not start this: {line}"), soft_wrap=True)


def _show_words(console: Console, as_json: bool) -> None:
    if as_json:
        print(json.dumps([word._asdict() for word in lag_words.WORDS], indent=2))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for field in lag_words.Word._fields:
        table.add_column(field, overflow="fold")
    for word in lag_words.WORDS:
        table.add_row(*map(Text, word))
    console.print(table)
