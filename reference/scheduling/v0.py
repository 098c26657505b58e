"""The legacy (V0) scheduler: sequence groups, three queues, two policies.

The *default* policy fills a step with whole prompts and, only if there are none, lets the running
groups decode: prefill and decode never share a batch, so a long prompt holds everybody up. The
*chunked* policy serves the running groups first and fills what is left of the token budget with
pieces of prompts.

Source: ``Scheduler`` of ``vllm/core/scheduler.py`` and ``SingleStepOutputProcessor`` of
``vllm/engine/output_processor/single_step.py`` of vLLM 0.5.1; source-2 for the chunked policy and
its alignment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from servespec.reference.cache.v0_space import BlockSpace
from servespec.reference.contracts.errors import DuplicateRequestError
from servespec.reference.contracts.v0 import (
    ScheduledSequenceGroup,
    SequenceGroupOutput,
    SequenceGroupRequest,
    SequenceSample,
    SequenceSnapshot,
    SequenceStatus,
    V0CacheConfig,
    V0SchedulerConfig,
    V0SchedulerOutput,
    V0SchedulingError,
    V0Snapshot,
)
from servespec.reference.scheduling import v0_sequences
from servespec.reference.scheduling.v0_budget import SchedulingBudget
from servespec.reference.scheduling.v0_manager import block_manager
from servespec.reference.scheduling.v0_outputs import process_outputs
from servespec.reference.scheduling.v0_queues import (
    Queue,
    QueuePass,
    Scheduled,
    schedule_prefills,
    schedule_running,
    schedule_swapped,
)
from servespec.reference.scheduling.v0_sequences import SequenceGroup

__all__ = [
    "PromptDelay",
    "V0State",
    "abort_seq_group",
    "add_seq_group",
    "has_unfinished_seqs",
    "initial_state",
    "schedule",
    "snapshot",
    "update_from_output",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDelay:
    """When prompts were last considered, and how long the last prompt step took.

    Attributes
    ----------
    prev_time : float
        Seconds.
    prev_prompt : bool
        Whether prompts were scheduled then.
    last_prompt_latency : float
        Seconds from the last step with prompts to the next time prompts were considered.
    """

    prev_time: float = 0.0
    prev_prompt: bool = False
    last_prompt_latency: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class V0State:
    """All a V0 scheduler knows.

    Attributes
    ----------
    scheduler_config : V0SchedulerConfig
    waiting, running, swapped : tuple of SequenceGroup
    space : BlockSpace
    delay : PromptDelay
    next_seq_id : int
        Id of the next sequence, new or forked.
    finished_request_ids : tuple of str
        Requests that ended since the last plan.
    """

    scheduler_config: V0SchedulerConfig
    waiting: Queue = ()
    running: Queue = ()
    swapped: Queue = ()
    space: BlockSpace
    delay: PromptDelay = PromptDelay()
    next_seq_id: int = 0
    finished_request_ids: tuple[str, ...] = ()


def initial_state(scheduler_config: V0SchedulerConfig, cache_config: V0CacheConfig) -> V0State:
    """Return a scheduler with empty queues and free blocks."""
    space = block_manager(scheduler_config).initial_space(cache_config)
    return V0State(scheduler_config=scheduler_config, space=space)


def add_seq_group(state: V0State, request: SequenceGroupRequest) -> V0State:
    """Queue a request at the end of the waiting queue, with its prompt as one sequence.

    Raises
    ------
    DuplicateRequestError
        If a live request has this id.
    """
    queued = (*state.waiting, *state.running, *state.swapped)
    if any(group.request_id == request.request_id for group in queued):
        raise DuplicateRequestError(f"request id {request.request_id!r} is already in use")
    seq = v0_sequences.Sequence(seq_id=state.next_seq_id, prompt_token_ids=request.prompt_token_ids)
    group = SequenceGroup(request=request, seqs=(seq,))
    return replace(state, waiting=(*state.waiting, group), next_seq_id=state.next_seq_id + 1)


def abort_seq_group(state: V0State, request_ids: Sequence[str]) -> V0State:
    """End requests from outside; ids that are not queued are ignored.

    Blocks are freed in queue order (waiting, running, swapped), not in the order of the ids.
    """
    doomed = frozenset(request_ids)
    manager, space = block_manager(state.scheduler_config), state.space
    for group in (*state.waiting, *state.running, *state.swapped):
        if group.request_id in doomed:
            for seq in group.seqs:
                if not seq.status.is_finished:
                    space = manager.free(space, seq.seq_id)

    def kept(queue: Queue) -> Queue:
        return tuple(group for group in queue if group.request_id not in doomed)

    return replace(
        state,
        space=space,
        waiting=kept(state.waiting),
        running=kept(state.running),
        swapped=kept(state.swapped),
    )


def has_unfinished_seqs(state: V0State) -> bool:
    """Tell whether any queue holds a group."""
    return bool(state.waiting or state.running or state.swapped)


def schedule(state: V0State, now: float = 0.0) -> tuple[V0State, V0SchedulerOutput]:
    """Plan one step.

    Parameters
    ----------
    state : V0State
    now : float
        Seconds, on the clock of `SequenceGroupRequest.arrival_time`.

    Returns
    -------
    V0State
        Queues and blocks as they are once the plan is carried out.
    V0SchedulerOutput

    Raises
    ------
    V0SchedulingError
        Where the release gives up; see there.
    """
    if state.scheduler_config.enable_chunked_prefill:
        return _schedule_chunked_prefill(state, now)
    return _schedule_default(state, now)


def update_from_output(
    state: V0State,
    output: V0SchedulerOutput,
    sampled: Mapping[str, tuple[SequenceSample, ...]],
) -> tuple[V0State, tuple[SequenceGroupOutput, ...]]:
    """Take in what a step computed and sampled, and let finished groups go.

    Parameters
    ----------
    state : V0State
    output : V0SchedulerOutput
        The plan that was carried out.
    sampled : mapping of str to tuple of SequenceSample
        Tokens of every request whose group was to sample.

    Returns
    -------
    V0State
    tuple of SequenceGroupOutput
        One for each scheduled group that is still running, in order.

    Raises
    ------
    RequestError
        If samples are missing or name a sequence that does not run.
    """
    config = state.scheduler_config
    manager, space, next_seq_id = block_manager(config), state.space, state.next_seq_id
    groups = {group.request_id: group for group in state.running}
    results: list[SequenceGroupOutput] = []
    for scheduled in output.scheduled_seq_groups:
        request_id = scheduled.request_id
        if request_id not in groups:
            continue
        group = v0_sequences.update_num_computed_tokens(
            groups[request_id], scheduled.token_chunk_size
        )
        result = SequenceGroupOutput(request_id=request_id)
        if scheduled.do_sample:
            group, space, next_seq_id, result = process_outputs(
                group, sampled.get(request_id, ()), space, manager, next_seq_id, config
            )
        groups[request_id] = group
        results.append(result)
    running = tuple(groups[group.request_id] for group in state.running)
    ended = tuple(group.request_id for group in running if group.is_finished)
    state = replace(
        state,
        running=tuple(group for group in running if not group.is_finished),
        space=space,
        next_seq_id=next_seq_id,
        finished_request_ids=(*state.finished_request_ids, *ended),
    )
    return state, tuple(results)


def snapshot(state: V0State) -> V0Snapshot:
    """Return the state as far as checks compare it."""
    tables = state.space.tables
    return V0Snapshot(
        waiting=tuple(group.request_id for group in state.waiting),
        running=tuple(group.request_id for group in state.running),
        swapped=tuple(group.request_id for group in state.swapped),
        sequences={
            group.request_id: tuple(
                SequenceSnapshot(
                    seq_id=seq.seq_id,
                    status=seq.status,
                    is_prefill=seq.is_prefill,
                    num_computed_tokens=seq.num_computed_tokens,
                    output_token_ids=seq.output_token_ids,
                )
                for seq in group.seqs
            )
            for group in (*state.waiting, *state.running, *state.swapped)
        },
        gpu_block_tables={i: t.blocks for i, t in tables.items() if t.device == "gpu"},
        cpu_block_tables={i: t.blocks for i, t in tables.items() if t.device == "cpu"},
        free_gpu_blocks=state.space.gpu.free,
        free_cpu_blocks=state.space.cpu.free,
        gpu_ref_counts=state.space.gpu.ref_counts,
        cpu_ref_counts=state.space.cpu.ref_counts,
        prev_time=state.delay.prev_time,
        last_prompt_latency=state.delay.last_prompt_latency,
        prev_prompt=state.delay.prev_prompt,
    )


def _schedule_default(state: V0State, now: float) -> tuple[V0State, V0SchedulerOutput]:
    """Prefill; if there is none, decode; and if nothing was preempted, swap in.

    Prompts wait while any group is swapped out. All running groups are registered in the budget
    first, so that prompts do not exceed `max_num_seqs` together with them.
    """
    config = state.scheduler_config
    budget = _fresh_budget(config)
    for group in state.running:
        budget = budget.add_num_seqs(group.request_id, group.max_num_running_seqs)
    prefilled = QueuePass(remaining=state.waiting, space=state.space, budget=budget)
    delay = state.delay
    if not state.swapped:
        prefilled, delay = _consider_prompts(state, state.space, budget, now, False)
    ran = QueuePass(remaining=state.running, space=prefilled.space, budget=prefilled.budget)
    swapped = QueuePass(remaining=state.swapped, space=ran.space, budget=ran.budget)
    if not prefilled.prefills:
        ran = schedule_running(state.running, prefilled.space, prefilled.budget, config, now, False)
        swapped = _swap_in_if_calm(state, ran, now)
    return _conclude(
        replace(state, space=swapped.space, delay=delay),
        prefilled,
        ran,
        swapped,
        swapped.budget,
        running=(
            *ran.remaining,
            *_groups(prefilled.prefills),
            *_groups(ran.decodes),
            *_groups(swapped.decodes),
        ),
        scheduled=(*prefilled.prefills, *ran.decodes, *swapped.decodes),
    )


def _schedule_chunked_prefill(state: V0State, now: float) -> tuple[V0State, V0SchedulerOutput]:
    """Run what runs, swap in if nothing was preempted, and fill up with prompts.

    Running groups register in the budget as they are scheduled. Prompts are admitted whether or
    not groups wait to be swapped in, or were preempted a moment ago.
    """
    config = state.scheduler_config
    ran = schedule_running(state.running, state.space, _fresh_budget(config), config, now, True)
    swapped = _swap_in_if_calm(state, ran, now)
    prefilled, delay = _consider_prompts(state, swapped.space, swapped.budget, now, True)
    return _conclude(
        replace(state, space=prefilled.space, delay=delay),
        prefilled,
        ran,
        swapped,
        prefilled.budget,
        running=(
            *ran.remaining,
            *_groups(prefilled.prefills),
            *_groups(ran.decodes),
            *_groups(ran.prefills),
            *_groups(swapped.decodes),
            *_groups(swapped.prefills),
        ),
        scheduled=(
            *prefilled.prefills,
            *ran.prefills,
            *swapped.prefills,
            *ran.decodes,
            *swapped.decodes,
        ),
    )


def _fresh_budget(config: V0SchedulerConfig) -> SchedulingBudget:
    return SchedulingBudget(
        token_budget=config.max_num_batched_tokens, max_num_seqs=config.max_num_seqs
    )


def _swap_in_if_calm(state: V0State, ran: QueuePass, now: float) -> QueuePass:
    """Swap in unless this step preempted, which means that there is no room to come back to."""
    if ran.preempted or ran.swapped_out:
        return QueuePass(remaining=state.swapped, space=ran.space, budget=ran.budget)
    return schedule_swapped(state.swapped, ran.space, ran.budget, state.scheduler_config, now)


def _consider_prompts(
    state: V0State,
    space: BlockSpace,
    budget: SchedulingBudget,
    now: float,
    enable_chunking: bool,
) -> tuple[QueuePass, PromptDelay]:
    """Admit prompts unless they are to be held back for others to join them.

    They are held back while something runs and the oldest of them has waited no longer than
    `delay_factor` times the latency of the last prompt step.
    """
    config, delay = state.scheduler_config, state.delay
    latency = now - delay.prev_time if delay.prev_prompt else delay.last_prompt_latency
    held_back = False
    if config.delay_factor > 0 and state.waiting and state.running:
        earliest = min(group.request.arrival_time for group in state.waiting)
        held_back = now - earliest <= config.delay_factor * latency
    if held_back:
        prefilled = QueuePass(remaining=state.waiting, space=space, budget=budget)
    else:
        prefilled = schedule_prefills(state.waiting, space, budget, config, enable_chunking)
    return prefilled, PromptDelay(
        prev_time=now, prev_prompt=bool(prefilled.prefills), last_prompt_latency=latency
    )


def _conclude(
    state: V0State,
    prefilled: QueuePass,
    ran: QueuePass,
    swapped: QueuePass,
    budget: SchedulingBudget,
    running: Queue,
    scheduled: tuple[Scheduled, ...],
) -> tuple[V0State, V0SchedulerOutput]:
    """Put groups into their queues and write down the plan.

    Preempted groups go to the head of the waiting queue, the last one preempted (the oldest)
    first; groups swapped out go to the end of the swapped queue.
    """
    config = state.scheduler_config
    if budget.num_batched_tokens > config.max_num_batched_tokens:
        raise V0SchedulingError(
            "token_budget",
            f"{budget.num_batched_tokens} tokens planned of {config.max_num_batched_tokens}",
        )
    if budget.num_curr_seqs > config.max_num_seqs:
        raise V0SchedulingError(
            "seq_budget", f"{budget.num_curr_seqs} sequences planned of {config.max_num_seqs}"
        )
    num_prefills = len(prefilled.prefills) + len(ran.prefills) + len(swapped.prefills)
    output = V0SchedulerOutput(
        scheduled_seq_groups=tuple(_describe(item, state.space) for item in scheduled),
        num_prefill_groups=num_prefills,
        num_batched_tokens=budget.num_batched_tokens,
        blocks_to_swap_in=swapped.blocks_to_swap,
        blocks_to_swap_out=ran.blocks_to_swap,
        blocks_to_copy=(*ran.blocks_to_copy, *swapped.blocks_to_copy),
        ignored_request_ids=tuple(
            group.request_id for group in (*prefilled.infeasible, *swapped.infeasible)
        ),
        num_lookahead_slots=config.num_lookahead_slots,
        running_queue_size=len(running),
        preempted=len(ran.preempted) + len(ran.swapped_out),
        finished_request_ids=state.finished_request_ids,
    )
    state = replace(
        state,
        waiting=(*reversed(ran.preempted), *prefilled.remaining),
        running=running,
        swapped=(*swapped.remaining, *ran.swapped_out),
        finished_request_ids=(),
    )
    return state, output


def _describe(item: Scheduled, space: BlockSpace) -> ScheduledSequenceGroup:
    """Write down a scheduled group; it samples unless its prefill goes on after this chunk."""
    group = item.group
    do_sample = True
    if group.is_prefill:
        if len(group.seqs) != 1:
            raise V0SchedulingError(
                "prefill_of_forks",
                f"request {group.request_id!r} is in prefill with {len(group.seqs)} sequences",
            )
        uncomputed = v0_sequences.num_uncomputed_tokens(group.seqs[0])
        do_sample = item.token_chunk_size >= uncomputed
    running = group.with_seqs_in(SequenceStatus.RUNNING)
    return ScheduledSequenceGroup(
        request_id=group.request_id,
        token_chunk_size=item.token_chunk_size,
        is_prompt=group.is_prefill,
        do_sample=do_sample,
        block_tables={seq.seq_id: space.tables[seq.seq_id].blocks for seq in running},
    )


def _groups(items: tuple[Scheduled, ...]) -> Queue:
    return tuple(item.group for item in items)
