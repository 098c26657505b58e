"""Who is preempted, and what becomes of blocks that forks share."""

import pytest

from servespec.reference.contracts.v0 import SequenceStatus


class TestPreemption:
    """Who falls, how, and where the victims wait."""

    @pytest.fixture(params=["default", "chunked"])
    def policy(self, request):
        return request.getfixturevalue(request.param)

    @pytest.fixture
    def full(self, runner, policy, blocks):
        """Three decodes of 4 tokens each in a pool of 3 blocks; the next token needs a 4th."""

        def fill(cpu=20, mode=None, **more):
            run = runner(policy(64, preemption_mode=mode), blocks(3, cpu))
            for index, name in enumerate("abc"):
                run.add(name, 4, at=float(index), **more)
            run.step()
            return run

        return fill

    def test_the_youngest_are_recomputed_and_wait_in_order_of_age(self, full, chunks):
        run = full()
        output = run.step()
        # a takes c's block; then b has none and is alone in the queue: it falls itself.
        assert chunks(output) == {"a": 1}
        assert output.preempted == 2
        assert output.blocks_to_swap_out == ()
        # c fell first, b last: the last goes to the very head.
        assert run.state.waiting == ("b", "c")
        (seq,) = run.state.sequences["b"]
        assert (seq.status, seq.num_computed_tokens) == (SequenceStatus.WAITING, 0)
        assert seq.output_token_ids == (9,)

    def test_swapped_groups_keep_their_tokens_and_come_back_oldest_first(self, full, chunks):
        run = full(mode="swap")
        # Stacks: a got block 2, b 1, c 0; the CPU pool gives 19 first.
        output = run.step()
        assert output.blocks_to_swap_out == ((0, 19), (1, 18))
        assert run.state.swapped == ("c", "b")
        assert run.state.gpu_block_tables == {0: (2, 0)}
        assert run.state.free_gpu_blocks == (1,)
        run.scheduler.abort_seq_group(("a",))
        # Each needs its block and one more for the next token: 2 of 3, so only b returns.
        output = run.step()
        assert chunks(output) == {"b": 1}
        # a's blocks were freed in the order 2, 0: 0 is on top, then 2, then 1.
        assert output.blocks_to_swap_in == ((18, 0),)
        assert run.state.gpu_block_tables == {1: (0, 2)}
        assert run.state.swapped == ("c",)
        (seq,) = run.state.sequences["b"]
        assert (seq.num_computed_tokens, seq.is_prefill) == (5, False)

    def test_a_free_block_is_asked_for_even_if_the_last_block_has_room(
        self, runner, default, blocks
    ):
        run = runner(default(preemption_mode="swap"), blocks(4, 20))
        for index, name in enumerate("abcd"):
            run.add(name, 4, at=float(index))
        run.step()
        run.step()
        # a and b hold 2 blocks each, with room for three more tokens.
        assert (run.state.running, run.state.swapped) == (("a", "b"), ("d", "c"))
        assert run.state.free_gpu_blocks == ()
        output = run.step()
        # Still b falls; and a step that preempts brings nothing back, although 2 blocks are free.
        assert (output.preempted, output.blocks_to_swap_in) == (1, ())
        assert run.state.swapped == ("d", "c", "b")
        # b is the oldest that is out: it needs 2 blocks and one more, and nobody passes it.
        assert run.step().blocks_to_swap_in == ()
        assert run.state.swapped == ("b", "c", "d")

    def test_default_admits_no_prompt_while_something_is_swapped_out(
        self, runner, default, chunked, blocks, names
    ):
        for policy, admitted in ((default, False), (chunked, True)):
            run = runner(policy(preemption_mode="swap"), blocks(4, 20))
            run.add("a", 8, at=0.0)
            run.add("b", 8, at=1.0)
            run.step()
            run.step()
            assert run.state.swapped == ("b",)
            run.add("c", 2, at=2.0)
            assert ("c" in names(run.step())) == admitted

    def test_a_recomputed_group_counts_its_output_as_prompt(self, runner, chunked, blocks, chunks):
        run = runner(chunked(6, 4), blocks(4))
        run.add("a", 4, at=0.0)
        run.add("b", 4, at=1.0)
        assert chunks(run.step()) == {"a": 4, "b": 2}
        assert chunks(run.step()) == {"a": 1, "b": 2}
        assert chunks(run.step()) == {"a": 1, "b": 1}
        # Both hold 2 of the 4 blocks now, so a makes b fall.
        assert chunks(run.step()) == {"a": 1}
        assert run.state.waiting == ("b",)
        run.scheduler.abort_seq_group(("a",))
        output = run.step()
        # 4 prompt tokens and the two it had sampled; the chunk reaches the end, so it samples.
        (group,) = output.scheduled_seq_groups
        assert (group.token_chunk_size, group.is_prompt, group.do_sample) == (6, True, True)
        (seq,) = run.state.sequences["b"]
        assert seq.output_token_ids == (9, 9, 9)

    def test_either_mode_swaps_what_may_run_several_sequences(self, runner, default, blocks):
        run = runner(default(), blocks(4, 20))
        run.add("a", 8, at=0.0)
        run.add("b", 4, at=1.0, best_of=2)
        run.step()
        output = run.step()
        # b may run 2 sequences, so it is swapped; they share the one block, which moves once.
        assert len(output.blocks_to_swap_out) == 1
        assert run.state.swapped == ("b",)
        assert run.state.cpu_ref_counts[19] == 2


class TestBlocks:
    """Forks, copies on write, statuses of an allocation, and the newer manager."""

    def test_forks_share_blocks_until_one_writes(self, runner, default, blocks, chunks):
        run = runner(default(), blocks(10))
        run.add("a", 6, best_of=3)
        run.step()
        assert run.state.gpu_block_tables == {0: (9, 8), 1: (9, 8), 2: (9, 8)}
        assert run.state.gpu_ref_counts[8:] == (3, 3)
        assert [seq.seq_id for seq in run.state.sequences["a"]] == [0, 1, 2]
        output = run.step()
        # Token 7 goes to block 8, held by three: two copies, the last holder writes in place.
        assert output.blocks_to_copy == ((8, 7), (8, 6))
        assert run.state.gpu_block_tables == {0: (9, 7), 1: (9, 6), 2: (9, 8)}
        assert output.num_batched_tokens == 3
        assert chunks(output) == {"a": 1}
        assert run.step().blocks_to_copy == ()

    def test_a_dropped_beam_makes_room_for_a_fork_of_another(self, runner, default, blocks):
        run = runner(default(), blocks(10))
        run.add("a", 6, best_of=2, beams=True)
        run.step()
        run.step()
        assert run.state.gpu_block_tables == {0: (9, 7), 1: (9, 8)}
        run.step(a=[(1, 5), (1, 6)])
        assert [(s.seq_id, s.output_token_ids[-1]) for s in run.state.sequences["a"]] == [
            (1, 6),
            (2, 5),
        ]
        assert run.state.gpu_block_tables == {1: (9, 8), 2: (9, 8)}
        assert [(item.seq_id, item.parent_seq_id) for item in run.results[0].outputs] == [
            (2, 1),
            (1, 1),
        ]

    def test_statuses_of_an_allocation(self, runner, default, blocks, chunks):
        # A fifth of 10 blocks is kept free: 2.
        run = runner(default(64, 8, 64), blocks(10, watermark=0.2))
        run.add("never", 36)  # 9 blocks, and 2 of 10 kept
        run.add("now", 17)  # 5
        run.add("later", 13)  # 4, and 5 - 4 < 2
        run.add("behind", 1)
        output = run.step()
        assert output.ignored_request_ids == ("never",)
        assert chunks(output) == {"now": 17}
        assert run.state.waiting == ("later", "behind")

    def test_prompts_over_the_length_limit_are_ignored(
        self, runner, default, chunked, blocks, chunks
    ):
        run = runner(default(16, 4, 10), blocks(40))
        run.add("a", 11)
        run.add("b", 10)
        output = run.step()
        assert output.ignored_request_ids == ("a",)
        assert chunks(output) == {"b": 10}
        # The chunked policy compares the limit with the chunk: a cut prompt slips through.
        run = runner(chunked(8, 4, 10), blocks(40))
        run.add("a", 11)
        output = run.step()
        assert output.ignored_request_ids == ()
        assert chunks(output) == {"a": 8}

    def test_a_swapped_group_too_large_for_the_pool_is_ignored_and_keeps_its_cpu_blocks(
        self, runner, default, blocks
    ):
        run = runner(default(preemption_mode="swap"), blocks(3, 20))
        run.add("a", 12, at=1.0)
        run.step()
        # a holds the whole pool, so it falls itself; with one block more it can never return.
        assert run.step().preempted == 1
        output = run.step()
        assert output.ignored_request_ids == ("a",)
        state = run.state
        assert (state.waiting, state.running, state.swapped) == ((), (), ())
        assert state.cpu_block_tables == {0: (19, 18, 17)}
        assert len(state.free_cpu_blocks) == 17

    def test_lookahead_slots_of_the_newer_manager(self, runner, default, blocks):
        policy = default(use_v2_block_manager=True, num_lookahead_slots=5)
        run = runner(policy, blocks(10))
        run.add("a", 4)
        assert run.step().num_lookahead_slots == 5
        # Lowest id first; a prefill gets no lookahead slots.
        assert run.state.gpu_block_tables == {0: (0,)}
        run.step()
        # 5 tokens and 5 slots: 3 blocks.
        assert run.state.gpu_block_tables == {0: (0, 1, 2)}
        run = runner(policy, blocks(2))
        run.add("a", 4)
        run.step()
        # Tokens 5 to 10 touch blocks 1 and 2, and only one is free.
        assert run.step().preempted == 1
