"""Suite ``kernels``: one operation at a time against the reference in float64.

Inputs lie in guarded memory full of NaN (`servespec.conformance.checks.guarded`), and so does what
an operation allocates. In-place tensors are compared whole: what an operation should write within
a bound, every other byte exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from servespec.conformance.adapters.failure import ImplementationFailed
from servespec.conformance.cases.case import Case
from servespec.conformance.checks.operations import attention, gated_delta_net, pointwise
from servespec.conformance.checks.operations.call import Call
from servespec.conformance.checks.suite import Suite
from servespec.conformance.compare import shown
from servespec.conformance.verdicts import Tally, attempt
from servespec.conformance.workloads.kernels import OPERATIONS, kernel_cases
from servespec.conformance.workloads.workload import Workload
from servespec.reference.contracts import (
    CacheConfig,
    EngineConfig,
    KVCacheGroup,
    SchedulerConfig,
)

__all__ = ["SUITE", "check"]

_CHECKS = {**attention.CHECKS, **gated_delta_net.CHECKS, **pointwise.CHECKS}


def check(case: Case, implementation: Any, tally: Tally) -> None:
    """Run one case.

    Parameters
    ----------
    case : Case
    implementation : object
        Offers ``make_kernels``: a mapping of operations by name, on torch tensors, with the
        parameters of `servespec.fast.kernels.triton`. The tensors lie on its ``kernel_device``,
        where it has that attribute.
    tally : Tally

    Raises
    ------
    DivergedError, ImplementationFailed
    """
    assert case.kernel is not None
    device = getattr(implementation, "kernel_device", "cpu")
    operations = attempt(implementation.make_kernels)
    if not isinstance(operations, Mapping):
        raise ImplementationFailed(
            f"make_kernels returned {shown(operations)}: must be a mapping of operations by name"
        )
    call = Call(case, operations, tally, device)
    written = _CHECKS[case.kernel.operation](call)
    call.memory.check(written)
    tally.steps += 1
    tally.counts[case.kernel.operation] += 1
    tally.counts["empty_rows"] += case.kernel.lengths.count(0)
    tally.counts["full_pages"] += sum(
        (n + m) % case.kernel.block_size == 0 and n + m > 0
        for n, m in zip(case.kernel.lengths, case.kernel.contexts, strict=True)
    )


_UNUSED = EngineConfig(
    scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=16),
    cache=CacheConfig(
        num_gpu_blocks=2, groups=(KVCacheGroup(layer_type="full_attention", layer_indices=(0,)),)
    ),
)


def _cases() -> st.SearchStrategy[Case]:
    workload = Workload(steps=())
    return st.builds(
        lambda kernel, dtype: Case(
            suite="kernels", config=_UNUSED, workload=workload, dtype=dtype, kernel=kernel
        ),
        kernel_cases(),
        st.sampled_from(("float32", "bfloat16")),
    )


SUITE = Suite(
    name="kernels",
    summary="one operation at a time, in memory of which every other byte is watched",
    needs="make_kernels",
    cases=_cases,
    check=check,
    sizes={"quick": 160, "standard": 1000, "full": 10000},
    must_reach=(*OPERATIONS, "null_rows", "empty_rows", "full_pages", "shared_blocks"),
)
