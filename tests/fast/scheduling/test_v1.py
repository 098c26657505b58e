"""The scheduler's rules one by one, with schedules worked out by hand."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from servespec.fast.scheduling.requests import POISON
from servespec.fast.scheduling.v1 import Scheduler
from servespec.reference.contracts import (
    CacheConfig,
    DuplicateRequestError,
    FinishReason,
    KVCacheGroup,
    PauseState,
    Quirks,
    RepetitionDetection,
    Request,
    RequestError,
    RequestStatus,
    SamplingParams,
    SchedulerConfig,
    SchedulerOutput,
    SpeculativeConfig,
)

ATTENTION = KVCacheGroup(layer_type="full_attention", layer_indices=(3,))
HYBRID = (
    KVCacheGroup(layer_type="linear_attention", layer_indices=(0, 1)),
    KVCacheGroup(layer_type="linear_attention", layer_indices=(2,)),
    ATTENTION,
)


def make(
    *,
    blocks: int = 40,
    block_size: int = 4,
    groups: tuple[KVCacheGroup, ...] = (ATTENTION,),
    caching: bool = False,
    unit: int | None = None,
    drafts: int = 0,
    method: Any = "ngram",
    quirks: Quirks | None = None,
    budget: int = 16,
    max_num_seqs: int = 8,
    max_model_len: int = 64,
    **scheduler: Any,
) -> Scheduler:
    aligned = caching and len(groups) > 1
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            quirks=quirks or Quirks(),
            **scheduler,
        ),
        CacheConfig(
            num_gpu_blocks=blocks,
            block_size=block_size,
            enable_prefix_caching=caching,
            mamba_cache_mode="align" if aligned else "none",
            prefix_match_unit=unit,
            groups=groups,
        ),
        SpeculativeConfig(method=method, num_speculative_tokens=drafts) if drafts else None,
    )


def request(
    name: str,
    prompt: int | tuple[int, ...],
    max_tokens: int = 8,
    priority: int = 0,
    arrival: float = 0.0,
    **params: Any,
) -> Request:
    """Return a request; a number stands for a prompt of that many tokens of its own."""
    if isinstance(prompt, int):
        prompt = tuple(1000 * ord(name[-1]) + i for i in range(prompt))
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        priority=priority,
        arrival_time=arrival,
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
    )


def step(scheduler: Scheduler, tokens: dict[str, tuple[int, ...]] | None = None) -> SchedulerOutput:
    """Schedule and answer at once: one token, 7, for every row that has caught up."""
    plan = scheduler.schedule().to_contract()
    scheduler.update_from_output(plan, answers(scheduler, plan, tokens or {}))
    return plan


def answers(
    scheduler: Scheduler, plan: SchedulerOutput, tokens: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    requests = scheduler._state.requests
    found = {}
    for name, count in plan.num_scheduled_tokens.items():
        slot = requests.slot_of.get(name)
        caught_up = slot is not None and not requests.is_chunk[slot]
        found[name] = tokens.get(name, (7,)) if caught_up and count > 0 else ()
    return found


class TestBudget:
    def test_the_example_of_a_long_prompt_beside_a_decode(self) -> None:
        """Budget 6, B decoding, A with 12 prompt tokens: A takes 5, 6 less 1, and the rest."""
        scheduler = make(budget=6)
        scheduler.add_request(request("B", 1))
        step(scheduler)
        scheduler.add_request(request("A", 12))
        steps = [dict(step(scheduler).num_scheduled_tokens) for _ in range(4)]
        assert steps == [{"B": 1, "A": 5}, {"B": 1, "A": 5}, {"B": 1, "A": 2}, {"B": 1, "A": 1}]

    def test_without_chunks_a_prompt_waits_for_a_whole_budget(self) -> None:
        scheduler = make(budget=16, max_model_len=16, enable_chunked_prefill=False)
        scheduler.add_request(request("a", 10))
        scheduler.add_request(request("b", 10))
        scheduler.add_request(request("c", 2))
        assert step(scheduler).num_scheduled_tokens == {"a": 10}
        assert step(scheduler).num_scheduled_tokens == {"a": 1, "b": 10, "c": 2}

    def test_a_threshold_caps_chunks(self) -> None:
        scheduler = make(long_prefill_token_threshold=3)
        scheduler.add_request(request("a", 7))
        steps = [step(scheduler).num_scheduled_tokens["a"] for _ in range(4)]
        assert steps == [3, 3, 1, 1]

    def test_at_most_max_num_seqs_run(self) -> None:
        scheduler = make(max_num_seqs=2)
        for name in "abc":
            scheduler.add_request(request(name, 2))
        assert list(step(scheduler).num_scheduled_tokens) == ["a", "b"]
        assert scheduler.snapshot().waiting == ("c",)

    def test_max_num_scheduled_tokens_replaces_the_budget(self) -> None:
        scheduler = make(max_num_scheduled_tokens=5)
        scheduler.add_request(request("a", 9))
        assert step(scheduler).num_scheduled_tokens == {"a": 5}

    def test_a_cut_in_the_middle_of_the_running_list(self) -> None:
        scheduler = make(budget=5, max_num_seqs=4)
        for name in "abcd":
            scheduler.add_request(request(name, 1))
        step(scheduler)
        scheduler._state.config = dataclasses.replace(
            scheduler._state.config, max_num_batched_tokens=3
        )
        assert list(step(scheduler).num_scheduled_tokens) == ["a", "b", "c"]


class TestPreemption:
    def test_the_newest_goes_and_comes_back_first(self) -> None:
        # 5 blocks of 4 tokens: a and b hold 2 each; the fifth goes to a, none is left for b.
        scheduler = make(blocks=6)
        for name in "abc":
            scheduler.add_request(request(name, 7, max_tokens=20))
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

    def test_priority_preempts_the_least_important(self) -> None:
        scheduler = make(blocks=6, policy="priority")
        scheduler.add_request(request("b", 7, 20, priority=5))
        scheduler.add_request(request("a", 7, 20, priority=9))
        step(scheduler)
        step(scheduler)
        plan = step(scheduler)
        assert plan.preempted_req_ids == {"a"}
        assert plan.num_scheduled_tokens == {"b": 1}

    @pytest.mark.parametrize("quirk", [False, True])
    def test_a_victim_that_already_got_its_tokens_gives_them_back(self, quirk: bool) -> None:
        """Worked out for both profiles: a scheduled victim never costs anyone a step."""
        quirks = Quirks(priority_victim_skips_next=quirk)
        scheduler = make(blocks=7, policy="priority", quirks=quirks)
        scheduler.add_request(request("y", 5, 20, priority=1, arrival=0.0))
        step(scheduler)
        scheduler.add_request(request("x", 7, 20, priority=0, arrival=1.0))
        scheduler.add_request(request("z", 6, 20, priority=0, arrival=2.0))
        step(scheduler)
        # y, x and z hold 2 blocks each and no block is free. y takes its eighth place; x needs a
        # third block: y, the least important, goes though it has its token; then z runs.
        assert scheduler.snapshot().running == ("y", "x", "z")
        step(scheduler)
        plan = step(scheduler)
        assert plan.preempted_req_ids == {"y"}
        assert plan.num_scheduled_tokens == {"x": 1, "z": 1}

    @pytest.mark.parametrize(("quirk", "expected"), [(False, ["x", "z"]), (True, ["x"])])
    def test_a_victim_that_was_passed_over(self, quirk: bool, expected: list[str]) -> None:
        """vllm-project/vllm#49097: the victim's place shifts the list under the loop."""
        quirks = Quirks(priority_victim_skips_next=quirk, min_tokens_outlive_model_len=True)
        scheduler = make(blocks=7, policy="priority", quirks=quirks, max_model_len=8, budget=8)
        # y reaches max_model_len - 1 computed tokens and, not stopping before 50 tokens of
        # output, is passed over for ever (vllm-project/vllm#51299).
        scheduler.add_request(request("y", 7, 60, priority=1, min_tokens=50))
        step(scheduler)
        scheduler.add_request(request("x", 4, 20, priority=0, arrival=1.0))
        scheduler.add_request(request("z", 4, 20, priority=0, arrival=2.0))
        plan = step(scheduler)
        assert plan.num_scheduled_tokens == {"x": 4, "z": 4}
        # 6 blocks: y 2, x 1, z 1, two free. Take those so that x has to preempt y.
        pool = scheduler._state.cache.pool
        pool.allocate(2)
        plan = step(scheduler)
        assert plan.preempted_req_ids == {"y"}
        assert list(plan.num_scheduled_tokens) == expected

    @pytest.mark.parametrize(("quirk", "victim"), [(True, "b"), (False, "c")])
    def test_a_tie_among_victims(self, quirk: bool, victim: str) -> None:
        """Of equals the one whose id comes last goes; in vLLM the one admitted first."""
        quirks = Quirks(victim_tie_ignores_id=quirk)
        scheduler = make(blocks=7, policy="priority", quirks=quirks)
        scheduler.add_request(request("a", 8, 20))
        step(scheduler)
        for name in "bc":
            scheduler.add_request(request(name, 4, 20, priority=1))
        # a takes its third block; b and c hold one each and want a second; one is left.
        assert step(scheduler).num_scheduled_tokens == {"a": 1, "b": 4, "c": 4}
        plan = step(scheduler)
        assert plan.preempted_req_ids == {victim}

    @pytest.mark.parametrize("quirk", [False, True])
    def test_hashes_of_a_step_that_was_called_off(self, quirk: bool) -> None:
        """y is to fill blocks 6 and 7, but then x needs a block, and y has to go."""
        scheduler = make(
            blocks=8,
            policy="priority",
            caching=True,
            long_prefill_token_threshold=8,
            quirks=Quirks(preempted_step_stays_cached=quirk),
        )
        scheduler.add_request(request("y", 24, 20, priority=1))
        step(scheduler)
        scheduler.add_request(request("x", 4, 20, priority=0))
        step(scheduler)
        assert scheduler.snapshot().block_tables == {"y": ((1, 2, 3, 4),), "x": ((5,),)}
        plan = step(scheduler)
        assert plan.preempted_req_ids == {"y"}
        assert plan.num_scheduled_tokens == {"x": 1}
        # x took block 7; block 6 was never computed.
        assert scheduler.snapshot().cached_blocks == {1, 2, 3, 4, 5} | ({6} if quirk else set())

    def test_a_request_that_cannot_be_helped_preempts_itself(self) -> None:
        scheduler = make(blocks=3)
        scheduler.add_request(request("a", 8, 20))
        step(scheduler)
        plan = step(scheduler)
        assert plan.num_scheduled_tokens == {}
        assert plan.preempted_req_ids == {"a"}

    def test_nobody_is_admitted_in_a_step_that_preempts(self) -> None:
        scheduler = make(blocks=6)
        for name in "ab":
            scheduler.add_request(request(name, 7, 20))
        step(scheduler)
        step(scheduler)
        scheduler.add_request(request("c", 1))
        assert list(step(scheduler).num_scheduled_tokens) == ["a"]


class TestAdmission:
    def test_a_head_that_does_not_fit_blocks_all_behind_it(self) -> None:
        scheduler = make(blocks=4, scheduler_reserve_full_isl=True)
        scheduler.add_request(request("a", 13))
        scheduler.add_request(request("b", 1))
        assert step(scheduler).num_scheduled_tokens == {}

    def test_without_the_gate_the_first_chunk_decides(self) -> None:
        scheduler = make(blocks=4, scheduler_reserve_full_isl=False, budget=8)
        scheduler.add_request(request("a", 13))
        assert step(scheduler).num_scheduled_tokens == {"a": 8}

    def test_the_watermark_binds_only_beside_running_requests(self) -> None:
        # 10 blocks, a quarter of them reserved: 2.
        scheduler = make(blocks=10, watermark=0.25)
        scheduler.add_request(request("a", 16, 20))
        scheduler.add_request(request("b", 16, 20))
        assert list(step(scheduler).num_scheduled_tokens) == ["a"]
        # a holds 4 of 9 and takes a fifth; 4 are left, of which b needs 4.
        assert list(step(scheduler).num_scheduled_tokens) == ["a"]
        scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
        assert list(step(scheduler).num_scheduled_tokens) == ["b"]

    def test_priority_orders_the_queue(self) -> None:
        scheduler = make(max_num_seqs=1, policy="priority")
        scheduler.add_request(request("a", 1, priority=2))
        scheduler.add_request(request("c", 1, priority=1, arrival=2.0))
        scheduler.add_request(request("b", 1, priority=1, arrival=1.0))
        assert scheduler.snapshot().waiting == ("b", "c", "a")
        assert list(step(scheduler).num_scheduled_tokens) == ["b"]

    def test_a_duplicate_is_refused(self) -> None:
        scheduler = make()
        scheduler.add_request(request("a", 1))
        with pytest.raises(DuplicateRequestError, match="'a'"):
            scheduler.add_request(request("a", 1))

    def test_a_token_beyond_32_bits_is_refused(self) -> None:
        scheduler = make()
        with pytest.raises(RequestError, match="below 2\\*\\*31"):
            scheduler.add_request(request("a", (2**31,)))
        assert not scheduler.has_unfinished_requests()

    def test_many_more_requests_than_slots_at_first(self) -> None:
        scheduler = make(blocks=1000, max_num_seqs=300, budget=400)
        for i in range(300):
            scheduler.add_request(request(f"r{i}", (i, i + 1), max_tokens=2))
        assert len(step(scheduler).num_scheduled_tokens) == 200
        assert len(step(scheduler).num_scheduled_tokens) == 300
        assert len(step(scheduler).num_scheduled_tokens) == 100
        assert not scheduler.has_unfinished_requests()


class TestPrefixCaching:
    PROMPT = tuple(range(10))

    def test_the_last_token_is_always_computed(self) -> None:
        scheduler = make(caching=True)
        scheduler.add_request(request("a", self.PROMPT[:8], 1))
        step(scheduler)
        scheduler.add_request(request("b", self.PROMPT[:8], 1))
        scheduler.add_request(request("c", self.PROMPT[:9], 1))
        plan = step(scheduler)
        assert plan.num_scheduled_tokens == {"b": 4, "c": 1}
        assert [new.num_computed_tokens for new in plan.scheduled_new_reqs] == [4, 8]

    def test_equal_prompts_share_in_the_step_that_computes_them(self) -> None:
        scheduler = make(caching=True, budget=32)
        scheduler.add_request(request("a", self.PROMPT))
        scheduler.add_request(request("b", self.PROMPT))
        plan = step(scheduler)
        assert plan.num_scheduled_tokens == {"a": 10, "b": 2}
        assert plan.num_common_prefix_blocks == (2,)
        tables = [new.block_ids[0] for new in plan.scheduled_new_reqs]
        assert tables == [(1, 2, 3), (1, 2, 4)]

    def test_with_states_they_share_only_in_the_next_step(self) -> None:
        scheduler = make(caching=True, groups=HYBRID, budget=32)
        scheduler.add_request(request("a", self.PROMPT))
        scheduler.add_request(request("b", self.PROMPT))
        assert step(scheduler).num_scheduled_tokens == {"a": 8}
        plan = step(scheduler)
        # b hits the state that a left after 8 tokens; a goes on with its tail.
        assert plan.num_scheduled_tokens == {"a": 2, "b": 2}
        assert plan.scheduled_new_reqs[0].num_computed_tokens == 8

    def test_a_drafter_that_reads_hidden_states_costs_a_block(self) -> None:
        for method, expected in (("draft_model", 8), ("mtp", 4)):
            scheduler = make(caching=True, drafts=1, method=method)
            scheduler.add_request(request("a", self.PROMPT, 1))
            step(scheduler)
            scheduler.add_request(request("b", self.PROMPT, 1))
            (new,) = step(scheduler).scheduled_new_reqs
            assert new.num_computed_tokens == expected

    def test_a_salt_keeps_a_prompt_to_itself(self) -> None:
        scheduler = make(caching=True)
        scheduler.add_request(request("a", self.PROMPT, 1))
        step(scheduler)
        other = dataclasses.replace(request("b", self.PROMPT, 1), cache_salt="s")
        scheduler.add_request(other)
        (new,) = step(scheduler).scheduled_new_reqs
        assert new.num_computed_tokens == 0

    def test_a_fine_hit_is_copied(self) -> None:
        scheduler = make(caching=True, groups=HYBRID, unit=2, budget=32)
        scheduler.add_request(request("a", (*self.PROMPT, 50), 4))
        for _ in range(3):
            step(scheduler)
        scheduler.add_request(request("b", (*self.PROMPT, 60), 4))
        plan = step(scheduler)
        (new,) = plan.scheduled_new_reqs
        assert new.num_computed_tokens == 10
        # One copy for each of the two GDN groups and one for attention.
        assert len(plan.kv_cache_block_copies) == 3

    @pytest.mark.parametrize("quirk", [False, True])
    def test_a_tail_that_the_same_step_overwrites(self, quirk: bool) -> None:
        """Asynchronously the first decode runs on from the prompt's end at 6 known tokens.

        Its step moves the entry of the prompt's tail to a copy, for it writes on in the state
        block; vLLM enters that block again, since the known tokens still end there.
        """
        scheduler = make(
            caching=True,
            groups=HYBRID,
            unit=2,
            async_scheduling=True,
            quirks=Quirks(overwritten_tail_published=quirk),
        )
        scheduler.add_request(request("a", 6, 9))
        chunks = [scheduler.schedule().num_tokens.tolist() for _ in range(2)]
        assert chunks == [[4], [2]]
        state = scheduler.snapshot().block_tables["a"][0][-1]
        assert state in scheduler.snapshot().cached_blocks
        plan = scheduler.schedule().to_contract()
        assert plan.kv_cache_block_copies[0].src_block_id == state
        assert plan.kv_cache_block_copies[0].dst_block_id in scheduler.snapshot().cached_blocks
        assert (state in scheduler.snapshot().cached_blocks) == quirk

    def test_resetting_needs_an_empty_cache(self) -> None:
        scheduler = make(caching=True)
        scheduler.add_request(request("a", self.PROMPT))
        step(scheduler)
        assert not scheduler.reset_prefix_cache()
        assert scheduler.reset_prefix_cache(reset_running_requests=True)
        assert scheduler.snapshot().waiting == ("a",)
        assert scheduler.snapshot().cached_blocks == frozenset()
        plan = step(scheduler)
        assert plan.num_scheduled_tokens == {"a": 11}
        assert plan.preempted_req_ids == {"a"}
        assert plan.scheduled_cached_reqs.all_token_ids == {"a": (*self.PROMPT, 7)}

    def test_attention_blocks_beside_states_are_cleared(self) -> None:
        scheduler = make(groups=HYBRID)
        scheduler.add_request(request("a", 5))
        assert step(scheduler).new_block_ids_to_zero == (3, 4)
        assert make_and_step(make()).new_block_ids_to_zero == ()


def make_and_step(scheduler: Scheduler) -> SchedulerOutput:
    scheduler.add_request(request("a", 5))
    return step(scheduler)


class TestAlignedChunks:
    def test_chunks_end_at_blocks_until_the_last(self) -> None:
        scheduler = make(caching=True, groups=HYBRID, budget=7)
        scheduler.add_request(request("a", 10))
        assert [step(scheduler).num_scheduled_tokens["a"] for _ in range(4)] == [4, 4, 2, 1]

    @pytest.mark.parametrize(("method", "expected"), [("draft_model", [8, 2]), ("mtp", [4, 6])])
    def test_the_last_state_kept_is_one_a_hit_can_use(
        self, method: str, expected: list[int]
    ) -> None:
        """A drafter that reads hidden states costs a hit its last attention block (4 tokens)."""
        scheduler = make(caching=True, groups=HYBRID, drafts=1, method=method)
        scheduler.add_request(request("a", 10))
        assert [step(scheduler).num_scheduled_tokens["a"] for _ in range(2)] == expected

    @pytest.mark.parametrize(("quirk", "expected"), [(True, [0, 0, 0]), (False, [3, 1, 3])])
    def test_a_budget_below_a_block(self, quirk: bool, expected: list[int]) -> None:
        """vllm-project/vllm#45414: three decodes leave 3 of 6 tokens, less than a block."""
        quirks = Quirks(aligned_split_starves=quirk)
        scheduler = make(caching=True, groups=HYBRID, budget=6, max_num_seqs=4, quirks=quirks)
        for name in "abc":
            scheduler.add_request(request(name, 1, 30))
        step(scheduler)
        scheduler.add_request(request("d", 9))
        found = [step(scheduler).num_scheduled_tokens.get("d", 0) for _ in range(3)]
        assert found == expected

    def test_a_block_wider_than_any_chunk_is_computed_in_pieces(self) -> None:
        scheduler = make(caching=True, groups=HYBRID, budget=3)
        scheduler.add_request(request("a", 9))
        assert [step(scheduler).num_scheduled_tokens["a"] for _ in range(5)] == [3, 1, 3, 1, 1]


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
    ) -> None:
        scheduler = make(drafts=4)
        scheduler.add_request(request("a", 3, **params))
        plan = scheduler.schedule()
        (output,) = scheduler.update_from_output(plan, {"a": tokens})
        assert output.new_token_ids == tokens[:kept]
        assert (output.finish_reason, output.stop_reason) == (reason, told)
        assert scheduler.has_unfinished_requests() == (reason is None)

    @pytest.mark.parametrize("quirk", [False, True])
    def test_min_tokens_beyond_the_longest_sequence(self, quirk: bool) -> None:
        """vllm-project/vllm#51299: in vLLM such a request runs for ever."""
        quirks = Quirks(min_tokens_outlive_model_len=quirk)
        scheduler = make(max_model_len=6, quirks=quirks)
        scheduler.add_request(request("a", 4, 50, min_tokens=40, eos_token_id=7))
        for _ in range(5):
            step(scheduler)
        assert scheduler.has_unfinished_requests() == quirk
        assert len(scheduler.snapshot().running) == quirk

    def test_the_longest_sequence_ends_a_request(self) -> None:
        scheduler = make(max_model_len=6)
        scheduler.add_request(request("a", 4, 50))
        step(scheduler)
        plan = scheduler.schedule()
        (output,) = scheduler.update_from_output(plan, {"a": (7,)})
        assert output.finish_reason is FinishReason.LENGTH

    def test_finished_requests_are_told_once(self) -> None:
        scheduler = make()
        scheduler.add_request(request("a", 1, 1))
        step(scheduler)
        assert scheduler.has_finished_requests()
        assert step(scheduler).finished_req_ids == {"a"}
        assert step(scheduler).finished_req_ids == frozenset()

    def test_blocks_come_back_in_row_order(self) -> None:
        scheduler = make(blocks=7)
        for name in "abc":
            scheduler.add_request(request(name, 5, 1))
        step(scheduler)
        assert scheduler.snapshot().free_blocks == (2, 1, 4, 3, 6, 5)


class TestEndsFromOutside:
    def test_ids_that_are_not_alive_are_ignored(self) -> None:
        scheduler = make()
        scheduler.add_request(request("a", 1))
        scheduler.finish_requests(["b", "a", "a"], RequestStatus.FINISHED_ABORTED)
        assert not scheduler.has_unfinished_requests()

    def test_only_a_finished_status_will_do(self) -> None:
        with pytest.raises(ValueError, match="must be a finished one"):
            make().finish_requests(["a"], RequestStatus.WAITING)

    @pytest.mark.parametrize("quirk", [False, True])
    def test_the_order_in_which_blocks_come_back(self, quirk: bool) -> None:
        names = [f"r{i}" for i in range(7)]
        scheduler = make(blocks=8, quirks=Quirks(finish_in_set_order=quirk))
        for name in names:
            scheduler.add_request(request(name, 2))
        step(scheduler)
        scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        order = list(set(names)) if quirk else names
        assert scheduler.snapshot().free_blocks == tuple(1 + names.index(i) for i in order)

    def test_output_for_a_request_that_is_gone_is_dropped(self) -> None:
        scheduler = make()
        scheduler.add_request(request("a", 2))
        scheduler.add_request(request("b", 2))
        plan = scheduler.schedule()
        scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
        outputs = scheduler.update_from_output(plan, {"a": (7,), "b": (8,)})
        assert [output.request_id for output in outputs] == ["b"]

    def test_output_never_reaches_the_next_owner_of_a_slot(self) -> None:
        scheduler = make(async_scheduling=True)
        scheduler.add_request(request("a", 2))
        plan = scheduler.schedule()
        scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
        scheduler.add_request(request("b", 2))
        later = scheduler.schedule()
        assert plan.slots.tolist() == later.slots.tolist()
        assert scheduler.update_from_output(plan, {"a": (7,)}) == ()
        (output,) = scheduler.update_from_output(later, {"b": (8,)})
        assert output.new_token_ids == (8,)


class TestPause:
    def test_paused_new_admits_nobody_and_paused_all_does_nothing(self) -> None:
        scheduler = make()
        scheduler.add_request(request("a", 2))
        step(scheduler)
        scheduler.add_request(request("b", 2))
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
        assert step(scheduler).num_scheduled_tokens == {"a": 1}
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        assert step(scheduler).num_scheduled_tokens == {}
        assert not scheduler.has_unfinished_requests()
        scheduler.set_pause_state(PauseState.UNPAUSED)
        assert step(scheduler).num_scheduled_tokens == {"a": 1, "b": 2}


class TestThrottle:
    def test_prefills_wait_beside_a_decode(self) -> None:
        scheduler = make(budget=4)
        scheduler.add_request(request("a", 2))
        step(scheduler)
        scheduler.add_request(request("b", 6))
        assert scheduler.schedule(throttle_prefills=True).to_contract().num_scheduled_tokens == {
            "a": 1
        }

    def test_a_step_that_left_prefills_waiting_lifts_the_throttle(self) -> None:
        scheduler = make(budget=4)
        scheduler.add_request(request("a", 2))
        scheduler.add_request(request("b", 6))
        scheduler.add_request(request("c", 6))
        step(scheduler)
        plan = scheduler.schedule(throttle_prefills=True).to_contract()
        assert plan.num_scheduled_tokens == {"a": 1, "b": 3}


class TestDrafts:
    def test_drafts_follow_the_known_token_and_rejected_ones_are_undone(self) -> None:
        scheduler = make(drafts=3)
        scheduler.add_request(request("a", 4, 20))
        step(scheduler)
        scheduler.update_draft_token_ids({"a": (1, 2, 3)})
        plan = scheduler.schedule().to_contract()
        assert plan.num_scheduled_tokens == {"a": 4}
        assert plan.scheduled_spec_decode_tokens == {"a": (1, 2, 3)}
        assert scheduler.snapshot().num_computed_tokens == {"a": 8}
        scheduler.update_from_output(plan, {"a": (1, 9)})
        assert scheduler.snapshot().num_computed_tokens == {"a": 6}
        assert step(scheduler).num_scheduled_tokens == {"a": 1}

    def test_drafts_are_cut_to_the_budget(self) -> None:
        scheduler = make(drafts=3, budget=6)
        for name in "ab":
            scheduler.add_request(request(name, 2, 20))
        step(scheduler)
        scheduler.update_draft_token_ids({"a": (1, 2, 3), "b": (4, 5, 6)})
        plan = step(scheduler)
        assert plan.num_scheduled_tokens == {"a": 4, "b": 2}
        assert plan.scheduled_spec_decode_tokens == {"a": (1, 2, 3), "b": (4,)}

    def test_a_prefill_gets_none(self) -> None:
        scheduler = make(drafts=2, budget=4)
        scheduler.add_request(request("a", 6, 20))
        step(scheduler)
        scheduler.update_draft_token_ids({"a": (1, 2), "unknown": (3,)})
        assert step(scheduler).num_scheduled_tokens == {"a": 2}

    def test_lookahead_takes_blocks_ahead(self) -> None:
        sizes = {}
        for method in ("ngram", "mtp"):
            scheduler = make(drafts=3, method=method)
            scheduler.add_request(request("a", 6))
            (new,) = step(scheduler).scheduled_new_reqs
            sizes[method] = len(new.block_ids[0])
        assert sizes == {"ngram": 2, "mtp": 3}

    @pytest.mark.parametrize(("quirk", "drafts"), [(False, (-1,)), (True, (-1, -1, -1))])
    def test_a_padded_admission_that_is_cut(self, quirk: bool, drafts: tuple[int, ...]) -> None:
        """vllm-project/vllm#54392: a threshold of 2 leaves room for one of three drafts."""
        scheduler = make(
            drafts=3,
            long_prefill_token_threshold=2,
            quirks=Quirks(padded_admission_cut_late=quirk),
        )
        scheduler.add_request(request("a", 2, 20))
        step(scheduler)
        scheduler.add_request(request("b", 1, 20))
        plan = scheduler.schedule().to_contract()
        assert plan.num_scheduled_tokens == {"a": 1, "b": 2}
        assert plan.scheduled_spec_decode_tokens == {"b": drafts}

    def test_a_padded_admission_waits_for_room(self) -> None:
        scheduler = make(drafts=3, budget=4)
        scheduler.add_request(request("a", 2, 20))
        step(scheduler)
        scheduler.add_request(request("b", 1, 20))
        assert step(scheduler).num_scheduled_tokens == {"a": 1}


class TestAsync:
    def test_a_step_is_planned_before_the_last_tokens_are_known(self) -> None:
        scheduler = make(async_scheduling=True)
        scheduler.add_request(request("a", 3, 3))
        plans = [scheduler.schedule()]
        for _ in range(3):
            plans.append(scheduler.schedule())
            scheduler.update_from_output(plans[-2], {"a": (7,)})
        # Prompt, then two of three tokens; a step for the token after the third would be in vain.
        assert [plan.num_tokens.tolist() for plan in plans] == [[3], [1], [1], []]
        assert [plan.num_outputs.tolist() for plan in plans] == [[0], [1], [2], []]
        assert not scheduler.has_unfinished_requests()

    def test_drafts_are_placeholders(self) -> None:
        scheduler = make(async_scheduling=True, drafts=2)
        scheduler.add_request(request("a", 3, 20))
        first, second = scheduler.schedule(), scheduler.schedule()
        assert second.to_contract().scheduled_spec_decode_tokens == {"a": (-1, -1)}
        assert scheduler.snapshot().num_output_placeholders == {"a": 4}
        scheduler.update_from_output(first, {"a": (7,)})
        scheduler.update_from_output(second, {"a": (8, 9)})
        assert scheduler.snapshot().num_output_placeholders == {"a": 0}
        assert scheduler.snapshot().num_computed_tokens == {"a": 5}

    def test_stale_output_is_delivered_before_its_request_may_resume(self) -> None:
        scheduler = make(blocks=6, async_scheduling=True)
        for name in "ab":
            scheduler.add_request(request(name, 7, 20))
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

    def test_a_reset_drops_stale_output(self) -> None:
        scheduler = make(caching=True, async_scheduling=True)
        scheduler.add_request(request("a", 7, 20))
        plan = scheduler.schedule()
        assert scheduler.reset_prefix_cache(reset_running_requests=True)
        again = scheduler.schedule()
        assert again.num_tokens.tolist() == [7]
        assert scheduler.update_from_output(plan, {"a": (5,)}) == ()
        (output,) = scheduler.update_from_output(again, {"a": (5,)})
        assert output.new_token_ids == (5,)

    def test_two_resets_do_not_count_a_step_in_flight_twice(self) -> None:
        scheduler = make(caching=True, async_scheduling=True)
        scheduler.add_request(request("a", 7, 20))
        plans = []
        for _ in range(2):
            plans.append(scheduler.schedule())
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
        plans.append(scheduler.schedule())
        outputs = [scheduler.update_from_output(plan, {"a": (5,)}) for plan in plans]
        assert [len(output) for output in outputs] == [0, 0, 1]

    @pytest.mark.parametrize(("quirk", "expected"), [(False, {}), (True, {"a": -1})])
    def test_a_request_at_the_longest_length(self, quirk: bool, expected: dict[str, int]) -> None:
        """vllm-project/vllm#53962: one token too many was computed, so minus one is left."""
        scheduler = make(
            async_scheduling=True,
            max_model_len=8,
            quirks=Quirks(negative_schedule=quirk),
        )
        scheduler.add_request(request("a", 8, 4))
        assert scheduler.schedule().to_contract().num_scheduled_tokens == {"a": 8}
        assert scheduler.schedule().to_contract().num_scheduled_tokens == expected


class TestSlots:
    def test_a_freed_slot_is_poisoned(self) -> None:
        scheduler = make()
        scheduler.add_request(request("a", 5, 1))
        step(scheduler)
        requests = scheduler._state.requests
        assert (requests._fields == POISON).all()
        assert (requests.token_ids[0, :6] == POISON).sum() >= 5
        assert scheduler._state.cache.groups[0].table[:, :2].tolist()[63] in ([-1, -1], [0, 0])

    @pytest.mark.parametrize("asynchronous", [False, True])
    @pytest.mark.parametrize("groups", [(ATTENTION,), HYBRID])
    @pytest.mark.parametrize("caching", [False, True])
    def test_used_slots_decide_as_fresh_ones_do(
        self, caching: bool, groups: tuple[KVCacheGroup, ...], asynchronous: bool
    ) -> None:
        """The same requests again, on a scheduler with a past and on one without."""

        def make_one() -> Scheduler:
            return make(
                blocks=24, caching=caching, groups=groups, async_scheduling=asynchronous, budget=12
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


def drive(scheduler: Scheduler, seed: int, prefix: str) -> list[SchedulerOutput]:
    """Run twelve random requests to their ends."""
    rng = random.Random(seed)
    shared = [rng.randrange(9) for _ in range(30)]
    plans = []
    for i in range(12):
        length = rng.randint(1, 30)
        prompt = (*shared[: length // 2], *(rng.randrange(9) for _ in range(length // 2)), 1)
        scheduler.add_request(request(f"{prefix}{i}", prompt, rng.randint(1, 9)))
    while scheduler.has_unfinished_requests():
        plans.append(step(scheduler))
        assert len(plans) < 500
    return plans


@pytest.mark.parametrize("seed", range(6))
def test_the_pool_stays_consistent(seed: int) -> None:
    """Held and free blocks share the pool, and every holder is a table entry, after each step."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    for caching in (False, True):
        for groups in ((ATTENTION,), HYBRID):
            scheduler = make(
                blocks=22,
                caching=caching,
                groups=groups,
                drafts=rng.choice([0, 2]),
                policy=rng.choice(["fcfs", "priority"]),
                async_scheduling=rng.random() < 0.5,
                budget=12,
            )
            shared = tuple(rng.randrange(9) for _ in range(20))
            for i in range(60):
                if rng.random() < 0.5:
                    prompt = (*shared[: rng.randint(1, 20)], rng.randrange(9))
                    new = request(f"r{i}", prompt, rng.randint(1, 12), rng.randint(0, 2), float(i))
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
