"""What a run of `servespec check` found, as plain data; its JSON form is the JSON report."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata

from servespec.conformance.checks.suite import Profile
from servespec.conformance.verdicts import CaseResult, Divergence, Verdict

__all__ = ["Failure", "Report", "SuiteReport", "machine"]


@dataclass(slots=True, kw_only=True)
class SuiteReport:
    """Sums over the cases of one suite.

    Attributes
    ----------
    name : str
    cases, steps, tokens : int
        What was compared.
    equal, ties : int
        Tokens.
    diverged, failed : int
        Cases that diverged; cases in which the implementation failed.
    seconds : float
        Wall time.
    counts : mapping of str to int
        How often each interesting thing happened.
    """

    name: str
    cases: int = 0
    steps: int = 0
    tokens: int = 0
    equal: int = 0
    ties: int = 0
    diverged: int = 0
    failed: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, result: CaseResult) -> None:
        """Add one case."""
        self.cases += 1
        self.steps += result.steps
        self.tokens += result.tokens
        self.equal += result.equal
        self.ties += result.ties
        self.diverged += result.verdict is Verdict.DIVERGED
        self.failed += result.verdict is Verdict.FAILED
        self.counts.update(result.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One thing that did not agree.

    Attributes
    ----------
    suite : str
    verdict : str
    field, expected, got : str
        As in `Divergence`.
    step : int or None
    request : str or None
    case_file : str or None
        Where the case was written; None if the run as a whole is to blame.
    not_written : str or None
        Why the case, or the smaller one made of it, could not be written.
    last_lines : tuple of str
        The end of the implementation's output, if it failed.
    """

    suite: str
    verdict: str
    field: str
    expected: str
    got: str
    step: int | None = None
    request: str | None = None
    case_file: str | None = None
    not_written: str | None = None
    last_lines: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, suite: str, result: CaseResult, case_file: str | None, not_written: str | None = None
    ) -> Failure:
        """Return the failure of one case, whose result has a divergence."""
        divergence = result.divergence
        assert divergence is not None
        return cls(
            suite=suite,
            verdict=result.verdict.value,
            field=divergence.field,
            expected=divergence.expected,
            got=divergence.got,
            step=divergence.step,
            request=divergence.request,
            case_file=case_file,
            not_written=not_written,
            last_lines=result.last_lines,
        )

    def __str__(self) -> str:
        return str(
            Divergence(
                field=self.field,
                expected=self.expected,
                got=self.got,
                step=self.step,
                request=self.request,
            )
        )


@dataclass(slots=True, kw_only=True)
class Report:
    """A whole run.

    Attributes
    ----------
    spec_version : str
    implementation : str
    profile : str
    quirks : str
        As in `session.Options`.
    seed : int
    machine : mapping of str to (str or int)
    suites : list of SuiteReport
    skipped : mapping of str to str
        Suites left out, and why.
    failures : list of Failure
    ok : bool
        Whether everything agreed.
    interrupted : bool
        Whether the run was ended by the user.
    """

    spec_version: str
    implementation: str
    profile: Profile
    quirks: str = "both"
    seed: int
    machine: Mapping[str, str | int]
    suites: list[SuiteReport] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    ok: bool = True
    interrupted: bool = False


def machine() -> dict[str, str | int]:
    """Return what may matter about this machine for a figure or a rounding."""
    facts: dict[str, str | int] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count() or 1,
        "python": platform.python_version(),
    }
    for package in ("numpy", "torch", "hypothesis"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "not installed"
    return facts
