"""The order of waiting requests, and who goes first.

A queue is a tuple of request ids in the order in which they would be taken. Under ``fcfs`` it is a
plain queue with two ends; under ``priority`` it is kept sorted by priority, arrival and id, so
that putting a request "in front" has no meaning there.

Source: ``vllm/v1/core/sched/request_queue.py``; the heap it keeps gives out the same order,
because no two live requests share an id.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Mapping, Sequence

from servespec.reference.contracts import SchedulingPolicy
from servespec.reference.scheduling.state import RequestState

__all__ = ["append", "prepend", "without"]


def append(
    queue: tuple[str, ...],
    request_id: str,
    policy: SchedulingPolicy,
    requests: Mapping[str, RequestState],
) -> tuple[str, ...]:
    """Add a request that arrives.

    Parameters
    ----------
    queue : tuple of str
    request_id : str
    policy : {"fcfs", "priority"}
    requests : mapping of str to RequestState
        At least those in the queue and the one added.
    """
    if policy == "fcfs":
        return (*queue, request_id)
    return _sorted_in(queue, (request_id,), requests)


def prepend(
    queue: tuple[str, ...],
    request_ids: Sequence[str],
    policy: SchedulingPolicy,
    requests: Mapping[str, RequestState],
) -> tuple[str, ...]:
    """Add requests in front, in the order given.

    Parameters
    ----------
    queue : tuple of str
    request_ids : sequence of str
    policy : {"fcfs", "priority"}
    requests : mapping of str to RequestState
        At least those in the queue and those added.
    """
    if policy == "fcfs":
        return (*request_ids, *queue)
    return _sorted_in(queue, request_ids, requests)


def without(queue: tuple[str, ...], request_ids: Collection[str]) -> tuple[str, ...]:
    """Remove requests; ids that are not in the queue are ignored."""
    return tuple(request_id for request_id in queue if request_id not in request_ids)


def _sorted_in(
    queue: tuple[str, ...], request_ids: Sequence[str], requests: Mapping[str, RequestState]
) -> tuple[str, ...]:
    merged = list(queue)
    for request_id in request_ids:
        insort(merged, request_id, key=lambda name: requests[name].queue_key)
    return tuple(merged)
