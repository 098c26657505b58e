"""The implementation's end of the line protocol, for implementations in Python.

An implementation in an environment of its own needs a script of three lines::

    from servespec.conformance.adapters.server import serve
    from my_engine import Factory          # has `name` and `make_scheduler`
    serve(Factory(), version="1.0")

This module needs only msgspec and NumPy (and the contracts), so that it runs there too.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from servespec.conformance.adapters import protocol, v0_protocol
from servespec.conformance.adapters.base import SchedulerFactory, SchedulerUnderTest
from servespec.conformance.adapters.v0_base import V0SchedulerFactory
from servespec.conformance.adapters.v0_server import V0Session
from servespec.reference.contracts import SchedulerOutput

__all__ = ["serve"]


class _Session:
    """One open scheduler and the steps whose tokens are still to come."""

    def __init__(self, scheduler: SchedulerUnderTest) -> None:
        self.scheduler = scheduler
        self.outputs: dict[int, SchedulerOutput] = {}
        self.num_steps = 0

    def call(self, call: protocol.Call) -> object:
        """Make one call and return its result."""
        scheduler = self.scheduler
        match call:
            case protocol.AddRequest():
                scheduler.add_request(call.request)
            case protocol.Schedule():
                output = scheduler.schedule(call.throttle_prefills)
                self.outputs[self.num_steps] = output
                self.num_steps += 1
                return output
            case protocol.UpdateFromOutput():
                output = self.outputs[call.step]
                # Steps are updated in order, so earlier ones without tokens are done with.
                self.outputs = {n: o for n, o in self.outputs.items() if n > call.step}
                return scheduler.update_from_output(output, call.sampled)
            case protocol.UpdateDraftTokenIds():
                scheduler.update_draft_token_ids(call.drafts)
            case protocol.FinishRequests():
                scheduler.finish_requests(call.request_ids, call.status)
            case protocol.SetPauseState():
                scheduler.set_pause_state(call.state)
            case protocol.ResetPrefixCache():
                return scheduler.reset_prefix_cache(call.reset_running_requests)
            case protocol.Snapshot():
                return scheduler.snapshot()
            case _:
                raise ValueError(f"{type(call).__name__} is not a call on an open scheduler")
        return None


class _Server:
    """All open schedulers of one implementation."""

    def __init__(self, implementation: SchedulerFactory | V0SchedulerFactory, version: str) -> None:
        self.implementation = implementation
        self.version = version
        self.sessions: dict[int, _Session | V0Session] = {}

    def answer(self, text: bytes) -> protocol.Reply:
        """Make the calls of one line, up to the first that fails."""
        try:
            line = protocol.decode_line(text)
        except msgspec.DecodeError as error:
            return protocol.Reply(
                id=-1,
                results=(),
                error=protocol.CallError(call=0, type=type(error).__name__, message=str(error)),
            )
        results: list[msgspec.Raw] = []
        failure = None
        for index, call in enumerate(line.calls):
            try:
                results.append(msgspec.Raw(msgspec.json.encode(self._call(line.handle, call))))
            except BaseException as error:  # one call must not end the other schedulers
                # A lone surrogate in the text could not be sent.
                trace = traceback.format_exc(limit=-3).strip()
                trace = trace.encode("utf-8", "backslashreplace").decode()
                failure = protocol.CallError(call=index, type=type(error).__name__, message=trace)
                break
        return protocol.Reply(id=line.id, results=tuple(results), error=failure)

    def _call(self, handle: int, call: protocol.Call) -> object:
        match call:
            case protocol.Hello():
                return protocol.HelloReply(
                    protocol=protocol.PROTOCOL_VERSION,
                    name=self.implementation.name,
                    version=self.version,
                )
            case protocol.Open():
                self.sessions[handle] = _Session(
                    _offered(self.implementation, "make_scheduler")(
                        call.scheduler, call.cache, call.speculative
                    )
                )
                return None
            case v0_protocol.OpenV0():
                self.sessions[handle] = V0Session(
                    _offered(self.implementation, "make_v0_scheduler")(call.scheduler, call.cache)
                )
                return None
            case protocol.Close():
                del self.sessions[handle]
                return None
            case _:
                return self.sessions[handle].call(call)


def _offered(implementation: object, factory: str) -> Callable[..., Any]:
    offered: Callable[..., Any] | None = getattr(implementation, factory, None)
    if offered is None:
        raise ValueError(f"this implementation has no {factory}")
    return offered


def serve(
    implementation: SchedulerFactory | V0SchedulerFactory,
    version: str = "",
    reader: BinaryIO | None = None,
) -> None:
    """Answer lines on standard input until it ends.

    Whatever else the process prints on standard output goes to standard error, so that it cannot
    get between the replies.

    Parameters
    ----------
    implementation : SchedulerFactory or V0SchedulerFactory
    version : str
        Told to the checker.
    reader : binary file, optional
        Where the lines come from; standard input if left out.
    """
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    server = _Server(implementation, version)
    for text in reader or sys.stdin.buffer:
        replies.write(protocol.encode(server.answer(text)))
        replies.flush()
