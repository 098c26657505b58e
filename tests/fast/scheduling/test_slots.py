"""Slots that are used again, and the blocks that all of them share."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from servespec.fast.scheduling.requests import POISON
from servespec.fast.scheduling.v1 import Scheduler
from servespec.reference.contracts import SchedulerOutput


class TestSlots:
    def test_a_freed_slot_is_poisoned(self, make, make_request, step) -> None:
        scheduler = make()
        scheduler.add_request(make_request("a", 5, 1))
        step(scheduler)
        requests = scheduler._state.requests
        assert (requests._fields == POISON).all()
        assert (requests.token_ids[0, :6] == POISON).sum() >= 5
        assert scheduler._state.cache.groups[0].table[:, :2].tolist()[63] in ([-1, -1], [0, 0])

    @pytest.mark.parametrize("asynchronous", [False, True])
    @pytest.mark.parametrize("hybrid", [False, True])
    @pytest.mark.parametrize("caching", [False, True])
    def test_used_slots_decide_as_fresh_ones_do(
        self, caching: bool, hybrid: bool, asynchronous: bool, make, drive
    ) -> None:
        """The same requests again, on a scheduler with a past and on one without."""

        def make_one() -> Scheduler:
            return make(
                blocks=24, caching=caching, hybrid=hybrid, async_scheduling=asynchronous, budget=12
            )

        used = make_one()
        drive(used, seed=1, prefix="x")
        assert used.reset_prefix_cache() or not caching
        # The free queue remembers the past; put it in order as in a new pool.
        free = used._state.cache.pool.free
        free.append(np.sort(free.pop(len(free))))
        used.schedule()
        fresh = make_one()
        assert drive(used, seed=2, prefix="y") == drive(fresh, seed=2, prefix="y")


@pytest.fixture
def drive(make_request, step):
    def run(scheduler: Scheduler, seed: int, prefix: str) -> list[SchedulerOutput]:
        """Run twelve random requests to their ends."""
        rng = random.Random(seed)
        shared = [rng.randrange(9) for _ in range(30)]
        plans = []
        for i in range(12):
            length = rng.randint(1, 30)
            prompt = (*shared[: length // 2], *(rng.randrange(9) for _ in range(length // 2)), 1)
            scheduler.add_request(make_request(f"{prefix}{i}", prompt, rng.randint(1, 9)))
        while scheduler.has_unfinished_requests():
            plans.append(step(scheduler))
            assert len(plans) < 500
        return plans

    return run


@pytest.mark.parametrize("seed", range(6))
def test_the_pool_stays_consistent(seed: int, make, make_request, step) -> None:
    """Held and free blocks share the pool, and every holder is a table entry, after each step."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    for caching in (False, True):
        for hybrid in (False, True):
            scheduler = make(
                blocks=22,
                caching=caching,
                hybrid=hybrid,
                drafts=rng.choice([0, 2]),
                policy=rng.choice(["fcfs", "priority"]),
                async_scheduling=rng.random() < 0.5,
                budget=12,
            )
            shared = tuple(rng.randrange(9) for _ in range(20))
            for i in range(60):
                if rng.random() < 0.5:
                    prompt = (*shared[: rng.randint(1, 20)], rng.randrange(9))
                    new = make_request(
                        f"r{i}", prompt, rng.randint(1, 12), rng.randint(0, 2), float(i)
                    )
                    scheduler.add_request(new)
                plan = step(scheduler)
                counts["preempted"] += len(plan.preempted_req_ids)
                counts["hits"] += sum(n.num_computed_tokens > 0 for n in plan.scheduled_new_reqs)
                check_pool(scheduler, counts)
    print(dict(counts))
    assert counts["preempted"] > 5
    assert counts["hits"] > 5
    assert counts["cached and free"] > 50
    assert counts["shared blocks"] > 50


def check_pool(scheduler: Scheduler, counts: Counter[str]) -> None:
    snapshot = scheduler.snapshot()
    holders = Counter(
        block
        for table in snapshot.block_tables.values()
        for ids in table
        for block in ids
        if block != 0
    )
    free = set(snapshot.free_blocks)
    assert len(free) == len(snapshot.free_blocks)
    for block in range(1, len(snapshot.ref_counts)):
        assert snapshot.ref_counts[block] == holders[block]
        assert (block in free) == (holders[block] == 0)
    assert 0 not in free
    counts["cached and free"] += len(free & snapshot.cached_blocks)
    counts["shared blocks"] += sum(n > 1 for n in holders.values())
