"""One step's plan: while it is made, as arrays, and in the form of the contract."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from servespec.fast.cache.block_pool import IntArray
from servespec.fast.scheduling.state import RunningView
from servespec.reference.contracts import (
    BlockCopy,
    BlockTable,
    CachedRequestData,
    NewRequestData,
    Request,
    SchedulerOutput,
)

__all__ = ["Admission", "Plan", "Schedule"]

_NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Admission:
    """A request taken from a queue.

    Attributes
    ----------
    slot : int
    request : Request
    resumed : bool
        Whether it was preempted before, so that the worker knows it.
    block_ids : tuple of tuple of int
        Its whole table.
    """

    slot: int
    request: Request
    resumed: bool
    block_ids: BlockTable


@dataclass(slots=True)
class Plan:
    """What has been decided so far in a step.

    Attributes
    ----------
    budget : int
        Tokens still to be given out.
    head_slots, head_counts : array of int64
        Requests at the front of the running list, decided together.
    slots, counts : list of int
        Requests decided one by one after them, running ones first.
    num_tail_running : int
        How many of `slots` were running before the step.
    blocks : dict of int to tuple of tuple of int
        New blocks of running requests that got any, by slot.
    grown : list of (array of int64, array of int64)
        Slots of running requests served together, shape (n,), and the one block of each group they
        got, shape (n, number of groups), 0 where there is none.
    padded : dict of int to int
        Placeholder drafts of admitted requests, by slot.
    admissions : list of Admission
    any_chunk : bool
        Whether a request still in its prefill runs.
    preempted : bool
        Whether a request was preempted.
    """

    budget: int
    head_slots: IntArray = field(default_factory=lambda: _NO_ROWS)
    head_counts: IntArray = field(default_factory=lambda: _NO_ROWS)
    slots: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_tail_running: int = 0
    blocks: dict[int, BlockTable] = field(default_factory=dict)
    grown: list[tuple[IntArray, IntArray]] = field(default_factory=list)
    padded: dict[int, int] = field(default_factory=dict)
    admissions: list[Admission] = field(default_factory=list)
    any_chunk: bool = False
    preempted: bool = False

    @property
    def num_running(self) -> int:
        """Requests planned that were running before the step."""
        return len(self.head_slots) + self.num_tail_running

    def add(self, slot: int, count: int) -> None:
        """Plan `count` tokens of a request."""
        self.slots.append(slot)
        self.counts.append(count)
        self.budget -= count

    def withdraw(self, slot: int) -> bool:
        """Take a running request out of the plan again; False if it is not in it."""
        if slot in self.slots:
            index = self.slots.index(slot)
            del self.slots[index]
            self.budget += self.counts.pop(index)
            self.num_tail_running -= 1
        elif (places := np.flatnonzero(self.head_slots == slot)).size:
            self.budget += int(self.head_counts[places[0]])
            self.head_slots = np.delete(self.head_slots, places[0])
            self.head_counts = np.delete(self.head_counts, places[0])
        else:
            return False
        self.blocks.pop(slot, None)
        self.grown = [(s[s != slot], ids[s != slot]) for s, ids in self.grown]
        return True

    def rows(self) -> tuple[IntArray, IntArray]:
        """Return the slots planned and their tokens, in the order of the decisions.

        Returns
        -------
        slots, counts : array of int64, shape (number of requests,)
        """
        if not self.slots:
            return self.head_slots, self.head_counts
        return (
            np.concatenate([self.head_slots, np.array(self.slots, dtype=np.int64)]),
            np.concatenate([self.head_counts, np.array(self.counts, dtype=np.int64)]),
        )


@dataclass(slots=True)
class Schedule:
    """A finished plan as arrays; R requests, those that were running before first.

    Attributes
    ----------
    req_ids : tuple of str
    slots, serials : array of int64, shape (R,)
        Where the requests' state is, and whose it was.
    view : RunningView or None
        The running list, if the rows are just that.
    num_tokens : array of int64, shape (R,)
        Tokens of each request in this step.
    num_computed, num_outputs : array of int64, shape (R,)
        Computed tokens before the step; output tokens known or in flight.
    num_drafts : array of int64, shape (R,), or None
        Drafts among the tokens; None if there is none at all.
    draft_ids : array of int32, shape (R, most drafts), or None
        The drafts; -1 is a placeholder.
    num_running : int
        Rows of requests that were running before the step.
    blocks : dict of int to tuple of tuple of int
        New blocks of rows that got any, by row.
    grown_rows : array of int64, shape (n,)
        Further rows, that got at most one block of each group.
    grown_ids : array of int64, shape (n, number of groups)
        Those blocks, 0 where there is none.
    all_token_ids : dict of int to tuple of int
        All known tokens, by row, of known requests that were not in the previous step.
    admissions : list of Admission
        Belong to the rows from `num_running` on.
    num_common_prefix_blocks, finished_req_ids, preempted_req_ids, new_block_ids_to_zero, \
kv_cache_block_copies, num_spec_tokens_to_schedule
        As in `SchedulerOutput`.
    """

    req_ids: tuple[str, ...]
    slots: IntArray
    serials: IntArray
    view: RunningView | None
    num_tokens: IntArray
    num_computed: IntArray
    num_outputs: IntArray
    num_drafts: IntArray | None
    draft_ids: npt.NDArray[np.int32] | None
    num_running: int
    blocks: dict[int, BlockTable]
    grown_rows: IntArray
    grown_ids: IntArray
    all_token_ids: dict[int, tuple[int, ...]]
    admissions: list[Admission]
    num_common_prefix_blocks: tuple[int, ...]
    finished_req_ids: frozenset[str]
    preempted_req_ids: frozenset[str]
    new_block_ids_to_zero: tuple[int, ...]
    kv_cache_block_copies: tuple[BlockCopy, ...]
    num_spec_tokens_to_schedule: int

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens of all requests."""
        return int(self.num_tokens.sum())

    def to_contract(self) -> SchedulerOutput:
        """Return the plan in the form that all implementations share."""
        ids = self.req_ids
        counts = self.num_tokens.tolist()
        return SchedulerOutput(
            scheduled_new_reqs=self._new_requests(),
            scheduled_cached_reqs=self._cached_requests(),
            num_scheduled_tokens=dict(zip(ids, counts, strict=True)),
            total_num_scheduled_tokens=sum(counts),
            scheduled_spec_decode_tokens=self._drafts(),
            num_common_prefix_blocks=self.num_common_prefix_blocks,
            finished_req_ids=self.finished_req_ids,
            preempted_req_ids=self.preempted_req_ids,
            new_block_ids_to_zero=self.new_block_ids_to_zero,
            kv_cache_block_copies=self.kv_cache_block_copies,
            num_spec_tokens_to_schedule=self.num_spec_tokens_to_schedule,
        )

    def _new_requests(self) -> tuple[NewRequestData, ...]:
        return tuple(
            NewRequestData(
                req_id=admission.request.request_id,
                prompt_token_ids=admission.request.prompt_token_ids,
                sampling_params=admission.request.sampling_params,
                block_ids=admission.block_ids,
                num_computed_tokens=int(self.num_computed[row]),
            )
            for row, admission in enumerate(self.admissions, self.num_running)
            if not admission.resumed
        )

    def _cached_requests(self) -> CachedRequestData:
        resumed = [row for row, a in enumerate(self.admissions, self.num_running) if a.resumed]
        rows = [*range(self.num_running), *resumed]
        new_blocks: list[BlockTable | None] = [None] * self.num_running
        for row, table in self.blocks.items():
            new_blocks[row] = table
        for row, ids in zip(self.grown_rows.tolist(), self.grown_ids.tolist(), strict=True):
            new_blocks[row] = tuple((block,) if block else () for block in ids)
        new_blocks += [self.admissions[row - self.num_running].block_ids for row in resumed]
        names = self.req_ids
        return CachedRequestData(
            req_ids=tuple(names[row] for row in rows),
            resumed_req_ids=frozenset(names[row] for row in resumed),
            new_block_ids=tuple(new_blocks),
            num_computed_tokens=tuple(self.num_computed[rows].tolist()),
            num_output_tokens=tuple(self.num_outputs[rows].tolist()),
            all_token_ids={names[row]: tokens for row, tokens in self.all_token_ids.items()},
        )

    def _drafts(self) -> dict[str, tuple[int, ...]]:
        if self.num_drafts is None or self.draft_ids is None:
            return {}
        return {
            self.req_ids[row]: tuple(self.draft_ids[row, : self.num_drafts[row]].tolist())
            for row in np.flatnonzero(self.num_drafts).tolist()
        }
