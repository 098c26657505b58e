"""The physical memory behind the block pool: pages that attention and GDN layers share.

The p-th layers of all groups share one buffer of pages, and a block id is in use by one group at
a time; so the page of block ``b`` holds either the K and V of `CacheConfig.block_size` tokens or
one GDN state, and ``b`` alone says where. A page is as large as the larger of the two:

    attention page   K [block_size, G, D]  V [block_size, G, D]           model dtype
    GDN page         S [Hv, dv, dk] float32, conv [width - 1 + K, C]      model dtype

Nothing is cleared on allocation: what was never written, or is left over from another use of a
block, must not be read. One page beyond the pool stays zero for ever; reads that pad a short
sequence are pointed at it.

Sources: ``KVCacheTensor`` and ``_align_hybrid_block_size`` of vLLM 0.27.1 (sharing and the block
size), vllm-ascend ``gdn`` (states V-major, convolution window oldest first, channels contiguous).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from servespec.reference.contracts import (
    BlockCopy,
    CacheConfig,
    KVCacheGroup,
    ModelConfig,
    SchedulerOutput,
    require,
)

__all__ = [
    "CacheMemory",
    "GdnStates",
    "PagedKV",
    "aligned_block_size",
    "attention_token_bytes",
    "bytes_per_block",
    "gdn_state_bytes",
]

_STATE_BYTES = torch.float32.itemsize
# Pages start on a cache line, which also keeps the float32 and model-dtype views aligned.
_PAGE_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKV:
    """K and V of one full-attention layer.

    Attributes
    ----------
    key, value : Tensor
        ``[num_blocks, block_size, G, D]`` views, strided over pages.
    rows : Tensor
        ``[num_rows, G * D]``: the whole buffer, the zero page included, as contiguous rows of one
        token's K or V. Slot ``b * block_size + o`` has its K in row ``b * rows_per_page + o`` and
        its V `block_size` rows later.
    rows_per_page : int
    block_size : int
    kernel_block_size : int
        Tokens that one entry of a block table covers; consecutive entries make up a page.
    zero_row : int
        A row that is always zero, for K and V alike.
    """

    key: Tensor
    value: Tensor
    rows: Tensor
    rows_per_page: int
    block_size: int
    kernel_block_size: int
    zero_row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnStates:
    """States of one GDN layer, one slot a block.

    Attributes
    ----------
    ssm : Tensor
        ``[num_blocks, Hv, dv, dk]`` float32.
    conv : Tensor
        ``[num_blocks, width - 1 + K, C]`` in the model dtype: raw inputs of the convolution,
        oldest first.
    """

    ssm: Tensor
    conv: Tensor


def attention_token_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one token's K and V in one full-attention layer."""
    return 2 * model.num_key_value_heads * model.head_dim * dtype.itemsize


def gdn_state_bytes(model: ModelConfig, dtype: torch.dtype, num_speculative_tokens: int = 0) -> int:
    """Bytes of one request's state in one GDN layer: float32 matrix and convolution window."""
    matrix = model.linear_num_value_heads * model.linear_value_head_dim * model.linear_key_head_dim
    window = (model.linear_conv_kernel_dim - 1 + num_speculative_tokens) * model.conv_dim
    return matrix * _STATE_BYTES + window * dtype.itemsize


def aligned_block_size(
    model: ModelConfig,
    dtype: torch.dtype,
    num_speculative_tokens: int = 0,
    multiple: int = 16,
) -> int:
    """Smallest attention block, in tokens, whose page covers a GDN state.

    Parameters
    ----------
    model : ModelConfig
    dtype : torch.dtype
        Of K, V and the convolution window.
    num_speculative_tokens : int
        Drafts a step may carry; each widens the convolution window by one input.
    multiple : int
        The block size is a multiple of this, as kernels ask for.

    Returns
    -------
    int

    Notes
    -----
    Source: ``_align_hybrid_block_size`` of vLLM 0.27.1. Qwen3.5-9B in bfloat16 gets 528 tokens,
    and 544 with three drafts.
    """
    if "linear_attention" not in model.layer_types:
        return multiple
    per_token = attention_token_bytes(model, dtype) * multiple
    return multiple * -(-gdn_state_bytes(model, dtype, num_speculative_tokens) // per_token)


def _page_bytes(
    model: ModelConfig,
    groups: Iterable[KVCacheGroup],
    block_size: int,
    dtype: torch.dtype,
    num_speculative_tokens: int,
) -> int:
    types = {group.layer_type for group in groups}
    token = attention_token_bytes(model, dtype)
    page = 0
    # A page is a whole number of token rows, so that the buffer is one matrix of them.
    alignment = _PAGE_ALIGNMENT
    if "full_attention" in types:
        page = block_size * token
        alignment = math.lcm(alignment, token // 2)
    if "linear_attention" in types:
        page = max(page, gdn_state_bytes(model, dtype, num_speculative_tokens))
    return -(-page // alignment) * alignment


def bytes_per_block(
    model: ModelConfig,
    groups: Sequence[KVCacheGroup],
    block_size: int,
    dtype: torch.dtype,
    num_speculative_tokens: int = 0,
) -> int:
    """Bytes that one more block in the pool costs: a page for each layer position."""
    positions = max(len(group.layer_indices) for group in groups)
    return positions * _page_bytes(model, groups, block_size, dtype, num_speculative_tokens)


class CacheMemory:
    """Pages for every layer position, and typed views on them.

    Parameters
    ----------
    model : ModelConfig
    cache : CacheConfig
        Its groups must cover every layer of the model once, each with its own type.
    dtype : torch.dtype
        Of K, V and the convolution windows.
    device : torch.device or str
    num_speculative_tokens : int
        Widens the convolution windows.
    poison : bool
        Fill the pages with NaN in place of leaving them uninitialised.

    Attributes
    ----------
    pages : tuple of Tensor
        For each layer position, ``[num_blocks + 1, page_bytes]`` uint8; the last page is zero.
    attention_layers, gdn_layers : tuple of tuple of int
        Layer indices of each group of the type, in group order.

    Raises
    ------
    ConfigError
        The groups and the layers of the model do not match.
    """

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        num_speculative_tokens: int = 0,
        poison: bool = False,
    ) -> None:
        _check_groups(model, cache)
        self.model = model
        self.dtype = dtype
        self.num_blocks = cache.num_gpu_blocks
        self.block_size = cache.block_size
        self.kernel_block_size = cache.kernel_block_size or cache.block_size
        self.num_speculative_tokens = num_speculative_tokens
        page_bytes = _page_bytes(
            model, cache.groups, cache.block_size, dtype, num_speculative_tokens
        )
        positions = max(len(group.layer_indices) for group in cache.groups)
        self.pages = tuple(
            torch.empty((self.num_blocks + 1, page_bytes), dtype=torch.uint8, device=device)
            for _ in range(positions)
        )
        for pages in self.pages:
            if poison:
                # Every float format reads all-ones bits as NaN.
                pages.fill_(0xFF)
            pages[self.num_blocks].zero_()
        self.attention_layers, self.gdn_layers = (
            tuple(group.layer_indices for group in cache.groups if group.layer_type == kind)
            for kind in ("full_attention", "linear_attention")
        )
        self._kv: dict[int, PagedKV] = {}
        self._gdn: dict[int, GdnStates] = {}
        for group in cache.groups:
            for position, layer in enumerate(group.layer_indices):
                if group.layer_type == "full_attention":
                    self._kv[layer] = self._kv_views(self.pages[position])
                else:
                    self._gdn[layer] = self._gdn_views(self.pages[position])

    def kv(self, layer: int) -> PagedKV:
        """K and V of a full-attention layer, by its index in the model."""
        return self._kv[layer]

    def gdn(self, layer: int) -> GdnStates:
        """States of a GDN layer, by its index in the model."""
        return self._gdn[layer]

    def apply(self, output: SchedulerOutput) -> None:
        """Do what a step asks of the memory before it runs: clear blocks, then copy blocks."""
        self.zero(output.new_block_ids_to_zero)
        self.copy(output.kv_cache_block_copies)

    def zero(self, block_ids: Sequence[int]) -> None:
        """Clear the pages of some blocks."""
        if not block_ids:
            return
        index = torch.tensor(block_ids, dtype=torch.int64, device=self.pages[0].device)
        for pages in self.pages:
            pages.index_fill_(0, index, 0)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy pages; every source is read before any destination is written."""
        if not copies:
            return
        device = self.pages[0].device
        source = torch.tensor([c.src_block_id for c in copies], device=device)
        destination = torch.tensor([c.dst_block_id for c in copies], device=device)
        for pages in self.pages:
            pages.index_copy_(0, destination, pages.index_select(0, source))

    def clear_states(self, layers: Sequence[int], slots: Tensor) -> None:
        """Make the states of some slots those of a request that starts.

        Parameters
        ----------
        layers : sequence of int
            GDN layers.
        slots : Tensor
            ``[n]`` int64.
        """
        for layer in layers:
            self._gdn[layer].ssm.index_fill_(0, slots, 0.0)
            self._gdn[layer].conv.index_fill_(0, slots, 0.0)

    def move_states(self, layers: Sequence[int], source: Tensor, destination: Tensor) -> None:
        """Copy states between slots; the source keeps its own, for others to find.

        Parameters
        ----------
        layers : sequence of int
            GDN layers.
        source, destination : Tensor
            ``[n]`` int64; no destination is also a source or named twice.
        """
        for layer in layers:
            for states in (self._gdn[layer].ssm, self._gdn[layer].conv):
                states.index_copy_(0, destination, states.index_select(0, source))

    def _kv_views(self, pages: Tensor) -> PagedKV:
        heads, dim = self.model.num_key_value_heads, self.model.head_dim
        elements = self.block_size * heads * dim
        typed = pages.view(self.dtype)
        shape = (self.num_blocks, self.block_size, heads, dim)
        rows_per_page = typed.shape[1] // (heads * dim)
        return PagedKV(
            key=torch.unflatten(typed[: self.num_blocks, :elements], 1, shape[1:]),
            value=torch.unflatten(typed[: self.num_blocks, elements : 2 * elements], 1, shape[1:]),
            rows=typed.view(-1, heads * dim),
            rows_per_page=rows_per_page,
            block_size=self.block_size,
            kernel_block_size=self.kernel_block_size,
            zero_row=self.num_blocks * rows_per_page,
        )

    def _gdn_views(self, pages: Tensor) -> GdnStates:
        model = self.model
        shape = (
            model.linear_num_value_heads,
            model.linear_value_head_dim,
            model.linear_key_head_dim,
        )
        matrix = math.prod(shape)
        width = model.linear_conv_kernel_dim - 1 + self.num_speculative_tokens
        start = matrix * _STATE_BYTES // self.dtype.itemsize
        used = pages[: self.num_blocks]
        return GdnStates(
            ssm=torch.unflatten(used.view(torch.float32)[:, :matrix], 1, shape),
            conv=torch.unflatten(
                used.view(self.dtype)[:, start : start + width * model.conv_dim],
                1,
                (width, model.conv_dim),
            ),
        )


def _check_groups(model: ModelConfig, cache: CacheConfig) -> None:
    layers = {layer: group.layer_type for group in cache.groups for layer in group.layer_indices}
    require(
        layers == dict(enumerate(model.layer_types)),
        "CacheConfig.groups",
        tuple((group.layer_type, group.layer_indices) for group in cache.groups),
        f"a division of the model's {model.num_hidden_layers} layers, each under its own type",
    )
