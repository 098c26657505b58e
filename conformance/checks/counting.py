"""What happened in a step, as counts: a run that never preempted has not tested preemption.

Counts come from what the reference decided, never from the implementation under test.
"""

from __future__ import annotations

from servespec.conformance.verdicts import Tally
from servespec.reference.contracts import (
    BatchRecord,
    EngineCoreOutput,
    FinishReason,
    SchedulerOutput,
    SchedulerSnapshot,
)

__all__ = ["count_batch", "count_outputs", "count_schedule"]


def count_schedule(
    tally: Tally,
    output: SchedulerOutput,
    before: SchedulerSnapshot | None = None,
    after: SchedulerSnapshot | None = None,
) -> None:
    """Count what a plan did.

    Parameters
    ----------
    tally : Tally
    output : SchedulerOutput
    before, after : SchedulerSnapshot or None
        Around the call, to count cached blocks that were evicted.
    """
    counts = tally.counts
    counts["scheduled_tokens"] += output.total_num_scheduled_tokens
    counts["preemptions"] += len(output.preempted_req_ids)
    counts["resumptions"] += len(output.scheduled_cached_reqs.resumed_req_ids)
    cached = output.scheduled_cached_reqs
    counts["prefix_hits"] += sum(new.num_computed_tokens > 0 for new in output.scheduled_new_reqs)
    counts["prefix_hits"] += sum(
        computed > 0 and request_id in cached.resumed_req_ids
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    )
    counts["drafts"] += sum(map(len, output.scheduled_spec_decode_tokens.values()))
    counts["block_copies"] += len(output.kv_cache_block_copies)
    if before is not None and after is not None:
        counts["evictions"] += len(before.cached_blocks - after.cached_blocks)


def count_batch(tally: Tally, batch: BatchRecord | None, before: BatchRecord | None = None) -> None:
    """Count what a batch looked like.

    Parameters
    ----------
    tally : Tally
    batch : BatchRecord or None
    before : BatchRecord or None
        That of the step before, to count rows that were removed.
    """
    if batch is None:
        tally.counts["idle_steps"] += 1
        return
    counts = tally.counts
    counts["batches"] += 1
    counts["swaps"] += len(batch.swaps)
    counts["split_prompts"] += len(batch.sampled) - sum(batch.sampled)
    decodes = sum(
        n == 1 and c > 0
        for n, c in zip(batch.num_scheduled_tokens, batch.num_computed_tokens, strict=True)
    )
    counts["mixed_batches"] += 0 < decodes < len(batch.req_ids)
    counts[batch.attn_state.value] += 1
    counts["state_moves"] += sum(map(len, batch.state_moves))
    if before is not None:
        counts["rows_removed"] += len(set(before.req_ids).difference(batch.req_ids))
    if batch.graph is not None:
        counts[f"graph_{batch.graph.mode}"] += 1
    for metadata in batch.attention[:1]:
        counts["padded_rows"] += len(metadata.seq_lens) - len(batch.req_ids)


def count_outputs(tally: Tally, outputs: tuple[EngineCoreOutput, ...]) -> None:
    """Count how requests ended.

    Parameters
    ----------
    tally : Tally
    outputs : tuple of EngineCoreOutput
    """
    for output in outputs:
        if output.finish_reason is FinishReason.LENGTH:
            tally.counts["ended_by_length"] += 1
        elif output.finish_reason is not None:
            tally.counts["ended_by_stop"] += 1
