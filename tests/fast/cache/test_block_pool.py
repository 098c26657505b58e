from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from servespec.fast.cache.block_pool import BlockPool, FreeQueue


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, dtype=np.int64)


class TestFreeQueue:
    def test_starts_ascending_without_the_null_block(self) -> None:
        assert FreeQueue(5).to_array().tolist() == [1, 2, 3, 4]

    def test_takes_from_the_head_and_gives_back_at_either_end(self) -> None:
        queue = FreeQueue(7)
        assert queue.pop(3).tolist() == [1, 2, 3]
        queue.append(ids(2, 1))
        queue.prepend(ids(3))
        assert queue.to_array().tolist() == [3, 4, 5, 6, 2, 1]

    def test_prepending_keeps_the_order_given(self) -> None:
        queue = FreeQueue(6)
        queue.pop(3)
        queue.prepend(ids(3, 1))
        assert queue.to_array().tolist() == [3, 1, 4, 5]

    def test_a_block_leaves_the_middle(self) -> None:
        queue = FreeQueue(7)
        queue.remove(3)
        queue.remove(1)
        assert len(queue) == 4
        assert queue.pop(2).tolist() == [2, 4]
        assert queue.to_array().tolist() == [5, 6]

    def test_an_empty_take(self) -> None:
        queue = FreeQueue(3)
        queue.remove(1)
        assert queue.pop(0).tolist() == []
        assert len(queue) == 1

    def test_agrees_with_a_list_over_a_long_time(self) -> None:
        """The plain list is the definition; the buffer wraps around many times."""
        rng = random.Random(1)
        queue, model = FreeQueue(40), list(range(1, 40))
        held: list[int] = []
        counts: Counter[str] = Counter()
        for _ in range(20_000):
            what = rng.choice(["pop", "append", "prepend", "remove"])
            if what == "pop":
                n = rng.randint(0, len(model))
                assert queue.pop(n).tolist() == model[:n]
                held += model[:n]
                del model[:n]
            elif what == "remove" and model:
                block = rng.choice(model)
                queue.remove(block)
                model.remove(block)
                held.append(block)
            elif what in ("append", "prepend") and held:
                rng.shuffle(held)
                n = rng.randint(1, len(held))
                back, held = held[:n], held[n:]
                if what == "append":
                    queue.append(ids(*back))
                    model += back
                else:
                    queue.prepend(ids(*back))
                    model = back + model
            else:
                continue
            counts[what] += 1
            assert len(queue) == len(model)
            assert queue.to_array().tolist() == model
        assert min(counts.values()) > 2000, counts


class TestBlockPool:
    def test_unhashed_blocks_go_to_the_head_and_hashed_ones_to_the_tail(self) -> None:
        pool = BlockPool(8, enable_caching=True)
        pool.allocate(4)
        pool.add_key(2, b"b", 16)
        pool.add_key(4, b"d", 32)
        pool.release(ids(4, 3, 2, 1))
        assert pool.free.to_array().tolist() == [3, 1, 5, 6, 7, 4, 2]

    def test_without_caching_everything_goes_to_the_tail(self) -> None:
        pool = BlockPool(6, enable_caching=False)
        pool.allocate(3)
        pool.release(ids(3, 2, 1))
        assert pool.free.to_array().tolist() == [4, 5, 3, 2, 1]

    def test_a_held_block_is_not_freed_by_one_of_two_holders(self) -> None:
        pool = BlockPool(4, enable_caching=True)
        pool.allocate(2)
        pool.touch([1])
        pool.release(ids(2, 1))
        assert pool.free.to_array().tolist() == [2, 3]
        pool.release(ids(1))
        assert pool.free.to_array().tolist() == [1, 2, 3]

    def test_nulls_are_neither_counted_nor_freed(self) -> None:
        pool = BlockPool(4, enable_caching=True)
        pool.allocate(1)
        pool.release(ids(1, 0, 0))
        assert pool.ref_counts.tolist() == [0, 0, 0, 0]
        assert pool.free.to_array().tolist() == [1, 2, 3]

    def test_a_touch_saves_a_free_block_from_reuse(self) -> None:
        pool = BlockPool(5, enable_caching=True)
        pool.allocate(2)
        pool.add_key(1, b"a", 16)
        pool.release(ids(2, 1))
        assert pool.num_evictable([1, 0, 2]) == 2
        pool.touch([1])
        assert pool.find(b"a") == 1
        assert pool.allocate(3).tolist() == [2, 3, 4]

    def test_a_block_given_out_again_loses_its_keys(self) -> None:
        pool = BlockPool(3, enable_caching=True)
        pool.allocate(2)
        pool.add_key(1, b"a", 8)
        pool.add_key(1, b"a2", 4)
        pool.release(ids(2, 1))
        assert pool.cached_blocks() == {1}
        pool.allocate(2)
        assert pool.find(b"a") is None
        assert pool.find(b"a2") is None
        assert pool.cached_blocks() == frozenset()

    def test_equal_content_is_kept_twice_and_the_first_one_found(self) -> None:
        pool = BlockPool(5, enable_caching=True)
        pool.allocate(3)
        pool.add_key(3, b"a", 16)
        pool.add_key(1, b"a", 16)
        assert pool.find(b"a") == 3
        pool.drop_keys(3)
        assert pool.find(b"a") == 1

    def test_keys_move_with_the_primary_one_first(self) -> None:
        pool = BlockPool(4, enable_caching=True)
        pool.allocate(2)
        pool.add_key(1, b"a", 4)
        pool.add_key(1, b"b", 8)
        pool.move_keys(1, 2)
        assert (pool.key(1), pool.key(2), pool.key_tokens(2)) == (None, b"a", 4)
        assert pool.find(b"b") == 2

    def test_a_block_listed_twice_is_freed_once(self) -> None:
        pool = BlockPool(5, enable_caching=True)
        pool.allocate(3)
        pool.touch([1])
        pool.release_repeated([1, 2, 1, 3])
        assert pool.free.to_array().tolist() == [2, 1, 3, 4]
        assert pool.ref_counts.tolist() == [0] * 5

    def test_keys_are_forgotten_only_if_nothing_is_held(self) -> None:
        pool = BlockPool(4, enable_caching=True)
        pool.allocate(1)
        pool.add_key(1, b"a", 16)
        assert not pool.reset_keys()
        assert pool.find(b"a") == 1
        pool.release(ids(1))
        assert pool.reset_keys()
        assert pool.find(b"a") is None
        assert pool.free.to_array().tolist() == [2, 3, 1]

    def test_asking_for_too_many(self) -> None:
        with pytest.raises(ValueError, match="cannot take 4 blocks: only 3 are free"):
            BlockPool(4, enable_caching=False).allocate(4)
