"""What the kernels race against: the same operation by torch, on the same tensors.

Shapes are those of steps that a server runs: many decodes, one long prompt, a few tokens more of a
prompt whose prefix was found. A race's tensors are made when its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from servespec.fast.cache.memory import PagedKV
from servespec.fast.kernels import (
    attention,
    chunk_gated_delta_rule,
    convolution,
    gated_delta_rule,
    kv_cache,
    norms,
)
from servespec.fast.kernels.rotary import apply_rotary

__all__ = ["Made", "Runner", "races"]

Runner = Callable[[], object]

Made = tuple[str, dict[str, Runner], int]
"""Name, the ways, the kernel first, and the bytes that must be moved if that is the limit."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_HEADS, _KV_HEADS, _DIM = 8, 2, 64
_GDN_HEADS, _GDN_DIM = 8, 128
_CHANNELS = 4096


def races(
    kernels: Mapping[str, Callable[..., Any]], device: torch.device
) -> tuple[Callable[[], Made], ...]:
    """Return what makes the races.

    Parameters
    ----------
    kernels : mapping of str to callable
        As `servespec.fast.kernels.operations.operations` gives them.
    device : torch.device
    """
    field = _Field(kernels, device)
    both = tuple(_DTYPES)
    return (
        field.recurrence,
        *(partial(field.decode, page, name) for page in (16, 128) for name in both),
        *(partial(field.prefill, tokens, name) for tokens in (8, 512) for name in both),
        *(partial(field.write, tokens) for tokens in (1, 512)),
        *(partial(field.scan, tokens) for tokens in (8, 64, 512)),
        *(partial(field.convolution, rows, name) for rows in (1, 64) for name in both),
        *(partial(field.convolution_rows, tokens, name) for tokens in (8, 512) for name in both),
        *(partial(field.rms_norm, rows, name) for rows in (1, 64) for name in both),
        *(partial(field.gated_norm, rows) for rows in (1, 64)),
        *(partial(field.rotary, rows, name) for rows in (1, 64) for name in both),
        field.l2_norm,
        field.gating,
        field.greedy,
    )


class _Field:
    """Makes tensors and ways."""

    def __init__(self, kernels: Mapping[str, Callable[..., Any]], device: torch.device) -> None:
        self.kernels = kernels
        self.device = device
        self.random = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.random, device=self.device).to(dtype)

    def ints(self, *values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def slots(self, rows: int, count: int) -> Tensor:
        order = torch.randperm(count - 1, generator=self.random, device=self.device)
        return order[:rows] + 1

    def ways(self, name: str, torch_way: Callable[..., Any], *arguments: Any) -> dict[str, Runner]:
        """Return kernel and torch on the same arguments."""
        return {
            "kernel": partial(self.kernels[name], *arguments),
            "torch": partial(torch_way, *arguments),
        }

    def tokens(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v, g and beta of the gated delta rule."""
        q, k, v = (self.normal(count, _GDN_HEADS, _GDN_DIM) for _ in range(3))
        g = -0.1 * self.normal(count, _GDN_HEADS).abs()
        q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
        return q, k, v, g, self.normal(count, _GDN_HEADS).sigmoid()

    def states(self, rows: int) -> tuple[Tensor, Tensor]:
        shape = (rows + 1, _GDN_HEADS, _GDN_DIM, _GDN_DIM)
        return self.normal(*shape), self.slots(rows, rows + 1)

    def pages(self, blocks: int, page: int, dtype: torch.dtype) -> PagedKV:
        rows = self.normal((blocks + 1) * 2 * page, _KV_HEADS * _DIM, dtype=dtype)
        halves = rows[: blocks * 2 * page].view(blocks, 2, page, _KV_HEADS, _DIM)
        return PagedKV(
            key=halves[:, 0],
            value=halves[:, 1],
            rows=rows,
            rows_per_page=2 * page,
            block_size=page,
            kernel_block_size=page,
            zero_row=blocks * 2 * page,
        )

    def recurrence(self) -> Made:
        rows = 64
        q, k, v, g, beta = self.tokens(rows)
        states, slots = self.states(rows)
        flat = self.normal(rows * _GDN_HEADS, _GDN_DIM, _GDN_DIM)
        stream = self.normal(flat.numel())
        keys, queries, values = (x.reshape(-1, _GDN_DIM) for x in (k, q, v))
        decay, rate = g.exp().view(-1, 1, 1), beta.view(-1, 1, 1)

        def in_place() -> None:
            k_q = torch.stack((keys, queries), dim=1)
            flat.mul_(decay)
            read = torch.bmm(k_q, flat.mT)
            update = (values[:, None] - read[:, :1]) * rate
            flat.baddbmm_(update.mT, keys[:, None])
            read[:, 1:].add_(update * (keys * queries).sum(-1)[:, None, None])

        rule = gated_delta_rule.gated_delta_rule_decode
        ways = self.ways("gated_delta_rule_decode", rule, q, k, v, g, beta, states, slots)
        ways = {"kernel": ways["kernel"], "torch in place": in_place, "torch": ways["torch"]}
        ways["stream limit"] = lambda: stream.mul_(1.0001)
        return "recurrent step 64 x 8 x 128 x 128 fp32", ways, 8 * stream.numel()

    def decode(self, page: int, name: str) -> Made:
        rows, context, dtype = 64, 1024, _DTYPES[name]
        width = context // page
        query = self.normal(rows, _HEADS, _DIM, dtype=dtype)
        kv = self.pages(rows * width + 1, page, dtype)
        table = self.slots(rows * width, rows * width + 1).view(rows, width).int()
        lens = self.ints(*[context] * rows)
        starts = self.ints(*range(rows + 1))

        def gathered(pages: Tensor) -> Tensor:
            return pages[table.long()].view(rows, context, _KV_HEADS, _DIM).transpose(1, 2)

        def attend(k: Tensor, v: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(query[:, :, None], k, v, enable_gqa=True)

        keys, values = gathered(kv.key).contiguous(), gathered(kv.value).contiguous()
        plan = attention.plan_attention(starts, lens, table, kv)
        kernel = self.kernels["paged_attention_decode"]
        ways: dict[str, Runner] = {
            "kernel": lambda: kernel(query, kv.key, kv.value, table, lens, _DIM**-0.5),
            "gather + SDPA": lambda: attend(gathered(kv.key), gathered(kv.value)),
            "torch": lambda: attention.varlen_attention(query, kv, plan),
            "SDPA contiguous": lambda: attend(keys, values),
        }
        title = f"decode attention 64 x 8/2 x 64, 1024 keys, page {page} {name}"
        return title, ways, 2 * keys.numel() * dtype.itemsize

    def prefill(self, tokens: int, name: str) -> Made:
        page, dtype = 16, _DTYPES[name]
        width = -(-tokens // page)
        query = self.normal(tokens, _HEADS, _DIM, dtype=dtype)
        kv = self.pages(width + 1, page, dtype)
        table = self.slots(width, width + 1).view(1, width).int()
        starts, lens = self.ints(0, tokens), self.ints(tokens)
        plan = attention.plan_attention(starts, lens, table, kv)
        kernel = self.kernels["varlen_attention"]
        place = (kv.key, kv.value, table, starts, lens)
        ways: dict[str, Runner] = {
            "kernel": lambda: kernel(query, *place, tokens, _DIM**-0.5),
            "torch": lambda: attention.varlen_attention(query, kv, plan),
        }
        return f"prefill attention {tokens} x 8/2 x 64, page 16 {name}", ways, 0

    def write(self, tokens: int) -> Made:
        kv = self.pages(tokens // 16 + 2, 16, torch.float32)
        key, value = (self.normal(tokens, _KV_HEADS, _DIM) for _ in range(2))
        slots = self.slots(tokens, tokens + 1)
        plan = kv_cache.plan_slots(slots, kv)
        kernel = self.kernels["write_kv"]
        ways: dict[str, Runner] = {
            "kernel": lambda: kernel(key, value, kv.key, kv.value, slots),
            "torch": lambda: kv_cache.write_kv(key, value, kv, plan),
        }
        return f"write K/V {tokens} x 2 x 64 fp32", ways, 0

    def scan(self, tokens: int) -> Made:
        inputs, (states, slots) = self.tokens(tokens), self.states(1)
        starts = self.ints(0, tokens)
        table = chunk_gated_delta_rule.chunk_table(starts)
        plan = chunk_gated_delta_rule.plan_chunks(starts, 2 * _GDN_HEADS * _GDN_DIM)
        chunks = self.kernels["chunk_gated_delta_rule"]
        rows = self.kernels["gated_delta_rule_rows"]
        ways: dict[str, Runner] = {
            "chunk kernel": lambda: chunks(*inputs, states, slots, starts, table),
            "row kernel": lambda: rows(*inputs, states, slots[:, None], starts, starts),
            "torch": lambda: chunk_gated_delta_rule.chunk_gated_delta_rule(
                *inputs, states, slots, plan
            ),
        }
        return f"gated delta rule {tokens} tokens x 8 x 128 x 128 fp32", ways, 0

    def convolution(self, rows: int, name: str) -> Made:
        dtype = _DTYPES[name]
        x, weight = self.normal(rows, _CHANNELS, dtype=dtype), self.normal(4, _CHANNELS)
        states = self.normal(rows + 1, 3, _CHANNELS, dtype=dtype)
        slots = self.slots(rows, rows + 1)
        torch_way = convolution.convolution_decode
        ways = self.ways("convolution_decode", torch_way, x, weight, states, slots)
        return f"convolution step {rows} x {_CHANNELS} {name}", ways, 0

    def convolution_rows(self, tokens: int, name: str) -> Made:
        dtype = _DTYPES[name]
        x, weight = self.normal(tokens, _CHANNELS, dtype=dtype), self.normal(4, _CHANNELS)
        states, slots = self.normal(2, 3, _CHANNELS, dtype=dtype), self.ints(1, dtype=torch.int64)
        starts, known = self.ints(0, tokens), self.ints(1, dtype=torch.int8)
        plan = convolution.plan_convolution(starts.long(), 4)
        kernel = self.kernels["convolution_rows"]
        ways: dict[str, Runner] = {
            "kernel": lambda: kernel(x, weight, states, slots, starts, known),
            "torch": lambda: convolution.convolution_prefill(x, weight, states, slots, plan),
        }
        return f"convolution of a row {tokens} x {_CHANNELS} {name}", ways, 0

    def rms_norm(self, rows: int, name: str) -> Made:
        dtype = _DTYPES[name]
        x, weight = self.normal(rows, 4096, dtype=dtype), self.normal(4096)
        kernel = self.kernels["rms_norm"]
        ways: dict[str, Runner] = {
            "kernel": lambda: kernel(x, weight, 1e-6, dtype),
            "torch": lambda: norms.rms_norm(x, weight, 1e-6).to(dtype),
        }
        return f"RMS norm {rows} x 4096 {name}", ways, 0

    def gated_norm(self, rows: int) -> Made:
        x, gate = (self.normal(rows, _GDN_HEADS, _GDN_DIM) for _ in range(2))
        weight = self.normal(_GDN_DIM)
        ways = self.ways("gated_rms_norm", norms.gated_rms_norm, x, gate, weight, 1e-6)
        return f"gated RMS norm {rows} x 8 x 128 fp32", ways, 0

    def rotary(self, rows: int, name: str) -> Made:
        dtype, heads = _DTYPES[name], _HEADS + _KV_HEADS
        x, weight = self.normal(rows, heads, _DIM, dtype=dtype), self.normal(heads, _DIM)
        table = self.normal(rows, 16)
        kernel = self.kernels["norm_rotary"]
        ways: dict[str, Runner] = {
            "kernel": lambda: kernel(x, weight, table, 1e-6, dtype),
            "torch": lambda: apply_rotary(norms.rms_norm(x, weight, 1e-6), table).to(dtype),
        }
        return f"head norm + rotary {rows} x 10 x 64 {name}", ways, 0

    def l2_norm(self) -> Made:
        x = self.normal(64, 2 * _GDN_HEADS, _GDN_DIM)
        return "l2 norm 64 x 16 x 128 fp32", self.ways("l2_norm", norms.l2_norm, x), 0

    def gating(self) -> Made:
        a, b = self.normal(64, 32), self.normal(64, 32)
        decay, bias = -self.normal(32).exp(), self.normal(32)
        ways = self.ways("gating", gated_delta_rule.gating, a, b, decay, bias)
        return "gating 64 x 32 fp32", ways, 0

    def greedy(self) -> Made:
        logits = self.normal(64, 8192)
        ways: dict[str, Runner] = {
            "kernel": partial(self.kernels["greedy"], logits),
            "torch": lambda: logits.argmax(dim=-1),
        }
        return "greedy 64 x 8192 fp32", ways, 0
