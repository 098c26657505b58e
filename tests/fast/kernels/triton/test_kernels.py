"""The kernels on whatever backend runs here, through the suite that users have."""

from __future__ import annotations

import os
from itertools import count

import pytest

from servespec.conformance.adapters.fast import FastImplementation
from servespec.conformance.cases.case import Case
from servespec.conformance.checks import kernels
from servespec.conformance.verdicts import run_check
from servespec.conformance.workloads.kernels import OPERATIONS, KernelCase, make_kernel_case
from servespec.conformance.workloads.workload import Workload
from servespec.fast.backends.registry import choose

BACKEND = choose()
if BACKEND is None and os.environ.get("SERVESPEC_BACKEND") is None:
    pytest.skip("no Triton here: make kernels runs these", allow_module_level=True)


def agrees(kernel, dtype):
    whole = Case(
        suite="kernels",
        config=kernels._UNUSED,
        workload=Workload(steps=()),
        dtype=dtype,
        kernel=kernel,
    )
    result = run_check(kernels.SUITE.check, whole, FastImplementation())
    assert result.divergence is None, (kernel, result.divergence, result.last_lines)
    return True


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation(operation):
    cases = (case for case in map(make_kernel_case, count()) if case.operation == operation)
    for case, dtype in zip(cases, ("float32", "bfloat16", "float32"), strict=False):
        assert agrees(case, dtype)


def test_sampling_takes_both_zeros_for_equals():
    # The nucleus of this case's first row ends between zeros of either sign.
    kernel = KernelCase(operation="sample", seed=56, lengths=(1,) * 8, contexts=(0,) * 8, gap=8)
    assert agrees(kernel, "float32")
