"""Norms, rotary embedding, and choosing tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from servespec.conformance.checks.operations.call import Array, Call, Written, error_bound
from servespec.conformance.verdicts import DivergedError, Divergence
from servespec.reference.numerics import norms, rotary, sampling

__all__ = ["CHECKS"]

_EPS = 1e-6


def _norm(call: Call, operation: str) -> Written:
    case = call.case
    shape = (case.num_tokens, case.heads, case.dim)
    x = call.numbers(*shape, scale=2.0)
    weight = call.floats(case.heads, case.dim)
    placed = call.put("x", x)
    bound = error_bound(case.dim, 8.0)
    if operation == "l2_norm":
        call.compare(operation, norms.l2_norm(x), call.run(operation, placed), bound)
    elif operation == "rms_norm":
        tensor = call.dense("weight", weight + 1.0, torch.float32)
        expected = norms.rms_norm(x, weight, _EPS)
        call.compare(operation, expected, call.run(operation, placed, tensor, _EPS), bound * 4)
    else:
        gate = call.numbers(*shape)
        tensor = call.dense("weight", weight[0], torch.float32)
        expected = norms.gated_rms_norm(x, gate, weight[0], _EPS)
        got = call.run(operation, placed, call.put("gate", gate), tensor, _EPS)
        call.compare(operation, expected, got, bound * 4)
    return {}


def _norm_rotary(call: Call) -> Written:
    case = call.case
    x = call.numbers(case.num_tokens, case.heads, case.dim, scale=2.0)
    weight = call.floats(case.heads, case.dim)
    positions = call.random.integers(0, 4096, case.num_tokens)
    angles = rotary.rotary_angles(positions, case.dim // 4, 10000.0)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    got = call.run(
        "norm_rotary",
        call.put("x", x),
        call.dense("weight", weight + 1.0, torch.float32),
        call.put("cos_sin", table, torch.float32),
        *(_EPS, torch.float32),
    )
    expected = rotary.apply_rotary(norms.rms_norm(x, weight, _EPS), angles)
    call.compare("out", expected, got, error_bound(case.dim, 32.0))
    return {}


def _logits(call: Call) -> Array:
    # Coarse, so that equal maxima are frequent.
    size = 200 + 30 * call.case.dim if call.case.operation == "greedy" else 200 + call.case.dim
    values: Array = np.round(call.numbers(call.rows, size, scale=2.0), 1)
    rounded = torch.from_numpy(values).to(call.dtype).double().numpy()
    return np.asarray(rounded, np.float64)


def _greedy(call: Call) -> Written:
    logits = _logits(call)
    got = call.run("greedy", call.put("logits", logits))
    call.compare("tokens", np.array(sampling.greedy(logits), np.float64), got, 0.0)
    call.tally.tokens += call.rows
    return {}


def _sample(call: Call) -> Written:
    """Accept a token if its interval of the running sum holds the drawn number.

    The interval's ends, and which token is the last of the nucleus, may be off by rounding.
    """
    logits = _logits(call)
    size = logits.shape[1]
    temperature = call.random.uniform(0.5, 2.0, call.rows).astype(np.float32)
    top_k = call.random.choice([1, 5, 40, size], call.rows)
    top_p = call.random.choice([0.3, 0.9, 1.0], call.rows).astype(np.float32)
    uniform = call.random.random(call.rows).astype(np.float32)
    got = call.run(
        "sample",
        call.put("logits", logits),
        *(call.dense("temperature", temperature, torch.float32), call.ints("top_k", top_k)),
        call.dense("top_p", top_p, torch.float32),
        call.dense("uniform", uniform, torch.float32),
    )
    for row in range(call.rows):
        slack = error_bound(size, 1.0)
        x = logits[row] / float(temperature[row])
        weights = np.exp(x - x.max())
        weights[x < np.sort(x)[-int(top_k[row])]] = 0.0
        weights /= weights.sum()
        # Values equal to the one that completes the nucleus stay with it.
        mass = np.array([weights[x > value].sum() for value in x])
        sure, possible = (mass < float(top_p[row]) + d for d in (-slack, slack))
        token = int(got[row])
        fits = []
        for kept in (sure, possible):
            running = np.cumsum(np.where(kept, weights, 0.0))
            low = (running[token] - weights[token]) / running[-1] - slack
            high = running[token] / running[-1] + slack
            fits.append(bool(kept[token]) and low <= float(uniform[row]) <= high)
        if not any(fits) or weights[token] == 0.0:
            raise DivergedError(
                Divergence(field="sample.tokens", expected="a token drawn", got=str(token))
            )
    call.tally.tokens += call.rows
    return {}


CHECKS: dict[str, Callable[[Call], Written]] = {
    "rms_norm": lambda c: _norm(c, "rms_norm"),
    "gated_rms_norm": lambda c: _norm(c, "gated_rms_norm"),
    "l2_norm": lambda c: _norm(c, "l2_norm"),
    "norm_rotary": _norm_rotary,
    "greedy": _greedy,
    "sample": _sample,
}
