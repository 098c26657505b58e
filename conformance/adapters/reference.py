"""The reference behind the adapter protocol: pure values inside, methods outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from servespec.conformance.adapters.base import AnyArray, Weights
from servespec.conformance.adapters.reference_attention import ReferenceAttention
from servespec.conformance.adapters.v0_reference import ReferenceV0Scheduler
from servespec.conformance.cases.case import TinyModel
from servespec.conformance.workloads.workload_attention import AttentionConfig
from servespec.reference import engine
from servespec.reference.batch import persistent, prepare
from servespec.reference.contracts import (
    BatchRecord,
    CacheConfig,
    EngineConfig,
    EngineCoreOutput,
    ModelConfig,
    PauseState,
    Request,
    RequestStatus,
    SchedulerConfig,
    SchedulerOutput,
    SchedulerSnapshot,
    SpeculativeConfig,
    StateMove,
    StepRecord,
)
from servespec.reference.contracts.v0 import V0CacheConfig, V0SchedulerConfig
from servespec.reference.models import tiny
from servespec.reference.models.qwen3_5 import Qwen3_5, from_weights
from servespec.reference.scheduling import v1

__all__ = [
    "ReferenceBatch",
    "ReferenceEngine",
    "ReferenceImplementation",
    "ReferenceScheduler",
    "tiny_weights",
]


class ReferenceScheduler:
    """`servespec.reference.scheduling.v1` with its state kept in `state`."""

    def __init__(
        self,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        self.state = v1.initial_state(scheduler, cache, speculative)

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        self.state = v1.add_request(self.state, request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan one step."""
        self.state, output = v1.schedule(self.state, throttle_prefills)
        return output

    def update_from_output(
        self, output: SchedulerOutput, sampled: Mapping[str, tuple[int, ...]]
    ) -> tuple[EngineCoreOutput, ...]:
        """Take in the sampled tokens."""
        self.state, outputs = v1.update_from_output(self.state, output, sampled)
        return outputs

    def update_draft_token_ids(self, drafts: Mapping[str, tuple[int, ...]]) -> None:
        """Take in draft tokens."""
        self.state = v1.update_draft_token_ids(self.state, drafts)

    def finish_requests(self, request_ids: Sequence[str], status: RequestStatus) -> None:
        """End requests from outside."""
        self.state = v1.finish_requests(self.state, request_ids, status)

    def set_pause_state(self, state: PauseState) -> None:
        """Stop or resume admission or everything."""
        self.state = v1.set_pause_state(self.state, state)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all prefix hashes."""
        self.state, done = v1.reset_prefix_cache(self.state, reset_running_requests)
        return done

    def has_unfinished_requests(self) -> bool:
        """Whether any request still waits or runs."""
        return v1.has_unfinished_requests(self.state)

    def snapshot(self) -> SchedulerSnapshot:
        """Return the state as far as checks compare it."""
        return v1.snapshot(self.state)


class ReferenceBatch:
    """`servespec.reference.batch` with its rows kept in `batch`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.batch = persistent.empty_batch()

    def prepare(self, output: SchedulerOutput) -> BatchRecord | None:
        """Make inputs and metadata of one step."""
        if not output.num_scheduled_tokens:
            self.batch = persistent.update_states(self.batch, output)
            return None
        self.batch, record = prepare.prepare(self.batch, output, self.config)
        return record

    def state_saves(
        self, sampled: Mapping[str, tuple[int, ...]]
    ) -> tuple[tuple[StateMove, ...], ...]:
        """Return the copies of aligned states that follow the step."""
        return prepare.state_saves(self.batch, sampled, self.config)

    def append_sampled(self, sampled: Mapping[str, tuple[int, ...]]) -> None:
        """Take in the tokens that rows keep."""
        self.batch = persistent.append_sampled(self.batch, sampled)


class ReferenceEngine:
    """`servespec.reference.engine` with its state kept in `state`."""

    def __init__(self, model: Qwen3_5, config: EngineConfig) -> None:
        self.state = engine.initial_state(model, config)

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        self.state = engine.add_request(self.state, request)

    def step(self, forced_token_ids: Mapping[str, tuple[int, ...]] | None = None) -> StepRecord:
        """Run one step."""
        self.state, record = engine.step(self.state, forced_token_ids)
        return record

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests from outside."""
        self.state = engine.abort_requests(self.state, request_ids)

    def has_unfinished_requests(self) -> bool:
        """Whether any request still waits or runs."""
        return engine.has_unfinished_requests(self.state)

    def snapshot(self) -> SchedulerSnapshot:
        """Return the scheduler's state as far as checks compare it."""
        return engine.snapshot(self.state)


@lru_cache(maxsize=4)
def tiny_weights(model: TinyModel) -> Weights:
    """Return a tiny model's weights by their checkpoint names."""
    return tiny.weights(model.config, model.seed)


class ReferenceImplementation:
    """The reference as an implementation like any other."""

    name = "reference"

    def __init__(self) -> None:
        # Kept beside the weights it was made of, because an id may be used again.
        self._model: tuple[ModelConfig, Weights, Qwen3_5] | None = None

    def make_scheduler(
        self,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        speculative: SpeculativeConfig | None = None,
    ) -> ReferenceScheduler:
        """Return a fresh scheduler."""
        return ReferenceScheduler(scheduler, cache, speculative)

    def make_v0_scheduler(
        self, scheduler: V0SchedulerConfig, cache: V0CacheConfig
    ) -> ReferenceV0Scheduler:
        """Return a fresh V0 scheduler."""
        return ReferenceV0Scheduler(scheduler, cache)

    def make_batch(self, config: EngineConfig) -> ReferenceBatch:
        """Return an empty batch."""
        return ReferenceBatch(config)

    def make_attention(
        self,
        config: AttentionConfig,
        dtype: str = "float32",
        key_scale: AnyArray | None = None,
        value_scale: AnyArray | None = None,
    ) -> ReferenceAttention:
        """Return an attention layer; it computes in float64 whatever `dtype` says."""
        return ReferenceAttention(config, key_scale, value_scale)

    def make_engine(
        self, model: ModelConfig, weights: Weights, config: EngineConfig, dtype: str = "float32"
    ) -> ReferenceEngine:
        """Return a fresh engine; it computes in float64 whatever `dtype` says."""
        known = self._model
        if known is None or known[0] != model or known[1] is not weights:
            known = self._model = (model, weights, from_weights(model, weights))
        return ReferenceEngine(known[2], config)
