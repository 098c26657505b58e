"""Chunks and states of a hybrid model whose GDN states are kept at block boundaries."""

from dataclasses import replace

import pytest

from servespec.reference.contracts import ConfigError
from servespec.reference.scheduling.chunks import aligned_split


def chunks(d, name):
    """Chunks of a request up to its first output token."""
    sizes = []
    for _ in range(30):
        sizes.append(d.step().get(name, 0))
        if d[name].num_output_tokens > 0:
            return sizes
    raise AssertionError(sizes)


def test_mode_none_cannot_cache_prefixes(aligned):
    with pytest.raises(ConfigError, match="mamba_cache_mode is 'none': must be 'align'"):
        aligned(mode="none")


def test_chunks_end_at_block_boundaries(aligned):
    d = aligned(budget=10).add("a", 19, max_tokens=9)
    # 10 is cut to 8, twice; the last boundary within the prompt is 16, the tail is free.
    assert chunks(d, "a") == [8, 8, 3]


def test_the_last_boundary_is_a_stop_of_its_own(aligned):
    assert chunks(aligned(budget=64).add("a", 19), "a") == [16, 3]


def test_eagle_stops_one_block_earlier(aligned):
    d = aligned(budget=64, method="mtp", drafts=1, num_blocks=40).add("a", 19)
    assert chunks(d, "a") == [12, 7]


def test_a_block_wider_than_the_budget_is_filled_in_parts(aligned):
    d = aligned(budget=3, max_num_seqs=1).add("a", 9)
    assert chunks(d, "a") == [3, 1, 3, 1, 1]


def test_a_chunk_that_starts_inside_a_block_stops_at_its_end(aligned):
    # With a drafter the boundary at 4 is no stop of its own.
    d = aligned(budget=3, max_num_seqs=1, method="mtp", drafts=1, num_blocks=40).add("a", 6)
    assert chunks(d, "a") == [3, 1, 2]


def test_a_junction_inside_a_block_stops_at_the_boundary_before(aligned):
    d = aligned(budget=64, unit=1).add("a", 30)
    request = replace(d["a"], shared_prefix_boundary=14)
    assert aligned_split(d.state, request, 0, 30) == 12
    assert aligned_split(d.state, request, 4, 26) == 8


def test_the_last_hash_unit_of_the_prompt_is_a_stop(aligned):
    d = aligned(budget=64, unit=2, num_blocks=40).add("a", 15)
    assert chunks(d, "a") == [12, 2, 1]


def test_a_shared_prefix_without_state_becomes_a_stop(aligned):
    d = aligned(budget=64, num_blocks=40).add("a", range(19), max_tokens=9)
    d.step()
    d.step()
    # Attention shares 12 tokens; the only state is that after 16.
    d.add("b", [*range(13), *range(50, 57)])
    assert d.step()["b"] == 12
    assert d["b"].shared_prefix_boundary == 12
    d.step()
    # From now on others can share the junction.
    d.add("c", [*range(13), *range(90, 97)])
    d.step()
    assert d.new("c").num_computed_tokens == 12


def test_only_the_states_that_are_needed_are_held(aligned):
    d = aligned(budget=4, num_blocks=30).add("a", 13, max_tokens=9)
    tables = []
    for _ in range(4):
        d.step()
        tables.append(d.table("a")[0])
    assert tables == [(1,), (1, 3), (0, 3, 5), (0, 0, 5, 7)]


def test_a_chunk_of_several_blocks_leaves_nulls(aligned):
    d = aligned(budget=12, num_blocks=30).add("a", 25)
    d.schedule()
    assert d.new("a").block_ids == ((0, 0, 1), (2, 3, 4))
    d.update()
    d.schedule()
    assert d.output.scheduled_cached_reqs.new_block_ids == (((0, 0, 5), (6, 7, 8)),)
    assert d.table("a")[0] == (0, 0, 1, 0, 0, 5)


def test_blocks_of_drafts_move_on_with_the_state(aligned):
    d = aligned(budget=4, num_blocks=30, method="ngram", drafts=2).add("a", 9)
    d.schedule()
    assert d.new("a").block_ids == ((1, 2, 3), (4,))
    d.update()
    d.schedule()
    # The table of the worker only grows: the two drafts' blocks are reported again.
    assert d.output.scheduled_cached_reqs.new_block_ids == (((5,), (6,)),)
    assert d.table("a")[0] == (1, 2, 3, 5)


def test_a_hit_brings_one_state_and_all_of_attention(aligned):
    d = aligned(budget=64, num_blocks=30).add("a", range(10), max_tokens=9)
    d.step()
    d.step()
    d.add("b", [*range(9), 77, 78])
    d.schedule()
    row = d.new("b")
    assert row.num_computed_tokens == 8
    # a has left its state after 8 tokens, the first block ever given out, to the cache.
    assert row.block_ids[0][:2] == (0, 1)
    assert d.table("a")[0][1] == 0
    assert d.table("b")[1][:2] == d.table("a")[1][:2]


def test_a_state_of_the_same_step_is_waited_for(aligned):
    d = aligned(budget=64, num_blocks=30).add("a", range(9)).add("b", range(9))
    # Attention could share within the step, a state cannot: b waits, and so does all behind it.
    assert d.step() == {"a": 8}
    assert list(d.step()) == ["a", "b"]
    assert d["b"].num_computed_tokens == 9


def test_dense_shares_in_the_same_step(driver):
    d = driver(caching=True).add("a", range(9)).add("b", range(9))
    assert d.step() == {"a": 9, "b": 1}


def test_fresh_attention_blocks_are_cleared_and_states_are_not(aligned):
    d = aligned(num_blocks=30).add("a", 8)
    d.schedule()
    assert d.new("a").block_ids == ((0, 1), (2, 3))
    assert d.output.new_block_ids_to_zero == (2, 3)


def test_dense_models_clear_nothing(driver):
    d = driver().add("a", 8)
    d.schedule()
    assert d.output.new_block_ids_to_zero == ()


def test_a_hit_inside_a_block_is_copied_before_it_is_written(aligned):
    d = aligned(budget=64, unit=2, num_blocks=30).add("a", range(7), max_tokens=9)
    assert d.step() == {"a": 4}
    assert d.step() == {"a": 2}
    state, attention = d.table("a")[0][1], d.table("a")[1][1]
    # The producer runs on in its block, so the cache keeps a copy of the state after 6 tokens.
    d.schedule()
    (copy,) = d.output.kv_cache_block_copies
    assert copy.src_block_id == state
    d.update()
    d.add("b", [*range(6), 70, 71])
    d.schedule()
    row = d.new("b")
    assert row.num_computed_tokens == 6
    copies = {(c.src_block_id, c.dst_block_id) for c in d.output.kv_cache_block_copies}
    assert copies == {
        (copy.dst_block_id, row.block_ids[0][1]),
        (attention, row.block_ids[1][1]),
    }
    # The copy of attention's block is also cleared first, as every new block.
    assert row.block_ids[1][1] in d.output.new_block_ids_to_zero
    # Both ends are let go with the plan: only the tables hold blocks.
    counts = d.state.cache.pool.ref_counts
    assert counts[copy.dst_block_id] == 0
    assert counts[row.block_ids[0][1]] == 1


def test_mode_none_holds_one_state_and_one_for_each_draft(driver, aligned):
    d = aligned(mode="none", caching=False, method="ngram", drafts=2, num_blocks=30)
    d.add("a", 20, max_tokens=30)
    for _ in range(6):
        d.step()
    assert len(d.table("a")[0]) == 3
