"""Every request a worker knows, each in a slot of growing arrays.

A row of the batch is the number of a slot. Reordering and closing holes therefore move one integer
a row, and a request that leaves the batch for a while keeps its tokens and blocks where they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from servespec.fast.batch.block_table import BlockTable
from servespec.fast.batch.buffers import POISON, grown
from servespec.reference.contracts import BlockTable as GroupBlocks
from servespec.reference.contracts import EngineConfig, NewRequestData, UnknownRequestError

__all__ = ["RequestStore"]

_SCALARS = (
    "num_tokens",
    "num_prompt_tokens",
    "num_computed_tokens",
    "num_draft_tokens",
    "num_accepted_tokens",
    "last_seq_len",
    "has_row",
)


class RequestStore:
    """Tokens, cursors and block tables of all known requests, by slot.

    Parameters
    ----------
    config : EngineConfig

    Attributes
    ----------
    slot_of : dict of str to int
    token_ids : numpy.ndarray
        ``[slots, tokens]`` int32: prompt, output, then the drafts of the step.
    num_tokens, num_prompt_tokens, num_computed_tokens : numpy.ndarray
        ``[slots]`` int64; `num_tokens` counts known tokens, without drafts.
    num_draft_tokens, num_accepted_tokens : numpy.ndarray
        ``[slots]`` int64; drafts of this step, tokens sampled by the latest one.
    last_seq_len : numpy.ndarray
        ``[slots]`` int64, tokens computed after the latest step, drafts included; 0 if the request
        came or came back since.
    has_row : numpy.ndarray
        ``[slots]`` bool.
    tables : list of BlockTable
        One for each group.
    """

    def __init__(self, config: EngineConfig) -> None:
        cache = config.cache
        slots = config.scheduler.max_num_seqs
        num_spec = 0 if config.speculative is None else config.speculative.num_speculative_tokens
        max_len = config.scheduler.max_model_len
        self.slot_of: dict[str, int] = {}
        self._free = list(range(slots - 1, -1, -1))
        # Prompts fill a row once, so a long max_model_len costs nothing until a request needs it.
        self.token_ids = np.zeros((slots, min(max_len, 1024) + 1 + num_spec), np.int32)
        self.num_tokens = np.zeros(slots, np.int64)
        self.num_prompt_tokens = np.zeros(slots, np.int64)
        self.num_computed_tokens = np.zeros(slots, np.int64)
        self.num_draft_tokens = np.zeros(slots, np.int64)
        self.num_accepted_tokens = np.ones(slots, np.int64)
        self.last_seq_len = np.zeros(slots, np.int64)
        self.has_row = np.zeros(slots, np.bool_)
        self.tables: list[BlockTable] = []
        for group in cache.groups:
            if group.layer_type == "full_attention":
                size, kernel = cache.block_size, cache.kernel_block_size or cache.block_size
            else:
                size = kernel = cache.block_size if cache.mamba_cache_mode == "align" else max_len
            width = -(-min(max_len, 1024) // size) + num_spec
            self.tables.append(BlockTable(slots, width, size, kernel))

    def slot(self, req_id: str) -> int:
        """Return the slot of a known request.

        Raises
        ------
        UnknownRequestError
        """
        try:
            return self.slot_of[req_id]
        except KeyError:
            raise UnknownRequestError(req_id) from None

    def add(self, new: NewRequestData) -> int:
        """Store a request that was never seen and return its slot."""
        slot = self.slot_of.get(new.req_id)
        if slot is None:
            if not self._free:
                self._grow()
            slot = self.slot_of[new.req_id] = self._free.pop()
        self.set_tokens(slot, new.prompt_token_ids)
        self.num_prompt_tokens[slot] = len(new.prompt_token_ids)
        self.num_computed_tokens[slot] = new.num_computed_tokens
        self.num_draft_tokens[slot] = 0
        self.restart(slot, new.block_ids)
        return slot

    def restart(self, slot: int, block_ids: GroupBlocks) -> None:
        """Give a request other tables, so that nothing of its earlier steps counts any more."""
        self.num_accepted_tokens[slot] = 1
        self.last_seq_len[slot] = 0
        for table, ids in zip(self.tables, block_ids, strict=True):
            table.replace(slot, ids)

    def drop(self, req_id: str) -> None:
        """Forget a request, if it is known."""
        slot = self.slot_of.pop(req_id, None)
        if slot is not None:
            self.has_row[slot] = False
            self._free.append(slot)

    def poison(self) -> None:
        """Overwrite free slots, and what stands behind the known tokens of live ones."""
        for name in _SCALARS:
            array = getattr(self, name)
            array[self._free] = False if array.dtype == np.bool_ else POISON
        self.token_ids[self._free] = POISON
        for slot in self.slot_of.values():
            self.token_ids[slot, self.num_tokens[slot] :] = POISON
        for table in self.tables:
            table.poison(self._free)

    def _grow(self) -> None:
        old = len(self.num_tokens)
        self.token_ids = grown(self.token_ids, 0, old + 1)
        slots = len(self.token_ids)
        for name in _SCALARS:
            setattr(self, name, grown(getattr(self, name), 0, slots))
        for table in self.tables:
            table.grow_slots(slots)
        self._free.extend(range(slots - 1, old - 1, -1))

    def set_tokens(self, slot: int, token_ids: Sequence[int]) -> None:
        """Make `token_ids` all known tokens of a request."""
        self.num_tokens[slot] = 0
        self.append_tokens(np.array([slot]), np.array([len(token_ids)]), token_ids)

    def append_tokens(
        self, slots: np.ndarray, counts: np.ndarray, token_ids: Sequence[int]
    ) -> None:
        """Append tokens to several requests, those of the first slot first."""
        starts = self.num_tokens[slots]
        self._write(slots, starts, counts, token_ids)
        self.num_tokens[slots] = starts + counts

    def set_drafts(self, slots: np.ndarray, counts: np.ndarray, token_ids: Sequence[int]) -> None:
        """Put drafts behind the known tokens of several requests without counting them."""
        self._write(slots, self.num_tokens[slots], counts, token_ids)
        self.num_draft_tokens[slots] = counts

    def _write(
        self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, token_ids: Sequence[int]
    ) -> None:
        if not len(token_ids):
            return
        self.token_ids = grown(self.token_ids, 1, int((starts + counts).max()))
        if len(slots) == 1:
            self.token_ids[slots[0], starts[0] : starts[0] + counts[0]] = token_ids
            return
        ends = np.cumsum(counts)
        columns = np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)
        self.token_ids[np.repeat(slots, counts), columns] = token_ids

    def append_blocks(self, slot: int, block_ids: GroupBlocks) -> None:
        """Append to the tables of a request in all groups."""
        for table, ids in zip(self.tables, block_ids, strict=True):
            if ids:
                table.append(slot, ids)
