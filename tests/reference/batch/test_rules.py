"""Single rules by hand-made examples, each with what it is meant to catch."""

from copy import deepcopy
from dataclasses import replace

import pytest

from servespec.reference.batch.attention_state import classify
from servespec.reference.batch.block_tables import kernel_blocks, slot, state_columns
from servespec.reference.batch.gdn_metadata import decode_draft_counts, gdn_metadata
from servespec.reference.batch.graph import is_uniform_decode
from servespec.reference.batch.metadata import attention_metadata, split_decodes_and_prefills
from servespec.reference.batch.padding import pad_query_start_loc
from servespec.reference.batch.persistent import append_sampled, condense, empty_batch, place
from servespec.reference.batch.prepare import prepare, state_saves
from servespec.reference.batch.reorder import apply_swaps, region, swaps_into_regions
from servespec.reference.batch.state_columns import TokenStates, spec_token_states
from servespec.reference.batch.state_moves import boundary_crossed, move_before_step
from servespec.reference.contracts import (
    AttentionState,
    CacheConfig,
    CachedRequestData,
    EngineConfig,
    GraphConfig,
    KVCacheGroup,
    NewRequestData,
    Quirks,
    RequestError,
    SamplingParams,
    SchedulerConfig,
    SchedulerOutput,
    SpeculativeConfig,
    StateMove,
    UnknownRequestError,
)

GDN = KVCacheGroup(layer_type="linear_attention", layer_indices=(0,))
FULL = KVCacheGroup(layer_type="full_attention", layer_indices=(1,))


def config(num_spec=0, quirks=None, graph=None, **cache):
    return EngineConfig(
        scheduler=SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=64,
            quirks=quirks or Quirks(),
        ),
        cache=CacheConfig(num_gpu_blocks=100, groups=(GDN, FULL), **{"block_size": 4, **cache}),
        speculative=(
            SpeculativeConfig(method="mtp", num_speculative_tokens=num_spec) if num_spec else None
        ),
        graph=graph,
    )


def new(req_id, prompt, blocks, computed=0):
    return NewRequestData(
        req_id=req_id,
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(),
        block_ids=blocks,
        num_computed_tokens=computed,
    )


def plan(counts, new_reqs=(), cached=(), drafts=None, resumed=(), **fields):
    """Make a plan; `cached` holds (id, computed, outputs, new blocks)."""
    return SchedulerOutput(
        scheduled_new_reqs=tuple(new_reqs),
        scheduled_cached_reqs=CachedRequestData(
            req_ids=tuple(row[0] for row in cached),
            num_computed_tokens=tuple(row[1] for row in cached),
            num_output_tokens=tuple(row[2] for row in cached),
            new_block_ids=tuple(row[3] for row in cached),
            resumed_req_ids=frozenset(resumed),
        ),
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens=drafts or {},
        **fields,
    )


def test_holes_fill_from_below_and_close_from_above():
    assert place(("a", None, "c", None), "x") == ("a", "x", "c", None)
    assert place(("a",), "x") == ("a", "x")
    assert condense((None, "b", None, "d", "e", None)) == ("e", "b", "d")
    assert condense((None, None)) == ()


def test_swaps_keep_no_order_inside_a_region():
    rows = {"P": (0, 9, 9), "d1": (9, 1, 5), "d2": (9, 1, 5)}
    rows |= {"L": (3, 4, 9), "S": (3, 1, 9), "d3": (9, 1, 5)}
    swaps = swaps_into_regions([region(*row, threshold=1) for row in rows.values()])
    assert swaps == ((5, 0), (4, 3))
    assert apply_swaps(tuple(rows), swaps) == ("d3", "d1", "d2", "S", "L", "P")


def test_a_new_prompt_of_one_token_is_a_prefill_to_the_order_and_a_decode_to_the_state():
    assert region(0, 1, 1, threshold=4).name == "PREFILL"
    states = classify((20, 0), (1, 1), (0, 0), None, True)
    assert states.returned is AttentionState.DECODE_ONLY


@pytest.mark.parametrize(
    ("computed", "scheduled", "drafts", "method", "chunked", "returned", "stored"),
    [
        ((0,), (1,), (0,), None, True, "PrefillNoCache", "PrefillNoCache"),
        ((11,), (1,), (0,), None, True, "DecodeOnly", "DecodeOnly"),
        ((20, 3), (1, 1), (0, 0), "mtp", True, "SpecDecoding", "SpecDecoding"),
        ((20, 3), (1, 1), (0, 0), "eagle3", True, "DecodeOnly", "DecodeOnly"),
        ((20, 3), (4, 4), (3, 3), "eagle3", True, "SpecDecoding", "ChunkedPrefill"),
        ((20, 0), (4, 1), (3, 0), "mtp", True, "SpecDecoding", "SpecDecoding"),
        ((20, 3), (4, 9), (3, 0), "mtp", True, "ChunkedPrefill", "ChunkedPrefill"),
        ((128,), (40,), (0,), None, True, "ChunkedPrefill", "ChunkedPrefill"),
        ((20, 0), (1, 5), (0, 0), None, False, "PrefillCacheHit", "PrefillCacheHit"),
    ],
)
def test_attention_states(computed, scheduled, drafts, method, chunked, returned, stored):
    states = classify(computed, scheduled, drafts, method, chunked)
    assert (states.returned.value, states.stored.value) == (returned, stored)


def test_the_two_layer_kinds_rightly_disagree():
    # Row 1 ends its prompt with one token: a decode to attention, a prefill to GDN layers.
    query_lens, prefilling = (1, 1, 5), (False, True, True)
    attention = split_decodes_and_prefills(query_lens, prefilling, 1)
    gdn = split_decodes_and_prefills(query_lens, prefilling, 1, short_extends_are_decodes=False)
    assert (attention.num_decodes, attention.num_prefills) == (2, 1)
    assert (gdn.num_decodes, gdn.num_prefills) == (1, 2)
    assert (attention.num_decode_tokens, gdn.num_decode_tokens) == (2, 1)


def test_kernel_blocks_and_slots():
    assert kernel_blocks((3,), 8) == tuple(range(24, 32))
    table = kernel_blocks((3, 7), 8)
    assert [slot(table, position, 128) for position in (0, 129, 1024)] == [3072, 3201, 7168]


@pytest.mark.parametrize("quirk", [False, True])
def test_gdn_fresh_decode(quirk):
    """vllm#51562: with the quirk a one-token first chunk is a decode and reads a stale state."""
    metadata = gdn_metadata(
        (1, 1), (9, 1), (5, 1), ((3,), (4,)), quirks=Quirks(gdn_fresh_decode=quirk)
    )
    if quirk:
        assert (metadata.num_decodes, metadata.has_initial_state) == (2, None)
    else:
        assert (metadata.num_decodes, metadata.num_prefills) == (1, 1)
        assert metadata.has_initial_state == (True, False)


@pytest.mark.parametrize("quirk", [False, True])
def test_gdn_ignores_accepted(quirk):
    """After a step that kept three tokens the state is in column 2, drafts or no drafts."""
    metadata = gdn_metadata(
        (1,), (9,), (5,), ((30, 31, 32),), None, (3,), Quirks(gdn_ignores_accepted=quirk)
    )
    assert metadata.non_spec_state_indices == (30,)
    assert metadata.non_spec_initial_state_indices == (None if quirk else (32,))
    assert metadata.non_spec_num_accepted_tokens == (None if quirk else (3,))


@pytest.mark.parametrize("quirk", [False, True])
def test_gdn_forgets_accepted(quirk):
    """A request that one step leaves out still has its state where its drafts left it."""
    setup = config(num_spec=2, quirks=Quirks(gdn_forgets_accepted=quirk))
    batch = empty_batch()
    start = plan({"a": 4}, [new("a", range(4), ((10, 11, 12), (1, 2, 3)))])
    batch, _ = prepare(batch, start, setup)
    batch = append_sampled(batch, {"a": (7,)})
    verify = plan({"a": 3}, cached=[("a", 4, 1, None)], drafts={"a": (8, 9)})
    batch, _ = prepare(batch, verify, setup)
    batch = append_sampled(batch, {"a": (8, 9, 5)})
    batch, _ = prepare(batch, plan({}), setup)
    back = plan({"a": 2}, cached=[("a", 7, 4, None)], drafts={"a": (6,)})
    batch, record = prepare(batch, back, setup)
    assert record.gdn[0].num_accepted_tokens == ((1,) if quirk else (3,))


@pytest.mark.parametrize("quirk", [False, True])
def test_gdn_packed_state_index(quirk):
    """Row 0 lacks two of three drafts; by packed position row 1 then works on row 0's states."""
    blocks = ((10, 11, 12, 13), (20, 21, 22, 23))
    metadata = gdn_metadata((2, 4), (9, 9), (5, 5), blocks, (1, 3), (1, 2))
    first, second = spec_token_states(metadata, packed_index=quirk)
    assert first == TokenStates(initial=10, written=(10, 11))
    if quirk:
        assert second == TokenStates(initial=13, written=(12, 13, 20, 21))
    else:
        assert second == TokenStates(initial=21, written=(20, 21, 22, 23))


def test_a_row_that_accepted_more_than_it_holds_is_skipped_by_the_quirk_only():
    metadata = gdn_metadata((2,), (9,), (5,), ((10, 11, 12, 13),), (1,), (4,))
    assert spec_token_states(metadata, packed_index=True) == (None,)
    (states,) = spec_token_states(metadata)
    assert states == TokenStates(initial=13, written=(10, 11))


def test_decodes_beside_drafts_are_folded_into_prefills():
    metadata = gdn_metadata(
        (4, 1, 6), (20, 9, 6), (5, 5, 6), ((1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)),
        decode_draft_counts((4, 1, 6), (3, 0, 0)), (2, 1, 1),
    )  # fmt: skip
    assert (metadata.num_decodes, metadata.num_prefills, metadata.num_spec_decodes) == (0, 2, 1)
    assert metadata.has_initial_state == (True, False)
    assert metadata.spec_token_index == (0, 1, 2, 3)
    assert metadata.non_spec_query_start_loc == (0, 1, 7)


def test_state_columns_follow_the_last_token_in_mode_align():
    table = (10, 11, 12, 13)
    assert state_columns(table, 4, 1, 4) == (10, 11)
    assert state_columns(table, 5, 1, 4) == (11, 12)
    assert state_columns(table, 5, 1, None) == (10, 11)
    assert state_columns((10,), 0, 1, 4) == (10, 0)


def test_states_move_on_and_are_saved_at_boundaries():
    # Blocks of 4: three tokens and two drafts end in block 1, whose columns hold the states.
    assert move_before_step(3, 3, 6, 1, 4) == (0, 1, 0)
    # All three sampled tokens count: six tokens, the boundary at 4 was the first step state + 0.
    assert boundary_crossed(6, 2, 3, 4) == (1, 0, 0)
    assert boundary_crossed(8, 2, 3, 4) == (1, 1, 2)
    assert boundary_crossed(7, 2, 1, 4) is None
    # The next step starts from the third column of block 1.
    assert move_before_step(6, 6, 9, 3, 4) == (1, 2, 2)
    assert move_before_step(0, 0, 4, 1, 4) is None
    assert move_before_step(8, 0, 9, 1, 4) == (1, 2, 0)


def test_aligned_states_through_prepare():
    setup = config(num_spec=2, mamba_cache_mode="align")
    batch = empty_batch()
    start = plan({"a": 4}, [new("a", range(4), ((10, 11, 12), (1,)))])
    batch, record = prepare(batch, start, setup)
    assert record.state_moves == ((),)
    assert record.gdn[0].non_spec_state_indices == (10,)
    batch = append_sampled(batch, {"a": (7,)})
    verify = plan({"a": 3}, cached=[("a", 4, 1, ((13,), (2,)))], drafts={"a": (8, 9)})
    batch, record = prepare(batch, verify, setup)
    move = StateMove(
        req_id="a", ssm_src_block_id=10, conv_src_block_id=10, conv_offset=0, dst_block_id=11
    )
    assert record.state_moves == ((move,),)
    assert record.gdn[0].spec_state_indices == ((11, 12, 13),)
    batch = append_sampled(batch, {"a": (8, 5)})
    cross = plan({"a": 3}, cached=[("a", 6, 3, ((14,), (3,)))], drafts={"a": (1, 2)})
    batch, record = prepare(batch, cross, setup)
    move = StateMove(
        req_id="a", ssm_src_block_id=12, conv_src_block_id=11, conv_offset=1, dst_block_id=12
    )
    assert record.state_moves == ((move,),)
    # Nine tokens: the boundary at 8 lies one token into the step, and belongs to block 11.
    save = StateMove(
        req_id="a", ssm_src_block_id=13, conv_src_block_id=12, conv_offset=1, dst_block_id=11
    )
    assert state_saves(batch, {"a": (1, 2, 3)}, setup) == ((save,),)
    assert state_saves(batch, {"a": (1,)}, setup) == ((),)


def test_fia_padding():
    assert pad_query_start_loc((0, 1, 2), 4, 4, "FULL_DECODE_ONLY", 1) == (0, 1, 2, 3, 4)
    assert pad_query_start_loc((0, 4, 8), 16, 4, "FULL_AND_PIECEWISE", 4) == (0, 4, 8, 12, 16)
    assert pad_query_start_loc((0, 1, 6), 8, None, "FULL_DECODE_ONLY", 1) == (0, 1, 6, 8)
    assert pad_query_start_loc((0, 1, 2), 4, 4, "FULL", 1) == (0, 1, 2, 4)
    assert pad_query_start_loc((0, 4), 4, 1, "FULL", 1) == (0, 4)


def test_a_dummy_row_beyond_the_buffers_has_one_key_and_a_null_table():
    metadata = attention_metadata(
        (0, 1, 6), (9, 5), ((4, 5), (6, 0)), range(6), 0, AttentionState.CHUNKED_PREFILL,
        padded_query_start_loc=(0, 1, 6, 8), max_num_seqs=2,
    )  # fmt: skip
    assert metadata.seq_lens == (9, 5, 1)
    assert metadata.block_tables[2] == (0, 0)
    assert (metadata.num_decodes, metadata.num_prefills, metadata.num_actual_tokens) == (1, 2, 6)
    assert metadata.actual_seq_lengths_q[-1] == 8


def test_uniform_decode_asks_for_context_only_with_speculation():
    assert is_uniform_decode((1, 1), (0, 5), 0)
    assert not is_uniform_decode((2, 2), (0, 5), 1)
    assert is_uniform_decode((2, 2), (4, 5), 1)


def test_padded_gdn_rows_hold_no_token_and_the_null_block():
    graph = GraphConfig(mode="FULL_DECODE_ONLY", capture_sizes=(4,))
    batch, _ = prepare(
        empty_batch(), plan({"a": 4}, [new("a", range(4), ((7,), (1, 2)))]), config(graph=graph)
    )
    batch = append_sampled(batch, {"a": (5,)})
    decode = plan({"a": 1}, cached=[("a", 4, 1, None)])
    _, record = prepare(batch, decode, config(graph=graph))
    assert record.graph is not None
    assert (record.graph.mode, record.graph.num_reqs) == ("FULL", 4)
    assert record.attention[0].query_start_loc == (0, 1, 2, 3, 4)
    assert record.attention[0].seq_lens == (5, 0, 0, 0)
    assert record.gdn[0].non_spec_query_start_loc == (0, 1, 1, 1, 1)
    assert record.gdn[0].non_spec_state_indices == (7, 0, 0, 0)
    assert record.gdn[0].num_decodes == 4
    assert record.req_ids == ("a",)


def test_budget_of_six_by_the_book():
    """B decodes while A's prompt of 12 runs in chunks of 5, 6 and 1 (the example of source 1)."""
    setup = config()
    batch = empty_batch()
    batch, _ = prepare(batch, plan({"B": 3}, [new("B", (1, 2, 3), ((50,), (1, 2)))]), setup)
    batch = append_sampled(batch, {"B": (4,)})
    prompt = tuple(range(100, 112))
    chunks = ((0, 5), (5, 6), (11, 1))
    for step, (computed, count) in enumerate(chunks):
        decode = ("B", 3 + step, 1 + step, None)
        if step == 0:
            a = new("A", prompt, ((60,), (3, 4, 5)))
            output = plan({"B": 1, "A": count}, [a], [decode])
        else:
            output = plan({"B": 1, "A": count}, cached=[decode, ("A", computed, 0, None)])
        batch, record = prepare(batch, output, setup)
        assert record.req_ids == ("B", "A")
        assert record.num_scheduled_tokens == (1, count)
        assert record.token_ids == (4 + step, *prompt[computed : computed + count])
        assert record.positions == (3 + step, *range(computed, computed + count))
        assert record.seq_lens == (4 + step, computed + count)
        assert record.sampled == (True, step == 2)
        attention, gdn = record.attention[0], record.gdn[0]
        last = step == 2
        state = AttentionState.DECODE_ONLY if last else AttentionState.CHUNKED_PREFILL
        assert record.attn_state is attention.attn_state is state
        # A's last prompt token is a decode to attention, and never one to a GDN layer.
        assert (attention.num_decodes, attention.num_prefills) == ((2, 0) if last else (1, 1))
        assert attention.num_decode_tokens == (2 if last else 1)
        assert (gdn.num_decodes, gdn.num_prefills, gdn.num_prefill_tokens) == (1, 1, count)
        assert gdn.has_initial_state == (True, step > 0)
        assert gdn.non_spec_state_indices == (50, 60)
        assert attention.slot_mapping[1] == 3 * 4 + computed % 4 + 4 * (computed // 4)
        batch = append_sampled(batch, {"B": (5 + step,), **({"A": (9,)} if last else {})})
    assert batch.requests["A"].token_ids == (*prompt, 9)


def test_bad_plans_are_refused_by_name():
    setup, batch = config(), empty_batch()
    with pytest.raises(UnknownRequestError, match="ghost"):
        prepare(batch, plan({"ghost": 1}, cached=[("ghost", 3, 1, None)]), setup)
    a = new("a", range(4), ((7,), (1,)))
    with pytest.raises(RequestError, match=r"'a': 5 tokens scheduled .* within the 4 known"):
        prepare(batch, plan({"a": 5}, [a]), setup)
    with pytest.raises(RequestError, match=r"'a': 0 tokens scheduled"):
        prepare(batch, plan({"a": 0}, [a]), setup)
    short = new("a", range(6), ((7,), (1,)))
    with pytest.raises(RequestError, match=r"'a': 1 blocks of 4 tokens cannot hold 6 tokens"):
        prepare(batch, plan({"a": 6}, [short]), setup)
    with pytest.raises(ValueError, match="num_accepted is None"):
        gdn_metadata((2,), (9,), (5,), ((1, 2),), (1,))


def test_an_empty_plan_empties_the_rows_and_keeps_the_requests():
    batch, _ = prepare(empty_batch(), plan({"a": 4}, [new("a", range(4), ((7,), (1,)))]), config())
    batch, record = prepare(batch, plan({}), config())
    assert (batch.req_ids, record.req_ids, record.token_ids) == ((), (), ())
    assert list(batch.requests) == ["a"]
    batch, _ = prepare(batch, plan({}, finished_req_ids=frozenset({"a"})), config())
    assert not batch.requests


def test_arguments_stay_as_they_were():
    setup = config(num_spec=2)
    first = plan({"a": 4}, [new("a", range(4), ((10, 11, 12), (1, 2)))])
    empty = empty_batch()
    batch, _ = prepare(empty, first, setup)
    assert empty == empty_batch()
    before = deepcopy(dict(batch.requests)), batch.req_ids, deepcopy(first)
    sampled = {"a": (7,)}
    appended = append_sampled(batch, sampled)
    verify = plan({"a": 3}, cached=[("a", 4, 1, ((), (3,)))], drafts={"a": (8, 9)})
    copy = deepcopy(verify)
    prepare(appended, verify, setup)
    assert (dict(batch.requests), batch.req_ids, first) == before
    assert (verify, sampled) == (copy, {"a": (7,)})
    with pytest.raises(TypeError):
        appended.requests["a"] = replace(appended.requests["a"], token_ids=())
