"""The checker's end of the line protocol: an implementation in a process of its own.

The peer is not trusted to be well: it may die, hang, print rubbish or a line without end. Each of
these raises `ImplementationFailed` with its last lines, ends the process, and leaves the checker
ready to start another.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import signal
import subprocess
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

from servespec.conformance.adapters import protocol
from servespec.conformance.adapters.failure import CallFailed, ImplementationFailed, TimedOut
from servespec.reference.contracts import (
    CacheConfig,
    EngineCoreOutput,
    PauseState,
    Request,
    RequestStatus,
    SchedulerConfig,
    SchedulerOutput,
    SchedulerSnapshot,
    SpeculativeConfig,
)

__all__ = ["LineProcess", "Peer", "ProcessImplementation", "ProcessScheduler", "RemoteScheduler"]

P = TypeVar("P", bound="Peer")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

_CHUNK = 1 << 16
_LAST_LINES = 20
_LAST_LINE_WIDTH = 400

_ENDING_SECONDS = 0.25
"""Between the end of its output and its own, a process that ends takes less."""

_LINGERING_SECONDS = 2.0
"""For one that closed its output to end by itself."""


class LineProcess:
    """A child process that answers every line with one line.

    Parameters
    ----------
    command : sequence of str
        Program and arguments.
    environment : mapping of str to str, optional
        Its whole environment; that of this process if left out.
    timeout : float
        Seconds an answer may take.
    max_line_bytes : int
        Longest answer accepted.

    Raises
    ------
    ImplementationFailed
        If it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        max_line_bytes: int = 1 << 26,
    ) -> None:
        self.command = tuple(command)
        self.timeout = timeout
        self.max_line_bytes = max_line_bytes
        self._received = bytearray()
        self._scanned = 0
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._partial = b""
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=None if environment is None else dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            raise ImplementationFailed(
                f"cannot start {self.command[0]!r}: {error.strerror or error}"
            ) from error
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._pipes = [pipe for pipe in pipes if pipe is not None]
        self._stdin, self._stdout, self._stderr = (pipe.fileno() for pipe in self._pipes)
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stdout, selectors.EVENT_READ)
        self._selector.register(self._stderr, selectors.EVENT_READ)

    @property
    def alive(self) -> bool:
        """Whether the process can still be asked."""
        return self._process.poll() is None

    @property
    def ending(self) -> str:
        """How it ended, if it did."""
        return _ending(self._process.returncode)

    def exchange(self, line: bytes, timeout: float | None = None) -> bytes:
        """Send a line and return the next one, without its newline.

        Parameters
        ----------
        line : bytes
            Newline included.
        timeout : float, optional
            Seconds for this answer, if other than usual.

        Raises
        ------
        ImplementationFailed
            If no whole line came. The process has ended then.
        """
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        unsent = memoryview(line)
        self._selector.register(self._stdin, selectors.EVENT_WRITE)
        while True:
            end = self._received.find(b"\n", self._scanned)
            if end >= 0:
                answer = bytes(self._received[:end])
                del self._received[: end + 1]
                self._scanned = 0
                self._stop_writing()
                return answer
            self._scanned = len(self._received)
            if self._scanned > self.max_line_bytes:
                raise self.failed(f"sent a line of more than {self.max_line_bytes} bytes")
            remaining = deadline - time.monotonic()
            events = self._selector.select(max(remaining, 0.0))
            if not events and remaining <= 0:
                raise self.failed(f"gave no answer within {limit:g} seconds", TimedOut)
            for key, _ in events:
                if key.fd == self._stdin:
                    # A peer that closed its input shows as an end of output just below.
                    with contextlib.suppress(BlockingIOError, BrokenPipeError):
                        unsent = unsent[os.write(self._stdin, unsent[:_CHUNK]) :]
                    if not unsent:
                        self._stop_writing()
                elif key.fd == self._stderr:
                    self._keep_last_lines()
                elif not self._receive():
                    raise self._ended()

    def failed(
        self, reason: str, kind: type[ImplementationFailed] = ImplementationFailed
    ) -> ImplementationFailed:
        """End the process and return the exception that says why."""
        unread = bytes(self._received[:_LAST_LINE_WIDTH])
        self.close(patience=0.2)
        lines = list(self._lines)
        if self._partial:
            lines.append(_printable(self._partial))
        if unread:
            lines.append(f"(standard output) {_printable(unread)}")
        return kind(f"the process {reason}", lines[-_LAST_LINES:])

    def _ended(self) -> ImplementationFailed:
        """Return the exception for a process whose output has ended."""
        reasons = []
        if not self._ends_within(_ENDING_SECONDS):
            reasons.append("closed its standard output")
        if self._ends_within(_LINGERING_SECONDS):
            reasons.append(self.ending)
        return self.failed(" and ".join(reasons))

    def _ends_within(self, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None

    def kill(self) -> None:
        """End the process at once; an `exchange` that another thread waits in then fails."""
        # The group, because a child of the peer would keep the pipes open.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self, patience: float = 2.0) -> None:
        """End the process: by closing its input, after `patience` seconds by force."""
        if self._selector.get_map() is None:
            return
        process = self._process
        self._stop_writing()
        with contextlib.suppress(OSError):
            self._pipes[0].close()
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            self.kill()
            process.wait()
        self._keep_last_lines()
        self._selector.close()
        for pipe in self._pipes[1:]:
            pipe.close()

    def _stop_writing(self) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._stdin)

    def _receive(self) -> bool:
        try:
            chunk = os.read(self._stdout, _CHUNK)
        except BlockingIOError:
            return True
        self._received += chunk
        return bool(chunk)

    def _keep_last_lines(self) -> None:
        while True:
            try:
                chunk = os.read(self._stderr, _CHUNK)
            except BlockingIOError:
                return
            if not chunk:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(self._stderr)
                return
            *whole, self._partial = (self._partial + chunk).split(b"\n")
            self._partial = self._partial[-_LAST_LINE_WIDTH:]
            self._lines.extend(_printable(line) for line in whole)


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit status {code}"


def _printable(line: bytes) -> str:
    """Return at most a line's width of text, without control characters."""
    text = line[:_LAST_LINE_WIDTH].decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text.rstrip())


class RemoteScheduler(Generic[S]):
    """Calls on one scheduler behind the line protocol.

    Calls that return nothing wait for the next that returns something, and once a caller has
    asked for a snapshot, one comes along with every later answer: most steps of a comparison cost
    two lines.

    Parameters
    ----------
    process : LineProcess
    handle : int
    opening : Call
        Makes the scheduler.
    asking : Call
        Asks for a snapshot.
    kind : type
        Of a snapshot.
    """

    def __init__(
        self,
        process: LineProcess,
        handle: int,
        opening: protocol.Call,
        asking: protocol.Call,
        kind: type[S],
    ) -> None:
        self._process = process
        self._handle = handle
        self._asking = asking
        self._kind = kind
        self._waiting: list[protocol.Call] = []
        self._snapshot: S | None = None
        self._wants_snapshots = False
        self._now(opening, type(None))

    def snapshot(self) -> S:
        """Return the state as far as checks compare it."""
        if self._snapshot is None:
            self._wants_snapshots = True
            self._snapshot = self._now(self._asking, self._kind)
        return self._snapshot

    def _later(self, call: protocol.Call) -> None:
        self._waiting.append(call)
        self._snapshot = None

    def _now(self, call: protocol.Call, kind: type[T]) -> T:
        calls = [*self._waiting, call]
        along = self._wants_snapshots and call is not self._asking
        if along:
            calls.append(self._asking)
        self._waiting.clear()
        self._snapshot = None
        results = exchange(self._process, self._handle, calls)
        try:
            result = protocol.decode_result(results[-2 if along else -1], kind)
            if along:
                self._snapshot = protocol.decode_result(results[-1], self._kind)
        except msgspec.DecodeError as error:
            raise self._process.failed(
                f"answered {_name(call)} with what is no answer: {error}"
            ) from error
        return result


class ProcessScheduler(RemoteScheduler[SchedulerSnapshot]):
    """A scheduler behind the line protocol, used like any other.

    Parameters
    ----------
    process : LineProcess
    handle : int
    scheduler, cache, speculative
        Configurations.
    """

    def __init__(
        self,
        process: LineProcess,
        handle: int,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        speculative: SpeculativeConfig | None,
    ) -> None:
        opening = protocol.Open(scheduler, cache, speculative)
        super().__init__(process, handle, opening, protocol.Snapshot(), SchedulerSnapshot)
        self._known: set[str] = set()
        self._steps = itertools.count()
        self._outputs: deque[tuple[int, SchedulerOutput]] = deque()

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        self._known.add(request.request_id)
        self._later(protocol.AddRequest(request))

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan one step."""
        output = self._now(protocol.Schedule(throttle_prefills), SchedulerOutput)
        self._validate(output)
        self._outputs.append((next(self._steps), output))
        return output

    def update_from_output(
        self, output: SchedulerOutput, sampled: Mapping[str, tuple[int, ...]]
    ) -> tuple[EngineCoreOutput, ...]:
        """Take in the tokens sampled for a step that `schedule` returned.

        Raises
        ------
        ValueError
            If that step is not in flight.
        """
        step = next((number for number, known in self._outputs if known is output), None)
        if step is None:
            raise ValueError("output is no step in flight of this scheduler")
        while self._outputs[0][0] < step:
            self._outputs.popleft()
        self._outputs.popleft()
        return self._now(
            protocol.UpdateFromOutput(step, dict(sampled)), tuple[EngineCoreOutput, ...]
        )

    def update_draft_token_ids(self, drafts: Mapping[str, tuple[int, ...]]) -> None:
        """Take in draft tokens for the next step."""
        self._later(protocol.UpdateDraftTokenIds(dict(drafts)))

    def finish_requests(self, request_ids: Sequence[str], status: RequestStatus) -> None:
        """End requests from outside."""
        self._later(protocol.FinishRequests(tuple(request_ids), status))

    def set_pause_state(self, state: PauseState) -> None:
        """Stop or resume admission or everything."""
        self._later(protocol.SetPauseState(state))

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all prefix hashes."""
        return self._now(protocol.ResetPrefixCache(reset_running_requests), bool)

    def _validate(self, output: SchedulerOutput) -> None:
        """Refuse a plan that the rest of a step could not even be asked about."""
        cached = output.scheduled_cached_reqs
        ids: Iterable[str] = itertools.chain(
            output.num_scheduled_tokens,
            output.scheduled_spec_decode_tokens,
            (new.req_id for new in output.scheduled_new_reqs),
            cached.req_ids,
            cached.resumed_req_ids,
            cached.all_token_ids,
            output.finished_req_ids,
            output.preempted_req_ids,
        )
        for request_id in ids:
            if request_id not in self._known:
                raise self._process.failed(f"scheduled an unknown request {request_id[:80]!r}")
        rows = len(cached.req_ids)
        for name in ("new_block_ids", "num_computed_tokens", "num_output_tokens"):
            if len(getattr(cached, name)) != rows:
                raise self._process.failed(
                    f"answered schedule with {len(getattr(cached, name))} entries in "
                    f"scheduled_cached_reqs.{name} for {rows} requests"
                )


def exchange(
    process: LineProcess,
    handle: int,
    calls: Sequence[protocol.Call],
    timeout: float | None = None,
) -> tuple[msgspec.Raw, ...]:
    """Make calls in one line and return their results, still undecoded.

    Raises
    ------
    CallFailed
        If a call raised; the process lives on.
    ImplementationFailed
        If the answer is not a reply to this line. The process has ended then.
    """
    if not process.alive:
        raise process.failed(process.ending)
    line = protocol.Line(id=next(_LINE_IDS), handle=handle, calls=tuple(calls))
    answer = process.exchange(protocol.encode(line), timeout)
    try:
        reply = protocol.decode_reply(answer)
    except msgspec.DecodeError as error:
        raise process.failed(
            f"sent a line that is no reply ({error}): {_printable(answer[:120])}"
        ) from error
    if reply.error is not None and reply.id in (line.id, -1):
        index = reply.error.call
        name = _name(calls[index]) if 0 <= index < len(calls) else "a call"
        raise CallFailed(
            f"{name} raised {reply.error.type[:80]}", reply.error.message[:4000].splitlines()
        )
    if reply.id != line.id or len(reply.results) != len(calls):
        raise process.failed(
            f"answered line {line.id} of {len(calls)} calls with {len(reply.results)} results for "
            f"line {reply.id}"
        )
    return reply.results


_LINE_IDS = itertools.count(1)


def _name(call: protocol.Call) -> str:
    return str(type(call).__struct_config__.tag)


class Peer:
    """A child process that holds schedulers, started when first needed.

    Parameters
    ----------
    command : sequence of str
        Program and arguments; it speaks the line protocol on standard input and output.
    environment : mapping of str to str, optional
        Its whole environment; that of this process if left out.
    name : str, optional
        What to call it before it has said so itself; the program if left out.
    start_timeout, timeout : float
        Seconds that the start and each later answer may take.

    Attributes
    ----------
    name, version : str
        As the peer calls itself, once it runs.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        name: str | None = None,
        start_timeout: float = 180.0,
        timeout: float = 60.0,
    ) -> None:
        self.command = tuple(command)
        self.environment = environment
        self.name = name or os.path.basename(self.command[0])  # noqa: PTH119 - any program name
        self.version = ""
        self.start_timeout = start_timeout
        self.timeout = timeout
        self._process: LineProcess | None = None
        self._handles = itertools.count(1)
        self._dropped: list[int] = []

    def start(self) -> None:
        """Start the process unless it runs.

        Raises
        ------
        ImplementationFailed
            If it does not start, or speaks another version of the protocol.
        """
        if self._process is not None and self._process.alive:
            return
        self.close()
        process = LineProcess(self.command, environment=self.environment, timeout=self.timeout)
        hello = protocol.Hello(protocol.PROTOCOL_VERSION)
        (raw,) = exchange(process, 0, [hello], self.start_timeout)
        try:
            reply = protocol.decode_result(raw, protocol.HelloReply)
        except msgspec.DecodeError as error:
            raise process.failed(f"answered hello with what is no answer: {error}") from error
        if reply.protocol != protocol.PROTOCOL_VERSION:
            raise process.failed(
                f"speaks version {reply.protocol} of the protocol, not {protocol.PROTOCOL_VERSION}"
            )
        self.name, self.version = reply.name[:80], reply.version[:80]
        self._process = process
        self._dropped.clear()

    def open(self, make: Callable[[LineProcess, int], R]) -> R:
        """Return what `make` makes of the process and a fresh handle, closed with its last use.

        The process is a fresh one if the last one failed.
        """
        self.start()
        assert self._process is not None
        while self._dropped:
            exchange(self._process, self._dropped.pop(), [protocol.Close()])
        handle = next(self._handles)
        made = make(self._process, handle)
        weakref.finalize(made, self._forget, self._process, handle)
        return made

    def _forget(self, process: LineProcess, handle: int) -> None:
        if process is self._process:
            self._dropped.append(handle)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def __enter__(self: P) -> P:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class ProcessImplementation(Peer):
    """An implementation whose schedulers live in one child process; parameters as for `Peer`."""

    def make_scheduler(
        self,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        speculative: SpeculativeConfig | None = None,
    ) -> ProcessScheduler:
        """Return a fresh scheduler, in a fresh process if the last one failed."""
        return self.open(
            lambda process, handle: ProcessScheduler(process, handle, scheduler, cache, speculative)
        )
