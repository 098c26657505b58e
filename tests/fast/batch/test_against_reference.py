"""Random multi-step batches through both sides, with every unused array entry poisoned."""

from collections import Counter
from dataclasses import fields
from random import Random

from servespec.conformance.workloads.plans import PlanStream, random_plan_config
from servespec.fast.batch import InputBatch
from servespec.fast.batch.record import moves_of
from servespec.reference.batch.persistent import append_sampled, empty_batch
from servespec.reference.batch.prepare import prepare, state_saves


def expect_padding(inputs):
    """What a full graph reads behind the step's tokens writes nothing and is no stale value."""
    graph, tokens = inputs.graph, inputs.num_tokens
    if graph is None:
        return
    padded = inputs.dispatch.num_tokens
    for values, fill in (
        (graph.token_ids, 0),
        (graph.positions, 0),
        *((group.slot_mapping, -1) for group in graph.attention),
    ):
        assert len(values) == padded
        assert (values[tokens:] == fill).all()
    assert graph.query_start_loc[-1] in (padded, tokens)
    assert (graph.gdn_query_start_loc[inputs.num_reqs :] == tokens).all()


def test_every_field_of_every_step():
    counts = Counter()
    for seed in range(60):
        random = Random(seed)
        config = random_plan_config(random)
        stream = PlanStream(config, random)
        reference, fast = empty_batch(), InputBatch(config)
        for step in range(40):
            plan = stream.next_plan()
            reference, expected = prepare(reference, plan, config)
            fast.poison()
            inputs = fast.prepare(plan)
            expect_padding(inputs)
            got = fast.record()
            for field in fields(expected):
                assert getattr(got, field.name) == getattr(expected, field.name), (
                    seed,
                    step,
                    field.name,
                )
            sampled = stream.sample()
            kept = {
                req_id
                for req_id, keep in zip(expected.req_ids, expected.sampled, strict=True)
                if keep
            }
            assert set(sampled) == kept
            saves = state_saves(reference, sampled, config)
            assert tuple(moves_of(fast.req_ids, m) for m in fast.state_saves(sampled)) == saves
            reference = append_sampled(reference, sampled)
            fast.append_sampled(sampled)
            counts["steps"] += 1
            counts["rows"] += len(expected.req_ids)
            counts["swaps"] += len(expected.swaps)
            counts["steps with drafts"] += expected.num_draft_tokens != ()
            counts["state moves"] += sum(map(len, expected.state_moves))
            counts["state saves"] += sum(map(len, saves))
            if expected.graph is not None:
                counts[f"graph {expected.graph.mode}"] += 1
            for metadata in expected.attention[:1]:
                counts["dummy rows"] += len(metadata.seq_lens) - len(expected.req_ids)
        counts += stream.counts
    print(dict(counts))
    assert counts["steps"] == 2400
    for happened in (
        "accepted",
        "blocks reused",
        "dummy rows",
        "empty",
        "fresh one-token rows",
        "graph FULL",
        "graph NONE",
        "graph PIECEWISE",
        "output dropped",
        "prefix hit",
        "re-added",
        "rejected",
        "resubmitted",
        "resumed",
        "resumed at once",
        "state moves",
        "state saves",
        "swaps",
        "thrown away",
    ):
        assert counts[happened] >= 20, happened
