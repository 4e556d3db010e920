"""Batched sampling of the embedded rollout: distribution, log-probs, budgets, abort, seeds."""

import threading

import pytest
import torch

from verl_sat.embedded.model import build_model, build_tokenizer
from verl_sat.embedded.rollout import install_recorder
from verl_sat.embedded.sampling import Request, SamplingSettings, request_seed, sample_batch

PROMPTS = [[1, 5, 9, 12], [1, 5, 9, 12, 14, 20, 21], [7]]


@pytest.fixture(scope="module")
def model():
    return build_model(seed=3).eval()


@pytest.fixture(scope="module")
def eos():
    return build_tokenizer().eos_token_id


def sample(model, requests, eos=(), abort=None, before_token=None, hook=None):
    return sample_batch(
        model,
        requests,
        pad_token_id=0,
        eos_token_ids=set(eos),
        abort=abort or threading.Event(),
        before_token=before_token,
        hook=hook,
    )


def requests_of(prompts, settings=None, budget=6, seed=0):
    settings = settings or SamplingSettings()
    return [Request(list(p), budget, settings, request_seed(seed, 0, list(p), i)) for i, p in enumerate(prompts)]


@torch.no_grad()
def teacher_forced(model, prompt, tokens, temperature=1.0):
    """The literal log-probs: one unpadded forward, no cache."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens).unsqueeze(-1))[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_a_forward_without_padding_or_cache(model, temperature):
    requests = requests_of(PROMPTS, SamplingSettings(temperature=temperature))
    for request, completion in zip(requests, sample(model, requests), strict=True):
        expected = teacher_forced(model, request.prompt_ids, completion.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=2e-5, rtol=0)


def test_recorded_routes_are_those_of_a_forward_without_padding_or_cache(model):
    """Prompts of different lengths, budgets of their own, cached decoding: one row per token but the last sampled."""
    hook = install_recorder(model)
    try:
        requests = requests_of(PROMPTS)
        for number, request in enumerate(requests):
            request.budget = 6 - 2 * number
        plain = sample(model, requests)
        completions = sample(model, requests, hook=hook)
        for request, completion, unrecorded in zip(requests, completions, plain, strict=True):
            assert completion.token_ids == unrecorded.token_ids and unrecorded.routed_experts is None
            ids = torch.tensor([request.prompt_ids + completion.token_ids[:-1]])
            with torch.no_grad(), hook.record() as recording:
                model(ids, use_cache=False)
            expected = recording.routes().sort(-1).values
            found = torch.from_numpy(completion.routed_experts).sort(-1).values
            assert torch.equal(found, expected)
    finally:
        hook.remove()


def test_L19_processed_log_probs_follow_temperature_and_raw_ones_do_not(model):
    # Logits [2, 1, 0] at T = 0.5: the same weights on both sides must give ratio 1 when T is applied on both.
    prompt = PROMPTS[0]
    processed = sample(model, requests_of([prompt], SamplingSettings(temperature=0.5)))[0]
    raw = sample(model, requests_of([prompt], SamplingSettings(temperature=0.5, raw_log_probs=True)))[0]
    assert processed.token_ids == raw.token_ids
    same = teacher_forced(model, prompt, processed.token_ids, temperature=0.5)
    torch.testing.assert_close(torch.tensor(processed.log_probs), same, atol=2e-5, rtol=0)
    unscaled = teacher_forced(model, prompt, raw.token_ids, temperature=1.0)
    torch.testing.assert_close(torch.tensor(raw.log_probs), unscaled, atol=2e-5, rtol=0)
    assert (same - unscaled).abs().max() > 1e-3


def test_a_sample_does_not_depend_on_the_batch_it_was_in(model):
    requests = requests_of(PROMPTS)
    together = sample(model, requests)
    alone = [sample(model, [request])[0] for request in requests]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


def test_samples_follow_the_models_distribution(model):
    prompt, count = PROMPTS[1], 4000
    with torch.no_grad():
        probs = torch.softmax(model(torch.tensor([prompt])).logits[0, -1].float(), -1)
    requests = [Request(prompt, 1, SamplingSettings(), request_seed(1, 0, prompt, i)) for i in range(count)]
    drawn = torch.tensor([c.token_ids[0] for c in sample(model, requests)])
    observed = torch.bincount(drawn, minlength=len(probs)).double()
    # Pearson's chi-square over the likely tokens, rest pooled; 99.99 % quantile by the Wilson-Hilferty cube.
    keep = probs * count >= 5
    cells = torch.cat([observed[keep], observed[~keep].sum().reshape(1)])
    expected = torch.cat([probs[keep].double() * count, (probs[~keep].double().sum() * count).reshape(1)])
    cells, expected = cells[expected > 0], expected[expected > 0]
    freedom = len(cells) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert ((cells - expected) ** 2 / expected).sum() < bound


def test_greedy_is_the_argmax(model):
    completion = sample(model, requests_of([PROMPTS[0]], SamplingSettings(temperature=0.0)))[0]
    tokens = list(PROMPTS[0])
    with torch.no_grad():
        for token in completion.token_ids:
            assert token == model(torch.tensor([tokens])).logits[0, -1].argmax().item()
            tokens.append(token)


def test_top_k_and_top_p_renormalise_what_is_left(model):
    one = sample(model, requests_of([PROMPTS[0]], SamplingSettings(top_k=1)))[0]
    assert one.log_probs == pytest.approx([0.0] * len(one.log_probs))
    two = sample(model, requests_of([PROMPTS[0]] * 50, SamplingSettings(top_k=2), budget=1))
    values = {round(c.log_probs[0], 6): c.token_ids[0] for c in two}
    assert len(values) == 2
    assert sum(torch.tensor(list(values)).exp()).item() == pytest.approx(1.0, abs=1e-5)


def test_each_request_has_its_own_budget(model):
    requests = requests_of(PROMPTS)
    for request, budget in zip(requests, (1, 4, 6), strict=True):
        request.budget = budget
    completions = sample(model, requests)
    assert [len(c.token_ids) for c in completions] == [1, 4, 6]
    assert not any(c.aborted for c in completions)


def test_a_response_ends_with_its_end_token(model):
    free = sample(model, requests_of(PROMPTS, budget=12))
    stop_at = free[1].token_ids[3]
    completions = sample(model, requests_of(PROMPTS, budget=12), eos=[stop_at])
    for completion, unstopped in zip(completions, free, strict=True):
        assert stop_at not in completion.token_ids[:-1]
        assert completion.token_ids == unstopped.token_ids[: len(completion.token_ids)]
        assert len(completion.log_probs) == len(completion.token_ids)


def test_abort_stops_between_two_tokens_and_marks_what_is_unfinished(model):
    abort, calls = threading.Event(), []

    def before_token():
        calls.append(1)
        if len(calls) == 3:
            abort.set()

    requests = requests_of(PROMPTS)
    requests[0].budget = 2
    completions = sample(model, requests, abort=abort, before_token=before_token)
    assert [len(c.token_ids) for c in completions] == [2, 3, 3]
    assert [c.aborted for c in completions] == [False, True, True]
    assert [c.token_ids for c in completions] == [
        c.token_ids[:n] for c, n in zip(sample(model, requests_of(PROMPTS)), (2, 3, 3), strict=True)
    ]


def test_seed_depends_on_everything_that_identifies_a_request():
    base = (1, 0, [1, 2, 3], 0)
    seeds = {request_seed(*base)}
    for changed in ((2, 0, [1, 2, 3], 0), (1, 1, [1, 2, 3], 0), (1, 0, [1, 2, 4], 0), (1, 0, [1, 2, 3], 1)):
        seeds.add(request_seed(*changed))
    assert len(seeds) == 5
    assert request_seed(*base) == request_seed(*base)


def test_unknown_sampling_parameter_is_refused():
    with pytest.raises(ValueError, match="min_p"):
        SamplingSettings.from_verl({"min_p": 0.1}, raw_log_probs=False)
