"""`CASES.md` is complete and true: every id, tests that exist, and no test named after an id left out."""

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INDEX = HERE / "CASES.md"

# Frozen here, so that a row cannot be lost from the file unnoticed. A new case is added in both places.
IDS = """
    L01 L03 L04 L05 L06 L08 L09 L10 L12 L13 L14 L15 L17 L18 L19
    R01 R03 R04 R05 R06 R07 R08 R09 R11 R12 R14 R16 R17 R18 R19 R20 R21 R22 R23 R24 R25 R26 R27 R28
    A01 A03 A04 A06 A07 A08 A09 A10 A12 A13 A14 A15
    C01 C02 C03 C05 C06 C07 C08
    P01 P02 P04 P05 P06 P07
    M01 M03 M04 M05 M06 M07 M08
    D01 D02 D04
""".split()
LATER = ("routing replay", "recipes and lag accounting", "staleness observatory")

ROW = re.compile(r"^\| (?P<id>[A-Z]\d\d) \| (?P<source>[^|]+) \| (?P<symptom>[^|]+) \| (?P<held>[^|]+) \|$")
TEST = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def rows():
    lines = [line for line in INDEX.read_text().splitlines() if re.match(r"\| *[A-Z]\d", line)]
    found = [ROW.match(line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if not match]
    return [match.groupdict() for match in found]


def functions_of(path):
    """Names of the test functions that pytest would collect from a file of ours: plain functions, no classes."""
    tree = ast.parse(path.read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name for function in functions if function.name.startswith("test_")}


ROWS = rows()
TESTS = {path.name: functions_of(path) for path in sorted(HERE.glob("test_*.py"))}


def test_every_id_has_one_row_in_order():
    assert [row["id"] for row in ROWS] == IDS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_a_row_is_held_by_tests_that_exist_or_says_what_brings_it(row):
    held = row["held"].split("<br>")
    named = [TEST.fullmatch(entry) for entry in held]
    later = [entry for entry, match in zip(held, named, strict=True) if not match]
    assert len(later) <= 1 and later == held[len(held) - len(later) :], "at most one entry of words, and it comes last"
    for entry in later:
        assert entry.startswith("later: ") and any(work in entry for work in LATER), entry
    missing = [match[0] for match in named if match and match[2] not in TESTS.get(match[1], ())]
    assert not missing
    assert any(named) or later
    assert re.search(r"#\d|verl v0\.9|docs", row["source"]), "no public source"


def test_every_test_named_after_an_id_is_listed_in_its_row():
    listed = {row["id"]: {f"{file}::{name}" for file, name in TEST.findall(row["held"])} for row in ROWS}
    unlisted = []
    for file, names in TESTS.items():
        for name in sorted(names):
            match = re.match(r"test_([A-Z]\d\d)_", name)
            if match and f"{file}::{name}" not in listed.get(match[1], ()):
                unlisted.append(f"{file}::{name}")
    assert not unlisted


def test_a_row_of_a_kind_that_is_here_already_is_not_put_off_altogether():
    """Loss, metric and plugin rows are all met; what is later there comes on top of a test."""
    put_off = [row["id"] for row in ROWS if not TEST.search(row["held"])]
    assert [i for i in put_off if i[0] in "LMP"] == []
