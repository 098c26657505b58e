"""One step of the fast V0 scheduler while it is being planned.

The budget is two counters. The release registers requests by id so that none is counted twice;
that can only happen to running groups under the default policy, whose sequences are counted in
advance, so a flag does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from servespec.fast.cache.v0_block_manager import BlockManager
from servespec.fast.scheduling.v0_groups import Group
from servespec.reference.contracts.v0 import (
    AllocStatus,
    SequenceStatus,
    V0SchedulerConfig,
    V0SchedulingError,
)

__all__ = ["Entry", "Step"]

Entry = tuple[Group, int]
"""A scheduled group and its chunk."""


class Step:
    """What has been decided so far.

    Parameters
    ----------
    config : V0SchedulerConfig
    blocks : BlockManager
    now : float
        Seconds.
    num_seqs : int
        Sequences counted in advance.

    Attributes
    ----------
    num_tokens, num_seqs : int
        Spent so far.
    prompts, pieces, returning_pieces : list of Entry
        Prefills from the waiting, the running and the swapped queue.
    decodes, returning : list of Entry
        Decodes from the running and the swapped queue.
    evicted, swapped_out, ignored : list of Group
    swaps_in, swaps_out, copies : list of (int, int)
    """

    def __init__(
        self, config: V0SchedulerConfig, blocks: BlockManager, now: float, num_seqs: int = 0
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.now = now
        self.num_tokens = 0
        self.num_seqs = num_seqs
        self.prompts: list[Entry] = []
        self.pieces: list[Entry] = []
        self.returning_pieces: list[Entry] = []
        self.decodes: list[Entry] = []
        self.returning: list[Entry] = []
        self.evicted: list[Group] = []
        self.swapped_out: list[Group] = []
        self.ignored: list[Group] = []
        self.swaps_in: list[tuple[int, int]] = []
        self.swaps_out: list[tuple[int, int]] = []
        self.copies: list[tuple[int, int]] = []

    @property
    def calm(self) -> bool:
        """Whether nothing was preempted."""
        return not (self.evicted or self.swapped_out)

    def chunk(self, group: Group, chunked: bool) -> int:
        """Return the tokens for a group now: all it wants, or for one sequence what is left.

        A piece of a prompt that would use up the budget is cut to a multiple of the alignment,
        which may leave nothing.
        """
        wanted = group.num_new_tokens()
        if not chunked or len(group.live) > 1:
            return wanted
        left = self.config.max_num_batched_tokens - self.num_tokens
        if wanted < left:
            return wanted
        return left - left % self.config.chunk_alignment if group.prefill else left

    def fits(self, num_tokens: int, num_seqs: int) -> bool:
        """Tell whether both limits leave room."""
        return (
            self.num_tokens + num_tokens <= self.config.max_num_batched_tokens
            and self.num_seqs + num_seqs <= self.config.max_num_seqs
        )

    def oldest_first(self, queue: Iterable[Group]) -> deque[Group]:
        """Return a queue by waiting time, equal ones in their order."""
        now = self.now
        return deque(sorted(queue, key=lambda group: now - group.arrival_time, reverse=True))

    def run(self, running: Iterable[Group], chunked: bool) -> deque[Group]:
        """Continue running groups and return those the budget did not reach.

        Raises
        ------
        V0SchedulingError
            If a victim cannot be preempted the way it has to be, or the newer block manager fails.
        """
        pending = self.oldest_first(running)
        while pending:
            group = pending[0]
            count = self.chunk(group, chunked)
            if count == 0:
                break
            pending.popleft()
            if not self._make_room(group, pending, counted=not chunked):
                continue
            self._append(group)
            if group.prefill:
                self.pieces.append((group, count))
            else:
                self.decodes.append((group, 1))
            self.num_tokens += count
            if chunked:
                self.num_seqs += group.width
        return pending

    def _make_room(self, group: Group, pending: deque[Group], counted: bool) -> bool:
        """Preempt from the end of the queue until a group can go on; False if it fell itself."""
        lengths, lookahead = group.lengths(), self.config.num_lookahead_slots
        if self.blocks.can_append(lengths, lookahead):
            return True
        if counted:
            # Not counted again should the group run after all: the release forgets it.
            self.num_seqs -= group.width
        while pending:
            self._preempt(pending.pop())
            if self.blocks.can_append(lengths, lookahead):
                return True
        self._preempt(group)
        return False

    def _preempt(self, group: Group) -> None:
        mode = self.config.preemption_mode
        if mode == "swap" or (mode is None and group.width != 1):
            if not self.blocks.can_swap_out(group.seq_ids()):
                raise V0SchedulingError(
                    "swap_space", f"no room on the CPU for request {group.request_id!r}"
                )
            self.blocks.swap_out(group.seq_ids(), self.swaps_out)
            group.move_to(SequenceStatus.SWAPPED)
            self.swapped_out.append(group)
            return
        if len(group.live) != 1:
            raise V0SchedulingError(
                "recompute_of_forks", f"request {group.request_id!r} runs {len(group.live)} at once"
            )
        self.blocks.free(group.live[0].seq_id)
        group.restart()
        self.evicted.append(group)

    def _append(self, group: Group) -> None:
        lookahead = self.config.num_lookahead_slots
        for seq in group.live:
            self.blocks.append(seq.seq_id, seq.length, lookahead, self.copies)

    def swap_in(self, swapped: Iterable[Group]) -> deque[Group]:
        """Bring swapped groups back and return those that stay.

        Raises
        ------
        V0SchedulingError
            If the newer block manager fails.
        """
        pending = self.oldest_first(swapped)
        while pending:
            group = pending[0]
            lookahead = 0 if group.prefill else self.config.num_lookahead_slots
            status = self.blocks.can_swap_in(group.seq_ids(), lookahead)
            if status is AllocStatus.NEVER:
                self.ignored.append(pending.popleft())
                continue
            count, width = group.num_new_tokens(), group.width
            if status is AllocStatus.LATER or not self.fits(count, width):
                break
            pending.popleft()
            self.blocks.swap_in(group.seq_ids(), self.swaps_in)
            group.move_to(SequenceStatus.RUNNING)
            self._append(group)
            if group.prefill:
                self.returning_pieces.append((group, count))
            else:
                self.returning.append((group, 1))
            self.num_tokens += count
            self.num_seqs += width
        return pending

    def admit(self, waiting: deque[Group], chunked: bool) -> None:
        """Take prompts from the head of the waiting queue.

        Ignored ones come before groups that cannot be swapped in, whichever was found first.
        """
        ignored: list[Group] = []
        while waiting:
            group = waiting[0]
            seq = group.live[0]
            count = self.chunk(group, chunked)
            status = self.blocks.can_allocate(seq.length)
            if count > self.config.max_model_len or status is AllocStatus.NEVER:
                ignored.append(waiting.popleft())
                continue
            width = group.width
            if status is AllocStatus.LATER or count == 0 or not self.fits(count, width):
                break
            waiting.popleft()
            self.blocks.allocate(seq.seq_id, seq.length, len(group.seqs))
            group.move_to(SequenceStatus.RUNNING)
            self.prompts.append((group, count))
            self.num_tokens += count
            self.num_seqs += width
        self.ignored[:0] = ignored
