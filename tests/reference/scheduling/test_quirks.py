"""Each oddity of vLLM 0.27.1 by itself: what happens with it, and what without.

Issue numbers are of vllm-project/vllm; oddities without one were found by driving its scheduler.
"""

import dataclasses

import pytest

from servespec.reference.contracts import ConfigError, Quirks
from servespec.reference.scheduling import v1


def both(make, quirk, **fields):
    """The same scheduler with one oddity and with none."""
    return [make(quirks=Quirks(**{quirk: on}), **fields) for on in (True, False)]


def test_a_victim_that_was_skipped_costs_the_next_request_a_step_49097(driver):
    results = []
    for d in both(
        driver,
        "priority_victim_skips_next",
        num_blocks=7,
        block_size=2,
        policy="priority",
        async_scheduling=True,
    ):
        d.add("low", 3, priority=9, max_tokens=1, arrival=-1.0)
        d.schedule()
        d.add("mid", 4, priority=1, max_tokens=9).add("high", 3, priority=2, max_tokens=9)
        assert d.schedule() == {"mid": 4, "high": 3}
        # low's only token is in flight, so it is skipped. mid needs a block, none is free, and low,
        # which stands before mid in the list, is the victim. high stands behind mid.
        results.append((d.schedule(), set(d.output.preempted_req_ids)))
    assert results == [({"mid": 1}, {"low"}), ({"mid": 1, "high": 1}, {"low"})]


def test_equals_preempt_each_other_for_ever(driver):
    results = []
    for d in both(
        driver,
        "victim_tie_ignores_id",
        budget=4,
        num_blocks=6,
        block_size=2,
        policy="priority",
        scheduler_reserve_full_isl=False,
        long_prefill_token_threshold=2,
    ):
        d.add("a", 9, max_tokens=1).add("b", 9, max_tokens=1)
        for _ in range(60):
            d.step()
        results.append(tuple(d.state.requests))
    assert results == [("a", "b"), ()]


def test_padding_up_to_max_model_len_is_followed_by_a_negative_chunk_53962(driver):
    results = []
    for d in both(
        driver,
        "negative_schedule",
        caching=True,
        method="ngram",
        drafts=3,
        max_model_len=8,
        async_scheduling=True,
    ):
        d.add("a", range(5), max_tokens=9)
        d.schedule()
        d.add("b", range(5), max_tokens=9)
        assert d.schedule()["b"] == 4
        assert d["b"].num_computed_tokens == 8
        results.append(d.schedule().get("b"))
        if results[-1] == -1:
            with pytest.raises(ConfigError, match=r"num_scheduled_tokens\['b'\] is -1"):
                d.update(a=(1,), b=(2,))
    assert results == [-1, None]


def test_padding_is_cut_behind_its_own_drafts_54392(driver):
    results = []
    for d in both(
        driver,
        "padded_admission_cut_late",
        caching=True,
        method="ngram",
        drafts=3,
        long_prefill_token_threshold=2,
    ):
        d.add("a", range(5), max_tokens=9)
        assert [d.step()["a"] for _ in range(4)] == [2, 2, 1, 1]
        d.drafts(a=(7,))
        d.add("b", range(5), max_tokens=9)
        assert d.schedule()["b"] == 2
        results.append(d.output.scheduled_spec_decode_tokens["b"])
    assert results == [(-1, -1, -1), (-1,)]


def test_a_collection_of_ids_ends_in_the_order_of_a_set(driver):
    names = [f"r{i}" for i in range(8)]
    results = []
    for d in both(driver, "finish_in_set_order", block_size=2, num_blocks=9, max_num_seqs=8):
        for name in names:
            d.add(name, 1)
        d.step()
        holders = {d.table(name)[0][0]: name for name in names}
        d.finish(*names)
        results.append([holders[block] for block in d.free])
    assert results == [list(set(names)), names]


def test_min_tokens_beyond_max_model_len_never_ends_51299(driver):
    results = []
    for d in both(driver, "min_tokens_outlive_model_len", max_model_len=8):
        d.add("a", 4, max_tokens=20, min_tokens=10)
        for _ in range(20):
            d.step()
        results.append((tuple(d.state.running), len(d.free)))
    assert results == [(("a",), 17), ((), 19)]


def test_a_prefill_waits_for_a_whole_block_of_budget_45414(aligned):
    results = []
    for d in both(aligned, "aligned_split_starves", budget=4, num_blocks=40):
        d.add("a", 1, max_tokens=40)
        d.step()
        d.add("b", 9).add("c", 1)
        results.append([d.step() for _ in range(5)])
    starving, intended = results
    assert starving == [{"a": 1}] * 5
    assert [step.get("b", 0) for step in intended] == [3, 1, 3, 1, 1]


def test_hashes_of_blocks_that_nobody_computed(driver):
    results = []
    for d in both(
        driver,
        "preempted_step_stays_cached",
        budget=8,
        num_blocks=9,
        block_size=2,
        policy="priority",
        caching=True,
        scheduler_reserve_full_isl=False,
        long_prefill_token_threshold=4,
    ):
        d.add("low", 20, priority=9)
        assert d.step() == {"low": 4}
        d.add("high", 4, max_tokens=2)
        assert d.step() == {"low": 4, "high": 4}
        # low takes the last two blocks for its tokens 8 to 11, then high comes for a block, and
        # low, whose chunk is not going to be computed, gives all of its own back.
        assert d.step() == {"high": 1}
        assert d.output.preempted_req_ids == {"low"}
        d.step()
        results.append(d.output.scheduled_cached_reqs.num_computed_tokens)
    assert results == [(10,), (8,)]


def test_a_state_is_published_again_after_it_was_overwritten(aligned):
    results = []
    for d in both(
        aligned, "overwritten_tail_published", unit=2, async_scheduling=True, num_blocks=30
    ):
        d.add("a", range(6), max_tokens=9)
        assert [d.schedule()["a"] for _ in range(3)] == [4, 2, 1]
        results.append(d.table("a")[0][1] in d.state.cache.pool.hashes)
    # After 6 tokens a has gone on to write in its own block, so only the copy may be found.
    assert results == [True, False]


def test_states_between_chunks_in_flight_are_forgotten(aligned):
    results = []
    for d in both(aligned, "skipped_states_leak", budget=8, async_scheduling=True, num_blocks=60):
        d.add("a", 60)
        d.schedule()
        for _ in range(6):
            before = d.output
            d.schedule()
            d.update(before)
        results.append(sum(block != 0 for block in d.table("a")[0]))
    assert results == [7, 3]


@pytest.mark.parametrize("field", dataclasses.fields(Quirks), ids=lambda field: field.name)
def test_every_oddity_is_on_in_one_profile_and_off_in_the_other(field):
    assert getattr(Quirks.vllm_0_27_1(), field.name) is True
    assert getattr(Quirks(), field.name) is False


def test_nobody_is_left_out(driver):
    """A request that never fits blocks the line (#35541); engines refuse it beforehand."""
    d = driver(num_blocks=3).add("big", 40).add("small", 1)
    assert [d.step() for _ in range(5)] == [{}] * 5
    assert v1.has_unfinished_requests(d.state)
