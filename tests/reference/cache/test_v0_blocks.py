"""Both V0 block managers by hand: stacks, holders, what a swap moves and when it is allowed."""

import pytest

from servespec.reference.cache import v0_blocks, v0_blocks_v2
from servespec.reference.contracts.v0 import AllocStatus, V0CacheConfig, V0SchedulingError

OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER
V1, V2 = v0_blocks, v0_blocks_v2


def config(gpu=6, cpu=6, watermark=0.0):
    return V0CacheConfig(num_gpu_blocks=gpu, num_cpu_blocks=cpu, block_size=4, watermark=watermark)


def forked(manager, tokens=6, **sizes):
    """Sequences 0 and 1 on the same blocks."""
    space = manager.allocate(manager.initial_space(config(**sizes)), 0, tokens, 1)
    return manager.fork(space, 0, 1)


@pytest.mark.parametrize(("manager", "first"), [(V1, (5, 4)), (V2, (0, 1))])
def test_the_first_blocks_and_the_order_of_the_stack(manager, first):
    space = manager.allocate(manager.initial_space(config()), 0, 5, 1)
    assert space.tables[0].blocks == first
    space = manager.free(space, 0)
    # The block freed last is on top.
    assert space.gpu.free[:2] == tuple(reversed(first))
    assert space.gpu.ref_counts == (0,) * 6
    assert manager.free(space, 7) == space


@pytest.mark.parametrize("manager", [V1, V2])
@pytest.mark.parametrize(
    ("tokens", "status"), [(12, OK), (13, LATER), (16, LATER), (17, NEVER), (100, NEVER)]
)
def test_can_allocate_with_two_of_six_blocks_kept_free(manager, tokens, status):
    space = manager.initial_space(config(watermark=0.34))  # int(2.04)
    space = manager.allocate(space, 9, 4, 1)
    assert manager.can_allocate(space, tokens) is status


@pytest.mark.parametrize("manager", [V1, V2])
def test_a_copy_on_write_and_the_last_holder(manager):
    space = forked(manager)
    _, last = space.tables[0].blocks
    space, copies = manager.append_slots(space, 0, 7, 0)
    new = space.tables[0].blocks[-1]
    assert copies == ((last, new),)
    assert space.gpu.ref_counts[last] == 1
    space, copies = manager.append_slots(space, 1, 7, 0)
    assert copies == ()
    # Block 9 starts a block of its own.
    space, copies = manager.append_slots(space, 1, 9, 0)
    assert (len(space.tables[1].blocks), copies) == (3, ())


def test_a_decode_asks_for_a_free_block_whether_it_needs_one_or_not():
    for manager in (V1, V2):
        space = manager.allocate(manager.initial_space(config(gpu=1)), 0, 3, 1)
        assert not manager.can_append_slots(space, {0: 4}, 0)


def test_the_newer_manager_asks_for_every_block_that_new_slots_touch():
    space = V2.allocate(V2.initial_space(config(gpu=4)), 0, 6, 1)
    # Slots 7 to 8 in block 1, 9 to 12 in block 2, 13 in block 3: three blocks, two are free.
    assert V2.can_append_slots(space, {0: 7}, 1)
    assert V2.can_append_slots(space, {0: 7}, 5)
    assert not V2.can_append_slots(space, {0: 7}, 6)
    # Several sequences need the sum.
    space = V2.fork(space, 0, 1)
    assert V2.can_append_slots(space, {0: 7, 1: 7}, 1)
    assert not V2.can_append_slots(space, {0: 7, 1: 7}, 2)


def test_lookahead_slots_get_blocks_before_shared_ones_are_copied():
    space = forked(V2)  # blocks 0 and 1 of six
    space, copies = V2.append_slots(space, 0, 7, 6)
    # 7 + 6 slots: blocks 2 and 3; then block 1 is copied to 4.
    assert space.tables[0].blocks == (0, 4, 2, 3)
    assert copies == ((1, 4),)
    assert space.tables[0].num_full_slots == 7


def test_a_full_last_block_without_a_new_token():
    space = V2.allocate(V2.initial_space(config()), 0, 8, 1)
    with pytest.raises(V0SchedulingError, match="append_past_table"):
        V2.append_slots(space, 0, 8, 0)
    space, copies = V2.append_slots(space, 0, 8, 1)
    assert (space.tables[0].blocks, copies) == ((0, 1, 2), ())
    assert V1.append_slots(V1.allocate(V1.initial_space(config()), 0, 8, 1), 0, 8, 0)[1] == ()


def test_shared_blocks_stay_shared_in_the_first_manager_and_part_in_the_newer():
    space = forked(V1)
    assert V1.can_swap_out(space, (0, 1))
    space, moves = V1.swap_out(space, (0, 1))
    assert moves == ((5, 5), (4, 4))
    assert space.cpu.ref_counts == (0, 0, 0, 0, 2, 2)
    assert space.tables[0].blocks == space.tables[1].blocks == (5, 4)
    assert len(space.gpu.free) == 6
    space, moves = V1.swap_in(space, (0, 1))
    assert moves == ((5, 4), (4, 5))
    space = forked(V2)
    space, moves = V2.swap_out(space, (0, 1))
    assert moves == ((0, 0), (1, 1), (0, 2), (1, 3))
    assert (space.tables[0].blocks, space.tables[1].blocks) == ((0, 1), (2, 3))
    assert space.cpu.ref_counts == (1, 1, 1, 1, 0, 0)


def test_the_newer_manager_counts_shared_blocks_once_and_can_run_out():
    space = forked(V2, cpu=3)
    assert V2.can_swap_out(space, (0, 1))
    with pytest.raises(V0SchedulingError, match="pool_exhausted"):
        V2.swap_out(space, (0, 1))
    assert not V2.can_swap_out(forked(V2, cpu=1), (0, 1))
    assert not V1.can_swap_out(forked(V1, cpu=1), (0, 1))
    assert V1.can_swap_out(forked(V1, cpu=2), (0, 1))


@pytest.mark.parametrize(
    ("gpu", "held", "status"), [(6, 0, OK), (6, 3, LATER), (4, 0, OK), (3, 0, NEVER)]
)
def test_the_first_manager_brings_a_group_back_with_a_block_for_each_sequence(gpu, held, status):
    space = forked(V1, gpu=gpu, cpu=6)
    space, _ = V1.swap_out(space, (0, 1))
    if held:
        space = V1.allocate(space, 9, 4 * held, 1)
    # 2 shared blocks and one for each of 2 sequences.
    assert V1.can_swap_in(space, (0, 1), 0) is status


@pytest.mark.parametrize(
    ("lookahead", "needed"),
    [
        (0, 4),  # two blocks of each sequence, which a swap-out has parted
        (2, 4),  # fits the 2 free slots of either open block, which counts once
        (6, 4),  # 4 slots beyond them: 1 block in place of the open one
        (7, 6),  # 5 slots beyond them: 2 blocks in place of either open one
    ],
)
def test_the_newer_manager_reckons_with_lookahead_slots(lookahead, needed):
    space, _ = V2.swap_out(forked(V2, gpu=12), (0, 1))
    for free in range(1, 12):
        used = V2.allocate(space, 9, 4 * (12 - free), 1)
        assert V2.can_swap_in(used, (0, 1), lookahead) is (OK if free >= needed else LATER)
    small, _ = V2.swap_out(forked(V2, gpu=needed - 1), (0, 1))
    assert V2.can_swap_in(small, (0, 1), lookahead) is NEVER
