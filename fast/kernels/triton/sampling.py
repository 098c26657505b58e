"""Greedy, top-k and top-p sampling without a sort.

The token of a row is drawn in one pass over what is left of the vocabulary. What is left is found
by bisection: float32 values are mapped to integers of the same order, and 32 passes count the
values (top-k) or add the probabilities (top-p) from a middle on until the threshold is exact. All
values equal to the threshold of top-k stay; of those equal to the threshold of top-p, as many as
the nucleus needs, the lowest ids first.

Source: ``apply_top_k_top_p`` of ``vllm/v1/sample/ops/topk_topp_sampler.py`` for what is kept; the
rule in full is in `servespec.reference.numerics.sampling`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servespec.fast.backends.base import Backend

__all__ = ["greedy", "sample"]

_BLOCK = 1024


@triton.jit
def _greedy(Logits, Out, s_row, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    best = -float("inf")
    token = tl.zeros([], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        t = start + tl.arange(0, BLOCK)
        x = tl.load(Logits + row * s_row + t, mask=t < vocabulary, other=-float("inf"))
        x = x.to(tl.float32)
        peak = tl.max(x, 0)
        first = tl.min(tl.where(x == peak, t, 2147483647), 0)
        token = tl.where(peak > best, first, token)
        best = tl.maximum(best, peak)
    tl.store(Out + row, token.to(tl.int64))


def greedy(backend: Backend, logits: Tensor) -> Tensor:
    """Return the token with the greatest logit, the lowest id among equals.

    Parameters
    ----------
    backend : Backend
    logits : Tensor
        ``[R, V]``, no NaN.

    Returns
    -------
    Tensor
        ``[R]`` int64.
    """
    rows, vocabulary = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(vocabulary))
    backend.launch(_greedy, (rows,), logits, out, logits.stride(0), vocabulary, BLOCK=block)
    return out


@triton.jit
def _ordered(x):
    """Map float32 to integers of the same order, both zeros to one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _tokens(logits, t, vocabulary, peak, inverse):
    """Return order and weight of some tokens; beyond the vocabulary the least order and 0."""
    inside = t < vocabulary
    x = tl.load(logits + t, mask=inside, other=-float("inf")).to(tl.float32)
    return tl.where(inside, _ordered(x), -2147483648), tl.exp((x - peak) * inverse)


@triton.jit
def _middle(low, high):
    """Return the middle of two integers, rounded up, where their sum may not fit."""
    return (low & high) + ((low ^ high) >> 1) + ((low ^ high) & 1)


@triton.jit
def _sample(Logits, Temperature, TopK, TopP, Uniform, Out, s_row, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    logits = Logits + row * s_row
    inverse = 1.0 / tl.load(Temperature + row)
    k = tl.load(TopK + row)
    t = tl.arange(0, BLOCK)
    peak = -float("inf")
    for start in range(0, vocabulary, BLOCK):
        x = tl.load(logits + start + t, mask=start + t < vocabulary, other=-float("inf"))
        peak = tl.maximum(peak, tl.max(x.to(tl.float32), 0))

    # The largest threshold that at least k values reach.
    low = -2147483647
    high = 2147483647
    for _ in range(32):
        middle = _middle(low, high)
        count = 0
        for start in range(0, vocabulary, BLOCK):
            order, _weight = _tokens(logits, start + t, vocabulary, peak, inverse)
            count += tl.sum(tl.where(order >= middle, 1, 0), 0)
        enough = count >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)

    mass = 0.0
    for start in range(0, vocabulary, BLOCK):
        order, weight = _tokens(logits, start + t, vocabulary, peak, inverse)
        mass += tl.sum(tl.where(order >= low, weight, 0.0), 0)
    nucleus = tl.load(TopP + row) * mass

    # The largest threshold from which on the weights make up the nucleus.
    high = 2147483647
    for _ in range(32):
        middle = _middle(low, high)
        mass = 0.0
        for start in range(0, vocabulary, BLOCK):
            order, weight = _tokens(logits, start + t, vocabulary, peak, inverse)
            mass += tl.sum(tl.where(order >= middle, weight, 0.0), 0)
        enough = mass >= nucleus
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)

    # Of the tokens at the threshold, as many as the nucleus still lacks.
    above = 0.0
    equal = 0.0
    equals = 0
    for start in range(0, vocabulary, BLOCK):
        order, weight = _tokens(logits, start + t, vocabulary, peak, inverse)
        above += tl.sum(tl.where(order > low, weight, 0.0), 0)
        equal += tl.sum(tl.where(order == low, weight, 0.0), 0)
        equals += tl.sum(tl.where(order == low, 1, 0), 0)
    each = equal / equals
    lacking = (nucleus - above) / each
    quota = lacking.to(tl.int32)
    quota = tl.minimum(tl.where(quota.to(tl.float32) < lacking, quota + 1, quota), equals)

    # The first kept token, by id, at which the running sum passes the drawn share.
    target = tl.load(Uniform + row) * (above + quota.to(tl.float32) * each)
    passed = 0.0
    met = 0
    token = 2147483647
    last = 0
    for start in range(0, vocabulary, BLOCK):
        order, weight = _tokens(logits, start + t, vocabulary, peak, inverse)
        tie = tl.where(order == low, 1, 0)
        kept = (order > low) | ((order == low) & (met + tl.cumsum(tie, 0) <= quota))
        weight = tl.where(kept, weight, 0.0)
        running = passed + tl.cumsum(weight, 0)
        token = tl.minimum(
            token, tl.min(tl.where(kept & (running > target), start + t, 2147483647), 0)
        )
        last = tl.maximum(last, tl.max(tl.where(kept, start + t, 0), 0))
        passed += tl.sum(weight, 0)
        met += tl.sum(tie, 0)
    # Rounding may leave the target just above the sum.
    tl.store(Out + row, tl.minimum(token, last).to(tl.int64))


def sample(
    backend: Backend,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """Draw a token of each row.

    Parameters
    ----------
    backend : Backend
    logits : Tensor
        ``[R, V]``, no NaN.
    temperature : Tensor
        ``[R]`` float32, positive.
    top_k : Tensor
        ``[R]`` int32 in ``[1, V]``; V keeps all.
    top_p : Tensor
        ``[R]`` float32 in (0, 1]; of what top-k leaves.
    uniform : Tensor
        ``[R]`` float32 in [0, 1), the random number of each row.

    Returns
    -------
    Tensor
        ``[R]`` int64.
    """
    rows, vocabulary = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    backend.launch(
        _sample,
        (rows,),
        *(logits, temperature, top_k, top_p, uniform, out, logits.stride(0), vocabulary),
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocabulary)),
    )
    return out
