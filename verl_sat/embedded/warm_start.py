"""Make the embedded job: tiny model, tokenizer, data, and a short supervised warm start.

RL from random weights would see no reward. Some seconds of supervised training on made sums
bring the sampled reward to 0.35 or a little more, where most groups of responses hold both
right and wrong ones and the policy gradient has something to say.

The demonstrations are careless on purpose: a third of the longer ones leave the last
total out. The policy copies the habit, and RL has two things to teach it: not to stop early,
which it learns within tens of steps, and to add, which takes longer.

    python -m verl_sat.embedded.warm_start OUT --seed 1
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from verl_sat.embedded import task
from verl_sat.embedded.model import build_model, build_tokenizer, save

TARGET_REWARD = 0.35
REWARD_WINDOW = (0.2, 0.7)
CARELESS = 1 / 3  # share of the demonstrations of three or more terms that stop one total short
LEARNING_RATE = 1e-4  # recommended for the RL that follows, constant; at 2e-4 and lag 8 most gates are beyond the radii


class WarmStartError(RuntimeError):
    """The supervised phase did not bring the reward where it was asked to."""


@dataclass(frozen=True)
class PreparedJob:
    """What :func:`prepare` made and measured.

    Attributes:
        model_path: checkpoint folder with model and tokenizer.
        train_file: training parquet.
        test_file: test parquet.
        reward_file: where verl finds the reward function, in the form its custom_reward_function.path takes.
        reward_name: name of the reward function in it.
        reward: mean reward on the training prompts at temperature 1, between 0 and 1.
        seconds: wall time by stage [s].
        warm_start_steps: supervised steps taken.
        num_parameters: size of the model.
        train_size, test_size: number of prompts.
        max_prompt_length, max_response_length: longest prompt and response [tokens].
        learning_rate: a constant learning rate at which RL learns visibly.
        seed: seed of everything above.
    """

    model_path: str
    train_file: str
    test_file: str
    reward_file: str
    reward_name: str
    reward: float
    seconds: dict[str, float]
    warm_start_steps: int
    num_parameters: int
    train_size: int
    test_size: int
    max_prompt_length: int
    max_response_length: int
    learning_rate: float
    seed: int


@dataclass(frozen=True)
class WarmStart:
    """Outcome of :func:`warm_start`: the steps taken and the reward measured at the end."""

    steps: int
    reward: float


def sample_responses(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[task.Problem],
    seed: int,
    temperature: float = 1.0,
) -> list[str]:
    """Sample one response for each problem.

    Args:
        model: the policy.
        tokenizer: its tokenizer.
        problems: what to ask.
        seed: seed of the sampling; the global random state is left as it was.
        temperature: sampling temperature, above 0.
    Returns:
        Decoded responses without special tokens, one for each problem.
    """
    prompts = _encode_prompts(tokenizer, problems)
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    was_training = model.training
    model.eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        output = model.generate(
            **batch,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=task.MAX_RESPONSE_LENGTH,
        )
    model.train(was_training)
    return tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def measure_reward(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[task.Problem],
    seed: int,
    responses_per_problem: int = 1,
) -> float:
    """Mean reward of responses sampled at temperature 1, the policy that RL starts from."""
    asked = [problem for problem in problems for _ in range(responses_per_problem)]
    responses = sample_responses(model, tokenizer, asked, seed)
    scores = [
        task.compute_score(task.DATA_SOURCE, text, str(problem.answer))
        for text, problem in zip(responses, asked, strict=True)
    ]
    return sum(scores) / len(scores)


def warm_start(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    *,
    problems: Sequence[task.Problem],
    exclude: Sequence[task.Problem] = (),
    target_reward: float = TARGET_REWARD,
    step_budget: int = 600,
    batch_size: int = 48,
    learning_rate: float = 3e-3,
    measure_every: int = 10,
    on_progress: Callable[[str], None] | None = None,
) -> WarmStart:
    """Train ``model`` in place on made sums until its sampled reward reaches ``target_reward``.

    It stops by reward, never by time, and computes in one thread (the number of threads changes
    the rounding), so on one kind of CPU the result depends on the seed alone.

    Args:
        model: the policy, fp32.
        tokenizer: its tokenizer.
        seed: seed of the examples and of the measuring.
        problems: where the reward is measured, the same prompts every time.
        exclude: problems that must not be trained on.
        target_reward: mean reward at temperature 1 at which to stop, in (0, 1).
        step_budget: most supervised steps.
        batch_size: examples in a step.
        learning_rate: peak of AdamW's learning rate; the first 20 steps rise to it.
        measure_every: steps between two measurements.
        on_progress: called with a line of text at every measurement.
    Returns:
        The steps taken and the reward at the last of them.
    Raises:
        ValueError: if ``target_reward`` is not in (0, 1).
        WarmStartError: if the budget ends below the target.
    """
    if not 0.0 < target_reward < 1.0:
        raise ValueError(f"target_reward must be in (0, 1), got {target_reward}")
    rng = random.Random(f"{task.DATA_SOURCE}/warm_start/{seed}")
    excluded = set(exclude)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    model.train()
    reward = 0.0
    with _one_thread():
        for step in range(1, step_budget + 1):
            examples = [_draw_outside(rng, excluded) for _ in range(batch_size)]
            loss = _supervised_loss(model, tokenizer, examples, [_demonstrate(rng, example) for example in examples])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % measure_every == 0:
                reward = measure_reward(model, tokenizer, problems, seed)
                if on_progress is not None:
                    on_progress(f"warm start: step {step}, reward {reward:.2f} of {target_reward:.2f}")
                if reward >= target_reward:
                    return WarmStart(step, reward)
    raise WarmStartError(
        f"warm start: reward {reward:.3f} after {step_budget} steps, target {target_reward}; "
        "raise step_budget, lower target_reward, or take another seed"
    )


def prepare(out_dir: str | Path, seed: int = 1, on_progress: Callable[[str], None] | None = None) -> PreparedJob:
    """Make everything the embedded job reads: checkpoint, data, and a record of what was measured.

    Writes ``model/``, ``train.parquet``, ``test.parquet`` and ``prepare.json`` (the returned record).

    Args:
        out_dir: folder to write to; created if it is not there.
        seed: seed of weights, data and warm start.
        on_progress: called with a line of text now and then.
    Returns:
        Paths, sizes and measurements.
    Raises:
        WarmStartError: if the reward does not end inside ``REWARD_WINDOW``.
    """
    out = Path(out_dir).resolve()
    out.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = {}
    with _timed(seconds, "data"):
        train, test = task.make_splits(seed)
        train_file = task.write_parquet(out / "train.parquet", train, "train")
        test_file = task.write_parquet(out / "test.parquet", test, "test")
    with _timed(seconds, "build"):
        tokenizer = build_tokenizer()
        model = build_model(seed)
    with _timed(seconds, "warm_start"):
        result = warm_start(model, tokenizer, seed, problems=train, exclude=[*train, *test], on_progress=on_progress)
    with _timed(seconds, "measure"), _one_thread():
        # Fresh samples: the one that ended the warm start was picked for being high.
        reward = measure_reward(model, tokenizer, train, seed + 1_000_003, responses_per_problem=4)
    low, high = REWARD_WINDOW
    if not low <= reward <= high:
        raise WarmStartError(f"warm start: reward {reward:.3f} is outside [{low}, {high}]; take another seed")
    with _timed(seconds, "save"):
        model_path = save(out / "model", model, tokenizer)
    job = PreparedJob(
        model_path=str(model_path),
        train_file=str(train_file),
        test_file=str(test_file),
        reward_file=f"pkg://{task.__name__}",
        reward_name=task.compute_score.__name__,
        reward=reward,
        seconds={stage: round(value, 3) for stage, value in seconds.items()},
        warm_start_steps=result.steps,
        num_parameters=model.num_parameters(),
        train_size=len(train),
        test_size=len(test),
        max_prompt_length=task.MAX_PROMPT_LENGTH,
        max_response_length=task.MAX_RESPONSE_LENGTH,
        learning_rate=LEARNING_RATE,
        seed=seed,
    )
    (out / "prepare.json").write_text(json.dumps(asdict(job), indent=2) + "\n", encoding="utf-8")
    if on_progress is not None:
        on_progress(f"prepared {out}: reward {reward:.2f} after {result.steps} supervised steps")
    return job


def _draw_outside(rng: random.Random, excluded: set[task.Problem]) -> task.Problem:
    while (problem := task.draw_problem(rng)) in excluded:
        pass
    return problem


def _demonstrate(rng: random.Random, problem: task.Problem) -> str:
    """What the policy is shown: the solution, or, carelessly, all of it but the last total."""
    totals = problem.solution.split(",")
    if len(totals) > 1 and rng.random() < CARELESS:
        totals.pop()
    return ",".join(totals)


def _encode_prompts(tokenizer: PreTrainedTokenizerFast, problems: Sequence[task.Problem]) -> list[list[int]]:
    texts = tokenizer.apply_chat_template(
        [task.to_messages(problem) for problem in problems], add_generation_prompt=True, tokenize=False
    )
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _supervised_loss(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[task.Problem],
    responses: Sequence[str],
) -> torch.Tensor:
    """Mean cross-entropy of the response tokens, end token included [nats]."""
    prompts = _encode_prompts(tokenizer, problems)
    answers = tokenizer(list(responses), add_special_tokens=False)["input_ids"]
    ids = [prompt + answer + [tokenizer.eos_token_id] for prompt, answer in zip(prompts, answers, strict=True)]
    batch = tokenizer.pad({"input_ids": ids}, padding_side="right", return_tensors="pt")
    length = torch.tensor([[len(prompt)] for prompt in prompts])
    is_response = (torch.arange(batch["input_ids"].shape[1]) >= length) & batch["attention_mask"].bool()
    labels = batch["input_ids"].masked_fill(~is_response, -100)
    logits = model(**batch).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: ``python -m verl_sat.embedded.warm_start OUT [--seed N]``."""
    parser = argparse.ArgumentParser(prog="python -m verl_sat.embedded.warm_start", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="folder to write model and data to")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, data and warm start (default 1)")
    args = parser.parse_args(argv)
    job = prepare(args.out, args.seed, on_progress=print)
    print(json.dumps(asdict(job), indent=2))


if __name__ == "__main__":
    main()
