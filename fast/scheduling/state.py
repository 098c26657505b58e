"""What a scheduler knows between calls, and the few changes that several passes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from servespec.fast.cache.block_pool import IntArray
from servespec.fast.cache.coordinator import KVCache
from servespec.fast.scheduling.hooks import Hooks
from servespec.fast.scheduling.queues import FcfsQueue, PriorityQueue, WaitingQueue
from servespec.fast.scheduling.requests import RequestTable
from servespec.reference.contracts import (
    CacheConfig,
    PauseState,
    RequestStatus,
    SchedulerConfig,
    SpeculativeConfig,
)

__all__ = ["RunningList", "RunningView", "State"]


@dataclass(frozen=True, slots=True)
class RunningView:
    """The running requests and those of their fields that never change, until the list does.

    Attributes
    ----------
    ids : tuple of str
    slots, serials, num_prompt, max_total, stop_from, length_limit, eos : array of int64
        As in `RequestTable`, in the order of the list. Not to be written to.
    any_slow : bool
        Whether more than lengths and an end-of-sequence token can stop any of them.
    """

    ids: tuple[str, ...]
    slots: IntArray
    serials: IntArray
    num_prompt: IntArray
    max_total: IntArray
    stop_from: IntArray
    length_limit: IntArray
    eos: IntArray
    any_slow: bool


class RunningList:
    """Running requests in the order of their admission, as one array of slots."""

    def __init__(self, capacity: int) -> None:
        self._slots: IntArray = np.zeros(capacity, dtype=np.int64)
        self._count = 0
        self._view: RunningView | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return int(self.slots[index])

    @property
    def slots(self) -> IntArray:
        """The slots themselves, shape (len(self),), valid until the list changes."""
        return self._slots[: self._count]

    def view(self, requests: RequestTable) -> RunningView:
        """Return the list as it is; the same object as long as it stays so."""
        if self._view is None:
            slots = self.slots.copy()
            slots.flags.writeable = False
            self._view = RunningView(
                ids=tuple(requests.request(slot).request_id for slot in slots.tolist()),
                slots=slots,
                serials=requests.serial[slots],
                num_prompt=requests.num_prompt[slots],
                max_total=requests.max_total[slots],
                stop_from=requests.stop_from[slots],
                length_limit=requests.length_limit[slots],
                eos=requests.eos[slots],
                any_slow=bool(requests.stops_slowly[slots].any()),
            )
        return self._view

    def append(self, slot: int) -> None:
        """Add a request at the end."""
        self._slots[self._count] = slot
        self._count += 1
        self._view = None

    def pop(self, index: int = -1) -> int:
        """Take out and return the request at `index`."""
        if index < 0:
            index += self._count
        slot = int(self._slots[index])
        self._slots[index : self._count - 1] = self._slots[index + 1 : self._count]
        self._count -= 1
        self._view = None
        return slot

    def remove(self, slots: set[int]) -> None:
        """Take out the given requests."""
        kept = self.slots[~np.isin(self.slots, list(slots))]
        self._slots[: len(kept)] = kept
        self._count = len(kept)
        self._view = None


class State:
    """All that a scheduler remembers.

    Parameters
    ----------
    scheduler : SchedulerConfig
    cache : CacheConfig
    speculative : SpeculativeConfig or None
    hooks : Hooks

    Attributes
    ----------
    config : SchedulerConfig
    hooks : Hooks
    num_spec_tokens : int
        Most drafts of a request in a step.
    requests : RequestTable
    cache : KVCache
    running : RunningList
    waiting, skipped : WaitingQueue
        Requests not running; `skipped` holds those passed over, which come first under ``fcfs``.
    step : int
        Number of the current or last step.
    finished_ids, preempted_ids : set of str
        Requests finished and preempted since the last plan.
    pause : PauseState
    capacity_bound : bool
        Whether the last step that could admit prefills left some waiting.
    forgotten_step : int
        Steps up to this one do not count as the previous one of any request.
    """

    def __init__(
        self,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        speculative: SpeculativeConfig | None,
        hooks: Hooks,
    ) -> None:
        self.config = scheduler
        self.hooks = hooks
        self.num_spec_tokens = speculative.num_speculative_tokens if speculative else 0
        self.use_eagle = speculative is not None and speculative.use_eagle
        self.requests = RequestTable(
            scheduler.max_model_len,
            self.num_spec_tokens,
            min_tokens_outlive_model_len=scheduler.quirks.min_tokens_outlive_model_len,
        )
        self.cache = KVCache(scheduler, cache, speculative, self.requests)
        self.running = RunningList(scheduler.max_num_seqs)
        self.waiting = self.new_queue()
        self.skipped = self.new_queue()
        self.step = 0
        self.finished_ids: set[str] = set()
        self.preempted_ids: set[str] = set()
        self.pause = PauseState.UNPAUSED
        self.capacity_bound = False
        self.forgotten_step = 0

    def new_queue(self) -> WaitingQueue:
        """Return an empty queue of the configured policy."""
        if self.config.policy == "priority":
            return PriorityQueue(self.requests.request)
        return FcfsQueue()

    def preempt(self, slot: int, *, drop_output: bool = False) -> None:
        """Take all from a request that was just taken off `running` and let it wait.

        Tokens in flight are stale from now on: they are still delivered when they arrive (or
        dropped, if `drop_output`), but no longer move the counters, which start from 0.
        """
        requests = self.requests
        self.cache.free(slot)
        requests.status[slot] = RequestStatus.PREEMPTED
        requests.num_computed[slot] = 0
        requests.num_drafts[slot] = 0
        if not drop_output and requests.num_stale[slot] == 0:
            requests.drop_stale[slot] = False
        elif drop_output:
            requests.drop_stale[slot] = True
        requests.num_stale[slot] = requests.num_in_flight[slot]
        requests.num_placeholders[slot] = 0
        self.waiting.prepend(slot)
        self.preempted_ids.add(requests.request(slot).request_id)

    def release(self, slot: int) -> None:
        """Forget a finished request that is in no queue any more or about to leave it."""
        request = self.requests.request(slot)
        self.finished_ids.add(request.request_id)
        self.hooks.on_finished(request)
        self.cache.free(slot)
        self.cache.remove(slot)
        self.requests.remove(slot)

    def dequeue(self, running: Sequence[int], waiting: Sequence[int]) -> None:
        """Take requests out of `running` and out of the queues."""
        if running:
            self.running.remove(set(running))
        if waiting:
            self.waiting.remove(set(waiting))
            self.skipped.remove(set(waiting))
