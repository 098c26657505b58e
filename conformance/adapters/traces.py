"""Recorded traces: what an implementation answered, kept for machines that do not have it.

A `Recording` is a case and every answer in order of the calls. Recorded once from the real
scheduler, it stands in for it: `TraceImplementation` gives the answers again to whoever makes the
same calls. A trace file is xz-compressed JSON lines, a recording a line.
"""

from __future__ import annotations

import itertools
import lzma
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from servespec.conformance.adapters.base import SchedulerUnderTest
from servespec.conformance.adapters.failure import CallFailed, ImplementationFailed
from servespec.conformance.output import write_atomically
from servespec.conformance.workloads.workload import Workload
from servespec.reference.contracts import (
    CacheConfig,
    EngineConfig,
    EngineCoreOutput,
    PauseState,
    Quirks,
    Request,
    RequestStatus,
    SchedulerConfig,
    SchedulerDiedError,
    SchedulerOutput,
    SchedulerSnapshot,
    SpeculativeConfig,
)

__all__ = [
    "PROFILES",
    "Answer",
    "Died",
    "RecordedScheduler",
    "Recording",
    "TraceError",
    "TraceImplementation",
    "read_recordings",
    "read_traces",
    "write_traces",
]

MAX_FILE_BYTES = 32 * 2**20
MAX_RECORDING_BYTES = 64 * 2**20

PROFILES = {"vllm-0.27.1": Quirks.vllm_0_27_1(), "intended": Quirks()}
"""The two profiles by name."""

T = TypeVar("T")


class TraceError(ValueError):
    """A trace file cannot be used; the text names the file, the recording in it and why."""


class Schedule(msgspec.Struct, frozen=True, tag_field="call", tag="schedule"):
    """The answer to ``schedule``."""

    result: SchedulerOutput


class Update(msgspec.Struct, frozen=True, tag_field="call", tag="update_from_output"):
    """The answer to ``update_from_output``."""

    result: tuple[EngineCoreOutput, ...]


class Reset(msgspec.Struct, frozen=True, tag_field="call", tag="reset_prefix_cache"):
    """The answer to ``reset_prefix_cache``."""

    result: bool


class Snapshot(msgspec.Struct, frozen=True, tag_field="call", tag="snapshot"):
    """The answer to ``snapshot``."""

    result: SchedulerSnapshot


class Died(msgspec.Struct, frozen=True, tag_field="call", tag="died"):
    """In place of the answer to ``schedule``: what it raised."""

    result: str


Answer = Schedule | Update | Reset | Snapshot | Died


class Recording(msgspec.Struct, frozen=True):
    """One case and what was answered.

    Attributes
    ----------
    implementation : str
        Name and version of who answered.
    config : EngineConfig
        Its quirks are those of `profile`, whatever was written: a recording stays right when an
        oddity is found and named later.
    workload : Workload
    answers : tuple of Answer
        Of the calls that return something, in order.
    profile : str
        A key of `PROFILES`: the quirks that imitate the recorded implementation.
    """

    implementation: str
    config: EngineConfig
    workload: Workload
    answers: tuple[Answer, ...]
    profile: str = "vllm-0.27.1"

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise TraceError(f"profile is {self.profile!r}: must be one of {', '.join(PROFILES)}")


class RecordedScheduler:
    """A scheduler whose answers are kept, with its state after each call that changes blocks.

    Parameters
    ----------
    scheduler : SchedulerUnderTest

    Attributes
    ----------
    answers : list of Answer
    """

    def __init__(self, scheduler: SchedulerUnderTest) -> None:
        self._scheduler = scheduler
        self.answers: list[Answer] = []
        self.snapshot()

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        self._scheduler.add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan one step, or keep what was raised instead."""
        try:
            output = self._scheduler.schedule(throttle_prefills)
        except (CallFailed, SchedulerDiedError) as error:
            self.answers.append(Died(str(error).splitlines()[0]))
            raise
        self.answers.append(Schedule(output))
        self.snapshot()
        return output

    def update_from_output(
        self, output: SchedulerOutput, sampled: Mapping[str, tuple[int, ...]]
    ) -> tuple[EngineCoreOutput, ...]:
        """Take in sampled tokens."""
        results = self._scheduler.update_from_output(output, sampled)
        self.answers.append(Update(results))
        self.snapshot()
        return results

    def update_draft_token_ids(self, drafts: Mapping[str, tuple[int, ...]]) -> None:
        """Take in drafts."""
        self._scheduler.update_draft_token_ids(drafts)

    def finish_requests(self, request_ids: Sequence[str], status: RequestStatus) -> None:
        """End requests from outside."""
        self._scheduler.finish_requests(request_ids, status)
        self.snapshot()

    def set_pause_state(self, state: PauseState) -> None:
        """Stop or resume."""
        self._scheduler.set_pause_state(state)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all prefix hashes."""
        done = self._scheduler.reset_prefix_cache(reset_running_requests)
        self.answers.append(Reset(done))
        self.snapshot()
        return done

    def snapshot(self) -> SchedulerSnapshot:
        """Return the state."""
        state = self._scheduler.snapshot()
        self.answers.append(Snapshot(state))
        return state


class _TraceScheduler:
    """Answers from a recording."""

    def __init__(self, recording: Recording) -> None:
        self._answers = iter(recording.answers)

    def add_request(self, request: Request) -> None:
        """Queue a request."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Return the next plan.

        Raises
        ------
        SchedulerDiedError
            If the recorded scheduler raised here.
        """
        answer = cast("Schedule | Died", self._next(Schedule, Died))
        if isinstance(answer, Died):
            raise SchedulerDiedError(answer.result)
        return answer.result

    def update_from_output(
        self, output: SchedulerOutput, sampled: Mapping[str, tuple[int, ...]]
    ) -> tuple[EngineCoreOutput, ...]:
        """Return what the tokens gave."""
        return self._next(Update).result

    def update_draft_token_ids(self, drafts: Mapping[str, tuple[int, ...]]) -> None:
        """Take in drafts."""

    def finish_requests(self, request_ids: Sequence[str], status: RequestStatus) -> None:
        """End requests from outside."""

    def set_pause_state(self, state: PauseState) -> None:
        """Stop or resume."""

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Return whether the reset was done."""
        return self._next(Reset).result

    def snapshot(self) -> SchedulerSnapshot:
        """Return the state recorded at this point."""
        return self._next(Snapshot).result

    def _next(self, *kinds: type[T]) -> T:
        answer = next(self._answers, None)
        if not isinstance(answer, kinds):
            recorded = "its end" if answer is None else type(answer).__name__.lower()
            raise ImplementationFailed(
                f"the trace has {recorded} where {kinds[0].__name__.lower()} was called"
            )
        return answer


class TraceImplementation:
    """A recording as an implementation; its schedulers can only be driven as the recorded one was.

    Parameters
    ----------
    recording : Recording
    """

    def __init__(self, recording: Recording) -> None:
        self.name = recording.implementation
        self._recording = recording

    def make_scheduler(
        self,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        speculative: SpeculativeConfig | None = None,
    ) -> _TraceScheduler:
        """Return a scheduler that answers as recorded.

        Raises
        ------
        ImplementationFailed
            If the configurations are not the recorded ones.
        """
        config = self._recording.config
        if (scheduler, cache, speculative) != (config.scheduler, config.cache, config.speculative):
            raise ImplementationFailed("the trace was recorded with other configurations")
        return _TraceScheduler(self._recording)


def write_traces(path: Path, recordings: Iterable[msgspec.Struct]) -> None:
    """Write a trace file; a reader sees the old file or the whole new one.

    Parameters
    ----------
    path : Path
        Ends in ``.jsonl.xz`` by custom.
    recordings : iterable of Recording
        Or of any other message.
    """
    # A large window, since recordings of one layout resemble each other.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 2**26}]
    lines = b"".join(msgspec.json.encode(recording) + b"\n" for recording in recordings)
    write_atomically(path, lzma.compress(lines, filters=filters))


def read_traces(path: Path) -> Iterator[Recording]:
    """Read a trace file, one recording at a time.

    Parameters
    ----------
    path : Path

    Yields
    ------
    Recording

    Raises
    ------
    TraceError
        If the file is missing, too long, cut or not a trace.
    """
    for recording in read_recordings(path, Recording):
        yield _in_profile(recording)


def read_recordings(path: Path, kind: type[T]) -> Iterator[T]:
    """Read a trace file of any kind of recording, one at a time; see `read_traces`."""
    decoder = msgspec.json.Decoder(kind)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise TraceError(f"trace file {path}: longer than {MAX_FILE_BYTES} bytes")
        with lzma.open(path) as file:
            for number in itertools.count(1):
                line = file.readline(MAX_RECORDING_BYTES)
                if not line:
                    return
                if not line.endswith(b"\n"):
                    raise TraceError(f"trace file {path}: recording {number} is cut or too long")
                yield decoder.decode(line)
    except OSError as error:
        raise TraceError(f"trace file {path}: {error.strerror or error}") from error
    except (lzma.LZMAError, EOFError, msgspec.MsgspecError) as error:
        raise TraceError(f"trace file {path}: {error}") from error


def _in_profile(recording: Recording) -> Recording:
    scheduler = replace(recording.config.scheduler, quirks=PROFILES[recording.profile])
    config = replace(recording.config, scheduler=scheduler)
    return msgspec.structs.replace(recording, config=config)
