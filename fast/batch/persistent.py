"""The persistent batch in place.

A row is the number of a request's slot in `RequestStore`. A step that changes nothing but cursors
costs a few array operations over the rows; what enters or leaves costs one integer a row.

Source: ``_update_states`` of ``vllm/v1/worker/gpu_model_runner.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from servespec.fast.batch.buffers import POISON, IntArray
from servespec.fast.batch.inputs import StateMoves, StepInputs
from servespec.fast.batch.prepare import StepBuilder
from servespec.fast.batch.record import record_of
from servespec.fast.batch.reorder import region_keys, swaps_to_sort
from servespec.fast.batch.requests import RequestStore
from servespec.fast.batch.state_moves import saves_at_boundaries
from servespec.reference.contracts import (
    BatchRecord,
    EngineConfig,
    SchedulerOutput,
    UnknownRequestError,
)

__all__ = ["InputBatch"]


class InputBatch:
    """Rows, requests and the buffers of a step.

    Parameters
    ----------
    config : EngineConfig
    device : str or torch.device
        Where the tensors of `StepInputs` live.
    """

    def __init__(self, config: EngineConfig, device: str | torch.device = "cpu") -> None:
        speculative = config.speculative
        cache = config.cache
        self._num_spec = 0 if speculative is None else speculative.num_speculative_tokens
        self._forgets_accepted = config.scheduler.quirks.gdn_forgets_accepted
        aligned = cache.has_gdn and cache.mamba_cache_mode == "align"
        self._state_block_size = cache.block_size if aligned else None
        self._store = RequestStore(config)
        self._builder = StepBuilder(config, torch.device(device))
        self._req_ids: list[str] = []
        self._rows = np.zeros(config.scheduler.max_num_seqs, np.int64)
        self._step: StepInputs | None = None

    @property
    def req_ids(self) -> list[str]:
        """The request of each row."""
        return list(self._req_ids)

    def update_states(self, output: SchedulerOutput) -> None:
        """Apply a plan to the rows and to what is known of the requests, without reordering.

        Parameters
        ----------
        output : SchedulerOutput

        Raises
        ------
        UnknownRequestError
            The plan names a request that this worker has never seen; nothing has changed then.
        """
        store = self._store
        cached = output.scheduled_cached_reqs
        self._check_known(output)
        self._step = None
        scheduled, finished = output.num_scheduled_tokens, output.finished_req_ids
        resumed = cached.resumed_req_ids
        holes = [
            row
            for row, req_id in enumerate(self._req_ids)
            if req_id not in scheduled or req_id in finished or req_id in resumed
        ]
        store.has_row[self._rows[holes]] = False
        for req_id in finished:
            store.drop(req_id)

        entering = [(new.req_id, store.add(new)) for new in output.scheduled_new_reqs]
        if cached.req_ids:
            entering += self._update_cached(output)
        self._set_drafts(output)
        self._fill(holes, entering)

    def _check_known(self, output: SchedulerOutput) -> None:
        known, finished = self._store.slot_of, output.finished_req_ids
        new = {request.req_id for request in output.scheduled_new_reqs}
        for req_id in (*output.scheduled_cached_reqs.req_ids, *output.num_scheduled_tokens):
            if (req_id not in known or req_id in finished) and req_id not in new:
                raise UnknownRequestError(req_id)

    def _update_cached(self, output: SchedulerOutput) -> list[tuple[str, int]]:
        """Bring known requests up to date and return those that need a row."""
        store = self._store
        cached = output.scheduled_cached_reqs
        slots = np.array([store.slot_of[req_id] for req_id in cached.req_ids])
        entering = [
            (req_id, int(slot))
            for req_id, slot, has_row in zip(
                cached.req_ids, slots, store.has_row[slots].tolist(), strict=True
            )
            if not has_row
        ]
        for req_id, slot in entering:
            token_ids = cached.all_token_ids.get(req_id)
            if token_ids is not None:
                store.set_tokens(slot, token_ids)
        store.num_computed_tokens[slots] = cached.num_computed_tokens
        limit = store.num_prompt_tokens[slots] + np.array(cached.num_output_tokens)
        store.num_tokens[slots] = np.minimum(store.num_tokens[slots], limit)
        for req_id, slot, block_ids in zip(
            cached.req_ids, slots.tolist(), cached.new_block_ids, strict=True
        ):
            if req_id in cached.resumed_req_ids:
                store.restart(slot, block_ids or ((),) * len(store.tables))
            elif block_ids is not None:
                store.append_blocks(slot, block_ids)
        return entering

    def _set_drafts(self, output: SchedulerOutput) -> None:
        store = self._store
        slots = np.array([store.slot_of[req_id] for req_id in output.num_scheduled_tokens], int)
        store.num_draft_tokens[slots] = 0
        drafts = output.scheduled_spec_decode_tokens
        if drafts:
            store.set_drafts(
                np.array([store.slot(req_id) for req_id in drafts]),
                np.array([len(token_ids) for token_ids in drafts.values()]),
                [token for token_ids in drafts.values() for token in token_ids],
            )

    def _fill(self, holes: list[int], entering: list[tuple[str, int]]) -> None:
        """Put requests into the lowest holes, then close the rest from the highest row down."""
        for row, (req_id, slot) in zip(holes, entering, strict=False):
            self._req_ids[row] = req_id
            self._rows[row] = slot
        for req_id, slot in entering[len(holes) :]:
            row = len(self._req_ids)
            if row == len(self._rows):
                self._rows = np.append(self._rows, np.zeros_like(self._rows))
            self._req_ids.append(req_id)
            self._rows[row] = slot
        for _, slot in entering:
            self._store.has_row[slot] = True
            if self._forgets_accepted:
                self._store.num_accepted_tokens[slot] = 1

        open_rows = holes[len(entering) :]
        last = len(self._req_ids) - 1
        lowest = 0
        while lowest < len(open_rows):
            if open_rows[-1] == last:
                open_rows.pop()
            else:
                row = open_rows[lowest]
                self._req_ids[row] = self._req_ids[last]
                self._rows[row] = self._rows[last]
                lowest += 1
            self._req_ids.pop()
            last -= 1

    def prepare(self, output: SchedulerOutput) -> StepInputs:
        """Bring the batch up to a plan and lay out the step.

        Parameters
        ----------
        output : SchedulerOutput
            A plan without tokens gives inputs without rows.

        Returns
        -------
        StepInputs
            Views that the next call overwrites.

        Raises
        ------
        UnknownRequestError
            The plan names a request that this worker has never seen.
        RequestError
            The plan schedules tokens beyond those known, or more than the blocks can hold.
        """
        self.update_states(output)
        planned = output.num_scheduled_tokens
        counts = np.array([planned[req_id] for req_id in self._req_ids], np.int64)
        swaps = self._reorder(counts)
        slots = self._rows[: len(counts)]
        self._step = self._builder.build(self._store, list(self._req_ids), slots, counts, swaps)
        return self._step

    def _reorder(self, counts: IntArray) -> list[tuple[int, int]]:
        slots = self._rows[: len(counts)]
        swaps = swaps_to_sort(
            region_keys(
                self._store.num_computed_tokens[slots],
                counts,
                self._store.num_prompt_tokens[slots],
                1 + self._num_spec,
            )
        )
        for a, b in swaps:
            self._req_ids[a], self._req_ids[b] = self._req_ids[b], self._req_ids[a]
            for column in (slots, counts):
                column[a], column[b] = column[b], column[a]
        return swaps

    def append_sampled(self, sampled: Mapping[str, tuple[int, ...]]) -> None:
        """Note what a step sampled, so that the next one finds it among the known tokens.

        Parameters
        ----------
        sampled : mapping of str to tuple of int
            Kept tokens of each request; rows without an entry were computed and thrown away.
        """
        store = self._store
        tokens = [sampled.get(req_id, ()) for req_id in self._req_ids]
        slots = self._rows[: len(tokens)]
        counts = np.array([len(kept) for kept in tokens], np.int64)
        store.append_tokens(slots, counts, [token for kept in tokens for token in kept])
        accepted = np.maximum(counts, 1)
        if self._state_block_size is not None:
            saves = saves_at_boundaries(
                store.last_seq_len[slots],
                store.num_draft_tokens[slots],
                accepted,
                self._state_block_size,
            )
            # What ends in its own column was copied to the front of it.
            accepted[saves.rows[saves.sources == saves.destinations]] = 1
        store.num_accepted_tokens[slots] = accepted

    def state_saves(self, sampled: Mapping[str, tuple[int, ...]]) -> list[StateMoves]:
        """Return the state copies to make once a step has sampled, before `append_sampled`.

        Parameters
        ----------
        sampled : mapping of str to tuple of int

        Returns
        -------
        list of StateMoves
            One for each GDN group; empty where states are not aligned.
        """
        if self._state_block_size is None:
            return []
        store = self._store
        slots = self._rows[: len(self._req_ids)]
        saves = saves_at_boundaries(
            store.last_seq_len[slots],
            store.num_draft_tokens[slots],
            np.array([max(1, len(sampled.get(req_id, ()))) for req_id in self._req_ids], np.int64),
            self._state_block_size,
        )
        moving = saves.only((saves.sources != saves.destinations) | (saves.offsets > 0))
        return self._builder.moves_of_groups(store, slots, moving)

    def poison(self) -> None:
        """Overwrite all that no live request owns, between two steps, so that a stale read shows.

        Free slots, what stands behind the tokens and rows in use, and the buffers of a step; the
        views of the latest `StepInputs` are lost.
        """
        self._step = None
        self._store.poison()
        self._builder.buffers.poison()
        self._rows[len(self._req_ids) :] = POISON

    def record(self) -> BatchRecord:
        """Return the latest prepared step as a contract.

        Raises
        ------
        ValueError
            No step has been prepared since the rows last changed.
        """
        if self._step is None:
            raise ValueError("InputBatch.record: no step has been prepared")
        tables = [
            tuple(table.pool_blocks(self._store.slot_of[req_id]) for table in self._store.tables)
            for req_id in self._req_ids
        ]
        return record_of(self._step, tuple(tables))
