"""Suite ``kernels``: one operation at a time against the reference in float64.

Inputs lie in guarded memory full of NaN (`servespec.conformance.checks.guarded`). In-place tensors
are compared whole: what an operation should write within a bound, every other byte exactly.

Bounds follow `servespec.conformance.checks.bounds`: a float32 reduction of n terms errs by
``u sqrt(n)`` relative to the size of what it sums, with the same factors for conditioning and for
the largest of many. Where values pass through bfloat16 on the way (the weights of an attention
over bfloat16, and every bfloat16 result) each passage may err by ``2**-8`` of the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from torch import Tensor

from servespec.conformance.adapters.failure import ImplementationFailed
from servespec.conformance.cases.case import Case
from servespec.conformance.checks.bounds import CONDITION, TAIL
from servespec.conformance.checks.guarded import Memory
from servespec.conformance.checks.suite import Suite
from servespec.conformance.verdicts import DivergedError, Divergence, Tally, attempt
from servespec.conformance.workloads.kernels import OPERATIONS, KernelCase, kernel_cases
from servespec.conformance.workloads.workload import Workload
from servespec.reference.contracts import (
    CacheConfig,
    EngineConfig,
    KVCacheGroup,
    SchedulerConfig,
)
from servespec.reference.numerics import (
    attention,
    convolution,
    gated_delta_rule,
    int8_kv,
    layouts,
    norms,
    rotary,
    sampling,
)

__all__ = ["SUITE", "check"]

Array = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Operations = Mapping[str, Callable[..., Any]]

_UNIT = 2.0**-24
_NARROW = 2.0**-8
_WIDTH = 4
_EPS = 1e-6
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _bound(terms: int, size: float) -> float:
    return TAIL * CONDITION * _UNIT * math.sqrt(terms) * size


class _Call:
    """What one case needs: numbers, memory, the operations, the tally."""

    def __init__(self, case: Case, operations: Operations, tally: Tally) -> None:
        assert case.kernel is not None
        self.case: KernelCase = case.kernel
        self.dtype = _DTYPES[case.dtype]
        self.operations = operations
        self.tally = tally
        self.random = np.random.default_rng(self.case.seed)
        self.memory = Memory(self.case.gap)
        self.rows = len(self.case.lengths)
        self.starts = np.cumsum((0, *self.case.lengths)).astype(np.int32)

    def numbers(self, *shape: int, scale: float = 1.0) -> Array:
        """Return normal numbers that the dtype can hold."""
        values = torch.from_numpy(self.random.standard_normal(shape) * scale)
        return values.to(self.dtype).double().numpy()

    def floats(self, *shape: int, scale: float = 1.0) -> Array:
        """Return normal numbers of float32."""
        values = self.random.standard_normal(shape) * scale
        return values.astype(np.float32).astype(np.float64)

    def put(self, name: str, values: npt.NDArray[Any], dtype: torch.dtype | None = None) -> Tensor:
        """Place numbers of the case's dtype, or of another."""
        return self.memory.put(name, values, dtype or self.dtype)

    def dense(self, name: str, values: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
        """Place values that an operation wants without gaps."""
        gap, self.memory.gap = self.memory.gap, 0
        placed = self.memory.put(name, values, dtype)
        self.memory.gap = gap
        return placed

    def ints(self, name: str, values: npt.NDArray[Any]) -> Tensor:
        return self.memory.put(name, values.astype(np.int32), torch.int32)

    def run(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call the implementation."""
        operation = self.operations.get(name)
        if operation is None:
            raise ImplementationFailed(f"make_kernels gives no operation {name!r}")
        self.memory.seal()
        return attempt(operation, *arguments, **options)

    def compare(self, name: str, expected: Array, got: Any, bound: float) -> None:
        """Compare a result, or part of an in-place tensor."""
        if not isinstance(got, Tensor) or tuple(got.shape) != expected.shape:
            shape = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
            raise ImplementationFailed(f"{name} is {shape}: must be a tensor of {expected.shape}")
        numbers = got.double().cpu().numpy()
        if got.dtype == torch.bfloat16:
            bound = bound + _NARROW * float(np.abs(expected).max(initial=0.0))
        error = np.where(np.isfinite(numbers), np.abs(numbers - expected), np.inf)
        self.tally.counts["numbers"] += expected.size
        if error.size and error.max() > bound:
            where = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
            raise DivergedError(
                Divergence(
                    field=f"{self.case.operation}.{name}{list(where)}",
                    expected=f"{expected[where]:.8g} +- {bound:.2g}",
                    got=f"{numbers[where]:.8g}",
                )
            )

    def slots(self, count: int, *, columns: int = 1) -> npt.NDArray[np.int32]:
        """Return distinct state slots, some of them padding if the case says so."""
        slots = self.random.permutation(np.arange(1, count * columns + 3))[: count * columns]
        slots = slots.reshape(count, columns).astype(np.int32)
        if self.case.null_rows and count > 1:
            slots[self.random.integers(count)] = self.random.choice([0, -1])
            self.tally.counts["null_rows"] += 1
        return slots

    def pages(self, dtype: torch.dtype) -> tuple[list[Array], list[Array], tuple[Any, Any, Any]]:
        """Return each row's K and V, and pages that hold them: key pages, value pages, table."""
        case = self.case
        ends = [n + m for n, m in zip(case.lengths, case.contexts, strict=True)]
        width = max(1, max(-(-end // case.block_size) for end in ends))
        blocks = self.rows * width + 2
        table = self.random.permutation(np.arange(1, blocks))[: self.rows * width]
        table = table.reshape(self.rows, width).astype(np.int32)
        if case.shared_blocks and self.rows > 1:
            full = min(ends[0], ends[1]) // case.block_size
            table[1, :full] = table[0, :full]
            self.tally.counts["shared_blocks"] += full
        shape = (blocks, case.block_size, case.heads, case.dim)
        pages = [self.memory.empty(name, shape, dtype) for name in ("key_pages", "value_pages")]
        rows: tuple[list[Array], list[Array]] = ([], [])
        for row, end in enumerate(ends):
            for kept, guarded in zip(rows, pages, strict=True):
                values = torch.from_numpy(self.numbers(end, case.heads, case.dim)).to(dtype)
                for at in range(end):
                    place = (int(table[row, at // case.block_size]), at % case.block_size)
                    if case.shared_blocks and row == 1 and place[0] in table[0]:
                        values[at] = guarded.tensor[place]
                    guarded.tensor[place] = values[at]
                kept.append(values.double().numpy())
        tensors = (pages[0].tensor, pages[1].tensor, self.ints("block_table", table))
        return rows[0], rows[1], tensors

    def lens(self) -> Tensor:
        ends = np.add(self.case.lengths, self.case.contexts)
        return self.ints("seq_lens", ends)


def check(case: Case, implementation: Any, tally: Tally) -> None:
    """Run one case.

    Parameters
    ----------
    case : Case
    implementation : object
        Offers ``make_kernels``: a mapping of operations by name, on torch tensors, with the
        parameters of `servespec.fast.kernels.triton`.
    tally : Tally

    Raises
    ------
    DivergedError, ImplementationFailed
    """
    assert case.kernel is not None
    call = _Call(case, attempt(implementation.make_kernels), tally)
    written = _CHECKS[case.kernel.operation](call)
    call.memory.check(written)
    tally.steps += 1
    tally.counts[case.kernel.operation] += 1
    tally.counts["empty_rows"] += case.kernel.lengths.count(0)
    tally.counts["full_pages"] += sum(
        (n + m) % case.kernel.block_size == 0 and n + m > 0
        for n, m in zip(case.kernel.lengths, case.kernel.contexts, strict=True)
    )


Written = dict[str, Bools]


def _write_kv(call: _Call) -> Written:
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


def _scales(call: _Call) -> tuple[int8_kv.Int8Scales, list[Tensor]]:
    case = call.case
    size = case.heads * case.dim
    raw = [call.random.uniform(0.005, 0.03, size) for _ in range(2)]
    scales = int8_kv.int8_scales(raw[0], raw[1], case.heads, case.dim)
    placed = [
        call.dense(name, values, torch.bfloat16)
        for name, values in (("key_scale", scales.key), ("value_scale", scales.value))
    ]
    return scales, placed


def _write_int8(call: _Call) -> Written:
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


def _attend(call: _Call, query: Array, keys: list[Array], values: list[Array]) -> Array:
    """Return the reference's answer for all rows."""
    scale = call.case.dim**-0.5
    parts = [np.zeros((0, *query.shape[1:]))]
    for row, n in enumerate(call.case.lengths):
        if n:
            own = query[call.starts[row] : call.starts[row + 1]]
            parts.append(attention.attention(own, keys[row], values[row], scale))
    return np.concatenate(parts)


def _attention_bound(call: _Call, values: list[Array]) -> float:
    """Scores are of size 3 or less: queries and keys are normal and scaled by ``D ** -0.5``."""
    longest = max(map(len, values))
    largest = max((float(np.abs(v).max(initial=0.0)) for v in values), default=0.0)
    bound = _bound(call.case.dim + longest, 3.0 * largest)
    return bound + (_NARROW * largest if call.dtype == torch.bfloat16 else 0.0)


def _query(call: _Call) -> Array:
    return call.numbers(call.case.num_tokens, call.case.heads * call.case.share, call.case.dim)


def _paged_decode(call: _Call) -> Written:
    keys, values, (key_pages, value_pages, table) = call.pages(call.dtype)
    query = _query(call)
    got = call.run(
        "paged_attention_decode",
        *(call.put("query", query), key_pages, value_pages, table, call.lens()),
        call.case.dim**-0.5,
        parts=call.case.parts,
    )
    call.compare("out", _attend(call, query, keys, values), got, _attention_bound(call, values))
    return {}


def _varlen(call: _Call) -> Written:
    keys, values, (key_pages, value_pages, table) = call.pages(call.dtype)
    query = _query(call)
    got = call.run(
        "varlen_attention",
        *(call.put("query", query), key_pages, value_pages, table),
        *(call.ints("query_start_loc", call.starts), call.lens()),
        *(max(call.case.lengths), call.case.dim**-0.5),
    )
    call.compare("out", _attend(call, query, keys, values), got, _attention_bound(call, values))
    return {}


def _packed(call: _Call) -> Written:
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
        call.lens(),
        *(max(case.lengths), case.dim**-0.5),
    )
    call.compare("out", _attend(call, query, keys, values), got, _attention_bound(call, values))
    return {}


def _int8_decode(call: _Call) -> Written:
    case = call.case
    ends = [n + m for n, m in zip(case.lengths, case.contexts, strict=True)]
    width = max(1, max(-(-end // case.block_size) for end in ends))
    blocks = call.rows * width + 1
    table = call.random.permutation(np.arange(1, blocks)).reshape(call.rows, width)
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
    got = call.run(
        "int8_attention_decode",
        *(call.put("query", query), *pages, *placed, call.ints("block_table", table)),
        *(call.lens(), case.dim**-0.5),
    )
    # Keys are up to 128 steps of 0.03, which makes scores four times those of normal ones.
    bound = 4.0 * _bound(case.dim + max(ends), 3.0 * 128 * 0.03)
    call.compare("out", _attend(call, query, keys, values), got, bound)
    return {}


def _convolution(call: _Call, *, speculative: bool, decode: bool) -> Written:
    case = call.case
    channels = case.heads * case.dim + 8
    slots = call.slots(call.rows)[:, 0]
    places = _WIDTH - 1 + (5 if speculative else 0)
    taps = call.floats(channels, _WIDTH)
    inputs = call.numbers(case.num_tokens, channels)
    states = call.memory.empty("states", (call.rows + 3, places, channels), call.dtype)
    known = np.ones(call.rows, np.bool_)
    if not decode:
        known = call.random.random(call.rows) < 0.7
    offsets = call.random.integers(0, 3, call.rows) if speculative else np.zeros(call.rows, int)
    written = np.zeros((call.rows + 3, places), np.bool_)
    expected_out = np.zeros((case.num_tokens, channels))
    expected_states: dict[int, Array] = {}
    for row, n in enumerate(case.lengths):
        history = np.zeros((_WIDTH - 1, channels))
        if slots[row] <= 0:
            continue
        if known[row]:
            history = call.numbers(_WIDTH - 1, channels)
            window = slice(int(offsets[row]), int(offsets[row]) + _WIDTH - 1)
            states.tensor[int(slots[row]), window] = torch.from_numpy(history).to(call.dtype)
        if not n:
            continue
        here = slice(call.starts[row], call.starts[row + 1])
        expected_out[here], after = convolution.causal_convolution(inputs[here], taps, history)
        if speculative:
            after = np.concatenate([history[1:], inputs[here]])
        expected_states[int(slots[row])] = after
        written[slots[row], : len(after)] = True
    arguments = (
        call.put("x", inputs),
        call.dense("weight", np.ascontiguousarray(taps.T), torch.float32),
        states.tensor,
        call.ints("slots", slots),
    )
    if decode:
        got = call.run("convolution_decode", *arguments)
    else:
        got = call.run(
            "convolution_rows",
            *arguments,
            call.ints("query_start_loc", call.starts),
            call.dense("has_initial_state", known.astype(np.int8), torch.int8),
            call.ints("accepted", offsets + 1) if speculative else None,
        )
    size = float(np.abs(taps).max() * np.abs(inputs).max(initial=1.0))
    call.compare("out", expected_out, got, _bound(_WIDTH, 4.0 * size))
    for slot, after in expected_states.items():
        call.compare("states", after, states.tensor[slot, : len(after)], 0.0)
    return {"states": written}


def _gating(call: _Call) -> Written:
    heads = call.case.heads * call.case.share
    a = call.numbers(call.case.num_tokens, heads, scale=8.0)
    b = call.numbers(call.case.num_tokens, heads)
    decay, bias = call.floats(heads), call.floats(heads)
    g, beta = gated_delta_rule.gating(a, b, decay, bias)
    negative = -np.exp(decay)
    got = call.run(
        "gating",
        *(call.put("a", a), call.put("b", b)),
        call.dense("negative_decay", negative, torch.float32),
        call.dense("dt_bias", bias, torch.float32),
    )
    size = float(np.abs(g).max(initial=1.0))
    call.compare("g", g, got[0], _bound(4, max(size, float(np.abs(negative).max()))))
    call.compare("beta", beta, got[1], _bound(4, 1.0))
    return {}


def _delta_inputs(
    call: _Call,
) -> tuple[tuple[Array, Array, Array, Array, Array], tuple[Tensor, ...]]:
    """Return q (unscaled), k, v, g, beta, and their tensors with q scaled."""
    case = call.case
    tokens, heads = case.num_tokens, case.heads * case.share
    shape = (tokens, case.heads, case.dim)
    q, k = (norms.l2_norm(call.floats(*shape)).astype(np.float32) for _ in range(2))
    scaled = (q * np.float32(case.dim**-0.5)).astype(np.float32)
    v = call.floats(tokens, heads, case.dim)
    g = -np.abs(call.floats(tokens, heads, scale=0.3))
    beta = call.random.random((tokens, heads)).astype(np.float32).astype(np.float64)
    tensors = (
        call.put("q", scaled, torch.float32),
        call.put("k", k, torch.float32),
        call.put("v", v, torch.float32),
        call.dense("g", g, torch.float32),
        call.dense("beta", beta, torch.float32),
    )
    # The reference scales by itself; undoing it in float64 keeps the very numbers.
    exact = scaled.astype(np.float64) * case.dim**0.5
    return (exact, k.astype(np.float64), v, g, beta), tensors


def _delta_rule(call: _Call, operation: str, columns: int = 1) -> Written:
    case = call.case
    heads = case.heads * case.share
    (q, k, v, g, beta), tensors = _delta_inputs(call)
    slots = call.slots(call.rows, columns=columns)
    count = call.rows * columns + 3
    states = call.memory.empty("states", (count, heads, case.dim, case.dim), torch.float32)
    accepted = call.random.integers(1, columns + 1, call.rows)
    expected = np.zeros((case.num_tokens, heads, case.dim))
    after: dict[int, Array] = {}
    written = np.zeros(count, np.bool_)
    for row, n in enumerate(case.lengths):
        initial = int(slots[row, accepted[row] - 1])
        if initial <= 0:
            continue
        state = call.floats(heads, case.dim, case.dim)
        states.tensor[initial] = torch.from_numpy(state)
        for t in range(n):
            here = slice(call.starts[row] + t, call.starts[row] + t + 1)
            expected[here], state = gated_delta_rule.recurrent_gated_delta_rule(
                q[here], k[here], v[here], g[here], beta[here], state
            )
            target = int(slots[row, t if columns > 1 else 0])
            if target > 0:
                after[target] = state
                written[target] = True
    arguments = (*tensors, states.tensor)
    if operation == "gated_delta_rule_decode":
        got = call.run(operation, *arguments, call.ints("slots", slots[:, 0]))
    else:
        starts = call.ints("query_start_loc", call.starts)
        if operation == "chunk_gated_delta_rule":
            table = call.dense(
                "chunks", call.operations["chunk_table"](starts).numpy(), torch.int32
            )
            got = call.run(operation, *arguments, call.ints("slots", slots[:, 0]), starts, table)
        else:
            got = call.run(
                operation,
                *arguments,
                call.ints("slots", slots),
                call.ints("accepted", accepted),
                starts,
            )
    size = max(4.0, float(np.abs(expected).max(initial=0.0)))
    bound = _bound(case.dim + max(case.lengths), size)
    call.compare("out", expected, got, bound)
    for slot, state in after.items():
        call.compare("states", state, states.tensor[slot], bound)
    return {"states": written}


def _norm(call: _Call, operation: str) -> Written:
    case = call.case
    shape = (case.num_tokens, case.heads, case.dim)
    x = call.numbers(*shape, scale=2.0)
    weight = call.floats(case.heads, case.dim)
    placed = call.put("x", x)
    bound = _bound(case.dim, 8.0)
    if operation == "l2_norm":
        call.compare(operation, norms.l2_norm(x), call.run(operation, placed), bound)
    elif operation == "rms_norm":
        tensor = call.dense("weight", weight + 1.0, torch.float32)
        expected = norms.rms_norm(x, weight, _EPS)
        call.compare(operation, expected, call.run(operation, placed, tensor, _EPS), bound * 4)
    else:
        gate = call.numbers(*shape)
        tensor = call.dense("weight", weight[0], torch.float32)
        expected = norms.gated_rms_norm(x, gate, weight[0], _EPS)
        got = call.run(operation, placed, call.put("gate", gate), tensor, _EPS)
        call.compare(operation, expected, got, bound * 4)
    return {}


def _norm_rotary(call: _Call) -> Written:
    case = call.case
    x = call.numbers(case.num_tokens, case.heads, case.dim, scale=2.0)
    weight = call.floats(case.heads, case.dim)
    positions = call.random.integers(0, 4096, case.num_tokens)
    angles = rotary.rotary_angles(positions, case.dim // 4, 10000.0)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    got = call.run(
        "norm_rotary",
        call.put("x", x),
        call.dense("weight", weight + 1.0, torch.float32),
        call.put("cos_sin", table, torch.float32),
        *(_EPS, torch.float32),
    )
    expected = rotary.apply_rotary(norms.rms_norm(x, weight, _EPS), angles)
    call.compare("out", expected, got, _bound(case.dim, 32.0))
    return {}


def _logits(call: _Call) -> Array:
    # Coarse, so that equal maxima are frequent.
    size = 200 + 30 * call.case.dim if call.case.operation == "greedy" else 200 + call.case.dim
    values: Array = np.round(call.numbers(call.rows, size, scale=2.0), 1)
    rounded = torch.from_numpy(values).to(call.dtype).double().numpy()
    return np.asarray(rounded, np.float64)


def _greedy(call: _Call) -> Written:
    logits = _logits(call)
    got = call.run("greedy", call.put("logits", logits))
    call.compare("tokens", np.array(sampling.greedy(logits), np.float64), got, 0.0)
    call.tally.tokens += call.rows
    return {}


def _sample(call: _Call) -> Written:
    """Accept a token if its interval of the running sum holds the drawn number.

    The interval's ends, and which token is the last of the nucleus, may be off by rounding.
    """
    logits = _logits(call)
    size = logits.shape[1]
    temperature = call.random.uniform(0.5, 2.0, call.rows).astype(np.float32)
    top_k = call.random.choice([1, 5, 40, size], call.rows)
    top_p = call.random.choice([0.3, 0.9, 1.0], call.rows).astype(np.float32)
    uniform = call.random.random(call.rows).astype(np.float32)
    got = call.run(
        "sample",
        call.put("logits", logits),
        *(call.dense("temperature", temperature, torch.float32), call.ints("top_k", top_k)),
        call.dense("top_p", top_p, torch.float32),
        call.dense("uniform", uniform, torch.float32),
    )
    for row in range(call.rows):
        slack = _bound(size, 1.0)
        x = logits[row] / float(temperature[row])
        weights = np.exp(x - x.max())
        weights[x < np.sort(x)[-int(top_k[row])]] = 0.0
        weights /= weights.sum()
        # Values equal to the one that completes the nucleus stay with it.
        mass = np.array([weights[x > value].sum() for value in x])
        sure, possible = (mass < float(top_p[row]) + d for d in (-slack, slack))
        token = int(got[row])
        fits = []
        for kept in (sure, possible):
            running = np.cumsum(np.where(kept, weights, 0.0))
            low = (running[token] - weights[token]) / running[-1] - slack
            high = running[token] / running[-1] + slack
            fits.append(bool(kept[token]) and low <= float(uniform[row]) <= high)
        if not any(fits) or weights[token] == 0.0:
            raise DivergedError(
                Divergence(field="sample.tokens", expected="a token drawn", got=str(token))
            )
    call.tally.tokens += call.rows
    return {}


_CHECKS: dict[str, Callable[[_Call], Written]] = {
    "write_kv": _write_kv,
    "write_int8": _write_int8,
    "paged_attention_decode": _paged_decode,
    "varlen_attention": _varlen,
    "packed_attention": _packed,
    "int8_attention_decode": _int8_decode,
    "convolution_decode": lambda c: _convolution(c, speculative=False, decode=True),
    "convolution_rows": lambda c: _convolution(c, speculative=False, decode=False),
    "convolution_speculative": lambda c: _convolution(c, speculative=True, decode=False),
    "gating": _gating,
    "gated_delta_rule_decode": lambda c: _delta_rule(c, "gated_delta_rule_decode"),
    "gated_delta_rule_rows": lambda c: _delta_rule(c, "gated_delta_rule_rows"),
    "gated_delta_rule_speculative": lambda c: _delta_rule(c, "gated_delta_rule_rows", 4),
    "chunk_gated_delta_rule": lambda c: _delta_rule(c, "chunk_gated_delta_rule"),
    "rms_norm": lambda c: _norm(c, "rms_norm"),
    "gated_rms_norm": lambda c: _norm(c, "gated_rms_norm"),
    "l2_norm": lambda c: _norm(c, "l2_norm"),
    "norm_rotary": _norm_rotary,
    "greedy": _greedy,
    "sample": _sample,
}

_UNUSED = EngineConfig(
    scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=16),
    cache=CacheConfig(
        num_gpu_blocks=2, groups=(KVCacheGroup(layer_type="full_attention", layer_indices=(0,)),)
    ),
)


def _cases() -> st.SearchStrategy[Case]:
    workload = Workload(steps=())
    return st.builds(
        lambda kernel, dtype: Case(
            suite="kernels", config=_UNUSED, workload=workload, dtype=dtype, kernel=kernel
        ),
        kernel_cases(),
        st.sampled_from(("float32", "bfloat16")),
    )


SUITE = Suite(
    name="kernels",
    summary="one operation at a time, in memory of which every other byte is watched",
    needs="make_kernels",
    cases=_cases,
    check=check,
    sizes={"quick": 160, "standard": 1000, "full": 10000},
    must_reach=(*OPERATIONS, "null_rows", "empty_rows", "full_pages", "shared_blocks"),
)
