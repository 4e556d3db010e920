"""Data of the mathematics recipes in verl's parquet schema.

    python recipes/data/prepare.py train --out ~/data/verl_sat      # DAPO-Math-17k + Dolci-RL-Zero-Math-7B
    python recipes/data/prepare.py aime24 --out ~/data/verl_sat
    python recipes/data/prepare.py verify --out ~/data/verl_sat     # are the files those of their manifests?

What was not taken as it is, is counted and shown; nothing is dropped in silence. Exit status: 0; 2 for data that
cannot be had or read; 3 where the counts are not the reported ones (the files are written all the same;
``--allow-count-mismatch`` accepts that); 4 where ``verify`` finds other files.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from clean import INSTRUCTION, Counts, UnknownColumns, clean  # noqa: E402
from sources import AIME24, DAPO, DOLCI, SourceError, checksum, files_of, rows_of  # noqa: E402

EXPECTED = {"dapo_math_17k": 17398, "dolci_rl_zero_math_7b": 13314}
"""Prompts as arXiv 2607.18722 reports them: 30,712 in all."""
EXPECTED_AIME = {"aime24": 30}
RULES = 1
"""Raised when the rules of cleaning change, so that an earlier result is made anew."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)
console = Console(highlight=False)

Out = Annotated[Path, typer.Option(help="Folder to write to.")]
Local = typer.Option(help="A local file or folder (parquet, jsonl, json) instead of the hub.")
Revision = typer.Option(help="Of the hub's data set (a branch, tag or commit) instead of the newest.")
Allow = Annotated[bool, typer.Option(help="Exit with 0 although the counts are not the reported ones.")]
Force = Annotated[bool, typer.Option(help="Make the file anew, even if nothing changed.")]


@app.command()
def train(
    out: Out,
    dapo: Annotated[Path | None, Local] = None,
    dolci: Annotated[Path | None, Local] = None,
    dapo_revision: Annotated[str | None, Revision] = None,
    dolci_revision: Annotated[str | None, Revision] = None,
    instruction: Annotated[str, typer.Option(help="Put after every problem.")] = INSTRUCTION,
    allow_count_mismatch: Allow = False,
    force: Force = False,
) -> None:
    """The training set: both sources, without duplicates, DAPO first."""
    sources = {"dapo_math_17k": (DAPO, dapo, dapo_revision), "dolci_rl_zero_math_7b": (DOLCI, dolci, dolci_revision)}
    raise typer.Exit(_make(out, "train", sources, instruction, EXPECTED, allow_count_mismatch, force))


@app.command()
def aime24(
    out: Out,
    file: Annotated[Path | None, Local] = None,
    revision: Annotated[str | None, Revision] = None,
    instruction: Annotated[str, typer.Option(help="Put after every problem.")] = INSTRUCTION,
    allow_count_mismatch: Allow = False,
    force: Force = False,
) -> None:
    """The evaluation set: each of the 30 problems once; verl repeats them (rollout.val_kwargs.n)."""
    sources = {"aime24": (AIME24, file, revision)}
    raise typer.Exit(_make(out, "aime24", sources, instruction, EXPECTED_AIME, allow_count_mismatch, force))


@app.command()
def verify(out: Out) -> None:
    """Compare the files with the checksums of their manifests."""
    manifests = sorted(out.expanduser().glob("*.manifest.json"))
    if not manifests:
        console.print(f"error: {out}: no *.manifest.json there")
        raise typer.Exit(2)
    wrong = False
    for manifest in manifests:
        data = manifest.with_name(manifest.name.replace(".manifest.json", ".parquet"))
        same = data.is_file() and checksum([data]) == json.loads(manifest.read_text())["sha256"]
        console.print(f"{data.name}: {'as made' if same else 'missing, or not the file that was made'}")
        wrong |= not same
    raise typer.Exit(4 if wrong else 0)


def _make(
    out: Path,
    name: str,
    sources: dict[str, tuple[str, Path | None, str | None]],
    instruction: str,
    expected: dict[str, int],
    allow: bool,
    force: bool,
) -> int:
    out = out.expanduser()
    data, manifest = out / f"{name}.parquet", out / f"{name}.manifest.json"
    counts = {source: Counts() for source in sources}
    try:
        files = {source: files_of(*place) for source, place in sources.items()}
        inputs = {source: checksum(found) for source, found in files.items()}
        asked = {"rules": RULES, "inputs": inputs, "instruction": instruction}
        if not force and _is_made(data, manifest, asked):
            console.print(f"{data} is there already, from the same inputs (--force makes it anew)")
            kept = json.loads(manifest.read_text())["kept"]
            return _compare(kept, expected, allow)
        rows, seen = [], {}
        for source, found in files.items():
            read = track(rows_of(found), description=source, console=console, transient=True)
            rows += clean(read, source, counts[source], seen, instruction)
    except (SourceError, UnknownColumns) as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    _write(rows, data)
    kept = {source: found.kept for source, found in counts.items()}
    described = {source: _described(found) for source, found in counts.items()}
    content = {"schema_version": 1, **asked, "rows": len(rows), "kept": kept, "counts": described}
    _replace(manifest, json.dumps({**content, "sha256": checksum([data])}, indent=2, ensure_ascii=False) + "\n")
    _show(counts, data, len(rows))
    return _compare(kept, expected, allow)


def _is_made(data: Path, manifest: Path, asked: dict[str, Any]) -> bool:
    if not (data.is_file() and manifest.is_file()):
        return False
    made = json.loads(manifest.read_text())
    return all(made.get(key) == value for key, value in asked.items()) and made.get("sha256") == checksum([data])


def _write(rows: list[dict[str, Any]], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    schema = pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", pa.list_(message)),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
            ("extra_info", pa.struct([("index", pa.int64()), ("source", pa.string()), ("key", pa.string())])),
        ]
    )
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), temporary)
    temporary.replace(path)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _described(counts: Counts) -> dict[str, Any]:
    found = {"rejected": dict(counts.rejected), "changed": dict(counts.changed)}
    return {"read": counts.read, "kept": counts.kept, **found}


def _show(counts: dict[str, Counts], path: Path, rows: int) -> None:
    table = Table("source", "rows", "", "the first", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for source, found in counts.items():
        table.add_row(source, str(found.read), "read")
        for reason, number in found.rejected.most_common():
            table.add_row("", str(-number), f"left out: {reason}", found.examples[reason])
        for reason, number in found.changed.most_common():
            table.add_row("", f"({number})", f"changed: {reason}")
        table.add_row("", str(found.kept), "kept")
    console.print(table)
    console.print(f"{rows} rows in {path}", soft_wrap=True)


def _compare(kept: dict[str, int], expected: dict[str, int], allow: bool) -> int:
    if kept == expected:
        return 0
    for source, number in expected.items():
        got = kept.get(source, 0)
        console.print(f"{source}: {got} kept, {number} reported ({got - number:+d})", soft_wrap=True)
    console.print(f"in all: {sum(kept.values())} kept, {sum(expected.values())} reported", soft_wrap=True)
    return 0 if allow else 3


if __name__ == "__main__":
    app()
