"""The real scheduler, where there is one: set SERVESPEC_VLLM_PYTHON to its interpreter."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest

from servespec.conformance.adapters.failure import ImplementationFailed
from servespec.conformance.adapters.fast import FastImplementation
from servespec.conformance.adapters.loading import LoadingError, load_vllm
from servespec.conformance.adapters.process import ProcessImplementation
from servespec.conformance.adapters.reference import ReferenceImplementation
from servespec.conformance.adapters.vllm import vllm_implementation
from servespec.conformance.cases.case import Case
from servespec.conformance.checks import cache
from servespec.conformance.matrix import run_matrix
from servespec.conformance.verdicts import run_check
from servespec.conformance.workloads.scheduling import make_case, matrix

PYTHON = os.environ.get("SERVESPEC_VLLM_PYTHON")
needs_vllm = pytest.mark.skipif(PYTHON is None, reason="SERVESPEC_VLLM_PYTHON is not set")


@pytest.fixture(scope="module")
def vllm() -> Iterator[ProcessImplementation]:
    assert PYTHON is not None
    with load_vllm(PYTHON) as implementation:
        yield implementation


@needs_vllm
def test_reference_and_fast_decide_as_vllm_does(vllm: ProcessImplementation) -> None:
    counts: Counter[str] = Counter()
    steps = 0
    implementations = [ReferenceImplementation(), FastImplementation()]
    for found in run_matrix(vllm, implementations, steps=1, seed=1000):
        for name, result in found.results.items():
            assert result.divergence is None, (
                f"{name}: {found.combination}, {found.seed}: {result.divergence}"
            )
        counts.update(found.results["reference"].counts)
        steps += found.results["reference"].steps
    print(steps, "steps", dict(counts))
    assert vllm.version == "0.27.1"
    for happened in ("preemptions", "evictions", "prefix_hits", "padded_admissions"):
        assert counts[happened] > 0


@needs_vllm
def test_vllm_keeps_the_invariants(vllm: ProcessImplementation) -> None:
    for combination in matrix()[::5]:
        config, workload = make_case(combination, 2000)
        case = Case(suite="cache", config=config, workload=workload)
        result = run_check(cache.check, case, vllm)
        assert result.divergence is None, f"{combination}: {result.divergence}"


def test_an_environment_without_vllm_is_a_failure() -> None:
    import sys

    # The name of this package's adapter must not pass for vLLM itself.
    with (
        vllm_implementation(sys.executable) as implementation,
        pytest.raises(ImplementationFailed, match="ended with exit status 1") as caught,
    ):
        implementation.start()
    assert caught.value.lines[-1] == "ModuleNotFoundError: No module named 'vllm'"


def test_an_interpreter_that_is_not_there_is_named() -> None:
    with pytest.raises(LoadingError, match="--python /no/such/python: no such file"):
        load_vllm("/no/such/python")
