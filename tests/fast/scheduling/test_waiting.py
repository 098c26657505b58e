"""Who is admitted, and what holds admissions up, worked out by hand."""

from __future__ import annotations

import pytest

from servespec.reference.contracts import (
    DuplicateRequestError,
    PauseState,
    RequestError,
    RequestStatus,
)


class TestAdmission:
    def test_a_head_that_does_not_fit_blocks_all_behind_it(self, make, make_request, step) -> None:
        scheduler = make(blocks=4, scheduler_reserve_full_isl=True)
        scheduler.add_request(make_request("a", 13))
        scheduler.add_request(make_request("b", 1))
        assert step(scheduler).num_scheduled_tokens == {}

    def test_without_the_gate_the_first_chunk_decides(self, make, make_request, step) -> None:
        scheduler = make(blocks=4, scheduler_reserve_full_isl=False, budget=8)
        scheduler.add_request(make_request("a", 13))
        assert step(scheduler).num_scheduled_tokens == {"a": 8}

    def test_the_watermark_binds_only_beside_running_requests(
        self, make, make_request, step
    ) -> None:
        # 10 blocks, a quarter of them reserved: 2.
        scheduler = make(blocks=10, watermark=0.25)
        scheduler.add_request(make_request("a", 16, 20))
        scheduler.add_request(make_request("b", 16, 20))
        assert list(step(scheduler).num_scheduled_tokens) == ["a"]
        # a holds 4 of 9 and takes a fifth; 4 are left, of which b needs 4.
        assert list(step(scheduler).num_scheduled_tokens) == ["a"]
        scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
        assert list(step(scheduler).num_scheduled_tokens) == ["b"]

    def test_priority_orders_the_queue(self, make, make_request, step) -> None:
        scheduler = make(max_num_seqs=1, policy="priority")
        scheduler.add_request(make_request("a", 1, priority=2))
        scheduler.add_request(make_request("c", 1, priority=1, arrival=2.0))
        scheduler.add_request(make_request("b", 1, priority=1, arrival=1.0))
        assert scheduler.snapshot().waiting == ("b", "c", "a")
        assert list(step(scheduler).num_scheduled_tokens) == ["b"]

    def test_a_duplicate_is_refused(self, make, make_request) -> None:
        scheduler = make()
        scheduler.add_request(make_request("a", 1))
        with pytest.raises(DuplicateRequestError, match="'a'"):
            scheduler.add_request(make_request("a", 1))

    def test_a_token_beyond_32_bits_is_refused(self, make, make_request) -> None:
        scheduler = make()
        with pytest.raises(RequestError, match="below 2\\*\\*31"):
            scheduler.add_request(make_request("a", (2**31,)))
        assert not scheduler.has_unfinished_requests()

    def test_many_more_requests_than_slots_at_first(self, make, make_request, step) -> None:
        scheduler = make(blocks=1000, max_num_seqs=300, budget=400)
        for i in range(300):
            scheduler.add_request(make_request(f"r{i}", (i, i + 1), max_tokens=2))
        assert len(step(scheduler).num_scheduled_tokens) == 200
        assert len(step(scheduler).num_scheduled_tokens) == 300
        assert len(step(scheduler).num_scheduled_tokens) == 100
        assert not scheduler.has_unfinished_requests()


class TestPause:
    def test_paused_new_admits_nobody_and_paused_all_does_nothing(
        self, make, make_request, step
    ) -> None:
        scheduler = make()
        scheduler.add_request(make_request("a", 2))
        step(scheduler)
        scheduler.add_request(make_request("b", 2))
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
        assert step(scheduler).num_scheduled_tokens == {"a": 1}
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        assert step(scheduler).num_scheduled_tokens == {}
        assert not scheduler.has_unfinished_requests()
        scheduler.set_pause_state(PauseState.UNPAUSED)
        assert step(scheduler).num_scheduled_tokens == {"a": 1, "b": 2}


class TestThrottle:
    def test_prefills_wait_beside_a_decode(self, make, make_request, step) -> None:
        scheduler = make(budget=4)
        scheduler.add_request(make_request("a", 2))
        step(scheduler)
        scheduler.add_request(make_request("b", 6))
        assert scheduler.schedule(throttle_prefills=True).to_contract().num_scheduled_tokens == {
            "a": 1
        }

    def test_a_step_that_left_prefills_waiting_lifts_the_throttle(
        self, make, make_request, step
    ) -> None:
        scheduler = make(budget=4)
        scheduler.add_request(make_request("a", 2))
        scheduler.add_request(make_request("b", 6))
        scheduler.add_request(make_request("c", 6))
        step(scheduler)
        plan = scheduler.schedule(throttle_prefills=True).to_contract()
        assert plan.num_scheduled_tokens == {"a": 1, "b": 3}
