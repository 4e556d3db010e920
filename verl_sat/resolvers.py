"""Arithmetic for configurations: what follows from the lag is computed, not repeated.

In ``separate_async`` three settings hang on K = ``parameter_sync_step``: verl wants
``train_batch_size == K * ppo_mini_batch_size``, and one trainer step is K optimizer updates, so lengths and intervals
that are meant in updates have to be divided by K. The plugin registers two resolvers that OmegaConf evaluates in every
process that reads such a key:

* ``${verl_sat.times:a,b}`` is ``a * b``;
* ``${verl_sat.steps:updates,K}`` is the number of trainer steps that hold so many updates, rounded up, at least 1.
"""

from __future__ import annotations

from omegaconf import OmegaConf


def times(left: int, right: int) -> int:
    """``left * right``, for whole numbers.

    Raises:
        ValueError: if one is not a whole number.
    """
    return _whole(left, "times") * _whole(right, "times")


def steps(updates: int, updates_per_step: int) -> int:
    """Trainer steps that hold ``updates`` optimizer updates, rounded up, at least 1.

    Raises:
        ValueError: if one is not a whole number, or ``updates_per_step`` is below 1.
    """
    per_step = _whole(updates_per_step, "steps")
    if per_step < 1:
        raise ValueError(f"${{verl_sat.steps:{updates},{updates_per_step}}}: a step holds at least 1 update")
    return max(1, -(-_whole(updates, "steps") // per_step))


def _whole(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"${{verl_sat.{name}:...}}: {value!r} is not a whole number")
    return value


def register() -> None:
    """Make the resolvers known to OmegaConf in this process. Idempotent."""
    for name, function in (("times", times), ("steps", steps)):
        OmegaConf.register_new_resolver(f"verl_sat.{name}", function, replace=True)
