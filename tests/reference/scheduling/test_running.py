"""The first half of a step: running requests, their chunks, and preemption."""

import pytest

from servespec.reference.contracts import PauseState


def test_running_requests_go_before_waiting_ones(driver):
    d = driver(budget=4).add("b", 2)
    assert d.step() == {"b": 2}
    d.add("a", 12)
    assert d.step() == {"b": 1, "a": 3}


def test_source_1_example_a_prefill_is_split_beside_a_decode(driver):
    # Budget 6, B decoding, A with 12 prompt tokens: A runs 5 + 6 + 1 beside B, whose last token
    # shares the first of these steps.
    d = driver(budget=6).add("B", 3, max_tokens=2)
    assert d.step() == {"B": 3}
    d.add("A", 12)
    assert d.step() == {"B": 1, "A": 5}
    assert d["A"].is_prefill_chunk
    assert d["A"].num_output_tokens == 0
    assert "B" not in d.state.requests
    assert d.step() == {"A": 6}
    assert d["A"].is_prefill_chunk
    assert d.output.finished_req_ids == {"B"}
    assert d.step() == {"A": 1}
    assert not d["A"].is_prefill_chunk
    assert d["A"].num_output_tokens == 1


def test_a_decode_keeps_its_token_of_the_budget_while_a_prompt_is_split(driver):
    # Who was admitted first is served first: B goes on, and A has one token less.
    d = driver(budget=6).add("B", 3, max_tokens=20)
    d.step()
    d.add("A", 12)
    steps = [d.step() for _ in range(4)]
    assert steps == [
        {"B": 1, "A": 5},
        {"B": 1, "A": 5},
        {"B": 1, "A": 2},
        {"B": 1, "A": 1},
    ]


def test_without_another_request_the_whole_budget_goes_to_the_prefill(driver):
    d = driver(budget=6).add("A", 13)
    assert [d.step()["A"] for _ in range(4)] == [6, 6, 1, 1]


def test_threshold_limits_a_chunk(driver):
    d = driver(budget=16, long_prefill_token_threshold=3).add("a", 8).add("b", 2)
    assert d.step() == {"a": 3, "b": 2}
    assert d.step() == {"a": 3, "b": 1}


def test_max_model_len_leaves_no_position_for_a_draft_beyond_it(driver):
    d = driver(max_model_len=8, method="ngram", drafts=3).add("a", 5, max_tokens=20)
    d.step()
    d.drafts(a=(1, 2, 3))
    # 6 known tokens, 5 computed: 1 + 3 drafts would end at position 8; only 2 fit before 7.
    assert d.schedule() == {"a": 2}
    assert d.output.scheduled_spec_decode_tokens == {"a": (1,)}


def test_a_request_that_gets_nothing_is_overtaken(driver):
    d = driver(budget=8, async_scheduling=True).add("a", 2, max_tokens=1).add("b", 2)
    d.schedule()
    # a's only token is in flight, so no further step can be of use to it.
    assert d.schedule() == {"b": 1}


def test_fcfs_preempts_the_last_admitted(driver):
    d = driver(num_blocks=5, block_size=2).add("a", 3, max_tokens=9).add("b", 4, max_tokens=9)
    d.step()
    d.step()  # a takes no block, b needs a third and preempts itself
    assert d.output.preempted_req_ids == {"b"}
    assert d.state.running == ("a",)
    assert d["b"].num_preemptions == 1
    assert d["b"].num_computed_tokens == 0
    assert d.state.waiting == ("b",)


def test_no_admission_in_a_step_that_preempts(driver):
    d = driver(num_blocks=5, block_size=2).add("a", 3, max_tokens=9).add("b", 4, max_tokens=9)
    d.step()
    d.add("c", 1)
    assert d.step() == {"a": 1}
    assert d.output.preempted_req_ids == {"b"}


def test_after_the_last_victim_nobody_behind_it_runs(driver):
    d = driver(num_blocks=7, block_size=2).add("a", 4, max_tokens=9)
    d.add("b", 4, max_tokens=9).add("c", 3, max_tokens=9)
    d.step()
    # a and b need a block each, none is free: a takes c's two, one is left for b.
    assert d.step() == {"a": 1, "b": 1}
    assert d.output.preempted_req_ids == {"c"}


def test_priority_preempts_the_least_urgent_even_for_itself(driver):
    d = driver(num_blocks=5, block_size=2, budget=4, policy="priority")
    d.add("low", 6, priority=5, max_tokens=9)
    assert d.step() == {"low": 4}
    d.add("high", 1, priority=0, max_tokens=9)
    assert d.step() == {"low": 2, "high": 1}
    # low stands first and needs a fourth block; it is the victim itself, so nobody runs.
    assert d.step() == {}
    assert d.output.preempted_req_ids == {"low"}
    assert d.step() == {"high": 1}


def test_a_victim_scheduled_in_the_same_step_leaves_the_plan(driver):
    d = driver(num_blocks=5, budget=8, policy="priority", method="ngram", drafts=1)
    d.add("low", 4, priority=5, max_tokens=20)
    d.step()
    d.add("high", 7, priority=0, max_tokens=20)
    assert d.step() == {"low": 1, "high": 7}
    d.drafts(low=(1,), high=(2,))
    # low has room for its 2 tokens; high needs a third block for slot 9, and takes low's.
    before = d.fork()
    assert d.schedule() == {"high": 2}
    assert d.output.preempted_req_ids == {"low"}
    assert d.output.scheduled_cached_reqs.req_ids == ("high",)
    assert d.output.scheduled_spec_decode_tokens == {"high": (2,)}
    assert d.output.total_num_scheduled_tokens == 2
    assert before.state.running == ("low", "high")


def test_tokens_of_a_victim_go_to_those_behind_it(driver):
    d = driver(
        budget=6,
        num_blocks=8,
        policy="priority",
        long_prefill_token_threshold=4,
        scheduler_reserve_full_isl=False,
    )
    d.add("low", 18, priority=9)
    assert d.step() == {"low": 4}
    d.add("high", 2, max_tokens=30)
    assert d.step() == {"low": 4, "high": 2}
    d.add("mid", 40, priority=1)
    assert d.step() == {"low": 4, "high": 1, "mid": 1}
    assert d.step() == {"low": 4, "high": 1, "mid": 1}
    # low is given its 4 tokens first, then high needs a block and takes low's: with 1 token left
    # of the budget mid would have that, with low's 4 it takes all that the threshold allows.
    assert d.step() == {"high": 1, "mid": 4}
    assert d.output.preempted_req_ids == {"low"}


def test_tokens_are_sent_again_only_to_a_worker_that_dropped_the_row(driver):
    d = driver(budget=4, max_num_seqs=2).add("a", 2, max_tokens=20)
    d.step()
    d.add("b", 9)
    d.step()
    assert d.output.scheduled_cached_reqs.all_token_ids == {}
    d.schedule(throttle=True)
    d.update()
    d.step()
    cached = d.output.scheduled_cached_reqs
    assert cached.req_ids == ("a", "b")
    assert cached.all_token_ids == {"b": d["b"].all_token_ids}


def test_drafts_follow_the_known_tokens_and_are_used_up(driver):
    d = driver(budget=3, method="ngram", drafts=4).add("a", 3)
    d.step()
    d.drafts(a=(7, 8, 9, 10))
    assert d.schedule() == {"a": 3}
    assert d.output.scheduled_spec_decode_tokens == {"a": (7, 8)}
    assert d["a"].spec_token_ids == ()
    assert d["a"].num_computed_tokens == 6


def test_no_drafts_in_the_middle_of_a_prompt(driver):
    d = driver(budget=2, method="ngram", drafts=2).add("a", 5)
    d.step()
    d.drafts(a=(1, 2), gone=(3,))
    assert d["a"].spec_token_ids == ()


def test_paused_all_schedules_nothing(driver):
    d = driver().add("a", 3)
    d.step()
    d.pause(PauseState.PAUSED_ALL)
    assert d.schedule() == {}
    d.pause(PauseState.UNPAUSED)
    assert d.schedule() == {"a": 1}


def test_throttling_holds_chunks_back_while_decodes_run(driver):
    d = driver(budget=4, max_num_seqs=2).add("a", 2, max_tokens=20)
    d.step()
    d.add("b", 9)
    assert d.step() == {"a": 1, "b": 3}
    d.add("c", 1)
    assert d.schedule(throttle=True) == {"a": 1}
    # A step that holds prefills back says nothing about how many there are.
    assert not d.state.prefill_capacity_bound
    d.update()
    assert d.step() == {"a": 1, "b": 3}


def test_throttling_ends_when_the_last_admission_left_requests_waiting(driver):
    d = driver(budget=4, max_num_seqs=2).add("a", 2, max_tokens=20)
    d.step()
    d.add("b", 9).add("c", 9)
    d.step()
    assert d.state.prefill_capacity_bound
    assert d.schedule(throttle=True) == {"a": 1, "b": 3}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_preempted_request_resumes_with_its_tokens_and_its_whole_table(driver, policy):
    d = driver(num_blocks=5, block_size=2, policy=policy)
    d.add("a", 3, max_tokens=3).add("b", 4, max_tokens=9, arrival=1.0)
    d.step()
    d.step()
    assert d.output.preempted_req_ids == {"b"}
    d.until(lambda: "b" in d.state.running)
    rows = d.output.scheduled_cached_reqs
    assert rows.req_ids[-1] == "b"
    assert rows.resumed_req_ids == {"b"}
    assert rows.new_block_ids[-1] == d.table("b")
    assert len(rows.all_token_ids["b"]) == 5
    assert d.output.num_scheduled_tokens["b"] == 5
