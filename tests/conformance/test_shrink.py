"""The shrinker, on pretended failures whose smallest case is known."""

from collections.abc import Callable

import pytest

from servespec.conformance.cases.case import Case
from servespec.conformance.cases.shrink import shrink, simpler
from servespec.conformance.checks.registry import SUITES
from servespec.conformance.drawing import draw_cases
from servespec.conformance.verdicts import CaseResult, Divergence
from servespec.reference.contracts import Quirks, SchedulerConfig


def big_case(accept: Callable[[Case], bool]) -> Case:
    found: list[Case] = []

    def take(case: Case) -> bool:
        if accept(case):
            found.append(case)
        return not found

    draw_cases(SUITES["engine"].cases(), 500, 3, take)
    return found[0]


def result(fails: bool, field: str = "batch.seq_lens[3]") -> CaseResult:
    divergence = Divergence(field=field, expected="1", got="2", step=9)
    return CaseResult(divergence=divergence if fails else None)


def test_a_failure_of_one_long_prompt_shrinks_to_it() -> None:
    def fails(case: Case) -> bool:
        return any(r.num_prompt_tokens >= 7 for r in case.workload.requests)

    case = big_case(
        lambda c: (
            len(c.workload.requests) >= 6 and c.config.scheduler.policy == "priority" and fails(c)
        )
    )
    small = shrink(case, result(True), lambda c: result(fails(c)), seconds=30).case
    (request,) = small.workload.requests
    assert request.num_prompt_tokens == 7
    assert request.sampling_params.max_tokens == 1
    assert len(small.workload.steps) == 1
    assert small.config.scheduler == SchedulerConfig(
        max_num_seqs=small.config.scheduler.max_num_seqs,
        max_num_batched_tokens=small.config.scheduler.max_num_batched_tokens,
        max_model_len=small.config.scheduler.max_model_len,
        quirks=Quirks(),
    )
    assert small.model is not None
    assert small.model.config.num_hidden_layers == 1
    assert small.model.seed == 0


def test_two_requests_that_are_needed_stay() -> None:
    def fails(case: Case) -> bool:
        return len(case.workload.requests) >= 2 and case.config.scheduler.policy == "priority"

    case = big_case(lambda c: len(c.workload.requests) >= 5 and fails(c))
    small = shrink(case, result(True), lambda c: result(fails(c)), seconds=30).case
    assert len(small.workload.requests) == 2
    assert small.config.scheduler.policy == "priority"
    assert all(r.num_prompt_tokens == 1 for r in small.workload.requests)


def test_another_failure_does_not_replace_the_one_at_hand() -> None:
    case = big_case(lambda c: len(c.workload.requests) >= 4)

    def run(candidate: Case) -> CaseResult:
        same = len(candidate.workload.requests) >= 3
        return result(True, "batch.seq_lens[0]" if same else "snapshot.free_blocks")

    small = shrink(case, result(True), run, seconds=30)
    assert len(small.case.workload.requests) == 3
    assert small.result.divergence is not None
    assert small.result.divergence.place == "batch.seq_lens"


def test_it_ends_in_time() -> None:
    case = big_case(lambda c: len(c.workload.requests) >= 4)
    asked: list[Case] = []

    def run(candidate: Case) -> CaseResult:
        asked.append(candidate)
        return result(False)

    small = shrink(case, result(True), run, seconds=0)
    assert small.case is case
    assert not asked


@pytest.mark.parametrize("suite", sorted(SUITES))
def test_candidates_are_valid_and_simpler(suite: str) -> None:
    drawn: list[Case] = []
    draw_cases(SUITES[suite].cases(), 6, 2, lambda case: bool(drawn.append(case)) or True)
    for case in drawn:
        count = len(case.workload.requests)
        for candidate in simpler(case, result(True)):
            assert candidate != case
            assert candidate.suite == suite
            assert len(candidate.workload.requests) <= count
