"""The fast side against recorded outputs of the pinned vllm-ascend code."""

import numpy as np
import torch

from servespec.fast.batch.attention_state import attention_state
from servespec.fast.batch.block_table import BlockTable
from servespec.fast.batch.graph import GraphTable
from servespec.fast.batch.metadata import leading_decodes
from servespec.fast.batch.padding import pad_rows
from servespec.fast.batch.prepare import StepBuilder
from servespec.fast.batch.record import record_of
from servespec.fast.batch.reorder import region_keys, swaps_to_sort
from servespec.fast.batch.requests import RequestStore
from servespec.reference.contracts import (
    CacheConfig,
    EngineConfig,
    GraphConfig,
    GraphDispatch,
    KVCacheGroup,
    NewRequestData,
    SamplingParams,
    SchedulerConfig,
    SpeculativeConfig,
)


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


def test_fia_paddings(vectors):
    lines = vectors("fia_padding")
    assert len(lines) == 500
    for line in lines:
        starts = np.full(64, -7, np.int32)
        starts[: len(line["query_start_loc"])] = line["query_start_loc"]
        rows = pad_rows(
            starts,
            line["num_reqs"],
            line["num_tokens_padded"],
            line["batch_desc_num_reqs"],
            line["configured_mode"],
            line["uniform_decode_query_len"],
        )
        assert rows == line["returned"]
        assert starts[: rows + 1].tolist() == line["padded"]
        assert (starts[rows + 1 :] == -7).all()


def test_graph_dispatch(vectors):
    lines = vectors("graph_dispatch", "vllm")
    assert len(lines) == 1000
    for line in lines:
        graph = GraphConfig(mode=line["mode"], capture_sizes=tuple(line["capture_sizes"]))
        table = GraphTable(graph, line["num_spec"], line["max_num_seqs"])
        found = table.dispatch(line["num_tokens"], line["uniform_decode"])
        assert found == GraphDispatch(**line["expect"]), line


def prepared(line, layer_type):
    """Lay out the rows of a line as they stand, in blocks of 128 tokens."""
    num_spec = line["num_spec"]
    num_reqs = len(line["query_lens"])
    config = EngineConfig(
        scheduler=SchedulerConfig(
            max_num_seqs=num_reqs, max_num_batched_tokens=4096, max_model_len=4096
        ),
        cache=CacheConfig(
            num_gpu_blocks=1000,
            block_size=128,
            groups=(KVCacheGroup(layer_type=layer_type, layer_indices=(0,)),),
        ),
        speculative=(
            SpeculativeConfig(method="mtp", num_speculative_tokens=num_spec) if num_spec else None
        ),
    )
    store = RequestStore(config)
    rows = []
    for row, (query, seq, prompt) in enumerate(
        zip(line["query_lens"], line["seq_lens"], line["prompt_lens"], strict=True)
    ):
        slot = store.add(
            NewRequestData(
                req_id=str(row),
                prompt_token_ids=(1,) * prompt,
                sampling_params=SamplingParams(),
                block_ids=(tuple(line["block_table"][row]),),
                num_computed_tokens=seq - query,
            )
        )
        store.set_tokens(slot, (1,) * max(seq, prompt))
        if line.get("num_draft_tokens"):
            store.num_draft_tokens[slot] = max(0, line["num_draft_tokens"][row])
            store.num_accepted_tokens[slot] = line["num_accepted"][row]
        rows.append(slot)
    step = StepBuilder(config, torch.device("cpu")).build(
        store,
        [str(row) for row in range(num_reqs)],
        np.array(rows),
        np.array(line["query_lens"]),
        [],
    )
    return record_of(step, ())


def test_attention_metadata(vectors):
    lines = vectors("attention_metadata")
    assert len(lines) == 1000
    for line in lines:
        (metadata,) = prepared(line, "full_attention").attention
        expected = line["expect"]
        assert expected.pop("seq_lens_list") == metadata.seq_lens
        for name, value in expected.items():
            assert getattr(metadata, name) == value, (line, name)


def test_gdn_metadata(vectors):
    lines = vectors("gdn_metadata")
    assert len(lines) == 1000
    for line in lines:
        (metadata,) = prepared(line, "linear_attention").gdn
        for name, value in line["expect"].items():
            assert getattr(metadata, name) == value, (line, name)
