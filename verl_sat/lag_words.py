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


_K, _W = "parameter_sync_step", "num_warmup_batches"

WORDS = (
    Word("the paper", "lag n", "1", "n to 2n-1", f"{_K}=n {_W}=1 (lag1, lag8)"),
    Word("verl V1", f"{_W} = W", "W typically", "W*K to W*K + K-1", "itself"),
    Word("verl V1", f"{_K} = K", "no lag of its own", "K-1 more at the end of a cycle", "itself"),
    Word(
        "verl V1",
        "max_off_policy_threshold = n",
        "at most n-1 (drop); no bound on what is in flight (wait)",
        "at most n*K - 1",
        "itself; n > W, or the lag is pinned at n-1",
    ),
    Word(
        "verl fully_async",
        "staleness_threshold = s",
        "a share: at most s of a cycle's samples are one version older",
        "up to 2*K*require_batches - 1 for those",
        f"{_W}=s (fractions are allowed)",
    ),
    Word(
        "verl fully_async", "trigger_parameter_sync_step = n", "none of its own", "n*require_batches-1 more", f"{_K}=n"
    ),
    Word(
        "slime",
        "train_async, update_weights_interval = n",
        "0 or 1",
        "1 to n (one rollout is generated ahead)",
        f"no exact equal; n = 1 is {_K}=1 {_W}=1",
    ),
    Word("AReaL", "max_head_offpolicyness = n", "at most n", "at most n (one update a version)", f"{_K}=1 {_W}=n"),
    Word(
        "prime-rl",
        "max_async_level = n",
        "generation runs at most n steps ahead",
        "at most n for what starts in time",
        f"{_K}=1 {_W}=n",
    ),
    Word(
        "prime-rl",
        "max_off_policy_steps = n",
        "older ones are discarded: at most n",
        "at most n",
        "max_off_policy_threshold=n+1 max_off_policy_strategy=drop",
    ),
    Word("NeMo-RL", "max_trajectory_age_steps = n", "at most n", "at most n (one update a step)", f"{_K}=1 {_W}=n"),
    Word("SkyRL", "fully_async.max_staleness_steps = n", "at most n", "at most n steps of updates", f"{_K}=1 {_W}=n"),
    Word("ROLL", "async_generation_ratio = n", "at most n, older ones are dropped", "at most n", f"{_K}=1 {_W}=n"),
    Word("open-instruct", "async_steps = n", "at most n, typically n", "n", f"{_K}=1 {_W}=n"),
    Word(
        "tinker-cookbook",
        "max_steps_off_policy = n",
        "at most n, older ones are requeued",
        "at most n",
        f"{_K}=1 {_W}=n max_off_policy_threshold=n+1",
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
