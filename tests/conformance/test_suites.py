"""Each suite passes where it should, counts what happened, and draws the same cases again."""

from dataclasses import replace

import numpy as np
import pytest

from servespec.conformance.adapters.fast import FastImplementation
from servespec.conformance.adapters.loading import offers
from servespec.conformance.adapters.reference import ReferenceImplementation
from servespec.conformance.cases.case import Case
from servespec.conformance.checks.bounds import TIE_SHARES
from servespec.conformance.checks.invariance import variants
from servespec.conformance.checks.registry import SUITES, UnknownSuiteError, suite
from servespec.conformance.drawing import draw_cases
from servespec.conformance.report.result import SuiteReport
from servespec.conformance.verdicts import CaseResult, Divergence, Verdict, run_check

SIZES = {"engine": 10, "engine-bfloat16": 2, "model": 5, "invariance": 2}


RUNNABLE = [name for name in sorted(SUITES) if SUITES[name].needs in offers(FastImplementation())]
"""Suites that the fast path can run here: kernels need a backend."""


def drawn(name: str, count: int, seed: int = 0) -> list[Case]:
    found: list[Case] = []
    draw_cases(SUITES[name].cases(), count, seed, lambda case: bool(found.append(case)) or True)
    return found


@pytest.mark.parametrize("name", RUNNABLE)
def test_the_fast_path_agrees(name: str) -> None:
    sums = SuiteReport(name=name)
    for case in drawn(name, SIZES.get(name, 25)):
        result = run_check(SUITES[name].check, case, FastImplementation())
        assert result.divergence is None, result
        sums.add(result)
    print(name, sums)
    assert sums.steps > 0
    assert sums.equal + sums.ties == sums.tokens > 0
    if SUITES[name].dtype == "float32":
        assert sums.ties == 0


def test_the_reference_agrees_with_itself() -> None:
    for case in drawn("engine", 4):
        assert run_check(SUITES["engine"].check, case, ReferenceImplementation()).verdict == "equal"


def test_in_bfloat16_ties_are_counted_and_both_go_on() -> None:
    sums = SuiteReport(name="engine-bfloat16")
    suite = SUITES["engine-bfloat16"]
    for case in drawn(suite.name, 7):
        result = run_check(suite.check, case, FastImplementation())
        assert result.divergence is None, result
        sums.add(result)
    assert 0 < sums.ties <= TIE_SHARES["bfloat16"] * sums.tokens
    assert sums.equal == sums.tokens - sums.ties


@pytest.mark.parametrize("name", sorted(SUITES))
def test_the_same_seed_draws_the_same_cases(name: str) -> None:
    assert drawn(name, 8, seed=5) == drawn(name, 8, seed=5)
    assert drawn(name, 8, seed=5) != drawn(name, 8, seed=6)


@pytest.mark.parametrize("name", sorted(SUITES))
def test_sizes_grow_with_the_profile(name: str) -> None:
    sizes = SUITES[name].sizes
    assert 0 < sizes["quick"] < sizes["standard"] < sizes["full"]


def test_invariance_serves_every_budget_and_forces_preemption() -> None:
    case = max(drawn("invariance", 10), key=lambda c: len(c.workload.requests))
    ways = {variant.name: variant for variant in variants(case)}
    prompts = sum(r.num_prompt_tokens for r in case.workload.requests)
    for budget in range(1, prompts + 1):
        config = ways[f"budget {budget}"].config
        assert config.scheduler.token_budget == budget
    tiny = next(variant for name, variant in ways.items() if name.startswith("tiny pool"))
    assert tiny.config.cache.num_gpu_blocks < case.config.cache.num_gpu_blocks
    again = next(variant for name, variant in ways.items() if name.startswith("prefix hits"))
    assert len(again.waves) == 2


def test_unknown_suites_are_named() -> None:
    with pytest.raises(UnknownSuiteError, match="unknown suite 'engin': must be one of"):
        suite("engin")


def test_verdicts_follow_from_results() -> None:
    wrong = Divergence(field="sampled_token_ids['a']", expected="1", got="2")
    assert CaseResult(tokens=3).verdict is Verdict.EQUAL
    assert CaseResult(tokens=3, ties=1).verdict is Verdict.TIE
    diverged = CaseResult(tokens=3, ties=1, divergence=wrong)
    assert diverged.verdict is Verdict.DIVERGED
    assert diverged.equal == 1
    failed = Divergence(field="implementation", expected="", got="", failed=True)
    assert CaseResult(divergence=failed).verdict is Verdict.FAILED


def test_a_case_that_the_reference_cannot_run_is_nobodys_failure() -> None:
    case = replace(drawn("engine", 2)[-1], model=None)
    result = run_check(SUITES["engine"].check, case, FastImplementation())
    assert result.verdict is Verdict.DIVERGED
    assert result.divergence is not None
    assert result.divergence.field == "check"
    assert "needs a model" in result.divergence.got


class Rubbish(ReferenceImplementation):
    """Answers with something of the wrong kind."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self.answer = answer

    def make_engine(self, *args: object) -> object:  # type: ignore[override]
        answer = self.answer

        class Engine:
            def add_request(self, request: object) -> None: ...

            def abort_requests(self, request_ids: object) -> None: ...

            def has_unfinished_requests(self) -> bool:
                return True

            def step(self, forced: object = None) -> object:
                return answer

        return Engine()


@pytest.mark.parametrize("answer", [None, 7, "step", {}, np.zeros(3)])
@pytest.mark.parametrize("name", ["engine", "model", "invariance"])
def test_rubbish_is_a_failure_of_the_implementation(name: str, answer: object) -> None:
    result = run_check(SUITES[name].check, drawn(name, 2)[-1], Rubbish(answer))
    assert result.verdict is Verdict.FAILED
    assert result.divergence is not None
    assert "must be a StepRecord" in result.divergence.got
