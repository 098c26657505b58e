"""From rows to what a model reads, one array operation for each column.

Source: ``_prepare_inputs`` and ``_build_attention_metadata`` of
``vllm/v1/worker/gpu_model_runner.py`` and ``vllm_ascend/worker/model_runner_v1.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from servespec.fast.batch.attention_state import attention_state
from servespec.fast.batch.buffers import Array, IntArray, StepBuffer
from servespec.fast.batch.gdn_metadata import GdnLayout, gdn_layout, verified_drafts
from servespec.fast.batch.graph import GraphTable
from servespec.fast.batch.inputs import (
    AttentionInputs,
    GdnInputs,
    GraphInputs,
    StateMoves,
    StepInputs,
)
from servespec.fast.batch.metadata import leading_decodes
from servespec.fast.batch.padding import pad_rows
from servespec.fast.batch.requests import RequestStore
from servespec.fast.batch.state_moves import ColumnMoves, moves_to_step
from servespec.reference.contracts import (
    AttentionState,
    EngineConfig,
    GraphDispatch,
    RequestError,
)

__all__ = ["StepBuilder"]


class _Buffers:
    """The arrays of a step, as large as the largest step may be, one dummy row included."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        rows, tokens = config.scheduler.max_num_seqs + 1, config.scheduler.max_num_batched_tokens

        def buffer(*shape: int, dtype: npt.DTypeLike) -> StepBuffer:
            return StepBuffer(shape, dtype, device)

        self.token_ids = buffer(tokens, dtype=np.int64)
        self.positions = buffer(tokens, dtype=np.int64)
        self.logits_indices = buffer(tokens, dtype=np.int64)
        self.query_start_loc = buffer(rows + 1, dtype=np.int32)
        self.padded_start_loc = buffer(rows + 1, dtype=np.int32)
        self.seq_lens = buffer(rows, dtype=np.int32)
        self.num_computed_tokens = buffer(rows, dtype=np.int32)
        self.num_scheduled_tokens = buffer(rows, dtype=np.int32)
        self.num_draft_tokens = buffer(rows, dtype=np.int32)
        self.sampled = buffer(rows, dtype=np.bool_)
        self.is_prefilling = buffer(rows, dtype=np.bool_)
        self.has_initial_state = buffer(rows, dtype=np.bool_)
        groups = range(len(config.cache.groups))
        self.block_tables = [buffer(rows, 1, dtype=np.int32) for _ in groups]
        self.slot_mappings = [buffer(tokens, dtype=np.int64) for _ in groups]
        self.state_indices = [buffer(rows, dtype=np.int32) for _ in groups]

    def poison(self) -> None:
        """Overwrite everything, as `StepBuffer.poison`."""
        for value in vars(self).values():
            for buffer in value if isinstance(value, list) else [value]:
                buffer.poison()


@dataclass(slots=True)
class _Columns:
    """The columns of a step's rows, ``[R]`` int64 each."""

    slots: IntArray
    counts: IntArray
    computed: IntArray
    drafts: IntArray
    prompt: IntArray
    accepted: IntArray
    seq_lens: IntArray


class StepBuilder:
    """Lays out steps in buffers that it keeps.

    Parameters
    ----------
    config : EngineConfig
    device : torch.device
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        scheduler, speculative = config.scheduler, config.speculative
        self.buffers = _Buffers(config, device)
        self._device = device
        self._cache = config.cache
        self._max_num_seqs = scheduler.max_num_seqs
        self._chunked_prefill = scheduler.enable_chunked_prefill
        self._quirks = scheduler.quirks
        self._num_spec = 0 if speculative is None else speculative.num_speculative_tokens
        self._method = None if speculative is None else speculative.method
        self._aligned = config.cache.mamba_cache_mode == "align"
        self._graphs = (
            None
            if config.graph is None
            else GraphTable(config.graph, self._num_spec, scheduler.max_num_seqs)
        )
        self._groups = {
            kind: [
                index for index, group in enumerate(config.cache.groups) if group.layer_type == kind
            ]
            for kind in ("full_attention", "linear_attention")
        }

    def build(
        self,
        store: RequestStore,
        req_ids: list[str],
        slots: IntArray,
        counts: IntArray,
        swaps: list[tuple[int, int]],
    ) -> StepInputs:
        """Lay out one step.

        Parameters
        ----------
        store : RequestStore
            Learns how far each request gets, and that moved states were accepted once.
        req_ids : list of str
        slots, counts : numpy.ndarray
            ``[R]``, the request slot and the scheduled tokens of each row, in order.
        swaps : list of (int, int)

        Returns
        -------
        StepInputs

        Raises
        ------
        RequestError
        """
        computed = store.num_computed_tokens[slots]
        columns = _Columns(
            slots=slots,
            counts=counts,
            computed=computed,
            drafts=store.num_draft_tokens[slots],
            prompt=store.num_prompt_tokens[slots],
            accepted=store.num_accepted_tokens[slots],
            seq_lens=computed + counts,
        )
        self._check(store, req_ids, columns)
        moves = self._advance(store, columns)
        step = self._inputs(store, req_ids, columns, swaps)
        _, stored = states = attention_state(
            computed, counts, columns.drafts, self._method, self._chunked_prefill
        )
        step.attn_state = states[0]
        num_reqs, num_tokens = len(req_ids), step.num_tokens
        step.attention = self._attention(store, columns, num_reqs, num_tokens, stored)
        layout = self._layout(columns)
        step.gdn = self._gdn(store, columns, layout, num_reqs)
        if moves is not None:
            for group, moved in zip(
                step.gdn, self.moves_of_groups(store, slots, moves), strict=True
            ):
                group.moves = moved
                previous = group.state_indices.clone()
                previous[moved.rows] = moved.ssm_sources.to(torch.int32)
                group.previous_state_indices = previous
        if self._graphs is not None:
            uniform = self._graphs.is_uniform(counts, computed)
            step.dispatch = dispatch = self._graphs.dispatch(num_tokens, uniform)
            if dispatch.mode == "FULL":
                rows = self._pad(columns, step, self._graphs, dispatch)
                step.graph = GraphInputs(
                    num_reqs=rows,
                    token_ids=self.buffers.token_ids.publish(dispatch.num_tokens),
                    positions=self.buffers.positions.publish(dispatch.num_tokens),
                    query_start_loc=self.buffers.padded_start_loc.publish(rows + 1),
                    gdn_query_start_loc=self.buffers.query_start_loc.publish(rows + 1),
                    seq_lens=self.buffers.seq_lens.publish(rows),
                    attention=self._attention(store, columns, rows, dispatch.num_tokens, stored),
                    gdn=self._gdn(store, columns, self._layout(columns, rows - num_reqs), rows),
                )
        return step

    def _check(self, store: RequestStore, req_ids: list[str], columns: _Columns) -> None:
        """Refuse a plan that would read tokens or blocks which do not exist."""
        counts, drafts, seq_lens = columns.counts, columns.drafts, columns.seq_lens
        known = store.num_tokens[columns.slots] + drafts
        wrong = (counts < 1 + drafts) | (seq_lens > known)
        if wrong.any():
            row = int(wrong.argmax())
            raise RequestError(
                f"request {req_ids[row]!r}: {counts[row]} tokens scheduled after "
                f"{columns.computed[row]} computed ones: must be at least 1 and the "
                f"{drafts[row]} drafts, and end within the {known[row]} known ones"
            )
        for index in self._groups["full_attention"]:
            table = store.tables[index]
            held = table.num_blocks[columns.slots]
            short = seq_lens > held * table.kernel_block_size
            if short.any():
                row = int(short.argmax())
                raise RequestError(
                    f"request {req_ids[row]!r}: {held[row] // table.ratio} blocks of "
                    f"{table.block_size} tokens cannot hold {seq_lens[row]} tokens"
                )

    def _advance(self, store: RequestStore, columns: _Columns) -> ColumnMoves | None:
        """Find the moves of aligned states, and note how far each request gets."""
        moves = None
        if self._aligned and self._groups["linear_attention"]:
            moves = moves_to_step(
                columns.computed,
                store.last_seq_len[columns.slots],
                columns.seq_lens,
                columns.accepted,
                self._cache.block_size,
            )
            columns.accepted[moves.rows] = 1
            store.num_accepted_tokens[columns.slots] = columns.accepted
        store.last_seq_len[columns.slots] = columns.seq_lens
        return moves

    def _inputs(
        self,
        store: RequestStore,
        req_ids: list[str],
        columns: _Columns,
        swaps: list[tuple[int, int]],
    ) -> StepInputs:
        """Fill everything that is one for all groups."""
        buffers, counts, num_reqs = self.buffers, columns.counts, len(req_ids)
        starts = buffers.query_start_loc.reserve(num_reqs + 1)
        starts[0] = 0
        np.cumsum(counts, out=starts[1 : num_reqs + 1])
        num_tokens = int(starts[num_reqs])
        row_of = np.repeat(np.arange(num_reqs), counts)
        positions = buffers.positions.reserve(num_tokens)[:num_tokens]
        shifts = columns.computed - starts[:num_reqs]
        np.add(np.arange(num_tokens), shifts[row_of], out=positions)
        buffers.token_ids.put(store.token_ids[columns.slots[row_of], positions])
        for index in self._groups["full_attention"]:
            slots = store.tables[index].slots_of(columns.slots[row_of], positions)
            buffers.slot_mappings[index].put(slots)
        for buffer, values in (
            (buffers.seq_lens, columns.seq_lens),
            (buffers.num_computed_tokens, columns.computed),
            (buffers.num_scheduled_tokens, counts),
            (buffers.num_draft_tokens, columns.drafts),
            (buffers.sampled, columns.seq_lens >= store.num_tokens[columns.slots]),
            (buffers.is_prefilling, columns.computed < columns.prompt),
            (buffers.logits_indices, _logits_indices(starts[1 : num_reqs + 1], columns.drafts)),
        ):
            buffer.put(values)
        return StepInputs(
            req_ids=req_ids,
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            max_query_len=int(counts.max(initial=0)),
            token_ids=buffers.token_ids.publish(num_tokens),
            positions=buffers.positions.publish(num_tokens),
            query_start_loc=buffers.query_start_loc.publish(num_reqs + 1),
            seq_lens=buffers.seq_lens.publish(num_reqs),
            num_computed_tokens=buffers.num_computed_tokens.publish(num_reqs),
            num_scheduled_tokens=buffers.num_scheduled_tokens.publish(num_reqs),
            logits_indices=buffers.logits_indices.publish(num_reqs + int(columns.drafts.sum())),
            sampled=buffers.sampled.publish(num_reqs),
            num_draft_tokens=buffers.num_draft_tokens.publish(num_reqs),
            is_prefilling=buffers.is_prefilling.publish(num_reqs),
            attn_state=AttentionState.PREFILL_NO_CACHE,
            swaps=swaps,
        )

    def _attention(
        self,
        store: RequestStore,
        columns: _Columns,
        rows: int,
        tokens: int,
        stored: AttentionState,
    ) -> list[AttentionInputs]:
        """Give every full-attention group its table and slots, for `rows` rows with dummies."""
        buffers, num_reqs = self.buffers, len(columns.counts)
        decodes = leading_decodes(columns.counts, 1 + self._num_spec)
        decode_tokens = int(columns.counts[:decodes].sum())
        dummies = rows - num_reqs
        if decodes == num_reqs:
            decodes += dummies
        built = []
        for index in self._groups["full_attention"]:
            table, buffer = store.tables[index], buffers.block_tables[index]
            width = int(table.num_blocks[columns.slots].max(initial=0))
            buffer.put(table.ids[columns.slots, :width], rows)
            built.append(
                AttentionInputs(
                    block_table=buffer.publish(rows, width),
                    slot_mapping=buffers.slot_mappings[index].publish(tokens),
                    num_decodes=decodes,
                    num_prefills=rows - decodes,
                    num_decode_tokens=decode_tokens,
                    attn_state=stored,
                )
            )
        return built

    def _layout(self, columns: _Columns, dummies: int = 0) -> GdnLayout:
        """Divide the rows for GDN layers; a dummy row has no tokens there."""
        counts, drafts = columns.counts, columns.drafts
        verified = verified_drafts(counts, drafts) if drafts.any() else None
        return gdn_layout(
            np.pad(counts, (0, dummies)),
            np.pad(columns.computed, (0, dummies)),
            np.pad(columns.prompt, (0, dummies)),
            None if verified is None else np.pad(verified, (0, dummies), constant_values=-1),
            self._quirks.gdn_fresh_decode,
        )

    def _gdn(
        self, store: RequestStore, columns: _Columns, layout: GdnLayout, rows: int
    ) -> list[GdnInputs]:
        """Give every GDN group its state blocks, for `rows` rows with dummies."""
        buffers, num_reqs = self.buffers, len(columns.counts)
        buffers.has_initial_state.put(columns.computed > 0, rows)
        accepted = np.ones(rows, np.int32)
        accepted[:num_reqs] = columns.accepted
        built = []
        for index in self._groups["linear_attention"]:
            table = store.tables[index]
            if self._aligned:
                first = (columns.seq_lens - 1) // table.block_size
            else:
                first = np.zeros_like(columns.seq_lens)
            blocks = np.zeros((rows, 1 + self._num_spec), np.int32)
            blocks[:num_reqs] = table.columns(columns.slots, first, 1 + self._num_spec)
            buffers.state_indices[index].put(blocks[:, 0])
            inputs = GdnInputs(
                state_indices=buffers.state_indices[index].publish(rows),
                has_initial_state=buffers.has_initial_state.publish(rows),
                num_decodes=layout.num_decodes,
                num_prefills=layout.num_prefills,
                num_decode_tokens=layout.num_decode_tokens,
                num_prefill_tokens=layout.num_prefill_tokens,
                num_spec_decodes=layout.num_spec_decodes,
                num_spec_decode_tokens=layout.num_spec_decode_tokens,
            )
            if self._num_spec and not self._quirks.gdn_ignores_accepted:
                initial = np.take_along_axis(blocks, accepted[:, None] - 1, axis=1)[:, 0]
                inputs.initial_state_indices = self._tensor(initial)
                inputs.row_num_accepted_tokens = self._tensor(accepted)
            spec = layout.spec
            if spec is not None:
                inputs.spec_sequence_masks = self._tensor(spec.mask)
                inputs.spec_state_indices = self._tensor(blocks[spec.listed])
                inputs.num_accepted_tokens = self._tensor(accepted[spec.listed])
                inputs.spec_query_start_loc = self._tensor(spec.query_start_locs[0])
                inputs.non_spec_query_start_loc = self._tensor(spec.query_start_locs[1])
                inputs.spec_token_index = self._tensor(spec.token_indices[0])
                inputs.non_spec_token_index = self._tensor(spec.token_indices[1])
            built.append(inputs)
        return built

    def _pad(
        self, columns: _Columns, step: StepInputs, graphs: GraphTable, dispatch: GraphDispatch
    ) -> int:
        """Write dummies behind the rows and tokens; return the rows with dummies."""
        buffers, num_reqs, tokens = self.buffers, step.num_reqs, dispatch.num_tokens
        starts = buffers.query_start_loc.host[: num_reqs + 1]
        padded = buffers.padded_start_loc.reserve(max(num_reqs, dispatch.num_reqs or 0) + 2)
        padded[: num_reqs + 1] = starts
        rows = pad_rows(padded, num_reqs, tokens, dispatch.num_reqs, graphs.mode, graphs.query_len)
        buffers.query_start_loc.put(starts, rows + 1, fill=int(starts[num_reqs]))
        buffers.token_ids.put(buffers.token_ids.host[: step.num_tokens], tokens)
        buffers.positions.put(buffers.positions.host[: step.num_tokens], tokens)
        for index in self._groups["full_attention"]:
            mapping = buffers.slot_mappings[index]
            mapping.put(mapping.host[: step.num_tokens], tokens, fill=-1)
        buffers.seq_lens.put(columns.seq_lens, rows)
        # The buffers of the pinned code end here, and what it appends then is 1.
        buffers.seq_lens.host[max(num_reqs, self._max_num_seqs) : rows] = 1
        return rows

    def moves_of_groups(
        self, store: RequestStore, slots: IntArray, moves: ColumnMoves
    ) -> list[StateMoves]:
        """Translate moves between columns into blocks, for each GDN group.

        Parameters
        ----------
        store : RequestStore
        slots : numpy.ndarray
            ``[R]``.
        moves : ColumnMoves

        Returns
        -------
        list of StateMoves
        """
        moving = slots[moves.rows]
        translated = []
        for index in self._groups["linear_attention"]:
            ids = store.tables[index].ids
            ssm = ids[moving, moves.sources + moves.offsets]
            translated.append(
                StateMoves(
                    rows=self._tensor(moves.rows),
                    ssm_sources=self._tensor(ssm.astype(np.int64)),
                    conv_sources=self._tensor(ids[moving, moves.sources].astype(np.int64)),
                    destinations=self._tensor(ids[moving, moves.destinations].astype(np.int64)),
                    conv_offsets=self._tensor(moves.offsets),
                )
            )
        return translated

    def _tensor(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _logits_indices(ends: IntArray, drafts: IntArray) -> IntArray:
    """Return the last token of each row, and the last d + 1 of one with d drafts."""
    if not drafts.any():
        return ends - 1
    wanted = drafts + 1
    last = np.cumsum(wanted)
    return np.arange(last[-1]) + np.repeat(ends - last, wanted)
