"""Configurations: what an engine is told before the first request arrives.

Names are vLLM 0.27.1's where it has one (``vllm/config/*.py``). Every configuration validates
itself on construction and raises `ConfigError` naming field, value and range.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from servespec.reference.contracts.errors import ConfigError, require
from servespec.reference.contracts.graph import GraphConfig
from servespec.reference.contracts.quirks import Quirks
from servespec.reference.contracts.v0 import V0EngineConfig

__all__ = [
    "CacheConfig",
    "EngineConfig",
    "KVCacheGroup",
    "LayerType",
    "MambaCacheMode",
    "ModelConfig",
    "RopeConfig",
    "SchedulerConfig",
    "SchedulingPolicy",
    "SpeculativeConfig",
    "SpeculativeMethod",
    "gdn_groups_first",
]

SchedulingPolicy = Literal["fcfs", "priority"]
MambaCacheMode = Literal["none", "align"]
LayerType = Literal["linear_attention", "full_attention"]
SpeculativeMethod = Literal["ngram", "mtp", "eagle", "eagle3", "draft_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How many tokens and requests one step may hold, and who goes first.

    Attributes
    ----------
    max_num_seqs : int
        Most requests in ``running``.
    max_num_batched_tokens : int
        Most tokens in one step.
    max_num_scheduled_tokens : int or None
        Budget the scheduler really spends; None means `max_num_batched_tokens`.
    max_model_len : int
        Most tokens of one request, prompt and output together.
    enable_chunked_prefill : bool
        Whether a prompt may be cut to the remaining budget.
    long_prefill_token_threshold : int
        Longest chunk of one request in one step; 0 means no limit.
    policy : {"fcfs", "priority"}
        Queue order and choice of the preemption victim.
    watermark : float
        Share of all blocks, in [0, 1), that an admission must leave free while others run.
    scheduler_reserve_full_isl : bool
        Whether an admission needs room for the whole known sequence, not the first chunk only.
    async_scheduling : bool
        Whether a step is scheduled before the previous one's tokens are known.
    prefill_schedule_interval : int
        Steps between two admissions of prefills under data-parallel throttling.
    quirks : Quirks
        Oddities to reproduce.

    Notes
    -----
    Source: ``vllm/config/scheduler.py``.
    """

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    max_num_scheduled_tokens: int | None = None
    max_model_len: int = 4096
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    policy: SchedulingPolicy = "fcfs"
    watermark: float = 0.0
    scheduler_reserve_full_isl: bool = True
    async_scheduling: bool = False
    prefill_schedule_interval: int = 1
    quirks: Quirks = field(default_factory=Quirks)

    def __post_init__(self) -> None:
        name = "SchedulerConfig"
        require(self.max_num_seqs >= 1, f"{name}.max_num_seqs", self.max_num_seqs, "at least 1")
        require(
            self.max_num_batched_tokens >= 1,
            f"{name}.max_num_batched_tokens",
            self.max_num_batched_tokens,
            "at least 1",
        )
        require(
            self.max_num_scheduled_tokens is None
            or 1 <= self.max_num_scheduled_tokens <= self.max_num_batched_tokens,
            f"{name}.max_num_scheduled_tokens",
            self.max_num_scheduled_tokens,
            f"None or in [1, max_num_batched_tokens = {self.max_num_batched_tokens}]",
        )
        require(self.max_model_len >= 1, f"{name}.max_model_len", self.max_model_len, "at least 1")
        require(
            self.enable_chunked_prefill or self.max_num_batched_tokens >= self.max_model_len,
            f"{name}.max_num_batched_tokens",
            self.max_num_batched_tokens,
            f"at least max_model_len = {self.max_model_len} without chunked prefill",
        )
        require(
            0 <= self.long_prefill_token_threshold <= self.max_model_len,
            f"{name}.long_prefill_token_threshold",
            self.long_prefill_token_threshold,
            f"in [0, max_model_len = {self.max_model_len}]",
        )
        require(
            self.policy in ("fcfs", "priority"),
            f"{name}.policy",
            self.policy,
            "'fcfs' or 'priority'",
        )
        require(0.0 <= self.watermark < 1.0, f"{name}.watermark", self.watermark, "in [0, 1)")
        require(
            self.prefill_schedule_interval >= 1,
            f"{name}.prefill_schedule_interval",
            self.prefill_schedule_interval,
            "at least 1",
        )

    @property
    def token_budget(self) -> int:
        """Tokens one step may schedule."""
        if self.max_num_scheduled_tokens is None:
            return self.max_num_batched_tokens
        return self.max_num_scheduled_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroup:
    """Layers that share one block table.

    Attributes
    ----------
    layer_type : {"linear_attention", "full_attention"}
        All layers of a group are of one type.
    layer_indices : tuple of int
        Indices of the layers in the model, ascending.

    Notes
    -----
    Source: ``KVCacheGroupSpec`` of ``vllm/v1/kv_cache_interface.py``. The block size of a
    full-attention group is `CacheConfig.block_size`; that of a GDN group follows from
    `CacheConfig.mamba_cache_mode`.
    """

    layer_type: LayerType
    layer_indices: tuple[int, ...]

    def __post_init__(self) -> None:
        require(
            self.layer_type in ("linear_attention", "full_attention"),
            "KVCacheGroup.layer_type",
            self.layer_type,
            "'linear_attention' or 'full_attention'",
        )
        require(
            len(self.layer_indices) > 0 and all(i >= 0 for i in self.layer_indices),
            "KVCacheGroup.layer_indices",
            self.layer_indices,
            "at least one index, none negative",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The block pool and how layers share it.

    Attributes
    ----------
    num_gpu_blocks : int
        Blocks in the pool, the null block 0 included.
    block_size : int
        Tokens in one block of a full-attention group.
    enable_prefix_caching : bool
        Whether full blocks are hashed and found again.
    mamba_cache_mode : {"none", "align"}
        ``none``: one state for the life of a request (a GDN block spans ``max_model_len``
        tokens); ``align``: a state kept at every block boundary (a GDN block spans `block_size`).
    prefix_match_unit : int or None
        Tokens per hash if finer than a block (partial hits by copy-on-write); None means a block.
    kernel_block_size : int or None
        Tokens in one block as the attention kernels see it; a pool block is that many consecutive
        kernel blocks. None means `block_size`; Ascend kernels take 128.
    groups : tuple of KVCacheGroup
        In the order of block-table groups: for Qwen3.5 GDN groups first, full attention last.

    Notes
    -----
    Source: ``vllm/config/cache.py``, ``vllm/v1/core/kv_cache_utils.py``.
    """

    num_gpu_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = False
    mamba_cache_mode: MambaCacheMode = "none"
    prefix_match_unit: int | None = None
    kernel_block_size: int | None = None
    groups: tuple[KVCacheGroup, ...]

    def __post_init__(self) -> None:
        name = "CacheConfig"
        require(
            self.num_gpu_blocks >= 2,
            f"{name}.num_gpu_blocks",
            self.num_gpu_blocks,
            "at least 2 (block 0 is the null block)",
        )
        require(self.block_size >= 1, f"{name}.block_size", self.block_size, "at least 1")
        require(
            self.mamba_cache_mode in ("none", "align"),
            f"{name}.mamba_cache_mode",
            self.mamba_cache_mode,
            "'none' or 'align'",
        )
        require(
            self.prefix_match_unit is None
            or (
                1 <= self.prefix_match_unit <= self.block_size
                and self.block_size % self.prefix_match_unit == 0
            ),
            f"{name}.prefix_match_unit",
            self.prefix_match_unit,
            f"None or a divisor of block_size = {self.block_size}",
        )
        require(
            self.kernel_block_size is None
            or (
                1 <= self.kernel_block_size <= self.block_size
                and self.block_size % self.kernel_block_size == 0
            ),
            f"{name}.kernel_block_size",
            self.kernel_block_size,
            f"None or a divisor of block_size = {self.block_size}",
        )
        require(len(self.groups) > 0, f"{name}.groups", self.groups, "at least one group")
        require(
            self.mamba_cache_mode == "align" or not (self.enable_prefix_caching and self.has_gdn),
            f"{name}.mamba_cache_mode",
            self.mamba_cache_mode,
            "'align' if enable_prefix_caching is on and a group is of GDN layers",
        )
        layers = [i for group in self.groups for i in group.layer_indices]
        require(
            len(layers) == len(set(layers)),
            f"{name}.groups",
            layers,
            "disjoint: every layer in one group",
        )

    @property
    def has_gdn(self) -> bool:
        """Whether any group is a GDN group."""
        return any(group.layer_type == "linear_attention" for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Draft tokens beside decodes.

    Attributes
    ----------
    method : str
        Who drafts. The methods that run a draft model (all but ``ngram``) reserve
        `num_speculative_tokens` lookahead slots.
    num_speculative_tokens : int
        Most drafts of one request in one step, written K.

    Notes
    -----
    Source: ``vllm/config/speculative.py``.
    """

    method: SpeculativeMethod
    num_speculative_tokens: int

    def __post_init__(self) -> None:
        require(
            self.method in ("ngram", "mtp", "eagle", "eagle3", "draft_model"),
            "SpeculativeConfig.method",
            self.method,
            "one of ngram, mtp, eagle, eagle3, draft_model",
        )
        require(
            self.num_speculative_tokens >= 1,
            "SpeculativeConfig.num_speculative_tokens",
            self.num_speculative_tokens,
            "at least 1",
        )

    @property
    def num_lookahead_tokens(self) -> int:
        """Slots kept beyond the scheduled tokens for the drafter's own K/V."""
        return 0 if self.method == "ngram" else self.num_speculative_tokens

    @property
    def use_eagle(self) -> bool:
        """Whether the drafter reads hidden states, which costs a prefix hit its last block."""
        return self.method in ("mtp", "eagle", "eagle3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of the full-attention layers.

    Attributes
    ----------
    rope_theta : float
        Base of the geometric frequencies.
    partial_rotary_factor : float
        Share of ``head_dim`` that rotates, in (0, 1]; the rest passes through.
    mrope_section : tuple of int
        Frequencies given to the temporal, height and width positions; with text all three
        positions are equal and the sections have no effect. Empty means plain rotary.
    """

    rope_theta: float = 10_000_000.0
    partial_rotary_factor: float = 0.25
    mrope_section: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(self.rope_theta > 0.0, "RopeConfig.rope_theta", self.rope_theta, "positive")
        require(
            0.0 < self.partial_rotary_factor <= 1.0,
            "RopeConfig.partial_rotary_factor",
            self.partial_rotary_factor,
            "in (0, 1]",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of a dense Qwen3.5 text model, in the names of its ``config.json``.

    Attributes
    ----------
    vocab_size, hidden_size, intermediate_size : int
        Rows of the embedding; width of the residual stream; width of the MLP.
    layer_types : tuple of {"linear_attention", "full_attention"}
        One entry a layer.
    num_attention_heads, num_key_value_heads, head_dim : int
        Query heads, K/V heads and dimension of a full-attention layer.
    linear_num_key_heads, linear_num_value_heads : int
        Heads of a GDN layer; a key head serves consecutive value heads.
    linear_key_head_dim, linear_value_head_dim : int
        Dimensions of a GDN head's key and value.
    linear_conv_kernel_dim : int
        Taps of the causal convolution.
    rms_norm_eps : float
        Added to the mean square in every norm.
    rope : RopeConfig
    tie_word_embeddings : bool
        Whether the output projection is the embedding.
    max_position_embeddings : int
        Longest sequence the model was made for.

    Notes
    -----
    Source: ``Qwen3_5TextConfig`` of transformers.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[LayerType, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768

    def __post_init__(self) -> None:
        name = "ModelConfig"
        for size in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "max_position_embeddings",
        ):
            require(getattr(self, size) >= 1, f"{name}.{size}", getattr(self, size), "at least 1")
        require(
            self.linear_conv_kernel_dim >= 2,
            f"{name}.linear_conv_kernel_dim",
            self.linear_conv_kernel_dim,
            "at least 2",
        )
        require(len(self.layer_types) > 0, f"{name}.layer_types", self.layer_types, "not empty")
        for layer_type in self.layer_types:
            if layer_type not in ("linear_attention", "full_attention"):
                raise ConfigError(
                    f"{name}.layer_types", layer_type, "'linear_attention' or 'full_attention'"
                )
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"{name}.num_key_value_heads",
            self.num_key_value_heads,
            f"a divisor of num_attention_heads = {self.num_attention_heads}",
        )
        require(
            self.linear_num_value_heads % self.linear_num_key_heads == 0,
            f"{name}.linear_num_key_heads",
            self.linear_num_key_heads,
            f"a divisor of linear_num_value_heads = {self.linear_num_value_heads}",
        )
        require(self.rms_norm_eps > 0, f"{name}.rms_norm_eps", self.rms_norm_eps, "positive")
        require(
            self.rotary_dim >= 2 and self.rotary_dim % 2 == 0,
            f"{name}.rope.partial_rotary_factor",
            self.rope.partial_rotary_factor,
            f"such that head_dim = {self.head_dim} times it is even and at least 2",
        )
        section = self.rope.mrope_section
        require(
            not section or (len(section) == 3 and sum(section) == self.rotary_dim // 2),
            f"{name}.rope.mrope_section",
            section,
            f"empty or three numbers that sum to {self.rotary_dim // 2}",
        )

    @property
    def num_hidden_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layer_types)

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that rotate."""
        return int(self.head_dim * self.rope.partial_rotary_factor)

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: queries, keys and values of a GDN layer."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that an engine needs beside the model.

    Attributes
    ----------
    scheduler : SchedulerConfig
    cache : CacheConfig
    speculative : SpeculativeConfig or None
    keep_logits : bool
        Whether the record of a step holds the logits of the sampled rows.
    graph : GraphConfig or None
        Captured graphs that steps are padded for; None pads nothing.
    v0 : V0EngineConfig or None
        Plans steps by the legacy V0 scheduler; `scheduler` and `cache` then only size the batch
        and the pool. `v0_engine_config` makes one.
    """

    scheduler: SchedulerConfig
    cache: CacheConfig
    speculative: SpeculativeConfig | None = None
    keep_logits: bool = False
    graph: GraphConfig | None = None
    v0: V0EngineConfig | None = None

    def __post_init__(self) -> None:
        if self.v0 is not None:
            self.v0.require_fit(self)
        if self.graph is not None and self.graph.has_decode_routine and self.speculative:
            query_len = 1 + self.speculative.num_speculative_tokens
            require(
                all(size % query_len == 0 for size in self.graph.capture_sizes),
                "EngineConfig.graph.capture_sizes",
                self.graph.capture_sizes,
                f"multiples of 1 + num_speculative_tokens = {query_len} with mode "
                f"{self.graph.mode}",
            )


def gdn_groups_first(layer_types: tuple[LayerType, ...]) -> tuple[KVCacheGroup, ...]:
    """Divide layers into groups of one size that share a block table.

    Layers are bucketed by type in the order in which the types first appear (layer 0 of Qwen3.5
    is a GDN layer, so the GDN groups come first). The group size is that of the smaller bucket,
    or of the larger one if that is less than 1.5 times the smaller (one short group wastes less
    than many small ones). Layer ``j`` of a bucket goes to group ``j mod (number of its groups)``.

    Parameters
    ----------
    layer_types : tuple of {"linear_attention", "full_attention"}

    Returns
    -------
    tuple of KVCacheGroup

    Notes
    -----
    Source: ``get_kv_cache_groups`` of ``vllm/v1/core/kv_cache_utils.py``: Qwen3.5-9B with 24 GDN
    and 8 full-attention layers gets 3 GDN groups and 1 full-attention group of 8 layers each.
    """
    buckets: dict[LayerType, list[int]] = {}
    for index, layer_type in enumerate(layer_types):
        buckets.setdefault(layer_type, []).append(index)
    smallest = min(len(bucket) for bucket in buckets.values())
    largest = max(len(bucket) for bucket in buckets.values())
    size = largest if largest < 1.5 * smallest else smallest
    groups: list[KVCacheGroup] = []
    for layer_type, bucket in buckets.items():
        count = -(-len(bucket) // size)
        groups += [
            KVCacheGroup(layer_type=layer_type, layer_indices=tuple(bucket[i::count]))
            for i in range(count)
        ]
    return tuple(groups)
