"""What other frameworks call a lag, and how to write the same for verl's ``separate_async`` trainer.

The words clash: a threshold may count versions, updates or a share of a batch, and may be a bound or what is typical.
Read in the public sources and documentation of each; names change, so take the meaning, not the spelling.
"""

from __future__ import annotations

from typing import NamedTuple


class Word(NamedTuple):
    """One word of one framework.

    Attributes:
        framework: whose.
        word: the option, with n for its value.
        versions: version lag that it means.
        updates: lag in optimizer updates.
        here: how to write it for verl, in words or overrides.
    """

    framework: str
    word: str
    versions: str
    updates: str
    here: str


_K, _W, _N = "parameter_sync_step", "num_warmup_batches", "max_off_policy_threshold"
_SEVERAL = "at most (n+1) x U - 1"  # n steps old, at the last of a step's U updates

WORDS = (
    Word("the paper", "lag n", "1", "n to 2n-1", f"{_K}=n {_W}=1 (lag1, lag8)"),
    Word("verl V1", f"{_W} = W", "W typically", "W x K to W x K + K-1", "itself"),
    Word("verl V1", f"{_K} = K", "no lag of its own", "K-1 more at the end of a cycle", "itself"),
    Word(
        "verl V1",
        f"{_N} = n",
        "drop: at most n-1; wait: blocks, at most W + n-2 (n > 1)",
        "drop: at most n x K - 1; wait: at most (W + n-1) x K - 1",
        "itself; with drop n > W, or the lag is pinned at n-1",
    ),
    Word(
        "verl fully_async",
        "staleness_threshold = s",
        "a share: s on average; 0 is on-policy",
        "s x K to s x K + K-1, K = trigger_parameter_sync_step x require_batches",
        f"{_W}=s (fractions are allowed)",
    ),
    Word(
        "verl fully_async",
        "trigger_parameter_sync_step = n",
        "none of its own",
        "n x require_batches - 1 more",
        f"{_K}=n",
    ),
    Word(
        "slime",
        "train_async, update_weights_interval = n",
        "0 or 1",
        "U to n x U + U-1, U = num_steps_per_rollout",
        f"{_K}=U {_W}=1 for an interval of one, no exact equal for more",
    ),
    Word(
        "AReaL",
        "max_head_offpolicyness = n",
        "generation is at most n ahead; a straggler may be older",
        "n x U to n x U + U-1, U = ppo_n_minibatches (4)",
        f"{_K}=U {_W}=n {_N}=null",
    ),
    Word(
        "prime-rl",
        "max_off_policy_steps = n",
        "at most n by the oldest token, older ones are dropped; one batch ahead is typical",
        "at most n (one update a step)",
        f"{_K}=1 {_W}=1 {_N}=n+1",
    ),
    Word(
        "prime-rl",
        "max_async_level = n (until May 2026, then fixed at 1)",
        "generation is at most n ahead; a straggler may be older",
        "n typically",
        f"{_K}=1 {_W}=n",
    ),
    Word(
        "NeMo-RL",
        "max_trajectory_age_steps = n",
        "at most n, older ones are dropped",
        f"{_SEVERAL} (U updates a step)",
        f"{_K}=U {_W}=n {_N}=n+1",
    ),
    Word(
        "SkyRL",
        "fully_async.max_staleness_steps = n",
        "generation is at most n ahead; a straggler may be older (warned of, not dropped)",
        "n typically (one update a step)",
        f"{_K}=1 {_W}=n {_N}=null",
    ),
    Word(
        "ROLL",
        "async_generation_ratio = n",
        "at most n, rounded up; older ones are dropped",
        f"{_SEVERAL} (U updates a step)",
        f"{_K}=U {_W}=n {_N}=n+1",
    ),
    Word(
        "open-instruct",
        "async_steps = n",
        "at most n, older ones are dropped",
        f"{_SEVERAL}, U = num_mini_batches x num_epochs",
        f"{_K}=U {_W}=n {_N}=n+1",
    ),
    Word(
        "OpenRLHF",
        "async_queue_size = n",
        "at most n when it begins",
        f"{_SEVERAL} (U updates a batch)",
        f"{_K}=U {_W}=n {_N}=null",
    ),
    Word(
        "TRL (async GRPO)",
        "max_staleness = n",
        "at most n, older ones are dropped",
        f"{_SEVERAL}, U = weight_sync_steps",
        f"{_K}=U {_W}=n {_N}=n+1",
    ),
    Word(
        "tinker-cookbook",
        "max_steps_off_policy = n",
        "at most n, older ones are sampled again; one batch ahead is typical",
        f"{_SEVERAL}, U = num_substeps",
        f"{_K}=U {_W}=1 {_N}=n+1",
    ),
)


def as_markdown() -> str:
    """The glossary as a Markdown table, for the documentation."""
    lines = ["| framework | word | versions | updates | here |", "|---|---|---|---|---|"]
    lines += [f"| {w.framework} | `{w.word}` | {w.versions} | {w.updates} | {_code(w.here)} |" for w in WORDS]
    return "\n".join(lines)


def _code(text: str) -> str:
    return " ".join(f"`{part}`" if "=" in part else part for part in text.split(" "))


__all__ = ["WORDS", "Word", "as_markdown"]

if __name__ == "__main__":
    print(as_markdown())
