"""The fast path's attention operations behind the adapter protocol."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from servespec.conformance.adapters.base import AnyArray, AttentionUnderTest
from servespec.conformance.workloads.workload_attention import AttentionConfig
from servespec.fast.cache.memory import CacheMemory, PagedKV
from servespec.fast.kernels.attention import AttentionPlan, plan_attention, varlen_attention
from servespec.fast.kernels.int8_kv import (
    Int8Cache,
    Int8Step,
    dequantize_int8,
    gather_int8,
    int8_attention,
    write_int8,
)
from servespec.fast.kernels.kv_cache import packed_kv, plan_slots, write_kv
from servespec.reference.contracts import (
    AttentionMetadata,
    CacheConfig,
    ModelConfig,
    gdn_groups_first,
)

__all__ = ["FastAttention", "FastInt8Attention", "make_attention"]

_LAYER = 1


def make_attention(
    config: AttentionConfig,
    dtype: str,
    key_scale: AnyArray | None,
    value_scale: AnyArray | None,
) -> AttentionUnderTest:
    """Return a layer over float or INT8 K/V."""
    if key_scale is None or value_scale is None:
        return FastAttention(config, dtype)
    return FastInt8Attention(config, dtype, key_scale, value_scale)


def _array(tensor: Tensor) -> AnyArray:
    array: AnyArray = tensor.float().numpy()
    return array


class FastAttention:
    """A full-attention layer in the memory of an engine, beside a GDN layer that widens its pages.

    Parameters
    ----------
    config : AttentionConfig
    dtype : {"float32", "bfloat16"}
    """

    def __init__(self, config: AttentionConfig, dtype: str) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        model = ModelConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            layer_types=("linear_attention", "full_attention"),
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            linear_num_key_heads=1,
            linear_num_value_heads=1,
            linear_key_head_dim=3,
            linear_value_head_dim=5,
        )
        cache = CacheConfig(
            num_gpu_blocks=config.num_blocks,
            block_size=config.block_size,
            kernel_block_size=config.kernel_block_size,
            groups=gdn_groups_first(model.layer_types),
        )
        self.kv = CacheMemory(model, cache, self.dtype, poison=True).kv(_LAYER)

    def _tensor(self, array: AnyArray) -> Tensor:
        return torch.from_numpy(array).to(self.dtype)

    def load(self, key: AnyArray, value: AnyArray) -> None:
        """Overwrite the whole cache."""
        self.kv.key.copy_(torch.from_numpy(key))
        self.kv.value.copy_(torch.from_numpy(value))

    def pages(self) -> tuple[AnyArray, AnyArray]:
        """Return the whole cache."""
        return _array(self.kv.key).copy(), _array(self.kv.value).copy()

    def write(self, key: AnyArray, value: AnyArray, slot_mapping: Sequence[int]) -> None:
        """Write tokens."""
        slots = plan_slots(torch.tensor(slot_mapping, dtype=torch.int64), self.kv)
        write_kv(self._tensor(key), self._tensor(value), self.kv, slots)

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        """Plan a step."""
        return plan_attention(
            torch.tensor(metadata.query_start_loc, dtype=torch.int32),
            torch.tensor(metadata.seq_lens, dtype=torch.int32),
            torch.tensor(metadata.block_tables, dtype=torch.int32),
            self.kv,
        )

    def attend(
        self, query: AnyArray, key: AnyArray, value: AnyArray, metadata: AttentionMetadata
    ) -> AnyArray:
        """Attend to the cache."""
        return _array(varlen_attention(self._tensor(query), self.kv, self.plan(metadata)))

    def attend_packed(
        self,
        query: AnyArray,
        key: AnyArray,
        value: AnyArray,
        actual_seq_lengths: Sequence[int],
        actual_seq_lengths_kv: Sequence[int],
    ) -> AnyArray:
        """Attend with packed K and V."""
        kv: PagedKV
        kv, table = packed_kv(
            self._tensor(key), self._tensor(value), torch.tensor((0, *actual_seq_lengths_kv))
        )
        plan = plan_attention(
            torch.tensor((0, *actual_seq_lengths)),
            torch.tensor((0, *actual_seq_lengths_kv)).diff(),
            table,
            kv,
        )
        return _array(varlen_attention(self._tensor(query), kv, plan))

    def dequantized(
        self, block_tables: Sequence[Sequence[int]], seq_lens: Sequence[int]
    ) -> tuple[AnyArray, AnyArray]:
        """Refuse: nothing is quantised here.

        Raises
        ------
        ValueError
        """
        raise ValueError("FastAttention.dequantized: K and V are kept as they are")


class FastInt8Attention:
    """A layer over INT8 K/V.

    Parameters
    ----------
    config : AttentionConfig
    dtype : {"float32", "bfloat16"}
        Of the queries.
    key_scale, value_scale : numpy.ndarray
    """

    def __init__(
        self, config: AttentionConfig, dtype: str, key_scale: AnyArray, value_scale: AnyArray
    ) -> None:
        self.config = config
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.cache = Int8Cache.allocate(
            config.num_blocks,
            config.block_size,
            torch.from_numpy(key_scale),
            torch.from_numpy(value_scale),
        )
        self._shape = (
            config.num_blocks,
            config.block_size,
            config.num_key_value_heads,
            config.head_dim,
        )

    def _tensor(self, array: AnyArray) -> Tensor:
        return torch.from_numpy(array).to(self.dtype)

    def load(self, key: AnyArray, value: AnyArray) -> None:
        """Overwrite the whole cache."""
        for pages, memory in ((self.cache.key, key), (self.cache.value, value)):
            pages.copy_(torch.from_numpy(memory).view(pages.shape))

    def pages(self) -> tuple[AnyArray, AnyArray]:
        """Return the whole cache."""
        return (
            self.cache.key.numpy().reshape(self._shape).copy(),
            self.cache.value.numpy().reshape(self._shape).copy(),
        )

    def write(self, key: AnyArray, value: AnyArray, slot_mapping: Sequence[int]) -> None:
        """Quantise and write tokens."""
        slots = torch.tensor(slot_mapping, dtype=torch.int64)
        write_int8(self.cache, self._tensor(key), self._tensor(value), slots)

    def dequantized(
        self, block_tables: Sequence[Sequence[int]], seq_lens: Sequence[int]
    ) -> tuple[AnyArray, AnyArray]:
        """Return what the rows read back."""
        read = []
        for pages, scale in (
            (self.cache.key, self.cache.key_scale),
            (self.cache.value, self.cache.value_scale),
        ):
            rows = dequantize_int8(gather_int8(pages, torch.tensor(block_tables)), scale)
            read.append(
                np.concatenate(
                    [_array(row[:length]) for row, length in zip(rows, seq_lens, strict=True)]
                )
            )
        return read[0], read[1]

    def attend(
        self, query: AnyArray, key: AnyArray, value: AnyArray, metadata: AttentionMetadata
    ) -> AnyArray:
        """Attend to the cache."""
        step = Int8Step(
            query_start_loc=torch.tensor(metadata.query_start_loc, dtype=torch.int32),
            seq_lens=torch.tensor(metadata.seq_lens, dtype=torch.int32),
            block_table=torch.tensor(metadata.block_tables, dtype=torch.int32),
            num_decodes=metadata.num_decodes,
            attn_state=metadata.attn_state,
        )
        attended = int8_attention(
            self._tensor(query),
            self._tensor(key),
            self._tensor(value),
            self.cache,
            step,
            self.config.head_dim**-0.5,
            self.config.int8_profile,
        )
        return _array(attended)

    def attend_packed(
        self,
        query: AnyArray,
        key: AnyArray,
        value: AnyArray,
        actual_seq_lengths: Sequence[int],
        actual_seq_lengths_kv: Sequence[int],
    ) -> AnyArray:
        """Refuse: integers are read from pages.

        Raises
        ------
        ValueError
        """
        raise ValueError("FastInt8Attention.attend_packed: K and V in 8 bits are in pages")
