"""What an implementation offers to be checked.

An implementation is any object with a `name` and some of the factories below; suites whose
factory is missing are left out and said to be. `servespec check --impl package.module:object`
imports such an object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from servespec.conformance.workloads.workload_attention import AttentionConfig
from servespec.reference.contracts import (
    AttentionMetadata,
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

__all__ = [
    "AnyArray",
    "AttentionFactory",
    "AttentionUnderTest",
    "BatchFactory",
    "BatchUnderTest",
    "EngineFactory",
    "EngineUnderTest",
    "SchedulerFactory",
    "SchedulerUnderTest",
    "StateSaving",
    "Weights",
]

Weights = Mapping[str, npt.NDArray[np.float32]]
"""Parameters by their Hugging Face checkpoint names."""

AnyArray = npt.NDArray[Any]


class SchedulerUnderTest(Protocol):
    """A scheduler on mutable state, driven without a model."""

    def add_request(self, request: Request) -> None:
        """Queue a request."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan one step."""

    def update_from_output(
        self, output: SchedulerOutput, sampled: Mapping[str, tuple[int, ...]]
    ) -> tuple[EngineCoreOutput, ...]:
        """Take in the tokens sampled for every scheduled request; () for a row still prefilling."""

    def update_draft_token_ids(self, drafts: Mapping[str, tuple[int, ...]]) -> None:
        """Take in draft tokens for the next step."""

    def finish_requests(self, request_ids: Sequence[str], status: RequestStatus) -> None:
        """End requests from outside; ids that are not alive are ignored."""

    def set_pause_state(self, state: PauseState) -> None:
        """Stop or resume admission or everything."""

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all prefix hashes; False if blocks in use forbid it."""

    def snapshot(self) -> SchedulerSnapshot:
        """Return the state as far as checks compare it."""


class BatchUnderTest(Protocol):
    """The worker's persistent batch, driven by schedules without a model."""

    def prepare(self, output: SchedulerOutput) -> BatchRecord | None:
        """Update the rows, reorder them, and make inputs and metadata of one step.

        A step without tokens only drops the rows that ended, and gives None.
        """

    def append_sampled(self, sampled: Mapping[str, tuple[int, ...]]) -> None:
        """Take in the tokens that rows of the last step keep."""


@runtime_checkable
class StateSaving(Protocol):
    """What a batch may offer beside: the copies of aligned states that follow a step."""

    def state_saves(
        self, sampled: Mapping[str, tuple[int, ...]]
    ) -> tuple[tuple[StateMove, ...], ...]:
        """Return the copies of each GDN group to make before `append_sampled`.

        Nothing at all where states are not aligned.
        """


class AttentionUnderTest(Protocol):
    """One attention layer and its cache; everything given and returned is a NumPy array.

    G is the number of K/V heads and D their dimension. Values that go in are float32, exact in the
    dtype asked for.
    """

    def load(self, key: AnyArray, value: AnyArray) -> None:
        """Overwrite the whole cache.

        Both are ``[num_blocks, block_size, G, D]`` float32, NaN where nothing may be read. With
        INT8 K/V they are int8 memory in the NZ layout.
        """

    def pages(self) -> tuple[AnyArray, AnyArray]:
        """Return the whole cache, as `load` takes it."""

    def write(self, key: AnyArray, value: AnyArray, slot_mapping: Sequence[int]) -> None:
        """Write ``[T, G, D]`` tokens, quantised with INT8 K/V; a slot of -1 writes nothing."""

    def dequantized(
        self, block_tables: Sequence[Sequence[int]], seq_lens: Sequence[int]
    ) -> tuple[AnyArray, AnyArray]:
        """Return what the rows read back, ``[sum of seq_lens, G, D]``; asked with INT8 K/V only."""

    def attend(
        self, query: AnyArray, key: AnyArray, value: AnyArray, metadata: AttentionMetadata
    ) -> AnyArray:
        """Attend to the cache, which holds the step's own tokens already.

        `query` is ``[T, heads, D]`` and so is the result; `key` and `value` are the step's own.
        Scores are scaled by ``D ** -0.5``. Rows behind the last token have no query and no key.
        """

    def attend_packed(
        self,
        query: AnyArray,
        key: AnyArray,
        value: AnyArray,
        actual_seq_lengths: Sequence[int],
        actual_seq_lengths_kv: Sequence[int],
    ) -> AnyArray:
        """Attend with packed K and V, ``[S, G, D]``; both lengths are cumulative.

        Not asked with INT8 K/V.
        """


class EngineUnderTest(Protocol):
    """A scheduler, a batch and a model together."""

    def add_request(self, request: Request) -> None:
        """Queue a request."""

    def step(self, forced_token_ids: Mapping[str, tuple[int, ...]] | None = None) -> StepRecord:
        """Run one step.

        With `forced_token_ids` the bookkeeping continues from those tokens, while the record's
        `sampled_token_ids` still names the engine's own choice: so a tie does not end the
        comparison. Requests that keep no token in this step are not looked at.
        """

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests from outside."""

    def has_unfinished_requests(self) -> bool:
        """Whether any request still waits or runs."""

    def snapshot(self) -> SchedulerSnapshot:
        """Return the scheduler's state as far as checks compare it."""


class SchedulerFactory(Protocol):
    """An implementation that can be asked for a scheduler."""

    name: str

    def make_scheduler(
        self,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        speculative: SpeculativeConfig | None = None,
    ) -> SchedulerUnderTest:
        """Return a fresh scheduler."""


class BatchFactory(Protocol):
    """An implementation that can be asked for a persistent batch."""

    name: str

    def make_batch(self, config: EngineConfig) -> BatchUnderTest:
        """Return an empty batch."""


class AttentionFactory(Protocol):
    """An implementation that can be asked for attention alone."""

    name: str

    def make_attention(
        self,
        config: AttentionConfig,
        dtype: str = "float32",
        key_scale: AnyArray | None = None,
        value_scale: AnyArray | None = None,
    ) -> AttentionUnderTest:
        """Return a layer.

        The scales, ``[G, D]`` float32 with values of bfloat16, come with INT8 K/V.
        """


class EngineFactory(Protocol):
    """An implementation that can be asked for an engine."""

    name: str

    def make_engine(
        self, model: ModelConfig, weights: Weights, config: EngineConfig, dtype: str = "float32"
    ) -> EngineUnderTest:
        """Return a fresh engine on the given weights; `dtype` is ``float32`` or ``bfloat16``."""
