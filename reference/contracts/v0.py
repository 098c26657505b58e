"""The legacy (V0) scheduler: what it is told, what it is given, what it decides and shows.

V0 schedules *sequence groups*: one prompt with one or more output sequences that share blocks.
A step is planned over three queues (waiting, running, swapped) and two block pools (GPU, CPU).

Source: ``vllm/core/scheduler.py``, ``vllm/core/block_manager_v1.py``, ``vllm/sequence.py`` and
``SchedulerConfig`` of ``vllm/config.py`` of vLLM 0.5.1. Names are that release's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Literal

from servespec.reference.contracts.errors import require
from servespec.reference.contracts.request import FinishReason, SamplingParams, require_prompt

if TYPE_CHECKING:
    from servespec.reference.contracts.config import EngineConfig

__all__ = [
    "AllocStatus",
    "PreemptionMode",
    "ScheduledSequenceGroup",
    "SequenceGroupOutput",
    "SequenceGroupRequest",
    "SequenceOutput",
    "SequenceSample",
    "SequenceSnapshot",
    "SequenceStatus",
    "V0CacheConfig",
    "V0EngineConfig",
    "V0SchedulerConfig",
    "V0SchedulerOutput",
    "V0SchedulingError",
    "V0SchedulingRule",
    "V0Snapshot",
]

PreemptionMode = Literal["swap", "recompute"]
V0SchedulingRule = Literal[
    "swap_space",
    "pool_exhausted",
    "recompute_of_forks",
    "prefill_of_forks",
    "append_past_table",
    "token_budget",
    "seq_budget",
]


class V0SchedulingError(ValueError):
    """A step cannot be planned; V0 gives up the whole engine here, not one request.

    Parameters
    ----------
    rule : str
        What was violated. ``swap_space``: a group to swap out does not fit the free CPU blocks.
        ``pool_exhausted``: a swap ran out of blocks half-way, because the newer block manager
        counts a block that forks share once but moves it once for each.
        ``recompute_of_forks``: a group with several running sequences must be preempted by
        recomputation. ``prefill_of_forks``: a group in prefill has further sequences, which
        happens when it was recomputed after a sibling finished. ``append_past_table``: the newer
        block manager touches the block after the table, which happens when a prompt that fills
        its last block is continued in a second chunk. ``token_budget``, ``seq_budget``: the plan
        exceeds ``max_num_batched_tokens`` or ``max_num_seqs``, which a group of several running
        sequences can cause under chunked prefill, because it is neither cut nor checked.
    detail : str
        The request and the numbers, in words.

    Notes
    -----
    Source: the ``RuntimeError`` of ``Scheduler._swap_out`` and the assertions of
    ``_preempt_by_recompute``, ``schedule`` and the two policies.
    """

    def __init__(self, rule: V0SchedulingRule, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
        self.detail = detail


class SequenceStatus(IntEnum):
    """Where one sequence stands; everything after `SWAPPED` is finished."""

    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5
    FINISHED_IGNORED = 6

    @property
    def is_finished(self) -> bool:
        """Whether the sequence is over."""
        return self > SequenceStatus.SWAPPED

    @property
    def finish_reason(self) -> FinishReason | None:
        """What a client is told; None while the sequence lives."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    SequenceStatus.FINISHED_STOPPED: FinishReason.STOP,
    SequenceStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    SequenceStatus.FINISHED_ABORTED: FinishReason.ABORT,
    # A prompt over the length limit is told to the client as a length stop.
    SequenceStatus.FINISHED_IGNORED: FinishReason.LENGTH,
}


class AllocStatus(Enum):
    """Whether blocks can be had: now, once others are freed, or not even in an empty pool."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class V0SchedulerConfig:
    """How much one step may hold and by which policy it is filled.

    Attributes
    ----------
    max_num_batched_tokens : int
        Most tokens in one step.
    max_num_seqs : int
        Most sequences in one step; a group counts with all it may ever run in parallel.
    max_model_len : int
        Most tokens of one sequence, prompt and output together.
    enable_chunked_prefill : bool
        False is the default policy (prefill, else decode and swap-in; whole prompts only), True
        the chunked one (decode, swap-in, prefill in one batch; prompts are cut to the budget).
    preemption_mode : {"swap", "recompute"} or None
        None recomputes a group that can only ever run one more sequence and swaps any other.
    delay_factor : float
        A prompt waits this many times the latency of the last prompt step before it is scheduled,
        so that others can join it; 0 never waits.
    use_v2_block_manager : bool
        Whether the newer block manager keeps the blocks; only it knows lookahead slots.
    num_lookahead_slots : int
        Slots per sequence and decode step beyond the known tokens (for speculative decoding).
    chunk_alignment : int
        A prefill chunk that takes the whole remaining budget is cut down to a multiple of this:
        256 in the fork that source-2 describes, 1 (no effect) in the release. A remainder of
        fewer tokens than this gives a prefill nothing in that step; a `max_num_batched_tokens`
        below it never starts a prompt of at least that many tokens.

    Notes
    -----
    Source: ``SchedulerConfig`` of vLLM 0.5.1; `chunk_alignment` is the 256 of
    ``_get_num_new_tokens`` in source-2.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_model_len: int = 2048
    enable_chunked_prefill: bool = False
    preemption_mode: PreemptionMode | None = None
    delay_factor: float = 0.0
    use_v2_block_manager: bool = False
    num_lookahead_slots: int = 0
    chunk_alignment: int = 1

    def __post_init__(self) -> None:
        name = "V0SchedulerConfig"
        require(self.max_num_seqs >= 1, f"{name}.max_num_seqs", self.max_num_seqs, "at least 1")
        require(self.max_model_len >= 1, f"{name}.max_model_len", self.max_model_len, "at least 1")
        require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            f"{name}.max_num_batched_tokens",
            self.max_num_batched_tokens,
            f"at least max_num_seqs = {self.max_num_seqs}",
        )
        require(
            self.enable_chunked_prefill or self.max_num_batched_tokens >= self.max_model_len,
            f"{name}.max_num_batched_tokens",
            self.max_num_batched_tokens,
            f"at least max_model_len = {self.max_model_len} without chunked prefill",
        )
        require(
            self.preemption_mode in (None, "swap", "recompute"),
            f"{name}.preemption_mode",
            self.preemption_mode,
            "None, 'swap' or 'recompute'",
        )
        require(
            0.0 <= self.delay_factor < float("inf"),
            f"{name}.delay_factor",
            self.delay_factor,
            "finite and at least 0",
        )
        require(
            self.num_lookahead_slots >= 0,
            f"{name}.num_lookahead_slots",
            self.num_lookahead_slots,
            "at least 0",
        )
        require(
            self.use_v2_block_manager or self.num_lookahead_slots == 0,
            f"{name}.num_lookahead_slots",
            self.num_lookahead_slots,
            "0 without use_v2_block_manager",
        )
        require(
            self.chunk_alignment >= 1,
            f"{name}.chunk_alignment",
            self.chunk_alignment,
            "at least 1",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class V0CacheConfig:
    """The two block pools.

    Attributes
    ----------
    num_gpu_blocks, num_cpu_blocks : int
        Blocks of each pool; CPU blocks hold what was swapped out.
    block_size : int
        Tokens in one block.
    watermark : float
        Share of the GPU blocks, in [0, 1), that an admission or a swap-in must leave free.

    Notes
    -----
    Source: ``CacheConfig`` and ``BlockSpaceManagerV1`` of vLLM 0.5.1, which fixes the watermark
    at 0.01.
    """

    num_gpu_blocks: int
    num_cpu_blocks: int = 0
    block_size: int = 16
    watermark: float = 0.01

    def __post_init__(self) -> None:
        name = "V0CacheConfig"
        require(
            self.num_gpu_blocks >= 1, f"{name}.num_gpu_blocks", self.num_gpu_blocks, "at least 1"
        )
        require(
            self.num_cpu_blocks >= 0, f"{name}.num_cpu_blocks", self.num_cpu_blocks, "at least 0"
        )
        require(self.block_size >= 1, f"{name}.block_size", self.block_size, "at least 1")
        require(0.0 <= self.watermark < 1.0, f"{name}.watermark", self.watermark, "in [0, 1)")

    @property
    def watermark_blocks(self) -> int:
        """GPU blocks kept free, rounded down."""
        return int(self.watermark * self.num_gpu_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class V0EngineConfig:
    """How an engine plans its steps by V0 in place of V1.

    V0 knows one kind of block and two pools, an engine several groups of layers and one pool. So
    every group has a region of the engine's pool with a page for each V0 block, GPU blocks first,
    and moving a V0 block moves the pages of all groups. The state of a GDN layer sits in the page
    of its sequence's first block, which no other sequence holds.

    Attributes
    ----------
    scheduler : V0SchedulerConfig
        Without delay and lookahead slots: an engine has neither a clock nor a drafter.
    cache : V0CacheConfig
    """

    scheduler: V0SchedulerConfig
    cache: V0CacheConfig

    def __post_init__(self) -> None:
        name = "V0EngineConfig.scheduler"
        factor, slots = self.scheduler.delay_factor, self.scheduler.num_lookahead_slots
        require(factor == 0, f"{name}.delay_factor", factor, "0: an engine has no clock")
        require(slots == 0, f"{name}.num_lookahead_slots", slots, "0: there is no drafter")

    def require_fit(self, config: EngineConfig) -> None:
        """Refuse an engine whose batch or pool is too small, or that wants what V0 does not know.

        Raises
        ------
        ConfigError
        """
        scheduler, cache = config.scheduler, config.cache
        for field_name in ("max_num_seqs", "max_num_batched_tokens"):
            own, wanted = getattr(scheduler, field_name), getattr(self.scheduler, field_name)
            require(own >= wanted, f"SchedulerConfig.{field_name}", own, f"at least V0's {wanted}")
        # V0 ends a sequence once it is longer than max_model_len, so it may be one token longer.
        longest = self.scheduler.max_model_len + 1
        own = scheduler.max_model_len
        require(own >= longest, "SchedulerConfig.max_model_len", own, f"at least {longest} for V0")
        own, wanted = cache.block_size, self.cache.block_size
        require(own == wanted, "CacheConfig.block_size", own, f"V0's {wanted}")
        own, wanted = cache.num_gpu_blocks, self.num_blocks(len(cache.groups))
        require(own >= wanted, "CacheConfig.num_gpu_blocks", own, f"at least {wanted} for V0")
        caching = cache.enable_prefix_caching
        require(not caching, "CacheConfig.enable_prefix_caching", caching, "False with V0")
        mode = cache.mamba_cache_mode
        require(mode == "none", "CacheConfig.mamba_cache_mode", mode, "'none' with V0")
        speculative = config.speculative
        require(speculative is None, "EngineConfig.speculative", speculative, "None with V0")

    @property
    def region_size(self) -> int:
        """Pages of one group."""
        return self.cache.num_gpu_blocks + self.cache.num_cpu_blocks

    def num_blocks(self, num_groups: int) -> int:
        """Return the blocks an engine's pool needs, the null block included."""
        return 1 + num_groups * self.region_size

    def gpu_block(self, group: int, block: int) -> int:
        """Return the page of a GPU block in a group's region."""
        return 1 + group * self.region_size + block

    def cpu_block(self, group: int, block: int) -> int:
        """Return the page of a CPU block in a group's region."""
        return self.gpu_block(group, self.cache.num_gpu_blocks + block)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGroupRequest:
    """A prompt and how many sequences are wanted of it.

    Attributes
    ----------
    request_id : str
        Unique among live requests.
    prompt_token_ids : tuple of int
        At least one token.
    sampling_params : SamplingParams
        Stop conditions of every sequence.
    best_of : int
        Sequences that may run in parallel; a group starts with one and forks when it samples.
    use_beam_search : bool
        Whether the group always counts with `best_of` sequences, also after some finished.
    arrival_time : float
        Seconds on the clock that `schedule` is given; the running and the swapped queue are
        served in its order.

    Notes
    -----
    Source: ``SequenceGroup`` of ``vllm/sequence.py``, ``best_of`` and ``use_beam_search`` of
    ``vllm/sampling_params.py``.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    best_of: int = 1
    use_beam_search: bool = False
    arrival_time: float = 0.0

    def __post_init__(self) -> None:
        require(
            len(self.request_id) > 0, "SequenceGroupRequest.request_id", self.request_id, "a name"
        )
        where = f"SequenceGroupRequest({self.request_id!r})"
        require_prompt(f"{where}.prompt_token_ids", self.prompt_token_ids)
        require(self.best_of >= 1, f"{where}.best_of", self.best_of, "at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSample:
    """One token sampled for one running sequence.

    A sequence sampled several times forks: all but its last sample become new sequences. One
    that is not sampled although its group is, is dropped (a beam that lost).

    Attributes
    ----------
    parent_seq_id : int
    token_id : int
    """

    parent_seq_id: int
    token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """What one step gave one sequence.

    Attributes
    ----------
    seq_id : int
    parent_seq_id : int
        The sequence it was forked from in this step; its own id if it was not.
    new_token_id : int
    finish_reason : FinishReason or None
    """

    seq_id: int
    parent_seq_id: int
    new_token_id: int
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGroupOutput:
    """What one step gave one request.

    Attributes
    ----------
    request_id : str
    outputs : tuple of SequenceOutput
        Forks of a parent before the parent; empty for a chunk that does not sample.
    finished : bool
        Whether no sequence of the group is left.
    """

    request_id: str
    outputs: tuple[SequenceOutput, ...] = ()
    finished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSequenceGroup:
    """One group's part in a step.

    Attributes
    ----------
    request_id : str
    token_chunk_size : int
        Tokens to compute of each running sequence: 1 for a decode, the chunk for a prefill.
    is_prompt : bool
        Whether the group is in its prefill phase.
    do_sample : bool
        Whether a token is sampled; False until the last chunk of a prefill.
    block_tables : mapping of int to tuple of int
        GPU blocks of each running sequence, by sequence id.
    """

    request_id: str
    token_chunk_size: int
    is_prompt: bool
    do_sample: bool
    block_tables: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class V0SchedulerOutput:
    """One step's plan.

    Attributes
    ----------
    scheduled_seq_groups : tuple of ScheduledSequenceGroup
        Prefills before decodes.
    num_prefill_groups : int
        Leading groups that are prefills.
    num_batched_tokens : int
        Tokens as the budget counts them.
    blocks_to_swap_in : tuple of (int, int)
        CPU block to GPU block, moved before the step runs. Never together with swap-outs.
    blocks_to_swap_out : tuple of (int, int)
        GPU block to CPU block.
    blocks_to_copy : tuple of (int, int)
        GPU block to GPU block, copied after the swaps (copy on write of forked sequences).
    ignored_request_ids : tuple of str
        Requests given up because they never fit.
    num_lookahead_slots : int
        Lookahead slots of every scheduled decode.
    running_queue_size : int
        Groups in the running queue after planning.
    preempted : int
        Groups preempted in this step, by either mode.
    finished_request_ids : tuple of str
        Requests that ended since the previous plan; aborted and ignored ones are not among them.

    Notes
    -----
    Source: ``SchedulerOutputs`` and ``SequenceGroupMetadata`` of vLLM 0.5.1.
    """

    scheduled_seq_groups: tuple[ScheduledSequenceGroup, ...] = ()
    num_prefill_groups: int = 0
    num_batched_tokens: int = 0
    blocks_to_swap_in: tuple[tuple[int, int], ...] = ()
    blocks_to_swap_out: tuple[tuple[int, int], ...] = ()
    blocks_to_copy: tuple[tuple[int, int], ...] = ()
    ignored_request_ids: tuple[str, ...] = ()
    num_lookahead_slots: int = 0
    running_queue_size: int = 0
    preempted: int = 0
    finished_request_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSnapshot:
    """One sequence as far as checks compare it.

    Attributes
    ----------
    seq_id : int
    status : SequenceStatus
    is_prefill : bool
        Whether known tokens are still to be computed from the start.
    num_computed_tokens : int
        Tokens with K/V in the blocks.
    output_token_ids : tuple of int
    """

    seq_id: int
    status: SequenceStatus
    is_prefill: bool
    num_computed_tokens: int
    output_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class V0Snapshot:
    """What a check may compare of a V0 scheduler's state after a call.

    Attributes
    ----------
    waiting, running, swapped : tuple of str
        Request ids in queue order.
    sequences : mapping of str to tuple of SequenceSnapshot
        Sequences of every queued request, in group order.
    gpu_block_tables, cpu_block_tables : mapping of int to tuple of int
        Blocks of every sequence that holds any, by sequence id.
    free_gpu_blocks, free_cpu_blocks : tuple of int
        Free blocks, next to be given out first.
    gpu_ref_counts, cpu_ref_counts : tuple of int
        Holders of each block, by block id.
    prev_time, last_prompt_latency : float
        Seconds; when prompts were last considered, and how long the last prompt step took.
    prev_prompt : bool
        Whether the previous consideration scheduled a prompt.
    """

    waiting: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    swapped: tuple[str, ...] = ()
    sequences: Mapping[str, tuple[SequenceSnapshot, ...]] = field(default_factory=dict)
    gpu_block_tables: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    cpu_block_tables: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    free_gpu_blocks: tuple[int, ...] = ()
    free_cpu_blocks: tuple[int, ...] = ()
    gpu_ref_counts: tuple[int, ...] = ()
    cpu_ref_counts: tuple[int, ...] = ()
    prev_time: float = 0.0
    last_prompt_latency: float = 0.0
    prev_prompt: bool = False
