"""What comes back from the worker: tokens, rejected drafts, stops; and ending from outside."""

import pytest

from servespec.reference.contracts import (
    ConfigError,
    DuplicateRequestError,
    EngineCoreOutput,
    FinishReason,
    PauseState,
    RepetitionDetection,
    RequestStatus,
)
from servespec.reference.scheduling import v1
from servespec.reference.scheduling.stop import is_repeating


def test_rejected_drafts_are_taken_off_the_computed_tokens(driver):
    d = driver(method="ngram", drafts=3).add("a", 4, max_tokens=20)
    d.step()
    d.drafts(a=(1, 2, 3))
    d.schedule()
    assert d["a"].num_computed_tokens == 8
    d.update(a=(1, 9))
    assert d["a"].num_computed_tokens == 6
    assert d["a"].num_tokens == 7


def test_a_row_without_tokens_gives_no_output(driver):
    d = driver(budget=2).add("a", 4)
    d.schedule()
    assert d.update() == ()


def test_output_of_a_request_that_ended_meanwhile_is_passed_over(driver):
    d = driver().add("a", 4).add("b", 2)
    d.schedule()
    d.finish("a")
    assert [out.request_id for out in d.update(a=(1,), b=(2,))] == ["b"]


@pytest.mark.parametrize(
    ("params", "tokens", "expected"),
    [
        ({"max_tokens": 2}, (5, 6), (FinishReason.LENGTH, None, 2)),
        ({"max_tokens": 9, "eos_token_id": 6}, (5, 6), (FinishReason.STOP, None, 2)),
        ({"max_tokens": 9, "stop_token_ids": (6,)}, (5, 6), (FinishReason.STOP, 6, 2)),
        # The end-of-sequence token is looked at before the stop tokens, both before a length.
        (
            {"max_tokens": 2, "eos_token_id": 6, "stop_token_ids": (6,)},
            (5, 6),
            (FinishReason.STOP, None, 2),
        ),
        ({"max_tokens": 2, "stop_token_ids": (6,)}, (5, 6), (FinishReason.STOP, 6, 2)),
        # Nothing counts before min_tokens.
        ({"max_tokens": 9, "min_tokens": 3, "eos_token_id": 6}, (5, 6), (None, None, 2)),
        # A length comes before a repetition.
        (
            {"max_tokens": 9, "repetition_detection": RepetitionDetection(max_pattern_size=1)},
            (6, 6),
            (FinishReason.REPETITION, "repetition_detected", 2),
        ),
        (
            {"max_tokens": 2, "repetition_detection": RepetitionDetection(max_pattern_size=1)},
            (6, 6),
            (FinishReason.LENGTH, None, 2),
        ),
    ],
)
def test_stop_order(driver, params, tokens, expected):
    d = driver().add("a", 2, **params)
    results = []
    for token in tokens:
        d.schedule()
        results += d.update(a=(token,))
    last = results[-1]
    assert (last.finish_reason, last.stop_reason, len(results)) == expected


def test_tokens_behind_a_stop_are_thrown_away(driver):
    d = driver(method="ngram", drafts=3).add("a", 4, max_tokens=9, stop_token_ids=(2,))
    d.step()
    d.drafts(a=(1, 2, 3))
    d.schedule()
    assert d.update(a=(1, 2, 3, 4)) == (
        EngineCoreOutput(
            request_id="a",
            new_token_ids=(1, 2),
            finish_reason=FinishReason.STOP,
            stop_reason=2,
        ),
    )


def test_max_model_len_ends_a_request(driver):
    d = driver(max_model_len=5).add("a", 4, max_tokens=9)
    d.schedule()
    assert d.update(a=(1,))[0].finish_reason is FinishReason.LENGTH


def test_ended_requests_free_their_blocks_in_row_order_from_the_tail(driver):
    d = driver(num_blocks=9, block_size=2).add("a", 4, max_tokens=1).add("b", 3, max_tokens=1)
    d.schedule()
    assert (d.table("a"), d.table("b")) == (((1, 2),), ((3, 4),))
    d.update(a=(1,), b=(2,))
    assert d.free == (5, 6, 7, 8, 2, 1, 4, 3)
    assert d.state.running == ()
    assert not v1.has_unfinished_requests(d.state)
    assert v1.has_finished_requests(d.state)
    d.schedule()
    assert d.output.finished_req_ids == {"a", "b"}
    assert not v1.has_finished_requests(d.state)


def test_abort_reaches_requests_wherever_they_are(driver):
    d = driver(max_num_seqs=1).add("a", 3).add("b", 3)
    d.step()
    d.finish("b", "a", "unknown")
    assert dict(d.state.requests) == {}
    assert (d.state.running, d.state.waiting) == ((), ())
    assert len(d.free) == 19


def test_a_lone_string_is_one_id(driver):
    d = driver().add("ab", 3).add("a", 3)
    state = v1.finish_requests(d.state, "ab", RequestStatus.FINISHED_ABORTED)
    assert tuple(state.requests) == ("a",)


def test_finish_needs_a_finished_status(driver):
    d = driver().add("a", 3)
    with pytest.raises(ConfigError, match="status is 'RUNNING': must be a finished status"):
        d.finish("a", status=RequestStatus.RUNNING)


def test_an_id_can_be_used_again_but_not_twice_at_once(driver):
    d = driver().add("a", 3)
    with pytest.raises(DuplicateRequestError, match="'a'"):
        d.add("a", 3)
    d.finish("a")
    d.add("a", 3)
    assert d.state.waiting == ("a",)


def test_unfinished_depends_on_the_pause_state(driver):
    d = driver(max_num_seqs=1).add("a", 3)
    assert v1.has_unfinished_requests(d.state)
    d.pause(PauseState.PAUSED_NEW)
    assert not v1.has_unfinished_requests(d.state)
    d.pause(PauseState.UNPAUSED)
    d.step()
    d.pause(PauseState.PAUSED_NEW)
    assert v1.has_unfinished_requests(d.state)
    d.pause(PauseState.PAUSED_ALL)
    assert not v1.has_unfinished_requests(d.state)


def test_reset_fails_while_blocks_are_held_and_then_preempts_in_order(driver):
    d = driver(caching=True).add("a", 5, max_tokens=9).add("b", 5, max_tokens=9)
    d.step()
    assert not d.reset()
    assert d.state.cache.pool.hashes
    assert d.reset(running=True)
    assert not d.state.cache.pool.hashes
    assert d.state.waiting == ("a", "b")
    # They resume in the same step, and the worker gets all their tokens again.
    assert d.schedule() == {"a": 6, "b": 6}
    assert d.output.preempted_req_ids == {"a", "b"}
    assert set(d.output.scheduled_cached_reqs.all_token_ids) == {"a", "b"}


def test_output_in_flight_across_a_reset_is_dropped(driver):
    d = driver(async_scheduling=True).add("a", 4, max_tokens=9)
    d.schedule()
    first = d.output
    d.reset(running=True)
    d.schedule()
    second = d.output
    assert d.update(first, a=(7,)) == ()
    assert d.update(second, a=(8,))[0].new_token_ids == (8,)
    assert d["a"].output_token_ids == (8,)


def test_repetition_patterns():
    detection = RepetitionDetection(max_pattern_size=2, min_pattern_size=2, min_count=2)
    assert is_repeating((9, 1, 2, 1, 2), detection)
    assert not is_repeating((1, 2, 2, 1), detection)
    assert not is_repeating((2, 1, 2), detection)
    assert is_repeating((1, 1, 1, 1), detection)


@pytest.mark.parametrize("drafts", [0, 2])
def test_async_placeholders_stand_for_tokens_in_flight(driver, drafts):
    fields = {"method": "mtp", "drafts": drafts} if drafts else {}
    d = driver(async_scheduling=True, **fields).add("a", 4, max_tokens=20)
    d.schedule()
    first = d.output
    assert d["a"].num_output_placeholders == 1
    assert d["a"].spec_token_ids == (-1,) * drafts
    assert d.schedule() == {"a": 1 + drafts}
    assert d["a"].num_output_placeholders == 2 + drafts
    assert d["a"].num_computed_tokens == 5 + drafts
    assert d.output.scheduled_cached_reqs.num_output_tokens == (1,)
    second = d.output
    d.update(first, a=(1,))
    d.update(second, a=(2,))  # all drafts rejected
    # Past the prompt, C = N - 1 + H.
    assert d["a"].num_output_placeholders == 0
    assert d["a"].num_computed_tokens == d["a"].num_tokens - 1 == 5


def test_async_ends_without_a_surplus_step(driver):
    d = driver(async_scheduling=True).add("a", 4, max_tokens=2)
    d.schedule()
    first = d.output
    assert d.schedule() == {"a": 1}
    second = d.output
    d.update(first, a=(1,))
    # One token is known and the last one is in flight: a further step would be for nothing.
    assert d.schedule() == {}
    assert d.update(second, a=(2,))[0].finish_reason is FinishReason.LENGTH


def test_async_with_drafts_ends_when_even_full_rejection_is_enough(driver):
    d = driver(async_scheduling=True, method="mtp", drafts=2).add("a", 4, max_tokens=3)
    d.schedule()
    d.update(a=(1,))
    assert d.schedule() == {"a": 3}
    second = d.output
    # The step in flight may add one token or three: the third has to be planned for.
    assert d.schedule() == {"a": 3}
    third = d.output
    d.update(second, a=(2,))
    assert d.schedule() == {}
    assert d.update(third, a=(3,))[0].finish_reason is FinishReason.LENGTH


def test_stale_output_can_end_a_request_in_the_queue(driver):
    d = driver(num_blocks=5, block_size=2, async_scheduling=True)
    d.add("a", 3, max_tokens=9).add("b", 4, max_tokens=9, stop_token_ids=(2,))
    d.schedule()
    first = d.output
    d.schedule()
    assert d.state.waiting == ("b",)
    outputs = d.update(first, a=(1,), b=(2,))
    assert outputs[1].finish_reason is FinishReason.STOP
    assert d.state.waiting == ()
    assert tuple(d.state.requests) == ("a",)


def test_snapshot_names_what_a_check_compares(driver):
    d = driver(num_blocks=6, caching=True, async_scheduling=True).add("a", 5).add("b", 30)
    d.schedule()
    snap = v1.snapshot(d.state)
    assert snap.free_blocks == (3, 4, 5)
    assert snap.ref_counts == (0, 1, 1, 0, 0, 0)
    assert snap.cached_blocks == {1}
    assert snap.block_tables == {"a": ((1, 2),)}
    assert (snap.running, snap.waiting, snap.skipped_waiting) == (("a",), ("b",), ())
    assert snap.num_computed_tokens == {"a": 5, "b": 0}
    assert snap.num_output_placeholders == {"a": 1, "b": 0}
