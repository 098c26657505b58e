"""The fast path behind the adapter protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from servespec.conformance.adapters.base import AnyArray, AttentionUnderTest, Weights
from servespec.conformance.adapters.fast_attention import make_attention
from servespec.conformance.workloads.workload_attention import AttentionConfig
from servespec.fast.backends.registry import choose
from servespec.fast.batch import InputBatch
from servespec.fast.batch.record import moves_of
from servespec.fast.engine import Engine
from servespec.fast.kernels.operations import operations
from servespec.fast.scheduling.v0 import Scheduler as V0Scheduler
from servespec.fast.scheduling.v1 import Scheduler
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
)
from servespec.reference.contracts.v0 import V0CacheConfig, V0SchedulerConfig

__all__ = ["FastBatch", "FastImplementation", "FastScheduler", "poisoned"]


class FastScheduler:
    """`servespec.fast.scheduling.v1.Scheduler`, its plans as contract values.

    Parameters
    ----------
    scheduler : Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        self.scheduler.add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan one step."""
        return self.scheduler.schedule(throttle_prefills).to_contract()

    def update_from_output(
        self, output: SchedulerOutput, sampled: Mapping[str, tuple[int, ...]]
    ) -> tuple[EngineCoreOutput, ...]:
        """Take in the sampled tokens."""
        return self.scheduler.update_from_output(output, sampled)

    def update_draft_token_ids(self, drafts: Mapping[str, tuple[int, ...]]) -> None:
        """Take in draft tokens."""
        self.scheduler.update_draft_token_ids(drafts)

    def finish_requests(self, request_ids: Sequence[str], status: RequestStatus) -> None:
        """End requests from outside."""
        self.scheduler.finish_requests(request_ids, status)

    def set_pause_state(self, state: PauseState) -> None:
        """Stop or resume admission or everything."""
        self.scheduler.set_pause_state(state)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all prefix hashes."""
        return self.scheduler.reset_prefix_cache(reset_running_requests)

    def snapshot(self) -> SchedulerSnapshot:
        """Return the state as far as checks compare it."""
        return self.scheduler.snapshot()


class FastBatch:
    """`servespec.fast.batch.InputBatch`, its steps as records.

    Parameters
    ----------
    batch : InputBatch
    """

    def __init__(self, batch: InputBatch) -> None:
        self.batch = batch

    def prepare(self, output: SchedulerOutput) -> BatchRecord | None:
        """Make inputs and metadata of one step, with nothing left in memory but what is owned."""
        self.batch.poison()
        if not output.num_scheduled_tokens:
            self.batch.update_states(output)
            return None
        self.batch.prepare(output)
        return self.batch.record()

    def state_saves(
        self, sampled: Mapping[str, tuple[int, ...]]
    ) -> tuple[tuple[StateMove, ...], ...]:
        """Return the copies of aligned states that follow the step."""
        req_ids = self.batch.req_ids
        return tuple(moves_of(req_ids, moves) for moves in self.batch.state_saves(sampled))

    def append_sampled(self, sampled: Mapping[str, tuple[int, ...]]) -> None:
        """Take in the tokens that rows keep."""
        self.batch.append_sampled(sampled)


def poisoned(engine: Engine) -> Engine:
    """Fill the pages that nobody has written yet with NaN: a stale read shows in every run alike.

    Parameters
    ----------
    engine : Engine
        Fresh; returned.
    """
    for pages in engine.memory.pages:
        pages[:-1].fill_(0xFF)  # every float format reads all ones as NaN; the last page stays zero
    return engine


class FastImplementation:
    """The fast path as an implementation.

    Attributes
    ----------
    make_kernels : callable
        Returns the operations that have kernels, by name; missing where no backend runs.
    kernel_device : str
        Where their tensors lie; missing where no backend runs.
    """

    name = "fast"

    def __init__(self) -> None:
        backend = choose()
        self._device = "cpu" if backend is None else backend.device
        if backend is not None:
            # Without Triton there are no kernels to check, and so no factory for them.
            self.make_kernels = partial(operations, backend)
            self.kernel_device = backend.device

    def make_scheduler(
        self,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        speculative: SpeculativeConfig | None = None,
    ) -> FastScheduler:
        """Return a fresh scheduler."""
        return FastScheduler(Scheduler(scheduler, cache, speculative))

    def make_v0_scheduler(self, scheduler: V0SchedulerConfig, cache: V0CacheConfig) -> V0Scheduler:
        """Return a fresh V0 scheduler."""
        return V0Scheduler(scheduler, cache)

    def make_batch(self, config: EngineConfig) -> FastBatch:
        """Return an empty batch."""
        return FastBatch(InputBatch(config))

    def make_attention(
        self,
        config: AttentionConfig,
        dtype: str = "float32",
        key_scale: AnyArray | None = None,
        value_scale: AnyArray | None = None,
    ) -> AttentionUnderTest:
        """Return an attention layer and its cache."""
        return make_attention(config, dtype, key_scale, value_scale)

    def make_engine(
        self, model: ModelConfig, weights: Weights, config: EngineConfig, dtype: str = "float32"
    ) -> Engine:
        """Return a fresh engine, on the device of the backend that ``SERVESPEC_BACKEND`` names."""
        return poisoned(Engine(model, weights, config, dtype, self._device))
