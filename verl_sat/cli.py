"""``verl-sat``: what there is to know about a job before it runs.

Neither needs a GPU, Ray, the model or the rollout engine; both take arguments as ``python -m verl.trainer.main_ppo``
does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from verl_sat.cli_lag import lag

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app.command("lag", context_settings=_PASSED_ON)(lag)


@app.command(context_settings=_PASSED_ON)
def doctor(
    context: typer.Context,
    model_config: Annotated[
        Path | None,
        typer.Option(help="config.json of the model (or its folder), if the model is not on this machine."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    fast: Annotated[bool, typer.Option(help="Leave out what needs verl itself to be imported (seconds).")] = False,
) -> None:
    """Say what a job will do and what is wrong with it: verl-sat doctor ARGUMENTS OF verl.trainer.main_ppo.

    Exit status 0: nothing wrong. 1: warnings. 2: it would fail, or silently not do what was asked.
    """
    from verl_sat.doctor.examine import examine
    from verl_sat.doctor.show import show

    examination = examine(context.args, model_config, start_child=not fast)
    if as_json:
        json.dump(examination.as_dict(), sys.stdout, indent=2, default=str)
        print()
    else:
        show(examination, Console(highlight=False))
    raise typer.Exit(examination.exit_status)


if __name__ == "__main__":
    app()
