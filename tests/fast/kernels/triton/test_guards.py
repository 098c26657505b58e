"""Deliberately wrong kernels, whose mistakes the suite must see on whatever backend runs here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from servespec.conformance.cases.case import Case
from servespec.conformance.checks import kernels
from servespec.conformance.verdicts import run_check
from servespec.conformance.workloads.kernels import KernelCase
from servespec.conformance.workloads.workload import Workload
from servespec.fast.backends.registry import choose

BACKEND = choose()
if BACKEND is None:
    pytest.skip("no Triton here: make kernels runs these", allow_module_level=True)

import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def _l2_norm(X, Out, s_row, rows, first, extra, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    x = tl.load(X + row * s_row + d, mask=d < D, other=0.0).to(tl.float32)
    y = x / tl.sqrt(tl.sum(x * x, 0) + 1e-6)
    end = tl.where(row == rows - 1, D + extra, D)
    tl.store(Out + row * D + d, y, mask=(d >= first) & (d < end))


def verdict(first, extra):
    def launcher(x):
        out = torch.empty(x.shape, dtype=torch.float32)
        arguments = (x, out, x.stride(0), len(x), first, extra)
        BACKEND.launch(_l2_norm, (len(x),), *arguments, D=x.shape[-1], BLOCK=64)
        return out

    case = Case(
        suite="kernels",
        config=kernels._UNUSED,
        workload=Workload(steps=()),
        kernel=KernelCase(operation="l2_norm", lengths=(3,), gap=8, dim=32),
    )
    implementation = SimpleNamespace(make_kernels=lambda: {"l2_norm": launcher})
    return run_check(kernels.SUITE.check, case, implementation).divergence


def test_the_right_one_agrees():
    assert verdict(0, 0) is None


def test_one_element_past_the_output():
    found = verdict(0, 1)
    if BACKEND.name == "interpreter":
        assert found.failed
        assert "writes bytes" in str(found)
    else:
        assert found.field == "empty[3, 1, 32].memory"
        assert found.got == "element 96 of the buffer was written (4 bytes in all)"


@pytest.mark.parametrize(("first", "extra", "where"), [(1, 0, "0, 0, 0"), (0, -1, "2, 0, 31")])
def test_one_element_left_unwritten(first, extra, where):
    found = verdict(first, extra)
    assert found.field == f"l2_norm.l2_norm[{where}]"
    assert found.got == "nan"
