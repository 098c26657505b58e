"""Depthwise causal convolution with a window of raw inputs kept between steps.

``y_t = silu(sum_j w_j * x_{t - width + 1 + j})`` for every channel, accumulated in float32. The
state of a request holds its last inputs, oldest first; channels are contiguous.

A speculative row keeps more inputs than a window: its history starts at ``accepted - 1``, and
afterwards the state is the history without its oldest input, then all inputs of the row, so that
the next step finds its history wherever acceptance ended.

Sources: ``causal_conv1d_update`` and ``causal_conv1d_fn`` of transformers' ``modeling_qwen3_5.py``
and of vllm-ascend.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from servespec.fast.backends.base import Backend

__all__ = ["convolution_decode", "convolution_rows"]

_CHANNELS = 256


@triton.jit
def _decode(
    X, Weight, States, Slots, Out, s_x, s_slot, s_place, channels,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1)
    inside = c < channels
    slot = tl.load(Slots + row).to(tl.int64)
    if slot > 0:
        state = States + slot * s_slot + c
        x = tl.load(X + row * s_x + c, mask=inside, other=0.0)
        total = x.to(tl.float32) * tl.load(
            Weight + (WIDTH - 1) * channels + c, mask=inside, other=0.0
        )
        for j in tl.static_range(WIDTH - 1):
            old = tl.load(state + j * s_place, mask=inside, other=0.0)
            total += old.to(tl.float32) * tl.load(Weight + j * channels + c, mask=inside, other=0.0)
            if j > 0:
                tl.store(state + (j - 1) * s_place, old, mask=inside)
        tl.store(state + (WIDTH - 2) * s_place, x, mask=inside)
        y = total / (1.0 + tl.exp(-total))
        tl.store(Out + row * channels + c, y, mask=inside)
    else:
        tl.store(Out + row * channels + c, tl.zeros([BLOCK], tl.float32), mask=inside)


def convolution_decode(
    backend: Backend, x: Tensor, weight: Tensor, states: Tensor, slots: Tensor
) -> Tensor:
    """Convolve one token of each row and move its window on.

    Parameters
    ----------
    backend : Backend
    x : Tensor
        ``[R, C]`` raw inputs in the dtype of the states.
    weight : Tensor
        ``[width, C]`` float32, oldest tap first, contiguous.
    states : Tensor
        ``[slots, >= width - 1, C]``, changed in place at `slots`.
    slots : Tensor
        ``[R]`` int32 or int64; those not positive are padding, the others differ.

    Returns
    -------
    Tensor
        ``[R, C]`` float32; zero for padding.
    """
    rows, channels = x.shape
    out = torch.empty((rows, channels), dtype=torch.float32, device=x.device)
    block = min(_CHANNELS, triton.next_power_of_2(channels))
    backend.launch(
        _decode,
        (triton.cdiv(channels, block), rows),
        *(x, weight, states, slots, out, x.stride(0), *states.stride()[:2], channels),
        WIDTH=weight.shape[0],
        BLOCK=block,
    )
    return out


@triton.jit
def _rows(
    X, Weight, States, Slots, Accepted, Initial, Starts, Out, s_x, s_slot, s_place, channels,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPECULATIVE: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1)
    inside = c < channels
    slot = tl.load(Slots + row).to(tl.int64)
    first = tl.load(Starts + row)
    count = tl.load(Starts + row + 1) - first
    if (slot > 0) & (count > 0):
        state = States + slot * s_slot + c
        history = state
        if SPECULATIVE:
            history = state + (tl.load(Accepted + row) - 1) * s_place
        known = tl.load(Initial + row).to(tl.int32)
        for t in range(count):
            total = tl.zeros([BLOCK], tl.float32)
            for j in tl.static_range(WIDTH):
                tap = tl.load(Weight + j * channels + c, mask=inside, other=0.0)
                at = t + j - (WIDTH - 1)
                if at >= 0:
                    new = tl.load(X + (first + at) * s_x + c, mask=inside, other=0.0)
                    total += new.to(tl.float32) * tap
                elif known != 0:
                    old = tl.load(history + (t + j) * s_place, mask=inside, other=0.0)
                    total += old.to(tl.float32) * tap
            y = total / (1.0 + tl.exp(-total))
            tl.store(Out + (first + t) * channels + c, y, mask=inside)
        # What moves down is read before anything is written over it.
        kept = WIDTH - 1
        shift = count
        if SPECULATIVE:
            kept = WIDTH - 2 + count
            shift = 1
        for j in range(kept):
            at = shift + j - (WIDTH - 1)
            if at >= 0:
                new = tl.load(X + (first + at) * s_x + c, mask=inside, other=0.0)
                tl.store(state + j * s_place, new, mask=inside)
            elif known != 0:
                old = tl.load(history + (shift + j) * s_place, mask=inside, other=0.0)
                tl.store(state + j * s_place, old, mask=inside)
            else:
                zero = tl.zeros([BLOCK], tl.float32).to(States.dtype.element_ty)
                tl.store(state + j * s_place, zero, mask=inside)


def convolution_rows(
    backend: Backend,
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    has_initial_state: Tensor,
    accepted: Tensor | None = None,
) -> Tensor:
    """Convolve rows of any number of tokens and move their windows on.

    Parameters
    ----------
    backend : Backend
    x : Tensor
        ``[T, C]`` packed raw inputs in the dtype of the states.
    weight, states, slots
        As for `convolution_decode`.
    query_start_loc : Tensor
        ``[R + 1]`` int32; a row of no tokens keeps its window.
    has_initial_state : Tensor
        ``[R]`` int8 or bool; a row without starts from zeros, whatever its slot holds.
    accepted : Tensor or None
        ``[R]`` int32, at least 1, if the rows are speculative: then the states hold at least
        ``width - 2`` inputs more than a row has.

    Returns
    -------
    Tensor
        ``[T, C]`` float32; zero for padding.
    """
    tokens, channels = x.shape
    out = torch.zeros((tokens, channels), dtype=torch.float32, device=x.device)
    block = min(_CHANNELS, triton.next_power_of_2(channels))
    backend.launch(
        _rows,
        (triton.cdiv(channels, block), len(slots)),
        *(x, weight, states, slots, slots if accepted is None else accepted),
        *(has_initial_state.to(torch.int8), query_start_loc, out),
        *(x.stride(0), *states.stride()[:2], channels),
        WIDTH=weight.shape[0],
        BLOCK=block,
        SPECULATIVE=accepted is not None,
    )
    return out
