"""avg@k with standard errors, from the samples that verl writes at each evaluation.

    python recipes/data/score.py checkpoints/verl_sat/RUN/validation --updates-per-step 8

verl writes ``{step}.jsonl`` into ``trainer.validation_data_dir``, a line per sample. avg@k is the mean over problems of
the mean score of a problem's first k samples. Two standard errors, because two questions are asked:

* *sampling*: would the same problems, sampled anew, score the same? ``sqrt(sum_p var_p / k) / P``;
* *problems*: would other problems like these score the same? ``std_p / sqrt(P)``. With 30 problems it is large.

Exit status: 0; 2 where there is nothing to score.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

console = Console(highlight=False)


def scores_of(file: Path) -> tuple[dict[str, list[float]], str | None]:
    """Scores of each problem in the order of the file, and what is wrong with it.

    Raises:
        ValueError: for a line in the middle that cannot be read; names it.
    """
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    problems: dict[str, list[float]] = defaultdict(list)
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            problems[row["input"]].append(float(row["score"]))
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            if number == len(lines):
                return dict(problems), f"{file.name}: its last line is cut off and was left out"
            raise ValueError(f"{file}:{number}: not a line of verl's ({type(error).__name__}: {error})") from error
    return dict(problems), None


def average(problems: dict[str, list[float]], k: int) -> tuple[float, float, float] | None:
    """avg@k, its standard error by sampling and by problems; None where a problem has fewer than k samples."""
    if not problems or min(map(len, problems.values())) < k:
        return None
    means, variances = [], []
    for scores in problems.values():
        taken = scores[:k]
        mean = sum(taken) / k
        means.append(mean)
        variances.append(sum((score - mean) ** 2 for score in taken) / (k - 1) if k > 1 else math.nan)
    count = len(means)
    overall = sum(means) / count
    spread = sum((mean - overall) ** 2 for mean in means) / (count - 1) if count > 1 else math.nan
    return overall, math.sqrt(sum(variances) / k) / count, math.sqrt(spread / count)


def main(
    folder: Annotated[Path, typer.Argument(help="trainer.validation_data_dir of a run, or one of its files.")],
    k: Annotated[list[int] | None, typer.Option(min=1, help="Samples of a problem; may be given again.")] = None,
    updates_per_step: Annotated[int, typer.Option(min=1, help="K: optimizer updates of a trainer step.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Score the evaluations of a run."""
    sizes = sorted(set(k or [8, 16]))
    files = [folder] if folder.is_file() else sorted(folder.glob("*.jsonl"), key=_step)
    if not files:
        console.print(f"error: {folder}: no evaluation there (trainer.validation_data_dir)", soft_wrap=True)
        raise typer.Exit(2)
    rows, remarks = [], []
    for file in files:
        try:
            problems, remark = scores_of(file)
        except ValueError as error:
            console.print(f"error: {error}", markup=False, soft_wrap=True)
            raise typer.Exit(2) from None
        remarks += [remark] if remark else []
        row = {"step": _step(file), "updates": _step(file) * updates_per_step, "problems": len(problems)}
        for size in sizes:
            found = average(problems, size)
            row[f"avg@{size}"] = found and dict(zip(("score", "se_sampling", "se_problems"), found, strict=True))
            if found is None:
                fewest = min(map(len, problems.values()), default=0)
                remarks.append(f"{file.name}: avg@{size} cannot be had, a problem has {fewest} samples")
        rows.append(row)
    if as_json:
        print(json.dumps({"evaluations": rows, "remarks": remarks}, indent=2))
        return
    table = Table("step", "updates", "problems", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for size in sizes:
        table.add_column(f"avg@{size} (+- sampling, +- problems)")
    for row in rows:
        shown = [_shown(row[f"avg@{size}"]) for size in sizes]
        table.add_row(str(row["step"]), str(row["updates"]), str(row["problems"]), *shown)
    console.print(table)
    for remark in remarks:
        console.print(remark, soft_wrap=True)


def _shown(found: dict[str, float] | None) -> str:
    if found is None:
        return "-"
    return f"{100 * found['score']:.2f} (+-{100 * found['se_sampling']:.2f}, +-{100 * found['se_problems']:.2f})"


def _step(file: Path) -> int:
    number = re.fullmatch(r"\d+", file.stem)
    return int(number.group()) if number else -1


if __name__ == "__main__":
    typer.run(main)
