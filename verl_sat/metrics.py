"""Metrics of a SAT loss call: device tensors in, a dict of finite floats out, one device-to-host transfer.

Weighting: a call reports means over *its own* active tokens (response_mask = 1); verl then averages the calls of a
step with equal weight, over micro-batches, ranks and sub-steps. So a short micro-batch weighs as much as a long one:
10 tokens of which 40 % are clipped and 1 token of which 100 % are come out as 0.70, not as the pooled 0.4545. Rows
without an active token weigh nothing within a call, but a call made only of them still counts, with its neutral values.

Every call returns the same keys with finite values; tokens with a NaN are left out of all of them and counted in
``nonfinite_frac``. No key contains min, max, sum or total: verl picks the reduction by those substrings.

Log-ratios compare the current policy with whatever verl passes as ``old_log_prob``: the rollout engine's in bypass
mode, the trainer's own at the start of the cycle in decoupled mode. The keys are the same in both.
"""

from collections.abc import Mapping

import torch

from verl_sat.trust_region import Surrogate, TrustRegion, effective_radii, is_inert

PREFIX = "actor/sat/"

# Keys that every policy loss of verl reports, with verl's meaning.
SHARED_METRICS = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl")

# Key below PREFIX -> what it says. The order is the order in which a call reports them.
SAT_METRICS: dict[str, str] = {
    "quantile": "gate level q that was used [nats]",
    "stale_frac": "share of tokens beyond the gate; about 1 - quantile by construction",
    "radius_low": "mean lower clip radius after contraction",
    "radius_high": "mean upper clip radius after contraction",
    "eps_eff_low": "lower radius of the plain PPO clip with the same gradient; the nominal one when inert",
    "eps_eff_high": "upper radius of the plain PPO clip with the same gradient; the nominal one when inert",
    "inert": "1 when the gradient is plain PPO's: nothing in the scope stale, or q beyond both nominal log radii",
    "contraction_mean": "mean contraction c; 1 for tokens that are not stale",
    "contraction_strongest": "smallest c of the call; averaged over calls, so a mean of extremes",
    "abs_log_ratio": "mean |log pi - log old| per token [nats], for sat_gspo too (Eq. 52)",
    "clipfrac_high": "share of tokens with A > 0 clipped above",
    "clipfrac_low": "share of tokens with A < 0 clipped below",
    "intercepted_frac": "share of tokens that SAT clips and plain PPO would not",
    "advantage_clipfrac": "share of tokens whose advantage was clipped",
    "nonfinite_frac": "share of tokens with an inf or NaN in log-prob, old log-prob, advantage or weight",
    "missing_log_prob_frac": "share of tokens left out because their old log-prob was never recorded",
}

METRIC_KEYS = SHARED_METRICS + tuple(PREFIX + name for name in SAT_METRICS)


@torch.no_grad()
def measure(
    *,
    valid: torch.Tensor,
    region: TrustRegion,
    token_loss: Surrogate,
    ratio: torch.Tensor,
    staleness_log_ratio: torch.Tensor,
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    advantage_changed: torch.Tensor | None,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> dict[str, torch.Tensor]:
    """Means over the valid tokens of a call, still on the device.

    Args:
        valid: bool, token is trained and free of NaN, shape (batch_size, response_length); so are all below.
        region: trust region of the call.
        token_loss: loss and clip flags of the call.
        ratio: importance ratio that was clipped.
        staleness_log_ratio: log-ratio that was gated (the response's at sequence level), 0 where not valid.
        log_ratio: the token's own log-ratio, clamped, 0 where not valid.
        advantages: the ones that entered the loss.
        advantage_changed: bool, changed by the advantage clip; None if it is off.
        clip_ratio_low: nominal lower radius.
        clip_ratio_high: nominal upper radius.

    Returns:
        Named 0-dim tensors of the dtype of ``log_ratio``: plain means of METRIC_KEYS (ours without prefix), and
        ``shrink_low`` / ``shrink_high``, the means of 1 - c where it acts on that endpoint, 0 elsewhere.
    """
    clipped = token_loss.clipped & valid
    inside_nominal = (ratio >= 1 - clip_ratio_low) & (ratio <= 1 + clip_ratio_high)
    shrink = 1 - region.contraction
    sums = {
        "actor/pg_clipfrac": clipped.sum(),
        "actor/pg_clipfrac_lower": (token_loss.dual_clipped & valid).sum(),
        "actor/ppo_kl": -log_ratio.sum(),
        "stale_frac": region.stale.sum(),
        "shrink_low": torch.where(staleness_log_ratio < 0, shrink, 0.0).sum(),
        "shrink_high": torch.where(staleness_log_ratio > 0, shrink, 0.0).sum(),
        "abs_log_ratio": log_ratio.abs().sum(),
        "clipfrac_high": (clipped & (advantages > 0)).sum(),
        "clipfrac_low": (clipped & (advantages < 0)).sum(),
        "intercepted_frac": (clipped & inside_nominal).sum(),
        "advantage_clipfrac": log_ratio.new_zeros(())
        if advantage_changed is None
        else (advantage_changed & valid).sum(),
    }
    # As verl's masked_mean, so that the shared metrics agree to the last bit; it also makes an empty call 0.
    denominator = valid.sum() + 1e-8
    return {name: value.to(log_ratio.dtype) / denominator for name, value in sums.items()}


@torch.no_grad()
def to_host(
    values: Mapping[str, torch.Tensor],
    sums: Mapping[str, torch.Tensor] | None = None,
    count: torch.Tensor | None = None,
) -> dict[str, float]:
    """Copy named 0-dim tensors to the host, all in one transfer.

    Args:
        values: 0-dim tensors on one device, any numeric dtype.
        sums: 0-dim tensors that are divided by ``count`` on the way, all of its dtype; None is none.
        count: 0-dim; needed with ``sums`` only.

    Returns:
        The same names with Python floats.
    """
    wide = any(value.dtype == torch.float64 for value in (*values.values(), *(() if count is None else (count,))))
    dtype = torch.float64 if wide else torch.float32
    stacked = torch.stack([value if value.dtype == dtype else value.to(dtype) for value in values.values()])
    names = list(values)
    if sums:
        stacked = torch.cat([stacked, (torch.stack(list(sums.values())) / count).to(dtype)])
        names += sums
    return dict(zip(names, stacked.tolist(), strict=True))  # sync ok: the only one of a loss call


def assemble(
    host: Mapping[str, float], *, clip_ratio_low: float, clip_ratio_high: float, kernel: str, exponent: float
) -> dict[str, float]:
    """Metrics of one loss call from the values that ``to_host`` brought over.

    Args:
        host: the loss's measurements: the keys of METRIC_KEYS that are plain means, without prefix for ours, and
            ``shrink_low`` / ``shrink_high``, the mean of 1 - c over tokens contracted on that side (0 for others);
            ``opens``, not 0 if something in the scope of the quantile is stale.
        clip_ratio_low: nominal lower radius.
        clip_ratio_high: nominal upper radius.
        kernel: kernel of the contraction.
        exponent: its power.

    Returns:
        METRIC_KEYS, in that order, as floats.
    """
    inert = is_inert(host["quantile"], host["opens"] > 0, clip_ratio_low, clip_ratio_high)
    nominal = dict(clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)
    eps_eff_low, eps_eff_high = (
        (clip_ratio_low, clip_ratio_high)
        if inert
        else effective_radii(host["quantile"], kernel=kernel, exponent=exponent, **nominal)
    )
    derived = {
        # From 1 - c, not from the endpoints: 1 - (1 - 3e-4) has lost four digits in fp32.
        "radius_low": clip_ratio_low * (1 - host["shrink_low"]),
        "radius_high": clip_ratio_high * (1 - host["shrink_high"]),
        "contraction_mean": 1 - host["shrink_low"] - host["shrink_high"],
        "eps_eff_low": eps_eff_low,
        "eps_eff_high": eps_eff_high,
        "inert": float(inert),
    }
    values = {**host, **derived}
    return {key: float(values[key.removeprefix(PREFIX)]) for key in METRIC_KEYS}
