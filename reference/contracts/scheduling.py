"""What a scheduler decides in one step, and what can be seen of its state.

Source: ``vllm/v1/core/sched/output.py``. Sequences are tuples and mappings keep their insertion
order, which is part of the decision: rows reach the worker in that order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from servespec.reference.contracts.request import PauseState, SamplingParams

__all__ = [
    "BlockCopy",
    "BlockTable",
    "CachedRequestData",
    "NewRequestData",
    "SchedulerOutput",
    "SchedulerSnapshot",
]

# One tuple of block ids for each group, in the order of CacheConfig.groups.
BlockTable = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequestData:
    """All a worker needs of a request it has never seen.

    Attributes
    ----------
    req_id : str
    prompt_token_ids : tuple of int
    sampling_params : SamplingParams
    block_ids : tuple of tuple of int
        The whole block table, a tuple for each group; 0 is the null block.
    num_computed_tokens : int
        Tokens whose K/V and states are there already (a prefix hit).
    """

    req_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    block_ids: BlockTable
    num_computed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRequestData:
    """What changed of requests the worker knows; the sequences run parallel.

    Attributes
    ----------
    req_ids : tuple of str
        Running requests in the order scheduled, then resumed ones.
    resumed_req_ids : frozenset of str
        Those back from preemption: their `new_block_ids` replace the table.
    new_block_ids : tuple of (tuple of tuple of int, or None)
        Blocks to append, a tuple for each group; None if no group got a block.
    num_computed_tokens : tuple of int
        Computed tokens before this step.
    num_output_tokens : tuple of int
        Output tokens known or in flight.
    all_token_ids : mapping of str to tuple of int
        Prompt and output of requests that were not scheduled in the previous step.
    """

    req_ids: tuple[str, ...] = ()
    resumed_req_ids: frozenset[str] = frozenset()
    new_block_ids: tuple[BlockTable | None, ...] = ()
    num_computed_tokens: tuple[int, ...] = ()
    num_output_tokens: tuple[int, ...] = ()
    all_token_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """Copy one block's content before the step runs (copy on write)."""

    src_block_id: int
    dst_block_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """One step's plan.

    Attributes
    ----------
    scheduled_new_reqs : tuple of NewRequestData
    scheduled_cached_reqs : CachedRequestData
    num_scheduled_tokens : mapping of str to int
        Tokens of each request in this step; its order is the order of decisions.
    total_num_scheduled_tokens : int
    scheduled_spec_decode_tokens : mapping of str to tuple of int
        Draft tokens among the scheduled ones; -1 is a placeholder the worker fills.
    num_common_prefix_blocks : tuple of int
        For each group, leading blocks that all running requests share.
    finished_req_ids : frozenset of str
        Requests that ended since the previous step.
    preempted_req_ids : frozenset of str
        Requests preempted in this step.
    new_block_ids_to_zero : tuple of int
        Blocks the worker clears before it runs.
    kv_cache_block_copies : tuple of BlockCopy
        Copies the worker makes after clearing and before it runs.
    num_spec_tokens_to_schedule : int
        Drafts wanted for the next step.
    """

    scheduled_new_reqs: tuple[NewRequestData, ...] = ()
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: Mapping[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    scheduled_spec_decode_tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    num_common_prefix_blocks: tuple[int, ...] = ()
    finished_req_ids: frozenset[str] = frozenset()
    preempted_req_ids: frozenset[str] = frozenset()
    new_block_ids_to_zero: tuple[int, ...] = ()
    kv_cache_block_copies: tuple[BlockCopy, ...] = ()
    num_spec_tokens_to_schedule: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSnapshot:
    """What a check may compare of a scheduler's state after a call.

    Attributes
    ----------
    free_blocks : tuple of int
        The free queue, head (next to be given out) first.
    ref_counts : tuple of int
        Holders of each block, by block id; that of the null block 0 is always given as 0.
    cached_blocks : frozenset of int
        Blocks that can be found by a prefix hash.
    block_tables : mapping of str to tuple of tuple of int
        Blocks of every request that holds any, a tuple for each group, nulls (0) included.
    running : tuple of str
    waiting : tuple of str
        In the order in which they would be taken.
    skipped_waiting : tuple of str
    num_computed_tokens : mapping of str to int
        For every live request.
    num_output_placeholders : mapping of str to int
        For every live request; tokens of asynchronous steps in flight.
    pause_state : PauseState
    """

    free_blocks: tuple[int, ...]
    ref_counts: tuple[int, ...]
    cached_blocks: frozenset[int] = frozenset()
    block_tables: Mapping[str, BlockTable] = field(default_factory=dict)
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    skipped_waiting: tuple[str, ...] = ()
    num_computed_tokens: Mapping[str, int] = field(default_factory=dict)
    num_output_placeholders: Mapping[str, int] = field(default_factory=dict)
    pause_state: PauseState = PauseState.UNPAUSED
