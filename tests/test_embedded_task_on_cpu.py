"""The running-sum task, its data as verl reads it, its reward rule, and the supervised warm start."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_sat.embedded import task
from verl_sat.embedded.model import build_model, build_tokenizer
from verl_sat.embedded.task import Problem, compute_score
from verl_sat.embedded.warm_start import (
    REWARD_WINDOW,
    WarmStartError,
    measure_reward,
    prepare,
    sample_responses,
    warm_start,
)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("job"), seed=1)


def score(text, truth="12"):
    return compute_score(task.DATA_SOURCE, text, truth)


@pytest.mark.parametrize("text", ["7,12", "12", " 12 ", "7, 12", "3,9,12", "=12", "012", "1,2,3,4,5,6,12"])
def test_the_last_number_decides(text):
    assert score(text) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        ",",
        "12,",
        "12,13",
        "7",
        "1 2",
        "12.",
        "-12",
        "+12",
        "1e1",
        "12\n13",
        "twelve",
        "assistant12",
        "<|im_end|>",
        "７,１２",
        "١٢",
        "1²",
        "nan",
        "\ud800",
        "\x00",
        "9" * 10_000,
        "12" * 5_000,
    ],
)
def test_anything_else_scores_nothing(text):
    assert score(text) == 0.0


@given(st.text(max_size=30))
def test_garbage_never_raises(text):
    assert score(text) in (0.0, 1.0)


@given(st.lists(st.integers(1, task.LARGEST_TERM), min_size=2, max_size=5))
def test_the_solution_of_every_problem_scores_one(terms):
    problem = Problem(tuple(terms))
    assert score(problem.solution, str(sum(terms))) == 1.0
    assert score(problem.solution, str(sum(terms) + 1)) == 0.0
    assert problem.solution.count(",") == len(terms) - 2


def test_question_and_solution_read_as_documented():
    problem = Problem((3, 4, 5, 2))
    assert (problem.question, problem.solution, problem.answer) == ("3+4+5+2=", "7,12,14", 14)


def test_lengths_vary_and_fit_the_limits():
    tokenizer = build_tokenizer()
    longest = Problem((task.LARGEST_TERM,) * max(task.TERM_SHARES))
    prompt = tokenizer.apply_chat_template(task.to_messages(longest), add_generation_prompt=True, tokenize=False)
    assert len(tokenizer.encode(prompt)) == task.MAX_PROMPT_LENGTH
    # and one more for the end token
    assert len(tokenizer.encode(longest.solution)) + 1 == task.MAX_RESPONSE_LENGTH
    train, _ = task.make_splits(1)
    lengths = {len(tokenizer.encode(problem.solution)) + 1 for problem in train}
    assert min(lengths) <= 3 and max(lengths) >= 11 and len(lengths) >= 6


def test_splits_depend_on_the_seed_alone():
    random.seed(0)
    before = random.getstate()
    first, second, other = task.make_splits(1), task.make_splits(1), task.make_splits(2)
    assert random.getstate() == before
    assert first == second and first != other


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_splits_are_distinct_disjoint_and_balanced(seed):
    train, test = task.make_splits(seed)
    assert len(train) == task.TRAIN_SIZE == 10 * 16 and len(test) == task.TEST_SIZE
    assert len(set(train) | set(test)) == len(train) + len(test)
    for problems in (train, test):
        counts = Counter(len(problem.terms) for problem in problems)
        assert counts == {length: round(len(problems) * share) for length, share in task.TERM_SHARES.items()}


def test_asking_for_more_problems_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="distinct sums of 2 terms, only"):
        task.make_problems(random.Random(0), 10 * task.LARGEST_TERM**2 + 10)


def test_rlhf_dataset_reads_the_parquet(tmp_path):
    from verl.utils.dataset.rl_dataset import RLHFDataset

    train, _ = task.make_splits(1)
    path = task.write_parquet(tmp_path / "data" / "train.parquet", train, "train")
    config = OmegaConf.create(
        {
            "max_prompt_length": task.MAX_PROMPT_LENGTH,
            "filter_overlong_prompts_workers": None,
            "cache_dir": str(tmp_path),
        }
    )
    dataset = RLHFDataset(str(path), build_tokenizer(), config)
    assert len(dataset) == len(train)  # none was filtered as too long
    for index in (0, 7, 159):
        row = dataset[index]
        assert row["raw_prompt"] == [{"role": "user", "content": train[index].question}]
        assert row["index"] == index and row["extra_info"]["split"] == "train"
        assert row["data_source"] == task.DATA_SOURCE and row["ability"] == "math"
        assert row["reward_model"] == {"style": "rule", "ground_truth": str(train[index].answer)}
        assert compute_score(row["data_source"], row["extra_info"]["answer"], row["reward_model"]["ground_truth"]) == 1

    # A limit one token lower drops exactly the longest prompts: the limit is the true longest.
    config.max_prompt_length = task.MAX_PROMPT_LENGTH - 1
    shorter = RLHFDataset(str(path), build_tokenizer(), config)
    assert len(shorter) == sum(len(problem.terms) < max(task.TERM_SHARES) for problem in train)


@pytest.mark.parametrize("path", [task.__file__, f"pkg://{task.__name__}"], ids=["file", "package"])
def test_verl_loads_the_reward_and_scores_token_ids(path):
    from tensordict import TensorDict
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
    from verl.trainer.ppo.reward import get_custom_reward_fn

    config = OmegaConf.create(
        {"reward": {"custom_reward_function": {"path": path, "name": "compute_score", "reward_kwargs": {}}}}
    )
    tokenizer = build_tokenizer()

    async def run(text):
        manager = NaiveRewardManager(config, tokenizer, get_custom_reward_fn(config))
        ids = tokenizer.encode(text)
        responses = torch.full((1, task.MAX_RESPONSE_LENGTH), tokenizer.pad_token_id)
        responses[0, : len(ids)] = torch.tensor(ids)
        mask = torch.zeros(1, 4 + task.MAX_RESPONSE_LENGTH, dtype=torch.long)
        mask[0, : 4 + len(ids)] = 1
        data = DataProto(
            batch=TensorDict({"responses": responses, "attention_mask": mask}, batch_size=1),
            non_tensor_batch={
                "data_source": np.array([task.DATA_SOURCE], dtype=object),
                "reward_model": np.array([{"style": "rule", "ground_truth": "12"}], dtype=object),
                "extra_info": np.array([{}], dtype=object),
            },
        )
        return (await manager.run_single(data))["reward_score"]

    assert asyncio.run(run("7,12<|im_end|>")) == 1.0
    assert asyncio.run(run("7,11<|im_end|>")) == 0.0
    assert asyncio.run(run("<|im_end|>")) == 0.0


def test_prepare_puts_the_reward_in_the_window(job):
    low, high = REWARD_WINDOW
    assert low <= job.reward <= high
    # Measured again, from the files, with samples that took no part in stopping the warm start.
    model = AutoModelForCausalLM.from_pretrained(job.model_path)
    tokenizer = AutoTokenizer.from_pretrained(job.model_path)
    train, test = task.make_splits(1)
    assert low <= measure_reward(model, tokenizer, train, seed=77, responses_per_problem=2) <= high
    assert measure_reward(model, tokenizer, test, seed=77, responses_per_problem=2) >= 0.1


def test_prepare_records_what_it_made(job):
    from verl.trainer.ppo.reward import get_custom_reward_fn

    record = json.loads((Path(job.model_path).parent / "prepare.json").read_text())
    assert record == asdict(job)
    for path in (job.model_path, job.train_file, job.test_file):
        assert Path(path).is_absolute() and Path(path).exists()
    reward = {"path": job.reward_file, "name": job.reward_name}
    loaded = get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": reward}}))
    assert loaded("any", "7,12", "12") == 1.0
    assert job.train_size == 160 and job.num_parameters > 0 and job.warm_start_steps > 0
    assert {"data", "build", "warm_start", "measure", "save"} <= job.seconds.keys()


def test_most_groups_of_eight_hold_right_and_wrong_responses(job):
    model = AutoModelForCausalLM.from_pretrained(job.model_path)
    tokenizer = AutoTokenizer.from_pretrained(job.model_path)
    asked = [problem for problem in task.make_splits(1)[0][:48] for _ in range(8)]
    responses = sample_responses(model, tokenizer, asked, seed=5)
    scores = [score(text, str(problem.answer)) for text, problem in zip(responses, asked, strict=True)]
    groups = torch.tensor(scores).view(48, 8).mean(dim=1)
    assert ((groups > 0) & (groups < 1)).float().mean() > 0.6
    # The careless habit that RL is to break: a share of the responses stops short.
    short = [problem.solution.count(",") - text.count(",") for text, problem in zip(responses, asked, strict=True)]
    assert 0.1 < sum(missing > 0 for missing in short) / len(short) < 0.6


def warm_start_until_the_budget_ends(seed, **kwargs):
    train, test = task.make_splits(4)
    model = build_model(4)
    with pytest.raises(WarmStartError, match=r"reward 0\.\d+ after 12 steps, target 0\.9"):
        warm_start(
            model,
            build_tokenizer(),
            seed,
            problems=train[:8],
            exclude=[*train, *test],
            target_reward=0.9,
            step_budget=12,
            batch_size=8,
            **kwargs,
        )
    return model.state_dict()


def test_warm_start_is_deterministic_and_keeps_the_global_state():
    threads = torch.get_num_threads()
    torch.manual_seed(9)
    expected = torch.rand(2)
    torch.manual_seed(9)
    weights = warm_start_until_the_budget_ends(4)
    assert torch.equal(torch.rand(2), expected) and torch.get_num_threads() == threads
    again, other = warm_start_until_the_budget_ends(4), warm_start_until_the_budget_ends(5)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not any(torch.equal(weights[name], other[name]) for name in weights if name.endswith("q_proj.weight"))


def test_warm_start_never_trains_on_the_data(monkeypatch):
    from verl_sat.embedded import warm_start as module

    seen = set()
    loss = module._supervised_loss

    def spy(model, tokenizer, problems, responses):
        seen.update(problems)
        return loss(model, tokenizer, problems, responses)

    monkeypatch.setattr(module, "_supervised_loss", spy)
    lines = []
    warm_start_until_the_budget_ends(4, on_progress=lines.append)
    train, test = task.make_splits(4)
    assert len(seen) > 40 and not seen & {*train, *test}
    assert len(lines) == 1 and lines[0].startswith("warm start: step 10, reward 0.")


@pytest.mark.parametrize("target", [0.0, 1.0, -1.0])
def test_target_reward_is_checked(target):
    with pytest.raises(ValueError, match="target_reward must be in"):
        warm_start(build_model(1), build_tokenizer(), 1, problems=[Problem((1, 2))], target_reward=target)
