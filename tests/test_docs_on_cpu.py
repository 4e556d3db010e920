"""The documentation against the code: tables that can drift are compared, not trusted."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from verl_sat import _compat
from verl_sat.config import SATConfig
from verl_sat.embedded import quickstart
from verl_sat.embedded.rollout_settings import ServerSettings
from verl_sat.engine.replay import REASONS, r3_metrics
from verl_sat.metrics import SAT_METRICS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
OPTIONS, METRICS = README.split("## Options")[1].split("## Exact lag")[0].split("## R3")
EXAMPLES = (ROOT / "examples" / "README.md").read_text()


def table_rows(text, first_cell):
    """Rows of a table whose first cell names `first_cell` in code font."""
    return [line for line in text.splitlines() if line.startswith("|") and f"`{first_cell}`" in line.split("|")[1]]


def test_the_ledger_in_the_readme_is_the_ledger():
    block = README.split("<!-- ledger:begin -->")[1].split("<!-- ledger:end -->")[0].strip()
    assert block == _compat.as_markdown().strip(), "run: python -m verl_sat._compat"


@pytest.mark.parametrize("field", [f for f in fields(SATConfig) if f.name != "_target_"], ids=lambda f: f.name)
def test_every_option_is_documented_with_its_default(field):
    (row,) = table_rows(OPTIONS, field.name)
    default = "null" if field.default is None else field.default
    shown = row.split("|")[2].strip().strip("`")
    assert shown == str(default) or float(shown) == default


@pytest.mark.parametrize("name", SAT_METRICS)
def test_every_sat_metric_is_in_the_glossary(name):
    assert table_rows(METRICS, name)


@pytest.mark.parametrize(
    "name", ["versions", "versions_oldest", "updates", "updates_censored_frac", "unknown_frac", "inexact_frac"]
)
def test_every_staleness_metric_is_in_the_glossary(name):
    assert table_rows(METRICS, name)


def test_every_quickstart_option_is_documented():
    import inspect

    options = set(re.findall(r"--[a-z-]+", EXAMPLES))
    for name in inspect.signature(quickstart.main).parameters:
        if name != "overrides":
            assert f"--{name.rstrip('_').replace('_', '-')}" in options


@pytest.mark.parametrize("field", fields(ServerSettings), ids=lambda f: f.name)
def test_every_rollout_setting_is_documented_with_its_default(field):
    (row,) = table_rows(EXAMPLES, field.name)
    assert float(row.split("|")[2]) == field.default


def test_links_between_documents_resolve():
    for document in ROOT.glob("**/*.md"):
        if ".venv" in document.parts:
            continue
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), (document, target)


def test_the_families_in_the_readme_are_those_that_replay():
    import moe_replay

    block = README.split("<!-- families:begin -->")[1].split("<!-- families:end -->")[0].strip()
    assert block == moe_replay.table().strip(), "run: python tests/moe_families.py"
    assert block.count("| exact |") >= 23 and "NOT EXACT" not in block


@pytest.mark.parametrize("name", REASONS)
def test_every_reason_of_a_native_row_is_in_the_glossary(name):
    assert table_rows(METRICS, f"native/{name}_frac")


def test_every_r3_metric_is_in_the_glossary():
    for key in r3_metrics([1.0] * 9, 1):
        assert table_rows(METRICS, key.removeprefix("actor/r3/")), key
