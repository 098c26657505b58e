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
    """Accept a token that is drawn, or could be if sums in float32 came out as they may.

    They decide which token is the last of the nucleus and where each token's share of the running
    sum begins and ends.
    """
    logits = _logits(call)
    size = logits.shape[1]
    temperature = call.random.uniform(0.5, 2.0, call.rows).astype(np.float32)
    top_k = call.random.choice([1, 5, 40, size], call.rows)
    top_p = call.random.choice([0.05, 0.3, 0.9, 1.0], call.rows).astype(np.float32)
    uniform = call.random.random(call.rows).astype(np.float32)
    got = call.run(
        "sample",
        call.put("logits", logits),
        *(call.dense("temperature", temperature, torch.float32), call.ints("top_k", top_k)),
        call.dense("top_p", top_p, torch.float32),
        call.dense("uniform", uniform, torch.float32),
    )
    slack = error_bound(size, 1.0)
    for row in range(call.rows):
        token, drawn = int(got[row]), []
        for p in (-slack, 0.0, slack):
            p = min(1.0, max(0.0, float(top_p[row]) + p))
            probabilities = sampling.sampling_probabilities(
                logits[row], float(temperature[row]), int(top_k[row]), p
            )
            first, last = (
                sampling.inverse_transform(probabilities, float(uniform[row]) + d)
                for d in (-slack, slack)
            )
            drawn += [t for t in range(first, last + 1) if probabilities[t] > 0.0]
        if token not in drawn:
            raise DivergedError(
                Divergence(
                    field=f"sample.tokens[{row}]",
                    expected=" or ".join(map(str, sorted(set(drawn)))),
                    got=str(token),
                )
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
