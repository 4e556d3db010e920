"""Where the rows come from: files on this machine, or the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DAPO = "BytedTsinghua-SIA/DAPO-Math-17k"
DOLCI = "allenai/Dolci-RL-Zero-Math-7B"
AIME24 = "HuggingFaceH4/aime_2024"


class SourceError(RuntimeError):
    """Data that cannot be had, with what to do."""


def files_of(name: str, path: Path | None, revision: str | None) -> list[Path]:
    """The files of a data set: those given, or the hub's, downloaded once into its cache.

    Args:
        name: on the hub.
        path: a file, or a folder of files; None: the hub.
        revision: of the hub's data set; None: the newest.
    Raises:
        SourceError: nothing is there, or the hub cannot be reached.
    """
    if path is None:
        try:
            from huggingface_hub import snapshot_download

            path = Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=_PATTERNS))
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise SourceError(f"{name} could not be downloaded ({why}); give a local copy") from error
    path = path.expanduser()
    found = sorted(p for p in path.rglob("*") if p.suffix in _SUFFIXES) if path.is_dir() else [path]
    if not found or not found[0].is_file():
        raise SourceError(f"{path}: no {', '.join(_SUFFIXES)} file there")
    return found


_SUFFIXES = (".parquet", ".jsonl", ".json")
_PATTERNS = [f"*{suffix}" for suffix in _SUFFIXES]


def rows_of(files: list[Path]) -> Iterator[dict[str, Any]]:
    """All rows of the files, in order.

    Raises:
        SourceError: for a file that is not what its name says; names file and line.
    """
    for file in files:
        if file.suffix == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            try:
                for batch in pq.ParquetFile(file).iter_batches():
                    yield from batch.to_pylist()
            except (OSError, pa.ArrowException) as error:
                raise SourceError(f"{file}: {error}") from error
        elif file.suffix == ".jsonl":
            for number, line in enumerate(file.read_text(encoding="utf-8", errors="surrogateescape").splitlines(), 1):
                if line.strip():
                    yield _object(line, f"{file}:{number}")
        else:
            rows = _parsed(file.read_text(encoding="utf-8", errors="surrogateescape"), str(file))
            if not isinstance(rows, list):
                raise SourceError(f"{file}: expected a list of rows")
            yield from rows


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise SourceError(f"{where}: not JSON ({error})") from error


def _object(text: str, where: str) -> dict[str, Any]:
    row = _parsed(text, where)
    if not isinstance(row, dict):
        raise SourceError(f"{where}: expected an object")
    return row


def checksum(files: list[Path]) -> str:
    """SHA-256 over the contents of files, in order."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
