"""The pool: order of the free queue, holders, and what can be found by hash."""

from servespec.reference.cache.blocks import (
    HashKey,
    count_free_hits,
    free_blocks,
    get_cached_blocks,
    get_new_blocks,
    initial_pool,
    move_hashes,
    register_hashes,
    remove_hashes,
    reset_hashes,
    touch,
)


def key(name, group=0):
    return HashKey(group, name.encode())


def cached(*entries, num_blocks=8):
    """A pool whose first blocks are taken and cached under the names given."""
    pool, blocks = get_new_blocks(initial_pool(num_blocks, True), len(entries))
    return register_hashes(
        pool, [(b, key(name), 4) for b, name in zip(blocks, entries, strict=True)]
    )


def test_block_0_is_never_given_out():
    pool = initial_pool(5, False)
    assert pool.free == (1, 2, 3, 4)
    pool, blocks = get_new_blocks(pool, 4)
    assert blocks == (1, 2, 3, 4)
    assert pool.free == ()
    assert pool.ref_counts == (0, 1, 1, 1, 1)


def test_without_caching_all_blocks_go_to_the_tail():
    pool, _ = get_new_blocks(initial_pool(6, False), 3)
    assert free_blocks(pool, (3, 0, 2)).free == (4, 5, 3, 2)


def test_blocks_without_hash_go_to_the_head_and_cached_ones_to_the_tail():
    pool = cached("a", "b", num_blocks=7)
    pool, _ = get_new_blocks(pool, 2)
    # Both keep the order given.
    assert free_blocks(pool, (4, 2, 3, 1)).free == (4, 3, 5, 6, 2, 1)


def test_only_the_last_holder_frees_a_block():
    pool = touch(cached("a"), (1, 1))
    pool = free_blocks(pool, (1,))
    assert pool.ref_counts[1] == 2
    assert 1 not in pool.free
    pool = free_blocks(free_blocks(pool, (1,)), (1,))
    assert pool.free[-1] == 1


def test_a_hit_on_a_free_block_leaves_the_middle_of_the_queue():
    pool = free_blocks(cached("a", "b", "c", num_blocks=5), (1, 2, 3))
    assert count_free_hits(pool, (0, 2, 3)) == 2
    pool = touch(pool, (0, 2))
    assert pool.free == (4, 1, 3)
    assert pool.ref_counts == (0, 0, 1, 0, 0)
    assert count_free_hits(pool, (0, 2, 3)) == 1


def test_a_block_given_out_again_loses_its_hashes():
    pool = free_blocks(cached("a", "b", num_blocks=3), (2, 1))
    assert get_cached_blocks(pool, b"b", (0,)) == (2,)
    pool, blocks = get_new_blocks(pool, 1)
    assert blocks == (2,)
    assert get_cached_blocks(pool, b"b", (0,)) is None
    assert get_cached_blocks(pool, b"a", (0,)) == (1,)


def test_every_group_has_to_have_the_prefix():
    pool = register_hashes(cached("a"), [(1, key("a", 1), 4)])
    assert get_cached_blocks(pool, b"a", (0, 1)) == (1, 1)
    assert get_cached_blocks(pool, b"a", (0, 2)) is None


def test_equal_prefixes_are_kept_apart_and_the_first_is_found():
    pool = cached("a", "a")
    assert get_cached_blocks(pool, b"a", (0,)) == (1,)
    pool = remove_hashes(pool, (1, 7))
    assert get_cached_blocks(pool, b"a", (0,)) == (2,)


def test_a_block_filled_further_loses_its_shorter_prefix():
    pool = register_hashes(cached("a"), [(1, key("ab"), 8)])
    assert get_cached_blocks(pool, b"a", (0,)) is None
    assert pool.hashes[1].keys == (key("ab"),)


def test_a_full_block_can_also_be_found_by_a_prefix_that_ends_inside_it():
    pool = register_hashes(cached("abcd"), [(1, key("ab"), 2), (1, key("ab"), 2)])
    assert pool.hashes[1].keys == (key("abcd"), key("ab"))
    assert get_cached_blocks(pool, b"ab", (0,)) == (1,)
    assert remove_hashes(pool, (1,)).blocks_by_hash == {}


def test_keys_move_in_order():
    pool = register_hashes(cached("abcd"), [(1, key("ab"), 2)])
    pool, (target,) = get_new_blocks(pool, 1)
    pool = move_hashes(pool, 1, target)
    assert pool.hashes == {target: ((key("abcd"), key("ab")), 4)}
    assert get_cached_blocks(pool, b"ab", (0,)) == (target,)


def test_reset_needs_all_blocks_free():
    pool = cached("a")
    assert reset_hashes(pool) == (pool, False)
    pool, done = reset_hashes(free_blocks(pool, (1,)))
    assert done
    assert (pool.hashes, pool.blocks_by_hash) == ({}, {})
    assert pool.free == (2, 3, 4, 5, 6, 7, 1)
