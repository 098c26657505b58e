"""The second half of a step: who is admitted, and who has to wait."""

from servespec.reference.contracts import PauseState


def test_max_num_seqs(driver):
    d = driver(max_num_seqs=2).add("a", 1).add("b", 1).add("c", 1)
    assert d.step() == {"a": 1, "b": 1}


def test_the_head_of_the_line_blocks_those_behind_it(driver):
    d = driver(num_blocks=4, block_size=4).add("big", 20).add("small", 1)
    assert d.step() == {}
    assert d.state.waiting == ("big", "small")


def test_without_full_isl_only_the_first_chunk_needs_room(driver):
    d = driver(budget=4, num_blocks=4, scheduler_reserve_full_isl=False).add("big", 20)
    assert d.step() == {"big": 4}


def test_without_chunked_prefill_a_prompt_is_not_cut(driver):
    d = driver(budget=16, max_model_len=16, enable_chunked_prefill=False)
    d.add("a", 10).add("b", 9)
    assert d.step() == {"a": 10}
    assert d.step() == {"a": 1, "b": 9}


def test_watermark_applies_beside_running_requests_only(driver):
    d = driver(num_blocks=10, watermark=0.5).add("a", 16, max_tokens=2)
    assert d.step() == {"a": 16}
    d.add("b", 4)
    assert d.step() == {"a": 1}
    assert d.step() == {"b": 4}


def test_priority_orders_by_priority_arrival_and_id(driver):
    d = driver(max_num_seqs=1, policy="priority")
    d.add("d", 1, priority=1).add("c", 1, arrival=2.0).add("b", 1, arrival=1.0)
    d.add("a", 1, arrival=1.0)
    assert d.state.waiting == ("a", "b", "c", "d")
    assert d.step() == {"a": 1}


def test_paused_new_admits_nobody(driver):
    d = driver().add("a", 1)
    d.step()
    d.add("b", 1)
    d.pause(PauseState.PAUSED_NEW)
    assert d.step() == {"a": 1}


def test_throttled_prefills_wait_but_a_full_hit_does_not(driver):
    d = driver(budget=8, caching=True).add("a", range(5), max_tokens=20)
    d.step()
    # All but the last token of c is cached, so it is a decode rather than a prefill.
    d.add("c", range(5))
    assert d.schedule(throttle=True) == {"a": 1, "c": 1}
    d.update()
    d.add("b", 4)
    assert d.schedule(throttle=True) == {"a": 1, "c": 1}


def test_padding_makes_an_admitted_decode_uniform(driver):
    d = driver(budget=8, caching=True, method="ngram", drafts=2).add("a", range(5))
    d.step()
    d.drafts(a=(1, 2))
    d.add("b", range(5))
    assert d.schedule() == {"a": 3, "b": 3}
    assert d.output.scheduled_spec_decode_tokens == {"a": (1, 2), "b": (-1, -1)}


def test_padding_that_does_not_fit_makes_the_request_wait(driver):
    d = driver(budget=5, caching=True, method="ngram", drafts=2).add("a", range(5))
    d.step()
    d.drafts(a=(1, 2))
    d.add("b", range(5))
    assert d.step() == {"a": 3}


def test_no_padding_without_a_running_decode(driver):
    d = driver(budget=8, method="ngram", drafts=2).add("b", 1)
    assert d.schedule() == {"b": 1}


def test_stale_output_sets_a_request_aside_until_it_arrives(driver):
    d = driver(num_blocks=5, block_size=2, async_scheduling=True)
    d.add("a", 3, max_tokens=2).add("b", 4, max_tokens=9)
    d.schedule()
    first = d.output
    d.schedule()
    assert d.output.preempted_req_ids == {"b"}
    assert (d["b"].num_output_placeholders, d["b"].num_stale_output_tokens) == (0, 4)
    d.finish("a")
    # There is room, but b's first token is still to come.
    assert d.schedule() == {}
    assert d.state.skipped_waiting == ("b",)
    d.update(first, b=(2,))
    assert d["b"].output_token_ids == (2,)
    # Counters that were set back are left alone.
    assert (d["b"].num_computed_tokens, d["b"].num_output_placeholders) == (0, 0)
    assert d.schedule() == {"b": 5}
    assert d.state.skipped_waiting == ()


def test_skipped_requests_stand_before_waiting_ones_under_fcfs(driver):
    d = driver(num_blocks=5, block_size=2, async_scheduling=True)
    d.add("a", 3, max_tokens=2).add("b", 4, max_tokens=9)
    d.schedule()
    first = d.output
    d.schedule()
    d.finish("a")
    d.add("c", 2, max_tokens=1)
    assert d.schedule() == {"c": 2}
    assert d.state.skipped_waiting == ("b",)
    d.add("d", 1)
    d.update(first, b=(2,))
    # b takes the 3 blocks that are left; d has not overtaken it.
    assert list(d.schedule()) == ["b"]
    assert d.state.waiting == ("d",)


def test_skipped_requests_compete_under_priority(driver):
    d = driver(num_blocks=5, block_size=2, async_scheduling=True, policy="priority")
    d.add("a", 3, max_tokens=2).add("b", 4, max_tokens=9, priority=1)
    d.schedule()
    first = d.output
    d.schedule()
    d.finish("a")
    d.schedule()
    assert d.state.skipped_waiting == ("b",)
    d.update(first, b=(2,))
    d.add("d", 1, priority=0)
    assert list(d.schedule()) == ["d", "b"]
