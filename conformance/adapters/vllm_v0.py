"""The real V0 scheduler of vLLM 0.5.1 behind the line protocol; runs inside another environment.

Only the scheduler, the block managers, the sequence classes and the output processor of the
unpacked wheel are imported; whatever of it needs CUDA or a model is replaced by a stand-in module.
Two things are replaced inside: the clock, so that the steps of a workload have the times it says,
and the ``set`` from which a block manager frees blocks, whose order depends on memory addresses,
by one that keeps the order of insertion.

`vllm_v0_implementation` is the checker's end; it starts this module with the given interpreter.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import traceback
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from servespec.conformance.adapters.server import serve
from servespec.conformance.adapters.v0_process import V0ProcessImplementation
from servespec.reference.contracts import FinishReason
from servespec.reference.contracts.v0 import (
    ScheduledSequenceGroup,
    SequenceGroupOutput,
    SequenceGroupRequest,
    SequenceOutput,
    SequenceSample,
    SequenceSnapshot,
    SequenceStatus,
    V0CacheConfig,
    V0SchedulerConfig,
    V0SchedulerOutput,
    V0SchedulingError,
    V0SchedulingRule,
    V0Snapshot,
)

__all__ = ["VllmV0Factory", "VllmV0Scheduler", "load_wheel", "vllm_v0_implementation"]

_STAND_INS = (
    "vllm._C",
    "vllm.inputs",
    "vllm.lora",
    "vllm.lora.request",
    "vllm.model_executor",
    "vllm.model_executor.layers",
    "vllm.model_executor.layers.quantization",
    "vllm.model_executor.models",
    "vllm.model_executor.sampling_metadata",
    "vllm.multimodal",
    "vllm.spec_decode",
    "vllm.spec_decode.metrics",
    "vllm.transformers_utils",
    "vllm.transformers_utils.config",
    "vllm.transformers_utils.detokenizer",
    "vllm.transformers_utils.tokenizer",
)

# The name space package is put together by hand, so that nothing else of the checker's
# environment can be imported in the other one.
_BOOTSTRAP = """
import runpy, sys, types
package = types.ModuleType("servespec")
package.__path__ = sys.argv[2:]
sys.modules["servespec"] = package
sys.path[:] = [path for path in sys.path if path]
sys.argv[2:] = []
runpy.run_module("servespec.conformance.adapters.vllm_v0", run_name="__main__", alter_sys=True)
"""

_FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


def vllm_v0_implementation(
    python: str | Path, root: str | Path, **options: float
) -> V0ProcessImplementation:
    """Return vLLM's V0 scheduler as an implementation, run by another interpreter.

    Parameters
    ----------
    python : str or Path
        An interpreter with torch, transformers, psutil, numpy, pydantic and msgspec.
    root : str or Path
        The folder of the unpacked wheel of vLLM 0.5.1, which holds ``vllm/``.
    **options : float
        Time-outs of `V0ProcessImplementation`.
    """
    import servespec

    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VLLM_"))}
    return V0ProcessImplementation(
        [str(python), "-c", _BOOTSTRAP, str(root), *servespec.__path__],
        environment={**environment, "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"},
        name="vllm-v0",
        **options,
    )


class _Clock:
    """Stands for the module ``time`` inside the scheduler."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        """Return the time of the step at hand."""
        return self.now


class _OrderedSet(dict[Any, None]):
    """As much of ``set`` as the block managers use, in order of insertion."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        super().__init__(dict.fromkeys(items))

    def update(self, items: Iterable[Any]) -> None:  # type: ignore[override]
        """Add items at the end."""
        super().update(dict.fromkeys(items))


_CLOCK = _Clock()


def load_wheel(root: str | Path) -> None:
    """Make ``import vllm`` find the unpacked wheel, with stand-ins for what it cannot import here.

    Parameters
    ----------
    root : str or Path
        The folder that holds ``vllm/``.
    """
    package = types.ModuleType("vllm")
    package.__path__ = [f"{root}/vllm"]
    sys.modules["vllm"] = package
    for name in _STAND_INS:
        sys.modules[name] = MagicMock(name=name)
    from vllm.core import block_manager_v1, scheduler

    scheduler.time = _CLOCK
    logging.getLogger("vllm").setLevel(logging.ERROR)
    block_manager_v1.set = _OrderedSet


class VllmV0Scheduler:
    """vLLM's V0 ``Scheduler`` and output processor with this package's types on the outside.

    Parameters
    ----------
    scheduler : V0SchedulerConfig
        Its `chunk_alignment` must be 1, because the release knows none.
    cache : V0CacheConfig
    """

    def __init__(self, scheduler: V0SchedulerConfig, cache: V0CacheConfig) -> None:
        from vllm.config import CacheConfig, SchedulerConfig
        from vllm.core.scheduler import Scheduler
        from vllm.engine.output_processor.single_step import SingleStepOutputProcessor
        from vllm.engine.output_processor.stop_checker import StopChecker
        from vllm.utils import Device

        if scheduler.chunk_alignment != 1:
            raise ValueError(
                f"chunk_alignment is {scheduler.chunk_alignment}: vLLM 0.5.1 has none (1)"
            )
        self._config = SchedulerConfig(
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_num_seqs=scheduler.max_num_seqs,
            max_model_len=scheduler.max_model_len,
            use_v2_block_manager=scheduler.use_v2_block_manager,
            num_lookahead_slots=scheduler.num_lookahead_slots,
            delay_factor=scheduler.delay_factor,
            enable_chunked_prefill=scheduler.enable_chunked_prefill,
            preemption_mode=scheduler.preemption_mode,
        )
        cache_config = CacheConfig(cache.block_size, 1.0, 1, "auto")
        cache_config.num_gpu_blocks = cache.num_gpu_blocks
        cache_config.num_cpu_blocks = cache.num_cpu_blocks
        self._scheduler = Scheduler(self._config, cache_config, None)
        # The scheduler leaves the watermark at its default; the manager takes any.
        self._manager = type(self._scheduler.block_manager)(
            block_size=cache.block_size,
            num_gpu_blocks=cache.num_gpu_blocks,
            num_cpu_blocks=cache.num_cpu_blocks,
            watermark=cache.watermark,
        )
        self._scheduler.block_manager = self._manager
        self._cache = cache
        self._devices = {"gpu": Device.GPU, "cpu": Device.CPU}
        self._v2 = scheduler.use_v2_block_manager
        if not self._v2:
            self._blocks = {
                "gpu": list(self._manager.gpu_allocator.free_blocks),
                "cpu": list(self._manager.cpu_allocator.free_blocks),
            }
        self._seq_ids = itertools.count()
        self._processor = SingleStepOutputProcessor(
            self._config,
            detokenizer=None,
            scheduler=[self._scheduler],
            seq_counter=self._seq_ids,
            stop_checker=StopChecker(scheduler.max_model_len, lambda seq: None),
        )
        self._planned: tuple[Any, Any] | None = None

    def add_seq_group(self, request: SequenceGroupRequest) -> None:
        """Queue a request."""
        from vllm.sampling_params import SamplingParams
        from vllm.sequence import Sequence as VllmSequence
        from vllm.sequence import SequenceGroup

        wanted = request.sampling_params
        params = SamplingParams(
            n=request.best_of,
            temperature=1.0,
            max_tokens=wanted.max_tokens,
            min_tokens=wanted.min_tokens,
            stop_token_ids=list(wanted.stop_token_ids),
            ignore_eos=wanted.eos_token_id is None,
            detokenize=False,
        )
        params.use_beam_search = request.use_beam_search
        inputs = {"prompt": None, "prompt_token_ids": list(request.prompt_token_ids)}
        seq = VllmSequence(next(self._seq_ids), inputs, self._cache.block_size, wanted.eos_token_id)
        self._scheduler.add_seq_group(
            SequenceGroup(
                request_id=request.request_id,
                seqs=[seq],
                sampling_params=params,
                arrival_time=request.arrival_time,
            )
        )

    def abort_seq_group(self, request_ids: Sequence[str]) -> None:
        """End requests from outside."""
        self._scheduler.abort_seq_group(request_ids)

    def schedule(self, now: float) -> V0SchedulerOutput:
        """Plan one step."""
        _CLOCK.now = now
        try:
            metadata, output = self._scheduler.schedule()
        except (AssertionError, RuntimeError, ValueError, IndexError) as error:
            raise V0SchedulingError(_rule(error), str(error)) from error
        self._planned = (metadata, output)
        finished = self._scheduler.get_and_reset_finished_requests_ids()
        return V0SchedulerOutput(
            scheduled_seq_groups=tuple(
                ScheduledSequenceGroup(
                    request_id=item.seq_group.request_id,
                    token_chunk_size=item.token_chunk_size,
                    is_prompt=meta.is_prompt,
                    do_sample=meta.do_sample,
                    block_tables={key: tuple(blocks) for key, blocks in meta.block_tables.items()},
                )
                for item, meta in zip(output.scheduled_seq_groups, metadata, strict=True)
            ),
            num_prefill_groups=output.num_prefill_groups,
            num_batched_tokens=output.num_batched_tokens,
            blocks_to_swap_in=_pairs(output.blocks_to_swap_in),
            blocks_to_swap_out=_pairs(output.blocks_to_swap_out),
            blocks_to_copy=_pairs(output.blocks_to_copy),
            ignored_request_ids=tuple(g.request_id for g in output.ignored_seq_groups),
            num_lookahead_slots=self._config.num_lookahead_slots,
            running_queue_size=output.running_queue_size,
            preempted=output.preempted,
            finished_request_ids=tuple(finished),
        )

    def update_from_output(
        self, output: V0SchedulerOutput, sampled: Mapping[str, tuple[SequenceSample, ...]]
    ) -> tuple[SequenceGroupOutput, ...]:
        """Take in the samples of every scheduled group that was to sample."""
        assert self._planned is not None
        metadata, plan = self._planned
        results = []
        for item, meta in zip(plan.scheduled_seq_groups, metadata, strict=True):
            group = item.seq_group
            group.update_num_computed_tokens(item.token_chunk_size)
            outputs: tuple[SequenceOutput, ...] = ()
            if meta.do_sample:
                outputs = self._process(group, sampled[group.request_id])
            results.append(
                SequenceGroupOutput(
                    request_id=group.request_id, outputs=outputs, finished=group.is_finished()
                )
            )
        self._scheduler.free_finished_seq_groups()
        return tuple(results)

    def _process(self, group: Any, samples: Sequence[SequenceSample]) -> tuple[SequenceOutput, ...]:
        from vllm.sequence import CompletionSequenceGroupOutput, Logprob
        from vllm.sequence import SequenceOutput as VllmSequenceOutput
        from vllm.sequence import SequenceStatus as VllmSequenceStatus

        parents = [seq.seq_id for seq in group.get_seqs(VllmSequenceStatus.RUNNING)]
        before = set(group.seqs_dict)
        native = CompletionSequenceGroupOutput(
            samples=[
                VllmSequenceOutput(s.parent_seq_id, s.token_id, {s.token_id: Logprob(0.0)})
                for s in samples
            ],
            prompt_logprobs=None,
        )
        # Beams are chosen by the caller, so the processor must not choose again by score.
        beams, group.sampling_params.use_beam_search = group.sampling_params.use_beam_search, False
        self._processor.process_outputs(group, [native])
        group.sampling_params.use_beam_search = beams
        forks = iter([seq for seq in group.get_seqs() if seq.seq_id not in before])
        outputs = []
        for parent in parents:
            tokens = [s.token_id for s in samples if s.parent_seq_id == parent]
            for index, token in enumerate(tokens):
                last = index == len(tokens) - 1
                seq = group.seqs_dict[parent] if last else next(forks)
                reason = VllmSequenceStatus.get_finished_reason(seq.status)
                outputs.append(
                    SequenceOutput(
                        seq_id=seq.seq_id,
                        parent_seq_id=parent,
                        new_token_id=token,
                        finish_reason=None if reason is None else _FINISH_REASONS[reason],
                    )
                )
        return tuple(outputs)

    def snapshot(self) -> V0Snapshot:
        """Return the state as far as checks compare it."""
        scheduler = self._scheduler
        queues = (scheduler.waiting, scheduler.running, scheduler.swapped)
        waiting, running, swapped = (tuple(g.request_id for g in queue) for queue in queues)
        tables, free, counts = self._v2_state() if self._v2 else self._v1_state()
        return V0Snapshot(
            waiting=waiting,
            running=running,
            swapped=swapped,
            sequences={
                group.request_id: tuple(
                    SequenceSnapshot(
                        seq_id=seq.seq_id,
                        status=SequenceStatus(int(seq.status)),
                        is_prefill=seq.is_prefill(),
                        num_computed_tokens=seq.data.get_num_computed_tokens(),
                        output_token_ids=tuple(seq.get_output_token_ids()),
                    )
                    for seq in group.get_seqs()
                )
                for queue in queues
                for group in queue
            },
            gpu_block_tables=tables["gpu"],
            cpu_block_tables=tables["cpu"],
            free_gpu_blocks=free["gpu"],
            free_cpu_blocks=free["cpu"],
            gpu_ref_counts=counts["gpu"],
            cpu_ref_counts=counts["cpu"],
            prev_time=scheduler.prev_time,
            last_prompt_latency=scheduler.last_prompt_latency,
            prev_prompt=scheduler.prev_prompt,
        )

    def _v1_state(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        tables: dict[str, dict[int, tuple[int, ...]]] = {"gpu": {}, "cpu": {}}
        for seq_id, blocks in self._manager.block_tables.items():
            device = "gpu" if blocks[0].device == self._devices["gpu"] else "cpu"
            tables[device][seq_id] = tuple(block.block_number for block in blocks)
        free = {
            "gpu": tuple(b.block_number for b in reversed(self._manager.gpu_allocator.free_blocks)),
            "cpu": tuple(b.block_number for b in reversed(self._manager.cpu_allocator.free_blocks)),
        }
        counts = {
            device: tuple(block.ref_count for block in blocks)
            for device, blocks in self._blocks.items()
        }
        return tables, free, counts

    def _v2_state(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        tables: dict[str, dict[int, tuple[int, ...]]] = {"gpu": {}, "cpu": {}}
        start = {"gpu": 0, "cpu": self._cache.num_gpu_blocks}
        for seq_id, table in self._manager.block_tables.items():
            blocks = table.physical_block_ids
            device = "gpu" if blocks[0] < self._cache.num_gpu_blocks else "cpu"
            tables[device][seq_id] = tuple(block - start[device] for block in blocks)
        allocators = {
            name: self._manager.block_allocator._allocators[device]
            for name, device in self._devices.items()
        }
        free = {
            name: tuple(block - start[name] for block in allocator._free_block_indices)
            for name, allocator in allocators.items()
        }
        counts = {
            name: tuple(
                allocator.refcounter.get(block) for block in sorted(allocator.all_block_ids)
            )
            for name, allocator in allocators.items()
        }
        return tables, free, counts


def _pairs(moves: Iterable[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((int(source), int(target)) for source, target in moves)


def _rule(error: Exception) -> V0SchedulingRule:
    """Return which rule an exception stands for, told by where it was raised.

    Raises
    ------
    Exception
        The error itself, if it stands for none.
    """
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = frame.line or ""
    if isinstance(error, RuntimeError) and frame.name == "_swap_out":
        return "swap_space"
    if type(error).__name__ == "NoFreeBlocksError":
        return "pool_exhausted"
    if isinstance(error, IndexError) and frame.name == "append_token_ids":
        return "append_past_table"
    if isinstance(error, AssertionError):
        if frame.name == "_preempt_by_recompute":
            return "recompute_of_forks"
        if frame.name == "schedule" and "len(seqs) == 1" in line:
            return "prefill_of_forks"
        if frame.name in ("_schedule_default", "_schedule_chunked_prefill"):
            if "num_batched_tokens" in line:
                return "token_budget"
            if "num_curr_seqs" in line:
                return "seq_budget"
    raise error


class VllmV0Factory:
    """Makes V0 schedulers of the loaded wheel."""

    name = "vllm-v0"

    def make_v0_scheduler(
        self, scheduler: V0SchedulerConfig, cache: V0CacheConfig
    ) -> VllmV0Scheduler:
        """Return a fresh scheduler."""
        return VllmV0Scheduler(scheduler, cache)


def main() -> None:
    """Serve the line protocol on standard input and output; the argument is the wheel's folder."""
    load_wheel(sys.argv[1])
    serve(VllmV0Factory(), version="0.5.1")


if __name__ == "__main__":
    main()
