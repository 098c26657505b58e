"""Suite ``attention``: one equation, whatever the layout, over one cache and several steps.

Each step writes its tokens, reads them back and attends. The pages must hold the same values as
the reference's, INT8 bytes and what they are dequantised to included, everywhere: slots that no
step wrote hold NaN (in INT8 any bytes) and must keep it. The results must lie within a bound, with
K and V read from pages and, where they are no integers, packed.

The bound of one element. Let ``u`` be 2**-24, since bfloat16 is accumulated in float32 too, D the
dimension of a head, m the keys that a query sees, and s the largest ``sum |q_d k_d| * scale`` over
them. A score is a sum of D products with a factor: in any order it is off by at most
``(D + 2) u s`` (Higham, Accuracy and Stability of Numerical Algorithms, 3.1). Subtracting the
largest score doubles that and rounds once more, so an exponential is off by the relative
``exp(2 (D + 3) u s) - 1``; an exponential of vectorised code itself by 20 units in the last place,
which are 40 u; their sum by m u, and the weighted sum of values by ``(m + 2) u``. All of these are
relative to a weight, hence to the mean of |v| under the reference's own weights. Beside them stand
exponentials below the smallest normal number, lost in m terms. bfloat16 rounds the weights and the
result once each, by 2**-8.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from servespec.conformance.adapters.base import AnyArray, AttentionFactory, AttentionUnderTest
from servespec.conformance.adapters.failure import ImplementationFailed
from servespec.conformance.adapters.reference_attention import ReferenceAttention
from servespec.conformance.cases.case import Case, Dtype
from servespec.conformance.checks.foreign import made
from servespec.conformance.checks.numbers import float_array
from servespec.conformance.checks.suite import Suite
from servespec.conformance.compare import shown
from servespec.conformance.verdicts import DivergedError, Divergence, Tally
from servespec.conformance.workloads.attention import attention_cases
from servespec.conformance.workloads.workload_attention import (
    AttentionCase,
    AttentionRow,
    AttentionStep,
)
from servespec.conformance.workloads.workload_v0 import NO_ENGINE, NO_WORKLOAD
from servespec.reference.batch.block_tables import kernel_blocks, pad_table
from servespec.reference.batch.metadata import attention_metadata, cumulative
from servespec.reference.contracts import AttentionMetadata
from servespec.reference.numerics import int8_kv
from servespec.reference.numerics.attention import attention
from servespec.reference.numerics.bfloat16 import round_bfloat16
from servespec.reference.numerics.layouts import rows_of_packed

__all__ = ["SUITE", "attention_bound", "cases", "check", "metadata_of"]

Array = npt.NDArray[np.float64]

UNIT_ROUNDOFF = 2.0**-24
BFLOAT16_ROUNDOFF = 2.0**-8


def attention_bound(query: Array, key: Array, value: Array, scale: float, dtype: Dtype) -> Array:
    """Return the largest error allowed to each element of one row.

    Parameters
    ----------
    query : numpy.ndarray
        ``[n, heads, D]``.
    key, value : numpy.ndarray
        ``[kv, G, D]``.
    scale : float
    dtype : {"float32", "bfloat16"}

    Returns
    -------
    numpy.ndarray
        ``[n, heads, D]``.
    """
    n, heads, dim = query.shape
    kv, kv_heads, _ = key.shape
    mean = attention(query, key, np.abs(value), scale)
    if n == 0:
        return mean
    seen = np.arange(kv - n, kv) + 1
    grouped = np.abs(query).reshape(n, kv_heads, heads // kv_heads, dim).transpose(1, 2, 0, 3)
    sizes = grouped @ np.abs(key).transpose(1, 2, 0)[:, None] * scale
    sizes = np.where(np.arange(kv) < seen[:, None], sizes, 0.0).max(axis=-1)
    size = sizes.transpose(2, 0, 1).reshape(n, heads, 1)
    terms = seen[:, None, None]
    relative = np.expm1(2 * (dim + 3) * UNIT_ROUNDOFF * size)
    relative = relative + (2 * terms + 42) * UNIT_ROUNDOFF
    if dtype == "bfloat16":
        relative = relative + 2 * BFLOAT16_ROUNDOFF + BFLOAT16_ROUNDOFF**2
    lost = terms * float(np.finfo(np.float32).tiny) * np.abs(value).max()
    bound: Array = relative * mean + lost
    return bound


def metadata_of(case: AttentionCase, step: AttentionStep) -> AttentionMetadata:
    """Return what a layer is told of a step, its tables in kernel blocks."""
    config = case.config
    ratio = config.block_size // config.kernel_block_size
    starts = cumulative([row.num_scheduled_tokens for row in step.rows])
    return attention_metadata(
        starts,
        [row.seq_len for row in step.rows],
        pad_table([kernel_blocks(row.block_ids, ratio) for row in step.rows]),
        [slot for row in step.rows for slot in _own_slots(row, config.block_size)],
        step.num_speculative_tokens,
        step.attn_state,
        (*starts, *(starts[-1:] * step.num_dummy_rows)),
        len(step.rows) + step.num_dummy_rows,
    )


def _own_slots(row: AttentionRow, block_size: int) -> tuple[int, ...]:
    return row.slots(row.num_computed_tokens, row.seq_len, block_size)


@dataclass(slots=True)
class _Run:
    """One case on both sides."""

    case: AttentionCase
    dtype: Dtype
    reference: ReferenceAttention
    candidate: AttentionUnderTest
    random: np.random.Generator
    written: set[int]

    @property
    def is_int8(self) -> bool:
        return self.case.config.kv_cache_dtype == "int8"

    def draw(self, tokens: int, heads: int, scale: float = 1.0) -> npt.NDArray[np.float32]:
        """Return values that the dtype holds exactly."""
        shape = (tokens, heads, self.case.config.head_dim)
        values = (scale * self.random.standard_normal(shape)).astype(np.float32)
        if self.dtype == "bfloat16" or self.is_int8:
            return round_bfloat16(values).astype(np.float32)
        return values

    def load(self) -> None:
        """Poison the whole cache."""
        config = self.case.config
        shape = (config.num_blocks, config.block_size, config.num_key_value_heads, config.head_dim)
        memory: list[AnyArray] = [
            self.random.integers(-128, 128, shape, np.int8)
            if self.is_int8
            else np.full(shape, np.nan, np.float32)
            for _ in range(2)
        ]
        self.reference.load(*memory)
        self.candidate.load(*(array.copy() for array in memory))

    def write(self, slots: list[int], key: AnyArray, value: AnyArray) -> None:
        self.reference.write(key, value, slots)
        self.candidate.write(key.copy(), value.copy(), slots)
        self.written.update(slot for slot in slots if slot >= 0)

    def step(self, step: AttentionStep, number: int, tally: Tally) -> None:
        config = self.case.config
        size, heads = config.block_size, config.num_key_value_heads
        metadata = metadata_of(self.case, step)
        known = {
            slot: None for row in step.rows for slot in row.slots(0, row.num_computed_tokens, size)
        }
        context = [slot for slot in known if slot not in self.written]
        if context:
            self.write(context, self.draw(len(context), heads), self.draw(len(context), heads))
        tokens = metadata.num_actual_tokens
        query = self.draw(tokens, config.num_attention_heads, self.case.query_scale)
        padding = step.num_padding_tokens
        key, value = (self.draw(tokens + padding, heads) for _ in range(2))
        self.write([*metadata.slot_mapping, *[-1] * padding], key, value)
        self.compare_pages(number)
        if self.is_int8:
            self.compare_dequantized(metadata, number)
        own = key[:tokens], value[:tokens]
        operands = self.reference.operands(*own, metadata)
        expected = self.reference.attend(query, *own, metadata)
        queries = rows_of_packed(query.astype(np.float64), metadata.actual_seq_lengths_q)
        bound = np.concatenate(
            [
                attention_bound(*row, self.reference.scale, self.dtype)
                for row in zip(queries, *operands, strict=True)
            ]
        )
        got = self.candidate.attend(query.copy(), *own, metadata)
        compare(expected, got, bound, metadata, "output", number)
        if not self.is_int8:
            lengths = tuple(accumulate(row.seq_len for row in step.rows))
            keys, values = (np.concatenate(rows).astype(np.float32) for rows in operands)
            ends = metadata.actual_seq_lengths_q[: len(step.rows)]
            got = self.candidate.attend_packed(query.copy(), keys, values, ends, lengths)
            compare(expected, got, bound, metadata, "packed_output", number)
        self.compare_pages(number)
        tally.tokens += tokens
        self.count(step, metadata, tally.counts)

    def compare_pages(self, number: int) -> None:
        pages = self.candidate.pages()
        for name, expected, got in zip(
            ("key_pages", "value_pages"), self.reference.pages(), _pair(pages), strict=True
        ):
            _compare_exactly(expected, got, name, number)

    def compare_dequantized(self, metadata: AttentionMetadata, number: int) -> None:
        where = metadata.block_tables, metadata.seq_lens
        read = self.candidate.dequantized(*where)
        for name, expected, got in zip(
            ("dequantized_key", "dequantized_value"),
            self.reference.dequantized(*where),
            _pair(read),
            strict=True,
        ):
            _compare_exactly(expected, got, name, number)

    def count(self, step: AttentionStep, metadata: AttentionMetadata, counts: Counter[str]) -> None:
        """Count what a step was made of."""
        config, rows = self.case.config, step.rows
        counts["rows"] += len(rows)
        counts[step.attn_state.value] += 1
        counts[f"{config.kv_cache_dtype} {self.dtype}"] += 1
        counts["dummy_rows"] += step.num_dummy_rows
        counts["padding_tokens"] += step.num_padding_tokens
        counts["grouped_heads"] += config.num_attention_heads > config.num_key_value_heads
        counts["kernel_blocks"] += config.kernel_block_size < config.block_size
        tables = [set(row.block_ids) for row in rows]
        for index, row in enumerate(rows):
            new, one = row.num_computed_tokens == 0, row.num_scheduled_tokens == 1
            counts["new_rows" if new else "decode_rows" if one else "continued_rows"] += 1
            counts["one_key_rows"] += row.seq_len == 1
            counts["full_blocks"] += row.seq_len % config.block_size == 0
            counts["repeated_blocks"] += len(tables[index]) < len(row.block_ids)
            counts["shared_blocks"] += any(tables[index] & other for other in tables[:index])
        if self.is_int8:
            counts[config.int8_profile] += 1
            kept = int8_kv.rows_kept_float(metadata, config.int8_profile)
            counts["rows_kept_float"] += sum(kept)


def _pair(value: object) -> tuple[object, object]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ImplementationFailed(f"{shown(value)} must be a pair of arrays")
    return value[0], value[1]


def _compare_exactly(expected: AnyArray, value: object, field: str, number: int) -> None:
    got = float_array(value, expected.shape, field)
    same = (expected == got) | (np.isnan(expected) & np.isnan(got))
    if not same.all():
        _diverge(field, np.unravel_index(int(same.argmin()), same.shape), expected, got, number)


def compare(
    expected: Array,
    value: object,
    bound: Array,
    metadata: AttentionMetadata,
    field: str,
    number: int,
) -> None:
    """Compare results.

    Parameters
    ----------
    expected, bound : numpy.ndarray
        ``[T, heads, D]``.
    value : object
        The implementation's.
    metadata : AttentionMetadata
        Tells the row of a token.
    field : str
    number : int
        The step.

    Raises
    ------
    DivergedError
        Naming the element that is furthest off its bound.
    """
    got = float_array(value, expected.shape, field)
    excess = np.where(np.isfinite(got), np.abs(got - expected) / bound, np.inf)
    worst = np.unravel_index(int(excess.argmax()), excess.shape)
    if excess[worst] > 1:
        ends = metadata.actual_seq_lengths_q
        row = next(index for index, end in enumerate(ends) if worst[0] < end)
        _diverge(field, worst, expected, got, number, f" +- {bound[worst]:.2g}", f"row {row}")


def _diverge(
    field: str,
    at: tuple[np.intp, ...],
    expected: AnyArray,
    got: AnyArray,
    number: int,
    margin: str = "",
    row: str | None = None,
) -> None:
    raise DivergedError(
        Divergence(
            field=f"{field}[{', '.join(map(str, at))}]",
            expected=f"{expected[at]:.7g}{margin}",
            got=f"{got[at]:.7g}",
            step=number,
            request=row,
        )
    )


def check(case: Case, implementation: AttentionFactory, tally: Tally) -> None:
    """Run one case.

    Parameters
    ----------
    case : Case
    implementation : AttentionFactory
    tally : Tally

    Raises
    ------
    DivergedError, ImplementationFailed
    ValueError
        If the case has no attention part.
    """
    given = case.attention
    if given is None:
        raise ValueError("case.attention is null: suite attention needs it")
    config = given.config
    random = np.random.default_rng(given.seed)
    scales: list[AnyArray] = []
    if config.kv_cache_dtype == "int8":
        # Values are about 1, so that some saturate and others are a few steps.
        shape = (config.num_key_value_heads, config.head_dim)
        scales = [
            round_bfloat16(random.uniform(0.005, 0.08, shape)).astype(np.float32) for _ in range(2)
        ]
    run = _Run(
        given,
        case.dtype,
        ReferenceAttention(config, *scales),
        made("attention layer", implementation.make_attention, config, case.dtype, *scales),
        random,
        set(),
    )
    run.load()
    for number, step in enumerate(given.steps):
        run.step(step, number, tally)
        tally.steps += 1


def cases() -> st.SearchStrategy[Case]:
    """Return the strategy that makes cases of this suite."""
    empty = partial(Case, suite="attention", config=NO_ENGINE, workload=NO_WORKLOAD)
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    return st.builds(
        lambda dtype, given: empty(dtype=dtype, attention=given),
        st.sampled_from(dtypes),
        attention_cases(),
    )


SUITE = Suite(
    name="attention",
    summary="K and V written, quantised, read back and attended to, in every layout",
    needs="make_attention",
    cases=cases,
    check=check,
    sizes={"quick": 400, "standard": 5000, "full": 100_000},
    must_reach=(
        "new_rows",
        "decode_rows",
        "continued_rows",
        "one_key_rows",
        "full_blocks",
        "repeated_blocks",
        "shared_blocks",
        "dummy_rows",
        "padding_tokens",
        "grouped_heads",
        "kernel_blocks",
        "auto float32",
        "auto bfloat16",
        "int8 float32",
        "int8 bfloat16",
        "pinned",
        "invariant",
        "rows_kept_float",
        "PrefillNoCache",
        "PrefillCacheHit",
        "DecodeOnly",
        "ChunkedPrefill",
        "SpecDecoding",
    ),
)
