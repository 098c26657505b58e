"""The kernels on whatever backend runs here, through the suite that users have."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from servespec.conformance.adapters.fast import FastImplementation
from servespec.conformance.cases.case import Case
from servespec.conformance.checks import kernels
from servespec.conformance.verdicts import run_check
from servespec.conformance.workloads.kernels import OPERATIONS, make_kernel_case
from servespec.conformance.workloads.workload import Workload
from servespec.fast.backends.registry import choose

BACKEND = choose()
if BACKEND is None and os.environ.get("SERVESPEC_BACKEND") is None:
    pytest.skip("no Triton here: make kernels runs these", allow_module_level=True)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation(operation):
    implementation, counts, seed = FastImplementation(), Counter(), 0
    while counts["cases"] < 3:
        case = make_kernel_case(seed)
        seed += 1
        if case.operation != operation:
            continue
        whole = Case(
            suite="kernels",
            config=kernels._UNUSED,
            workload=Workload(steps=()),
            dtype="bfloat16" if counts["cases"] == 1 else "float32",
            kernel=case,
        )
        result = run_check(kernels.SUITE.check, whole, implementation)
        assert result.divergence is None, (case, result.divergence, result.last_lines)
        counts["cases"] += 1
    assert counts["cases"] == 3
