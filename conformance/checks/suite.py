"""What a suite is: a strategy that makes cases and a check that runs one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from hypothesis.strategies import SearchStrategy

from servespec.conformance.cases.case import Case, Dtype
from servespec.conformance.verdicts import Check

__all__ = ["PROFILES", "Factory", "Profile", "Suite"]

Profile = Literal["quick", "standard", "full"]
PROFILES: tuple[Profile, ...] = ("quick", "standard", "full")

Factory = Literal[
    "make_scheduler",
    "make_batch",
    "make_attention",
    "make_engine",
    "make_v0_scheduler",
    "make_kernels",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """One comparison with the reference, on as many random cases as wanted.

    Attributes
    ----------
    name : str
    summary : str
        What is compared, in one line.
    needs : str
        The factory an implementation must offer.
    cases : callable
        Returns the strategy that makes cases.
    check : callable
        ``check(case, implementation, tally)`` compares one case, counts in the tally and raises
        `DivergedError` or `ImplementationFailed`.
    sizes : mapping of profile to int
        Cases of each profile.
    must_reach : tuple of str
        Counts that a run of the quick profile's size must have seen at least once: a suite that
        never preempted has not tested preemption.
    dtype : {"float32", "bfloat16"}
        What implementations compute in; decides how many ties are too many.
    """

    name: str
    summary: str
    needs: Factory
    cases: Callable[[], SearchStrategy[Case]]
    check: Check
    sizes: Mapping[Profile, int]
    must_reach: tuple[str, ...]
    dtype: Dtype = "float32"
