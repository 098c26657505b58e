"""How the groups of a model divide sequences into blocks.

Derived once from the configurations. A full-attention group has one block for every `block_size`
tokens. A GDN group has one recurrent state for a whole prefix: in mode ``none`` one block spans
``max_model_len`` and is rewritten in place, in mode ``align`` blocks span as many tokens as those
of attention, and the block at index p holds the state after ``(p + 1) * block_size`` tokens.

Sources: ``get_kv_cache_spec`` of ``vllm/model_executor/layers/mamba/abstract.py``,
``resolve_kv_cache_block_sizes`` of ``vllm/v1/core/kv_cache_utils.py``, ``KVCacheManager.__init__``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from servespec.reference.contracts import (
    CacheConfig,
    Quirks,
    SchedulerConfig,
    SpeculativeConfig,
)

__all__ = ["CacheLayout", "GroupKind", "GroupLayout", "blocks_for", "make_layout"]


class GroupKind(Enum):
    """Which allocation rule a group follows."""

    FULL_ATTENTION = "full_attention"
    GDN_NONE = "gdn_none"
    GDN_ALIGN = "gdn_align"


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One group.

    Attributes
    ----------
    index : int
        Position in the block table.
    kind : GroupKind
    block_size : int
        Tokens that one block spans.
    num_speculative_blocks : int
        Further state blocks of a GDN group, one for each draft token: the state after a draft is
        kept apart until the draft is accepted. 0 for full attention.
    """

    index: int
    kind: GroupKind
    block_size: int
    num_speculative_blocks: int


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """All groups and the sizes they share.

    Attributes
    ----------
    groups : tuple of GroupLayout
    num_blocks : int
        Blocks in the pool, the null block included.
    block_size : int
        Tokens in a block of attention (and of a GDN group in mode ``align``).
    hash_block_size : int
        Tokens per prefix hash; finer than `block_size` if hits may end inside a block.
    max_model_len : int
    num_lookahead_tokens : int
        Slots kept for the drafter beyond the scheduled tokens.
    use_eagle : bool
        Whether a hit gives up its last unit for the drafter's hidden states.
    watermark_blocks : int
        Blocks that an admission leaves free.
    enable_caching : bool
    quirks : Quirks
        Oddities to reproduce.
    """

    groups: tuple[GroupLayout, ...]
    num_blocks: int
    block_size: int
    hash_block_size: int
    max_model_len: int
    num_lookahead_tokens: int
    use_eagle: bool
    watermark_blocks: int
    enable_caching: bool
    quirks: Quirks

    @property
    def has_gdn(self) -> bool:
        """Whether any group holds recurrent states."""
        return any(group.kind is not GroupKind.FULL_ATTENTION for group in self.groups)

    @property
    def is_aligned(self) -> bool:
        """Whether prefill chunks end at block boundaries, where states can be kept."""
        return any(group.kind is GroupKind.GDN_ALIGN for group in self.groups)

    @property
    def is_fine(self) -> bool:
        """Whether a prefix hit may end inside a block."""
        return self.hash_block_size < self.block_size

    def of_kind(self, *kinds: GroupKind) -> tuple[GroupLayout, ...]:
        """Return the groups of some kinds, in order."""
        return tuple(group for group in self.groups if group.kind in kinds)


def make_layout(
    scheduler: SchedulerConfig, cache: CacheConfig, speculative: SpeculativeConfig | None
) -> CacheLayout:
    """Derive the layout.

    Hits end inside blocks (``prefix_match_unit``) only where GDN states in mode ``align`` are
    cached beside attention; a single group is always hashed by whole blocks.
    """
    num_drafts = 0 if speculative is None else speculative.num_speculative_tokens
    groups = []
    for index, group in enumerate(cache.groups):
        if group.layer_type == "full_attention":
            layout = GroupLayout(index, GroupKind.FULL_ATTENTION, cache.block_size, 0)
        elif cache.mamba_cache_mode == "align":
            layout = GroupLayout(index, GroupKind.GDN_ALIGN, cache.block_size, num_drafts)
        else:
            layout = GroupLayout(index, GroupKind.GDN_NONE, scheduler.max_model_len, num_drafts)
        groups.append(layout)
    unit = cache.block_size
    if (
        cache.prefix_match_unit is not None
        and cache.enable_prefix_caching
        and cache.has_gdn
        and len(groups) > 1
    ):
        unit = cache.prefix_match_unit
    return CacheLayout(
        groups=tuple(groups),
        num_blocks=cache.num_gpu_blocks,
        block_size=cache.block_size,
        hash_block_size=unit,
        max_model_len=scheduler.max_model_len,
        num_lookahead_tokens=0 if speculative is None else speculative.num_lookahead_tokens,
        use_eagle=speculative is not None and speculative.use_eagle,
        watermark_blocks=int(scheduler.watermark * cache.num_gpu_blocks),
        enable_caching=cache.enable_prefix_caching,
        quirks=scheduler.quirks,
    )


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens`: the quotient, rounded up."""
    return -(-num_tokens // block_size)
