"""Block tables by rule, on tables small enough to work out by hand (blocks of 4 tokens)."""

from __future__ import annotations

import numpy as np
import pytest

from servespec.fast.cache.aligned import AlignedGdnGroup
from servespec.fast.cache.block_pool import BlockPool
from servespec.fast.cache.groups import UNLIMITED, FullAttentionGroup, GdnGroup
from servespec.reference.contracts import Quirks

HASHES = [bytes([i]) for i in range(8)]


def attention(pool: BlockPool, unit: int = 4) -> FullAttentionGroup:
    return FullAttentionGroup(0, 4, unit, pool, 4, 8, clears_blocks=True)


def aligned(
    pool: BlockPool, drafts: int = 0, unit: int = 4, quirks: Quirks | None = None
) -> AlignedGdnGroup:
    quirks = quirks or Quirks()
    return AlignedGdnGroup(0, 4, unit, pool, 4, 12, drafts, quirks=quirks)


class TestFullAttention:
    def test_a_block_for_every_four_tokens(self) -> None:
        group = attention(BlockPool(10, enable_caching=True))
        assert group.demand(0, 9, 9, (), 0) == 3
        assert group.allocate(0, 9, 9) == [1, 2, 3]
        assert group.demand(0, 12, 12, (), 0) == 0
        assert group.allocate(0, 13, 13) == [4]
        assert group.new_ids == [1, 2, 3, 4]

    def test_a_hit_costs_only_what_the_free_queue_loses(self) -> None:
        pool = BlockPool(10, enable_caching=True)
        group = attention(pool)
        group.allocate(0, 8, 8)
        assert group.demand(1, 12, 12, (1, 2), 8) == 1
        group.free(0)
        assert group.demand(1, 12, 12, (1, 2), 8) == 3

    def test_blocks_are_freed_from_the_end(self) -> None:
        pool = BlockPool(6, enable_caching=True)
        group = attention(pool)
        group.allocate(0, 12, 12)
        group.cache(0, 8, 8, 12, HASHES)
        group.free(0)
        assert pool.free.to_array().tolist() == [3, 4, 5, 2, 1]

    def test_only_full_blocks_get_a_hash(self) -> None:
        pool = BlockPool(6, enable_caching=True)
        group = attention(pool)
        group.allocate(0, 11, 11)
        group.cache(0, 11, 11, 11, HASHES)
        assert pool.cached_blocks() == {1, 2}

    def test_the_common_prefix_ends_at_the_first_block_not_held_by_all(self) -> None:
        pool = BlockPool(8, enable_caching=True)
        group = attention(pool)
        group.allocate(0, 12, 12)
        group.adopt(1, (1, 2), 8)
        group.allocate(1, 12, 12)
        assert group.num_common_prefix(0, 2) == 2
        assert group.num_common_prefix(1, 2) == 2
        assert group.num_common_prefix(0, 3) == 0

    def test_a_hit_inside_a_block_gets_a_copy_of_its_own(self) -> None:
        pool = BlockPool(8, enable_caching=True)
        group = attention(pool, unit=2)
        group.allocate(0, 6, 6)
        group.cache(0, 6, 6, 6, HASHES)
        assert pool.cached_blocks() == {1, 2}
        assert group.demand(1, 8, 8, (1, 2), 6) == 1
        group.adopt(1, (1, 2), 6)
        assert group.allocate(1, 8, 8) == [3]
        assert group.block_ids(1) == [1, 3]
        assert group.copies == [(2, 3)]
        assert pool.ref_counts[[1, 2, 3]].tolist() == [2, 2, 2]

    def test_room_ends_with_the_last_block_and_never_at_the_longest_length(self) -> None:
        group = attention(BlockPool(10, enable_caching=False))
        group.allocate(0, 9, 9)
        assert group.room(np.array([0]), 0, 32).tolist() == [12]
        assert group.room(np.array([0]), 3, 32).tolist() == [9]
        assert group.room(np.array([0]), 3, 12).tolist() == [UNLIMITED]

    def test_a_freed_row_is_poisoned(self) -> None:
        group = attention(BlockPool(10, enable_caching=False))
        group.allocate(0, 9, 9)
        group.free(0)
        assert group.table[0, :3].tolist() == [-1, -1, -1]
        assert group.block_ids(0) == []


class TestGdnModeNone:
    def test_one_state_and_one_per_draft_for_life(self) -> None:
        group = GdnGroup(0, 100, 100, BlockPool(10, enable_caching=False), 4, 3)
        assert group.demand(0, 7, 7, (), 0) == 4
        assert group.allocate(0, 7, 7) == [1, 2, 3, 4]
        assert group.demand(0, 100, 100, (), 0) == 0
        assert group.allocate(0, 100, 100) == []
        assert group.room(np.array([0]), 3, 100).tolist() == [UNLIMITED]


class TestGdnModeAlign:
    def test_a_long_chunk_holds_one_state_behind_nulls(self) -> None:
        group = aligned(BlockPool(10, enable_caching=True))
        assert group.demand(0, 12, 12, (), 0) == 1
        assert group.allocate(0, 12, 12) == [0, 0, 1]
        assert group.room(np.array([0]), 0, 64).tolist() == [12]

    def test_the_state_two_back_is_given_up(self) -> None:
        pool = BlockPool(10, enable_caching=True)
        group = aligned(pool)
        group.allocate(0, 4, 4)
        group.skip(0, 4)
        assert group.allocate(0, 8, 8) == [2]
        # The step from 4 to 8 still reads the state at 4.
        group.skip(0, 4)
        assert group.block_ids(0) == [1, 2]
        group.skip(0, 8)
        assert group.block_ids(0) == [0, 2]
        assert pool.free.to_array().tolist()[0] == 1

    @pytest.mark.parametrize(("leaks", "expected"), [(True, [0, 1, 0, 0]), (False, [0, 0, 0, 0])])
    def test_states_between_chunks_in_flight(self, leaks: bool, expected: list[int]) -> None:
        """Chunks end at 8, 16 and 24 tokens before the first one's step is over."""
        group = aligned(
            BlockPool(10, enable_caching=True), quirks=Quirks(skipped_states_leak=leaks)
        )
        for end in (8, 16, 24):
            group.allocate(0, end, end)
        assert group.block_ids(0) == [0, 1, 0, 2, 0, 3]
        group.skip(0, 24)
        assert group.block_ids(0) == [*expected, 0, 3]

    def test_draft_blocks_move_to_the_new_end(self) -> None:
        group = aligned(BlockPool(10, enable_caching=True), drafts=2)
        assert group.demand(0, 4, 4, (), 0) == 3
        assert group.allocate(0, 4, 4) == [1, 2, 3]
        # From one state block to three: both drafts' blocks lie before the new state.
        assert group.demand(0, 16, 16, (), 0) == 1
        assert group.allocate(0, 16, 16) == [2, 3, 4]
        assert group.block_ids(0) == [1, 0, 0, 2, 3, 4]

    def test_demand_may_be_negative(self) -> None:
        group = aligned(BlockPool(10, enable_caching=True), drafts=1)
        group.allocate(0, 9, 9)
        assert group.demand(0, 4, 4, (), 0) == -2

    def test_nobody_starts_from_a_state_of_the_same_step(self) -> None:
        pool = BlockPool(10, enable_caching=True)
        group = aligned(pool)
        group.allocate(0, 4, 4)
        group.cache(0, 4, 4, 9, HASHES)
        assert group.demand(1, 8, 8, (1,), 4) == 11
        group.new_step()
        assert group.demand(1, 8, 8, (1,), 4) == 1

    def test_the_prompt_tail_moves_to_a_copy_before_it_is_overwritten(self) -> None:
        pool = BlockPool(10, enable_caching=True)
        group = aligned(pool, unit=2)
        group.allocate(0, 6, 6)
        group.cache(0, 6, 6, 7, HASHES)
        assert group.block_ids(0) == [0, 1]
        assert pool.cached_blocks() == {1}
        # vLLM counts the copy and, as if the table grew, one more.
        assert group.demand(0, 7, 7, (), 0) == 2
        # The copy is not reported: the worker's table stays as it is.
        assert group.allocate(0, 7, 7) == []
        assert pool.cached_blocks() == {2}
        assert group.copies == [(1, 2)]
        assert group.block_ids(0) == [0, 1]

    def test_growing_keeps_what_is_there(self) -> None:
        group = aligned(BlockPool(10, enable_caching=True))
        group.allocate(3, 4, 4)
        group.grow(8)
        assert group.block_ids(3) == [1]
        assert group.allocate(7, 4, 4) == [2]
        assert np.array_equal(group.counts, [0, 0, 0, 1, 0, 0, 0, 1])
