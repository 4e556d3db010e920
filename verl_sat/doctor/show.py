"""The doctor's report in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_sat.doctor.examine import Examination

_STYLES = {"error": "bold red", "warning": "yellow"}
_VERDICTS = {
    0: ("nothing wrong was found", "green"),
    1: ("it would run; read the warnings", "yellow"),
    2: ("it would fail, or silently not do what was asked", "bold red"),
}


def show(examination: Examination, console: Console) -> None:
    """Print a report: what is installed, what the job will do, what is wrong with it."""
    here = [f"{name} {version}" for name, version in examination.versions.items() if version]
    absent = [name for name, version in examination.versions.items() if not version]
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("installed", Text(", ".join(here)))
    if absent:
        table.add_row("not here", Text(f"{', '.join(absent)} (no fault of this job: its nodes may have them)"))
    table.add_row("plugin", Text(examination.plugin))
    last = None
    for heading, text in examination.facts:
        table.add_row(heading if heading != last else "", Text(text))
        last = heading
    console.print(table)
    console.print()
    for finding in examination.findings:
        console.print(Text.assemble((finding.level, _STYLES[finding.level]), " ", (finding.key, "bold")))
        console.print(Text(f"    {finding.message}"), soft_wrap=True)
        if finding.remedy:
            console.print(Text.assemble("    set ", (finding.remedy, "cyan")), soft_wrap=True)
    text, style = _VERDICTS[examination.exit_status]
    count = len(examination.findings)
    console.print(Text(f"{count} finding{'s' if count != 1 else ''}: {text}", style=style))
