"""The implementation's end of the line protocol for one V0 scheduler."""

from __future__ import annotations

import msgspec

from servespec.conformance.adapters import v0_protocol
from servespec.conformance.adapters.v0_base import V0SchedulerUnderTest
from servespec.reference.contracts.v0 import V0SchedulerOutput, V0SchedulingError

__all__ = ["V0Session"]


class V0Session:
    """One open V0 scheduler and the step whose samples are still to come.

    Parameters
    ----------
    scheduler : V0SchedulerUnderTest
    """

    def __init__(self, scheduler: V0SchedulerUnderTest) -> None:
        self.scheduler = scheduler
        self.output: V0SchedulerOutput | None = None

    def call(self, call: msgspec.Struct) -> object:
        """Make one call and return its result.

        Raises
        ------
        ValueError
            If it is none on an open V0 scheduler.
        """
        match call:
            case v0_protocol.AddSeqGroup():
                self.scheduler.add_seq_group(call.request)
            case v0_protocol.AbortSeqGroup():
                self.scheduler.abort_seq_group(call.request_ids)
            case v0_protocol.ScheduleV0():
                return self._schedule(call.now)
            case v0_protocol.UpdateV0FromOutput():
                if self.output is None:
                    raise ValueError("no step was planned")
                return self.scheduler.update_from_output(self.output, call.sampled)
            case v0_protocol.SnapshotV0():
                return self.scheduler.snapshot()
            case _:
                raise ValueError(f"{type(call).__name__} is not a call on an open V0 scheduler")
        return None

    def _schedule(self, now: float) -> v0_protocol.V0Plan:
        try:
            self.output = self.scheduler.schedule(now)
        except V0SchedulingError as error:
            return v0_protocol.V0Plan(rule=error.rule, detail=error.detail)
        return v0_protocol.V0Plan(output=self.output)
