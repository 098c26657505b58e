"""The persistent batch: which request sits in which row, and all a worker knows of each.

A worker keeps its rows from step to step, because most requests of a step were in the one before.
A step removes rows, fills the holes and closes those that stay, so the row order is a function of
the whole history; the rules below fix it.

Source: ``_update_states`` of ``vllm/v1/worker/gpu_model_runner.py`` and ``InputBatch`` of
``vllm/v1/worker/gpu_input_batch.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from servespec.reference.batch.state_moves import Boundary, boundary_crossed
from servespec.reference.contracts import (
    BlockTable,
    NewRequestData,
    SchedulerOutput,
    UnknownRequestError,
)

__all__ = [
    "InputBatch",
    "RequestState",
    "append_sampled",
    "condense",
    "empty_batch",
    "place",
    "state_boundary",
    "update_states",
]

# A row of a batch under change; None is a hole.
Rows = tuple[str | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestState:
    """What a worker knows of one request, in a row or not.

    Attributes
    ----------
    req_id : str
    num_prompt_tokens : int
    token_ids : tuple of int
        Prompt and output so far.
    draft_token_ids : tuple of int
        Drafts scheduled in this step; they follow `token_ids` and are not known tokens.
    block_ids : tuple of tuple of int
        The block table, a tuple for each group.
    num_computed_tokens : int
        Tokens whose K/V and states exist before this step.
    num_accepted_tokens : int
        Tokens that the latest step sampled for the request: one, and one more for each accepted
        draft. Its state after the step sits that many positions into the step.
    last_seq_len : int
        Tokens computed after the latest step the request was in, drafts included; 0 for a request
        that is new or back from preemption. Aligned states are found by it.
    """

    req_id: str
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    draft_token_ids: tuple[int, ...] = ()
    block_ids: BlockTable
    num_computed_tokens: int
    num_accepted_tokens: int = 1
    last_seq_len: int = 0

    @property
    def num_tokens(self) -> int:
        """Known tokens, without drafts."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch:
    """Rows in order, and the state of every request that has not finished.

    Attributes
    ----------
    req_ids : tuple of str
        The request of each row.
    requests : mapping of str to RequestState
        Also of requests without a row: preempted ones and those a step left out.
    added : frozenset of str
        Rows that the latest update put in.
    state_block_size : int or None
        Tokens of a GDN state block where states are aligned; noted by `prepare`.
    """

    req_ids: tuple[str, ...] = ()
    requests: Mapping[str, RequestState] = field(default_factory=lambda: MappingProxyType({}))
    added: frozenset[str] = frozenset()
    state_block_size: int | None = None

    @property
    def rows(self) -> tuple[RequestState, ...]:
        """The state of each row."""
        return tuple(self.requests[req_id] for req_id in self.req_ids)


def empty_batch() -> InputBatch:
    """Return the batch of a worker that has seen no request."""
    return InputBatch()


def place(rows: Rows, req_id: str) -> Rows:
    """Put a request into the lowest hole, or behind the last row if there is none.

    Parameters
    ----------
    rows : tuple of (str or None)
    req_id : str

    Returns
    -------
    tuple of (str or None)
    """
    if None not in rows:
        return (*rows, req_id)
    hole = rows.index(None)
    return (*rows[:hole], req_id, *rows[hole + 1 :])


def condense(rows: Rows) -> tuple[str, ...]:
    """Close the holes: the highest live row moves into the lowest hole until none is left.

    Moving rows from the end touches as few rows as there are holes, at the price of their order.

    Parameters
    ----------
    rows : tuple of (str or None)

    Returns
    -------
    tuple of str
    """
    while None in rows:
        rows = rows[:-1] if rows[-1] is None else place(rows[:-1], rows[-1])
    return tuple(row for row in rows if row is not None)


def update_states(batch: InputBatch, output: SchedulerOutput) -> InputBatch:
    """Apply one plan to the rows and to what is known of the requests.

    In order: finished requests are forgotten; rows whose request is not scheduled are emptied (a
    request skipped for one step loses its row), and so are rows of requests that come back from
    preemption within one step; new requests, then scheduled ones without a row, enter the lowest
    hole each; the remaining holes are closed. Rows that stay append their new blocks, a resumed
    request replaces its table.

    Parameters
    ----------
    batch : InputBatch
    output : SchedulerOutput

    Returns
    -------
    InputBatch
        Before reordering.

    Raises
    ------
    UnknownRequestError
        The plan calls a request known that this worker has never seen.
    """
    cached = output.scheduled_cached_reqs
    requests = {
        req_id: state
        for req_id, state in batch.requests.items()
        if req_id not in output.finished_req_ids
    }
    staying = (
        output.num_scheduled_tokens.keys() - output.finished_req_ids - cached.resumed_req_ids
    ).intersection(batch.req_ids)
    rows: Rows = tuple(req_id if req_id in staying else None for req_id in batch.req_ids)

    for new in output.scheduled_new_reqs:
        requests[new.req_id] = _first_state(new)
    for index, req_id in enumerate(cached.req_ids):
        if req_id not in requests:
            raise UnknownRequestError(req_id)
        requests[req_id] = _next_state(requests[req_id], output, index, req_id in staying)
    for req_id in output.num_scheduled_tokens:
        if req_id not in requests:
            raise UnknownRequestError(req_id)
        drafts = output.scheduled_spec_decode_tokens.get(req_id, ())
        requests[req_id] = replace(requests[req_id], draft_token_ids=tuple(drafts))

    entering = [new.req_id for new in output.scheduled_new_reqs]
    entering += [req_id for req_id in cached.req_ids if req_id not in staying]
    for req_id in entering:
        rows = place(rows, req_id)
    return InputBatch(
        req_ids=condense(rows),
        requests=MappingProxyType(requests),
        added=frozenset(entering),
        state_block_size=batch.state_block_size,
    )


def _first_state(new: NewRequestData) -> RequestState:
    return RequestState(
        req_id=new.req_id,
        num_prompt_tokens=len(new.prompt_token_ids),
        token_ids=new.prompt_token_ids,
        block_ids=new.block_ids,
        num_computed_tokens=new.num_computed_tokens,
    )


def _next_state(
    state: RequestState, output: SchedulerOutput, index: int, has_row: bool
) -> RequestState:
    """Bring a known request up to entry `index` of the plan's cached requests."""
    cached = output.scheduled_cached_reqs
    new_block_ids = cached.new_block_ids[index]
    resumed = state.req_id in cached.resumed_req_ids
    token_ids = state.token_ids
    if not has_row and state.req_id in cached.all_token_ids:
        # Tokens that arrived while the request had no row reach the worker this way only.
        token_ids = tuple(cached.all_token_ids[state.req_id])
    if resumed:
        block_ids = new_block_ids if new_block_ids is not None else ()
    elif new_block_ids is None:
        block_ids = state.block_ids
    else:
        block_ids = tuple(
            (*held, *new) for held, new in zip(state.block_ids, new_block_ids, strict=True)
        )
    return replace(
        state,
        # The scheduler may have dropped output that the worker still holds.
        token_ids=token_ids[: state.num_prompt_tokens + cached.num_output_tokens[index]],
        block_ids=block_ids,
        num_computed_tokens=cached.num_computed_tokens[index],
        num_accepted_tokens=1 if resumed else state.num_accepted_tokens,
        last_seq_len=0 if resumed else state.last_seq_len,
    )


def append_sampled(batch: InputBatch, sampled: Mapping[str, tuple[int, ...]]) -> InputBatch:
    """Note what a step sampled, so that the next one finds it among the known tokens.

    Parameters
    ----------
    batch : InputBatch
        As `prepare` returned it for the step.
    sampled : mapping of str to tuple of int
        Kept tokens of each request; rows without an entry were computed and thrown away.

    Returns
    -------
    InputBatch
    """
    requests = dict(batch.requests)
    for state in batch.rows:
        tokens = tuple(sampled.get(state.req_id, ()))
        num_accepted = max(1, len(tokens))
        crossed = state_boundary(state, num_accepted, batch.state_block_size)
        if crossed is not None and crossed[0] == crossed[1]:
            num_accepted = 1
        requests[state.req_id] = replace(
            state, token_ids=state.token_ids + tokens, num_accepted_tokens=num_accepted
        )
    return replace(batch, requests=MappingProxyType(requests))


def state_boundary(
    state: RequestState, num_accepted: int, state_block_size: int | None
) -> Boundary | None:
    """Return the boundary that the latest step of a request crossed (`boundary_crossed`).

    Parameters
    ----------
    state : RequestState
    num_accepted : int
        Tokens the step sampled.
    state_block_size : int or None
        None where states are not aligned.

    Returns
    -------
    (int, int, int) or None
    """
    if state_block_size is None:
        return None
    num_drafts = len(state.draft_token_ids)
    return boundary_crossed(state.last_seq_len, num_drafts, num_accepted, state_block_size)
