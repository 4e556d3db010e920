"""Preparation of the recipes' data and scoring of their evaluations, on small made files."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

DATA = Path(__file__).parent.parent / "recipes" / "data"
sys.path.insert(0, str(DATA))
from clean import INSTRUCTION, Counts, clean, unboxed  # noqa: E402
from score import average, scores_of  # noqa: E402

HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'


def dapo(problem, answer):
    prompt = [{"role": "user", "content": HEAD + problem + TAIL}]
    return {"prompt": prompt, "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"}}


DAPO_ROWS = [dapo("What is 1+1?", "2"), dapo("What is 1+1?", "2"), dapo("Find $x$ with $x=\\frac12$.", "\\frac12")]
DOLCI_ROWS = [
    {"prompt": "What is  1+1?", "ground_truth": ["2"]},  # duplicate across sources, list of one
    {"prompt": "What is 1+1?", "ground_truth": "3"},  # the same problem, another answer
    {"prompt": "Wie groß ist π? 円周率", "ground_truth": "\\boxed{\\pi}"},
    {"prompt": "Boxed and nested", "ground_truth": "$\\boxed{\\frac{1}{2}}$"},
    {"prompt": "A number", "ground_truth": 42},
    {"prompt": "No answer", "ground_truth": None},
    {"prompt": "Blank answer", "ground_truth": "  "},
    {"prompt": "Two answers", "ground_truth": ["1", "2"]},
    {"prompt": "An object", "ground_truth": {"value": 1}},
    {"prompt": "", "ground_truth": "1"},
    {"prompt": None, "ground_truth": "1"},
    {"prompt": 7, "ground_truth": "1"},
    {"prompt": "Broken \ud800", "ground_truth": "1"},
    {"prompt": "NUL \0", "ground_truth": "1"},
]


def run(*arguments):
    command = [sys.executable, str(DATA / "prepare.py"), *map(str, arguments)]
    wide = {**os.environ, "COLUMNS": "200"}  # so that a table breaks no line
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=wide)


@pytest.fixture
def files(tmp_path):
    first, second = tmp_path / "dapo.parquet", tmp_path / "dolci.jsonl"
    pq.write_table(pa.Table.from_pylist(DAPO_ROWS), first)
    second.write_text("\n".join(json.dumps(row) for row in DOLCI_ROWS))
    return ["--dapo", first, "--dolci", second]


def test_every_kind_of_row_is_counted(files, tmp_path):
    out = tmp_path / "out"
    done = run("train", "--out", out, *files)
    assert done.returncode == 3, done.stdout + done.stderr  # not the reported counts, and the file is written
    manifest = json.loads((out / "train.manifest.json").read_text())
    assert manifest["counts"]["dapo_math_17k"] == {
        "read": 3,
        "kept": 2,
        "rejected": {"duplicate": 1},
        "changed": {},
    }
    assert manifest["counts"]["dolci_rl_zero_math_7b"] == {
        "read": 14,
        "kept": 3,
        "rejected": {
            "duplicate": 1,
            "duplicate with another answer": 1,
            "missing answer": 2,
            "answer is no text": 2,
            "empty prompt": 2,
            "prompt is no text": 1,
            "broken characters": 2,
        },
        "changed": {"list of one answer": 1, "unboxed": 2, "number made a text": 1},
    }
    for counts in manifest["counts"].values():
        assert counts["read"] == counts["kept"] + sum(counts["rejected"].values())
    for words in ("-17396", "-13311", "5 kept, 30712 reported", "left out: duplicate with another answer"):
        assert words in done.stdout.replace("\n", " ")


def test_rows_are_in_verls_schema_and_the_text_is_untouched(files, tmp_path):
    run("train", "--out", tmp_path, *files)
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["2", "\\frac12", "\\pi", "\\frac{1}{2}", "42"]
    assert rows[0]["prompt"] == [{"role": "user", "content": f"What is 1+1?\n\n{INSTRUCTION}"}]
    assert rows[2]["prompt"][0]["content"].startswith("Wie groß ist π? 円周率\n")
    assert {row["reward_model"]["style"] for row in rows} == {"rule"} and {row["ability"] for row in rows} == {"math"}
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["data_source"] for row in rows] == ["dapo_math_17k"] * 2 + ["dolci_rl_zero_math_7b"] * 3


def test_verls_data_set_reads_it(files, tmp_path):
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from verl_sat.embedded.model import build_tokenizer

    run("train", "--out", tmp_path, *files)
    config = OmegaConf.create({"max_prompt_length": 2048, "filter_overlong_prompts": False, "prompt_key": "prompt"})
    data = RLHFDataset(str(tmp_path / "train.parquet"), build_tokenizer(), config)
    assert len(data) == 5
    assert data[0]["reward_model"]["ground_truth"] == "2" and data[0]["index"] == 0


def test_a_second_run_changes_nothing_and_the_output_is_the_same_to_the_byte(files, tmp_path):
    out = tmp_path / "out"
    run("train", "--out", out, *files)
    first = (out / "train.parquet").read_bytes(), (out / "train.manifest.json").read_bytes()
    stamp = (out / "train.parquet").stat().st_mtime_ns
    again = run("train", "--out", out, *files, "--allow-count-mismatch")
    assert again.returncode == 0 and "there already" in again.stdout
    assert (out / "train.parquet").stat().st_mtime_ns == stamp
    forced = run("train", "--out", out, *files, "--force")
    assert forced.returncode == 3 and (out / "train.parquet").stat().st_mtime_ns != stamp
    assert ((out / "train.parquet").read_bytes(), (out / "train.manifest.json").read_bytes()) == first
    other = run("train", "--out", out, *files, "--instruction", "Think.")
    assert "there already" not in other.stdout
    assert sorted(path.name for path in out.iterdir()) == ["train.manifest.json", "train.parquet"]


def test_verify_finds_a_file_that_is_not_the_one_that_was_made(files, tmp_path):
    out = tmp_path / "out"
    assert run("verify", "--out", tmp_path).returncode == 2
    run("train", "--out", out, *files)
    assert run("verify", "--out", out).returncode == 0
    with (out / "train.parquet").open("ab") as stream:
        stream.write(b"x")
    assert run("verify", "--out", out).returncode == 4


def test_aime_has_thirty_problems_once(tmp_path):
    rows = [{"problem": f"Problem {i}", "answer": str(i)} for i in range(30)]
    file = tmp_path / "aime.json"
    file.write_text(json.dumps(rows * 2))
    done = run("aime24", "--out", tmp_path, "--file", file)
    assert done.returncode == 0, done.stdout
    assert pq.read_table(tmp_path / "aime24.parquet").num_rows == 30
    file.write_text(json.dumps(rows[:29]))
    done = run("aime24", "--out", tmp_path, "--file", file)
    assert done.returncode == 3 and "aime24: 29 kept, 30 reported (-1)" in done.stdout


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.jsonl", '{"prompt": "a", "ground_truth": "1"}\n{"prompt"', "x.jsonl:2"),
        ("x.json", '{"a": 1}', "expected a list"),
        ("x.jsonl", '{"text": "a", "ground_truth": "1"}', "expected one of prompt, messages, problem, question"),
        ("x.jsonl", '{"prompt": "a", "label": "1"}', "expected one of ground_truth, answer, solution"),
        ("x.parquet", "no parquet", "x.parquet"),
        ("x.txt", None, "x.txt"),
    ],
)
def test_data_that_cannot_be_read_is_named(name, content, words, tmp_path):
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    done = run("aime24", "--out", tmp_path / "out", "--file", file)
    assert done.returncode == 2 and "error:" in done.stdout and words in done.stdout.replace("\n", "")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("\\boxed{42}", "42"),
        ("$\\boxed{\\frac{1}{2}}$", "\\frac{1}{2}"),
        ("\\boxed{1} or \\boxed{2}", "\\boxed{1} or \\boxed{2}"),
        ("\\boxed{1", "\\boxed{1"),
        ("x", "x"),
    ],
)
def test_unboxed(text, inside):
    assert unboxed(text) == inside


def test_a_conflict_keeps_the_first():
    counts, seen = Counts(), {}
    rows = [{"question": "q", "answer": "1"}, {"question": "q", "answer": "2"}]
    (kept,) = clean(rows, "s", counts, seen)
    assert kept["reward_model"]["ground_truth"] == "1"
    assert counts.rejected == {"duplicate with another answer": 1} and counts.examples


# --- scores ---------------------------------------------------------------------------------------------------------


def test_average_and_its_two_standard_errors_by_hand():
    problems = {"a": [1.0, 0.0, 1.0, 0.0], "b": [1.0, 1.0, 1.0, 1.0], "c": [0.0, 0.0, 0.0, 1.0]}
    score, sampling, between = average(problems, 4)
    assert score == pytest.approx((0.5 + 1 + 0.25) / 3)
    # variances of a problem's samples: 1/3, 0, 1/4
    assert sampling == pytest.approx(math.sqrt((1 / 3 + 0 + 0.25) / 4) / 3)
    mean = 1.75 / 3
    spread = ((0.5 - mean) ** 2 + (1 - mean) ** 2 + (0.25 - mean) ** 2) / 2
    assert between == pytest.approx(math.sqrt(spread / 3))
    assert average(problems, 2)[0] == pytest.approx((0.5 + 1 + 0) / 3)
    assert average(problems, 5) is None and average({}, 1) is None


def score(folder, *arguments):
    command = [sys.executable, str(DATA / "score.py"), str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_scores_by_updates_and_what_is_missing(tmp_path):
    for step in (5, 10):
        lines = [json.dumps({"input": p, "score": float(s), "step": step}) for p in "ab" for s in (1, 0, 1, 1)]
        (tmp_path / f"{step}.jsonl").write_text("\n".join(lines))
    with (tmp_path / "10.jsonl").open("a") as stream:
        stream.write('\n{"input": "b", "sc')
    done = score(tmp_path, "--k", "2", "--k", "8", "--updates-per-step", "8", "--json")
    assert done.returncode == 0, done.stdout
    result = json.loads(done.stdout)
    assert [(row["step"], row["updates"], row["problems"]) for row in result["evaluations"]] == [
        (5, 40, 2),
        (10, 80, 2),
    ]
    assert result["evaluations"][0]["avg@2"]["score"] == 0.5 and result["evaluations"][0]["avg@8"] is None
    assert "10.jsonl: its last line is cut off and was left out" in result["remarks"]
    assert "5.jsonl: avg@8 cannot be had, a problem has 4 samples" in result["remarks"]
    assert "75.00" in score(tmp_path, "--k", "4").stdout


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    (tmp_path / "1.jsonl").write_text('{"input": "a"}\n{"input": "a", "score": 1}')
    with pytest.raises(ValueError, match=r"1\.jsonl:1"):
        scores_of(tmp_path / "1.jsonl")
    assert score(tmp_path).returncode == 2 and score(tmp_path / "none").returncode == 2
