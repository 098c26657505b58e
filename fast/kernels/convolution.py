"""Depthwise causal convolution with a window of raw inputs kept between steps.

``y_t = silu(sum_j w_j * x_{t - width + 1 + j})`` for every channel, accumulated in float32. The
state of a request is its last ``width - 1`` inputs, oldest first; a request that starts has zeros
there.

Sources: ``causal_conv1d_update`` and ``causal_conv1d_fn`` of transformers' ``modeling_qwen3_5.py``
and of vllm-ascend (state layout, channels contiguous).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["ConvolutionPlan", "convolution_decode", "convolution_prefill", "plan_convolution"]


def convolution_decode(x: Tensor, weight: Tensor, states: Tensor, slots: Tensor) -> Tensor:
    """Convolve one token of each row and move its window on.

    Parameters
    ----------
    x : Tensor
        ``[R, C]`` raw inputs in the dtype of the states.
    weight : Tensor
        ``[width, C]`` float32, oldest tap first.
    states : Tensor
        ``[slots, >= width - 1, C]``, changed in place at `slots`.
    slots : Tensor
        ``[R]`` int64, no two alike.

    Returns
    -------
    Tensor
        ``[R, C]`` float32.
    """
    history = weight.shape[0] - 1
    window = torch.cat((states[:, :history].index_select(0, slots), x.unsqueeze(1)), dim=1)
    states[:, :history].index_copy_(0, slots, window[:, 1:])
    return functional.silu((window * weight).sum(dim=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionPlan:
    """Where rows of several tokens lie once each is preceded by its window.

    Of the extended sequence ``[T + R * (width - 1)]``: `window` ``[R * (width - 1)]`` and `inputs`
    ``[T]`` say where the old windows and the inputs go, `outputs` ``[T]`` where the windows of the
    outputs start, `final` ``[R * (width - 1)]`` where the new windows are.
    """

    window: Tensor
    inputs: Tensor
    outputs: Tensor
    final: Tensor


def plan_convolution(query_start_loc: Tensor, width: int) -> ConvolutionPlan:
    """Lay rows out one behind the other, each with room for its window.

    Parameters
    ----------
    query_start_loc : Tensor
        ``[R + 1]`` int64, cumulative token counts.
    width : int
        Taps.

    Returns
    -------
    ConvolutionPlan
    """
    history = width - 1
    lengths = query_start_loc.diff()
    row = torch.arange(len(lengths), device=lengths.device)
    start = query_start_loc[:-1] + history * row
    offset = torch.arange(history, device=lengths.device)
    token = torch.arange(int(query_start_loc[-1]), device=lengths.device)
    outputs = token + history * row.repeat_interleave(lengths)
    return ConvolutionPlan(
        window=(start[:, None] + offset).view(-1),
        inputs=outputs + history,
        outputs=outputs,
        final=((start + lengths)[:, None] + offset).view(-1),
    )


def convolution_prefill(
    x: Tensor, weight: Tensor, states: Tensor, slots: Tensor, plan: ConvolutionPlan
) -> Tensor:
    """Convolve rows of any number of tokens and move their windows on.

    Parameters
    ----------
    x : Tensor
        ``[T, C]`` packed raw inputs in the dtype of the states.
    weight, states, slots
        As for `convolution_decode`.
    plan : ConvolutionPlan

    Returns
    -------
    Tensor
        ``[T, C]`` float32.
    """
    width, channels = weight.shape
    history = states[:, : width - 1]
    extended = x.new_empty((len(plan.inputs) + len(plan.window), channels))
    extended.index_copy_(0, plan.window, history.index_select(0, slots).view(-1, channels))
    extended.index_copy_(0, plan.inputs, x)
    final = extended.index_select(0, plan.final).view(-1, width - 1, channels)
    history.index_copy_(0, slots, final)
    # Windows that reach over the end of a row are computed too, and not selected.
    count = len(extended) - width + 1
    y = extended[:count] * weight[0]
    for tap in range(1, width):
        y.addcmul_(extended[tap : tap + count], weight[tap])
    return functional.silu(y.index_select(0, plan.outputs), inplace=True)
