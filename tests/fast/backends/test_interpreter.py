"""What the interpreter notices; needs upstream Triton."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.runtime.interpreter", reason="needs upstream Triton")
pytest.importorskip("triton.backends.nvidia", reason="needs upstream Triton")

from servespec.fast.backends.interpreter import AccessError, InterpreterBackend

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _copy(X, Out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(Out + i, tl.load(X + i, mask=i < n, other=0.0), mask=i < n)


@triton.jit
def _double(X, Out):
    tl.store(Out, (tl.load(X) * tl.load(X)).to(tl.bfloat16))


@triton.jit
def _order(Out):
    before = tl.load(Out)
    tl.store(Out + 1 + tl.program_id(0), before)
    tl.store(Out, before + 1.0)


@pytest.mark.parametrize(("size", "n", "what"), [(3, 4, "reads"), (4, 4, None), (4, 5, "reads")])
def test_reads_end_with_the_tensor_even_inside_a_larger_buffer(size, n, what):
    x, out = torch.ones(64)[8 : 8 + size], torch.zeros(8)
    if what is None:
        InterpreterBackend().launch(_copy, (1,), x, out, n, BLOCK=8)
        assert out.sum() == 4
        return
    with pytest.raises(AccessError, match=f"{what} bytes .* of X"):
        InterpreterBackend().launch(_copy, (1,), x, out, n, BLOCK=8)


def test_writes_end_with_the_tensor():
    both = torch.ones(16)
    with pytest.raises(AccessError, match=r"writes bytes \[0, 16\) of Out: must be in \[0, 12\)"):
        InterpreterBackend().launch(_copy, (1,), both[:8], both[8:11], 4, BLOCK=8)


def test_bfloat16_is_computed_and_rounded_as_such():
    x, out = torch.tensor([1.0078125], dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)
    InterpreterBackend().launch(_double, (1,), x, out)
    assert out == x * x


def test_program_instances_do_not_run_in_order():
    out = torch.zeros(9)
    InterpreterBackend().launch(_order, (8,), out)
    assert sorted(out[1:].tolist()) == list(range(8))
    assert out[1:].tolist() != list(range(8))
