"""State blocks in mode ``align``: tables, moves, nulls and copies."""

from dataclasses import replace

import pytest

from servespec.reference.cache import gdn
from servespec.reference.cache.blocks import HashKey, get_new_blocks, initial_pool, register_hashes
from servespec.reference.cache.layout import GroupKind, GroupLayout
from servespec.reference.cache.table import EMPTY, Copy, GroupBlocks, PartialHit
from servespec.reference.contracts import SchedulerDiedError

PLAIN = GroupLayout(0, GroupKind.GDN_ALIGN, 4, 0)
DRAFTS = GroupLayout(0, GroupKind.GDN_ALIGN, 4, 2)


def grown(group, *lengths, num_blocks=20):
    """Tables after chunks that end at these lengths."""
    pool, held, tables = initial_pool(num_blocks, True), EMPTY, []
    for length in lengths:
        pool, held, *_ = gdn.allocate(pool, group, held, length)
        tables.append(held.blocks)
    return pool, held, tables


def test_one_block_for_each_chunk_that_crosses_a_boundary():
    assert grown(PLAIN, 3, 4, 5, 8, 9)[2] == [(1,), (1,), (1, 2), (1, 2), (1, 2, 3)]


def test_the_gap_of_a_long_chunk_is_filled_with_nulls():
    assert grown(PLAIN, 12, 13, 24)[2] == [(0, 0, 1), (0, 0, 1, 2), (0, 0, 1, 2, 0, 3)]


def test_blocks_of_drafts_stay_behind_the_state():
    # 1 + K blocks at first; then one new block a boundary, the drafts' blocks moving on.
    assert grown(DRAFTS, 4, 8, 20)[2] == [
        (1, 2, 3),
        (1, 2, 3, 4),
        (1, 2, 0, 0, 3, 4, 5),
    ]


def test_rejected_drafts_leave_a_longer_table_than_is_needed():
    pool, held, _ = grown(DRAFTS, 4, 8)
    assert gdn.blocks_needed(pool, DRAFTS, held, (), 0, 4) == -1
    assert gdn.allocate(pool, DRAFTS, held, 4).new_blocks == ()


@pytest.mark.parametrize(
    ("group", "length", "expected"), [(PLAIN, 4, 1), (PLAIN, 40, 1), (DRAFTS, 40, 3)]
)
def test_a_first_chunk_needs_a_state_however_long_it_is(group, length, expected):
    assert gdn.blocks_needed(initial_pool(9, True), group, EMPTY, (), 0, length) == expected


def test_states_behind_the_last_processed_one_are_freed():
    pool, held, _ = grown(PLAIN, 4, 8, 12, 16)
    pool, held = gdn.remove_skipped(pool, PLAIN, held, 12, leaks=False)
    assert held.blocks == (0, 0, 3, 4)
    assert pool.free[:2] == (2, 1)
    assert gdn.remove_skipped(pool, PLAIN, held, 0, leaks=False) == (pool, held)


@pytest.mark.parametrize("leaks", [True, False])
def test_a_state_behind_nulls_is_found(leaks):
    pool, held, _ = grown(PLAIN, 8, 20)
    assert held.blocks == (0, 1, 0, 0, 2)
    assert gdn.remove_skipped(pool, PLAIN, held, 20, leaks)[1].blocks == (0, 0, 0, 0, 2)


def test_the_state_before_the_drafts_is_the_one_that_is_remembered():
    pool, held, _ = grown(DRAFTS, 8, 20)
    assert held.blocks == (0, 1, 0, 0, 2, 3, 4)
    held = gdn.remove_skipped(pool, DRAFTS, held, 20, leaks=True)[1]
    assert held.blocks == (0, 0, 0, 0, 2, 3, 4)


def published(pool, held, entry):
    """A table one of whose blocks was published for a prefix that ends inside it."""
    key = HashKey(0, b"tail")
    pool = register_hashes(pool, ((held.blocks[entry], key, 4 * entry + 2),))
    return pool, replace(held, partial_hit=PartialHit(entry, held.blocks[entry])), key


def test_a_running_producer_keeps_its_block_and_the_cache_gets_a_copy():
    pool, held, key = published(*grown(PLAIN, 4, 6)[:2], entry=1)
    assert gdn.blocks_needed(pool, PLAIN, held, (), 0, 7) == 2
    pool, held, new_blocks, fresh, copy, republished = gdn.allocate(pool, PLAIN, held, 7)
    assert (held.blocks, held.partial_hit) == ((1, 2), None)
    assert (new_blocks, fresh) == ((), ())
    assert copy == Copy(2, 3)
    assert republished == key
    assert pool.blocks_by_hash == {key: (3,)}
    # Both ends are held until the plan is complete.
    assert pool.ref_counts[2:4] == (2, 1)


def test_a_request_admitted_on_it_is_redirected_to_the_copy():
    pool, _ = get_new_blocks(initial_pool(9, True), 1)
    held = GroupBlocks((0, 1), 1, PartialHit(1, 1))
    pool, held, new_blocks, _, copy, republished = gdn.allocate(pool, PLAIN, held, 9)
    assert held.blocks == (0, 2, 3)
    assert new_blocks == (2, 3)
    assert (copy, republished) == (Copy(1, 2), None)
    assert pool.ref_counts[1:4] == (1, 2, 1)


def test_a_published_block_that_was_freed_meanwhile_kills_the_scheduler():
    # vLLM 0.27.1 asserts that the table still holds the block it is about to copy.
    pool, held, _ = published(*grown(PLAIN, 4, 6)[:2], entry=1)
    pool, held = gdn.remove_skipped(pool, PLAIN, held, 9, leaks=True)
    with pytest.raises(SchedulerDiedError, match="block 2 was published and then freed"):
        gdn.allocate(pool, PLAIN, held, 9)


def test_the_last_state_within_reach_is_the_hit():
    pool, held, _ = grown(PLAIN, 4, 8, 12)
    hashes = tuple(bytes([i]) for i in range(3))
    entries = [(held.blocks[i], HashKey(0, hashes[i]), 4 * i + 4) for i in (0, 2)]
    pool = register_hashes(pool, entries)
    assert gdn.find_longest_hit(pool, (PLAIN,), hashes, 12, 4) == (((0, 0, 3),), 12)
    assert gdn.find_longest_hit(pool, (PLAIN,), hashes, 11, 4) == (((1,),), 4)
    assert gdn.find_longest_hit(pool, (PLAIN,), hashes, 3, 4) == (((),), 0)


def test_all_groups_have_to_have_the_state():
    other = replace(PLAIN, index=1)
    pool = register_hashes(initial_pool(9, True), [(1, HashKey(0, b"a"), 4)])
    assert gdn.find_longest_hit(pool, (PLAIN, other), (b"a",), 4, 4) == (((), ()), 0)
