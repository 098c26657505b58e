"""The legacy (V0) scheduler on mutable state.

Decisions are those of vLLM 0.5.1, written down in `servespec.reference.contracts.v0`; a step costs
time in proportion to the running groups and to what changes, not to what waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from servespec.fast.cache.v0_block_manager import BlockManager, NewerBlockManager
from servespec.fast.scheduling.v0_groups import Group
from servespec.fast.scheduling.v0_groups import Sequence as GroupSequence
from servespec.fast.scheduling.v0_step import Entry, Step
from servespec.reference.contracts import DuplicateRequestError, RequestError
from servespec.reference.contracts.v0 import (
    ScheduledSequenceGroup,
    SequenceGroupOutput,
    SequenceGroupRequest,
    SequenceOutput,
    SequenceSample,
    SequenceStatus,
    V0CacheConfig,
    V0SchedulerConfig,
    V0SchedulerOutput,
    V0SchedulingError,
    V0Snapshot,
)

__all__ = ["Scheduler"]


class Scheduler:
    """A V0 scheduler.

    After a `V0SchedulingError` from `schedule` its state is undefined, as V0's is.

    Parameters
    ----------
    scheduler_config : V0SchedulerConfig
    cache_config : V0CacheConfig
    """

    def __init__(self, scheduler_config: V0SchedulerConfig, cache_config: V0CacheConfig) -> None:
        self.scheduler_config = scheduler_config
        self.cache_config = cache_config
        newer = scheduler_config.use_v2_block_manager
        self._blocks = NewerBlockManager(cache_config) if newer else BlockManager(cache_config)
        self._groups: dict[str, Group] = {}
        self._waiting: deque[Group] = deque()
        self._running: list[Group] = []
        self._swapped: list[Group] = []
        self._next_seq_id = 0
        self._finished: list[str] = []
        self._prev_time = 0.0
        self._prev_prompt = False
        self._last_prompt_latency = 0.0

    def add_seq_group(self, request: SequenceGroupRequest) -> None:
        """Queue a request.

        Raises
        ------
        DuplicateRequestError
            If a live request has its id.
        """
        if request.request_id in self._groups:
            raise DuplicateRequestError(f"request id {request.request_id!r} is already in use")
        group = Group(request, self._next_seq_id)
        self._next_seq_id += 1
        self._groups[request.request_id] = group
        self._waiting.append(group)

    def abort_seq_group(self, request_ids: Sequence[str]) -> None:
        """End requests from outside; ids that are not queued are ignored."""
        doomed = set(request_ids) & self._groups.keys()
        if not doomed:
            return
        for group in (*self._waiting, *self._running, *self._swapped):
            if group.request_id in doomed:
                for seq_id in group.seq_ids():
                    self._blocks.free(seq_id)
                del self._groups[group.request_id]
        self._waiting = deque(g for g in self._waiting if g.request_id not in doomed)
        self._running = [g for g in self._running if g.request_id not in doomed]
        self._swapped = [g for g in self._swapped if g.request_id not in doomed]

    def has_unfinished_seqs(self) -> bool:
        """Tell whether any group is queued."""
        return bool(self._groups)

    @property
    def running(self) -> dict[str, Group]:
        """The running groups by request id."""
        return {group.request_id: group for group in self._running}

    def schedule(self, now: float = 0.0) -> V0SchedulerOutput:
        """Plan one step.

        Parameters
        ----------
        now : float
            Seconds.

        Raises
        ------
        V0SchedulingError
            Where V0 gives up.
        """
        config = self.scheduler_config
        if config.enable_chunked_prefill:
            step = Step(config, self._blocks, now)
            self._plan_chunked(step)
            scheduled = step.prompts + step.pieces + step.returning_pieces
        else:
            step = Step(config, self._blocks, now, sum(group.width for group in self._running))
            self._plan_default(step)
            scheduled = step.prompts.copy()
        num_prefills = len(scheduled)
        scheduled += step.decodes + step.returning
        if step.num_tokens > config.max_num_batched_tokens:
            raise V0SchedulingError("token_budget", f"{step.num_tokens} tokens in one step")
        if step.num_seqs > config.max_num_seqs:
            raise V0SchedulingError("seq_budget", f"{step.num_seqs} sequences in one step")
        for group in step.ignored:
            del self._groups[group.request_id]
        finished, self._finished = self._finished, []
        return V0SchedulerOutput(
            scheduled_seq_groups=tuple(self._describe(entry) for entry in scheduled),
            num_prefill_groups=num_prefills,
            num_batched_tokens=step.num_tokens,
            blocks_to_swap_in=tuple(step.swaps_in),
            blocks_to_swap_out=tuple(step.swaps_out),
            blocks_to_copy=tuple(step.copies),
            ignored_request_ids=tuple(group.request_id for group in step.ignored),
            num_lookahead_slots=config.num_lookahead_slots,
            running_queue_size=len(self._running),
            preempted=len(step.evicted) + len(step.swapped_out),
            finished_request_ids=tuple(finished),
        )

    def _plan_default(self, step: Step) -> None:
        """Prompts if nothing is swapped out, else or if there are none the running groups."""
        idle = not self._running
        if not self._swapped:
            self._admit(step, idle, chunked=False)
        if step.prompts:
            self._running += [group for group, _ in step.prompts]
            return
        left = step.run(self._running, chunked=False)
        swapped = step.swap_in(self._swapped) if step.calm else self._swapped
        self._requeue(step, (*left, *_of(step.decodes), *_of(step.returning)), swapped)

    def _plan_chunked(self, step: Step) -> None:
        """Run what runs, then what comes back, and fill up with prompts."""
        idle = not self._running
        left = step.run(self._running, chunked=True)
        swapped = step.swap_in(self._swapped) if step.calm else self._swapped
        self._admit(step, idle, chunked=True)
        self._requeue(
            step,
            (
                *left,
                *_of(step.prompts),
                *_of(step.decodes),
                *_of(step.pieces),
                *_of(step.returning),
                *_of(step.returning_pieces),
            ),
            swapped,
        )

    def _admit(self, step: Step, idle: bool, chunked: bool) -> None:
        """Admit prompts, unless the oldest has to wait for company."""
        if self._prev_prompt:
            self._last_prompt_latency = step.now - self._prev_time
        self._prev_time = step.now
        factor = self.scheduler_config.delay_factor
        if factor == 0 or idle or not self._waiting:
            patient = True
        else:
            oldest = min(group.arrival_time for group in self._waiting)
            patient = step.now - oldest > factor * self._last_prompt_latency
        if patient:
            step.admit(self._waiting, chunked)
        self._prev_prompt = bool(step.prompts)

    def _requeue(self, step: Step, running: Sequence[Group], swapped: Sequence[Group]) -> None:
        self._waiting.extendleft(step.evicted)
        self._running = list(running)
        self._swapped = [*swapped, *step.swapped_out]

    def _describe(self, entry: Entry) -> ScheduledSequenceGroup:
        group, chunk = entry
        prefill, do_sample = group.prefill, True
        if prefill:
            if len(group.seqs) > 1:
                raise V0SchedulingError(
                    "prefill_of_forks", f"request {group.request_id!r} has {len(group.seqs)}"
                )
            do_sample = group.seqs[0].computed + chunk >= group.seqs[0].length
        tables = self._blocks.tables
        return ScheduledSequenceGroup(
            request_id=group.request_id,
            token_chunk_size=chunk,
            is_prompt=prefill,
            do_sample=do_sample,
            block_tables={seq.seq_id: tuple(tables[seq.seq_id]) for seq in group.live},
        )

    def update_from_output(
        self, output: V0SchedulerOutput, sampled: Mapping[str, tuple[SequenceSample, ...]]
    ) -> tuple[SequenceGroupOutput, ...]:
        """Take in the samples of every scheduled group that was to sample.

        Raises
        ------
        RequestError
            If samples are missing or name a sequence that does not run; groups before it in the
            plan are updated then.
        """
        results = []
        for scheduled in output.scheduled_seq_groups:
            group = self._groups.get(scheduled.request_id)
            if group is None or group.live[0].status is not SequenceStatus.RUNNING:
                continue
            group.advance(scheduled.token_chunk_size)
            outputs: tuple[SequenceOutput, ...] = ()
            if scheduled.do_sample:
                outputs = self._take(group, sampled.get(scheduled.request_id, ()))
            results.append(
                SequenceGroupOutput(
                    request_id=group.request_id, outputs=outputs, finished=not group.live
                )
            )
        for group in self._running:
            if not group.live:
                self._finished.append(group.request_id)
                del self._groups[group.request_id]
        self._running = [group for group in self._running if group.live]
        return tuple(results)

    def _take(self, group: Group, samples: Sequence[SequenceSample]) -> tuple[SequenceOutput, ...]:
        """Append, fork, drop and finish, in the order in which V0 touches the blocks."""
        tokens: dict[int, list[int]] = {seq.seq_id: [] for seq in group.live}
        for sample in samples:
            if sample.parent_seq_id not in tokens:
                raise RequestError(
                    f"request {group.request_id!r} runs no sequence {sample.parent_seq_id}"
                )
            tokens[sample.parent_seq_id].append(sample.token_id)
        if not samples:
            raise RequestError(f"request {group.request_id!r} was to sample and has no samples")
        params, most = group.request.sampling_params, self.scheduler_config.max_model_len
        dropped: list[GroupSequence] = []
        forked: list[tuple[int, GroupSequence]] = []
        outputs: list[SequenceOutput] = []
        for parent in group.live:
            mine = tokens[parent.seq_id]
            if not mine:
                self._blocks.free(parent.seq_id)
                dropped.append(parent)
                continue
            family = [parent.copy(self._next_seq_id + index) for index in range(len(mine) - 1)]
            self._next_seq_id += len(family)
            forked += [(parent.seq_id, child) for child in family]
            for seq, token in zip((*family, parent), mine, strict=True):
                seq.take(token, params, most)
                outputs.append(
                    SequenceOutput(
                        seq_id=seq.seq_id,
                        parent_seq_id=parent.seq_id,
                        new_token_id=token,
                        finish_reason=seq.status.finish_reason,
                    )
                )
        for parent_id, child in forked:
            if child.status is SequenceStatus.RUNNING:
                self._blocks.fork(parent_id, child.seq_id)
        for seq in group.live:
            if seq.status.is_finished:
                self._blocks.free(seq.seq_id)
        group.replace(dropped, [child for _, child in forked])
        return tuple(outputs)

    def snapshot(self) -> V0Snapshot:
        """Return the state as far as checks compare it."""
        blocks = self._blocks
        return V0Snapshot(
            waiting=tuple(group.request_id for group in self._waiting),
            running=tuple(group.request_id for group in self._running),
            swapped=tuple(group.request_id for group in self._swapped),
            sequences={
                group.request_id: tuple(seq.snapshot() for seq in group.seqs)
                for group in (*self._waiting, *self._running, *self._swapped)
            },
            gpu_block_tables={key: tuple(table) for key, table in blocks.tables.items()},
            cpu_block_tables={key: tuple(table) for key, table in blocks.swapped.items()},
            free_gpu_blocks=tuple(reversed(blocks.gpu.stack)),
            free_cpu_blocks=tuple(reversed(blocks.cpu.stack)),
            gpu_ref_counts=tuple(blocks.gpu.holders),
            cpu_ref_counts=tuple(blocks.cpu.holders),
            prev_time=self._prev_time,
            last_prompt_latency=self._last_prompt_latency,
            prev_prompt=self._prev_prompt,
        )


def _of(entries: Sequence[Entry]) -> list[Group]:
    return [group for group, _ in entries]
