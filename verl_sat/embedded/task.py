"""Running sums: an arithmetic task that a rule can verify, with its data in verl's parquet schema.

The prompt is a sum of two to five terms, ``3+4+5+2=``; the response is the running totals,
``7,12,14``, and the last number is the answer. Responses take 2 to 12 tokens and a slip
anywhere is usually carried to the end, so a longer sum is harder and a prompt's success
probability lies between 0 and 1.

verl loads it as ``pkg://verl_sat.embedded.task`` or by the path of the file
(``reward.custom_reward_function.path``), so it imports nothing of the package, and little else.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

DATA_SOURCE = "verl_sat/running_sum"
LARGEST_TERM = 5
# Share of the problems by number of terms. There are only 25 sums of two terms, hence fewer of them.
TERM_SHARES = {2: 0.1, 3: 0.3, 4: 0.3, 5: 0.3}

# Ten steps of 16 prompts read the training set exactly once: the mean reward over ten steps then does not depend
# on which prompts happened to come up.
TRAIN_SIZE = 160
TEST_SIZE = 40

MAX_PROMPT_LENGTH = 18  # 8 tokens of ChatML around "5+5+5+5+5="
MAX_RESPONSE_LENGTH = 12  # "10,15,20,25" and the end token

_ANSWER = re.compile(r"[0-9]{1,9}")


# Not a dataclass: those need their module in sys.modules, where a file loaded by its path is not.
class Problem(NamedTuple):
    """One sum; ``terms`` are whole numbers from 1 to ``LARGEST_TERM``."""

    terms: tuple[int, ...]

    @property
    def question(self) -> str:
        """What the user asks, for example ``3+4+5=``."""
        return "+".join(map(str, self.terms)) + "="

    @property
    def solution(self) -> str:
        """The running totals, for example ``7,12``."""
        return ",".join(map(str, list(accumulate(self.terms))[1:]))

    @property
    def answer(self) -> int:
        """The value of the sum."""
        return sum(self.terms)


def make_problems(rng: random.Random, count: int, exclude: Collection[Problem] = ()) -> list[Problem]:
    """Draw distinct problems in the proportions of ``TERM_SHARES``.

    Args:
        rng: source of randomness; the result depends on its state alone.
        count: how many; shares are rounded, and the rest goes to the longest sums.
        exclude: problems that must not be drawn.
    Returns:
        ``count`` problems in random order.
    Raises:
        ValueError: if there are not that many problems left.
    """
    numbers = {length: int(count * share) for length, share in TERM_SHARES.items()}
    numbers[max(numbers)] += count - sum(numbers.values())
    drawn: dict[Problem, None] = {}
    for length, number in numbers.items():
        left = LARGEST_TERM**length - sum(len(problem.terms) == length for problem in exclude)
        if number > left:
            raise ValueError(f"asked for {number} distinct sums of {length} terms, only {left} are left")
        target = len(drawn) + number
        while len(drawn) < target:
            problem = draw_problem(rng, length)
            if problem not in exclude:
                drawn[problem] = None
    problems = list(drawn)
    rng.shuffle(problems)
    return problems


def draw_problem(rng: random.Random, length: int | None = None) -> Problem:
    """Draw one problem with replacement; ``length`` terms, or a length by ``TERM_SHARES``."""
    if length is None:
        (length,) = rng.choices(list(TERM_SHARES), weights=list(TERM_SHARES.values()))
    return Problem(tuple(rng.randint(1, LARGEST_TERM) for _ in range(length)))


def make_splits(
    seed: int, train_size: int = TRAIN_SIZE, test_size: int = TEST_SIZE
) -> tuple[list[Problem], list[Problem]]:
    """Make disjoint training and test problems that depend on ``seed`` alone."""
    rng = random.Random(f"{DATA_SOURCE}/{seed}")
    train = make_problems(rng, train_size)
    return train, make_problems(rng, test_size, exclude=set(train))


def to_messages(problem: Problem) -> list[dict[str, str]]:
    """The prompt as chat messages."""
    return [{"role": "user", "content": problem.question}]


def write_parquet(path: str | Path, problems: Sequence[Problem], split: str) -> Path:
    """Write problems in the schema that verl's ``RLHFDataset`` and reward managers read.

    Args:
        path: file to write.
        problems: rows, in this order.
        split: "train" or "test", kept in ``extra_info``.
    Returns:
        ``path`` as an absolute path.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": to_messages(problem),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
            "extra_info": {
                "split": split,
                "index": index,
                "question": problem.question,
                "answer": problem.solution,
                "num_terms": len(problem.terms),
            },
        }
        for index, problem in enumerate(problems)
    ]
    path = Path(path).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def parse_answer(solution_str: str) -> int | None:
    """Read the number after the last comma (or equals sign), spaces aside; None if there is none."""
    last = re.split(r"[,=]", solution_str)[-1].strip(" ")
    # ASCII digits only, and not too many: int() takes digits of any script, and refuses very long numbers.
    return int(last) if _ANSWER.fullmatch(last) else None


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> float:
    """Score a response by the value of its last number (verl's custom reward function).

    Args:
        data_source: not used; there is one source.
        solution_str: decoded response without special tokens; may be anything.
        ground_truth: the value of the sum as a decimal string.
        extra_info: not used.
        **kwargs: not used; verl's reward managers pass more.
    Returns:
        1.0 if the response ends in the right number, else 0.0.
    """
    return float(parse_answer(solution_str) == int(ground_truth))
