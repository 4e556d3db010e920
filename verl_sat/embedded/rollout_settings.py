"""What the Hugging Face rollout accepts under ``actor_rollout_ref.rollout``.

Imports neither verl nor Ray: the quickstart checks these before it starts anything, the server again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

ROLLOUT_KEY = "actor_rollout_ref.rollout"
DTYPES = ("float32", "bfloat16")
LOGPROBS_MODES = ("processed_logprobs", "raw_logprobs")


@dataclass(frozen=True)
class ServerSettings:
    """Settings of this server alone: ``actor_rollout_ref.rollout.custom.<name>``.

    Attributes:
        gather_window_s: a batch starts once no request has arrived for this long [s], so that
            requests sent together are sampled together, whatever the order of arrival.
        token_delay_s: artificial slowness, added before each token of a batch [s].
    """

    gather_window_s: float = 0.03
    token_delay_s: float = 0.0

    @classmethod
    def from_custom(cls, custom: Mapping[str, Any] | None) -> ServerSettings:
        """Validate ``rollout.custom``.

        Raises:
            ValueError: for an unknown key or a value that is not a number >= 0.
        """
        if custom is not None and not isinstance(custom, Mapping):
            raise ValueError(f"{ROLLOUT_KEY}.custom={custom!r}: expected a block")
        custom = dict(custom or {})
        known = [f.name for f in fields(cls)]
        for key, value in custom.items():
            full = f"{ROLLOUT_KEY}.custom.{key}"
            if key not in known:
                raise ValueError(f"{full}: unknown key; the hf rollout knows {known}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{full}={value!r}: expected seconds >= 0")
        return cls(**{key: float(value) for key, value in custom.items()})


def check_rollout_config(config: Any) -> ServerSettings:
    """Validate verl's rollout configuration for this backend.

    Args:
        config: ``RolloutConfig``, or the composed block.

    Returns:
        The settings under ``custom``.

    Raises:
        ValueError: for a dtype or log-prob mode that the server does not have, or a wrong ``custom`` block.
    """
    for name, allowed in (("dtype", DTYPES), ("logprobs_mode", LOGPROBS_MODES)):
        if config[name] not in allowed:
            raise ValueError(f"{ROLLOUT_KEY}.{name}={config[name]!r}: the hf rollout takes {' or '.join(allowed)}")
    for name in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
        if config[name] != 1:
            raise ValueError(f"{ROLLOUT_KEY}.{name}={config[name]}: the hf rollout does not split a model; set 1")
    return ServerSettings.from_custom(config["custom"])
