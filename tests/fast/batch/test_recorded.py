"""Both sides' persistent batch and GDN metadata against vLLM 0.27.1, recorded step by step."""

import lzma
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from servespec.fast.batch import InputBatch
from servespec.reference.batch.persistent import append_sampled, empty_batch
from servespec.reference.batch.prepare import prepare
from servespec.reference.contracts import EngineConfig, Quirks, SchedulerOutput

RECORDING = Path(__file__).parents[2] / "data" / "vllm" / "batches.jsonl.xz"
RENAMED = {
    "spec_state_indices_tensor": "spec_state_indices",
    "non_spec_state_indices_tensor": "non_spec_state_indices",
    "spec_token_indx": "spec_token_index",
    "non_spec_token_indx": "non_spec_token_index",
}


def tupled(value):
    return tuple(tupled(item) for item in value) if isinstance(value, list) else value


@pytest.fixture(scope="module")
def streams():
    with lzma.open(RECORDING, "rt") as lines:
        return [msgspec.json.decode(line) for line in lines]


def profile(stream):
    config = msgspec.convert(stream["config"], EngineConfig)
    scheduler = replace(config.scheduler, quirks=Quirks.vllm_0_27_1())
    return replace(config, scheduler=scheduler, graph=None)


def expect_tables(record, recorded, groups):
    attention = iter(record.attention)
    for index, group in enumerate(groups):
        if group.layer_type == "full_attention":
            tables = next(attention).block_tables
        else:
            tables = [row[index] for row in record.block_tables]
        for table, row in zip(tables, recorded[index], strict=True):
            assert table[: len(row)] == tuple(row)
            assert not any(table[len(row) :])


class Reference:
    """The pure functions behind the verbs of the fast batch."""

    def __init__(self, config):
        self.config, self.batch = config, empty_batch()

    def prepare(self, plan):
        self.batch, self.latest = prepare(self.batch, plan, self.config)

    def record(self):
        return self.latest

    def append_sampled(self, sampled):
        self.batch = append_sampled(self.batch, sampled)


@pytest.mark.parametrize("side", [Reference, InputBatch])
def test_every_recorded_step(streams, side):
    counts = Counter()
    for stream in streams:
        config = profile(stream)
        batch = side(config)
        for taken, expect in zip(stream["steps"], stream["expect"], strict=True):
            plan = msgspec.convert(taken["plan"], SchedulerOutput)
            batch.prepare(plan)
            record = batch.record()
            for name in ("req_ids", "swaps", "num_computed_tokens", "token_ids", "sampled"):
                assert getattr(record, name) == tupled(expect[name]), (stream["seed"], name)
            expect_tables(record, expect["tables"], config.cache.groups)
            for metadata, fields in zip(record.gdn, expect.get("gdn", ()), strict=False):
                for name, value in fields.items():
                    got = getattr(metadata, RENAMED.get(name, name))
                    assert got == tupled(value), (stream["seed"], name)
                counts["GDN metadata"] += 1
                counts["GDN metadata with drafts"] += metadata.num_spec_decodes > 0
            sampled = {req_id: tuple(tokens) for req_id, tokens in taken["sampled"].items()}
            batch.append_sampled(sampled)
            counts["steps"] += 1
            counts["swaps"] += len(record.swaps)
    print(dict(counts))
    assert counts["steps"] == 1440
    assert counts["swaps"] > 500
    assert counts["GDN metadata"] > 500
    assert counts["GDN metadata with drafts"] > 100
