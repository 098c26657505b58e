"""The legacy scheduler worked out by hand: source-2's example and table, and V0's oddities.

Every example runs on the reference and on the fast scheduler; the numbers are derived in the
comments or copied from source-2, never from either of them.
"""

import pytest

from servespec.conformance.adapters.v0_reference import ReferenceV0Scheduler
from servespec.fast.scheduling.v0 import Scheduler as FastV0Scheduler
from servespec.reference.contracts import (
    ConfigError,
    DuplicateRequestError,
    FinishReason,
    RequestError,
    SamplingParams,
)
from servespec.reference.contracts.v0 import (
    SequenceGroupRequest,
    SequenceSample,
    SequenceStatus,
    V0CacheConfig,
    V0SchedulerConfig,
    V0SchedulingError,
)


class Runner:
    """A scheduler and a clock; every sequence samples token 9 unless told otherwise."""

    def __init__(self, kind, scheduler, cache):
        self.scheduler = kind(V0SchedulerConfig(**scheduler), V0CacheConfig(**cache))
        self.best_of = {}
        self.now = 100.0
        self.output = self.results = None

    def add(self, name, prompt, best_of=1, at=None, beams=False, **sampling):
        self.best_of[name] = best_of
        self.scheduler.add_seq_group(
            SequenceGroupRequest(
                request_id=name,
                prompt_token_ids=(1,) * prompt,
                sampling_params=SamplingParams(**{"max_tokens": 1000, **sampling}),
                best_of=best_of,
                use_beam_search=beams,
                arrival_time=self.now if at is None else at,
            )
        )

    def plan(self):
        self.now += 1.0
        self.output = self.scheduler.schedule(self.now)
        return self.output

    def step(self, **samples):
        """Plan and sample; `samples` gives (parent, token) pairs of a request."""
        output = self.plan()
        sequences = self.state.sequences
        sampled = {}
        for group in output.scheduled_seq_groups:
            if not group.do_sample:
                continue
            parents = list(group.block_tables)
            fresh = not sequences[group.request_id][0].output_token_ids
            wanted = parents * self.best_of[group.request_id] if fresh else parents
            pairs = samples.get(group.request_id, [(parent, 9) for parent in wanted])
            sampled[group.request_id] = tuple(
                SequenceSample(parent_seq_id=parent, token_id=token) for parent, token in pairs
            )
        self.results = self.scheduler.update_from_output(output, sampled)
        return output

    @property
    def state(self):
        return self.scheduler.snapshot()


@pytest.fixture(params=[ReferenceV0Scheduler, FastV0Scheduler], ids=["reference", "fast"])
def runner(request):
    def make(scheduler, cache):
        return Runner(request.param, scheduler, cache)

    return make


def chunks(output):
    return {group.request_id: group.token_chunk_size for group in output.scheduled_seq_groups}


def names(output):
    return [group.request_id for group in output.scheduled_seq_groups]


def blocks(num_gpu_blocks, num_cpu_blocks=0, block_size=4, watermark=0.0):
    return {
        "num_gpu_blocks": num_gpu_blocks,
        "num_cpu_blocks": num_cpu_blocks,
        "block_size": block_size,
        "watermark": watermark,
    }


def default(tokens=64, seqs=8, length=64, **more):
    return {
        "max_num_batched_tokens": tokens,
        "max_num_seqs": seqs,
        "max_model_len": length,
        **more,
    }


def chunked(tokens=64, seqs=8, length=64, **more):
    return default(tokens, seqs, length, enable_chunked_prefill=True, **more)


class TestWorkedExampleOfSource2:
    """Budget 2048, 1500 decodes, a prompt of 4096 tokens: 548 left, 512 scheduled."""

    def prepared(self, runner, alignment):
        run = runner(
            chunked(2048, 1501, 8192, chunk_alignment=alignment), blocks(2000, block_size=16)
        )
        for index in range(1500):
            run.add(f"d{index}", 1)
        first = run.step()
        assert first.num_prefill_groups == 1500
        run.add("long", 4096)
        return run

    def test_548_tokens_are_left_and_512_are_scheduled(self, runner):
        run = self.prepared(runner, 256)
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

    def test_the_release_takes_all_548(self, runner):
        run = self.prepared(runner, 1)
        output = run.step()
        assert output.scheduled_seq_groups[0].token_chunk_size == 548
        assert output.num_batched_tokens == 2048


class TestAlignment:
    """Only a prefill that would take all that is left is floored."""

    def test_a_chunk_with_room_beside_it_is_not_floored(self, runner):
        run = runner(chunked(600, 4, 8192, chunk_alignment=256), blocks(400, block_size=16))
        run.add("a", 599)
        assert chunks(run.step()) == {"a": 599}

    def test_an_exact_fit_is_floored_too(self, runner):
        run = runner(chunked(600, 4, 8192, chunk_alignment=256), blocks(400, block_size=16))
        run.add("a", 600)
        assert chunks(run.step()) == {"a": 512}
        assert chunks(run.step()) == {"a": 88}

    def test_fewer_than_256_left_give_a_waiting_prompt_nothing(self, runner):
        run = runner(chunked(256, 4, 8192, chunk_alignment=256), blocks(400, block_size=16))
        run.add("a", 1)
        run.step()
        run.add("b", 300)
        run.add("c", 10)
        # 255 are left beside a: b would take them all, 255 // 256 * 256 = 0, and c waits behind.
        assert chunks(run.step()) == {"a": 1}
        assert run.state.waiting == ("b", "c")

    def test_a_running_prefill_that_gets_nothing_ends_the_pass(self, runner):
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

    def test_groups_behind_a_floored_prefill_sit_out(self, runner):
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

    def test_a_budget_below_the_alignment_never_starts_a_long_prompt(self, runner):
        run = runner(chunked(200, 4, 8192, chunk_alignment=256), blocks(400, block_size=16))
        run.add("a", 200)
        run.add("b", 3)
        for _ in range(5):
            assert names(run.step()) == []
        assert run.state.waiting == ("a", "b")

    def test_decodes_and_the_default_policy_are_never_floored(self, runner):
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

    def test_priority(self, runner):
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

    def test_mixing_prefill_and_decode(self, runner):
        for policy, together in ((default(), False), (chunked(), True)):
            run = runner(policy, blocks(40))
            run.add("a", 4)
            run.step()
            run.add("b", 4)
            output = run.step()
            assert (set(names(output)) == {"a", "b"}) == together
            assert output.num_prefill_groups == 1

    def test_long_prompts(self, runner):
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

    def test_budget_at_the_start(self, runner):
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

    def test_running_queue(self, runner):
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

    def test_prefills_of_a_plan_come_from_all_three_queues(self, runner):
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


class TestPreemption:
    """Who falls, how, and where the victims wait."""

    def full(self, runner, policy, cpu=20, mode=None, **more):
        """Three decodes of 4 tokens each in a pool of 3 blocks; the next token needs a 4th."""
        run = runner(policy(64, preemption_mode=mode), blocks(3, cpu))
        for index, name in enumerate("abc"):
            run.add(name, 4, at=float(index), **more)
        run.step()
        return run

    @pytest.mark.parametrize("policy", [default, chunked])
    def test_the_youngest_are_recomputed_and_wait_in_order_of_age(self, runner, policy):
        run = self.full(runner, policy)
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

    @pytest.mark.parametrize("policy", [default, chunked])
    def test_swapped_groups_keep_their_tokens_and_come_back_oldest_first(self, runner, policy):
        run = self.full(runner, policy, mode="swap")
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

    def test_a_free_block_is_asked_for_even_if_the_last_block_has_room(self, runner):
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

    def test_default_admits_no_prompt_while_something_is_swapped_out(self, runner):
        for policy, admitted in ((default, False), (chunked, True)):
            run = runner(policy(preemption_mode="swap"), blocks(4, 20))
            run.add("a", 8, at=0.0)
            run.add("b", 8, at=1.0)
            run.step()
            run.step()
            assert run.state.swapped == ("b",)
            run.add("c", 2, at=2.0)
            assert ("c" in names(run.step())) == admitted

    def test_a_recomputed_group_counts_its_output_as_prompt(self, runner):
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

    def test_either_mode_swaps_what_may_run_several_sequences(self, runner):
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

    def test_forks_share_blocks_until_one_writes(self, runner):
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

    def test_a_dropped_beam_makes_room_for_a_fork_of_another(self, runner):
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

    def test_statuses_of_an_allocation(self, runner):
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

    def test_prompts_over_the_length_limit_are_ignored(self, runner):
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
        self, runner
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

    def test_lookahead_slots_of_the_newer_manager(self, runner):
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


class TestDelay:
    def test_prompts_wait_for_company_while_something_runs(self, runner):
        run = runner(default(delay_factor=2.0), blocks(40))
        run.add("a", 4)
        run.step()  # at 101, nothing runs
        run.add("b", 4, at=101.5)
        # At 102 the last prompt step is known to have taken 1 s: b must wait for more than 2 s.
        assert names(run.step()) == ["a"]
        assert run.state.last_prompt_latency == 1.0
        assert names(run.step()) == ["a"]  # at 103, waited 1.5
        assert names(run.step()) == ["b"]  # at 104, waited 2.5
        run = runner(default(delay_factor=1000.0), blocks(40))
        run.add("a", 4, max_tokens=1)
        run.step()
        run.add("b", 4)
        assert names(run.step()) == ["b"]  # nothing runs


class TestOddities:
    """What the release does although nobody can have meant it."""

    def test_a_group_recomputed_after_its_first_sequence_ended_counts_as_a_decode(self, runner):
        run = runner(chunked(6, 4), blocks(3))
        run.add("b", 3, at=1.0, best_of=2, stop_token_ids=(7,))
        run.step(b=[(0, 9), (0, 7)])  # the parent, sequence 0, ends; its fork 1 goes on
        run.add("a", 8, at=0.0)
        while "b" not in run.state.waiting:
            run.step()
        run.scheduler.abort_seq_group(("a",))
        (group,) = run.step().scheduled_seq_groups
        assert (group.is_prompt, group.do_sample) == (False, True)
        # Its block counts two holders, one of whom is gone, so it is never freed.
        state = run.state
        assert {state.gpu_ref_counts[block] for block in state.gpu_block_tables[1]} == {2}
        run.scheduler.abort_seq_group(("b",))
        assert len(run.state.free_gpu_blocks) < 3

    def test_an_overrun_budget_gives_negative_chunks(self, runner):
        run = runner(chunked(4, 4), blocks(40))
        run.add("f", 2, best_of=2, at=1.0)
        run.step()
        run.add("p", 20, at=0.5)
        assert chunks(run.step()) == {"p": 2, "f": 1}
        run.add("w", 5, at=2.0)
        # p takes all 4 tokens, the two forks of f are never cut: -2 are left, and w gets them.
        output = run.step()
        assert chunks(output) == {"w": -2, "p": 4, "f": 1}
        assert output.num_batched_tokens == 4
        (seq,) = run.state.sequences["w"]
        assert seq.num_computed_tokens == -2

    def test_a_decode_can_hide_an_overrun(self, runner):
        run = runner(chunked(4, 4), blocks(40))
        run.add("f", 2, best_of=2, at=1.0)
        run.add("d", 1, at=2.0)
        run.step()
        run.add("p", 20, at=0.5)
        assert chunks(run.step()) == {"p": 1, "f": 1, "d": 1}
        output = run.step()
        # 4 + 2 + 1 tokens, counted as 4 + 2 - 2.
        assert chunks(output) == {"p": 4, "f": 1, "d": 1}
        assert output.num_batched_tokens == 4

    def test_aborted_and_ignored_requests_are_not_among_the_finished(self, runner):
        run = runner(default(16, 4, 10), blocks(40))
        run.add("aborted", 2)
        run.add("ended", 2, max_tokens=1)
        run.add("ignored", 11)
        run.step()
        (result,) = [result for result in run.results if result.finished]
        assert result.request_id == "ended"
        assert result.outputs[0].finish_reason is FinishReason.LENGTH
        run.scheduler.abort_seq_group(("aborted", "unknown"))
        assert run.step().finished_request_ids == ("ended",)
        assert run.step().finished_request_ids == ()

    def test_a_group_aborted_between_plan_and_samples_is_passed_over(self, runner):
        run = runner(default(), blocks(10))
        run.add("a", 2)
        run.add("b", 2)
        output = run.plan()
        run.scheduler.abort_seq_group(("a",))
        sample = SequenceSample(parent_seq_id=1, token_id=4)
        (result,) = run.scheduler.update_from_output(output, {"b": (sample,)})
        assert (result.request_id, result.finished) == ("b", False)
        assert run.state.running == ("b",)
        assert len(run.state.free_gpu_blocks) == 9

    def test_a_sequence_may_be_one_token_longer_than_max_model_len(self, runner):
        run = runner(default(16, 4, 10), blocks(40))
        run.add("a", 9)
        run.step()
        run.step()
        (result,) = run.results
        assert (result.finished, result.outputs[0].finish_reason) == (True, FinishReason.LENGTH)


class TestGivingUp:
    """Where the release raises, with the whole engine in its hands."""

    def gives_up(self, run, rule, steps=10):
        with pytest.raises(V0SchedulingError) as caught:  # noqa: PT012
            for _ in range(steps):
                run.step()
        assert caught.value.rule == rule

    def test_swap_space(self, runner):
        run = runner(default(preemption_mode="swap"), blocks(3, 0))
        run.add("a", 8, at=0.0)
        run.add("b", 4, at=1.0)
        run.step()
        self.gives_up(run, "swap_space", 1)

    def test_recompute_of_forks(self, runner):
        run = runner(default(preemption_mode="recompute"), blocks(3, 20))
        run.add("a", 8, at=0.0)
        run.add("b", 4, at=1.0, best_of=2)
        run.step()
        self.gives_up(run, "recompute_of_forks", 1)

    def test_prefill_of_forks(self, runner):
        run = runner(default(), blocks(4))
        run.add("a", 8, at=0.0)
        run.add("b", 3, at=1.0, best_of=2, stop_token_ids=(7,))
        run.step(b=[(1, 7), (1, 9)])  # the fork, sequence 2, ends; sequence 1 goes on
        self.gives_up(run, "prefill_of_forks")

    def test_token_budget(self, runner):
        run = runner(chunked(4, 4), blocks(40))
        run.add("f", 2, best_of=2, at=1.0)
        run.step()
        run.add("p", 20, at=0.5)
        run.step()
        self.gives_up(run, "token_budget", 1)

    def test_seq_budget(self, runner):
        run = runner(default(64, 3), blocks(40))
        run.add("g", 2, best_of=3, stop_token_ids=(7,))
        run.step(g=[(0, 9), (0, 9), (0, 7)])
        run.add("x", 2)
        assert names(run.step()) == ["x"]  # in the seat of the sequence that ended
        run.step(g=[(1, 9)])  # sequence 2 is dropped: the group may fork to 3 again
        self.gives_up(run, "seq_budget", 1)

    def test_append_past_table(self, runner):
        run = runner(chunked(6, 4, use_v2_block_manager=True), blocks(10))
        run.add("a", 8)
        assert chunks(run.step()) == {"a": 6}
        self.gives_up(run, "append_past_table", 1)

    def test_pool_exhausted(self, runner):
        run = runner(default(use_v2_block_manager=True), blocks(3, 1))
        run.add("a", 8, at=0.0)
        run.add("b", 3, at=1.0, best_of=2)
        run.step()
        # b's one block is shared by two: one CPU block seems to do, two are needed.
        self.gives_up(run, "pool_exhausted", 1)


class TestBadInput:
    def test_a_duplicate_request_id(self, runner):
        run = runner(default(), blocks(10))
        run.add("a", 2)
        with pytest.raises(DuplicateRequestError, match="'a'"):
            run.add("a", 3)

    def test_samples_that_are_missing_or_of_no_running_sequence(self, runner):
        run = runner(default(), blocks(10))
        run.add("a", 2)
        output = run.plan()
        with pytest.raises(RequestError, match=r"'a'.*no samples"):
            run.scheduler.update_from_output(output, {})
        run = runner(default(), blocks(10))
        run.add("a", 2)
        output = run.plan()
        with pytest.raises(RequestError, match=r"'a'.*5"):
            run.scheduler.update_from_output(
                output, {"a": (SequenceSample(parent_seq_id=5, token_id=1),)}
            )

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"max_num_seqs": 0}, "max_num_seqs"),
            ({"max_model_len": 0}, "max_model_len"),
            ({"max_num_batched_tokens": 7}, "max_num_batched_tokens"),
            ({"max_num_batched_tokens": 63}, "max_num_batched_tokens"),
            ({"preemption_mode": "drop"}, "preemption_mode"),
            ({"delay_factor": -1.0}, "delay_factor"),
            ({"delay_factor": float("nan")}, "delay_factor"),
            ({"num_lookahead_slots": -1}, "num_lookahead_slots"),
            ({"num_lookahead_slots": 1}, "num_lookahead_slots"),
            ({"chunk_alignment": 0}, "chunk_alignment"),
        ],
    )
    def test_a_scheduler_configuration_out_of_range(self, change, field):
        with pytest.raises(ConfigError, match=f"V0SchedulerConfig.{field} is .*must be"):
            V0SchedulerConfig(**{**default(), **change})

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"num_gpu_blocks": 0}, "num_gpu_blocks"),
            ({"num_cpu_blocks": -1}, "num_cpu_blocks"),
            ({"block_size": 0}, "block_size"),
            ({"watermark": 1.0}, "watermark"),
        ],
    )
    def test_a_cache_configuration_out_of_range(self, change, field):
        with pytest.raises(ConfigError, match=f"V0CacheConfig.{field} is .*must be"):
            V0CacheConfig(**{**blocks(10), **change})

    @pytest.mark.parametrize(
        "change",
        [{"request_id": ""}, {"prompt_token_ids": ()}, {"prompt_token_ids": (-1,)}, {"best_of": 0}],
    )
    def test_a_request_out_of_range(self, change):
        with pytest.raises(ConfigError, match=f"{next(iter(change))}.* must be"):
            SequenceGroupRequest(**{"request_id": "a", "prompt_token_ids": (1,), **change})
