"""What a step's sampled tokens change.

Source: ``update_from_output`` of ``vllm/v1/core/sched/scheduler.py`` and its override in
``async_scheduler.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from servespec.fast.cache.block_pool import IntArray
from servespec.fast.scheduling.state import State
from servespec.fast.scheduling.stop import StopReason, stop_status
from servespec.reference.contracts import EngineCoreOutput, RequestStatus

__all__ = ["StepRows", "StepTokens", "take_in"]


@dataclass(frozen=True, slots=True)
class StepRows:
    """The requests of a step whose tokens are taken in; R rows.

    Attributes
    ----------
    req_ids : tuple of str
    slots : array of int64, shape (R,)
    num_tokens : array of int64, shape (R,)
        Scheduled tokens.
    num_drafts : array of int64, shape (R,), or None
        Drafts among them; None if there is none at all.
    stop_from, length_limit, eos : array of int64, shape (R,)
        As in `RequestTable`.
    may_stop_otherwise : bool
        Whether more than these and lengths can stop any of the requests.
    """

    req_ids: tuple[str, ...]
    slots: IntArray
    num_tokens: IntArray
    num_drafts: IntArray | None
    stop_from: IntArray
    length_limit: IntArray
    eos: IntArray
    may_stop_otherwise: bool


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What a step gave its requests, as arrays; R rows.

    Attributes
    ----------
    req_ids : tuple of str
    token_ids : array of int32, shape (R, most tokens)
    counts : array of int64, shape (R,)
        Tokens kept of each row.
    finished : dict of int to (RequestStatus, stop reason)
        Rows of requests that ended.
    """

    req_ids: tuple[str, ...]
    token_ids: npt.NDArray[np.int32]
    counts: IntArray
    finished: dict[int, tuple[RequestStatus, StopReason]]

    def to_contract(self) -> tuple[EngineCoreOutput, ...]:
        """Return an entry for every request that got a token or ended."""
        outputs = []
        for row in np.flatnonzero(self.counts).tolist():
            status, reason = self.finished.get(row, (RequestStatus.RUNNING, None))
            outputs.append(
                EngineCoreOutput(
                    request_id=self.req_ids[row],
                    new_token_ids=tuple(self.token_ids[row, : self.counts[row]].tolist()),
                    finish_reason=status.finish_reason,
                    stop_reason=reason,
                )
            )
        return tuple(outputs)


def take_in(
    state: State, rows: StepRows, token_ids: npt.NDArray[np.int32], counts: IntArray
) -> StepTokens:
    """Append sampled tokens, undo rejected drafts, end requests that are through.

    Parameters
    ----------
    state : State
    rows : StepRows
    token_ids : array of int32, shape (R, most tokens)
        Sampled tokens of each row.
    counts : array of int64, shape (R,)
        How many there are; 0 for a row still in its prefill.
    """
    requests = state.requests
    slots = rows.slots
    counts = counts.copy()
    requests.num_in_flight[slots] -= rows.num_tokens
    stale = requests.num_stale[slots] > 0
    fresh: npt.NDArray[np.bool_] | slice = slice(None)
    if stale.any():
        fresh = ~stale
        requests.num_stale[slots[stale]] -= rows.num_tokens[stale]
        counts[stale & (requests.drop_stale[slots] != 0)] = 0
    if rows.num_drafts is not None:
        _undo_rejected(state, slots[fresh], rows.num_drafts[fresh], counts[fresh])
    finished = _append(state, rows, token_ids, counts)
    if state.config.async_scheduling:
        requests.num_placeholders[slots[fresh]] -= counts[fresh]
    _settle(state, slots, counts, finished)
    return StepTokens(rows.req_ids, token_ids, counts, finished)


def _undo_rejected(state: State, slots: IntArray, num_drafts: IntArray, counts: IntArray) -> None:
    """Take rejected drafts back out of the counters of rows that no preemption reset."""
    requests = state.requests
    judged = (num_drafts > 0) & (counts > 0)
    if not judged.any():
        return
    slots = slots[judged]
    rejected = num_drafts[judged] - (counts[judged] - 1)
    requests.num_computed[slots] -= np.where(requests.num_computed[slots] > 0, rejected, 0)
    requests.num_placeholders[slots] -= np.where(requests.num_placeholders[slots] > 0, rejected, 0)


def _append(
    state: State, rows: StepRows, token_ids: npt.NDArray[np.int32], counts: IntArray
) -> dict[int, tuple[RequestStatus, StopReason]]:
    """Append tokens, all rows' first ones before all rows' second ones.

    Returns
    -------
    dict
        How the requests of some rows end; their `counts` are trimmed.
    """
    requests = state.requests
    finished: dict[int, tuple[RequestStatus, StopReason]] = {}
    most = int(counts.max(initial=0))
    if not most:
        return finished
    known = requests.num_tokens[rows.slots]
    requests.ensure_width(int(known.max()) + most)
    for column in range(most):
        places: IntArray | slice = slice(None)
        if counts.min() <= column:
            places = np.flatnonzero(counts > column)
        owners = rows.slots[places]
        tokens = token_ids[places, column]
        lengths = known[places] + (column + 1)
        requests.token_ids[owners, lengths - 1] = tokens
        requests.num_tokens[owners] = lengths
        may_stop = lengths >= rows.length_limit[places]
        may_stop |= tokens == rows.eos[places]
        if rows.may_stop_otherwise:
            may_stop |= requests.stops_slowly[owners] != 0
        if not may_stop.any():
            continue
        may_stop &= (lengths >= rows.stop_from[places]) | (lengths >= requests.hard_limit)
        for place in np.arange(len(counts))[places][may_stop].tolist():
            end = stop_status(requests, int(rows.slots[place]))
            if end is not None:
                finished[place] = end
                counts[place] = column + 1
    return finished


def _settle(
    state: State,
    slots: IntArray,
    counts: IntArray,
    finished: dict[int, tuple[RequestStatus, StopReason]],
) -> None:
    """Enter blocks that became final and let finished requests go, row by row."""
    requests, cache = state.requests, state.cache
    touched = set(finished)
    if state.config.async_scheduling and cache.hashing:
        final = requests.num_computed[slots] - requests.num_placeholders[slots]
        due = (counts > 0) & ((final >= cache.cache_at[slots]) | cache.fine)
        touched.update(np.flatnonzero(due).tolist())
    if not touched:
        return
    running: list[int] = []
    waiting: list[int] = []
    for row in sorted(touched):
        slot = int(slots[row])
        runs = requests.status[slot] == RequestStatus.RUNNING
        if state.config.async_scheduling and runs:
            computed = int(requests.num_computed[slot] - requests.num_placeholders[slot])
            # The step that wrote them may have gone on beyond, and overwritten a state.
            cache.cache(slot, computed, end=-1)
        if row in finished:
            (running if runs else waiting).append(slot)
            state.release(slot)
    state.dequeue(running, waiting)
