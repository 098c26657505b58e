"""Every suite must find the faults named for it, and leave the negative control alone."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from servespec.conformance.cases.case import Case
from servespec.conformance.checks.registry import SUITES
from servespec.conformance.checks.suite import Suite
from servespec.conformance.drawing import draw_cases
from servespec.conformance.faults.fault import Fault
from servespec.conformance.verdicts import Divergence, run_check

__all__ = ["CONTROL_CASES", "FAULT_CASES", "Finding", "self_test", "try_suite"]

FAULT_CASES = 100
"""Cases within which a suite must find a fault that is not rare."""

CONTROL_CASES = 10
"""Cases in which a suite must not report the negative control."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one suite said of one fault.

    Attributes
    ----------
    fault : Fault
    suite : str
    cases : int
        Cases run, the one that found it included.
    divergence : Divergence or None
        None if nothing was found.
    """

    fault: Fault
    suite: str
    cases: int
    divergence: Divergence | None

    @property
    def ok(self) -> bool:
        """Whether the fault was found, or the negative control was not."""
        return (self.divergence is not None) == (self.suite in self.fault.suites)


def try_suite(fault: Fault, suite: Suite, cases: int, seed: int = 0) -> Finding:
    """Run cases of a suite against a fault until one finds it.

    Parameters
    ----------
    fault : Fault
    suite : Suite
    cases : int
        Most cases to run.
    seed : int
    """
    tried = 0
    found: Divergence | None = None

    def take(case: Case) -> bool:
        nonlocal tried, found
        tried += 1
        found = run_check(suite.check, case, fault).divergence
        return found is None

    draw_cases(suite.cases(), cases, seed + zlib.crc32(suite.name.encode()), take)
    return Finding(fault=fault, suite=suite.name, cases=tried, divergence=found)


def self_test(faults: Sequence[Fault], seed: int = 0) -> Iterator[Finding]:
    """Try every fault on the suites that must find it, and controls on suites with a model.

    Parameters
    ----------
    faults : sequence of Fault
    seed : int

    Yields
    ------
    Finding
    """
    for fault in faults:
        for name in fault.suites or ("model", "engine"):
            cases = FAULT_CASES * fault.rarity if fault.suites else CONTROL_CASES
            yield try_suite(fault, SUITES[name], cases, seed)
