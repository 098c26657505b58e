"""Running the case of a file again, and making it smaller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from servespec.conformance.adapters.loading import COMMANDS
from servespec.conformance.cases import files
from servespec.conformance.cases.case import SPEC_VERSION, CaseFile
from servespec.conformance.cases.files import CaseError
from servespec.conformance.cases.shrink import shrink
from servespec.conformance.checks.registry import suite
from servespec.conformance.compare import first_difference
from servespec.conformance.pool import WorkerPool
from servespec.conformance.verdicts import CHECK_FIELD, CaseResult

__all__ = ["Replay", "replay", "shrink_file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What running a case again showed.

    Attributes
    ----------
    suite, implementation : str
    result : CaseResult
    notes : tuple of str
        Lines for the reader: what differs from when the file was written.
    """

    suite: str
    implementation: str
    result: CaseResult
    notes: tuple[str, ...] = ()


def replay(
    path: Path,
    implementation: str | None,
    python: str | None = None,
    root: str | None = None,
    *,
    time_limit: float = 60.0,
) -> Replay:
    """Run the case of a file.

    Parameters
    ----------
    path : Path
    implementation : str or None
        None means the one the file names.
    python, root : str, optional
    time_limit : float
        Seconds.

    Returns
    -------
    Replay

    Raises
    ------
    ValueError
        If the file or the implementation cannot be used.
    """
    content = files.read(path)
    name = implementation or content.implementation
    with _pool(path, content, implementation, python, root, time_limit) as pool:
        result = pool.run(content.case, keep_expected=True)
    _require_runnable(path, result)
    notes = []
    if content.spec_version != SPEC_VERSION:
        notes.append(f"written for specification {content.spec_version}, run with {SPEC_VERSION}")
    known = min(len(content.expected), len(result.expected))
    difference = first_difference(content.expected[:known], result.expected[:known])
    if difference is not None:
        notes.append(
            f"the reference has changed: {difference.field} was {difference.expected},"
            f" is {difference.got}"
        )
    if result.expected_left_out:
        notes.append(f"the reference's steps from {len(result.expected)} on are too large to keep")
    return Replay(suite=content.case.suite, implementation=name, result=result, notes=tuple(notes))


def shrink_file(
    path: Path,
    out: Path,
    implementation: str | None,
    python: str | None = None,
    root: str | None = None,
    *,
    time_limit: float = 60.0,
    seconds: float = 60.0,
    progress: Callable[[int], None] | None = None,
) -> str:
    """Make the case of a file smaller and write it.

    Parameters
    ----------
    path, out : Path
    implementation, python, root, time_limit
        As for `replay`.
    seconds : float
        Time to spend.
    progress : callable, optional
        Told the number of candidates tried.

    Returns
    -------
    str
        What became of it, in one line.

    Raises
    ------
    ValueError
        If the file or the implementation cannot be used, or the case does not fail.
    """
    content = files.read(path)
    name = implementation or content.implementation
    with _pool(path, content, implementation, python, root, time_limit) as pool:
        result = pool.run(content.case)
        _require_runnable(path, result)
        if result.divergence is None:
            raise CaseError(f"case file {path}: {name} agrees, there is nothing to shrink")
        small = shrink(content.case, result, pool.run, seconds=seconds, progress=progress)
    files.write(
        out,
        replace(
            content,
            spec_version=SPEC_VERSION,
            implementation=name,
            case=small.case,
            divergence=small.result.divergence,
            last_lines=small.result.last_lines,
            expected=small.result.expected,
        ),
    )
    before, after = (f"{case.num_requests} requests" for case in (content.case, small.case))
    return f"{out}: {before} to {after}, {result.steps} steps to {small.result.steps}"


def _pool(
    path: Path,
    content: CaseFile,
    implementation: str | None,
    python: str | None,
    root: str | None,
    time_limit: float,
) -> WorkerPool:
    if implementation is None and content.implementation.partition(":")[0] in COMMANDS:
        # A file from outside must not choose a program to run.
        raise CaseError(
            f"case file {path}: it names a command, {content.implementation!r}: give it as --impl"
        )
    name = implementation or content.implementation
    try:
        needs = suite(content.case.suite).needs
    except ValueError as error:
        raise CaseError(f"case file {path}: {error}") from error
    pool = WorkerPool(name, python, root, time_limit=time_limit)
    if needs not in pool.hello.offers:
        pool.close()
        raise CaseError(f"case file {path}: implementation {name!r} has no {needs}")
    return pool


def _require_runnable(path: Path, result: CaseResult) -> None:
    if result.divergence is not None and result.divergence.field == CHECK_FIELD:
        raise CaseError(f"case file {path}: {result.divergence.got}")
