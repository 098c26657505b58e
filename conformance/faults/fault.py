"""A planted fault: the fast path with one thing changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from servespec.conformance.adapters.base import AnyArray, AttentionUnderTest, Weights
from servespec.conformance.adapters.fast import FastBatch, FastScheduler, poisoned
from servespec.conformance.adapters.fast_attention import FastAttention, make_attention
from servespec.conformance.workloads.workload_attention import AttentionConfig
from servespec.fast.batch import InputBatch
from servespec.fast.batch.inputs import StepInputs
from servespec.fast.cache.memory import PagedKV
from servespec.fast.engine import Engine
from servespec.fast.kernels.attention import AttentionPlan
from servespec.fast.scheduling.v0 import Scheduler as V0Scheduler
from servespec.fast.scheduling.v1 import Scheduler
from servespec.reference.contracts import (
    AttentionMetadata,
    BatchRecord,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    Request,
    SchedulerConfig,
    SchedulerOutput,
    SpeculativeConfig,
    StepRecord,
)
from servespec.reference.contracts.v0 import V0CacheConfig, V0SchedulerConfig

__all__ = ["Fault", "planted", "wrap"]

Hook = Literal[
    "configuration",
    "scheduler",
    "v0_scheduler",
    "request",
    "weights",
    "inputs",
    "batch",
    "record",
    "attention_config",
    "attention_plan",
    "before_step",
]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An implementation that is the fast path but for one thing.

    Attributes
    ----------
    name : str
    what : str
        What it does wrong, in one line.
    source : str
        A public report of a fault of this kind.
    suites : tuple of str
        Suites that must find it; none for a negative control, which no suite may report.
    rarity : int
        Suites may take so many times as many cases to find it as others.
    configuration : callable, optional
        Changes the scheduler's configuration.
    scheduler, v0_scheduler : callable, optional
        Changes in place what a new scheduler is made of; an engine's stays right.
    request : callable, optional
        Changes a request on arrival.
    weights : callable, optional
        Changes the weights.
    inputs : callable, optional
        Changes in place what the model reads of a step; the record stays right.
    batch : callable, optional
        Changes in place what a new batch is made of.
    record : callable, optional
        Changes the record of a batch.
    attention_config : callable, optional
        Changes the configuration of an attention layer.
    attention_plan : callable, optional
        Changes which rows of a cache an attention layer reads.
    before_step : callable, optional
        Called before each step of an engine.
    """

    name: str
    what: str
    source: str
    suites: tuple[str, ...]
    rarity: int = 1
    configuration: Callable[[SchedulerConfig], SchedulerConfig] | None = None
    scheduler: Callable[[Scheduler], None] | None = None
    v0_scheduler: Callable[[V0Scheduler], None] | None = None
    request: Callable[[Request], Request] | None = None
    weights: Callable[[Weights, ModelConfig], Weights] | None = None
    inputs: Callable[[StepInputs, EngineConfig], None] | None = None
    batch: Callable[[InputBatch], None] | None = None
    record: Callable[[BatchRecord], BatchRecord] | None = None
    attention_config: Callable[[AttentionConfig], AttentionConfig] | None = None
    attention_plan: Callable[[AttentionPlan, PagedKV], AttentionPlan] | None = None
    before_step: Callable[[], None] | None = None

    def make_scheduler(
        self,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        speculative: SpeculativeConfig | None = None,
    ) -> FastScheduler:
        """Return a fast scheduler with the fault."""
        made = Scheduler(self._changed(scheduler), cache, speculative)
        if self.scheduler is not None:
            self.scheduler(made)
        return _Scheduler(made, self)

    def make_v0_scheduler(self, scheduler: V0SchedulerConfig, cache: V0CacheConfig) -> V0Scheduler:
        """Return a fast V0 scheduler with the fault."""
        made = V0Scheduler(scheduler, cache)
        if self.v0_scheduler is not None:
            self.v0_scheduler(made)
        return made

    def make_batch(self, config: EngineConfig) -> FastBatch:
        """Return a fast batch with the fault."""
        return FastBatch(_Batch(config, self))

    def make_attention(
        self,
        config: AttentionConfig,
        dtype: str = "float32",
        key_scale: AnyArray | None = None,
        value_scale: AnyArray | None = None,
    ) -> AttentionUnderTest:
        """Return a fast attention layer with the fault."""
        if self.attention_config is not None:
            config = self.attention_config(config)
        if self.attention_plan is not None and key_scale is None:
            return _Attention(config, dtype, self.attention_plan)
        return make_attention(config, dtype, key_scale, value_scale)

    def make_engine(
        self, model: ModelConfig, weights: Weights, config: EngineConfig, dtype: str = "float32"
    ) -> Engine:
        """Return a fast engine with the fault."""
        config = replace(config, scheduler=self._changed(config.scheduler))
        if self.weights is not None:
            weights = self.weights(weights, model)
        return poisoned(_Engine(model, weights, config, dtype, self))

    def _changed(self, config: SchedulerConfig) -> SchedulerConfig:
        return config if self.configuration is None else self.configuration(config)


def planted(
    hook: Hook, what: str, *, source: str, suites: tuple[str, ...], rarity: int = 1
) -> Callable[[Callable[..., Any]], Fault]:
    """Return a decorator that turns what a hook does into a fault of the same name.

    Parameters
    ----------
    hook : str
        The attribute of `Fault` that the decorated function becomes.
    what, source, suites, rarity
        As for `Fault`.
    """

    def plant(change: Callable[..., Any]) -> Fault:
        hooks: dict[str, Any] = {hook: change}
        name = change.__name__
        return Fault(name=name, what=what, source=source, suites=suites, rarity=rarity, **hooks)

    return plant


def wrap(owner: object, method: str, change: Callable[..., Any]) -> None:
    """Replace a method of one object by a function that is given the method first."""
    setattr(owner, method, partial(change, getattr(owner, method)))


class _Scheduler(FastScheduler):
    def __init__(self, scheduler: Scheduler, fault: Fault) -> None:
        super().__init__(scheduler)
        self.fault = fault

    def add_request(self, request: Request) -> None:
        super().add_request(request if self.fault.request is None else self.fault.request(request))


class _Batch(InputBatch):
    def __init__(self, config: EngineConfig, fault: Fault) -> None:
        super().__init__(config)
        self.fault = fault
        self.config = config
        if fault.batch is not None:
            fault.batch(self)

    def prepare(self, output: SchedulerOutput) -> StepInputs:
        inputs = super().prepare(output)
        if self.fault.inputs is None:
            return inputs
        # The batch makes its record of the object it keeps, so the model gets another.
        copy = replace(
            inputs,
            attention=[replace(group) for group in inputs.attention],
            gdn=[replace(group) for group in inputs.gdn],
        )
        self.fault.inputs(copy, self.config)
        return copy

    def record(self) -> BatchRecord:
        record = super().record()
        return record if self.fault.record is None else self.fault.record(record)


class _Attention(FastAttention):
    def __init__(
        self,
        config: AttentionConfig,
        dtype: str,
        change: Callable[[AttentionPlan, PagedKV], AttentionPlan],
    ) -> None:
        super().__init__(config, dtype)
        self.change = change

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        return self.change(super().plan(metadata), self.kv)


class _Engine(Engine):
    def __init__(
        self, model: ModelConfig, weights: Weights, config: EngineConfig, dtype: str, fault: Fault
    ) -> None:
        super().__init__(model, weights, config, dtype)
        self.fault = fault
        self._batch = _Batch(config, fault)

    def add_request(self, request: Request) -> None:
        super().add_request(request if self.fault.request is None else self.fault.request(request))

    def step(self, forced_token_ids: Mapping[str, tuple[int, ...]] | None = None) -> StepRecord:
        if self.fault.before_step is not None:
            self.fault.before_step()
        return super().step(forced_token_ids)
