"""What the tests of several suites need: cases drawn once, and the first that finds a fault."""

from collections.abc import Callable, Iterable

import pytest
from hypothesis.strategies import SearchStrategy

from servespec.conformance.cases.case import Case
from servespec.conformance.drawing import draw_cases
from servespec.conformance.verdicts import CaseResult, Check, run_check


@pytest.fixture(scope="session")
def drawn() -> Callable[[SearchStrategy[Case], int], list[Case]]:
    """A number of cases of a strategy."""

    def draw(strategy: SearchStrategy[Case], count: int) -> list[Case]:
        found: list[Case] = []
        draw_cases(strategy, count, 0, lambda case: bool(found.append(case)) or True)
        return found

    return draw


@pytest.fixture(scope="session")
def first_failure() -> Callable[[Check, object, Iterable[Case]], tuple[Case, CaseResult]]:
    """The first case in which an implementation diverges or fails, and how."""

    def find(
        check: Check, implementation: object, cases: Iterable[Case]
    ) -> tuple[Case, CaseResult]:
        for case in cases:
            result = run_check(check, case, implementation)
            if result.divergence is not None:
                return case, result
        raise AssertionError("nothing was found")

    return find
