"""The causal convolution against its definition in float64, one token at a time."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from servespec.fast.kernels.convolution import (
    convolution_decode,
    convolution_prefill,
    plan_convolution,
)


def definition(
    inputs: torch.Tensor, window: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of one row, and the error allowed.

    A sum of `width` products in float32, then silu, whose slope is at most 1.1 and which takes an
    exponential: (width + 1) u sum|w x| * 1.1, and 8 u of the result.
    """
    extended = torch.cat((window, inputs)).double()
    taps = weight.double()
    outputs, bounds = [], []
    for t in range(len(inputs)):
        terms = extended[t : t + len(taps)] * taps
        y = terms.sum(0)
        outputs.append(y * y.sigmoid())
        u = 2.0**-24
        bounds.append(1.1 * (len(taps) + 1) * u * terms.abs().sum(0) + 8 * u * outputs[-1].abs())
    return torch.stack(outputs), torch.stack(bounds)


def states(slots: int, rows: int, channels: int, used: list[int], dtype: torch.dtype):
    """Poisoned states, with something to start from in the slots in use."""
    pages = torch.full((slots, rows * channels + 7), math.nan, dtype=dtype)
    view = pages[:, : rows * channels].view(slots, rows, channels)
    view[used] = torch.randn(len(used), rows, channels).to(dtype)
    return view


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "spare"), [(2, 0), (4, 0), (4, 3)])
def test_decode(width, spare, dtype):
    torch.manual_seed(width)
    slots = [5, 0, 7]
    store = states(9, width - 1 + spare, 6, slots, dtype)
    before = store.clone()
    weight, x = torch.randn(width, 6), torch.randn(3, 6).to(dtype)
    y = convolution_decode(x, weight, store, torch.tensor(slots))
    for row, slot in enumerate(slots):
        window = before[slot, : width - 1]
        expected, bound = definition(x[row : row + 1], window, weight)
        assert bool(((y[row].double() - expected[0]).abs() <= bound[0]).all())
        after = torch.cat((window, x[row : row + 1]))[1:]
        assert torch.equal(store[slot, : width - 1], after)
        assert torch.equal(store[slot, width - 1 :], before[slot, width - 1 :])
    untouched = [slot for slot in range(9) if slot not in slots]
    assert bool(store[untouched].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_of_random_rows(dtype):
    rng = np.random.default_rng(3)
    short = 0
    for seed in range(20):
        torch.manual_seed(seed)
        width = int(rng.integers(2, 6))
        lengths = rng.choice([1, 2, 3, 4, 9, 70], rng.integers(1, 6)).tolist()
        short += sum(length < width - 1 for length in lengths)
        slots = rng.permutation(10)[: len(lengths)].tolist()
        store = states(10, width - 1, 5, slots, dtype)
        # A row that starts has zeros in its window, whatever its neighbours hold.
        store[slots[0]] = 0
        before = store.clone()
        weight = torch.randn(width, 5)
        x = torch.randn(sum(lengths), 5).to(dtype)
        starts = torch.tensor([0, *itertools.accumulate(lengths)])
        plan = plan_convolution(starts, width)
        y = convolution_prefill(x, weight, store, torch.tensor(slots), plan)
        for row, slot in enumerate(slots):
            part = slice(int(starts[row]), int(starts[row + 1]))
            expected, bound = definition(x[part], before[slot], weight)
            assert bool(((y[part].double() - expected).abs() <= bound).all())
            after = torch.cat((before[slot], x[part]))[lengths[row] :]
            assert torch.equal(store[slot], after)
        untouched = [slot for slot in range(10) if slot not in slots]
        assert bool(store[untouched].isnan().all())
    assert short > 5
