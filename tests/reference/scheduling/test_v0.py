"""The pure functions of V0 leave their arguments alone, and small rules of their parts."""

import copy

import pytest

from servespec.conformance.workloads.driver_v0 import PretendSampler
from servespec.conformance.workloads.scheduling_v0 import make_v0_case, v0_matrix
from servespec.reference.contracts import SamplingParams
from servespec.reference.contracts.v0 import (
    SequenceGroupRequest,
    SequenceSample,
    SequenceStatus,
    V0CacheConfig,
    V0SchedulerConfig,
    V0SchedulingError,
)
from servespec.reference.scheduling import v0
from servespec.reference.scheduling.v0_budget import SchedulingBudget
from servespec.reference.scheduling.v0_sequences import (
    Sequence,
    SequenceGroup,
    append_token,
    status_after_token,
    update_num_computed_tokens,
)


def frozen_call(function, *arguments):
    """Call a function and compare its arguments with copies made before."""
    before = copy.deepcopy(arguments)
    result = function(*arguments)
    assert arguments == before
    return result


@pytest.mark.parametrize("combination", v0_matrix()[::5], ids=str)
def test_no_verb_changes_its_arguments(combination):
    case = make_v0_case(combination, 3)
    sampler = PretendSampler(case.workload)
    state = frozen_call(v0.initial_state, case.scheduler, case.cache)
    clock = case.workload.start
    for events in case.workload.steps:
        clock += events.elapsed
        for request in events.add:
            state = frozen_call(v0.add_seq_group, state, request)
        state = frozen_call(v0.abort_seq_group, state, events.abort)
        try:
            state, output = frozen_call(v0.schedule, state, clock)
        except V0SchedulingError:
            break
        sampled = sampler.sample(output)
        state, _ = frozen_call(v0.update_from_output, state, output, sampled)
        frozen_call(v0.snapshot, state)
        frozen_call(v0.has_unfinished_seqs, state)
    assert clock > case.workload.start


def test_a_plan_that_fails_leaves_the_state_as_it_was():
    state = v0.initial_state(
        V0SchedulerConfig(preemption_mode="recompute", max_model_len=64),
        V0CacheConfig(num_gpu_blocks=3, block_size=4),
    )
    for name, prompt, best_of in (("a", 8, 1), ("b", 4, 2)):
        request = SequenceGroupRequest(
            request_id=name, prompt_token_ids=(1,) * prompt, best_of=best_of
        )
        state = v0.add_seq_group(state, request)
    state, output = v0.schedule(state)
    sampled = {
        "a": (SequenceSample(parent_seq_id=0, token_id=9),),
        "b": (SequenceSample(parent_seq_id=1, token_id=9),) * 2,
    }
    state, _ = v0.update_from_output(state, output, sampled)
    before = copy.deepcopy(state)
    with pytest.raises(V0SchedulingError, match="recompute_of_forks: request 'b' runs 2"):
        v0.schedule(state)
    assert state == before


class TestSchedulingBudget:
    budget = SchedulingBudget(token_budget=10, max_num_seqs=3)

    def test_a_request_is_counted_once(self):
        budget = self.budget.add_num_seqs("a", 2).add_num_seqs("a", 2)
        assert budget.num_curr_seqs == 2
        budget = budget.add_num_batched_tokens("a", 7).add_num_batched_tokens("a", 7)
        assert (budget.num_batched_tokens, budget.remaining_token_budget) == (7, 3)

    def test_only_what_is_registered_is_taken_back(self):
        budget = self.budget.add_num_seqs("a", 2).subtract_num_seqs("b", 1)
        assert budget.num_curr_seqs == 2
        budget = budget.subtract_num_seqs("a", 2).subtract_num_seqs("a", 2)
        assert budget.num_curr_seqs == 0

    @pytest.mark.parametrize(
        ("tokens", "seqs", "fits"), [(3, 1, True), (4, 1, False), (3, 2, False), (-2, 1, True)]
    )
    def test_both_limits_hold(self, tokens, seqs, fits):
        budget = self.budget.add_num_seqs("a", 2).add_num_batched_tokens("a", 7)
        assert budget.can_schedule(tokens, seqs) == fits


class TestStopping:
    @pytest.mark.parametrize(
        ("tokens", "params", "status"),
        [
            ((4, 3), {"eos_token_id": 3}, SequenceStatus.FINISHED_STOPPED),
            ((4, 5), {"stop_token_ids": (5,)}, SequenceStatus.FINISHED_STOPPED),
            ((5, 4), {"stop_token_ids": (5,)}, SequenceStatus.RUNNING),
            ((4, 3), {"eos_token_id": 3, "min_tokens": 3}, SequenceStatus.RUNNING),
            ((4, 4), {"max_tokens": 2}, SequenceStatus.FINISHED_LENGTH_CAPPED),
            ((4, 3), {"max_tokens": 2, "eos_token_id": 3}, SequenceStatus.FINISHED_STOPPED),
            # 3 prompt tokens: 8 in all are allowed, 9 are too many.
            ((4,) * 5, {}, SequenceStatus.RUNNING),
            ((4,) * 6, {}, SequenceStatus.FINISHED_LENGTH_CAPPED),
            ((4,) * 6, {"min_tokens": 7}, SequenceStatus.RUNNING),
        ],
    )
    def test_what_ends_a_sequence(self, tokens, params, status):
        seq = Sequence(seq_id=0, prompt_token_ids=(1, 2, 3), status=SequenceStatus.RUNNING)
        for token in tokens:
            seq = append_token(seq, token)
        assert status_after_token(seq, SamplingParams(**params), max_model_len=8) is status


class TestSequenceGroup:
    def group(self, *statuses, best_of=3, beams=False):
        request = SequenceGroupRequest(
            request_id="a", prompt_token_ids=(1,), best_of=best_of, use_beam_search=beams
        )
        seqs = tuple(
            Sequence(seq_id=i, prompt_token_ids=(1,), status=status)
            for i, status in enumerate(statuses)
        )
        return SequenceGroup(request=request, seqs=seqs)

    def test_how_many_sequences_a_group_reckons_with(self):
        running, stopped = SequenceStatus.RUNNING, SequenceStatus.FINISHED_STOPPED
        assert self.group(running).max_num_running_seqs == 3  # not forked yet
        assert self.group(running, running, running).max_num_running_seqs == 3
        assert self.group(running, stopped, running).max_num_running_seqs == 2
        assert self.group(running, stopped).max_num_running_seqs == 3  # one was dropped
        assert self.group(running, stopped, stopped, beams=True).max_num_running_seqs == 3

    def test_a_sequence_decodes_once_all_known_tokens_are_computed(self):
        seq = Sequence(
            seq_id=0, prompt_token_ids=(1, 2, 3), output_token_ids=(4,), num_computed_tokens=1
        )
        group = SequenceGroup(
            request=SequenceGroupRequest(request_id="a", prompt_token_ids=(1, 2, 3)), seqs=(seq,)
        )
        part = update_num_computed_tokens(group, 2)
        assert part.is_prefill
        assert part.seqs[0].num_new_tokens == 1
        whole = update_num_computed_tokens(group, 3)
        assert not whole.is_prefill
        again = update_num_computed_tokens(
            SequenceGroup(request=group.request, seqs=(append_token(whole.seqs[0], 5),)), 1
        )
        assert (again.is_prefill, again.seqs[0].num_computed_tokens) == (False, 5)
