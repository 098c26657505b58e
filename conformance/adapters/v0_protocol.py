"""The messages of the line protocol for a legacy V0 scheduler; see ``PROTOCOL.md``."""

from __future__ import annotations

import msgspec

from servespec.reference.contracts.v0 import (
    SequenceGroupRequest,
    SequenceSample,
    V0CacheConfig,
    V0SchedulerConfig,
    V0SchedulerOutput,
    V0SchedulingRule,
)

__all__ = [
    "AbortSeqGroup",
    "AddSeqGroup",
    "OpenV0",
    "ScheduleV0",
    "SnapshotV0",
    "UpdateV0FromOutput",
    "V0Call",
    "V0Plan",
]


class OpenV0(msgspec.Struct, frozen=True, tag_field="call", tag="open_v0"):
    """Make a V0 scheduler under the line's handle."""

    scheduler: V0SchedulerConfig
    cache: V0CacheConfig


class AddSeqGroup(msgspec.Struct, frozen=True, tag_field="call", tag="add_seq_group"):
    """Queue a request."""

    request: SequenceGroupRequest


class AbortSeqGroup(msgspec.Struct, frozen=True, tag_field="call", tag="abort_seq_group"):
    """End requests from outside."""

    request_ids: tuple[str, ...]


class ScheduleV0(msgspec.Struct, frozen=True, tag_field="call", tag="schedule_v0"):
    """Plan one step at a time in seconds."""

    now: float


class UpdateV0FromOutput(
    msgspec.Struct, frozen=True, tag_field="call", tag="update_v0_from_output"
):
    """Take in the samples of the step planned last."""

    sampled: dict[str, tuple[SequenceSample, ...]]


class SnapshotV0(msgspec.Struct, frozen=True, tag_field="call", tag="snapshot_v0"):
    """Ask for the state."""


V0Call = OpenV0 | AddSeqGroup | AbortSeqGroup | ScheduleV0 | UpdateV0FromOutput | SnapshotV0


class V0Plan(msgspec.Struct, frozen=True):
    """The answer to `ScheduleV0`: a plan, or why there is none.

    Attributes
    ----------
    output : V0SchedulerOutput or None
    rule, detail : str
        As in `V0SchedulingError`; only without a plan.
    """

    output: V0SchedulerOutput | None = None
    rule: V0SchedulingRule | None = None
    detail: str = ""
