"""The messages of the line protocol, which ``PROTOCOL.md`` beside this file describes.

One JSON object a line: the checker sends a `Line` of calls, the implementation answers with one
`Reply`. msgspec decodes both straight into the frozen contract types, so a value out of range is
refused where it enters.
"""

from __future__ import annotations

from typing import TypeVar, cast

import msgspec

from servespec.conformance.adapters.v0_protocol import V0Call
from servespec.reference.contracts import (
    CacheConfig,
    PauseState,
    Request,
    RequestStatus,
    SchedulerConfig,
    SpeculativeConfig,
)

__all__ = [
    "PROTOCOL_VERSION",
    "AddRequest",
    "Call",
    "CallError",
    "Close",
    "FinishRequests",
    "Hello",
    "HelloReply",
    "Line",
    "Open",
    "Reply",
    "ResetPrefixCache",
    "Schedule",
    "SetPauseState",
    "Snapshot",
    "UpdateDraftTokenIds",
    "UpdateFromOutput",
    "decode_line",
    "decode_reply",
    "decode_result",
    "encode",
]

PROTOCOL_VERSION = 1

T = TypeVar("T")


class Hello(msgspec.Struct, frozen=True, tag_field="call", tag="hello"):
    """Ask who is there."""

    protocol: int


class Open(msgspec.Struct, frozen=True, tag_field="call", tag="open"):
    """Make a scheduler under the line's handle."""

    scheduler: SchedulerConfig
    cache: CacheConfig
    speculative: SpeculativeConfig | None = None


class AddRequest(msgspec.Struct, frozen=True, tag_field="call", tag="add_request"):
    """Queue a request."""

    request: Request


class Schedule(msgspec.Struct, frozen=True, tag_field="call", tag="schedule"):
    """Plan one step; the n-th of a handle is step n, from 0."""

    throttle_prefills: bool = False


class UpdateFromOutput(msgspec.Struct, frozen=True, tag_field="call", tag="update_from_output"):
    """Take in the tokens sampled for a step."""

    step: int
    sampled: dict[str, tuple[int, ...]]


class UpdateDraftTokenIds(
    msgspec.Struct, frozen=True, tag_field="call", tag="update_draft_token_ids"
):
    """Take in drafts for the next step."""

    drafts: dict[str, tuple[int, ...]]


class FinishRequests(msgspec.Struct, frozen=True, tag_field="call", tag="finish_requests"):
    """End requests from outside."""

    request_ids: tuple[str, ...]
    status: RequestStatus


class SetPauseState(msgspec.Struct, frozen=True, tag_field="call", tag="set_pause_state"):
    """Stop or resume."""

    state: PauseState


class ResetPrefixCache(msgspec.Struct, frozen=True, tag_field="call", tag="reset_prefix_cache"):
    """Forget all prefix hashes."""

    reset_running_requests: bool = False


class Snapshot(msgspec.Struct, frozen=True, tag_field="call", tag="snapshot"):
    """Ask for the state."""


class Close(msgspec.Struct, frozen=True, tag_field="call", tag="close"):
    """Forget the scheduler of this handle."""


Call = (
    Hello
    | Open
    | AddRequest
    | Schedule
    | UpdateFromOutput
    | UpdateDraftTokenIds
    | FinishRequests
    | SetPauseState
    | ResetPrefixCache
    | Snapshot
    | Close
    | V0Call
)


class Line(msgspec.Struct, frozen=True):
    """Calls made one after the other on one scheduler.

    Attributes
    ----------
    id : int
        Repeated in the reply.
    handle : int
        Which scheduler; chosen by the checker when it opens one.
    calls : tuple of Call
    """

    id: int
    handle: int
    calls: tuple[Call, ...]


class CallError(msgspec.Struct, frozen=True):
    """Why a call failed.

    Attributes
    ----------
    call : int
        Its index in the line; later calls of the line were not made.
    type : str
    message : str
    """

    call: int
    type: str
    message: str


class Reply(msgspec.Struct, frozen=True):
    """The answer to one line.

    Attributes
    ----------
    id : int
    results : tuple
        One for each call made, still undecoded; null where a call returns nothing.
    error : CallError or None
    """

    id: int
    results: tuple[msgspec.Raw, ...]
    error: CallError | None = None


class HelloReply(msgspec.Struct, frozen=True):
    """Who is there.

    Attributes
    ----------
    protocol : int
    name, version : str
        Of the implementation.
    """

    protocol: int
    name: str
    version: str = ""


_LINE = msgspec.json.Decoder(Line)
_REPLY = msgspec.json.Decoder(Reply)
_ENCODER = msgspec.json.Encoder()
_RESULTS: dict[type, msgspec.json.Decoder[object]] = {}


def encode(message: object) -> bytes:
    """Return a message as one line, newline included."""
    return _ENCODER.encode(message) + b"\n"


def decode_line(line: bytes) -> Line:
    """Read what the checker sent.

    Raises
    ------
    msgspec.DecodeError
        If it is no `Line`, or holds a value the contracts refuse.
    """
    return _LINE.decode(line)


def decode_reply(line: bytes) -> Reply:
    """Read what the implementation answered.

    Raises
    ------
    msgspec.DecodeError
        If it is no `Reply`.
    """
    return _REPLY.decode(line)


def decode_result(raw: msgspec.Raw, kind: type[T]) -> T:
    """Read one result as the type its call returns.

    Raises
    ------
    msgspec.DecodeError
        If it is none.
    """
    decoder = _RESULTS.get(kind)
    if decoder is None:
        decoder = _RESULTS[kind] = msgspec.json.Decoder(kind)
    return cast("T", decoder.decode(raw))
