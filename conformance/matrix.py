"""The whole matrix of switches against the real scheduler, live or recorded.

A case is driven once on the real scheduler and its answers are kept; then each implementation is
held against them. So the slow process is asked once, and what was recorded yesterday is checked
the same way as what runs today.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from servespec.conformance.adapters.base import SchedulerFactory
from servespec.conformance.adapters.failure import CallFailed, ImplementationFailed
from servespec.conformance.adapters.traces import (
    Died,
    RecordedScheduler,
    Recording,
    TraceImplementation,
    write_traces,
)
from servespec.conformance.cases import files
from servespec.conformance.cases.case import SPEC_VERSION, Case, CaseFile
from servespec.conformance.checks.scheduling import compare
from servespec.conformance.output import OutputError, unused
from servespec.conformance.verdicts import CaseResult, Check, Tally, failure, run_check
from servespec.conformance.workloads.driver import drive
from servespec.conformance.workloads.scheduling import LAYOUTS, Combination, make_case, matrix
from servespec.reference.contracts import SchedulerDiedError

__all__ = ["MatrixResult", "against", "record_case", "record_matrix", "run_matrix"]


def record_case(
    implementation: SchedulerFactory, combination: Combination, seed: int
) -> tuple[Case, Recording]:
    """Drive one case of the matrix and keep the answers.

    Parameters
    ----------
    implementation : SchedulerFactory
    combination : Combination
    seed : int
        As for `make_case`.

    Returns
    -------
    case : Case
    recording : Recording
        Ends with `Died` if ``schedule`` raised: vLLM asserts on its own state.

    Raises
    ------
    ImplementationFailed
        If the implementation fails otherwise.
    """
    config, workload = make_case(combination, seed)
    scheduler = RecordedScheduler(
        implementation.make_scheduler(config.scheduler, config.cache, config.speculative)
    )
    try:
        for _ in drive(scheduler, workload, config):
            pass
    except (CallFailed, SchedulerDiedError):
        if not isinstance(scheduler.answers[-1], Died):
            raise
    name = f"{implementation.name} {getattr(implementation, 'version', '')}".strip()
    case = Case(suite="scheduling", config=config, workload=workload)
    return case, Recording(name, config, workload, tuple(scheduler.answers))


def against(recording: Recording) -> Check:
    """Return a check that holds an implementation against a recording."""

    def check(case: Case, implementation: SchedulerFactory, tally: Tally) -> None:
        recorded = TraceImplementation(recording)
        compare(case.config, case.workload, recorded, implementation, tally, keep=False)

    return check


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixResult:
    """What one case of the matrix showed.

    Attributes
    ----------
    combination : Combination
    seed : int
    results : mapping of str to CaseResult
        By implementation; under the name of the recorded one if that failed.
    died : str or None
        What the recorded one raised in the last step; the others have to raise there too.
    cases : mapping of str to str
        Where the case was written, by implementation that diverged.
    not_written : mapping of str to str
        Why it could not be, for the rest of those.
    """

    combination: Combination
    seed: int
    results: Mapping[str, CaseResult]
    died: str | None = None
    cases: Mapping[str, str] = field(default_factory=dict)
    not_written: Mapping[str, str] = field(default_factory=dict)


def run_matrix(
    real: SchedulerFactory,
    implementations: Sequence[SchedulerFactory],
    *,
    steps: int,
    seed: int = 0,
    case_folder: Path | None = None,
) -> Iterator[MatrixResult]:
    """Hold implementations against the real scheduler, round after round over the matrix.

    Parameters
    ----------
    real : SchedulerFactory
    implementations : sequence of SchedulerFactory
    steps : int
        Steps to compare at least; every round is completed, and one without a step is the last.
    seed : int
        Of the first round; the next rounds count on from it.
    case_folder : Path, optional
        Where the cases that diverge are written.

    Yields
    ------
    MatrixResult
        After each case.
    """
    done = 0
    for round_seed in itertools.count(seed):
        before = done
        for combination in matrix():
            results: dict[str, CaseResult] = {}
            cases: dict[str, str] = {}
            not_written: dict[str, str] = {}
            died = None
            try:
                case, recording = record_case(real, combination, round_seed)
            except ImplementationFailed as error:
                gone = failure(error.reason)
                results[real.name] = CaseResult(divergence=gone, last_lines=error.lines)
            else:
                if isinstance(recording.answers[-1], Died):
                    died = recording.answers[-1].result
                for implementation in implementations:
                    name = implementation.name
                    results[name] = result = run_check(against(recording), case, implementation)
                    if result.divergence is not None and case_folder is not None:
                        try:
                            cases[name] = _write(case_folder, name, case, result, round_seed)
                        except OutputError as error:
                            not_written[name] = str(error)
                done += max((result.steps for result in results.values()), default=0)
            yield MatrixResult(
                combination=combination,
                seed=round_seed,
                results=results,
                died=died,
                cases=cases,
                not_written=not_written,
            )
        if done >= steps or done == before:
            return


def _write(folder: Path, name: str, case: Case, result: CaseResult, seed: int) -> str:
    path = unused(folder, f"matrix-{name}-{seed}")
    files.write(
        path,
        CaseFile(
            spec_version=SPEC_VERSION,
            implementation=name,
            case=case,
            divergence=result.divergence,
            last_lines=result.last_lines,
            expected=result.expected,
        ),
    )
    return str(path)


def record_matrix(real: SchedulerFactory, folder: Path, seeds: Sequence[int]) -> Iterator[Path]:
    """Record every combination of the matrix into one trace file a layout.

    Parameters
    ----------
    real : SchedulerFactory
    folder : Path
        Made if missing.
    seeds : sequence of int
        A case of each combination for each.

    Yields
    ------
    Path
        Each file written.
    """
    for layout in LAYOUTS:
        path = folder / f"{layout.replace(' ', '-')}.jsonl.xz"
        write_traces(
            path,
            (
                record_case(real, combination, seed)[1]
                for combination in matrix()
                if combination.layout == layout
                for seed in seeds
            ),
        )
        yield path
