"""Which of the two V0 block managers keeps the blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from servespec.reference.cache import v0_blocks, v0_blocks_v2
from servespec.reference.cache.v0_space import BlockMoves, BlockSpace
from servespec.reference.contracts.v0 import AllocStatus, V0CacheConfig, V0SchedulerConfig

__all__ = ["BlockManager", "block_manager"]


class BlockManager(Protocol):
    """The functions that both modules define; see there for what they do."""

    def initial_space(self, config: V0CacheConfig) -> BlockSpace:
        """Return a space in which every block is free."""

    def can_allocate(self, space: BlockSpace, num_tokens: int) -> AllocStatus:
        """Tell whether a prompt gets its blocks."""

    def allocate(
        self, space: BlockSpace, seq_id: int, num_tokens: int, num_seqs: int
    ) -> BlockSpace:
        """Give a waiting sequence its blocks."""

    def can_append_slots(
        self, space: BlockSpace, num_tokens: Mapping[int, int], num_lookahead_slots: int
    ) -> bool:
        """Tell whether the running sequences of a group can go on."""

    def append_slots(
        self, space: BlockSpace, seq_id: int, num_tokens: int, num_lookahead_slots: int
    ) -> tuple[BlockSpace, BlockMoves]:
        """Give a sequence's new tokens slots."""

    def fork(self, space: BlockSpace, parent_seq_id: int, child_seq_id: int) -> BlockSpace:
        """Share a sequence's blocks with a new one."""

    def free(self, space: BlockSpace, seq_id: int) -> BlockSpace:
        """Give up a sequence's blocks."""

    def can_swap_in(
        self, space: BlockSpace, seq_ids: Sequence[int], num_lookahead_slots: int
    ) -> AllocStatus:
        """Tell whether a swapped group can come back."""

    def swap_in(self, space: BlockSpace, seq_ids: Sequence[int]) -> tuple[BlockSpace, BlockMoves]:
        """Move sequences to the GPU."""

    def can_swap_out(self, space: BlockSpace, seq_ids: Sequence[int]) -> bool:
        """Tell whether a group fits the CPU pool."""

    def swap_out(self, space: BlockSpace, seq_ids: Sequence[int]) -> tuple[BlockSpace, BlockMoves]:
        """Move sequences to the CPU."""


def block_manager(config: V0SchedulerConfig) -> BlockManager:
    """Return the manager that a configuration asks for."""
    return v0_blocks_v2 if config.use_v2_block_manager else v0_blocks
