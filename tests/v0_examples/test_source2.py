"""Source-2's worked example of a chunk, and its table of the two policies."""

import pytest

from servespec.reference.contracts.v0 import SequenceStatus


class TestWorkedExampleOfSource2:
    """Budget 2048, 1500 decodes, a prompt of 4096 tokens: 548 left, 512 scheduled."""

    @pytest.fixture
    def prepared(self, runner, chunked, blocks):
        def prepare(alignment):
            run = runner(
                chunked(2048, 1501, 8192, chunk_alignment=alignment), blocks(2000, block_size=16)
            )
            for index in range(1500):
                run.add(f"d{index}", 1)
            first = run.step()
            assert first.num_prefill_groups == 1500
            run.add("long", 4096)
            return run

        return prepare

    def test_548_tokens_are_left_and_512_are_scheduled(self, runner, prepared):
        run = prepared(256)
        output = run.step()
        assert output.num_prefill_groups == 1
        assert len(output.scheduled_seq_groups) == 1501
        long, decode = output.scheduled_seq_groups[:2]
        # min(4096, 2048 - 1500) = 548, which is all that is left: 548 // 256 * 256 = 512.
        assert (long.request_id, long.token_chunk_size, long.do_sample) == ("long", 512, False)
        assert (decode.token_chunk_size, decode.do_sample) == (1, True)
        assert output.num_batched_tokens == 2012
        # 3584 tokens are left for later steps: seven more chunks, the last of which samples.
        for chunk in range(2, 9):
            long = run.step().scheduled_seq_groups[0]
            assert (long.token_chunk_size, long.do_sample) == (512, chunk == 8)
        assert run.step().num_prefill_groups == 0

    def test_the_release_takes_all_548(self, runner, prepared):
        run = prepared(1)
        output = run.step()
        assert output.scheduled_seq_groups[0].token_chunk_size == 548
        assert output.num_batched_tokens == 2048


class TestAlignment:
    """Only a prefill that would take all that is left is floored."""

    def test_a_chunk_with_room_beside_it_is_not_floored(self, runner, chunked, blocks, chunks):
        run = runner(chunked(600, 4, 8192, chunk_alignment=256), blocks(400, block_size=16))
        run.add("a", 599)
        assert chunks(run.step()) == {"a": 599}

    def test_an_exact_fit_is_floored_too(self, runner, chunked, blocks, chunks):
        run = runner(chunked(600, 4, 8192, chunk_alignment=256), blocks(400, block_size=16))
        run.add("a", 600)
        assert chunks(run.step()) == {"a": 512}
        assert chunks(run.step()) == {"a": 88}

    def test_fewer_than_256_left_give_a_waiting_prompt_nothing(
        self, runner, chunked, blocks, chunks
    ):
        run = runner(chunked(256, 4, 8192, chunk_alignment=256), blocks(400, block_size=16))
        run.add("a", 1)
        run.step()
        run.add("b", 300)
        run.add("c", 10)
        # 255 are left beside a: b would take them all, 255 // 256 * 256 = 0, and c waits behind.
        assert chunks(run.step()) == {"a": 1}
        assert run.state.waiting == ("b", "c")

    def test_a_running_prefill_that_gets_nothing_ends_the_pass(
        self, runner, chunked, blocks, chunks
    ):
        run = runner(chunked(260, 8, 8192, chunk_alignment=256), blocks(400, block_size=16))
        run.add("a", 1, at=0.0)
        run.add("b", 600, at=1.0)
        # 259 are left for b: 256. Then b is served before c, which is younger.
        assert chunks(run.step()) == {"a": 1, "b": 256}
        run.add("c", 5, at=2.0)
        run.add("d", 5, at=2.0)
        assert chunks(run.step()) == {"a": 1, "b": 256}
        # 88 of b are left: both of the others fit beside them.
        assert chunks(run.step()) == {"a": 1, "b": 88, "c": 5, "d": 5}
        run.add("e", 300, at=1.5)
        # 260 - 4 = 256 tokens are left.
        assert chunks(run.step()) == {"a": 1, "b": 1, "c": 1, "d": 1, "e": 256}
        run.add("f", 3, at=3.0)
        # e is older than c and d: it gets its 44 of the 258 left, f comes last.
        assert chunks(run.step()) == {"a": 1, "b": 1, "e": 44, "c": 1, "d": 1, "f": 3}

    def test_groups_behind_a_floored_prefill_sit_out(self, runner, chunked, blocks, chunks):
        run = runner(chunked(10, 4, 64, chunk_alignment=8), blocks(40))
        run.add("a", 1, at=0.0)
        run.add("b", 1, at=1.0)
        run.add("c", 1, at=2.0)
        run.step()
        run.scheduler.abort_seq_group(("c",))
        run.add("p", 20, at=0.5)
        # 8 left of 10 beside a and b, in whole: 8.
        assert chunks(run.step()) == {"p": 8, "a": 1, "b": 1}
        run.add("q", 3, at=3.0)
        # By age a, p, b: 9 left for p, which wants 12: 8. Then b takes the last token.
        assert chunks(run.step()) == {"p": 8, "a": 1, "b": 1}
        # p wants 4 of 9; b 1 of 5; q its 3.
        assert chunks(run.step()) == {"q": 3, "p": 4, "a": 1, "b": 1}

    def test_a_budget_below_the_alignment_never_starts_a_long_prompt(
        self, runner, chunked, blocks, names
    ):
        run = runner(chunked(200, 4, 8192, chunk_alignment=256), blocks(400, block_size=16))
        run.add("a", 200)
        run.add("b", 3)
        for _ in range(5):
            assert names(run.step()) == []
        assert run.state.waiting == ("a", "b")

    def test_decodes_and_the_default_policy_are_never_floored(
        self, runner, default, chunked, blocks, chunks
    ):
        run = runner(default(64, chunk_alignment=256), blocks(40))
        run.add("a", 30)
        assert chunks(run.step()) == {"a": 30}
        assert chunks(run.step()) == {"a": 1}
        run = runner(chunked(1, 1, 64, chunk_alignment=256), blocks(40))
        run.add("a", 1)
        # One token fits exactly but is a prefill: 1 // 256 * 256 = 0.
        assert chunks(run.step()) == {}


class TestComparisonTableOfSource2:
    """One test for each row of source-2's table of the two policies."""

    def test_priority(self, runner, default, chunked, blocks, chunks, names):
        """Default: prefill, decode, swap-in. Chunked: decode, swap-in, prefill."""
        run = runner(default(), blocks(40))
        run.add("old", 4)
        run.step()
        run.add("new", 4)
        assert names(run.step()) == ["new"]
        run = runner(chunked(4, 4), blocks(40))
        run.add("old", 4)
        run.step()
        run.add("new", 9)
        # The decode takes its token first; the prompt gets what is left.
        assert chunks(run.step()) == {"old": 1, "new": 3}

    def test_mixing_prefill_and_decode(self, runner, default, chunked, blocks, names):
        for policy, together in ((default(), False), (chunked(), True)):
            run = runner(policy, blocks(40))
            run.add("a", 4)
            run.step()
            run.add("b", 4)
            output = run.step()
            assert (set(names(output)) == {"a", "b"}) == together
            assert output.num_prefill_groups == 1

    def test_long_prompts(self, runner, default, chunked, blocks, chunks):
        """Default: a whole prompt or none. Chunked: pieces."""
        run = runner(default(10, 4, 10), blocks(40))
        run.add("a", 6)
        run.add("b", 6)
        assert chunks(run.step()) == {"a": 6}
        assert chunks(run.step()) == {"b": 6}
        run = runner(chunked(10, 4), blocks(40))
        run.add("a", 6)
        run.add("b", 6)
        output = run.step()
        assert chunks(output) == {"a": 6, "b": 4}
        assert [group.do_sample for group in output.scheduled_seq_groups] == [True, False]
        assert chunks(run.step()) == {"b": 2, "a": 1}

    def test_budget_at_the_start(self, runner, default, chunked, blocks, chunks, names):
        """Default: running sequences are counted in advance. Chunked: as they are scheduled."""
        run = runner(default(16, 2, 16), blocks(40))
        run.add("a", 2)
        run.add("b", 2)
        run.step()
        run.add("c", 2)
        # No decode is scheduled beside a prompt, yet a and b take both seats.
        assert names(run.step()) == ["a", "b"]
        run = runner(chunked(12, 7, 64, chunk_alignment=8), blocks(60))
        run.add("p", 40, at=5.0)
        for index, name in enumerate("abc"):
            run.add(name, 1, best_of=2, at=float(index))
        # p gets 8 of 12 tokens; its seat and two for each of the others are all 7.
        assert chunks(run.step()) == {"p": 8, "a": 1, "b": 1, "c": 1}
        run.add("s", 3, at=6.0)
        # Six forks leave 6 tokens, of which p gets 6 // 8 * 8 = 0. It sits out with its blocks,
        # but not with its seat, and s comes in: 8 sequences run.
        assert chunks(run.step()) == {"s": 3, "a": 1, "b": 1, "c": 1}
        assert run.state.running == ("p", "s", "a", "b", "c")
        running = [seq for seqs in run.state.sequences.values() for seq in seqs]
        assert len(running) == 8
        assert {seq.status for seq in running} == {SequenceStatus.RUNNING}

    def test_running_queue(self, runner, default, chunked, blocks, chunks):
        """Default: decodes only. Chunked: decodes, then unfinished prefills."""
        run = runner(default(20, 4, 20), blocks(40))
        run.add("a", 10)
        run.add("b", 10)
        run.step()
        assert not any(seq.is_prefill for (seq,) in run.state.sequences.values())
        run = runner(chunked(10, 4), blocks(40))
        run.add("p", 25, at=0.0)
        run.step()
        run.add("d", 1, at=1.0)
        run.step()
        assert run.state.running == ("p",)
        run.step()
        # p took its last 5 tokens, d came beside it: the new prompt is queued first.
        assert run.state.running == ("d", "p")
        run.add("q", 25, at=0.5)
        run.step()
        assert run.state.running == ("q", "p", "d")
        # By age p, q, d: q takes all 9 tokens that p leaves, so the younger decode d sits out. It
        # is queued first then, and the decode p before the unfinished prefill q.
        assert chunks(run.step()) == {"q": 9, "p": 1}
        assert run.state.running == ("d", "p", "q")
        assert [seq.is_prefill for (seq,) in run.state.sequences.values()] == [False, False, True]

    def test_prefills_of_a_plan_come_from_all_three_queues(
        self, runner, chunked, blocks, chunks, names
    ):
        """Chunked only: new prompts, then unfinished running ones, then swapped ones."""
        run = runner(chunked(12, 8, 64, preemption_mode="swap"), blocks(8, 20))
        run.add("a", 11, at=0.0)
        run.add("b", 20, at=1.0)
        # a: 3 blocks; b: 5 blocks for its 20 tokens although it computes 1 now.
        assert chunks(run.step()) == {"a": 11, "b": 1}
        # a's 12th token fits its last block, but no block is free for it: b is swapped out.
        output = run.step()
        assert names(output) == ["a"]
        assert len(output.blocks_to_swap_out) == 5
        assert run.state.swapped == ("b",)
        # b needs 19 tokens at once to come back, and the budget is 12: it never does.
        run.scheduler.abort_seq_group(("a",))
        for _ in range(3):
            assert names(run.step()) == []
        assert run.state.swapped == ("b",)
        run = runner(chunked(24, 8, 64, preemption_mode="swap"), blocks(8, 20))
        run.add("a", 11, at=0.0)
        run.add("b", 20, at=1.0)
        assert chunks(run.step()) == {"a": 11, "b": 13}
        assert len(run.step().blocks_to_swap_out) == 5
        run.scheduler.abort_seq_group(("a",))
        run.add("c", 2, at=2.0)
        output = run.step()
        # b comes back with the 7 tokens that remain; c is new and listed first.
        assert chunks(output) == {"c": 2, "b": 7}
        assert names(output) == ["c", "b"]
        assert output.num_prefill_groups == 2
        assert [group.do_sample for group in output.scheduled_seq_groups] == [True, True]
        assert run.state.running == ("c", "b")
