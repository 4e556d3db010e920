"""`tests/upstream.py`: what it refuses, and that a swapped test really ran with what was put in.

No checkout of verl is needed: a made one of three files stands in, whose own `verl` must never be imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import upstream
import upstream_plugin

RUNNER = Path(upstream.__file__)


def make_checkout(folder: Path, version: str | None = "0.9.7", tests: bool = True) -> Path:
    package = folder / "verl"
    (package / "version").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('the verl of the checkout was imported')\n")
    if version is not None:
        (package / "version" / "version").write_text(version + "\n")
    if tests:
        (folder / "tests").mkdir()
    return folder


@pytest.mark.parametrize(
    ("version", "tests", "message"),
    [
        (None, True, "is not a checkout of verl"),
        ("0.9.0", False, "has no folder `tests`"),
        ("0.8.0", True, "is verl 0.8.0; the tests of verl 0.9.x are needed"),
        ("0.10.0.dev", True, "is verl 0.10.0.dev; the tests of verl 0.9.x are needed"),
        ("1.9.0", True, "is verl 1.9.0"),
        ("main", True, "'main', which is not a version"),
        ("", True, "'', which is not a version"),
    ],
)
def test_a_path_that_is_no_checkout_of_verl_0_9_is_refused_with_status_2(tmp_path, capsys, version, tests, message):
    assert upstream.main([str(make_checkout(tmp_path, version, tests))]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize("kind", ["absent", "file"])
def test_a_path_that_is_no_folder_is_refused_with_status_2(tmp_path, capsys, kind):
    path = tmp_path / "there"
    if kind == "file":
        path.write_text("0.9.0")
    assert upstream.main([str(path)]) == 2
    assert capsys.readouterr().err == f"error: {path} is not a folder\n"


def test_the_command_without_a_path_says_how_it_is_called():
    done = subprocess.run([sys.executable, str(RUNNER)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "usage: tests/upstream.py" in done.stderr
    done = subprocess.run([sys.executable, str(RUNNER), os.devnull], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr == f"error: {os.devnull} is not a folder\n" and done.stdout == ""


@pytest.mark.parametrize("version", ["0.9.0", "0.9.1", "0.9.0.dev", "0.9.12.post1"])
def test_every_0_9_is_accepted(tmp_path, version):
    assert upstream.checkout_version(make_checkout(tmp_path, version)) == version


def test_tests_that_look_losses_up_by_name_are_found(tmp_path):
    checkout = make_checkout(tmp_path)
    (checkout / "tests" / "test_a_on_cpu.py").write_text("fn = get_policy_loss_fn(name)\n")
    (checkout / "tests" / "deep").mkdir()
    (checkout / "tests" / "deep" / "test_b.py").write_text("for name in POLICY_LOSS_REGISTRY: ...\n")
    (checkout / "tests" / "test_c.py").write_text("fn = compute_policy_loss_vanilla\n")
    assert upstream.tests_by_loss_name(checkout) == ["tests/deep/test_b.py", "tests/test_a_on_cpu.py"]


def test_the_table_counts_by_file_and_names_what_ran_with_ours():
    def line(test, outcome, what):
        return {"file": "tests/test_x.py", "test": test, "outcome": outcome, "with": what}

    text = upstream.table(
        [
            line("test_a[1]", "passed", "verl's own"),
            line("test_a[2]", "failed", "verl's own"),
            line("TestX::test_b[1]", "passed", "sat_grpo"),
            line("TestX::test_b[2]", "passed", "sat_grpo"),
            line("test_c", "skipped", "sat_grpo"),
            line("test_d", "absent", "sat_grpo"),
        ]
    )
    assert [row.split() for row in text.splitlines()] == [
        ["file", "passed", "failed", "skipped", "with"],
        ["tests/test_x.py", "1", "1", "0", "verl's", "own"],
        ["tests/test_x.py", "2", "0", "1", "sat_grpo"],
        ["test_b"],
        ["test_c"],
        ["test_d:", "not", "in", "this", "checkout"],
    ]


SWAPPED = """
import torch
import verl
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.workers.config.actor import ActorConfig

class TestLoss:
    def test_policy_loss_with_rollout_is(self):
        values = torch.tensor([[-1.0, -2.0]])
        config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size=2)
        _, metrics = compute_policy_loss_vanilla(
            old_log_prob=values, log_prob=values, advantages=values, response_mask=values < 0, config=config
        )
        assert "actor/sat/quantile" in metrics

    def test_metrics_only_mode(self):
        pass

    def test_that_no_swap_names(self):
        raise AssertionError("not to be run")
"""


def test_a_swapped_test_runs_with_ours_against_the_installed_verl_or_fails(tmp_path):
    checkout = make_checkout(tmp_path / "checkout")
    file = upstream_plugin.CORRECTION_WITH_LOSS
    path = checkout / file
    path.parent.mkdir(parents=True)
    path.write_text(SWAPPED)
    before = sorted(checkout.rglob("*"))
    report, work = tmp_path / "report", tmp_path / "work"
    work.mkdir()
    status = upstream.run(checkout, upstream.installed_verl(), "sat_grpo", [file], report, work)
    assert status == 1
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert {line["with"] for line in lines} == {"sat_grpo in place of vanilla"}
    assert {line["test"].rpartition("::")[2]: line["outcome"] for line in lines} == {
        "test_policy_loss_with_rollout_is": "passed",
        "test_metrics_only_mode": "failed",  # it never came to the loss that was put in
        "test_exact_icepop_matches_filtered_weighted_ppo_loss": "absent",
    }
    assert sorted(checkout.rglob("*")) == before  # nothing was written into the checkout


def test_every_swap_names_something_and_no_file_twice():
    for put_in in upstream_plugin.PUT_INS:
        files = [swap.file for swap in upstream_plugin.swaps_of(put_in)]
        assert files and len(set(files)) == len(files)
    assert upstream_plugin.swaps_of(None) == ()
