"""Verdicts: equal, tie, diverged or failed, and why.

Decisions are compared exactly (`servespec.conformance.compare`), numbers within a derived bound
(`servespec.conformance.checks.bounds`). A check runs one case, counts what it sees in a `Tally`
and raises `DivergedError` at the first difference; `run_check` turns that into a `CaseResult`.
"""

from __future__ import annotations

import signal
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from servespec.conformance.adapters.failure import ImplementationFailed, printable
from servespec.reference.contracts import (
    BatchRecord,
    EngineCoreOutput,
    SchedulerOutput,
    SchedulerSnapshot,
)

if TYPE_CHECKING:
    from servespec.conformance.cases.case import Case

__all__ = [
    "CHECK_FIELD",
    "CaseResult",
    "Check",
    "DivergedError",
    "Divergence",
    "ExpectedStep",
    "Tally",
    "Verdict",
    "attempt",
    "failure",
    "run_check",
]

CHECK_FIELD = "check"
"""Field of a divergence that the reference or the check itself is to blame for."""

_LAST_LINES = 6

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Verdict(StrEnum):
    """What became of one case."""

    EQUAL = "equal"
    TIE = "tie"
    DIVERGED = "diverged"
    FAILED = "implementation failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first place where an implementation parts from the reference.

    Attributes
    ----------
    field : str
        What differs, as a path into the record of the step, for example
        ``scheduler_output.num_scheduled_tokens``.
    expected, got : str
        The reference's value and the implementation's.
    step : int or None
        The step, from 0; None if no step is to blame.
    request : str or None
        The request, if one is to blame.
    failed : bool
        Whether the implementation failed (raised, hung, died, or returned values of a wrong
        type) instead of disagreeing.
    """

    field: str
    expected: str
    got: str
    step: int | None = None
    request: str | None = None
    failed: bool = False

    @property
    def place(self) -> str:
        """`field` without subscripts: the same for every element of a sequence or mapping."""
        return self.field.partition("[")[0]

    def printable(self) -> Divergence:
        """Return it with texts that any terminal and any file can take."""
        return replace(
            self,
            field=printable(self.field),
            expected=printable(self.expected),
            got=printable(self.got),
            request=None if self.request is None else printable(self.request),
        )

    def __str__(self) -> str:
        where = [] if self.step is None else [f"step {self.step}"]
        where += [] if self.request is None else [f"request {self.request}"]
        return f"{', '.join([*where, self.field])}: expected {self.expected}, got {self.got}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedStep:
    """What the reference does in one step; the part of it that a suite compares.

    Attributes
    ----------
    scheduler_output : SchedulerOutput
    sampled_token_ids : mapping of str to tuple of int
    outputs : tuple of EngineCoreOutput
    batch : BatchRecord or None
        None from a suite without batches, or if nothing was scheduled.
    snapshot : SchedulerSnapshot or None
        The scheduler's state after the step, where a suite compares it.
    """

    scheduler_output: SchedulerOutput
    sampled_token_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    outputs: tuple[EngineCoreOutput, ...] = ()
    batch: BatchRecord | None = None
    snapshot: SchedulerSnapshot | None = None


class DivergedError(Exception):
    """Raised by a check at the first difference.

    Parameters
    ----------
    divergence : Divergence
    """

    def __init__(self, divergence: Divergence) -> None:
        super().__init__(str(divergence))
        self.divergence = divergence


def attempt(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call into an implementation; whatever it raises becomes `ImplementationFailed`.

    Parameters
    ----------
    function : callable
    *args, **kwargs
        Handed on.

    Raises
    ------
    ImplementationFailed
        If `function` raises anything at all, `SystemExit` included; `KeyboardInterrupt` only
        where nobody can have pressed the keys.
    """
    try:
        return function(*args, **kwargs)
    except ImplementationFailed:
        raise
    except BaseException as error:  # foreign code may raise anything
        if isinstance(error, KeyboardInterrupt) and _interruptible():
            raise
        name = getattr(function, "__name__", type(function).__name__)
        text = _message(error).splitlines()
        what = f"{name} raised {type(error).__name__}" + (f": {text[0]}" if text else "")
        within = error.__traceback__ and error.__traceback__.tb_next
        raise ImplementationFailed(what, _end_of_traceback(error, within)) from error


def _interruptible() -> bool:
    """Whether a `KeyboardInterrupt` can be a person's: a worker ignores their signal."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _message(error: BaseException) -> str:
    """Return an exception's text, even of one whose ``str`` raises."""
    try:
        return str(error)
    except Exception:
        return ""


def _end_of_traceback(error: BaseException, start: TracebackType | None) -> tuple[str, ...]:
    text = "".join(traceback.format_exception(type(error), error, start))
    return tuple(text.rstrip().splitlines()[-_LAST_LINES:])


@dataclass(slots=True)
class Tally:
    """What a check counts while it runs one case.

    Attributes
    ----------
    steps : int
        Engine or scheduler steps compared.
    tokens : int
        Tokens compared.
    ties : int
        Tokens that differ within the rounding bound.
    counts : Counter
        How often each interesting thing happened (``preemptions``, ``evictions``, ...).
    expected : list of ExpectedStep
        What the reference did, for the case file.
    """

    steps: int = 0
    tokens: int = 0
    ties: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    expected: list[ExpectedStep] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """What one case showed.

    Attributes
    ----------
    steps, tokens, ties : int
        As in `Tally`.
    counts : mapping of str to int
    seconds : float
        Wall time of the case.
    divergence : Divergence or None
        None if the implementation agreed.
    last_lines : tuple of str
        The end of the implementation's traceback or output, if it failed.
    expected : tuple of ExpectedStep
        What the reference did up to the divergence; kept only if there is one or on request.
    expected_left_out : int
        Later steps of it that are too large to keep.
    """

    steps: int = 0
    tokens: int = 0
    ties: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    divergence: Divergence | None = None
    last_lines: tuple[str, ...] = ()
    expected: tuple[ExpectedStep, ...] = ()
    expected_left_out: int = 0

    @property
    def equal(self) -> int:
        """Tokens that agree exactly."""
        lost = self.divergence is not None and self.divergence.place == "sampled_token_ids"
        return self.tokens - self.ties - lost

    @property
    def verdict(self) -> Verdict:
        """The case's verdict."""
        if self.divergence is not None:
            return Verdict.FAILED if self.divergence.failed else Verdict.DIVERGED
        return Verdict.TIE if self.ties else Verdict.EQUAL


def failure(reason: str, step: int | None = None) -> Divergence:
    """Return the divergence of an implementation that failed.

    Parameters
    ----------
    reason : str
        How, in one line.
    step : int or None
    """
    return Divergence(
        field="implementation", expected="an answer", got=reason, step=step, failed=True
    )


Check = Callable[["Case", Any, Tally], None]
"""``check(case, implementation, tally)``: raises `DivergedError` or `ImplementationFailed`."""


def run_check(
    check: Check, case: Case, implementation: object, *, keep_expected: bool = False
) -> CaseResult:
    """Run one case and say what it showed.

    Parameters
    ----------
    check : callable
        Of a suite.
    case : Case
    implementation : object
        With the factory that the suite needs.
    keep_expected : bool
        Whether the result holds the reference's steps even if nothing diverged.

    Returns
    -------
    CaseResult
        `seconds` is left to the caller.
    """
    tally = Tally()
    divergence: Divergence | None = None
    last_lines: tuple[str, ...] = ()
    try:
        check(case, implementation, tally)
    except DivergedError as error:
        divergence = error.divergence
    except ImplementationFailed as error:
        last_lines = error.lines
        divergence = failure(error.reason, tally.steps)
    except Exception as error:  # of the reference or the check itself: no implementation's fault
        last_lines = _end_of_traceback(error, error.__traceback__)
        divergence = Divergence(
            field=CHECK_FIELD,
            expected="a case that the reference can run",
            got=f"{type(error).__name__}: {error}",
            step=tally.steps,
        )
    if divergence is not None:
        divergence = divergence.printable()
    keep = keep_expected or divergence is not None
    return CaseResult(
        steps=tally.steps,
        tokens=tally.tokens,
        ties=tally.ties,
        counts=dict(tally.counts),
        divergence=divergence,
        last_lines=last_lines,
        expected=tuple(tally.expected) if keep else (),
    )
