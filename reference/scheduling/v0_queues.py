"""The three passes over the V0 queues: running, swapped, waiting.

Each pass takes a queue, the blocks and the budget, and returns a `QueuePass`: what it scheduled,
what remains of the queue, and both resources as they are then. A policy is a choice and an order
of passes.

Source: ``_schedule_running``, ``_schedule_swapped``, ``_schedule_prefills``,
``_get_num_new_tokens`` and ``_preempt`` of ``vllm/core/scheduler.py`` of vLLM 0.5.1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from servespec.reference.cache.v0_space import BlockMoves, BlockSpace
from servespec.reference.contracts.v0 import (
    AllocStatus,
    PreemptionMode,
    SequenceStatus,
    V0SchedulerConfig,
    V0SchedulingError,
)
from servespec.reference.scheduling.v0_budget import SchedulingBudget
from servespec.reference.scheduling.v0_manager import BlockManager, block_manager
from servespec.reference.scheduling.v0_sequences import (
    SequenceGroup,
    reset_for_recompute,
    with_status,
)

__all__ = [
    "Queue",
    "QueuePass",
    "Scheduled",
    "num_new_tokens",
    "schedule_prefills",
    "schedule_running",
    "schedule_swapped",
]

Queue = tuple[SequenceGroup, ...]
WAITING, RUNNING, SWAPPED = SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.SWAPPED


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """A group and the tokens to compute of each of its running sequences."""

    group: SequenceGroup
    token_chunk_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePass:
    """What became of one queue; as it starts, nothing is scheduled and all of the queue remains.

    Attributes
    ----------
    remaining : tuple of SequenceGroup
        Groups that sit the step out, in order; running ones keep their blocks.
    decodes, prefills : tuple of Scheduled
    infeasible : tuple of SequenceGroup
        Waiting groups that are too long, swapped ones that can never come back.
    preempted : tuple of SequenceGroup
        Running groups to be recomputed, in order of preemption.
    swapped_out : tuple of SequenceGroup
    blocks_to_swap : tuple of (int, int)
        Out of the GPU for running groups, into it for swapped ones.
    blocks_to_copy : tuple of (int, int)
    space : BlockSpace
    budget : SchedulingBudget
    """

    remaining: Queue
    decodes: tuple[Scheduled, ...] = ()
    prefills: tuple[Scheduled, ...] = ()
    infeasible: Queue = ()
    preempted: Queue = ()
    swapped_out: Queue = ()
    blocks_to_swap: BlockMoves = ()
    blocks_to_copy: BlockMoves = ()
    space: BlockSpace
    budget: SchedulingBudget


def num_new_tokens(
    group: SequenceGroup,
    status: SequenceStatus,
    enable_chunking: bool,
    budget: SchedulingBudget,
    chunk_alignment: int,
) -> int:
    """Return the tokens a group would compute now; 0 if the budget has no room for any.

    Only a group with one sequence in `status` is cut to the budget: several sequences mean a
    decode of forks, which is all or nothing. A prefill that would take all that is left is cut
    further down to a multiple of `chunk_alignment`, so that kernels see round sizes; it gets
    nothing if less than that is left, even if the rest of its prompt would fit exactly.

    Parameters
    ----------
    group : SequenceGroup
    status : SequenceStatus
        Only sequences in this status count.
    enable_chunking : bool
    budget : SchedulingBudget
    chunk_alignment : int

    Returns
    -------
    int
        Negative if the budget is overrun and the group may be cut.
    """
    seqs = group.with_seqs_in(status)
    count = sum(seq.num_new_tokens for seq in seqs)
    if not enable_chunking or len(seqs) != 1:
        return count
    remaining = budget.remaining_token_budget
    count = min(count, remaining)
    if count == remaining and group.is_prefill:
        count = count // chunk_alignment * chunk_alignment
    return count


def schedule_running(
    queue: Queue,
    space: BlockSpace,
    budget: SchedulingBudget,
    config: V0SchedulerConfig,
    now: float,
    enable_chunking: bool,
) -> QueuePass:
    """Let the running groups go on, oldest first; make room by preempting the youngest.

    A group that cannot get its slots preempts from the end of the queue until it can, and at
    last itself. The pass ends at the first group to which the budget gives nothing. Only the
    chunked policy registers sequences here; the default one has done so before.

    Parameters
    ----------
    queue : tuple of SequenceGroup
    space : BlockSpace
    budget : SchedulingBudget
    config : V0SchedulerConfig
    now : float
        Seconds.
    enable_chunking : bool

    Raises
    ------
    V0SchedulingError
        ``swap_space``, ``recompute_of_forks``, ``pool_exhausted`` or ``append_past_table``.
    """
    manager, lookahead = block_manager(config), config.num_lookahead_slots
    ran = QueuePass(remaining=queue, space=space, budget=budget)
    pending = deque(_by_arrival(queue, now))
    while pending:
        group = pending[0]
        count = num_new_tokens(group, RUNNING, enable_chunking, ran.budget, config.chunk_alignment)
        if count == 0:
            break
        pending.popleft()
        survives = True
        while survives and not manager.can_append_slots(
            ran.space, _known_tokens(group, RUNNING), lookahead
        ):
            budget = ran.budget.subtract_num_seqs(group.request_id, group.max_num_running_seqs)
            survives = len(pending) > 0
            victim = pending.pop() if survives else group
            ran = _preempt(replace(ran, budget=budget), victim, config)
        if not survives:
            continue
        ran = _go_on(ran, group, count, config)
        if enable_chunking:
            ran = _register_seqs(ran, group)
    return replace(ran, remaining=tuple(pending))


def schedule_swapped(
    queue: Queue,
    space: BlockSpace,
    budget: SchedulingBudget,
    config: V0SchedulerConfig,
    now: float,
) -> QueuePass:
    """Bring swapped groups back, oldest first, until one has no blocks or no budget.

    No policy lets this pass cut a prompt: an unfinished prefill comes back only in a step that
    has budget for all that remains of it, and blocks those behind it until then. A group too
    large for the whole GPU pool is given up; its CPU blocks are not freed.

    Parameters
    ----------
    queue : tuple of SequenceGroup
    space : BlockSpace
    budget : SchedulingBudget
    config : V0SchedulerConfig
    now : float
        Seconds.

    Raises
    ------
    V0SchedulingError
        ``pool_exhausted`` or ``append_past_table``.
    """
    manager = block_manager(config)
    swapped = QueuePass(remaining=queue, space=space, budget=budget)
    pending = deque(_by_arrival(queue, now))
    while pending:
        group = pending[0]
        seq_ids = tuple(seq.seq_id for seq in group.with_seqs_in(SWAPPED))
        lookahead = 0 if group.is_prefill else config.num_lookahead_slots
        status = manager.can_swap_in(swapped.space, seq_ids, lookahead)
        if status is AllocStatus.LATER:
            break
        if status is AllocStatus.NEVER:
            swapped = replace(swapped, infeasible=(*swapped.infeasible, pending.popleft()))
            continue
        count = num_new_tokens(group, SWAPPED, False, swapped.budget, config.chunk_alignment)
        if not swapped.budget.can_schedule(count, group.max_num_running_seqs):
            break
        pending.popleft()
        space, moves = manager.swap_in(swapped.space, seq_ids)
        swapped = replace(swapped, space=space, blocks_to_swap=(*swapped.blocks_to_swap, *moves))
        group = with_status(group, SWAPPED, RUNNING)
        swapped = _register_seqs(_go_on(swapped, group, count, config), group)
    return replace(swapped, remaining=tuple(pending))


def schedule_prefills(
    queue: Queue,
    space: BlockSpace,
    budget: SchedulingBudget,
    config: V0SchedulerConfig,
    enable_chunking: bool,
) -> QueuePass:
    """Admit waiting groups from the head of the queue, which is not sorted.

    A prompt over the limit (`max_model_len`; without chunking also the token budget, which is no
    smaller) or one that the empty pool could not hold is ignored. The limit is compared with the
    chunk, so a prompt that is cut is not found too long. A head that finds no blocks or no budget
    blocks all behind it. Blocks are given for the whole prompt at once.

    Parameters
    ----------
    queue : tuple of SequenceGroup
    space : BlockSpace
    budget : SchedulingBudget
    config : V0SchedulerConfig
    enable_chunking : bool
    """
    manager = block_manager(config)
    admitted = QueuePass(remaining=queue, space=space, budget=budget)
    pending = deque(queue)
    while pending:
        group = pending[0]
        (seq,) = group.with_seqs_in(WAITING)
        space, budget = admitted.space, admitted.budget
        count = num_new_tokens(group, WAITING, enable_chunking, budget, config.chunk_alignment)
        status = manager.can_allocate(space, seq.num_tokens)
        if count > config.max_model_len or status is AllocStatus.NEVER:
            admitted = replace(admitted, infeasible=(*admitted.infeasible, pending.popleft()))
            continue
        num_seqs = group.max_num_running_seqs
        if status is AllocStatus.LATER or count == 0 or not budget.can_schedule(count, num_seqs):
            break
        pending.popleft()
        item = Scheduled(group=with_status(group, WAITING, RUNNING), token_chunk_size=count)
        admitted = replace(
            admitted,
            prefills=(*admitted.prefills, item),
            space=manager.allocate(space, seq.seq_id, seq.num_tokens, len(group.seqs)),
            budget=budget.add_num_batched_tokens(group.request_id, count),
        )
        admitted = _register_seqs(admitted, group)
    return replace(admitted, remaining=tuple(pending))


def _by_arrival(queue: Queue, now: float) -> Sequence[SequenceGroup]:
    """First come, first served; groups of equal waiting time keep their order."""
    return sorted(queue, key=lambda group: now - group.request.arrival_time, reverse=True)


def _known_tokens(group: SequenceGroup, status: SequenceStatus) -> dict[int, int]:
    return {seq.seq_id: seq.num_tokens for seq in group.with_seqs_in(status)}


def _go_on(
    done: QueuePass, group: SequenceGroup, count: int, config: V0SchedulerConfig
) -> QueuePass:
    """Schedule a group whose blocks are on the GPU: give it slots and register its tokens."""
    manager, space, copies = block_manager(config), done.space, done.blocks_to_copy
    for seq_id, num_tokens in _known_tokens(group, RUNNING).items():
        space, copied = manager.append_slots(space, seq_id, num_tokens, config.num_lookahead_slots)
        copies = (*copies, *copied)
    budget = done.budget.add_num_batched_tokens(group.request_id, count)
    done = replace(done, space=space, budget=budget, blocks_to_copy=copies)
    if group.is_prefill:
        item = Scheduled(group=group, token_chunk_size=count)
        return replace(done, prefills=(*done.prefills, item))
    return replace(done, decodes=(*done.decodes, Scheduled(group=group, token_chunk_size=1)))


def _register_seqs(done: QueuePass, group: SequenceGroup) -> QueuePass:
    budget = done.budget.add_num_seqs(group.request_id, group.max_num_running_seqs)
    return replace(done, budget=budget)


def _preempt(ran: QueuePass, victim: SequenceGroup, config: V0SchedulerConfig) -> QueuePass:
    manager = block_manager(config)
    if _preemption_mode(victim, config) == "recompute":
        space, victim = _preempt_by_recompute(victim, ran.space, manager)
        return replace(ran, space=space, preempted=(*ran.preempted, victim))
    space, victim, moves = _preempt_by_swap(victim, ran.space, manager)
    return replace(
        ran,
        space=space,
        swapped_out=(*ran.swapped_out, victim),
        blocks_to_swap=(*ran.blocks_to_swap, *moves),
    )


def _preemption_mode(group: SequenceGroup, config: V0SchedulerConfig) -> PreemptionMode:
    """Recomputing is cheaper but not possible with several sequences, so those are swapped."""
    if config.preemption_mode is not None:
        return config.preemption_mode
    return "recompute" if group.max_num_running_seqs == 1 else "swap"


def _preempt_by_recompute(
    group: SequenceGroup, space: BlockSpace, manager: BlockManager
) -> tuple[BlockSpace, SequenceGroup]:
    running = group.with_seqs_in(RUNNING)
    if len(running) != 1:
        raise V0SchedulingError(
            "recompute_of_forks",
            f"request {group.request_id!r} runs {len(running)} sequences, which only swapping "
            "can preempt",
        )
    space = manager.free(space, running[0].seq_id)
    seqs = tuple(reset_for_recompute(seq) if seq.status is RUNNING else seq for seq in group.seqs)
    return space, replace(group, seqs=seqs)


def _preempt_by_swap(
    group: SequenceGroup, space: BlockSpace, manager: BlockManager
) -> tuple[BlockSpace, SequenceGroup, BlockMoves]:
    seq_ids = tuple(seq.seq_id for seq in group.with_seqs_in(RUNNING))
    if not manager.can_swap_out(space, seq_ids):
        raise V0SchedulingError(
            "swap_space",
            f"the blocks of request {group.request_id!r} do not fit the "
            f"{len(space.cpu.free)} free CPU blocks",
        )
    space, moves = manager.swap_out(space, seq_ids)
    return space, with_status(group, RUNNING, SWAPPED), moves
