"""What tokens, drafts and ends from outside do to requests, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from servespec.reference.contracts import (
    FinishReason,
    Quirks,
    RepetitionDetection,
    RequestStatus,
)


class TestStops:
    @pytest.mark.parametrize(
        ("params", "tokens", "reason", "told", "kept"),
        [
            ({"eos_token_id": 5}, (5,), FinishReason.STOP, None, 1),
            ({"stop_token_ids": (5, 6)}, (6,), FinishReason.STOP, 6, 1),
            ({"eos_token_id": 5, "stop_token_ids": (5,)}, (5,), FinishReason.STOP, None, 1),
            ({"max_tokens": 1}, (5,), FinishReason.LENGTH, None, 1),
            ({"max_tokens": 1, "eos_token_id": 5}, (5,), FinishReason.STOP, None, 1),
            ({"eos_token_id": 5, "min_tokens": 2}, (5,), None, None, 1),
            ({"max_tokens": 2}, (5, 6, 7), FinishReason.LENGTH, None, 2),
            (
                {"repetition_detection": RepetitionDetection(max_pattern_size=1, min_count=3)},
                (4, 5, 5, 5, 9),
                FinishReason.REPETITION,
                "repetition_detected",
                4,
            ),
        ],
    )
    def test_reasons_and_their_order(
        self,
        params: dict[str, Any],
        tokens: tuple[int, ...],
        reason: FinishReason | None,
        told: object,
        kept: int,
        make,
        make_request,
    ) -> None:
        scheduler = make(drafts=4)
        scheduler.add_request(make_request("a", 3, **params))
        plan = scheduler.schedule()
        (output,) = scheduler.update_from_output(plan, {"a": tokens})
        assert output.new_token_ids == tokens[:kept]
        assert (output.finish_reason, output.stop_reason) == (reason, told)
        assert scheduler.has_unfinished_requests() == (reason is None)

    @pytest.mark.parametrize("quirk", [False, True])
    def test_min_tokens_beyond_the_longest_sequence(
        self, quirk: bool, make, make_request, step
    ) -> None:
        """vllm-project/vllm#51299: in vLLM such a request runs for ever."""
        quirks = Quirks(min_tokens_outlive_model_len=quirk)
        scheduler = make(max_model_len=6, quirks=quirks)
        scheduler.add_request(make_request("a", 4, 50, min_tokens=40, eos_token_id=7))
        for _ in range(5):
            step(scheduler)
        assert scheduler.has_unfinished_requests() == quirk
        assert len(scheduler.snapshot().running) == quirk

    def test_the_longest_sequence_ends_a_request(self, make, make_request, step) -> None:
        scheduler = make(max_model_len=6)
        scheduler.add_request(make_request("a", 4, 50))
        step(scheduler)
        plan = scheduler.schedule()
        (output,) = scheduler.update_from_output(plan, {"a": (7,)})
        assert output.finish_reason is FinishReason.LENGTH

    def test_finished_requests_are_told_once(self, make, make_request, step) -> None:
        scheduler = make()
        scheduler.add_request(make_request("a", 1, 1))
        step(scheduler)
        assert scheduler.has_finished_requests()
        assert step(scheduler).finished_req_ids == {"a"}
        assert step(scheduler).finished_req_ids == frozenset()

    def test_blocks_come_back_in_row_order(self, make, make_request, step) -> None:
        scheduler = make(blocks=7)
        for name in "abc":
            scheduler.add_request(make_request(name, 5, 1))
        step(scheduler)
        assert scheduler.snapshot().free_blocks == (2, 1, 4, 3, 6, 5)


class TestEndsFromOutside:
    def test_ids_that_are_not_alive_are_ignored(self, make, make_request) -> None:
        scheduler = make()
        scheduler.add_request(make_request("a", 1))
        scheduler.finish_requests(["b", "a", "a"], RequestStatus.FINISHED_ABORTED)
        assert not scheduler.has_unfinished_requests()

    def test_only_a_finished_status_will_do(self, make) -> None:
        with pytest.raises(ValueError, match="must be a finished one"):
            make().finish_requests(["a"], RequestStatus.WAITING)

    @pytest.mark.parametrize("quirk", [False, True])
    def test_the_order_in_which_blocks_come_back(
        self, quirk: bool, make, make_request, step
    ) -> None:
        names = [f"r{i}" for i in range(7)]
        scheduler = make(blocks=8, quirks=Quirks(finish_in_set_order=quirk))
        for name in names:
            scheduler.add_request(make_request(name, 2))
        step(scheduler)
        scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        order = list(set(names)) if quirk else names
        assert scheduler.snapshot().free_blocks == tuple(1 + names.index(i) for i in order)

    def test_output_for_a_request_that_is_gone_is_dropped(self, make, make_request) -> None:
        scheduler = make()
        scheduler.add_request(make_request("a", 2))
        scheduler.add_request(make_request("b", 2))
        plan = scheduler.schedule()
        scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
        outputs = scheduler.update_from_output(plan, {"a": (7,), "b": (8,)})
        assert [output.request_id for output in outputs] == ["b"]

    def test_output_never_reaches_the_next_owner_of_a_slot(self, make, make_request) -> None:
        scheduler = make(async_scheduling=True)
        scheduler.add_request(make_request("a", 2))
        plan = scheduler.schedule()
        scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
        scheduler.add_request(make_request("b", 2))
        later = scheduler.schedule()
        assert plan.slots.tolist() == later.slots.tolist()
        assert scheduler.update_from_output(plan, {"a": (7,)}) == ()
        (output,) = scheduler.update_from_output(later, {"b": (8,)})
        assert output.new_token_ids == (8,)


class TestDrafts:
    def test_drafts_follow_the_known_token_and_rejected_ones_are_undone(
        self, make, make_request, step
    ) -> None:
        scheduler = make(drafts=3)
        scheduler.add_request(make_request("a", 4, 20))
        step(scheduler)
        scheduler.update_draft_token_ids({"a": (1, 2, 3)})
        plan = scheduler.schedule().to_contract()
        assert plan.num_scheduled_tokens == {"a": 4}
        assert plan.scheduled_spec_decode_tokens == {"a": (1, 2, 3)}
        assert scheduler.snapshot().num_computed_tokens == {"a": 8}
        scheduler.update_from_output(plan, {"a": (1, 9)})
        assert scheduler.snapshot().num_computed_tokens == {"a": 6}
        assert step(scheduler).num_scheduled_tokens == {"a": 1}

    def test_drafts_are_cut_to_the_budget(self, make, make_request, step) -> None:
        scheduler = make(drafts=3, budget=6)
        for name in "ab":
            scheduler.add_request(make_request(name, 2, 20))
        step(scheduler)
        scheduler.update_draft_token_ids({"a": (1, 2, 3), "b": (4, 5, 6)})
        plan = step(scheduler)
        assert plan.num_scheduled_tokens == {"a": 4, "b": 2}
        assert plan.scheduled_spec_decode_tokens == {"a": (1, 2, 3), "b": (4,)}

    def test_a_prefill_gets_none(self, make, make_request, step) -> None:
        scheduler = make(drafts=2, budget=4)
        scheduler.add_request(make_request("a", 6, 20))
        step(scheduler)
        scheduler.update_draft_token_ids({"a": (1, 2), "unknown": (3,)})
        assert step(scheduler).num_scheduled_tokens == {"a": 2}

    def test_lookahead_takes_blocks_ahead(self, make, make_request, step) -> None:
        sizes = {}
        for method in ("ngram", "mtp"):
            scheduler = make(drafts=3, method=method)
            scheduler.add_request(make_request("a", 6))
            (new,) = step(scheduler).scheduled_new_reqs
            sizes[method] = len(new.block_ids[0])
        assert sizes == {"ngram": 2, "mtp": 3}

    @pytest.mark.parametrize(("quirk", "drafts"), [(False, (-1,)), (True, (-1, -1, -1))])
    def test_a_padded_admission_that_is_cut(
        self, quirk: bool, drafts: tuple[int, ...], make, make_request, step
    ) -> None:
        """vllm-project/vllm#54392: a threshold of 2 leaves room for one of three drafts."""
        scheduler = make(
            drafts=3,
            long_prefill_token_threshold=2,
            quirks=Quirks(padded_admission_cut_late=quirk),
        )
        scheduler.add_request(make_request("a", 2, 20))
        step(scheduler)
        scheduler.add_request(make_request("b", 1, 20))
        plan = scheduler.schedule().to_contract()
        assert plan.num_scheduled_tokens == {"a": 1, "b": 2}
        assert plan.scheduled_spec_decode_tokens == {"b": drafts}

    def test_a_padded_admission_waits_for_room(self, make, make_request, step) -> None:
        scheduler = make(drafts=3, budget=4)
        scheduler.add_request(make_request("a", 2, 20))
        step(scheduler)
        scheduler.add_request(make_request("b", 1, 20))
        assert step(scheduler).num_scheduled_tokens == {"a": 1}


class TestAsync:
    def test_a_step_is_planned_before_the_last_tokens_are_known(self, make, make_request) -> None:
        scheduler = make(async_scheduling=True)
        scheduler.add_request(make_request("a", 3, 3))
        plans = [scheduler.schedule()]
        for _ in range(3):
            plans.append(scheduler.schedule())
            scheduler.update_from_output(plans[-2], {"a": (7,)})
        # Prompt, then two of three tokens; a step for the token after the third would be in vain.
        assert [plan.num_tokens.tolist() for plan in plans] == [[3], [1], [1], []]
        assert [plan.num_outputs.tolist() for plan in plans] == [[0], [1], [2], []]
        assert not scheduler.has_unfinished_requests()

    def test_drafts_are_placeholders(self, make, make_request) -> None:
        scheduler = make(async_scheduling=True, drafts=2)
        scheduler.add_request(make_request("a", 3, 20))
        first, second = scheduler.schedule(), scheduler.schedule()
        assert second.to_contract().scheduled_spec_decode_tokens == {"a": (-1, -1)}
        assert scheduler.snapshot().num_output_placeholders == {"a": 4}
        scheduler.update_from_output(first, {"a": (7,)})
        scheduler.update_from_output(second, {"a": (8, 9)})
        assert scheduler.snapshot().num_output_placeholders == {"a": 0}
        assert scheduler.snapshot().num_computed_tokens == {"a": 5}

    def test_stale_output_is_delivered_before_its_request_may_resume(
        self, make, make_request
    ) -> None:
        scheduler = make(blocks=6, async_scheduling=True)
        for name in "ab":
            scheduler.add_request(make_request(name, 7, 20))
        plans = [scheduler.schedule() for _ in range(3)]
        assert plans[2].to_contract().preempted_req_ids == {"b"}
        scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
        assert scheduler.schedule().to_contract().num_scheduled_tokens == {}
        assert scheduler.snapshot().skipped_waiting == ("b",)
        for plan in plans[:2]:
            (output,) = scheduler.update_from_output(plan, {"a": (5,), "b": (6,)})
            assert output.request_id == "b"
        assert scheduler.snapshot().num_output_placeholders == {"b": 0}
        assert scheduler.schedule().to_contract().num_scheduled_tokens == {"b": 9}

    def test_a_reset_drops_stale_output(self, make, make_request) -> None:
        scheduler = make(caching=True, async_scheduling=True)
        scheduler.add_request(make_request("a", 7, 20))
        plan = scheduler.schedule()
        assert scheduler.reset_prefix_cache(reset_running_requests=True)
        again = scheduler.schedule()
        assert again.num_tokens.tolist() == [7]
        assert scheduler.update_from_output(plan, {"a": (5,)}) == ()
        (output,) = scheduler.update_from_output(again, {"a": (5,)})
        assert output.new_token_ids == (5,)

    def test_two_resets_do_not_count_a_step_in_flight_twice(self, make, make_request) -> None:
        scheduler = make(caching=True, async_scheduling=True)
        scheduler.add_request(make_request("a", 7, 20))
        plans = []
        for _ in range(2):
            plans.append(scheduler.schedule())
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
        plans.append(scheduler.schedule())
        outputs = [scheduler.update_from_output(plan, {"a": (5,)}) for plan in plans]
        assert [len(output) for output in outputs] == [0, 0, 1]

    @pytest.mark.parametrize(("quirk", "expected"), [(False, {}), (True, {"a": -1})])
    def test_a_request_at_the_longest_length(
        self, quirk: bool, expected: dict[str, int], make, make_request
    ) -> None:
        """vllm-project/vllm#53962: one token too many was computed, so minus one is left."""
        scheduler = make(
            async_scheduling=True,
            max_model_len=8,
            quirks=Quirks(negative_schedule=quirk),
        )
        scheduler.add_request(make_request("a", 8, 4))
        assert scheduler.schedule().to_contract().num_scheduled_tokens == {"a": 8}
        assert scheduler.schedule().to_contract().num_scheduled_tokens == expected
