"""The reference's attention numerics behind the adapter protocol, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from servespec.conformance.adapters.base import AnyArray
from servespec.conformance.workloads.workload_attention import AttentionConfig
from servespec.reference.contracts import AttentionMetadata
from servespec.reference.numerics import int8_kv, layouts
from servespec.reference.numerics.int8_kv import Int8Pages, int8_scales

__all__ = ["ReferenceAttention"]

Rows = tuple[npt.NDArray[np.float64], ...]


class ReferenceAttention:
    """One layer over a cache of float64 values, or of int8 in the NZ layout.

    Parameters
    ----------
    config : AttentionConfig
    key_scale, value_scale : numpy.ndarray or None
        With INT8 K/V.
    """

    def __init__(
        self,
        config: AttentionConfig,
        key_scale: AnyArray | None = None,
        value_scale: AnyArray | None = None,
    ) -> None:
        self.config = config
        heads, dim = config.num_key_value_heads, config.head_dim
        self.scale = dim**-0.5
        self.scales = (
            None
            if key_scale is None or value_scale is None
            else int8_scales(key_scale, value_scale, heads, dim)
        )
        shape = (config.num_blocks, config.block_size, heads, dim)
        kind = np.float64 if self.scales is None else np.int8
        self._key: AnyArray = np.zeros(shape, kind)
        self._value: AnyArray = np.zeros(shape, kind)

    def load(self, key: AnyArray, value: AnyArray) -> None:
        """Overwrite the whole cache."""
        self._key, self._value = key.astype(self._key.dtype), value.astype(self._value.dtype)

    def pages(self) -> tuple[AnyArray, AnyArray]:
        """Return the whole cache."""
        return self._key, self._value

    def write(self, key: AnyArray, value: AnyArray, slot_mapping: Sequence[int]) -> None:
        """Write tokens."""
        if self.scales is not None:
            quantized = (
                int8_kv.write_tokens(pages, slot_mapping, int8_kv.quantize(tokens, scale))
                for pages, tokens, scale in (
                    (self._key, key, self.scales.key),
                    (self._value, value, self.scales.value),
                )
            )
            self._key, self._value = quantized
            return
        slots = np.asarray(slot_mapping, np.int64)
        kept = slots >= 0
        for pages, tokens in ((self._key, key), (self._value, value)):
            pages.reshape(-1, *pages.shape[2:])[slots[kept]] = tokens[kept]

    def dequantized(
        self, block_tables: Sequence[Sequence[int]], seq_lens: Sequence[int]
    ) -> tuple[AnyArray, AnyArray]:
        """Return what the rows read back."""
        assert self.scales is not None
        key, value = (
            int8_kv.dequantize(
                np.concatenate(int8_kv.gather_rows(pages, block_tables, seq_lens)), scale
            )
            for pages, scale in ((self._key, self.scales.key), (self._value, self.scales.value))
        )
        return key, value

    def operands(
        self, key: AnyArray, value: AnyArray, metadata: AttentionMetadata
    ) -> tuple[Rows, Rows]:
        """Return the keys and values that each row attends to."""
        if self.scales is not None:
            return int8_kv.int8_operands(
                key.astype(np.float64),
                value.astype(np.float64),
                Int8Pages(key=self._key, value=self._value),
                metadata,
                self.scales,
                self.config.int8_profile,
            )
        shape = (-1, self.config.kernel_block_size, *self._key.shape[2:])
        keys, values = (
            layouts.rows_of_pages(pages.reshape(shape), metadata.block_tables, metadata.seq_lens)
            for pages in (self._key, self._value)
        )
        return keys, values

    def attend(
        self, query: AnyArray, key: AnyArray, value: AnyArray, metadata: AttentionMetadata
    ) -> AnyArray:
        """Attend to the cache."""
        queries = layouts.rows_of_packed(query.astype(np.float64), metadata.actual_seq_lengths_q)
        return layouts.rows_attention(queries, *self.operands(key, value, metadata), self.scale)

    def attend_packed(
        self,
        query: AnyArray,
        key: AnyArray,
        value: AnyArray,
        actual_seq_lengths: Sequence[int],
        actual_seq_lengths_kv: Sequence[int],
    ) -> AnyArray:
        """Attend with packed K and V."""
        return layouts.packed_attention(
            query.astype(np.float64),
            key.astype(np.float64),
            value.astype(np.float64),
            actual_seq_lengths,
            actual_seq_lengths_kv,
            self.scale,
        )
