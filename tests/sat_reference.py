"""SAT written out token by token in Python floats, as the paper states it: the reference of the loss tests.

No torch, no vectorisation, nothing shared with the package; slow and meant to be read beside it.
"""

import json
import math
import pathlib
from fractions import Fraction

KERNEL_OF_FORM = {"H1": "hill", "H2": "hill_excess", "H3": "inverse_power", "one": "none"}


def load_vectors():
    """tests/data/vectors.json; its strings "nan", "inf" and "-inf" become floats."""
    with open(pathlib.Path(__file__).parent / "data" / "vectors.json") as file:
        vectors = json.load(file)
    for case in vectors["cases"]:
        for key in ("old_log_prob", "log_prob"):
            case[key] = [[float(x) for x in row] for row in case[key]]
    return vectors


def quantile(values, level):
    """Eq. 14: the smallest value at which the empirical distribution function reaches the level; 0 of nothing."""
    if not values:
        return 0.0
    level = Fraction(str(level))
    n = len(values)
    return next(x for x in sorted(values) if Fraction(sum(v <= x for v in values), n) >= level)


def psi(staleness, q, kernel, exponent):
    """Eq. 15 and its ablations."""
    if kernel == "hill":
        return 1 / (1 + (staleness / q) ** exponent)
    if kernel == "hill_excess":
        return 1 / (1 + ((staleness - q) / q) ** exponent)
    if kernel == "inverse_power":
        return (q / staleness) ** exponent
    raise AssertionError(kernel)


def sat(
    log_prob,
    old_log_prob,
    advantages,
    mask,
    *,
    sequence_level=False,
    level=0.9,
    kernel="hill",
    exponent=2.0,
    low=0.2,
    high=0.2,
    dual=None,
    q=None,
):
    """Loss, gradient by log_prob before aggregation, contraction and endpoints of every token, and q.

    Masked tokens: loss and gradient 0, contraction 1, nominal endpoints. All values are lists of rows.
    """
    rows, columns = len(mask), len(mask[0])
    d = [[0.0] * columns for _ in range(rows)]
    for b in range(rows):
        own = {t: log_prob[b][t] - old_log_prob[b][t] for t in range(columns) if mask[b][t]}
        if sequence_level and own:
            mean = min(max(sum(own.values()) / len(own), -20.0), 10.0)
            own = dict.fromkeys(own, mean)
        for t, x in own.items():
            d[b][t] = min(max(x, -20.0), 20.0)
    active = [(b, t) for b in range(rows) for t in range(columns) if mask[b][t]]
    if q is None:
        q = quantile([abs(d[b][t]) for b, t in active], level)

    def blank(x):
        return [[x] * columns for _ in range(rows)]

    out = {
        "q": q,
        "loss": blank(0.0),
        "grad": blank(0.0),
        "contraction": blank(1.0),
        "lower": blank(1 - low),
        "upper": blank(1 + high),
        "clipped": blank(False),
        "dual_clipped": blank(False),
    }
    for b, t in active:
        x, a = d[b][t], advantages[b][t]
        c = psi(abs(x), q, kernel, exponent) if kernel != "none" and q > 0 and abs(x) > q else 1.0
        lower = 1 - low * (c if x < 0 else 1.0)
        upper = 1 + high * (c if x > 0 else 1.0)
        r = math.exp(x)
        unclipped, clipped = -a * r, -a * min(max(r, lower), upper)
        loss = max(unclipped, clipped)
        grad = -a * r if unclipped >= clipped else 0.0
        out["clipped"][b][t] = clipped > unclipped
        if dual is not None and a < 0 and loss > -a * dual:
            loss, grad = -a * dual, 0.0
            out["dual_clipped"][b][t] = True
        if not sequence_level and not -20 <= log_prob[b][t] - old_log_prob[b][t] <= 20:
            grad = 0.0  # the clamp of the log-ratio
        out["loss"][b][t], out["grad"][b][t], out["contraction"][b][t] = loss, grad, c
        out["lower"][b][t], out["upper"][b][t] = lower, upper
    return out


def aggregate(values, mask, mode):
    """token-mean or seq-mean-token-mean of rows of numbers, over active tokens and non-empty responses."""
    sums = [sum(v for v, m in zip(row, keep, strict=True) if m) for row, keep in zip(values, mask, strict=True)]
    lengths = [sum(1 for m in keep if m) for keep in mask]
    if mode == "token-mean":
        return sum(sums) / max(sum(lengths), 1)
    means = [s / n for s, n in zip(sums, lengths, strict=True) if n]
    return sum(means) / max(len(means), 1)
