"""Faults of a legacy V0 scheduler, each planted in the fast one.

Numbers are of threads of vllm-project/vllm; the text is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from servespec.conformance.faults.fault import planted, wrap
from servespec.fast.scheduling.v0 import Scheduler
from servespec.fast.scheduling.v0_groups import Group
from servespec.fast.scheduling.v0_step import Step

__all__ = ["V0_FAULTS"]

_SUITES = ("scheduling-v0",)


@planted(
    "v0_scheduler",
    "a piece of a prompt is one token shorter than the budget allows",
    source="#45414: a chunk rounded down until nothing is left",
    suites=_SUITES,
)
def short_piece(scheduler: Scheduler) -> None:
    config = scheduler.scheduler_config
    budget = config.max_num_batched_tokens - 1
    if config.enable_chunked_prefill and budget >= config.max_num_seqs:
        scheduler.scheduler_config = replace(config, max_num_batched_tokens=budget)


@planted(
    "v0_scheduler",
    "a group samples before the last chunk of its prompt",
    source="a chunk treated as a whole prompt",
    suites=_SUITES,
)
def sampled_too_early(scheduler: Scheduler) -> None:
    wrap(scheduler, "_describe", lambda describe, entry: replace(describe(entry), do_sample=True))


@planted(
    "v0_scheduler",
    "sequences that run count twice when prompts are admitted",
    source="PR#3853: one group added to the budget by two passes",
    suites=_SUITES,
)
def counted_twice(scheduler: Scheduler) -> None:
    def admit(original: Callable[..., None], step: Step, idle: bool, chunked: bool) -> None:
        running = step.num_seqs
        step.num_seqs += running
        original(step, idle, chunked)
        step.num_seqs -= running

    wrap(scheduler, "_admit", admit)


@planted(
    "v0_scheduler",
    "a group counts with the sequences it has, not with those it will fork into",
    source="#5578: groups of several sequences fill the swap space",
    suites=_SUITES,
)
def forgotten_width(scheduler: Scheduler) -> None:
    wrap(
        scheduler,
        "add_seq_group",
        lambda add, request: add(replace(request, best_of=1, use_beam_search=False)),
    )


@planted(
    "v0_scheduler",
    "swapped groups come back in a step that preempts others",
    source="PR#13539: admissions beside preemptions",
    suites=_SUITES,
)
def swapped_in_regardless(scheduler: Scheduler) -> None:
    def requeue(
        original: Callable[..., None],
        step: Step,
        running: Sequence[Group],
        swapped: Sequence[Group],
    ) -> None:
        if not step.calm:
            swapped = tuple(step.swap_in(swapped))
            back = (*step.returning, *step.returning_pieces)
            running = (*running, *(group for group, _ in back))
        original(step, running, swapped)

    wrap(scheduler, "_requeue", requeue)


@planted(
    "v0_scheduler",
    "preempted groups wait in order of preemption, the youngest first",
    source="#49097: a request loses its turn",
    suites=_SUITES,
)
def preempted_in_reverse(scheduler: Scheduler) -> None:
    def requeue(original: Callable[..., None], step: Step, *queues: Sequence[Group]) -> None:
        step.evicted.reverse()
        original(step, *queues)

    wrap(scheduler, "_requeue", requeue)


@planted(
    "v0_scheduler",
    "a forked sequence writes to a fresh block that nothing was copied to",
    source="a list of copies lost on the way to the worker",
    suites=_SUITES,
)
def copy_left_out(scheduler: Scheduler) -> None:
    wrap(scheduler, "schedule", lambda schedule, now: replace(schedule(now), blocks_to_copy=()))


@planted(
    "v0_scheduler",
    "prompts take the blocks of the watermark",
    source="a reserve kept on one path and forgotten on another",
    suites=_SUITES,
)
def ignored_watermark(scheduler: Scheduler) -> None:
    scheduler._blocks.watermark = 0


V0_FAULTS = (
    short_piece,
    sampled_too_early,
    counted_twice,
    forgotten_width,
    swapped_in_regardless,
    preempted_in_reverse,
    copy_left_out,
    ignored_watermark,
)
