"""What a cached prefix saves, and how chunks keep GDN states reusable, worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from servespec.reference.contracts import Quirks


class TestPrefixCaching:
    PROMPT = tuple(range(10))

    def test_the_last_token_is_always_computed(self, make, make_request, step) -> None:
        scheduler = make(caching=True)
        scheduler.add_request(make_request("a", self.PROMPT[:8], 1))
        step(scheduler)
        scheduler.add_request(make_request("b", self.PROMPT[:8], 1))
        scheduler.add_request(make_request("c", self.PROMPT[:9], 1))
        plan = step(scheduler)
        assert plan.num_scheduled_tokens == {"b": 4, "c": 1}
        assert [new.num_computed_tokens for new in plan.scheduled_new_reqs] == [4, 8]

    def test_equal_prompts_share_in_the_step_that_computes_them(
        self, make, make_request, step
    ) -> None:
        scheduler = make(caching=True, budget=32)
        scheduler.add_request(make_request("a", self.PROMPT))
        scheduler.add_request(make_request("b", self.PROMPT))
        plan = step(scheduler)
        assert plan.num_scheduled_tokens == {"a": 10, "b": 2}
        assert plan.num_common_prefix_blocks == (2,)
        tables = [new.block_ids[0] for new in plan.scheduled_new_reqs]
        assert tables == [(1, 2, 3), (1, 2, 4)]

    def test_with_states_they_share_only_in_the_next_step(self, make, make_request, step) -> None:
        scheduler = make(caching=True, hybrid=True, budget=32)
        scheduler.add_request(make_request("a", self.PROMPT))
        scheduler.add_request(make_request("b", self.PROMPT))
        assert step(scheduler).num_scheduled_tokens == {"a": 8}
        plan = step(scheduler)
        # b hits the state that a left after 8 tokens; a goes on with its tail.
        assert plan.num_scheduled_tokens == {"a": 2, "b": 2}
        assert plan.scheduled_new_reqs[0].num_computed_tokens == 8

    def test_a_drafter_that_reads_hidden_states_costs_a_block(
        self, make, make_request, step
    ) -> None:
        for method, expected in (("draft_model", 8), ("mtp", 4)):
            scheduler = make(caching=True, drafts=1, method=method)
            scheduler.add_request(make_request("a", self.PROMPT, 1))
            step(scheduler)
            scheduler.add_request(make_request("b", self.PROMPT, 1))
            (new,) = step(scheduler).scheduled_new_reqs
            assert new.num_computed_tokens == expected

    def test_a_salt_keeps_a_prompt_to_itself(self, make, make_request, step) -> None:
        scheduler = make(caching=True)
        scheduler.add_request(make_request("a", self.PROMPT, 1))
        step(scheduler)
        other = dataclasses.replace(make_request("b", self.PROMPT, 1), cache_salt="s")
        scheduler.add_request(other)
        (new,) = step(scheduler).scheduled_new_reqs
        assert new.num_computed_tokens == 0

    def test_a_fine_hit_is_copied(self, make, make_request, step) -> None:
        scheduler = make(caching=True, hybrid=True, unit=2, budget=32)
        scheduler.add_request(make_request("a", (*self.PROMPT, 50), 4))
        for _ in range(3):
            step(scheduler)
        scheduler.add_request(make_request("b", (*self.PROMPT, 60), 4))
        plan = step(scheduler)
        (new,) = plan.scheduled_new_reqs
        assert new.num_computed_tokens == 10
        # One copy for each of the two GDN groups and one for attention.
        assert len(plan.kv_cache_block_copies) == 3

    @pytest.mark.parametrize("quirk", [False, True])
    def test_a_tail_that_the_same_step_overwrites(self, quirk: bool, make, make_request) -> None:
        """Asynchronously the first decode runs on from the prompt's end at 6 known tokens.

        Its step moves the entry of the prompt's tail to a copy, for it writes on in the state
        block; vLLM enters that block again, since the known tokens still end there.
        """
        scheduler = make(
            caching=True,
            hybrid=True,
            unit=2,
            async_scheduling=True,
            quirks=Quirks(overwritten_tail_published=quirk),
        )
        scheduler.add_request(make_request("a", 6, 9))
        chunks = [scheduler.schedule().num_tokens.tolist() for _ in range(2)]
        assert chunks == [[4], [2]]
        state = scheduler.snapshot().block_tables["a"][0][-1]
        assert state in scheduler.snapshot().cached_blocks
        plan = scheduler.schedule().to_contract()
        assert plan.kv_cache_block_copies[0].src_block_id == state
        assert plan.kv_cache_block_copies[0].dst_block_id in scheduler.snapshot().cached_blocks
        assert (state in scheduler.snapshot().cached_blocks) == quirk

    def test_resetting_needs_an_empty_cache(self, make, make_request, step) -> None:
        scheduler = make(caching=True)
        scheduler.add_request(make_request("a", self.PROMPT))
        step(scheduler)
        assert not scheduler.reset_prefix_cache()
        assert scheduler.reset_prefix_cache(reset_running_requests=True)
        assert scheduler.snapshot().waiting == ("a",)
        assert scheduler.snapshot().cached_blocks == frozenset()
        plan = step(scheduler)
        assert plan.num_scheduled_tokens == {"a": 11}
        assert plan.preempted_req_ids == {"a"}
        assert plan.scheduled_cached_reqs.all_token_ids == {"a": (*self.PROMPT, 7)}

    def test_attention_blocks_beside_states_are_cleared(self, make, make_request, step) -> None:
        scheduler = make(hybrid=True)
        scheduler.add_request(make_request("a", 5))
        assert step(scheduler).new_block_ids_to_zero == (3, 4)
        dense = make()
        dense.add_request(make_request("a", 5))
        assert step(dense).new_block_ids_to_zero == ()


class TestAlignedChunks:
    def test_chunks_end_at_blocks_until_the_last(self, make, make_request, step) -> None:
        scheduler = make(caching=True, hybrid=True, budget=7)
        scheduler.add_request(make_request("a", 10))
        assert [step(scheduler).num_scheduled_tokens["a"] for _ in range(4)] == [4, 4, 2, 1]

    @pytest.mark.parametrize(("method", "expected"), [("draft_model", [8, 2]), ("mtp", [4, 6])])
    def test_the_last_state_kept_is_one_a_hit_can_use(
        self, method: str, expected: list[int], make, make_request, step
    ) -> None:
        """A drafter that reads hidden states costs a hit its last attention block (4 tokens)."""
        scheduler = make(caching=True, hybrid=True, drafts=1, method=method)
        scheduler.add_request(make_request("a", 10))
        assert [step(scheduler).num_scheduled_tokens["a"] for _ in range(2)] == expected

    @pytest.mark.parametrize(("quirk", "expected"), [(True, [0, 0, 0]), (False, [3, 1, 3])])
    def test_a_budget_below_a_block(
        self, quirk: bool, expected: list[int], make, make_request, step
    ) -> None:
        """vllm-project/vllm#45414: three decodes leave 3 of 6 tokens, less than a block."""
        quirks = Quirks(aligned_split_starves=quirk)
        scheduler = make(caching=True, hybrid=True, budget=6, max_num_seqs=4, quirks=quirks)
        for name in "abc":
            scheduler.add_request(make_request(name, 1, 30))
        step(scheduler)
        scheduler.add_request(make_request("d", 9))
        found = [step(scheduler).num_scheduled_tokens.get("d", 0) for _ in range(3)]
        assert found == expected

    def test_a_block_wider_than_any_chunk_is_computed_in_pieces(
        self, make, make_request, step
    ) -> None:
        scheduler = make(caching=True, hybrid=True, budget=3)
        scheduler.add_request(make_request("a", 9))
        assert [step(scheduler).num_scheduled_tokens["a"] for _ in range(5)] == [3, 1, 3, 1, 1]
