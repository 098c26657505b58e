"""The reference against recorded outputs of the pinned vllm-ascend code."""

from collections import Counter
from dataclasses import fields

from servespec.reference.batch.attention_state import classify
from servespec.reference.batch.block_tables import kernel_blocks, slot
from servespec.reference.batch.gdn_metadata import gdn_metadata
from servespec.reference.batch.graph import dispatch
from servespec.reference.batch.metadata import (
    attention_metadata,
    cumulative,
    split_decodes_and_prefills,
)
from servespec.reference.batch.padding import pad_query_start_loc
from servespec.reference.batch.reorder import apply_swaps, region, swaps_into_regions
from servespec.reference.contracts import AttentionState, GraphConfig, GraphDispatch


def tupled(value):
    return tuple(tupled(item) for item in value) if isinstance(value, list) else value


def test_attention_states(vectors):
    lines = vectors("attention_state")
    assert len(lines) == 2000
    seen = set()
    for line in lines:
        states = classify(
            line["computed"],
            line["scheduled"],
            line["drafts"],
            line["spec_method"],
            line["chunked_prefill"],
        )
        assert (states.returned.value, states.stored.value) == (line["returned"], line["stored"])
        seen.add((states.returned, states.stored))
    assert len(seen) == 6


def test_splits(vectors):
    lines = vectors("split_decodes_prefills")
    assert len(lines) == 4000
    disagreements = 0
    for line in lines:
        query_lens, seq_lens = line["query_lens"], line["seq_lens"]
        prefilling = [
            seq - query < prompt
            for query, seq, prompt in zip(query_lens, seq_lens, line["prompt_lens"], strict=True)
        ]
        split = split_decodes_and_prefills(
            query_lens, prefilling, line["decode_threshold"], line["short_extends_are_decodes"]
        )
        for name in ("num_decodes", "num_prefills", "num_decode_tokens", "num_prefill_tokens"):
            assert getattr(split, name) == line[name], (line, name)
        other = split_decodes_and_prefills(
            query_lens, prefilling, line["decode_threshold"], not line["short_extends_are_decodes"]
        )
        disagreements += split != other
    assert disagreements > 100


def test_reorders(vectors):
    lines = vectors("reorder_batch")
    assert len(lines) == 2000
    moved = 0
    for line in lines:
        regions = [
            region(computed, scheduled, prompt, line["decode_threshold"])
            for computed, scheduled, prompt in zip(
                line["computed"], line["scheduled"], line["prompt_lens"], strict=True
            )
        ]
        swaps = swaps_into_regions(regions)
        assert swaps == tupled(line["swaps"])
        order = apply_swaps([str(row) for row in range(len(regions))], swaps)
        assert order == tuple(str(row) for row in line["order"])
        in_order = [regions[int(row)] for row in order]
        assert in_order == sorted(in_order)
        moved += len(swaps) > 0
    assert moved > 1000


def test_attention_metadata(vectors):
    lines = vectors("attention_metadata")
    assert len(lines) == 1000
    for line in lines:
        metadata = attention_metadata(
            cumulative(line["query_lens"]),
            line["seq_lens"],
            line["block_table"],
            line["slots"],
            line["num_spec"],
            AttentionState.CHUNKED_PREFILL,
        )
        expected = line["expect"]
        assert expected.pop("seq_lens_list") == metadata.seq_lens
        for name, value in expected.items():
            assert getattr(metadata, name) == value, (line, name)


def test_fia_paddings(vectors):
    lines = vectors("fia_padding")
    assert len(lines) == 500
    kinds = Counter()
    for line in lines:
        padded = pad_query_start_loc(
            line["query_start_loc"],
            line["num_tokens_padded"],
            line["batch_desc_num_reqs"],
            line["configured_mode"],
            line["uniform_decode_query_len"],
        )
        assert padded == tupled(line["padded"])
        assert len(padded) - 1 == line["returned"]
        kinds[min(2, len(padded) - len(line["query_start_loc"]))] += 1
    assert min(kinds.values()) > 50


def test_slot_mappings(vectors):
    lines = vectors("slot_mapping")
    assert len(lines) == 500
    for line in lines:
        size = line["kernel_block_size"]
        blocks = kernel_blocks(line["manager_blocks"], line["manager_block_size"] // size)
        assert blocks == tupled(line["kernel_blocks"])
        assert [slot(blocks, position, size) for position in line["positions"]] == line["slots"]


def test_gdn_metadata(vectors):
    lines = vectors("gdn_metadata")
    assert len(lines) == 1000
    with_drafts = folded = 0
    for line in lines:
        metadata = gdn_metadata(
            line["query_lens"],
            line["seq_lens"],
            line["prompt_lens"],
            line["block_table"],
            line.get("num_draft_tokens"),
            line.get("num_accepted"),
        )
        names = {field.name for field in fields(metadata)}
        for name, value in line["expect"].items():
            assert name in names
            assert getattr(metadata, name) == value, (line, name)
        if metadata.num_spec_decodes:
            with_drafts += 1
            mask = metadata.spec_sequence_masks
            folded += any(
                query == 1 and not spec
                for query, spec in zip(line["query_lens"], mask, strict=True)
            )
    assert with_drafts > 100
    assert folded > 50


def test_graph_dispatch(vectors):
    lines = vectors("graph_dispatch", "vllm")
    assert len(lines) == 1000
    kinds = Counter()
    for line in lines:
        graph = GraphConfig(mode=line["mode"], capture_sizes=tuple(line["capture_sizes"]))
        found = dispatch(
            graph,
            line["num_tokens"],
            line["uniform_decode"],
            line["num_spec"],
            line["max_num_seqs"],
        )
        assert found == GraphDispatch(**line["expect"]), line
        kinds[found.mode, found.uniform] += 1
    assert min(kinds.values()) > 50
    assert len(kinds) == 4
