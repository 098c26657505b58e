"""The V1 scheduler on mutable arrays.

The rules are those of vLLM 0.27.1 (``vllm/v1/core/sched/scheduler.py`` and
``async_scheduler.py``); work is in proportion to what changed in a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from servespec.fast.cache.block_pool import IntArray
from servespec.fast.scheduling.hooks import Hooks
from servespec.fast.scheduling.plan import Plan, Schedule
from servespec.fast.scheduling.running import schedule_running
from servespec.fast.scheduling.state import State
from servespec.fast.scheduling.update import StepRows, StepTokens, take_in
from servespec.fast.scheduling.waiting import schedule_waiting
from servespec.reference.contracts import (
    CacheConfig,
    DuplicateRequestError,
    EngineCoreOutput,
    PauseState,
    Request,
    RequestStatus,
    SchedulerConfig,
    SchedulerOutput,
    SchedulerSnapshot,
    SpeculativeConfig,
)

__all__ = ["Scheduler"]

_NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)


class Scheduler:
    """Decides, step by step, which requests compute how many tokens in which blocks.

    Parameters
    ----------
    scheduler_config : SchedulerConfig
    cache_config : CacheConfig
    speculative_config : SpeculativeConfig or None
    hooks : Hooks or None
        Parts beyond this package that take part; None for none.
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        speculative_config: SpeculativeConfig | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        self._state = State(scheduler_config, cache_config, speculative_config, hooks or Hooks())

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises
        ------
        DuplicateRequestError
            If a live request has this id.
        """
        state = self._state
        if request.request_id in state.requests.slot_of:
            raise DuplicateRequestError(f"request id {request.request_id!r} is already in use")
        slot = state.requests.add(request)
        state.cache.add(slot)
        state.waiting.add(slot)

    def schedule(self, throttle_prefills: bool = False) -> Schedule:
        """Plan one step.

        Parameters
        ----------
        throttle_prefills : bool
            Whether prefills wait for a step in which all data-parallel ranks start them.
        """
        state = self._state
        state.step += 1
        state.cache.new_step()
        paused = state.pause is PauseState.PAUSED_ALL
        plan = Plan(0 if paused else state.config.token_budget)
        defer = throttle_prefills and not state.capacity_bound and self._any_decode()
        schedule_running(state, plan, defer_prefills=defer)
        if not plan.preempted and state.pause is PauseState.UNPAUSED:
            schedule_waiting(state, plan, defer_prefills=defer)
        return self._finish(plan)

    def update_from_output(
        self, output: Schedule | SchedulerOutput, sampled: Mapping[str, tuple[int, ...]]
    ) -> tuple[EngineCoreOutput, ...]:
        """Take in the tokens sampled in a step.

        Parameters
        ----------
        output : Schedule or SchedulerOutput
            The step's plan.
        sampled : mapping of str to tuple of int
            Tokens of each scheduled request; () or none for a row still in its prefill.
        """
        order = output.req_ids if isinstance(output, Schedule) else output.num_scheduled_tokens
        tokens = [sampled.get(request_id, ()) for request_id in order]
        counts = np.array([len(row) for row in tokens], dtype=np.int64)
        token_ids = np.zeros((len(tokens), int(counts.max(initial=0))), dtype=np.int32)
        for row, ids in enumerate(tokens):
            token_ids[row, : len(ids)] = ids
        if isinstance(output, SchedulerOutput):
            return self._take_in_contract(output, token_ids, counts).to_contract()
        return self.update_from_arrays(output, token_ids, counts).to_contract()

    def update_from_arrays(
        self, output: Schedule, token_ids: npt.NDArray[np.int32], counts: IntArray
    ) -> StepTokens:
        """Take in the tokens sampled in a step, as arrays in the order of the plan's rows.

        Parameters
        ----------
        output : Schedule
            The step's plan.
        token_ids : array of int32, shape (R, most tokens)
        counts : array of int64, shape (R,)
            Tokens of each row; 0 for a row still in its prefill.
        """
        requests = self._state.requests
        view = output.view
        if view is not None and view is self._state.running.view(requests):
            rows = StepRows(
                view.ids,
                view.slots,
                output.num_tokens,
                output.num_drafts,
                view.stop_from,
                view.length_limit,
                view.eos,
                view.any_slow,
            )
            return take_in(self._state, rows, token_ids, counts)
        alive = requests.serial[output.slots] == output.serials
        # An id that is in use again answers for its predecessor, as in vLLM.
        slots = output.slots if alive.all() else self._slots(output.req_ids)
        return self._take_in(
            output.req_ids, slots, output.num_tokens, output.num_drafts, token_ids, counts
        )

    def update_draft_token_ids(self, drafts: Mapping[str, tuple[int, ...]]) -> None:
        """Take in draft tokens for the next step; a prefill gets none."""
        requests, hooks = self._state.requests, self._state.hooks
        for request_id, token_ids in drafts.items():
            slot = requests.slot_of.get(request_id)
            if slot is None:
                continue
            kept: tuple[int, ...] = ()
            if not requests.is_chunk[slot]:
                kept = hooks.valid_drafts(requests.request(slot), tuple(token_ids))
            requests.set_drafts(slot, kept)

    def finish_requests(self, request_ids: Sequence[str], status: RequestStatus) -> None:
        """End requests from outside; ids that are not alive are ignored.

        Raises
        ------
        ValueError
            If `status` is not one of the finished ones.
        """
        if not status.is_finished:
            raise ValueError(f"status is {status!r}: must be a finished one")
        state = self._state
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        in_set_order = state.config.quirks.finish_in_set_order
        unique = set(ids) if in_set_order else dict.fromkeys(ids)
        slots = [slot for i in unique if (slot := state.requests.slot_of.get(i)) is not None]
        runs = [state.requests.status[slot] == RequestStatus.RUNNING for slot in slots]
        state.dequeue(
            [slot for slot, running in zip(slots, runs, strict=True) if running],
            [slot for slot, running in zip(slots, runs, strict=True) if not running],
        )
        for slot in slots:
            state.release(slot)

    def set_pause_state(self, state: PauseState) -> None:
        """Stop or resume admission or everything."""
        self._state.pause = state

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all prefix hashes; False if blocks in use forbid it.

        Parameters
        ----------
        reset_running_requests : bool
            Preempt all running requests first, so that no block is in use.
        """
        state = self._state
        if reset_running_requests:
            while len(state.running):
                state.preempt(state.running.pop(), drop_output=True)
            state.forgotten_step = state.step
        return state.cache.pool.reset_keys()

    def has_unfinished_requests(self) -> bool:
        """Whether any request still runs or, as far as the pause state lets it, waits."""
        state = self._state
        if state.pause is PauseState.PAUSED_ALL:
            return False
        if state.pause is PauseState.PAUSED_NEW:
            return len(state.running) > 0
        return len(state.requests.slot_of) > 0

    def has_finished_requests(self) -> bool:
        """Whether requests ended since the last plan."""
        return bool(self._state.finished_ids)

    def snapshot(self) -> SchedulerSnapshot:
        """Return the state as far as checks compare it."""
        state = self._state
        requests, cache = state.requests, state.cache
        tables = {i: cache.block_table(slot) for i, slot in requests.slot_of.items()}

        def ids(slots: list[int]) -> tuple[str, ...]:
            return tuple(requests.request(slot).request_id for slot in slots)

        return SchedulerSnapshot(
            free_blocks=tuple(cache.pool.free.to_array().tolist()),
            ref_counts=tuple(cache.pool.ref_counts.tolist()),
            cached_blocks=cache.pool.cached_blocks(),
            block_tables={i: table for i, table in tables.items() if any(table)},
            running=ids(state.running.slots.tolist()),
            waiting=ids(list(state.waiting)),
            skipped_waiting=ids(list(state.skipped)),
            num_computed_tokens={
                i: int(requests.num_computed[slot]) for i, slot in requests.slot_of.items()
            },
            num_output_placeholders={
                i: int(requests.num_placeholders[slot]) for i, slot in requests.slot_of.items()
            },
            pause_state=state.pause,
        )

    def _any_decode(self) -> bool:
        state = self._state
        return bool((state.requests.is_chunk[state.running.slots] == 0).any())

    def _finish(self, plan: Plan) -> Schedule:
        """Turn a complete plan into a schedule and move the counters on."""
        state = self._state
        requests, cache = state.requests, state.cache
        slots, counts = plan.rows()
        computed = requests.num_computed[slots]
        known = requests.num_tokens[slots]
        placeholders = requests.num_placeholders[slots]
        num_drafts, draft_ids = self._take_drafts(
            plan, slots, counts + computed - known - placeholders
        )
        grown_rows, grown_ids = self._grown(plan, slots)
        view = None
        if plan.num_running == len(slots) == len(state.running):
            view = state.running.view(requests)
        row_of = {slot: row for row, slot in enumerate(slots.tolist())} if plan.blocks else {}
        schedule = Schedule(
            req_ids=view.ids
            if view is not None
            else tuple(requests.request(slot).request_id for slot in slots.tolist()),
            slots=slots,
            serials=requests.serial[slots] if view is None else view.serials,
            view=view,
            num_tokens=counts,
            num_computed=computed,
            num_outputs=known
            + placeholders
            - (requests.num_prompt[slots] if view is None else view.num_prompt),
            num_drafts=num_drafts,
            draft_ids=draft_ids,
            num_running=plan.num_running,
            blocks={row_of[slot]: table for slot, table in plan.blocks.items()},
            grown_rows=grown_rows,
            grown_ids=grown_ids,
            all_token_ids=self._returning(plan, slots),
            admissions=plan.admissions,
            num_common_prefix_blocks=cache.num_common_prefix(state.running[0], len(state.running))
            if len(state.running)
            else (0,) * len(cache.groups),
            finished_req_ids=frozenset(state.finished_ids),
            preempted_req_ids=frozenset(state.preempted_ids),
            new_block_ids_to_zero=cache.take_new_ids(),
            kv_cache_block_copies=cache.take_copies(),
            num_spec_tokens_to_schedule=state.num_spec_tokens,
        )
        state.finished_ids = set()
        state.preempted_ids = set()
        ends = computed + counts
        requests.num_computed[slots] = ends
        requests.num_in_flight[slots] += counts
        chunks = ends < known + placeholders
        requests.is_chunk[slots] = chunks
        requests.last_step[slots] = state.step
        if state.config.async_scheduling:
            self._expect_tokens(slots, chunks, num_drafts)
        return schedule

    def _grown(self, plan: Plan, slots: IntArray) -> tuple[IntArray, IntArray]:
        """Return the rows of requests served together, and their new blocks."""
        if not plan.grown:
            return _NO_ROWS, _NO_ROWS
        # Served in the order of the rows, so the slots stand in the same order.
        grown = np.concatenate([some for some, _ in plan.grown])
        rows = np.flatnonzero(np.isin(slots, grown))
        return rows, np.concatenate([ids for _, ids in plan.grown])

    def _take_drafts(
        self, plan: Plan, slots: IntArray, surplus: IntArray
    ) -> tuple[IntArray | None, npt.NDArray[np.int32] | None]:
        """Count and take the drafts of every row; `surplus` tokens are beyond the known ones."""
        requests = self._state.requests
        if not requests.any_drafts:
            return None, None
        running = slots[: plan.num_running]
        num_drafts = np.zeros(len(slots), dtype=np.int64)
        num_drafts[: plan.num_running] = np.clip(
            surplus[: plan.num_running], 0, requests.num_drafts[running]
        )
        draft_ids = requests.drafts[slots]
        requests.num_drafts[running] = 0
        if plan.padded:
            for row, admission in enumerate(plan.admissions, plan.num_running):
                num_drafts[row] = plan.padded.get(admission.slot, 0)
                draft_ids[row] = -1
        return num_drafts, draft_ids

    def _returning(self, plan: Plan, slots: IntArray) -> dict[int, tuple[int, ...]]:
        """Collect all tokens of known requests that the previous step left out, by row."""
        state = self._state
        requests = state.requests
        last = state.step - 1
        missed = requests.last_step[slots] != last
        if last <= state.forgotten_step:
            missed[:] = True
        rows = np.flatnonzero(missed).tolist()
        first = plan.num_running
        return {
            row: tuple(requests.known_tokens(int(slots[row])).tolist())
            for row in rows
            if row < first or plan.admissions[row - first].resumed
        }

    def _expect_tokens(
        self, slots: IntArray, chunks: npt.NDArray[np.bool_], num_drafts: IntArray | None
    ) -> None:
        """Count the output tokens that rows past their prefill will bring."""
        requests = self._state.requests
        sampling = slots[~chunks]
        expected = 1 if num_drafts is None else 1 + num_drafts[~chunks]
        requests.num_placeholders[sampling] += expected
        count = self._state.num_spec_tokens
        if count:
            requests.num_drafts[sampling] = count
            requests.drafts[sampling] = -1

    def _take_in_contract(
        self, output: SchedulerOutput, token_ids: npt.NDArray[np.int32], counts: IntArray
    ) -> StepTokens:
        ids = tuple(output.num_scheduled_tokens)
        drafts = output.scheduled_spec_decode_tokens
        return self._take_in(
            ids,
            self._slots(ids),
            np.array(list(output.num_scheduled_tokens.values()), dtype=np.int64),
            np.array([len(drafts.get(i, ())) for i in ids], dtype=np.int64) if drafts else None,
            token_ids,
            counts,
        )

    def _take_in(
        self,
        ids: tuple[str, ...],
        slots: IntArray,
        num_tokens: IntArray,
        num_drafts: IntArray | None,
        token_ids: npt.NDArray[np.int32],
        counts: IntArray,
    ) -> StepTokens:
        """Take in the rows of requests that are still alive; `slots` holds -1 for the others."""
        requests = self._state.requests
        alive = np.flatnonzero(slots >= 0)
        if len(alive) < len(slots):
            ids = tuple(ids[row] for row in alive.tolist())
            slots, num_tokens = slots[alive], num_tokens[alive]
            num_drafts = None if num_drafts is None else num_drafts[alive]
            token_ids, counts = token_ids[alive], counts[alive]
        rows = StepRows(
            ids,
            slots,
            num_tokens,
            num_drafts,
            requests.stop_from[slots],
            requests.length_limit[slots],
            requests.eos[slots],
            bool(requests.stops_slowly[slots].any()),
        )
        return take_in(self._state, rows, token_ids, counts)

    def _slots(self, ids: Sequence[str]) -> IntArray:
        slot_of = self._state.requests.slot_of
        return np.array([slot_of.get(i, -1) for i in ids], dtype=np.int64)
