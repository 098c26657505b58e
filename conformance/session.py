"""Running suites: draw cases, hand them to workers, keep what fails, go on."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from hypothesis.strategies import SearchStrategy

from servespec.conformance.adapters.loading import LoadingError
from servespec.conformance.adapters.traces import PROFILES
from servespec.conformance.cases import files
from servespec.conformance.cases.case import SPEC_VERSION, Case, CaseFile
from servespec.conformance.cases.shrink import shrink
from servespec.conformance.checks.bounds import TIE_SHARES
from servespec.conformance.checks.registry import SUITES, suite
from servespec.conformance.checks.suite import Profile, Suite
from servespec.conformance.drawing import draw_cases
from servespec.conformance.output import OutputError, unused
from servespec.conformance.pool import WorkerPool, default_jobs
from servespec.conformance.report.result import Failure, Report, SuiteReport, machine
from servespec.conformance.verdicts import CaseResult
from servespec.conformance.workloads.scheduling import with_quirks

__all__ = ["Listener", "Options", "QuirksName", "run"]

QuirksName = Literal["both", "vllm-0.27.1", "intended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run.

    Attributes
    ----------
    implementation : str
    python, root : str or None
        As for `WorkerPool`.
    suites : sequence of str
        None of them means all that the implementation can run.
    profile : {"quick", "standard", "full"}
    quirks : {"both", "vllm-0.27.1", "intended"} or None
        Whose decisions are expected of a scheduler that is driven alone; None means both, but of
        vLLM itself those it makes.
    seed : int
    cases : int or None
        Cases of each suite; None leaves it to the profile.
    case_folder : Path
        Where failing cases are written.
    jobs : int
    time_limit : float
        Seconds a case may take.
    shrink_seconds : float
        Time to spend on the first failure of a suite; others get a quarter.
    max_failures : int
        Failing cases after which a suite ends: more would seldom tell more.
    """

    implementation: str = "fast"
    python: str | None = None
    root: str | None = None
    suites: Sequence[str] = ()
    profile: Profile = "quick"
    quirks: QuirksName | None = None
    seed: int = 0
    cases: int | None = None
    case_folder: Path = Path("servespec-cases")
    jobs: int = default_jobs()
    time_limit: float = 60.0
    shrink_seconds: float = 20.0
    max_failures: int = 3


class Listener(Protocol):
    """Told how a run goes on."""

    def suite_started(self, suite: Suite, cases: int) -> None:
        """Tell that a suite starts."""

    def case_done(self, report: SuiteReport) -> None:
        """Tell that a case ended; `report` holds the sums so far."""

    def shrinking(self, tried: int) -> None:
        """Tell that a failing case is being made smaller."""

    def failed(self, failure: Failure) -> None:
        """Tell of a failure."""

    def suite_done(self, report: SuiteReport) -> None:
        """Tell that a suite ended."""


def run(options: Options, listener: Listener) -> Report:
    """Run suites against an implementation.

    Parameters
    ----------
    options : Options
    listener : Listener

    Returns
    -------
    Report
        Also after an interrupt from the keyboard, with what was found until then.

    Raises
    ------
    ValueError
        If a suite or the implementation is unknown, or it lacks what a suite asked for needs.
    """
    chosen = [suite(name) for name in dict.fromkeys(options.suites or SUITES)]
    report = Report(
        spec_version=SPEC_VERSION,
        implementation=options.implementation,
        profile=options.profile,
        quirks=_quirks(options),
        seed=options.seed,
        machine=machine(),
    )
    with WorkerPool(
        options.implementation,
        options.python,
        options.root,
        jobs=options.jobs,
        time_limit=options.time_limit,
    ) as pool:
        runnable = [s for s in chosen if s.needs in pool.hello.offers]
        for left_out in chosen:
            if left_out not in runnable:
                report.skipped[left_out.name] = f"no {left_out.needs}"
        if not runnable or (options.suites and report.skipped):
            missing = "; ".join(f"{name}: {why}" for name, why in report.skipped.items())
            raise LoadingError(
                f"implementation {options.implementation!r} cannot run suite {missing}"
            )
        try:
            for one in runnable:
                _run_suite(one, options, pool, listener, report)
        except KeyboardInterrupt:
            report.interrupted = True
    report.ok = not report.failures and not report.interrupted
    return report


def _run_suite(
    suite: Suite, options: Options, pool: WorkerPool, listener: Listener, report: Report
) -> None:
    count = options.cases or suite.sizes[options.profile]
    start = time.monotonic()
    sums = SuiteReport(name=suite.name)
    report.suites.append(sums)
    listener.suite_started(suite, count)
    pending: deque[tuple[Case, Future[CaseResult]]] = deque()
    failures = 0

    def fail(failure: Failure) -> None:
        report.failures.append(failure)
        listener.failed(failure)

    def finish_oldest() -> None:
        nonlocal failures
        case, future = pending.popleft()
        result = future.result()
        sums.seconds = time.monotonic() - start
        if failures == options.max_failures:
            return
        sums.add(result)
        listener.case_done(sums)
        if result.divergence is not None:
            failures += 1
            seconds = options.shrink_seconds / (1 if failures == 1 else 4)
            fail(_keep(case, result, seconds, options, pool, listener))

    def take(case: Case) -> bool:
        pending.append((case, pool.submit(case)))
        # Results are taken in the order of the cases, so that a run does not depend on timing.
        while len(pending) > 2 * options.jobs:
            finish_oldest()
        return failures < options.max_failures

    try:
        draw_cases(
            _cases(suite, _quirks(options)),
            count,
            options.seed + zlib.crc32(suite.name.encode()),
            take,
        )
        while pending:
            finish_oldest()
    finally:
        sums.seconds = time.monotonic() - start
        listener.suite_done(sums)
    if failures == 0:
        for failure in _shortcomings(suite, sums, count):
            fail(failure)


def _quirks(options: Options) -> QuirksName:
    return options.quirks or ("vllm-0.27.1" if options.implementation == "vllm" else "both")


def _cases(suite: Suite, quirks: QuirksName) -> SearchStrategy[Case]:
    """Return a suite's cases, of one profile if the suite drives a scheduler alone."""
    cases = suite.cases()
    if quirks == "both" or suite.needs != "make_scheduler":
        return cases
    return cases.map(lambda case: with_quirks(case, PROFILES[quirks]))


def _keep(
    case: Case,
    result: CaseResult,
    seconds: float,
    options: Options,
    pool: WorkerPool,
    listener: Listener,
) -> Failure:
    """Write a failing case, make it smaller, and write it again."""
    assert result.divergence is not None
    written = trouble = None
    try:
        path = unused(options.case_folder, case.suite)
        _write(path, case, result, options)
        written = str(path)
        if seconds > 0:
            small = shrink(case, result, pool.run, seconds=seconds, progress=listener.shrinking)
            _write(path, small.case, small.result, options)
            result = small.result
    except OutputError as error:
        trouble = str(error)
    return Failure.of(case.suite, result, written, trouble)


def _write(path: Path, case: Case, result: CaseResult, options: Options) -> None:
    files.write(
        path,
        CaseFile(
            spec_version=SPEC_VERSION,
            implementation=options.implementation,
            case=case,
            divergence=result.divergence,
            last_lines=result.last_lines,
            expected=result.expected,
        ),
    )


def _shortcomings(suite: Suite, sums: SuiteReport, count: int) -> list[Failure]:
    """Return what is wrong with a run in which no case failed."""
    found = []
    most_ties = TIE_SHARES[suite.dtype] * sums.tokens
    if sums.ties > most_ties:
        found.append(("ties", f"at most {most_ties:.0f}", str(sums.ties)))
    if count >= suite.sizes["quick"]:
        found += [
            (f"counts.{name}", "at least 1", "0")
            for name in suite.must_reach
            if not sums.counts[name]
        ]
    return [
        Failure(suite=suite.name, verdict="diverged", field=field, expected=expected, got=got)
        for field, expected, got in found
    ]
