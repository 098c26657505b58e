"""The operations of a gated delta net: convolution, gates, and the rule in its three forms."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from servespec.conformance.checks.operations.call import Array, Call, Written, error_bound
from servespec.reference.numerics import convolution, gated_delta_rule, norms

__all__ = ["CHECKS"]

_WIDTH = 4


def _convolution(call: Call, *, speculative: bool, decode: bool) -> Written:
    case = call.case
    channels = case.heads * case.dim + 8
    slots = call.slots(call.rows)[:, 0]
    places = _WIDTH - 1 + (5 if speculative else 0)
    taps = call.floats(channels, _WIDTH)
    inputs = call.numbers(case.num_tokens, channels)
    states = call.memory.empty("states", (call.rows + 3, places, channels), call.dtype)
    known = np.ones(call.rows, np.bool_)
    if not decode:
        known = call.random.random(call.rows) < 0.7
    offsets = call.random.integers(0, 3, call.rows) if speculative else np.zeros(call.rows, int)
    written = np.zeros((call.rows + 3, places), np.bool_)
    expected_out = np.zeros((case.num_tokens, channels))
    expected_states: dict[int, Array] = {}
    for row, n in enumerate(case.lengths):
        history = np.zeros((_WIDTH - 1, channels))
        if slots[row] <= 0:
            continue
        if known[row]:
            history = call.numbers(_WIDTH - 1, channels)
            window = slice(int(offsets[row]), int(offsets[row]) + _WIDTH - 1)
            states.tensor[int(slots[row]), window] = torch.from_numpy(history).to(call.dtype)
        if not n:
            continue
        here = slice(call.starts[row], call.starts[row + 1])
        expected_out[here], after = convolution.causal_convolution(inputs[here], taps, history)
        if speculative:
            after = np.concatenate([history[1:], inputs[here]])
        expected_states[int(slots[row])] = after
        written[slots[row], : len(after)] = True
    arguments = (
        call.put("x", inputs),
        call.dense("weight", np.ascontiguousarray(taps.T), torch.float32),
        states.tensor,
        call.ints("slots", slots),
    )
    if decode:
        got = call.run("convolution_decode", *arguments)
    else:
        got = call.run(
            "convolution_rows",
            *arguments,
            call.ints("query_start_loc", call.starts),
            call.dense("has_initial_state", known.astype(np.int8), torch.int8),
            call.ints("accepted", offsets + 1) if speculative else None,
        )
    size = float(np.abs(taps).max() * np.abs(inputs).max(initial=1.0))
    call.compare("out", expected_out, got, error_bound(_WIDTH, 4.0 * size))
    for slot, after in expected_states.items():
        call.compare("states", after, states.tensor[slot, : len(after)], 0.0)
    return {"states": written}


def _gating(call: Call) -> Written:
    heads = call.case.heads * call.case.share
    a = call.numbers(call.case.num_tokens, heads, scale=8.0)
    b = call.numbers(call.case.num_tokens, heads)
    decay, bias = call.floats(heads), call.floats(heads)
    g, beta = gated_delta_rule.gating(a, b, decay, bias)
    negative = -np.exp(decay)
    got = call.run(
        "gating",
        *(call.put("a", a), call.put("b", b)),
        call.dense("negative_decay", negative, torch.float32),
        call.dense("dt_bias", bias, torch.float32),
    )
    size = float(np.abs(g).max(initial=1.0))
    call.compare("g", g, got[0], error_bound(4, max(size, float(np.abs(negative).max()))))
    call.compare("beta", beta, got[1], error_bound(4, 1.0))
    return {}


def _delta_inputs(
    call: Call,
) -> tuple[tuple[Array, Array, Array, Array, Array], tuple[Tensor, ...]]:
    """Return q (unscaled), k, v, g, beta, and their tensors with q scaled."""
    case = call.case
    tokens, heads = case.num_tokens, case.heads * case.share
    shape = (tokens, case.heads, case.dim)
    q, k = (norms.l2_norm(call.floats(*shape)).astype(np.float32) for _ in range(2))
    scaled = (q * np.float32(case.dim**-0.5)).astype(np.float32)
    v = call.floats(tokens, heads, case.dim)
    g = -np.abs(call.floats(tokens, heads, scale=0.3))
    beta = call.random.random((tokens, heads)).astype(np.float32).astype(np.float64)
    tensors = (
        call.put("q", scaled, torch.float32),
        call.put("k", k, torch.float32),
        call.put("v", v, torch.float32),
        call.dense("g", g, torch.float32),
        call.dense("beta", beta, torch.float32),
    )
    # The reference scales by itself; undoing it in float64 keeps the very numbers.
    exact = scaled.astype(np.float64) * case.dim**0.5
    return (exact, k.astype(np.float64), v, g, beta), tensors


def _chunks(starts: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return first token and number of tokens of every chunk of 64."""
    chunks = [
        (first, min(64, stop - first))
        for start, stop in itertools.pairwise(starts.tolist())
        for first in range(start, stop, 64)
    ]
    return np.array(chunks, np.int32).reshape(-1, 2)


def _delta_rule(call: Call, operation: str, columns: int = 1) -> Written:
    case = call.case
    heads = case.heads * case.share
    (q, k, v, g, beta), tensors = _delta_inputs(call)
    slots = call.slots(call.rows, columns=columns)
    count = call.rows * columns + 3
    states = call.memory.empty("states", (count, heads, case.dim, case.dim), torch.float32)
    accepted = call.random.integers(1, columns + 1, call.rows)
    expected = np.zeros((case.num_tokens, heads, case.dim))
    after: dict[int, Array] = {}
    written = np.zeros(count, np.bool_)
    for row, n in enumerate(case.lengths):
        initial = int(slots[row, accepted[row] - 1])
        if initial <= 0:
            continue
        state = call.floats(heads, case.dim, case.dim)
        states.tensor[initial] = torch.from_numpy(state)
        for t in range(n):
            here = slice(call.starts[row] + t, call.starts[row] + t + 1)
            expected[here], state = gated_delta_rule.recurrent_gated_delta_rule(
                q[here], k[here], v[here], g[here], beta[here], state
            )
            target = int(slots[row, t if columns > 1 else 0])
            if target > 0:
                after[target] = state
                written[target] = True
    arguments = (*tensors, states.tensor)
    if operation == "gated_delta_rule_decode":
        got = call.run(operation, *arguments, call.ints("slots", slots[:, 0]))
    else:
        starts = call.ints("query_start_loc", call.starts)
        if operation == "chunk_gated_delta_rule":
            table = call.dense("chunks", _chunks(call.starts), torch.int32)
            got = call.run(operation, *arguments, call.ints("slots", slots[:, 0]), starts, table)
        else:
            got = call.run(
                operation,
                *arguments,
                call.ints("slots", slots),
                call.ints("accepted", accepted),
                starts,
            )
    size = max(4.0, float(np.abs(expected).max(initial=0.0)))
    bound = error_bound(case.dim + max(case.lengths), size)
    call.compare("out", expected, got, bound)
    for slot, state in after.items():
        call.compare("states", state, states.tensor[slot], bound)
    return {"states": written}


CHECKS: dict[str, Callable[[Call], Written]] = {
    "convolution_decode": lambda c: _convolution(c, speculative=False, decode=True),
    "convolution_rows": lambda c: _convolution(c, speculative=False, decode=False),
    "convolution_speculative": lambda c: _convolution(c, speculative=True, decode=False),
    "gating": _gating,
    "gated_delta_rule_decode": lambda c: _delta_rule(c, "gated_delta_rule_decode"),
    "gated_delta_rule_rows": lambda c: _delta_rule(c, "gated_delta_rule_rows"),
    "gated_delta_rule_speculative": lambda c: _delta_rule(c, "gated_delta_rule_rows", 4),
    "chunk_gated_delta_rule": lambda c: _delta_rule(c, "chunk_gated_delta_rule"),
}
