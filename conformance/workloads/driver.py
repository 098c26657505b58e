"""Drive a scheduler through a workload without a model.

The tokens that a model would sample are a pure function of the workload's seed, the request and
the position, so every implementation is fed the same ones whatever it schedules, and a request
that is preempted and computed again repeats itself, as greedy sampling would.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from servespec.conformance.workloads.workload import Workload, WorkloadStep
from servespec.reference.contracts import (
    EngineConfig,
    EngineCoreOutput,
    PauseState,
    Request,
    RequestStatus,
    SchedulerOutput,
    SpeculativeConfig,
)

__all__ = ["DrivenScheduler", "DrivenStep", "PretendWorker", "drive"]

_MASK = (1 << 64) - 1
_PATIENCE = 4
_NO_EVENTS = WorkloadStep()


def _mix(value: int) -> int:
    """Return 64 bits that depend on every bit of `value` (the finalizer of splitmix64)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class PretendWorker:
    """What a worker does for a scheduler: sample, accept drafts, make new ones.

    Parameters
    ----------
    workload : Workload
        Its seed, token range and acceptance.
    speculative : SpeculativeConfig or None
    """

    def __init__(self, workload: Workload, speculative: SpeculativeConfig | None) -> None:
        self._workload = workload
        self._speculative = speculative
        self._salts: dict[str, int] = {}
        self._num_prompt_tokens: dict[str, int] = {}
        self._num_tokens: dict[str, int] = {}

    def token(self, request_id: str, position: int) -> int:
        """Return the token of a request at a position, counted from its first prompt token."""
        return self._draw(request_id, position, 1) % self._workload.num_token_ids

    def accepts(self, request_id: str, position: int) -> bool:
        """Whether a draft for this position is right."""
        return self._draw(request_id, position, 2) < self._workload.acceptance * 2.0**64

    def execute(self, output: SchedulerOutput) -> dict[str, tuple[int, ...]]:
        """Return the tokens of each scheduled request, () for a row still short of its last token.

        Notes
        -----
        A row is sampled if the step reaches the end of the tokens the scheduler knows or has in
        flight. The first token is that of the position after the last one really sampled, which
        with steps in flight is earlier than the scheduler assumed if drafts were rejected since.
        Drafts that pad an admission have no drafter behind them and are always rejected.
        """
        computed: dict[str, int] = {}
        known: dict[str, int] = {}
        padded: set[str] = set()
        for new in output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            known[new.req_id] = self._num_prompt_tokens[new.req_id] = len(new.prompt_token_ids)
            self._num_tokens[new.req_id] = known[new.req_id]
            padded.add(new.req_id)
        cached = output.scheduled_cached_reqs
        for request_id, num_computed, num_output in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            computed[request_id] = num_computed
            known[request_id] = self._num_prompt_tokens[request_id] + num_output
            if request_id in cached.resumed_req_ids:
                self._num_tokens[request_id] = known[request_id]
                padded.add(request_id)
        sampled: dict[str, tuple[int, ...]] = {}
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            if computed[request_id] + num_scheduled < known[request_id]:
                sampled[request_id] = ()
                continue
            drafts = output.scheduled_spec_decode_tokens.get(request_id, ())
            if request_id in padded:
                drafts = ()
            first = self._num_tokens[request_id]
            accepted = 0
            for draft in drafts[: num_scheduled - 1]:
                if not self._is_right(request_id, first + accepted, draft):
                    break
                accepted += 1
            tokens = tuple(self.token(request_id, first + i) for i in range(accepted + 1))
            self._num_tokens[request_id] += len(tokens)
            sampled[request_id] = tokens
        return sampled

    def draft(self, sampled: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return drafts for the next step of each row: () for a row that sampled nothing.

        An n-gram drafter finds between none and all it looks for; a draft model always gives all.
        """
        if self._speculative is None:
            return {}
        most = self._speculative.num_speculative_tokens
        drafts: dict[str, tuple[int, ...]] = {}
        for request_id, tokens in sampled.items():
            first = self._num_tokens[request_id]
            count = most if tokens else 0
            if count and self._speculative.method == "ngram":
                count = self._draw(request_id, first, 3) % (most + 1)
            drafts[request_id] = tuple(
                (self.token(request_id, p) + (not self.accepts(request_id, p)))
                % self._workload.num_token_ids
                for p in range(first, first + count)
            )
        return drafts

    def _is_right(self, request_id: str, position: int, draft: int) -> bool:
        if draft == -1:
            # The scheduler ran ahead of the drafter, whose token only the worker knows.
            return self.accepts(request_id, position)
        return draft == self.token(request_id, position)

    def _draw(self, request_id: str, position: int, purpose: int) -> int:
        salt = self._salts.get(request_id)
        if salt is None:
            name = zlib.crc32(request_id.encode())
            salt = self._salts[request_id] = _mix(self._workload.token_seed + (name << 32) + name)
        return _mix(salt + (4 * position + purpose) * 0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrivenStep:
    """What happened in one step.

    Attributes
    ----------
    step : int
        From 0.
    events : WorkloadStep
        What happened before it.
    output : SchedulerOutput
        What was planned.
    updated : SchedulerOutput or None
        The plan whose tokens came back after it: this step's, or with asynchronous scheduling an
        earlier one's; None if none did.
    sampled : mapping of str to tuple of int
        Those tokens.
    outputs : tuple of EngineCoreOutput
        What they gave each request.
    """

    step: int
    events: WorkloadStep
    output: SchedulerOutput
    updated: SchedulerOutput | None
    sampled: Mapping[str, tuple[int, ...]]
    outputs: tuple[EngineCoreOutput, ...]


class DrivenScheduler(Protocol):
    """The calls that `drive` makes; see `SchedulerUnderTest` for what they mean."""

    def add_request(self, request: Request) -> None:
        """Queue a request."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan one step."""

    def update_from_output(
        self, output: SchedulerOutput, sampled: Mapping[str, tuple[int, ...]]
    ) -> tuple[EngineCoreOutput, ...]:
        """Take in sampled tokens."""

    def update_draft_token_ids(self, drafts: Mapping[str, tuple[int, ...]]) -> None:
        """Take in drafts."""

    def finish_requests(self, request_ids: tuple[str, ...], status: RequestStatus) -> None:
        """End requests from outside."""

    def set_pause_state(self, state: PauseState) -> None:
        """Stop or resume."""

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all prefix hashes."""


def drive(
    scheduler: DrivenScheduler, workload: Workload, config: EngineConfig
) -> Iterator[DrivenStep]:
    """Run a workload on a scheduler, step by step.

    Parameters
    ----------
    scheduler : SchedulerUnderTest
        Fresh; what it returns decides what is sampled, so it must not name unknown requests.
    workload : Workload
    config : EngineConfig
        What the scheduler was made of.

    Yields
    ------
    DrivenStep
        After each step. The run ends when all requests have, after `Workload.max_steps` steps,
        when nothing can change any more (`_PATIENCE` steps without a token, an event or a step in
        flight: a head that never fits, a pause without an end), or after a step that schedules a
        request with no token or fewer, which no worker could run.

    Notes
    -----
    With asynchronous scheduling steps are scheduled before the tokens of the last are known, until
    `Workload.max_concurrent_batches` are in flight, as in ``EngineCore.step_with_batch_queue`` of
    ``vllm/v1/engine/core.py``. A step without tokens does not reach a worker.
    """
    worker = PretendWorker(workload, config.speculative)
    depth = workload.max_concurrent_batches if config.scheduler.async_scheduling else 1
    in_flight: deque[SchedulerOutput] = deque()
    live: set[str] = set()
    idle = 0
    for step in range(workload.max_steps):
        events = workload.steps[step] if step < len(workload.steps) else _NO_EVENTS
        _apply(scheduler, events)
        live.update(request.request_id for request in events.add)
        live.difference_update(events.abort)
        output = scheduler.schedule(events.throttle_prefills)
        if any(count < 1 for count in output.num_scheduled_tokens.values()):
            yield DrivenStep(
                step=step, events=events, output=output, updated=None, sampled={}, outputs=()
            )
            return
        if output.num_scheduled_tokens:
            in_flight.append(output)
        updated: SchedulerOutput | None = None
        sampled: dict[str, tuple[int, ...]] = {}
        outputs: tuple[EngineCoreOutput, ...] = ()
        if len(in_flight) == depth or (in_flight and not output.num_scheduled_tokens):
            updated = in_flight.popleft()
            sampled = worker.execute(updated)
            outputs = scheduler.update_from_output(updated, sampled)
            live.difference_update(
                result.request_id for result in outputs if result.finish_reason is not None
            )
            if config.speculative is not None and not config.scheduler.async_scheduling:
                scheduler.update_draft_token_ids(worker.draft(sampled))
        yield DrivenStep(
            step=step,
            events=events,
            output=output,
            updated=updated,
            sampled=sampled,
            outputs=outputs,
        )
        idle = 0 if updated is not None or output.num_scheduled_tokens else idle + 1
        if step + 1 >= len(workload.steps) and not in_flight and (not live or idle >= _PATIENCE):
            return


def _apply(scheduler: DrivenScheduler, events: WorkloadStep) -> None:
    for request in events.add:
        scheduler.add_request(request)
    for request_id in events.abort:
        scheduler.finish_requests((request_id,), RequestStatus.FINISHED_ABORTED)
    if events.pause is not None:
        scheduler.set_pause_state(events.pause)
    if events.reset_prefix_cache is not None:
        scheduler.reset_prefix_cache(events.reset_prefix_cache)
