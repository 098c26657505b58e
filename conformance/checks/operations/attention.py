"""Writing K and V into pages and attending to them, in float and in 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from servespec.conformance.checks.operations.call import NARROW, Array, Call, Written, error_bound
from servespec.reference.numerics import attention, int8_kv, layouts

__all__ = ["CHECKS"]


def _table(call: Call) -> tuple[list[int], int, npt.NDArray[np.int32]]:
    """Return the keys of each row, how many pages there are, and which ones each row has."""
    case = call.case
    ends = [n + m for n, m in zip(case.lengths, case.contexts, strict=True)]
    width = max(1, max(-(-end // case.block_size) for end in ends))
    blocks = call.rows * width + 2
    table = call.random.permutation(np.arange(1, blocks))[: call.rows * width]
    table = table.reshape(call.rows, width).astype(np.int32)
    if case.shared_blocks and call.rows > 1:
        full = min(ends[0], ends[1]) // case.block_size
        table[1, :full] = table[0, :full]
        call.tally.counts["shared_blocks"] += full
    return ends, blocks, table


def _pages(call: Call) -> tuple[list[Array], list[Array], tuple[Any, Any, Any]]:
    """Return each row's K and V, and pages that hold them: key pages, value pages, table."""
    case = call.case
    ends, blocks, table = _table(call)
    shape = (blocks, case.block_size, case.heads, case.dim)
    pages = [call.memory.empty(name, shape, call.dtype) for name in ("key_pages", "value_pages")]
    rows: tuple[list[Array], list[Array]] = ([], [])
    for row, end in enumerate(ends):
        for kept, guarded in zip(rows, pages, strict=True):
            values = torch.from_numpy(call.numbers(end, case.heads, case.dim)).to(call.dtype)
            for at in range(end):
                place = (int(table[row, at // case.block_size]), at % case.block_size)
                if case.shared_blocks and row == 1 and place[0] in table[0]:
                    values[at] = guarded.tensor[place]
                guarded.tensor[place] = values[at]
            kept.append(values.double().numpy())
    tensors = (pages[0].tensor, pages[1].tensor, call.ints("block_table", table))
    return rows[0], rows[1], tensors


def _lens(call: Call) -> Tensor:
    return call.ints("seq_lens", np.add(call.case.lengths, call.case.contexts))


def _write_kv(call: Call) -> Written:
    case = call.case
    tokens, blocks = case.num_tokens, case.num_tokens // case.block_size + 2
    shape = (blocks, case.block_size, case.heads, case.dim)
    slots = call.random.permutation(blocks * case.block_size)[:tokens].astype(np.int32)
    if case.null_rows:
        slots[call.random.integers(tokens)] = -1
        call.tally.counts["null_rows"] += 1
    values = [call.numbers(tokens, case.heads, case.dim) for _ in range(2)]
    sources = [call.put(n, v) for n, v in zip(("key", "value"), values, strict=True)]
    names = ("key_pages", "value_pages")
    pages = [call.memory.empty(name, shape, call.dtype).tensor for name in names]
    call.run("write_kv", *sources, *pages, call.ints("slot_mapping", slots))
    written = np.zeros(shape[:2], np.bool_)
    kept = slots >= 0
    place = np.divmod(slots[kept], case.block_size)
    written[place] = True
    for name, page, value in zip(names, pages, values, strict=True):
        call.compare(name, value[kept], page[place], 0.0)
    return dict.fromkeys(names, written)


def _scales(call: Call) -> tuple[int8_kv.Int8Scales, list[Tensor]]:
    case = call.case
    size = case.heads * case.dim
    raw = [call.random.uniform(0.005, 0.03, size) for _ in range(2)]
    scales = int8_kv.int8_scales(raw[0], raw[1], case.heads, case.dim)
    placed = [
        call.dense(name, values, torch.bfloat16)
        for name, values in (("key_scale", scales.key), ("value_scale", scales.value))
    ]
    return scales, placed


def _write_int8(call: Call) -> Written:
    case = call.case
    tokens, blocks = case.num_tokens, case.num_tokens // case.block_size + 2
    slots = call.random.permutation(blocks * case.block_size)[:tokens].astype(np.int32)
    scales, placed = _scales(call)
    values = [
        torch.from_numpy(call.floats(tokens, case.heads, case.dim)).bfloat16().double().numpy()
        for _ in range(2)
    ]
    sources = [call.put(n, v) for n, v in zip(("key", "value"), values, strict=True)]
    shape = (blocks, case.heads, case.dim // 32, case.block_size, 32)
    names = ("key_pages", "value_pages")
    pages = [call.memory.empty(name, shape, torch.int8).tensor for name in names]
    call.run("write_int8", *sources, *pages, *placed, call.ints("slot_mapping", slots))
    written = np.zeros(shape[:4], np.bool_)
    block, offset = np.divmod(slots, case.block_size)
    written[block, :, :, offset] = True
    for name, page, value, scale in zip(
        names, pages, values, (scales.key, scales.value), strict=True
    ):
        expected = int8_kv.quantize(value, scale).astype(np.float64)
        got = page.permute(0, 3, 1, 2, 4)[block, offset].reshape(expected.shape)
        call.compare(name, expected, got.float(), 0.0)
    return dict.fromkeys(names, written)


def _attend(call: Call, query: Array, keys: list[Array], values: list[Array]) -> Array:
    """Return the reference's answer for all rows."""
    scale = call.case.dim**-0.5
    parts = [np.zeros((0, *query.shape[1:]))]
    for row, n in enumerate(call.case.lengths):
        if n:
            own = query[call.starts[row] : call.starts[row + 1]]
            parts.append(attention.attention(own, keys[row], values[row], scale))
    return np.concatenate(parts)


def _attention_bound(call: Call, values: list[Array]) -> float:
    """Scores are of size 3 or less: queries and keys are normal and scaled by ``D ** -0.5``."""
    longest = max(map(len, values))
    largest = max((float(np.abs(v).max(initial=0.0)) for v in values), default=0.0)
    bound = error_bound(call.case.dim + longest, 3.0 * largest)
    return bound + (NARROW * largest if call.dtype == torch.bfloat16 else 0.0)


def _query(call: Call) -> Array:
    return call.numbers(call.case.num_tokens, call.case.heads * call.case.share, call.case.dim)


def _paged_decode(call: Call) -> Written:
    keys, values, (key_pages, value_pages, table) = _pages(call)
    query = _query(call)
    got = call.run(
        "paged_attention_decode",
        *(call.put("query", query), key_pages, value_pages, table, _lens(call)),
        call.case.dim**-0.5,
        parts=call.case.parts,
    )
    call.compare("out", _attend(call, query, keys, values), got, _attention_bound(call, values))
    return {}


def _varlen(call: Call) -> Written:
    keys, values, (key_pages, value_pages, table) = _pages(call)
    query = _query(call)
    got = call.run(
        "varlen_attention",
        *(call.put("query", query), key_pages, value_pages, table),
        *(call.ints("query_start_loc", call.starts), _lens(call)),
        *(max(call.case.lengths), call.case.dim**-0.5),
    )
    call.compare("out", _attend(call, query, keys, values), got, _attention_bound(call, values))
    return {}


def _packed(call: Call) -> Written:
    case = call.case
    ends = np.add(case.lengths, case.contexts)
    keys, values = (
        [call.numbers(int(end), case.heads, case.dim) for end in ends] for _ in range(2)
    )
    query = _query(call)
    got = call.run(
        "packed_attention",
        call.put("query", query),
        call.put("key", np.concatenate(keys)),
        call.put("value", np.concatenate(values)),
        call.ints("query_start_loc", call.starts),
        call.ints("key_start_loc", np.cumsum((0, *ends))),
        _lens(call),
        *(max(case.lengths), case.dim**-0.5),
    )
    call.compare("out", _attend(call, query, keys, values), got, _attention_bound(call, values))
    return {}


def _int8(call: Call, operation: str) -> Written:
    case = call.case
    ends, blocks, table = _table(call)
    scales, placed = _scales(call)
    integers = call.random.integers(-128, 128, (2, blocks, case.block_size, case.heads, case.dim))
    integers = integers.astype(np.int8)
    pages = [
        call.dense(name, layouts.nz_pages(values), torch.int8)
        for name, values in zip(("key_pages", "value_pages"), integers, strict=True)
    ]
    keys, values = (
        [int8_kv.dequantize(row, scale) for row in int8_kv.gather_rows(cache, table.tolist(), ends)]
        for cache, scale in zip(integers, (scales.key, scales.value), strict=True)
    )
    query = _query(call)
    cache = (*pages, *placed, call.ints("block_table", table))
    factor = case.dim**-0.5
    if operation == "int8_attention_decode":
        arguments = (*cache, _lens(call), factor)
        got = call.run(operation, call.put("query", query), *arguments, parts=case.parts)
    else:
        rows = (call.ints("query_start_loc", call.starts), _lens(call), max(case.lengths))
        got = call.run(operation, call.put("query", query), *cache, *rows, factor)
    # Keys are up to 128 steps of 0.03, which makes scores four times those of normal ones.
    bound = 4.0 * error_bound(case.dim + max(ends), 3.0 * 128 * 0.03)
    call.compare("out", _attend(call, query, keys, values), got, bound)
    return {}


CHECKS: dict[str, Callable[[Call], Written]] = {
    "write_kv": _write_kv,
    "write_int8": _write_int8,
    "paged_attention_decode": _paged_decode,
    "varlen_attention": _varlen,
    "packed_attention": _packed,
    "int8_attention_decode": lambda c: _int8(c, "int8_attention_decode"),
    "int8_varlen_attention": lambda c: _int8(c, "int8_varlen_attention"),
}
