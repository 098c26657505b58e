"""The token budget, and who is preempted when blocks run out, worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from servespec.reference.contracts import (
    Quirks,
    RequestStatus,
)


class TestBudget:
    def test_the_example_of_a_long_prompt_beside_a_decode(self, make, make_request, step) -> None:
        """Budget 6, B decoding, A with 12 prompt tokens: A takes 5, 6 less 1, and the rest."""
        scheduler = make(budget=6)
        scheduler.add_request(make_request("B", 1))
        step(scheduler)
        scheduler.add_request(make_request("A", 12))
        steps = [dict(step(scheduler).num_scheduled_tokens) for _ in range(4)]
        assert steps == [{"B": 1, "A": 5}, {"B": 1, "A": 5}, {"B": 1, "A": 2}, {"B": 1, "A": 1}]

    def test_without_chunks_a_prompt_waits_for_a_whole_budget(
        self, make, make_request, step
    ) -> None:
        scheduler = make(budget=16, max_model_len=16, enable_chunked_prefill=False)
        scheduler.add_request(make_request("a", 10))
        scheduler.add_request(make_request("b", 10))
        scheduler.add_request(make_request("c", 2))
        assert step(scheduler).num_scheduled_tokens == {"a": 10}
        assert step(scheduler).num_scheduled_tokens == {"a": 1, "b": 10, "c": 2}

    def test_a_threshold_caps_chunks(self, make, make_request, step) -> None:
        scheduler = make(long_prefill_token_threshold=3)
        scheduler.add_request(make_request("a", 7))
        steps = [step(scheduler).num_scheduled_tokens["a"] for _ in range(4)]
        assert steps == [3, 3, 1, 1]

    def test_at_most_max_num_seqs_run(self, make, make_request, step) -> None:
        scheduler = make(max_num_seqs=2)
        for name in "abc":
            scheduler.add_request(make_request(name, 2))
        assert list(step(scheduler).num_scheduled_tokens) == ["a", "b"]
        assert scheduler.snapshot().waiting == ("c",)

    def test_max_num_scheduled_tokens_replaces_the_budget(self, make, make_request, step) -> None:
        scheduler = make(max_num_scheduled_tokens=5)
        scheduler.add_request(make_request("a", 9))
        assert step(scheduler).num_scheduled_tokens == {"a": 5}

    def test_a_cut_in_the_middle_of_the_running_list(self, make, make_request, step) -> None:
        scheduler = make(budget=5, max_num_seqs=4)
        for name in "abcd":
            scheduler.add_request(make_request(name, 1))
        step(scheduler)
        scheduler._state.config = dataclasses.replace(
            scheduler._state.config, max_num_batched_tokens=3
        )
        assert list(step(scheduler).num_scheduled_tokens) == ["a", "b", "c"]


class TestPreemption:
    def test_the_newest_goes_and_comes_back_first(self, make, make_request, step) -> None:
        # 5 blocks of 4 tokens: a and b hold 2 each; the fifth goes to a, none is left for b.
        scheduler = make(blocks=6)
        for name in "abc":
            scheduler.add_request(make_request(name, 7, max_tokens=20))
        assert list(step(scheduler).num_scheduled_tokens) == ["a", "b"]
        assert list(step(scheduler).num_scheduled_tokens) == ["a", "b"]
        plan = step(scheduler)
        assert plan.num_scheduled_tokens == {"a": 1}
        assert plan.preempted_req_ids == {"b"}
        assert scheduler.snapshot().waiting == ("b", "c")
        assert scheduler.snapshot().num_computed_tokens["b"] == 0
        scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
        plan = step(scheduler)
        # Prompt 7 and two tokens of output are computed again.
        assert plan.num_scheduled_tokens == {"b": 9, "c": 7}
        assert plan.scheduled_cached_reqs.resumed_req_ids == {"b"}
        assert len(plan.scheduled_cached_reqs.all_token_ids["b"]) == 9

    def test_priority_preempts_the_least_important(self, make, make_request, step) -> None:
        scheduler = make(blocks=6, policy="priority")
        scheduler.add_request(make_request("b", 7, 20, priority=5))
        scheduler.add_request(make_request("a", 7, 20, priority=9))
        step(scheduler)
        step(scheduler)
        plan = step(scheduler)
        assert plan.preempted_req_ids == {"a"}
        assert plan.num_scheduled_tokens == {"b": 1}

    @pytest.mark.parametrize("quirk", [False, True])
    def test_a_victim_that_already_got_its_tokens_gives_them_back(
        self, quirk: bool, make, make_request, step
    ) -> None:
        """Worked out for both profiles: a scheduled victim never costs anyone a step."""
        quirks = Quirks(priority_victim_skips_next=quirk)
        scheduler = make(blocks=7, policy="priority", quirks=quirks)
        scheduler.add_request(make_request("y", 5, 20, priority=1, arrival=0.0))
        step(scheduler)
        scheduler.add_request(make_request("x", 7, 20, priority=0, arrival=1.0))
        scheduler.add_request(make_request("z", 6, 20, priority=0, arrival=2.0))
        step(scheduler)
        # y, x and z hold 2 blocks each and no block is free. y takes its eighth place; x needs a
        # third block: y, the least important, goes though it has its token; then z runs.
        assert scheduler.snapshot().running == ("y", "x", "z")
        step(scheduler)
        plan = step(scheduler)
        assert plan.preempted_req_ids == {"y"}
        assert plan.num_scheduled_tokens == {"x": 1, "z": 1}

    @pytest.mark.parametrize(("quirk", "expected"), [(False, ["x", "z"]), (True, ["x"])])
    def test_a_victim_that_was_passed_over(
        self, quirk: bool, expected: list[str], make, make_request, step
    ) -> None:
        """vllm-project/vllm#49097: the victim's place shifts the list under the loop."""
        quirks = Quirks(priority_victim_skips_next=quirk, min_tokens_outlive_model_len=True)
        scheduler = make(blocks=7, policy="priority", quirks=quirks, max_model_len=8, budget=8)
        # y reaches max_model_len - 1 computed tokens and, not stopping before 50 tokens of
        # output, is passed over for ever (vllm-project/vllm#51299).
        scheduler.add_request(make_request("y", 7, 60, priority=1, min_tokens=50))
        step(scheduler)
        scheduler.add_request(make_request("x", 4, 20, priority=0, arrival=1.0))
        scheduler.add_request(make_request("z", 4, 20, priority=0, arrival=2.0))
        plan = step(scheduler)
        assert plan.num_scheduled_tokens == {"x": 4, "z": 4}
        # 6 blocks: y 2, x 1, z 1, two free. Take those so that x has to preempt y.
        pool = scheduler._state.cache.pool
        pool.allocate(2)
        plan = step(scheduler)
        assert plan.preempted_req_ids == {"y"}
        assert list(plan.num_scheduled_tokens) == expected

    @pytest.mark.parametrize(("quirk", "victim"), [(True, "b"), (False, "c")])
    def test_a_tie_among_victims(self, quirk: bool, victim: str, make, make_request, step) -> None:
        """Of equals the one whose id comes last goes; in vLLM the one admitted first."""
        quirks = Quirks(victim_tie_ignores_id=quirk)
        scheduler = make(blocks=7, policy="priority", quirks=quirks)
        scheduler.add_request(make_request("a", 8, 20))
        step(scheduler)
        for name in "bc":
            scheduler.add_request(make_request(name, 4, 20, priority=1))
        # a takes its third block; b and c hold one each and want a second; one is left.
        assert step(scheduler).num_scheduled_tokens == {"a": 1, "b": 4, "c": 4}
        plan = step(scheduler)
        assert plan.preempted_req_ids == {victim}

    @pytest.mark.parametrize("quirk", [False, True])
    def test_hashes_of_a_step_that_was_called_off(
        self, quirk: bool, make, make_request, step
    ) -> None:
        """y is to fill blocks 6 and 7, but then x needs a block, and y has to go."""
        scheduler = make(
            blocks=8,
            policy="priority",
            caching=True,
            long_prefill_token_threshold=8,
            quirks=Quirks(preempted_step_stays_cached=quirk),
        )
        scheduler.add_request(make_request("y", 24, 20, priority=1))
        step(scheduler)
        scheduler.add_request(make_request("x", 4, 20, priority=0))
        step(scheduler)
        assert scheduler.snapshot().block_tables == {"y": ((1, 2, 3, 4),), "x": ((5,),)}
        plan = step(scheduler)
        assert plan.preempted_req_ids == {"y"}
        assert plan.num_scheduled_tokens == {"x": 1}
        # x took block 7; block 6 was never computed.
        assert scheduler.snapshot().cached_blocks == {1, 2, 3, 4, 5} | ({6} if quirk else set())

    def test_a_request_that_cannot_be_helped_preempts_itself(
        self, make, make_request, step
    ) -> None:
        scheduler = make(blocks=3)
        scheduler.add_request(make_request("a", 8, 20))
        step(scheduler)
        plan = step(scheduler)
        assert plan.num_scheduled_tokens == {}
        assert plan.preempted_req_ids == {"a"}

    def test_nobody_is_admitted_in_a_step_that_preempts(self, make, make_request, step) -> None:
        scheduler = make(blocks=6)
        for name in "ab":
            scheduler.add_request(make_request(name, 7, 20))
        step(scheduler)
        step(scheduler)
        scheduler.add_request(make_request("c", 1))
        assert list(step(scheduler).num_scheduled_tokens) == ["a"]
