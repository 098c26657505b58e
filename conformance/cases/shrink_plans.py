"""Simpler variants of given plans, the greatest leaps first.

A step cannot be left out alone: the next ones count on its tokens. But a request can be taken out
of all plans, and a group of layers out of all block tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from servespec.conformance.cases.pieces import pieces
from servespec.conformance.workloads.workload_plans import PlannedStep
from servespec.reference.contracts import BlockTable, CachedRequestData, SchedulerOutput

__all__ = ["Plans", "plan_changes", "without_group"]

Plans = tuple[PlannedStep, ...]


def plan_changes(plans: Plans, last: int | None) -> Iterator[Callable[[Plans], Plans]]:
    """Yield changes that make plans simpler.

    Parameters
    ----------
    plans : tuple of PlannedStep
    last : int or None
        The step that shows the failure: later ones are of no use.

    Yields
    ------
    callable
        From plans to simpler ones.
    """
    if last is not None:
        yield lambda plans: plans[: last + 1]
    names = tuple(
        dict.fromkeys(new.req_id for step in plans for new in step.output.scheduled_new_reqs)
    )
    for piece in pieces(len(names), len(names)):
        yield partial(_without, names=frozenset(names[piece]))
    nothing = PlannedStep(output=SchedulerOutput())
    yield lambda plans: tuple(step for step in plans if step != nothing)


def _without(plans: Plans, names: frozenset[str]) -> Plans:
    return tuple(
        PlannedStep(
            output=_output_without(step.output, names),
            sampled={name: kept for name, kept in step.sampled.items() if name not in names},
        )
        for step in plans
    )


def _output_without(output: SchedulerOutput, names: frozenset[str]) -> SchedulerOutput:
    cached = output.scheduled_cached_reqs
    kept = [row for row, name in enumerate(cached.req_ids) if name not in names]
    scheduled = {n: count for n, count in output.num_scheduled_tokens.items() if n not in names}
    return replace(
        output,
        scheduled_new_reqs=tuple(r for r in output.scheduled_new_reqs if r.req_id not in names),
        scheduled_cached_reqs=CachedRequestData(
            req_ids=tuple(cached.req_ids[row] for row in kept),
            resumed_req_ids=cached.resumed_req_ids - names,
            new_block_ids=tuple(cached.new_block_ids[row] for row in kept),
            num_computed_tokens=tuple(cached.num_computed_tokens[row] for row in kept),
            num_output_tokens=tuple(cached.num_output_tokens[row] for row in kept),
            all_token_ids={n: ids for n, ids in cached.all_token_ids.items() if n not in names},
        ),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens={
            n: ids for n, ids in output.scheduled_spec_decode_tokens.items() if n not in names
        },
        finished_req_ids=output.finished_req_ids - names,
        preempted_req_ids=output.preempted_req_ids - names,
    )


def without_group(plans: Plans, index: int) -> Plans:
    """Take a group out of every block table.

    Parameters
    ----------
    plans : tuple of PlannedStep
    index : int

    Returns
    -------
    tuple of PlannedStep
    """

    def fewer(table: BlockTable) -> BlockTable:
        return table[:index] + table[index + 1 :]

    def changed(output: SchedulerOutput) -> SchedulerOutput:
        cached = output.scheduled_cached_reqs
        return replace(
            output,
            scheduled_new_reqs=tuple(
                replace(new, block_ids=fewer(new.block_ids)) for new in output.scheduled_new_reqs
            ),
            scheduled_cached_reqs=replace(
                cached,
                new_block_ids=tuple(
                    None if table is None else fewer(table) for table in cached.new_block_ids
                ),
            ),
        )

    return tuple(replace(step, output=changed(step.output)) for step in plans)
