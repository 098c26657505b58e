"""Drawing cases from Hypothesis strategies outside a test.

Inside a test Hypothesis looks for failures: it varies earlier examples, tries small ones first, and
prefers numbers that it finds in the source of the modules loaded. A run of suites wants the
contrary, cases independent of each other and the same for the same seed wherever it runs, so it
draws through a backend of its own (`AVAILABLE_PROVIDERS` is Hypothesis's registry of them).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider

from servespec.conformance.cases.case import Case

__all__ = ["IndependentProvider", "draw_cases"]


class IndependentProvider(HypothesisProvider):
    """Random choices that depend on the seed alone."""

    def _maybe_draw_constant(self, *args: Any, **kwargs: Any) -> None:
        """Leave out the numbers that Hypothesis collects from loaded modules."""
        return


AVAILABLE_PROVIDERS["servespec"] = IndependentProvider


def draw_cases(
    strategy: st.SearchStrategy[Case], count: int, seed_value: int, take: Callable[[Case], bool]
) -> None:
    """Draw cases from a strategy, the same ones for the same seed.

    Parameters
    ----------
    strategy : SearchStrategy
    count : int
    seed_value : int
    take : callable
        Given each case; returns False to end early.
    """

    class Enough(BaseException):
        """Not an `Exception`, which Hypothesis would take for a failing example."""

    @seed(seed_value)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=tuple(HealthCheck),
        backend="servespec",
    )
    @given(strategy)
    def draw(case: Case) -> None:
        if not take(case):
            raise Enough

    with contextlib.suppress(Enough):
        draw()
