"""V0 for the fast engine: the verbs of V1's scheduler, plans that a V1 worker carries out.

Groups have one sequence each. Where V0's blocks are in the engine's pool is told in
`servespec.reference.contracts.v0.V0EngineConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from servespec.fast.scheduling.v0 import Scheduler
from servespec.reference.contracts import (
    BlockCopy,
    BlockTable,
    CachedRequestData,
    CacheTooSmallError,
    EngineConfig,
    EngineCoreOutput,
    FinishReason,
    NewRequestData,
    Request,
    RequestError,
    RequestStatus,
    SchedulerOutput,
    SchedulerSnapshot,
)
from servespec.reference.contracts.v0 import (
    SequenceGroupOutput,
    SequenceGroupRequest,
    SequenceSample,
    V0EngineConfig,
    V0SchedulerOutput,
)

__all__ = ["V0EngineScheduler", "V0Schedule"]


class V0Schedule:
    """A V0 plan and what the worker is told of it.

    Parameters
    ----------
    plan : V0SchedulerOutput
    output : SchedulerOutput
    """

    __slots__ = ("output", "plan")

    def __init__(self, plan: V0SchedulerOutput, output: SchedulerOutput) -> None:
        self.plan = plan
        self.output = output

    def to_contract(self) -> SchedulerOutput:
        """Return the plan for a worker."""
        return self.output


class _Live:
    """What is kept of a request that lives: its tokens and what the worker holds of it."""

    __slots__ = ("computed", "in_last_step", "known", "outputs", "request", "table")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.outputs: list[int] = []
        self.computed = 0
        self.known = False
        self.in_last_step = False
        self.table: tuple[int, ...] | None = None


class V0EngineScheduler:
    """A V0 scheduler behind the verbs that the fast engine calls.

    Parameters
    ----------
    config : EngineConfig
    v0 : V0EngineConfig
        ``config.v0``.
    """

    def __init__(self, config: EngineConfig, v0: V0EngineConfig) -> None:
        self._v0 = v0
        self._scheduler = Scheduler(v0.scheduler, v0.cache)
        self._is_attention = [g.layer_type == "full_attention" for g in config.cache.groups]
        self._live: dict[str, _Live] = {}
        self._ended: list[str] = []

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises
        ------
        DuplicateRequestError
            A live request has this id.
        RequestError
            It asks for a stop by repetition, which V0 does not know, or may not stop where
            ``max_model_len`` ends it.
        CacheTooSmallError
            At its longest it does not fit the GPU blocks beside a free one and the watermark.
        """
        params = request.sampling_params
        if params.repetition_detection is not None:
            raise RequestError(
                f"Request({request.request_id!r}).sampling_params.repetition_detection is set:"
                " must be None with V0"
            )
        cache, limit = self._v0.cache, self._v0.scheduler.max_model_len
        if request.num_prompt_tokens + params.min_tokens > limit + 1:
            raise RequestError(
                f"Request({request.request_id!r}).sampling_params.min_tokens is"
                f" {params.min_tokens}: must be at most {limit + 1 - request.num_prompt_tokens}"
                " with V0, which ends it there"
            )
        tokens = request.num_prompt_tokens + params.max_tokens
        needed = -(-min(tokens, limit) // cache.block_size) + 1 + cache.watermark_blocks
        if needed > cache.num_gpu_blocks:
            raise CacheTooSmallError(
                f"Request({request.request_id!r}) needs {needed} GPU blocks under V0: must be at"
                f" most {cache.num_gpu_blocks}"
            )
        self._scheduler.add_seq_group(
            SequenceGroupRequest(
                request_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling_params=params,
                arrival_time=request.arrival_time,
            )
        )
        self._live[request.request_id] = _Live(request)

    def schedule(self) -> V0Schedule:
        """Plan one step.

        Raises
        ------
        V0SchedulingError
            Where V0 gives up.
        """
        plan = self._scheduler.schedule()
        groups = {group.request_id: group for group in plan.scheduled_seq_groups}
        running = self._scheduler.running
        fallen = [
            name
            for name, live in self._live.items()
            if live.table is not None and name not in running
        ]
        for name in fallen:
            self._live[name].table = None
        for name, group in groups.items():
            # A prefill that a preemption reset starts again from its first token.
            self._live[name].computed = running[name].seqs[0].computed
            assert len(group.block_tables) == 1
        tables = {name: next(iter(group.block_tables.values())) for name, group in groups.items()}
        chunks = {name: group.token_chunk_size for name, group in groups.items()}
        output = SchedulerOutput(
            scheduled_new_reqs=tuple(
                NewRequestData(
                    req_id=name,
                    prompt_token_ids=self._live[name].request.prompt_token_ids,
                    sampling_params=self._live[name].request.sampling_params,
                    block_ids=self._pages(table),
                    num_computed_tokens=0,
                )
                for name, table in tables.items()
                if not self._live[name].known
            ),
            scheduled_cached_reqs=self._cached(tables),
            num_scheduled_tokens=chunks,
            total_num_scheduled_tokens=sum(chunks.values()),
            num_common_prefix_blocks=(0,) * len(self._is_attention),
            finished_req_ids=frozenset(self._ended),
            preempted_req_ids=frozenset(fallen),
            kv_cache_block_copies=self._copies(plan),
        )
        self._ended.clear()
        for name, live in self._live.items():
            live.in_last_step = name in tables
            if live.in_last_step:
                live.known, live.table = True, tables[name]
        return V0Schedule(plan, output)

    def _cached(self, tables: Mapping[str, tuple[int, ...]]) -> CachedRequestData:
        names = [name for name in tables if self._live[name].known]
        new_block_ids: list[BlockTable | None] = []
        for name in names:
            held = self._live[name].table
            pages = self._pages(tables[name])
            if held is not None and len(held) == len(tables[name]):
                new_block_ids.append(None)
            elif held is not None:
                fresh = tables[name][len(held) :]
                parts = zip(self._is_attention, self._pages(fresh), strict=True)
                new_block_ids.append(tuple(ids if attends else () for attends, ids in parts))
            else:
                new_block_ids.append(pages)
        return CachedRequestData(
            req_ids=tuple(names),
            resumed_req_ids=frozenset(n for n in names if self._live[n].table is None),
            new_block_ids=tuple(new_block_ids),
            num_computed_tokens=tuple(self._live[name].computed for name in names),
            num_output_tokens=tuple(len(self._live[name].outputs) for name in names),
            all_token_ids={
                name: (*self._live[name].request.prompt_token_ids, *self._live[name].outputs)
                for name in names
                if not self._live[name].in_last_step
            },
        )

    def _pages(self, table: Sequence[int], on_gpu: bool = True) -> BlockTable:
        page = self._v0.gpu_block if on_gpu else self._v0.cpu_block
        return tuple(
            tuple([page(group, block) for block in (table if attends else table[:1])])
            for group, attends in enumerate(self._is_attention)
        )

    def _copies(self, plan: V0SchedulerOutput) -> tuple[BlockCopy, ...]:
        gpu, cpu = self._v0.gpu_block, self._v0.cpu_block
        groups = range(len(self._is_attention))
        moves = [(gpu(g, a), cpu(g, b)) for a, b in plan.blocks_to_swap_out for g in groups]
        moves += [(cpu(g, a), gpu(g, b)) for a, b in plan.blocks_to_swap_in for g in groups]
        moves += [(gpu(g, a), gpu(g, b)) for a, b in plan.blocks_to_copy for g in groups]
        return tuple(BlockCopy(src_block_id=a, dst_block_id=b) for a, b in moves)

    def update_from_output(
        self, schedule: V0Schedule, sampled: Mapping[str, tuple[int, ...]]
    ) -> tuple[EngineCoreOutput, ...]:
        """Take in the tokens of the step planned last."""
        samples = {
            group.request_id: (
                SequenceSample(
                    parent_seq_id=next(iter(group.block_tables)),
                    token_id=sampled[group.request_id][0],
                ),
            )
            for group in schedule.plan.scheduled_seq_groups
            if group.do_sample
        }
        results = self._scheduler.update_from_output(schedule.plan, samples)
        return tuple(self._given(result) for result in results if result.outputs)

    def _given(self, result: SequenceGroupOutput) -> EngineCoreOutput:
        (item,) = result.outputs
        live = self._live[result.request_id]
        live.outputs.append(item.new_token_id)
        stopped = item.finish_reason is FinishReason.STOP
        at_end = item.new_token_id == live.request.sampling_params.eos_token_id
        if result.finished:
            self._end(result.request_id)
        return EngineCoreOutput(
            request_id=result.request_id,
            new_token_ids=(item.new_token_id,),
            finish_reason=item.finish_reason,
            stop_reason=item.new_token_id if stopped and not at_end else None,
        )

    def _end(self, name: str) -> None:
        """Forget a request; a worker that knows it is told with the next plan."""
        if self._live.pop(name).known:
            self._ended.append(name)

    def finish_requests(self, request_ids: Sequence[str], status: RequestStatus) -> None:
        """End requests from outside; ids that are not alive are ignored."""
        self._scheduler.abort_seq_group(request_ids)
        for name in dict.fromkeys(request_ids):
            if name in self._live:
                self._end(name)

    def has_unfinished_requests(self) -> bool:
        """Tell whether any request still waits or runs."""
        return self._scheduler.has_unfinished_seqs()

    def snapshot(self) -> SchedulerSnapshot:
        """Return the state as far as checks compare it, blocks in the first group's region."""
        seen, v0 = self._scheduler.snapshot(), self._v0
        names = {seqs[0].seq_id: name for name, seqs in seen.sequences.items()}
        tables = {seq: self._pages(table) for seq, table in seen.gpu_block_tables.items()}
        for seq, table in seen.cpu_block_tables.items():
            tables[seq] = self._pages(table, on_gpu=False)
        return SchedulerSnapshot(
            free_blocks=(
                *(v0.gpu_block(0, block) for block in seen.free_gpu_blocks),
                *(v0.cpu_block(0, block) for block in seen.free_cpu_blocks),
            ),
            ref_counts=(0, *seen.gpu_ref_counts, *seen.cpu_ref_counts),
            block_tables={names[seq]: pages for seq, pages in tables.items() if seq in names},
            running=seen.running,
            waiting=seen.waiting,
            skipped_waiting=seen.swapped,
            num_computed_tokens={n: s[0].num_computed_tokens for n, s in seen.sequences.items()},
            num_output_placeholders=dict.fromkeys(seen.sequences, 0),
        )
