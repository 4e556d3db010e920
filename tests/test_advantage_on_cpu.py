"""The advantage clip by itself; inside the losses it is tested in test_policy_loss_on_cpu.py (L17)."""

import pytest
import torch

from verl_sat.advantage import clip_advantages

ADVANTAGES = torch.tensor([[7.87, -0.13, 0.0], [-6.0, 5.0, -5.0]])
STALE = torch.tensor([[False, True, True], [True, True, False]])


@pytest.mark.parametrize("scope", ["all", "stale"])
def test_off_is_the_identical_tensor(scope):
    clipped, changed = clip_advantages(ADVANTAGES, None, None, scope, STALE)
    assert clipped is ADVANTAGES and changed is None


@pytest.mark.parametrize(
    "low, high, scope, expected",
    [
        (-5.0, 5.0, "all", [[5.0, -0.13, 0.0], [-5.0, 5.0, -5.0]]),
        (None, 5.0, "all", [[5.0, -0.13, 0.0], [-6.0, 5.0, -5.0]]),
        (-5.0, None, "all", [[7.87, -0.13, 0.0], [-5.0, 5.0, -5.0]]),
        (0.0, 0.0, "all", [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        (-5.0, 5.0, "stale", [[7.87, -0.13, 0.0], [-5.0, 5.0, -5.0]]),
        (-0.1, 4.0, "stale", [[7.87, -0.1, 0.0], [-0.1, 4.0, -5.0]]),
    ],
)
def test_bounds_and_scope(low, high, scope, expected):
    before = ADVANTAGES.clone()
    clipped, changed = clip_advantages(ADVANTAGES, low, high, scope, STALE)
    assert torch.equal(clipped, torch.tensor(expected))
    assert torch.equal(changed, clipped != ADVANTAGES)
    assert torch.equal(ADVANTAGES, before)  # never in place: verl keeps using the batch


def test_a_nan_stays_a_nan():
    clipped, _ = clip_advantages(torch.tensor([float("nan"), float("inf")]), -5.0, 5.0, "all", torch.tensor([True] * 2))
    assert clipped[0].isnan() and clipped[1] == 5.0
