"""What the losses, the engine and the driver's preflight all know of the quantile's scope; imports nothing."""

import math

SCOPE_KEY = "actor_rollout_ref.actor.policy_loss.sat.scope"
DYNAMIC_CP_KEY = "actor_rollout_ref.actor.megatron.dynamic_context_parallel"


def few_sequences(quantile: float) -> int:
    """Responses below which a sequence-level gate opens for nobody, or rarely: 16 at the default quantile of 0.90.

    One response that holds more than ``1 - quantile`` of the tokens pulls the quantile onto itself, and beyond the
    quantile is nobody then. Of equally long responses ``1 / (1 - quantile)`` are enough; lengths vary.
    """
    return math.ceil(round(1.6 / (1 - quantile), 6)) if quantile < 1 else 0
