"""Batched sampling from a Hugging Face causal model, with log-probs and a seed for each request.

`transformers`' own ``generate`` does the work (KV cache, left padding, stopping). What RL needs beside
it is small: the log-prob of each sampled token, a random stream of its own for each request, a budget
for each request, and a way to stop between two tokens.

The random stream makes a sample a function of (seed, model version, prompt, how often this prompt was
asked at this version), not of which requests happened to share a batch. Sampling is by the Gumbel-max
trick: the argmax of log-prob + Gumbel noise is an exact sample of the softmax.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from verl_sat.router_replay.hook import RouterHook

_SUPPORTED = {"temperature", "top_p", "top_k", "repetition_penalty", "logprobs", "max_tokens", "max_new_tokens"}


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling parameters of one request, in verl's names. ``temperature=0`` is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0
    raw_log_probs: bool = False

    @classmethod
    def from_verl(cls, params: dict, raw_log_probs: bool) -> SamplingSettings:
        """Take verl's dict.

        Raises:
            ValueError: for a parameter that this sampler does not implement (never ignored in silence).
        """
        unknown = sorted(set(params) - _SUPPORTED)
        if unknown:
            raise ValueError(f"sampling parameters {unknown} are not supported by the hf rollout; known: {_SUPPORTED}")
        return cls(
            temperature=float(params.get("temperature", 1.0)),
            top_p=float(params.get("top_p", 1.0)),
            top_k=int(params.get("top_k", -1)),
            repetition_penalty=float(params.get("repetition_penalty", 1.0)),
            raw_log_probs=raw_log_probs,
        )

    def processors(self) -> LogitsProcessorList:
        """The transformers processors that turn logits into the sampling distribution."""
        chain = LogitsProcessorList()
        if self.repetition_penalty != 1.0:
            chain.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.temperature not in (0.0, 1.0):
            chain.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k > 0:
            chain.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            chain.append(TopPLogitsWarper(self.top_p))
        return chain


@dataclass
class Request:
    """One prompt to continue.

    Attributes:
        prompt_ids: token ids of the prompt (after an abort: with what was sampled so far).
        budget: most tokens to sample, at least 1.
        settings: sampling distribution.
        seed: of the random stream of this request.
    """

    prompt_ids: list[int]
    budget: int
    settings: SamplingSettings
    seed: int = 0


@dataclass
class Completion:
    """What was sampled: ids, their log-probs [nats] and whether an abort cut it short.

    ``routed_experts`` holds the experts that the routers chose, ``[prompt + sampled - 1, MoE layers, top_k]`` (the last
    sampled token never went through the model); None where nothing recorded them.
    """

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    aborted: bool = False
    routed_experts: np.ndarray | None = None


def request_seed(
    seed: int, version: int | None, prompt_ids: Sequence[int], occurrence: int, replica_rank: int = 0
) -> int:
    """Seed of a request's random stream: a hash of what identifies it, independent of batching.

    ``occurrence`` is counted by each server for itself, so two servers differ by ``replica_rank``.
    """
    text = f"{seed}|{version}|{replica_rank}|{occurrence}|{','.join(map(str, prompt_ids))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


class _Recorder:
    """Sampler and stopping rule of one batch: ``generate`` calls it once before and once after each token."""

    def __init__(self, requests: list[Request], eos_ids: set[int], vocab_size: int, abort: threading.Event) -> None:
        settings = requests[0].settings
        self.settings = settings
        self.processors = settings.processors()
        self.abort = abort
        self.before_token: Callable[[], None] | None = None
        self.budgets = torch.tensor([request.budget for request in requests])
        self.eos = torch.tensor(sorted(eos_ids))
        self.ids: list[torch.Tensor] = []
        self.log_probs: list[torch.Tensor] = []
        self.done = torch.zeros(len(requests), dtype=torch.bool)
        self.lengths = torch.zeros(len(requests), dtype=torch.long)
        self.vocab_size = vocab_size
        self.streams = [torch.Generator().manual_seed(request.seed) for request in requests]

    def _gumbel(self) -> torch.Tensor:
        """Noise for one token of every row, each row from its own stream."""
        uniform = torch.stack([torch.rand(self.vocab_size, generator=stream) for stream in self.streams])
        return -torch.log(-torch.log(uniform.clamp_(torch.finfo(uniform.dtype).tiny, 1.0 - 2.0**-24)))

    def sample(self, input_ids: torch.LongTensor, logits: torch.Tensor) -> torch.Tensor:
        """Choose a token for each row and return scores whose argmax is that token."""
        if self.before_token is not None:
            self.before_token()
        logits = logits.float()
        log_probs = torch.log_softmax(self.processors(input_ids, logits), dim=-1)
        noisy = log_probs + self._gumbel() if self.settings.temperature > 0 else log_probs
        chosen = noisy.argmax(dim=-1, keepdim=True)
        reported = torch.log_softmax(logits, dim=-1) if self.settings.raw_log_probs else log_probs
        self.ids.append(chosen[:, 0])
        self.log_probs.append(reported.gather(-1, chosen)[:, 0])
        return torch.full_like(logits, -torch.inf).scatter_(-1, chosen, 0.0)

    def stop(self) -> torch.Tensor:
        """Rows that are finished after the last token."""
        alive = ~self.done
        self.lengths += alive
        self.done = self.done | torch.isin(self.ids[-1], self.eos) | (self.lengths >= self.budgets)
        if self.abort.is_set():
            return torch.ones_like(self.done)
        return self.done

    def completions(self) -> list[Completion]:
        """What each row sampled, cut at its end."""
        ids = torch.stack(self.ids, dim=1).tolist()
        log_probs = torch.stack(self.log_probs, dim=1).tolist()
        rows = zip(ids, log_probs, self.lengths.tolist(), self.done.tolist(), strict=True)
        return [Completion(row[:n], lp[:n], aborted=not done) for row, lp, n, done in rows]


class _SampleHook(LogitsProcessor):
    def __init__(self, recorder: _Recorder) -> None:
        self.recorder = recorder

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return self.recorder.sample(input_ids, scores)


class _StopHook(StoppingCriteria):
    def __init__(self, recorder: _Recorder) -> None:
        self.recorder = recorder

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs) -> torch.BoolTensor:
        return self.recorder.stop()


@torch.no_grad()
def sample_batch(
    model: PreTrainedModel,
    requests: list[Request],
    *,
    pad_token_id: int,
    eos_token_ids: set[int],
    abort: threading.Event,
    before_token: Callable[[], None] | None = None,
    hook: RouterHook | None = None,
) -> list[Completion]:
    """Sample one completion for each request, all in one batch.

    Args:
        model: any Hugging Face causal LM, in eval mode.
        requests: at least one; they share one ``settings``.
        pad_token_id: id for the left padding.
        eos_token_ids: ids that end a response; an empty set means only the budget does.
        abort: when set, sampling stops after the current token and unfinished rows are marked aborted.
        before_token: called before each token (the server's artificial slowness).
        hook: of ``model``; if given, the routes are recorded.

    Returns:
        Completions in the order of ``requests``. Log-probs are fp32, of the processed distribution
        (or of the raw logits with ``settings.raw_log_probs``).
    """
    if len({request.settings for request in requests}) != 1:
        raise ValueError("a batch shares one set of sampling settings")
    width = max(len(request.prompt_ids) for request in requests)
    input_ids = torch.tensor([[pad_token_id] * (width - len(r.prompt_ids)) + r.prompt_ids for r in requests])
    lengths = torch.tensor([len(request.prompt_ids) for request in requests])
    attention_mask = (torch.arange(width) >= (width - lengths).unsqueeze(1)).long()

    recorder = _Recorder(requests, eos_token_ids, model.config.vocab_size, abort)
    recorder.before_token = before_token
    with nullcontext() if hook is None else hook.record() as recording:
        model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            max_new_tokens=int(recorder.budgets.max()),
            do_sample=False,
            use_cache=True,
            pad_token_id=pad_token_id,
            eos_token_id=None,  # the recorder decides, it knows the budgets too
            logits_processor=LogitsProcessorList([_SampleHook(recorder)]),
            stopping_criteria=StoppingCriteriaList([_StopHook(recorder)]),
        )
    completions = recorder.completions()
    if recording is not None:
        routes = routes_by_row(recording.per_forward(), len(requests))
        for completion, row, length in zip(completions, routes, lengths.tolist(), strict=True):
            completion.routed_experts = row[width - length : width + len(completion.token_ids) - 1]
    return completions


def routes_by_row(forwards: Sequence[torch.Tensor], batch: int) -> np.ndarray:
    """Routes of each row of a batch over all its positions.

    Args:
        forwards: of each forward pass (the prompt, then one token at a time), ``[batch * positions, layers, top_k]``,
            batch-major.
        batch: rows.

    Returns:
        ``[batch, positions of all passes, layers, top_k]``.
    """
    return torch.cat([ids.reshape(batch, -1, *ids.shape[1:]) for ids in forwards], dim=1).numpy()
