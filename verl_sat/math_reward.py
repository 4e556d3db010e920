"""The reward of the mathematics recipes: is the final answer the right one, by math-verify.

verl's custom reward function (``reward.custom_reward_function.path=pkg://verl_sat.math_reward``). The grader is the
library math-verify, called through verl's own `verl/utils/reward_score/math_verify.py`, which gives it a process with a
time limit. Nothing here compares answers.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

from verl_sat.once import warn_once

TAIL = 4000
"""Characters at the end of a response that are looked at: a final answer is there, and parsing 30k tokens is slow."""

_TIMED_OUT = -1.0

logger = logging.getLogger(__name__)

if importlib.util.find_spec("math_verify") is None:  # verl alone would print a line and score everything 0
    raise ImportError("verl_sat.math_reward grades with math-verify, which is not installed: pip install math-verify")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> dict[str, float]:
    """Grade a response.

    Args:
        data_source: not used; all sources are graded alike.
        solution_str: decoded response; what comes before ``</think>`` and before the last `TAIL` characters is not
            looked at.
        ground_truth: the right answer in LaTeX or as a number, without ``\\boxed``.
        extra_info: not used.
        **kwargs: not used; verl's reward managers pass more.
    Returns:
        ``score`` and ``acc``, 1.0 or 0.0; ``timed_out``, 1.0 where grading took longer than verl's limit (30 s), which
        counts as wrong: verl logs its share with the other results of an evaluation. (What math-verify itself fails on,
        verl prints and counts as wrong.)
    Raises:
        TypeError: if the ground truth is not a text (the data were not made by recipes/data).
    """
    if not isinstance(ground_truth, str):
        raise TypeError(f"reward_model.ground_truth: {ground_truth!r} is not a text; recipes/data makes texts")
    from verl.utils.reward_score import math_verify

    answer = solution_str.rpartition("</think>")[2][-TAIL:]
    if not answer.strip():
        return {"score": 0.0, "acc": 0.0, "timed_out": 0.0}
    score = float(math_verify.compute_score(answer, ground_truth, timeout_score=_TIMED_OUT))
    timed_out = score == _TIMED_OUT
    if timed_out:
        warn_once(
            logger,
            "timed out",
            "grading an answer took longer than verl's limit and counts as wrong (timed_out); the answer is %r",
            answer[-200:],
        )
        score = 0.0
    return {"score": score, "acc": score, "timed_out": float(timed_out)}
