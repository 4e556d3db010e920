"""The advantage-clip option: bound advantages once, inside the loss.

Advantages reach the loss after group normalisation and on every trainer path, so this is the one place where the clip
cannot be forgotten. A group of 64 with a single success gives that response an advantage of 7.87; a bound of 5 makes
it 5.0.
"""

import torch


def clip_advantages(
    advantages: torch.Tensor, low: float | None, high: float | None, scope: str, stale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Clamp advantages to [low, high], all of them or those of stale tokens.

    Args:
        advantages: shape (batch_size, response_length).
        low: lower bound <= 0, or None for no lower bound.
        high: upper bound >= 0, or None for no upper bound.
        scope: ``all`` or ``stale``.
        stale: bool, the token lies beyond the gate, same shape; not read with scope ``all``.

    Returns:
        The clipped advantages, and a bool tensor of the positions that changed. With both bounds None the first is the
        very tensor that was passed in, and the second is None.
    """
    if low is None and high is None:
        return advantages, None
    clipped = torch.clamp(advantages, min=low, max=high)
    if scope == "stale":
        clipped = torch.where(stale, clipped, advantages)
    return clipped, clipped != advantages
