"""The fast side against recorded outputs of the pinned vllm-ascend code."""

import numpy as np

from servespec.fast.batch.attention_state import attention_state
from servespec.fast.batch.block_table import BlockTable
from servespec.fast.batch.gdn_metadata import gdn_layout
from servespec.fast.batch.metadata import leading_decodes
from servespec.fast.batch.reorder import region_keys, swaps_to_sort


def columns(line, *names):
    return [np.array(line[name]) for name in names]


def test_attention_states(vectors):
    lines = vectors("attention_state")
    assert len(lines) == 2000
    for line in lines:
        returned, stored = attention_state(
            *columns(line, "computed", "scheduled", "drafts"),
            line["spec_method"],
            line["chunked_prefill"],
        )
        assert (returned.value, stored.value) == (line["returned"], line["stored"])


def test_splits(vectors):
    lines = vectors("split_decodes_prefills")
    assert len(lines) == 4000
    for line in lines:
        query_lens, seq_lens, prompt = columns(line, "query_lens", "seq_lens", "prompt_lens")
        prefilling = seq_lens - query_lens < prompt
        decodes = leading_decodes(
            query_lens,
            line["decode_threshold"],
            None if line["short_extends_are_decodes"] else prefilling,
        )
        assert decodes == line["num_decodes"]
        assert len(query_lens) - decodes == line["num_prefills"]
        assert query_lens[:decodes].sum() == line["num_decode_tokens"]
        assert query_lens[decodes:].sum() == line["num_prefill_tokens"]


def test_reorders(vectors):
    lines = vectors("reorder_batch")
    assert len(lines) == 2000
    for line in lines:
        keys = region_keys(
            *columns(line, "computed", "scheduled", "prompt_lens"), line["decode_threshold"]
        )
        swaps = swaps_to_sort(keys)
        assert [list(swap) for swap in swaps] == line["swaps"]
        order = list(range(len(keys)))
        for a, b in swaps:
            order[a], order[b] = order[b], order[a]
        assert order == line["order"]


def test_slot_mappings(vectors):
    lines = vectors("slot_mapping")
    assert len(lines) == 500
    for line in lines:
        table = BlockTable(3, 1, line["manager_block_size"], line["kernel_block_size"])
        table.ids[...] = -7
        table.replace(1, line["manager_blocks"][:1])
        table.append(1, line["manager_blocks"][1:])
        assert table.ids[1, : table.num_blocks[1]].tolist() == line["kernel_blocks"]
        assert table.pool_blocks(1) == tuple(line["manager_blocks"])
        positions = np.array(line["positions"])
        assert table.slots_of(np.ones_like(positions), positions).tolist() == line["slots"]


def test_gdn_layouts(vectors):
    lines = vectors("gdn_metadata")
    assert len(lines) == 1000
    for line in lines:
        query_lens, seq_lens, prompt = columns(line, "query_lens", "seq_lens", "prompt_lens")
        verified = line.get("num_draft_tokens")
        layout = gdn_layout(
            query_lens,
            seq_lens - query_lens,
            prompt,
            None if verified is None else np.array(verified),
            fresh_decode=False,
        )
        expect = line["expect"]
        for name in (
            "num_decodes",
            "num_prefills",
            "num_decode_tokens",
            "num_prefill_tokens",
            "num_spec_decodes",
            "num_spec_decode_tokens",
        ):
            assert getattr(layout, name) == expect[name], (line, name)
        if layout.spec is None:
            assert expect["spec_sequence_masks"] is None
            continue
        assert layout.spec.mask.tolist() == expect["spec_sequence_masks"]
        assert layout.spec.token_indices[0].tolist() == expect["spec_token_indx"]
        assert layout.spec.token_indices[1].tolist() == expect["non_spec_token_indx"]
        assert layout.spec.query_start_locs[0].tolist() == expect["spec_query_start_loc"]
        if layout.num_prefills:
            assert layout.spec.query_start_locs[1].tolist() == expect["non_spec_query_start_loc"]
