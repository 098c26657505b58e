import numpy as np
import pytest

from servespec.reference.cache.memory import (
    GdnState,
    MemoryAccessError,
    copy_blocks,
    initial_memory,
    move_states,
    read_kv,
    read_state,
    write_kv,
    write_states,
    zero_blocks,
)
from servespec.reference.contracts import BlockCopy, KVCacheGroup

GDN = KVCacheGroup(layer_type="linear_attention", layer_indices=(0, 1))
FULL = KVCacheGroup(layer_type="full_attention", layer_indices=(2, 3))


@pytest.fixture
def memory():
    return initial_memory((GDN, FULL), 4)


def kv(*numbers):
    """K/V of one head and two dimensions that tell the numbers apart."""
    keys = np.array([[[n, n + 0.5]] for n in numbers], dtype=float)
    return keys, -keys


def put(memory, layer, slots, positions):
    return write_kv(memory, layer, np.array(slots), np.array(positions), *kv(*positions))


def state(layer, num_tokens, value=1.0):
    return GdnState(layer, np.full((3, 5), value), np.full((2, 3, 4), value), num_tokens)


def test_reads_in_logical_order_through_the_table(memory):
    memory = put(memory, 2, [12, 13, 14, 15, 4], [0, 1, 2, 3, 4])
    memory = put(memory, 2, [5, 6], [5, 6])
    keys, values = read_kv(memory, 2, (3, 1, 0), 7)
    expected_keys, expected_values = kv(*range(7))
    assert np.array_equal(keys, expected_keys)
    assert np.array_equal(values, expected_values)
    assert not keys.flags.writeable
    keys, _ = read_kv(memory, 2, (3,), 2)
    assert len(keys) == 2


def test_kernel_blocks_are_parts_of_a_block():
    memory = initial_memory((GDN, FULL), 4, kernel_block_size=2)
    memory = put(memory, 2, [12, 13, 14, 15, 4, 5], [0, 1, 2, 3, 4, 5])
    keys, _ = read_kv(memory, 2, (6, 7, 2), 6)  # block 3 is kernel blocks 6 and 7
    assert np.array_equal(keys, kv(*range(6))[0])
    with pytest.raises(MemoryAccessError, match="position 0: finds position 2"):
        read_kv(memory, 2, (7,), 1)


def test_a_write_leaves_the_older_memory_alone(memory):
    before = put(memory, 2, [4, 8], [0, 1])
    after = put(before, 2, [5], [1])
    with pytest.raises(MemoryAccessError):
        read_kv(before, 2, (1,), 2)
    assert len(read_kv(after, 2, (1,), 2)[0]) == 2
    assert after.contents[0, 2] is before.contents[0, 2], "unchanged blocks are shared"
    assert not memory.contents


@pytest.mark.parametrize(
    ("table", "seq_len", "found"),
    [
        ((1,), 3, r"position 2: finds position -1 \(-1: never written\)"),
        ((2,), 1, "block 2: it wrote none"),
        ((0,), 1, "block 0: it wrote none"),
        ((3,), 5, "position 4: finds no block"),
        ((), 1, "position 0: finds no block"),
    ],
)
def test_a_read_of_what_was_never_written_fails(memory, table, seq_len, found):
    memory = put(memory, 2, [4, 5, 7, 12, 13, 14, 15], [0, 1, 3, 0, 1, 2, 3])
    with pytest.raises(MemoryAccessError, match=f"layer 2 reads .*{found}"):
        read_kv(memory, 2, table, seq_len)


def test_a_leftover_of_an_earlier_owner_fails(memory):
    memory = put(memory, 2, [4, 5, 6, 7], [8, 9, 10, 11])  # third block of a former request
    memory = put(memory, 2, [4], [0])
    assert len(read_kv(memory, 2, (1,), 1)[0]) == 1
    with pytest.raises(MemoryAccessError, match="position 1: finds position 9"):
        read_kv(memory, 2, (1,), 2)


def test_other_layers_do_not_see_a_write(memory):
    memory = put(memory, 2, [4], [0])
    with pytest.raises(MemoryAccessError, match="layer 3 reads K/V of block 1"):
        read_kv(memory, 3, (1,), 1)


def test_groups_share_storage(memory):
    memory = write_states(memory, {1: state(0, 7)})
    memory = put(memory, 3, [4], [0])  # another tensor: layer 3 is second in its group
    assert read_state(memory, 0, 1, 7).num_tokens == 7
    memory = put(memory, 2, [4], [0])  # first in its group, as layer 0 is
    with pytest.raises(MemoryAccessError, match="layer 0 reads the state of block 1"):
        read_state(memory, 0, 1, 7)
    memory = write_states(memory, {1: state(0, 7)})
    with pytest.raises(MemoryAccessError, match="layer 2 reads K/V of block 1"):
        read_kv(memory, 2, (1,), 1)


def test_a_block_given_to_another_group_of_the_same_kind_starts_empty():
    other = KVCacheGroup(layer_type="full_attention", layer_indices=(4, 5))
    memory = initial_memory((FULL, other), 4)
    memory = put(memory, 2, [4, 5, 6], [0, 1, 2])
    with pytest.raises(MemoryAccessError, match="layer 4 reads K/V of block 1: it wrote none"):
        read_kv(memory, 4, (1,), 1)
    memory = put(memory, 4, [4], [0])
    with pytest.raises(MemoryAccessError, match="position 1: finds position -1"):
        read_kv(memory, 4, (1,), 2)


@pytest.mark.parametrize(
    ("slots", "message"),
    [([4, 4], "written to one slot"), ([3, 4], "block 0 .* null block"), ([-1, 4], "block -1")],
)
def test_bad_writes_fail(memory, slots, message):
    with pytest.raises(MemoryAccessError, match=message):
        put(memory, 2, slots, [0, 1])


def test_states_are_those_after_so_many_tokens(memory):
    memory = write_states(memory, {5: state(0, 7, 2.0)})
    assert read_state(memory, 0, 5, 7).recurrent[0, 0, 0] == 2.0
    with pytest.raises(MemoryAccessError, match="after 6 tokens: it holds the one after 7"):
        read_state(memory, 0, 5, 6)
    with pytest.raises(MemoryAccessError, match="layer 1 reads the state of block 5"):
        read_state(memory, 1, 5, 7)
    with pytest.raises(MemoryAccessError, match="null block"):
        write_states(memory, {0: state(0, 7)})


def test_zeroed_blocks_count_as_never_written(memory):
    memory = put(memory, 2, [4, 8], [0, 0])
    memory = put(memory, 3, [4], [0])
    assert zero_blocks(memory, ()) is memory
    memory = zero_blocks(memory, (1, 9))
    for layer in (2, 3):
        with pytest.raises(MemoryAccessError):
            read_kv(memory, layer, (1,), 1)
    assert len(read_kv(memory, 2, (2,), 1)[0]) == 1


def test_copies_take_everything_a_block_holds(memory):
    memory = put(memory, 2, [4, 5, 8], [0, 1, 0])
    memory = write_states(memory, {1: state(1, 2)})
    copied = copy_blocks(
        memory,
        [BlockCopy(src_block_id=1, dst_block_id=2), BlockCopy(src_block_id=2, dst_block_id=3)],
    )
    assert len(read_kv(copied, 2, (2,), 2)[0]) == 2
    assert read_state(copied, 1, 2, 2).num_tokens == 2
    assert len(read_kv(copied, 2, (3,), 1)[0]) == 1, "read before the first copy overwrote it"
    with pytest.raises(MemoryAccessError):
        read_kv(memory, 2, (2,), 2)
    assert copy_blocks(memory, ()) is memory


def test_states_move_with_all_layers_of_their_group(memory):
    memory = write_states(memory, {1: state(0, 4)})
    with pytest.raises(MemoryAccessError, match="layer 1 moves the state of block 1"):
        move_states(memory, GDN, {2: 1})
    memory = write_states(memory, {1: state(1, 4)})
    moved = move_states(memory, GDN, {2: 1})
    for layer in (0, 1):
        assert read_state(moved, layer, 2, 4) is read_state(moved, layer, 1, 4)
    assert move_states(memory, GDN, {}) is memory
