"""Batches that a model runs: every state it reads is the one after just the right tokens.

The memory of the reference notes how many tokens each state has absorbed and which token each K/V
slot holds, and refuses any other read. So preempted, skipped, condensed, padded and verifying rows
prove here that tables, slots, columns and moves lead where they should; the logits prove the rest.
"""

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from servespec.conformance.workloads.plans import PlanStream, random_plan_config
from servespec.reference.batch.persistent import append_sampled, empty_batch
from servespec.reference.batch.prepare import prepare, state_saves
from servespec.reference.cache.memory import MemoryAccessError, initial_memory, move_states
from servespec.reference.contracts import Quirks, SamplingParams, SchedulerOutput
from servespec.reference.contracts.scheduling import NewRequestData
from servespec.reference.models import qwen3_5, tiny

VOCABULARY = 1000


def model_of(config):
    kinds = tuple(group.layer_type for group in config.cache.groups)
    sizes = tiny.config(layer_types=kinds, vocab_size=VOCABULARY)
    return qwen3_5.from_weights(sizes, tiny.weights(sizes, 1))


def applied(memory, moves, config):
    gdn = [group for group in config.cache.groups if group.layer_type == "linear_attention"]
    for group, of_group in zip(gdn, moves, strict=False):
        pairs = {move.dst_block_id: move.ssm_src_block_id for move in of_group}
        memory = move_states(memory, group, pairs)
    return memory


def alone(model, config, token_ids):
    """Logits of a request that nobody interrupts, in one step."""
    blocks = -(-len(token_ids) // config.cache.block_size)
    table = tuple(
        tuple(range(1 + 50 * index, 51 + 50 * index))[: blocks + 5]
        for index in range(len(config.cache.groups))
    )
    new = NewRequestData(
        req_id="alone",
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(),
        block_ids=table,
        num_computed_tokens=0,
    )
    plan = SchedulerOutput(
        scheduled_new_reqs=(new,), num_scheduled_tokens={"alone": len(token_ids)}
    )
    plain = replace(config, graph=None)
    _, record = prepare(empty_batch(), plan, plain)
    memory = initial_memory(
        config.cache.groups, config.cache.block_size, config.cache.kernel_block_size
    )
    logits, _ = qwen3_5.forward(model, record, config.cache.groups, memory)
    return logits[-1]


def run(config, seed, steps, counts, compare_every=7):
    model = model_of(config)
    stream = PlanStream(config, Random(seed), realistic=True)
    batch = empty_batch()
    memory = initial_memory(
        config.cache.groups, config.cache.block_size, config.cache.kernel_block_size
    )
    for _ in range(steps):
        plan = stream.next_plan()
        batch, record = prepare(batch, plan, config)
        if record.req_ids:
            memory = applied(memory, record.state_moves, config)
            logits, memory = qwen3_5.forward(model, record, config.cache.groups, memory)
            counts["moves"] += sum(map(len, record.state_moves))
        sampled = stream.sample()
        memory = applied(memory, state_saves(batch, sampled, config), config)
        ends = np.cumsum([1 + n for n in record.num_draft_tokens or (0,) * len(record.req_ids)])
        for row, req_id in enumerate(record.req_ids):
            state = batch.requests[req_id]
            counts["rows"] += 1
            counts["rows without drafts after accepted ones"] += (
                not state.draft_token_ids and state.num_accepted_tokens > 1
            )
            if counts["rows"] % compare_every == 0:
                # The row's last logits follow its drafts too, kept or not.
                known = (*state.token_ids, *state.draft_token_ids)[: record.seq_lens[row]]
                expected = alone(model, config, known)
                # float64: chunked and recurrent forms differ by rounding alone.
                assert np.abs(logits[ends[row] - 1] - expected).max() < 1e-9
                counts["compared"] += 1
        batch = append_sampled(batch, sampled)
        counts["steps"] += 1
    counts += stream.counts


def configs(seeds, **scheduler):
    for seed in seeds:
        config = random_plan_config(Random(seed))
        quirks = scheduler.get("quirks", Quirks())
        yield seed, replace(config, scheduler=replace(config.scheduler, quirks=quirks))


def test_no_state_is_read_that_is_not_the_rows_own():
    counts = Counter()
    for seed, config in configs(range(20)):
        run(config, seed, 25, counts)
    print(dict(counts))
    for happened in (
        "accepted",
        "compared",
        "fresh one-token rows",
        "moves",
        "preempted",
        "re-added",
        "rejected",
        "resumed",
        "rows without drafts after accepted ones",
    ):
        assert counts[happened] >= 20, happened


@pytest.mark.parametrize("quirk", ["gdn_forgets_accepted", "gdn_ignores_accepted"])
def test_the_oddities_read_a_state_that_is_not_the_rows_own(quirk):
    """With the quirk the same batches lead to a wrong state, which the memory refuses."""

    def run_all():
        for seed, config in configs(range(40), quirks=Quirks(**{quirk: True})):
            run(config, seed, 25, Counter(), compare_every=1_000_000)

    with pytest.raises(MemoryAccessError, match=r"it holds the one after|it wrote none"):
        run_all()
