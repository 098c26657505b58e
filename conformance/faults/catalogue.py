"""Kinds of fault that real engines had, each planted in the fast path.

Numbers are of public issues and pull requests; the text is ours. Thread names without a project
are of vllm-project/vllm.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from servespec.conformance.adapters.base import Weights
from servespec.conformance.faults.fault import planted, wrap
from servespec.conformance.faults.v0 import V0_FAULTS
from servespec.conformance.workloads.workload_attention import AttentionConfig
from servespec.fast.batch import InputBatch
from servespec.fast.batch.block_table import BlockTable
from servespec.fast.batch.buffers import Array, StepBuffer
from servespec.fast.batch.inputs import StepInputs
from servespec.fast.cache.coordinator import PrefixHit
from servespec.fast.cache.memory import PagedKV
from servespec.fast.kernels.attention import AttentionPlan
from servespec.fast.scheduling.v1 import Scheduler
from servespec.reference.contracts import (
    AttentionState,
    BatchRecord,
    EngineConfig,
    ModelConfig,
    Request,
    SchedulerConfig,
)

__all__ = ["FAILURES", "FAULTS"]

_EVERYWHERE = ("engine", "model", "invariance")
_NUMBERS = ("engine", "model")


@planted(
    "configuration",
    "the scheduler gives one token less than the budget allows",
    source="#45414: a chunk rounded down until nothing is left",
    suites=("scheduling", "engine"),
)
def one_token_too_few(config: SchedulerConfig) -> SchedulerConfig:
    if config.token_budget == 1 or not config.enable_chunked_prefill:
        return config
    return replace(config, max_num_scheduled_tokens=config.token_budget - 1)


def _roll(tensor: torch.Tensor) -> torch.Tensor:
    return torch.roll(tensor, 1, dims=0)


@planted(
    "inputs",
    "a GDN layer reads the state slot of the row before",
    source="sglang PR#37836: states indexed by row though the grid is global",
    suites=_EVERYWHERE,
)
def state_of_another_request(inputs: StepInputs, config: EngineConfig) -> None:
    for group in inputs.gdn:
        group.state_indices = _roll(group.state_indices)


@planted(
    "inputs",
    "attention reads one key beyond the causal limit",
    source="nano-vllm PR#213: attention over keys not yet written",
    suites=_NUMBERS,
)
def one_key_too_many(inputs: StepInputs, config: EngineConfig) -> None:
    size = config.cache.kernel_block_size or config.cache.block_size
    room = min(group.block_table.shape[1] for group in inputs.attention) * size
    inputs.seq_lens = torch.clamp(inputs.seq_lens + 1, max=room)


@planted(
    "inputs",
    "attention leaves out the newest key of a row with history",
    source="a wrong bottom-right offset of the causal mask",
    suites=_NUMBERS,
)
def one_key_too_few(inputs: StepInputs, config: EngineConfig) -> None:
    inputs.seq_lens = torch.maximum(inputs.seq_lens - 1, inputs.num_scheduled_tokens)


@planted(
    "inputs",
    "a fresh request starts from what its state slot held before",
    source="#51562: a one-token first chunk classed as a decode",
    suites=_NUMBERS,
)
def stale_state(inputs: StepInputs, config: EngineConfig) -> None:
    for group in inputs.gdn:
        group.has_initial_state = torch.ones_like(group.has_initial_state)


@planted(
    "inputs",
    "every chunk starts from a zero state",
    source="#53142: a resumed request reads a column that was never written",
    suites=_EVERYWHERE,
)
def lost_state(inputs: StepInputs, config: EngineConfig) -> None:
    for group in inputs.gdn:
        group.has_initial_state = torch.zeros_like(group.has_initial_state)


@planted(
    "inputs",
    "attention reads the block table of the row before",
    source="vllm-ascend#9727: host and device tables out of step after condensing",
    suites=_EVERYWHERE,
)
def stale_block_table(inputs: StepInputs, config: EngineConfig) -> None:
    for group in inputs.attention:
        group.block_table = _roll(group.block_table)


@planted(
    "inputs",
    "K and V are written to the slot of the token before",
    source="PR#51031: slots made with the manager's block size, read with the kernel's",
    suites=_NUMBERS,
)
def shifted_slots(inputs: StepInputs, config: EngineConfig) -> None:
    for group in inputs.attention:
        group.slot_mapping = _roll(group.slot_mapping)


@planted(
    "inputs",
    "rotary positions of every chunk start from zero",
    source="a chunk treated as a new prompt",
    suites=_NUMBERS,
)
def restarted_positions(inputs: StepInputs, config: EngineConfig) -> None:
    starts = inputs.num_computed_tokens.repeat_interleave(inputs.num_scheduled_tokens)
    inputs.positions = inputs.positions - starts


class _StaleBuffer(StepBuffer):
    def put(self, values: Array, rows: int | None = None, fill: int = 0) -> None:
        super().put(values)
        self.reserve(len(values) if rows is None else rows)


@planted(
    "batch",
    "what stands behind the rows of a padded step is left over from an earlier one",
    source="vllm-ascend#10901: a stale block table in a dummy run",
    suites=("batch",),
)
def stale_padding(batch: InputBatch) -> None:
    def stale(buffer: StepBuffer) -> StepBuffer:
        return _StaleBuffer(buffer.host.shape, buffer.host.dtype, torch.device("cpu"))

    buffers = batch._builder.buffers
    for name, value in vars(buffers).items():
        many = isinstance(value, list)
        setattr(buffers, name, [stale(each) for each in value] if many else stale(value))


class _StaleTable(BlockTable):
    def replace(self, slot: int, block_ids: Sequence[int]) -> None:
        self.num_blocks[slot] = 0
        self.append(slot, block_ids)


@planted(
    "batch",
    "a resumed request's shorter block table keeps the end of its longer one",
    source="tt-metal#56324: the tail of a table not cleared, K and V in stale blocks",
    suites=("batch",),
)
def stale_table_tail(batch: InputBatch) -> None:
    batch._store.tables[:] = [
        _StaleTable(
            len(table.ids),
            table.ids.shape[1] // table.ratio,
            table.block_size,
            table.kernel_block_size,
        )
        for table in batch._store.tables
    ]


@planted(
    "attention_plan",
    "attention reads zeros where it should read the last token of a page",
    source="a bound of a masked load that is one too small",
    suites=("attention",),
)
def last_slot_of_a_page(plan: AttentionPlan, kv: PagedKV) -> AttentionPlan:
    def changed(rows: torch.Tensor) -> torch.Tensor:
        last = rows % kv.rows_per_page % kv.block_size == kv.block_size - 1
        return rows.where(~last, kv.zero_row)

    return AttentionPlan(
        tuple(
            replace(group, key_rows=changed(group.key_rows), value_rows=changed(group.value_rows))
            for group in plan.groups
        )
    )


@planted(
    "attention_config",
    "new prompts attend to K and V that are not quantised, if no batch mate continues",
    source="vllm#51290: results that depend on the batch",
    suites=("attention",),
)
def own_values_as_they_were(config: AttentionConfig) -> AttentionConfig:
    return replace(config, int8_profile="pinned")


@planted(
    "record",
    "every step is labelled ChunkedPrefill",
    source="vllm-tt-plugin PR#67: a predicate on the count after the update",
    suites=("batch", "engine"),
)
def one_label(record: BatchRecord) -> BatchRecord:
    return replace(record, attn_state=AttentionState.CHUNKED_PREFILL)


@planted(
    "record",
    "the metadata names the slot after the one written",
    source="#53982: slots past a narrower group's table",
    suites=("batch", "engine"),
)
def reported_slots(record: BatchRecord) -> BatchRecord:
    groups = tuple(
        replace(group, slot_mapping=tuple(slot + 1 for slot in group.slot_mapping))
        for group in record.attention
    )
    return replace(record, attention=groups)


@planted(
    "configuration",
    "requests run in order of arrival whatever their priority",
    source="#49097: a request loses its turn",
    suites=("scheduling", "engine"),
)
def ignored_priority(config: SchedulerConfig) -> SchedulerConfig:
    return replace(config, policy="fcfs")


@planted(
    "configuration",
    "long prompts are not held back",
    source="PR#18957: chunk limits forgotten on one path",
    suites=("scheduling", "engine"),
)
def ignored_threshold(config: SchedulerConfig) -> SchedulerConfig:
    return replace(config, long_prefill_token_threshold=0)


@planted(
    "request",
    "prefix hashes leave the cache salt out",
    source="vllm-mlx PR#444: false prefix hits",
    suites=("scheduling",),
)
def shared_across_tenants(request: Request) -> Request:
    return replace(request, cache_salt=None)


@planted(
    "scheduler",
    "a request that is to compute the last block of a prefix hit again does so in place",
    source="PR#57128: the block that a drafter needs again is not dropped from a hit",
    suites=("scheduling", "cache"),
)
def recomputed_in_place(scheduler: Scheduler) -> None:
    cache = scheduler._state.cache
    size = cache.block_size

    def find_hit(original: Callable[[int], PrefixHit | None], slot: int) -> PrefixHit | None:
        hit = original(slot)
        if hit is None or cache.aligned or hit.num_tokens < size:
            return hit
        return replace(hit, num_tokens=hit.num_tokens - size)

    wrap(cache, "find_hit", find_hit)


@planted(
    "scheduler",
    "prefix hashes see the lowest byte of a token",
    source="vllm-mlx PR#444: tokens hashed modulo 256",
    suites=("scheduling",),
)
def hashed_in_a_byte(scheduler: Scheduler) -> None:
    cache = scheduler._state.cache

    def hashes(_: Callable[[int], list[bytes]], slot: int) -> list[bytes]:
        chain = cache._chains[slot]
        chain.extend(cache._requests.known_tokens(slot) % 256)
        return chain.hashes

    wrap(cache, "_hashes", hashes)


@planted(
    "scheduler",
    "a block is hashed one token before it is full",
    source="PR#56525: a hash published for a state not yet written",
    suites=("scheduling", "cache"),
    # What no step has filled must be hit, not just found, for the invariants to be broken.
    rarity=4,
)
def hashed_a_token_early(scheduler: Scheduler) -> None:
    cache = scheduler._state.cache

    def enter(original: Callable[[int, int, int], None], slot: int, tokens: int, end: int) -> None:
        known = len(cache._requests.known_tokens(slot))
        early = tokens % cache.block_size == cache.block_size - 1 > 0 and tokens < known
        original(slot, tokens + early, end)

    wrap(cache, "cache", enter)


@planted(
    "scheduler",
    "blocks that a preempted request was to fill stay in the index",
    source="PR#56525: a hash published at schedule time for a state never written",
    suites=("scheduling",),
    # A victim must have filled a block in the very step, in a case of the intended profile.
    rarity=4,
)
def hashed_and_never_computed(scheduler: Scheduler) -> None:
    wrap(scheduler._state.cache, "retract", lambda _, slot: None)


@planted(
    "request",
    "a request goes on after its last token",
    source="vllm-ascend#9221: more tokens than the limit",
    suites=("scheduling", "engine", "invariance"),
)
def one_token_too_many(request: Request) -> Request:
    params = request.sampling_params
    return replace(request, sampling_params=replace(params, max_tokens=params.max_tokens + 1))


@planted(
    "request",
    "a stop token ends a request before its minimum",
    source="#51299: stop rules in another order",
    suites=("scheduling", "engine"),
)
def ignored_minimum(request: Request) -> Request:
    return replace(request, sampling_params=replace(request.sampling_params, min_tokens=0))


@planted(
    "weights",
    "zero-centred norm weights are applied as they are",
    source="a checkpoint convention missed: 1 + w",
    suites=_NUMBERS,
)
def plain_norms(weights: Weights, model: ModelConfig) -> Weights:
    return {
        name: value - 1 if name.endswith("layernorm.weight") else value
        for name, value in weights.items()
    }


@planted(
    "weights",
    "query heads read the K/V heads in the wrong order",
    source="#49716: per-head values in wrong places",
    suites=_NUMBERS,
)
def reversed_kv_heads(weights: Weights, model: ModelConfig) -> Weights:
    def changed(value: np.ndarray) -> np.ndarray:
        heads = value.reshape(model.num_key_value_heads, model.head_dim, -1)
        return heads[::-1].reshape(value.shape).copy()

    return {
        name: changed(value) if name.endswith(("k_proj.weight", "v_proj.weight")) else value
        for name, value in weights.items()
    }


@planted(
    "weights",
    "a GDN layer takes queries for keys",
    source="fla#623: two operands of the update swapped",
    suites=_NUMBERS,
)
def swapped_query_and_key(weights: Weights, model: ModelConfig) -> Weights:
    width = model.linear_num_key_heads * model.linear_key_head_dim

    def changed(value: np.ndarray) -> np.ndarray:
        return np.concatenate([value[width : 2 * width], value[:width], value[2 * width :]])

    return {
        name: changed(value) if name.endswith("in_proj_qkv.weight") else value
        for name, value in weights.items()
    }


@planted(
    "weights",
    "nothing wrong: weights rounded up by one unit in the last place",
    source="#39146: rounding reported as corruption",
    suites=(),
)
def rounded_otherwise(weights: Weights, model: ModelConfig) -> Weights:
    return {
        name: np.nextafter(value, np.float32(np.inf)) if "proj" in name else value
        for name, value in weights.items()
    }


@planted(
    "before_step",
    "a step raises",
    source="any crash",
    suites=("engine",),
)
def raises() -> None:
    raise RuntimeError("planted: the device is lost")


@planted(
    "before_step",
    "a step never returns",
    source="#39734: a queue blocked for ever",
    suites=("engine",),
)
def hangs() -> None:
    while True:
        time.sleep(1.0)


@planted(
    "before_step",
    "the process ends",
    source="vllm-ascend PR#14161: a crash in the middle of a step",
    suites=("engine",),
)
def dies() -> None:
    print("planted: about to die", flush=True)
    os._exit(7)


FAULTS = (
    one_token_too_few,
    state_of_another_request,
    one_key_too_many,
    one_key_too_few,
    stale_state,
    lost_state,
    stale_block_table,
    shifted_slots,
    restarted_positions,
    stale_padding,
    stale_table_tail,
    last_slot_of_a_page,
    own_values_as_they_were,
    one_label,
    reported_slots,
    ignored_priority,
    ignored_threshold,
    shared_across_tenants,
    recomputed_in_place,
    hashed_in_a_byte,
    hashed_a_token_early,
    hashed_and_never_computed,
    one_token_too_many,
    ignored_minimum,
    plain_norms,
    reversed_kv_heads,
    swapped_query_and_key,
    *V0_FAULTS,
    rounded_otherwise,
)
"""Faults that answer wrongly, and at the end a negative control that does not."""

FAILURES = (raises, hangs, dies)
"""Implementations that do not answer; ``hangs`` and ``dies`` need a process of their own."""
