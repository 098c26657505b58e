"""Writing K and V to their pages, as floats or as INT8.

Sources: ``reshape_and_cache`` of vLLM 0.27.1 and vllm-ascend (slots name blocks and offsets, a
negative slot is padding); ``AscendC8AttentionBackendImpl`` of vllm-ascend for the quantisation,
which rounds every intermediate to bfloat16, halves to even, and for the fractal layout.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from servespec.fast.backends.base import Backend

__all__ = ["write_int8", "write_kv"]


@triton.jit
def _write(
    X, Pages, Slots, s_token, s_head, s_page, s_slot, s_page_head, block_size,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    token = tl.program_id(1)
    slot = tl.load(Slots + token).to(tl.int64)
    if slot >= 0:
        d = tl.arange(0, BLOCK)
        x = tl.load(X + token * s_token + head * s_head + d, mask=d < D, other=0.0)
        page = slot // block_size
        place = page * s_page + (slot - page * block_size) * s_slot + head * s_page_head
        tl.store(Pages + place + d, x, mask=d < D)


def write_kv(
    backend: Backend,
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Write each token's K and V to its slot.

    Parameters
    ----------
    backend : Backend
    key, value : Tensor
        ``[T, G, D]``.
    key_pages, value_pages : Tensor
        ``[num_blocks, block_size, G, D]`` in the same dtype, changed in place.
    slot_mapping : Tensor
        ``[T]`` int32 or int64, ``block * block_size + offset``; negative for padding.
    """
    tokens, heads, dim = key.shape
    for x, pages in ((key, key_pages), (value, value_pages)):
        backend.launch(
            _write,
            (heads, tokens),
            *(x, pages, slot_mapping, x.stride(0), x.stride(1)),
            *pages.stride()[:3],
            pages.shape[1],
            D=dim,
            BLOCK=triton.next_power_of_2(dim),
        )


@triton.jit
def _quantize(X, Pages, Scale, Slots, s_token, s_head, s_page, block_size, D: tl.constexpr):
    head = tl.program_id(0)
    token = tl.program_id(1)
    slot = tl.load(Slots + token).to(tl.int64)
    if slot >= 0:
        page = slot // block_size
        place = page * s_page + head * D * block_size + (slot - page * block_size) * 32
        part = tl.arange(0, D // 32)[:, None]
        inner = tl.arange(0, 32)[None, :]
        d = part * 32 + inner
        x = tl.load(X + token * s_token + head * s_head + d).to(tl.bfloat16).to(tl.float32)
        scale = tl.load(Scale + head * D + d).to(tl.float32)
        inverse = (1.0 / scale).to(tl.bfloat16).to(tl.float32)
        scaled = (x * inverse).to(tl.bfloat16).to(tl.float32)
        scaled = tl.minimum(tl.maximum(scaled, -128.0), 127.0)
        # Half to even, from the floor and what is left over.
        low = tl.floor(scaled)
        rest = scaled - low
        odd = low - 2.0 * tl.floor(low * 0.5)
        up = (rest > 0.5) | ((rest == 0.5) & (odd == 1.0))
        rounded = tl.where(up, low + 1.0, low)
        tl.store(Pages + place + part * (block_size * 32) + inner, rounded.to(tl.int8))


def write_int8(
    backend: Backend,
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Quantise a step's K and V into their slots.

    Parameters
    ----------
    backend : Backend
    key, value : Tensor
        ``[T, G, D]``, taken as bfloat16; D is a multiple of 32, and D / 32 a power of two.
    key_pages, value_pages : Tensor
        ``[num_blocks, G, D / 32, block_size, 32]`` int8, changed in place.
    key_scale, value_scale : Tensor
        ``[G, D]`` bfloat16, positive, contiguous.
    slot_mapping : Tensor
        As for `write_kv`.
    """
    tokens, heads, dim = key.shape
    for x, pages, scale in ((key, key_pages, key_scale), (value, value_pages, value_scale)):
        backend.launch(
            _quantize,
            (heads, tokens),
            *(x, pages, scale, slot_mapping, x.stride(0), x.stride(1)),
            *(pages.stride(0), pages.shape[3]),
            D=dim,
        )
