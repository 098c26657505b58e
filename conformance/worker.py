"""A process that runs cases one after another, so that one that hangs or crashes can be ended.

Run as ``python -m servespec.conformance.worker NAME [PYTHON [ROOT]]``, with "" for none. It
answers lines of JSON with lines of JSON: the first line it is sent is empty and answered with
`Hello`, every other is a `Job` and answered with a `CaseResult`.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time
from typing import BinaryIO

import msgspec

from servespec.conformance.adapters.failure import printable
from servespec.conformance.adapters.loading import LoadingError, load, offers, start
from servespec.conformance.cases.case import Case
from servespec.conformance.checks.registry import suite
from servespec.conformance.verdicts import CaseResult, run_check

__all__ = ["Hello", "Job", "main", "within_limit"]

MAX_EXPECTED_BYTES = 4 * 2**20
"""Of the reference's steps in a result. Indented in a case file they may take six times as much,
and a case file may have 32 MiB."""


class Hello(msgspec.Struct, frozen=True):
    """What a worker says of itself once it has loaded the implementation.

    Attributes
    ----------
    name : str
        The implementation's own name.
    offers : tuple of str
        Its factories.
    error : str or None
        Why it could not be loaded.
    """

    name: str = ""
    offers: tuple[str, ...] = ()
    error: str | None = None


class Job(msgspec.Struct, frozen=True):
    """A case to run.

    Attributes
    ----------
    case : Case
    keep_expected : bool
        Whether the result holds the reference's steps even if nothing diverged.
    """

    case: Case
    keep_expected: bool = False


def main(name: str, python: str | None = None, root: str | None = None) -> None:
    """Serve until the input ends.

    Parameters
    ----------
    name, python, root : str
        As for `servespec.conformance.adapters.loading.load`.
    """
    # A person's interrupt goes to the parent, so that one raised here is an implementation's own.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    # What an implementation prints must not reach the lines of the protocol.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
        sys.stdin.buffer.readline()
        try:
            implementation = load(name, python, root)
            start(implementation, name)
            called = printable(str(getattr(implementation, "name", name)))
            hello = Hello(called, offers(implementation))
        except LoadingError as error:
            hello = Hello(error=printable(str(error), 2000))
        except Exception as error:  # a built-in one that lacks a dependency
            text = printable(f"{type(error).__name__}: {error}")
            hello = Hello(error=f"cannot load {name!r}: {text}")
        _answer(answers, hello)
        if hello.error is not None:
            return
        for line in sys.stdin.buffer:
            job = msgspec.json.decode(line, type=Job)
            began = time.perf_counter()
            check = suite(job.case.suite).check
            result = run_check(check, job.case, implementation, keep_expected=job.keep_expected)
            seconds = time.perf_counter() - began
            _answer(answers, within_limit(dataclasses.replace(result, seconds=seconds)))


def within_limit(result: CaseResult) -> CaseResult:
    """Return a result that fits a line between processes and, if it is kept, a case file.

    Parameters
    ----------
    result : CaseResult

    Returns
    -------
    CaseResult
        With the first of its steps that fit, and the number of those left out.
    """
    size = 0
    for kept, step in enumerate(result.expected):
        size += len(msgspec.json.encode(step))
        if size > MAX_EXPECTED_BYTES:
            left_out = len(result.expected) - kept
            return dataclasses.replace(
                result, expected=result.expected[:kept], expected_left_out=left_out
            )
    return result


def _answer(file: BinaryIO, message: object) -> None:
    file.write(msgspec.json.encode(message) + b"\n")
    file.flush()


def _end_with_parent(parent: int) -> None:
    """End this process once its parent is gone, even if an implementation hangs."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], *(given or None for given in sys.argv[2:]))
