"""The persistent batch in place.

A row is the number of a request's slot in `RequestStore`. A step that changes nothing but cursors
costs a few array operations over the rows; what enters or leaves costs one integer a row.

Source: ``_update_states`` and ``_prepare_inputs`` of ``vllm/v1/worker/gpu_model_runner.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from servespec.fast.batch.attention_state import attention_state
from servespec.fast.batch.block_table import BlockTable
from servespec.fast.batch.buffers import IntArray, StepBuffer
from servespec.fast.batch.gdn_metadata import GdnLayout, gdn_layout, verified_drafts
from servespec.fast.batch.inputs import AttentionInputs, GdnInputs, StepInputs
from servespec.fast.batch.metadata import leading_decodes
from servespec.fast.batch.record import record_of
from servespec.fast.batch.reorder import region_keys, swaps_to_sort
from servespec.fast.batch.requests import RequestStore
from servespec.reference.contracts import (
    BatchRecord,
    EngineConfig,
    RequestError,
    SchedulerOutput,
    UnknownRequestError,
)

__all__ = ["InputBatch"]


class _Buffers:
    """The arrays of a step, as large as any step may be."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        rows, tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens

        def buffer(*shape: int, dtype: npt.DTypeLike) -> StepBuffer:
            return StepBuffer(shape, dtype, device)

        self.token_ids = buffer(tokens, dtype=np.int64)
        self.positions = buffer(tokens, dtype=np.int64)
        self.logits_indices = buffer(tokens, dtype=np.int64)
        self.query_start_loc = buffer(rows + 1, dtype=np.int32)
        self.seq_lens = buffer(rows, dtype=np.int32)
        self.num_computed_tokens = buffer(rows, dtype=np.int32)
        self.num_scheduled_tokens = buffer(rows, dtype=np.int32)
        self.num_draft_tokens = buffer(rows, dtype=np.int32)
        self.sampled = buffer(rows, dtype=np.bool_)
        self.has_initial_state = buffer(rows, dtype=np.bool_)
        groups = range(len(config.cache.groups))
        self.block_tables = [buffer(rows, 1, dtype=np.int32) for _ in groups]
        self.slot_mappings = [buffer(tokens, dtype=np.int64) for _ in groups]
        self.state_indices = [buffer(rows, dtype=np.int32) for _ in groups]


class InputBatch:
    """Rows, requests and the buffers of a step.

    Parameters
    ----------
    config : EngineConfig
    device : str or torch.device
        Where the tensors of `StepInputs` live.
    """

    def __init__(self, config: EngineConfig, device: str | torch.device = "cpu") -> None:
        self._config = config
        self._device = torch.device(device)
        speculative = config.speculative
        self._num_spec = 0 if speculative is None else speculative.num_speculative_tokens
        self._method = None if speculative is None else speculative.method
        self._store = RequestStore(config)
        self._buffers = _Buffers(config, self._device)
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
                store.replace_blocks(slot, block_ids or ((),) * len(store.tables))
                store.num_accepted_tokens[slot] = 1
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
        store, buffers = self._store, self._buffers
        num_reqs = len(self._req_ids)
        planned = output.num_scheduled_tokens
        counts = np.array([planned[req_id] for req_id in self._req_ids], np.int64)
        swaps = self._reorder(counts)

        slots = self._rows[:num_reqs]
        computed = store.num_computed_tokens[slots]
        drafts = store.num_draft_tokens[slots]
        seq_lens = computed + counts
        self._check(counts, seq_lens)
        starts = buffers.query_start_loc.reserve(num_reqs + 1)
        starts[0] = 0
        np.cumsum(counts, out=starts[1 : num_reqs + 1])
        num_tokens = int(starts[num_reqs])

        row_of = np.repeat(np.arange(num_reqs), counts)
        token_slots = slots[row_of]
        positions = buffers.positions.reserve(num_tokens)[:num_tokens]
        np.subtract(np.arange(num_tokens), (starts[:num_reqs] - computed)[row_of], out=positions)
        buffers.token_ids.reserve(num_tokens)[:num_tokens] = store.token_ids[token_slots, positions]
        _put(buffers.seq_lens, seq_lens)
        _put(buffers.num_computed_tokens, computed)
        _put(buffers.num_scheduled_tokens, counts)
        _put(buffers.num_draft_tokens, drafts)
        _put(buffers.sampled, seq_lens >= store.num_tokens[slots])
        num_logits = self._set_logits_indices(starts[1 : num_reqs + 1], drafts)
        returned, stored = attention_state(
            computed,
            counts,
            drafts,
            self._method,
            self._config.scheduler.enable_chunked_prefill,
        )
        step = StepInputs(
            req_ids=list(self._req_ids),
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            max_query_len=int(counts.max(initial=0)),
            token_ids=buffers.token_ids.publish(num_tokens),
            positions=buffers.positions.publish(num_tokens),
            query_start_loc=buffers.query_start_loc.publish(num_reqs + 1),
            seq_lens=buffers.seq_lens.publish(num_reqs),
            num_computed_tokens=buffers.num_computed_tokens.publish(num_reqs),
            num_scheduled_tokens=buffers.num_scheduled_tokens.publish(num_reqs),
            logits_indices=buffers.logits_indices.publish(num_logits),
            sampled=buffers.sampled.publish(num_reqs),
            num_draft_tokens=buffers.num_draft_tokens.publish(num_reqs),
            attn_state=returned,
            swaps=swaps,
        )

        num_decodes = leading_decodes(counts, 1 + self._num_spec)
        verified = verified_drafts(counts, drafts) if drafts.any() else None
        layout = gdn_layout(
            counts,
            computed,
            store.num_prompt_tokens[slots],
            verified,
            self._config.scheduler.quirks.gdn_fresh_decode,
        )
        _put(buffers.has_initial_state, computed > 0)
        for index, group in enumerate(self._config.cache.groups):
            if group.layer_type == "linear_attention":
                step.gdn.append(self._gdn_inputs(index, slots, computed, seq_lens, layout))
                continue
            table = store.tables[index]
            mapping = buffers.slot_mappings[index].reserve(num_tokens)
            mapping[:num_tokens] = table.slots_of(token_slots, positions)
            step.attention.append(
                AttentionInputs(
                    block_table=self._block_table(index, table, slots),
                    slot_mapping=buffers.slot_mappings[index].publish(num_tokens),
                    num_decodes=num_decodes,
                    num_prefills=num_reqs - num_decodes,
                    num_decode_tokens=int(starts[num_decodes]),
                    attn_state=stored,
                )
            )
        self._step = step
        return step

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

    def _check(self, counts: IntArray, seq_lens: IntArray) -> None:
        """Refuse a plan that would read tokens or blocks which do not exist."""
        store = self._store
        slots = self._rows[: len(counts)]
        drafts = store.num_draft_tokens[slots]
        known = store.num_tokens[slots] + drafts
        wrong = (counts < 1 + drafts) | (seq_lens > known)
        if wrong.any():
            row = int(wrong.argmax())
            raise RequestError(
                f"request {self._req_ids[row]!r}: {counts[row]} tokens scheduled after "
                f"{seq_lens[row] - counts[row]} computed ones: must be at least 1 and the "
                f"{drafts[row]} drafts, and end within the {known[row]} known ones"
            )
        for table, group in zip(store.tables, self._config.cache.groups, strict=True):
            if group.layer_type == "full_attention":
                short = seq_lens > table.num_blocks[slots] * table.kernel_block_size
                if short.any():
                    row = int(short.argmax())
                    held = table.num_blocks[slots[row]] // table.ratio
                    raise RequestError(
                        f"request {self._req_ids[row]!r}: {held} blocks of {table.block_size} "
                        f"tokens cannot hold {seq_lens[row]} tokens"
                    )

    def _set_logits_indices(self, ends: IntArray, drafts: IntArray) -> int:
        """Fill the tokens whose logits are wanted and return how many there are."""
        if not drafts.any():
            _put(self._buffers.logits_indices, ends - 1)
            return len(ends)
        wanted = drafts + 1
        last = np.cumsum(wanted)
        indices = np.arange(last[-1]) + np.repeat(ends - last, wanted)
        _put(self._buffers.logits_indices, indices)
        return len(indices)

    def _block_table(self, index: int, table: BlockTable, slots: IntArray) -> torch.Tensor:
        width = int(table.num_blocks[slots].max(initial=0))
        buffer = self._buffers.block_tables[index]
        buffer.reserve(len(slots), width)[: len(slots), :width] = table.ids[slots, :width]
        return buffer.publish(len(slots), width)

    def _gdn_inputs(
        self,
        index: int,
        slots: IntArray,
        computed: IntArray,
        seq_lens: IntArray,
        layout: GdnLayout,
    ) -> GdnInputs:
        buffers, table = self._buffers, self._store.tables[index]
        previous = None
        if self._config.cache.mamba_cache_mode == "align":
            starts = (seq_lens - 1) // table.block_size
            before = np.maximum(computed - 1, 0) // table.block_size
            previous = self._tensor(table.columns(slots, before, 1)[:, 0])
        else:
            starts = np.zeros_like(seq_lens)
        columns = table.columns(slots, starts, 1 + self._num_spec)
        _put(buffers.state_indices[index], columns[:, 0])
        num_reqs = len(slots)
        inputs = GdnInputs(
            state_indices=buffers.state_indices[index].publish(num_reqs),
            has_initial_state=buffers.has_initial_state.publish(num_reqs),
            num_decodes=layout.num_decodes,
            num_prefills=layout.num_prefills,
            num_decode_tokens=layout.num_decode_tokens,
            num_prefill_tokens=layout.num_prefill_tokens,
            previous_state_indices=previous,
            num_spec_decodes=layout.num_spec_decodes,
            num_spec_decode_tokens=layout.num_spec_decode_tokens,
        )
        spec = layout.spec
        if spec is not None:
            accepted = self._store.num_accepted_tokens[slots[spec.mask]].astype(np.int32)
            inputs.spec_sequence_masks = self._tensor(spec.mask)
            inputs.spec_state_indices = self._tensor(columns[spec.mask])
            inputs.num_accepted_tokens = self._tensor(accepted)
            inputs.spec_query_start_loc = self._tensor(spec.query_start_locs[0])
            inputs.non_spec_query_start_loc = self._tensor(spec.query_start_locs[1])
            inputs.spec_token_index = self._tensor(spec.token_indices[0])
            inputs.non_spec_token_index = self._tensor(spec.token_indices[1])
        return inputs

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def append_sampled(self, sampled: Mapping[str, tuple[int, ...]]) -> None:
        """Note what a step sampled, so that the next one finds it among the known tokens.

        Parameters
        ----------
        sampled : mapping of str to tuple of int
            Kept tokens of each request; rows without an entry were computed and thrown away.
        """
        tokens = [sampled.get(req_id, ()) for req_id in self._req_ids]
        slots = self._rows[: len(tokens)]
        counts = np.array([len(kept) for kept in tokens], np.int64)
        self._store.append_tokens(slots, counts, [token for kept in tokens for token in kept])
        self._store.num_accepted_tokens[slots] = np.maximum(counts, 1)

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


def _put(buffer: StepBuffer, values: npt.NDArray[np.generic]) -> None:
    buffer.reserve(len(values))[: len(values)] = values
