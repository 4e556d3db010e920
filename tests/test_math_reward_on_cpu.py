"""The recipes' reward: real math-verify, through verl."""

import subprocess
import sys

import pytest

from verl_sat.math_reward import TAIL, compute_score


@pytest.mark.parametrize(
    ("response", "truth", "wanted"),
    [
        ("so \\boxed{42}", "42", 1.0),
        ("so \\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("so $\\frac{2}{4}$", "\\frac12", 1.0),
        ("The answer is 7", "7", 1.0),
        ("so \\boxed{-3}", "-3", 1.0),
        ("so \\boxed{41}", "42", 0.0),
        ("I do not know", "42", 0.0),
        ("", "42", 0.0),
        ("\\boxed{42} wait</think> \\boxed{41}", "42", 0.0),
        ("\\boxed{1}" + "x " * TAIL + "\\boxed{2}", "2", 1.0),
    ],
)
def test_grades(response, truth, wanted):
    assert compute_score("dapo_math_17k", response, truth) == {"score": wanted, "acc": wanted, "timed_out": 0.0}


def test_a_time_out_is_counted_and_said_once(monkeypatch, caplog):
    from verl.utils.reward_score import math_verify

    real = math_verify.compute_score
    monkeypatch.setattr(math_verify, "compute_score", lambda *args, **kw: real(*args, **kw, timeout=0.0))
    for _ in range(2):
        assert compute_score("s", "\\boxed{3}", "3") == {"score": 0.0, "acc": 0.0, "timed_out": 1.0}
    assert caplog.text.count("counts as wrong") == 1


def test_a_ground_truth_that_is_no_text_is_named():
    with pytest.raises(TypeError, match="ground_truth"):
        compute_score("s", "\\boxed{1}", 1)


def test_verl_loads_it_by_the_path_that_the_recipes_name():
    from omegaconf import OmegaConf
    from verl.trainer.ppo.reward import get_custom_reward_fn

    path = {"path": "pkg://verl_sat.math_reward", "name": "compute_score"}
    function = get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": path}}))
    assert function("s", "\\boxed{3}", "3")["score"] == 1.0


def test_without_math_verify_the_import_says_what_to_install():
    program = (
        "import importlib.util as u; real = u.find_spec; "
        "u.find_spec = lambda name, *a: None if name == 'math_verify' else real(name, *a); import verl_sat.math_reward"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0 and "pip install math-verify" in done.stderr
