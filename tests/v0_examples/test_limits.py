"""When prompts wait for company, oddities, where V0 gives up, and what it refuses."""

import pytest

from servespec.reference.contracts import (
    ConfigError,
    DuplicateRequestError,
    FinishReason,
    RequestError,
)
from servespec.reference.contracts.v0 import (
    SequenceGroupRequest,
    SequenceSample,
    V0CacheConfig,
    V0SchedulerConfig,
    V0SchedulingError,
)


class TestDelay:
    def test_prompts_wait_for_company_while_something_runs(self, runner, default, blocks, names):
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

    def test_a_group_recomputed_after_its_first_sequence_ended_counts_as_a_decode(
        self, runner, chunked, blocks
    ):
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

    def test_an_overrun_budget_gives_negative_chunks(self, runner, chunked, blocks, chunks):
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

    def test_a_decode_can_hide_an_overrun(self, runner, chunked, blocks, chunks):
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

    def test_aborted_and_ignored_requests_are_not_among_the_finished(self, runner, default, blocks):
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

    def test_a_group_aborted_between_plan_and_samples_is_passed_over(self, runner, default, blocks):
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

    def test_a_sequence_may_be_one_token_longer_than_max_model_len(self, runner, default, blocks):
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

    def test_swap_space(self, runner, default, blocks):
        run = runner(default(preemption_mode="swap"), blocks(3, 0))
        run.add("a", 8, at=0.0)
        run.add("b", 4, at=1.0)
        run.step()
        self.gives_up(run, "swap_space", 1)

    def test_recompute_of_forks(self, runner, default, blocks):
        run = runner(default(preemption_mode="recompute"), blocks(3, 20))
        run.add("a", 8, at=0.0)
        run.add("b", 4, at=1.0, best_of=2)
        run.step()
        self.gives_up(run, "recompute_of_forks", 1)

    def test_prefill_of_forks(self, runner, default, blocks):
        run = runner(default(), blocks(4))
        run.add("a", 8, at=0.0)
        run.add("b", 3, at=1.0, best_of=2, stop_token_ids=(7,))
        run.step(b=[(1, 7), (1, 9)])  # the fork, sequence 2, ends; sequence 1 goes on
        self.gives_up(run, "prefill_of_forks")

    def test_token_budget(self, runner, chunked, blocks):
        run = runner(chunked(4, 4), blocks(40))
        run.add("f", 2, best_of=2, at=1.0)
        run.step()
        run.add("p", 20, at=0.5)
        run.step()
        self.gives_up(run, "token_budget", 1)

    def test_seq_budget(self, runner, default, blocks, names):
        run = runner(default(64, 3), blocks(40))
        run.add("g", 2, best_of=3, stop_token_ids=(7,))
        run.step(g=[(0, 9), (0, 9), (0, 7)])
        run.add("x", 2)
        assert names(run.step()) == ["x"]  # in the seat of the sequence that ended
        run.step(g=[(1, 9)])  # sequence 2 is dropped: the group may fork to 3 again
        self.gives_up(run, "seq_budget", 1)

    def test_append_past_table(self, runner, chunked, blocks, chunks):
        run = runner(chunked(6, 4, use_v2_block_manager=True), blocks(10))
        run.add("a", 8)
        assert chunks(run.step()) == {"a": 6}
        self.gives_up(run, "append_past_table", 1)

    def test_pool_exhausted(self, runner, default, blocks):
        run = runner(default(use_v2_block_manager=True), blocks(3, 1))
        run.add("a", 8, at=0.0)
        run.add("b", 3, at=1.0, best_of=2)
        run.step()
        # b's one block is shared by two: one CPU block seems to do, two are needed.
        self.gives_up(run, "pool_exhausted", 1)


class TestBadInput:
    def test_a_duplicate_request_id(self, runner, default, blocks):
        run = runner(default(), blocks(10))
        run.add("a", 2)
        with pytest.raises(DuplicateRequestError, match="'a'"):
            run.add("a", 3)

    def test_samples_that_are_missing_or_of_no_running_sequence(self, runner, default, blocks):
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
    def test_a_scheduler_configuration_out_of_range(self, change, field, default):
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
    def test_a_cache_configuration_out_of_range(self, change, field, blocks):
        with pytest.raises(ConfigError, match=f"V0CacheConfig.{field} is .*must be"):
            V0CacheConfig(**{**blocks(10), **change})

    @pytest.mark.parametrize(
        "change",
        [{"request_id": ""}, {"prompt_token_ids": ()}, {"prompt_token_ids": (-1,)}, {"best_of": 0}],
    )
    def test_a_request_out_of_range(self, change):
        with pytest.raises(ConfigError, match=f"{next(iter(change))}.* must be"):
            SequenceGroupRequest(**{"request_id": "a", "prompt_token_ids": (1,), **change})
