"""Queues of requests that wait, as slots.

Source: ``vllm/v1/core/sched/request_queue.py``.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from servespec.reference.contracts import Request

__all__ = ["FcfsQueue", "PriorityQueue", "WaitingQueue"]


class WaitingQueue(Protocol):
    """Requests in the order in which they will be taken; iteration follows that order."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...

    def add(self, slot: int) -> None:
        """Enter a request that arrives."""

    def peek(self) -> int:
        """Return the request that is next."""

    def pop(self) -> int:
        """Take out the request that is next."""

    def prepend(self, slot: int) -> None:
        """Enter a request in front, as far as the order allows."""

    def prepend_all(self, slots: WaitingQueue) -> None:
        """Prepend requests one by one, in the order of `slots`."""

    def remove(self, slots: set[int]) -> None:
        """Take out the given requests, as far as they are there."""


class FcfsQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._slots: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def add(self, slot: int) -> None:
        """Enter a request at the end."""
        self._slots.append(slot)

    def peek(self) -> int:
        """Return the first request."""
        return self._slots[0]

    def pop(self) -> int:
        """Take out the first request."""
        return self._slots.popleft()

    def prepend(self, slot: int) -> None:
        """Enter a request in front."""
        self._slots.appendleft(slot)

    def prepend_all(self, slots: WaitingQueue) -> None:
        """Prepend requests one by one, so that the last of `slots` comes first."""
        self._slots.extendleft(slots)

    def remove(self, slots: set[int]) -> None:
        """Take out the given requests, as far as they are there."""
        if self._slots:
            self._slots = deque(slot for slot in self._slots if slot not in slots)


Rank = tuple[int, float, str]


class PriorityQueue:
    """Smallest (priority, arrival time, request id) first.

    Parameters
    ----------
    request_of : callable
        Maps a slot to its request.
    """

    def __init__(self, request_of: Callable[[int], Request]) -> None:
        self._request_of = request_of
        self._heap: list[tuple[Rank, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[int]:
        return iter([slot for _, slot in sorted(self._heap)])

    @property
    def head_rank(self) -> Rank:
        """Rank of the request that is next."""
        return self._heap[0][0]

    def add(self, slot: int) -> None:
        """Enter a request at its place."""
        request = self._request_of(slot)
        rank = (request.priority, request.arrival_time, request.request_id)
        heapq.heappush(self._heap, (rank, slot))

    def peek(self) -> int:
        """Return the request of the smallest rank."""
        return self._heap[0][1]

    def pop(self) -> int:
        """Take out the request of the smallest rank."""
        return heapq.heappop(self._heap)[1]

    def prepend(self, slot: int) -> None:
        """Enter a request at its place: rank has no front."""
        self.add(slot)

    def prepend_all(self, slots: WaitingQueue) -> None:
        """Enter requests at their places."""
        for slot in slots:
            self.add(slot)

    def remove(self, slots: set[int]) -> None:
        """Take out the given requests, as far as they are there."""
        self._heap = [entry for entry in self._heap if entry[1] not in slots]
        heapq.heapify(self._heap)
