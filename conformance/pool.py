"""Workers that run cases in processes of their own.

An implementation may crash, hang or leave threads behind: then its worker is ended, the case gets
the verdict ``implementation failed``, and the next case gets a new worker.
"""

from __future__ import annotations

import os
import queue
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import msgspec

from servespec.conformance.adapters.failure import ImplementationFailed, TimedOut
from servespec.conformance.adapters.loading import LoadingError
from servespec.conformance.adapters.process import LineProcess
from servespec.conformance.cases.case import Case
from servespec.conformance.threads import ONE_THREAD
from servespec.conformance.verdicts import CaseResult, failure
from servespec.conformance.worker import Hello, Job

__all__ = ["WorkerPool", "default_jobs"]

_LOADING_SECONDS = 30.0
"""At least allowed for loading: imports take the same time whatever a case may take."""


def default_jobs() -> int:
    """Return how many workers suit this machine: one a core, at most 8."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)


class WorkerPool:
    """Processes that hold one implementation and run cases.

    Parameters
    ----------
    implementation : str
        As given to ``--impl``.
    python : str, optional
        As given to ``--python``.
    root : str, optional
        As given to ``--root``.
    jobs : int
        Number of processes.
    time_limit : float
        Seconds that a case, and if more than 30 also loading the implementation, may take.

    Attributes
    ----------
    hello : Hello
        The implementation's name and factories.

    Raises
    ------
    LoadingError
        If the implementation cannot be loaded.
    """

    def __init__(
        self,
        implementation: str,
        python: str | None = None,
        root: str | None = None,
        *,
        jobs: int = 1,
        time_limit: float = 60.0,
    ) -> None:
        self._command = [sys.executable, "-m", "servespec.conformance.worker", implementation]
        self._command += [python or "", root or ""]
        self._time_limit = time_limit
        self._idle: queue.SimpleQueue[LineProcess | None] = queue.SimpleQueue()
        self._running: set[LineProcess] = set()
        self._closing = False
        process, self.hello = self._start()
        for first in (process, *[None] * (jobs - 1)):
            self._idle.put(first)
        self._threads = ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="worker")

    def submit(self, case: Case, *, keep_expected: bool = False) -> Future[CaseResult]:
        """Run a case on the next idle worker.

        Parameters
        ----------
        case : Case
        keep_expected : bool
            Whether the result holds the reference's steps even if nothing diverged.
        """
        return self._threads.submit(self._run, Job(case, keep_expected))

    def run(self, case: Case, *, keep_expected: bool = False) -> CaseResult:
        """Run a case and wait for it; parameters as for `submit`."""
        return self.submit(case, keep_expected=keep_expected).result()

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        self._closing = True
        # A thread that waits for an answer sees its worker end; only then is it safe to close.
        for process in tuple(self._running):
            process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in tuple(self._running):
            process.close()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> tuple[LineProcess, Hello]:
        # One thread a worker: they share the cores, and threads within tiny operations only wait.
        process = LineProcess(self._command, environment={**os.environ, **ONE_THREAD})
        self._running.add(process)
        if self._closing:
            process.kill()
        limit = max(self._time_limit, _LOADING_SECONDS)
        try:
            answer = process.exchange(b"\n", limit)
        except ImplementationFailed as error:
            self._running.discard(process)
            last = f": {error.lines[-1].strip()}" if error.lines else ""
            loading = f"it was still loading after {limit:g} seconds"
            reason = loading if isinstance(error, TimedOut) else error.reason
            raise LoadingError(f"cannot load {self._command[3]!r}: {reason}{last}") from error
        except BaseException:  # an interrupt
            process.kill()
            raise
        hello = msgspec.json.decode(answer, type=Hello)
        if hello.error is not None:
            self._running.discard(process)
            process.close(patience=0.2)
            raise LoadingError(hello.error)
        return process, hello

    def _run(self, job: Job) -> CaseResult:
        process = self._idle.get()
        try:
            if process is None and not self._closing:
                process, _ = self._start()
            if process is None:
                raise LoadingError("the pool is closed")
            answer = process.exchange(msgspec.json.encode(job) + b"\n", self._time_limit)
            return msgspec.json.decode(answer, type=CaseResult)
        except LoadingError as error:
            return CaseResult(divergence=failure(str(error)))
        except ImplementationFailed as error:
            self._give_up(process)
            process = None
            return CaseResult(divergence=failure(error.reason), last_lines=error.lines)
        except msgspec.MsgspecError as error:
            self._give_up(process)
            process = None
            return CaseResult(divergence=failure(f"the worker answered no result: {error}"))
        finally:
            self._idle.put(process)

    def _give_up(self, process: LineProcess | None) -> None:
        """Give a worker up; the next case starts another in its place."""
        if process is not None:
            self._running.discard(process)
            process.close(patience=0.0)
