"""From rows of any source to rows of verl's schema, with a count of everything that was not taken as it is.

Rules:

* a problem is kept as it is written, but for the instruction that a source wraps around it, which is replaced by one
  for all (``--instruction``);
* two rows are the same problem if their texts are, after NFKC normalisation and with runs of white space as one blank;
  the first is kept. Sources are read in the order DAPO, Dolci, so DAPO's stays;
* the same problem with another answer is a conflict: the first is kept too, and counted under its own name;
* an answer is a text. A number becomes one, a list of one its element, and ``\\boxed{...}`` is unwrapped; each is
  counted.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."

# What DAPO-Math-17k wraps around a problem.
_DAPO_HEAD = re.compile(
    r"^Solve the following math problem step by step\..*?Answer: \$Answer \(without quotes\) where \$Answer is the "
    r"answer to the problem\.\s*",
    re.S,
)
_DAPO_TAIL = re.compile(r"\s*Remember to put your answer on its own line after \"Answer:\"\.\s*$")

PROBLEM_COLUMNS = ("prompt", "messages", "problem", "question")
ANSWER_COLUMNS = ("ground_truth", "answer", "solution")


class UnknownColumns(ValueError):
    """A file has no column that is known to hold the problem or the answer."""


@dataclass
class Counts:
    """What became of the rows of a source."""

    read: int = 0
    kept: int = 0
    rejected: Counter = field(default_factory=Counter)
    changed: Counter = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def reject(self, reason: str, shown: Any) -> None:
        """Count a row that is left out, and keep the first of its kind to be shown."""
        self.rejected[reason] += 1
        self.examples.setdefault(reason, " ".join(repr(shown).split())[:100])


def clean(
    rows: Iterable[dict[str, Any]], source: str, counts: Counts, seen: dict[str, str], instruction: str = INSTRUCTION
) -> Iterator[dict[str, Any]]:
    """Rows in verl's schema.

    Args:
        rows: of a source, as read.
        source: its name, ``data_source`` of the result.
        counts: filled in.
        seen: key of a problem -> its answer, over all sources; filled in.
        instruction: put after every problem.
    Raises:
        UnknownColumns: naming the columns that are there and those that are known.
    """
    for row in rows:
        counts.read += 1
        problem = _problem(row)
        if not isinstance(problem, str):
            counts.reject("prompt is no text", problem)
            continue
        if _broken(problem):
            counts.reject("broken characters", problem)
            continue
        problem = _DAPO_TAIL.sub("", _DAPO_HEAD.sub("", problem)).strip()
        if not problem:
            counts.reject("empty prompt", row)
            continue
        answer = _answer(row, counts)
        if answer is None:
            continue
        key = " ".join(unicodedata.normalize("NFKC", problem).split())
        if key in seen:
            counts.reject("duplicate" if seen[key] == answer else "duplicate with another answer", problem)
            continue
        seen[key] = answer
        counts.kept += 1
        yield {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"{problem}\n\n{instruction}" if instruction else problem}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": len(seen) - 1, "source": source, "key": hashlib.sha256(key.encode()).hexdigest()},
        }


def _problem(row: dict[str, Any]) -> Any:
    for name in PROBLEM_COLUMNS:
        if name in row:
            value = row[name]
            if isinstance(value, list) and value and isinstance(value[-1], dict):
                texts = [message.get("content") for message in value if message.get("role") == "user"]
                return texts[-1] if texts else value
            return "" if value is None else value
    raise UnknownColumns(f"no problem among the columns {sorted(row)}: expected one of {', '.join(PROBLEM_COLUMNS)}")


def _answer(row: dict[str, Any], counts: Counts) -> str | None:
    reward = row.get("reward_model")
    places = [reward] if isinstance(reward, dict) else []
    for place in (*places, row):
        name = next((name for name in ANSWER_COLUMNS if name in place), None)
        if name is not None:
            return _as_text(place[name], counts)
    raise UnknownColumns(f"no answer among the columns {sorted(row)}: expected one of {', '.join(ANSWER_COLUMNS)}")


def _as_text(value: Any, counts: Counts) -> str | None:
    if isinstance(value, list) and len(value) == 1:
        counts.changed["list of one answer"] += 1
        value = value[0]
    if isinstance(value, int | float) and not isinstance(value, bool):
        counts.changed["number made a text"] += 1
        value = f"{value:g}" if isinstance(value, float) and value == int(value) else str(value)
    if value is None or (isinstance(value, str) and not value.strip()):
        counts.reject("missing answer", value)
        return None
    if not isinstance(value, str):
        counts.reject("answer is no text", value)
        return None
    if _broken(value):
        counts.reject("broken characters", value)
        return None
    text = value.strip()
    inner = unboxed(text)
    if inner != text:
        counts.changed["unboxed"] += 1
    if not inner:
        counts.reject("missing answer", value)
        return None
    return inner


def unboxed(text: str) -> str:
    """What is in the ``\\boxed{...}`` that the text consists of, braces nested; the text itself otherwise."""
    head = "\\boxed{"
    inner = text.strip("$ ")
    if not inner.startswith(head):
        return text
    depth = 1
    for position in range(len(head), len(inner)):
        depth += {"{": 1, "}": -1}.get(inner[position], 0)
        if depth == 0:
            return inner[len(head) : position].strip() if position == len(inner) - 1 else text
    return text


def _broken(text: str) -> bool:
    """Characters that a parquet file or a tokenizer would not give back: NUL, halves of surrogate pairs."""
    return "\0" in text or any(0xD800 <= ord(character) <= 0xDFFF for character in text)
