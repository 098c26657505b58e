"""Taking the blocks of a running request, to start it over later.

Source: ``Scheduler._preempt_request`` of ``vllm/v1/core/sched/scheduler.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from servespec.reference.contracts import RequestStatus, SchedulingPolicy
from servespec.reference.scheduling.state import RequestState

__all__ = ["choose_victim", "preempted"]


def choose_victim(
    running: Sequence[str],
    policy: SchedulingPolicy,
    requests: Mapping[str, RequestState],
    tie_ignores_id: bool,
) -> int:
    """Return the position of the request to preempt.

    Under ``fcfs`` the last one admitted. Under ``priority`` the one that would stand last in the
    queue; so the first in the queue is never the victim of another, and gets done.

    Parameters
    ----------
    running : sequence of str
        Not empty.
    policy : {"fcfs", "priority"}
    requests : mapping of str to RequestState
    tie_ignores_id : bool
        Whether the one admitted first is taken among those of equal priority and arrival, as in
        vLLM 0.27.1.
    """
    if policy == "fcfs":
        return len(running) - 1

    def rank(position: int) -> tuple[int, float, str]:
        priority, arrival, name = requests[running[position]].queue_key
        return priority, arrival, "" if tie_ignores_id else name

    return max(range(len(running)), key=rank)


def preempted(request: RequestState, drop_stale_output: bool) -> RequestState:
    """Return a request as it waits after a preemption.

    It keeps its tokens and computes all of them again. Output of steps in flight is stale: it was
    computed from blocks that are gone, and still right, so its tokens are kept when they arrive
    (throwing them away would change which drafts get accepted), but counters that were set back
    must not be touched by it. The exception is a forced reset, after which the request resumes
    before that output arrives and samples its positions again: then it is dropped.

    Parameters
    ----------
    request : RequestState
    drop_stale_output : bool
        Whether output in flight is thrown away.
    """
    return replace(
        request,
        status=RequestStatus.PREEMPTED,
        num_computed_tokens=0,
        spec_token_ids=(),
        num_output_placeholders=0,
        # The count in flight includes what an earlier preemption left stale, so it replaces it;
        # what was to be dropped then has been sampled again and stays dropped.
        num_stale_output_tokens=request.num_in_flight_tokens,
        drop_stale_output=drop_stale_output
        or (request.drop_stale_output and request.num_stale_output_tokens > 0),
        num_preemptions=request.num_preemptions + 1,
    )
