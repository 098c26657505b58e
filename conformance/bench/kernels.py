"""Each kernel beside torch, in turns, so that a busy machine slows both.

Seconds are of CPU time on one thread where the device is a CPU, of the wall clock with the device
waited for elsewhere. The stream limit is the time in which the same run reads and writes as many
bytes in place as the recurrent step must.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from servespec.fast.backends.base import BackendError
from servespec.fast.backends.registry import choose
from servespec.fast.kernels import chunk_gated_delta_rule, convolution, gated_delta_rule, norms
from servespec.fast.kernels.operations import operations
from servespec.fast.kernels.rotary import apply_rotary

__all__ = ["KernelBench", "Race", "bench_kernels"]

Runner = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """One operation, done in several ways.

    Attributes
    ----------
    name : str
    milliseconds : dict of str to float
        Median of each way; the first is the kernel.
    bytes_moved : int
        What the operation must read and write; 0 if it isn't bound by that.
    """

    name: str
    milliseconds: dict[str, float]
    bytes_moved: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBench:
    """What a run measured.

    Attributes
    ----------
    backend, processor : str
    rounds : int
    load : float
        The machine's load average at the end.
    races : list of Race
    """

    backend: str
    processor: str
    rounds: int
    load: float
    races: list[Race] = field(default_factory=list)


def bench_kernels(
    *,
    rounds: int = 15,
    device: str = "cpu",
    progress: Callable[[int, int], object] | None = None,
) -> KernelBench:
    """Measure every operation.

    Parameters
    ----------
    rounds : int
    device : str
    progress : callable, optional
        Told the number of races done and of all.

    Raises
    ------
    BackendError
        No backend runs kernels on the device.
    """
    backend = choose(device)
    if backend is None:
        raise BackendError(f"no backend runs kernels on {device}: see servespec implementations")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ways = _Ways(operations(backend), torch.device(device))
        makers = (*ways.all(),)
        races = []
        for number, make in enumerate(makers):
            name, runners, moved = make()
            races.append(
                Race(name=name, milliseconds=_race(runners, rounds, device), bytes_moved=moved)
            )
            if progress is not None:
                progress(number + 1, len(makers))
    finally:
        torch.set_num_threads(threads)
    cuda = torch.cuda.get_device_name() if device == "cuda" else ""
    return KernelBench(
        backend=backend.name,
        processor=cuda or _processor(),
        rounds=rounds,
        load=os.getloadavg()[0],
        races=races,
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def _race(runners: dict[str, Runner], rounds: int, device: str) -> dict[str, float]:
    clock = time.process_time if device == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(rounds + 2):
        for name, run in runners.items():
            start = clock()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            # The first rounds compile and warm up.
            if number >= 2:
                seconds[name].append(clock() - start)
    return {name: 1e3 * statistics.median(times) for name, times in seconds.items()}


Made = tuple[str, dict[str, Runner], int]


class _Ways:
    """Makes the tensors of each race when its turn comes."""

    def __init__(self, kernels: Mapping[str, Callable[..., Any]], device: torch.device) -> None:
        self.kernels = kernels
        self.device = device
        self.random = torch.Generator(device).manual_seed(0)

    def all(self) -> tuple[Callable[[], Made], ...]:
        """Return what makes the races."""
        dtypes = (torch.float32, torch.bfloat16)
        attention = tuple(
            lambda page=page, dtype=dtype: self._attention(page, dtype)
            for page in (16, 128)
            for dtype in dtypes
        )
        return (
            self._recurrence,
            *attention,
            self._chunks,
            self._convolution,
            self._norm,
            self._rotary,
            self._gating,
            self._greedy,
        )

    def _normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        values = torch.randn(shape, generator=self.random, device=self.device)
        return values.to(dtype)

    def _slots(self, rows: int, count: int) -> Tensor:
        order = torch.randperm(count - 1, generator=self.random, device=self.device)
        return order[:rows] + 1

    def _recurrence(self) -> Made:
        rows, heads, dim = 64, 8, 128
        q, k, v = (self._normal(rows, heads, dim) for _ in range(3))
        k = functional.normalize(k, dim=-1)
        g, beta = -self._normal(rows, heads).abs(), self._normal(rows, heads).sigmoid()
        states = self._normal(rows + 1, heads, dim, dim)
        slots = self._slots(rows, rows + 1)
        flat = self._normal(rows * heads, dim, dim)
        stream = self._normal(rows * heads * dim * dim)
        keys, queries, values = (x.reshape(rows * heads, dim) for x in (k, q, v))
        decay, rate = g.exp().view(-1, 1, 1), beta.view(-1, 1, 1)

        def in_place() -> None:
            k_q = torch.stack((keys, queries), dim=1)
            flat.mul_(decay)
            read = torch.bmm(k_q, flat.mT)
            update = (values[:, None] - read[:, :1]) * rate
            flat.baddbmm_(update.mT, keys[:, None])
            read[:, 1:].add_(update * (keys * queries).sum(-1)[:, None, None])

        span = gated_delta_rule.evenly_spaced(slots)
        kernel = self.kernels["gated_delta_rule_decode"]
        ways: dict[str, Runner] = {
            "kernel": lambda: kernel(q, k, v, g, beta, states, slots),
            "torch in place": in_place,
            "fast's torch": lambda: gated_delta_rule.gated_delta_rule_decode(
                q, k, v, g, beta, states, slots, span
            ),
            "stream limit": lambda: stream.mul_(1.0001),
        }
        return "recurrent step 64 x 8 x 128 x 128 fp32", ways, 8 * stream.numel()

    def _attention(self, page: int, dtype: torch.dtype) -> Made:
        rows, heads, kv_heads, dim, context = 64, 8, 2, 64, 1024
        width = context // page
        query = self._normal(rows, heads, dim, dtype=dtype)
        key, value = (
            self._normal(rows * width + 1, page, kv_heads, dim, dtype=dtype) for _ in range(2)
        )
        table = self._slots(rows * width, rows * width + 1).view(rows, width).int()
        lens = torch.full((rows,), context, dtype=torch.int32, device=self.device)

        def gathered(pages: Tensor) -> Tensor:
            return pages[table.long()].view(rows, context, kv_heads, dim).transpose(1, 2)

        def attend(k: Tensor, v: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(query[:, :, None], k, v, enable_gqa=True)

        keys, values = gathered(key).contiguous(), gathered(value).contiguous()
        kernel = self.kernels["paged_attention_decode"]
        ways: dict[str, Runner] = {
            "kernel": lambda: kernel(query, key, value, table, lens, dim**-0.5),
            "gather + SDPA": lambda: attend(gathered(key), gathered(value)),
            "SDPA contiguous": lambda: attend(keys, values),
        }
        name = f"decode attention 64 x 8/2 x 64, 1024 keys, page {page} {_short(dtype)}"
        return name, ways, 2 * keys.numel() * dtype.itemsize

    def _chunks(self) -> Made:
        tokens, heads, dim = 512, 8, 128
        q, k = (functional.normalize(self._normal(tokens, heads, dim), dim=-1) for _ in range(2))
        v, g = self._normal(tokens, heads, dim), -0.1 * self._normal(tokens, heads).abs()
        beta, states = self._normal(tokens, heads).sigmoid(), self._normal(3, heads, dim, dim)
        slots = torch.tensor([1], device=self.device)
        starts = torch.tensor([0, tokens], dtype=torch.int32, device=self.device)
        table, plan = (
            chunk_gated_delta_rule.chunk_table(starts),
            chunk_gated_delta_rule.plan_chunks(starts, 2 * heads * dim),
        )
        kernel = self.kernels["chunk_gated_delta_rule"]
        ways: dict[str, Runner] = {
            "kernel": lambda: kernel(q, k, v, g, beta, states, slots, starts, table),
            "fast's torch": lambda: chunk_gated_delta_rule.chunk_gated_delta_rule(
                q, k, v, g, beta, states, slots, plan
            ),
        }
        return "chunked rule 512 tokens x 8 x 128 x 128 fp32", ways, 0

    def _convolution(self) -> Made:
        rows, channels = 64, 4096
        x, weight = self._normal(rows, channels), self._normal(4, channels)
        states, slots = self._normal(rows + 1, 3, channels), self._slots(rows, rows + 1)
        kernel = self.kernels["convolution_decode"]
        ways: dict[str, Runner] = {
            "kernel": lambda: kernel(x, weight, states, slots),
            "fast's torch": lambda: convolution.convolution_decode(x, weight, states, slots),
        }
        return "convolution step 64 x 4096 fp32", ways, 0

    def _norm(self) -> Made:
        x, weight = self._normal(64, 4096), self._normal(4096)
        kernel = self.kernels["rms_norm"]
        ways: dict[str, Runner] = {
            "kernel": lambda: kernel(x, weight, 1e-6),
            "fast's torch": lambda: norms.rms_norm(x, weight, 1e-6),
        }
        return "RMS norm 64 x 4096 fp32", ways, 0

    def _rotary(self) -> Made:
        x, weight, table = self._normal(64, 10, 64), self._normal(10, 64), self._normal(64, 16)
        kernel = self.kernels["norm_rotary"]
        ways: dict[str, Runner] = {
            "kernel": lambda: kernel(x, weight, table, 1e-6, torch.float32),
            "fast's torch": lambda: apply_rotary(norms.rms_norm(x, weight, 1e-6), table),
        }
        return "head norm + rotary 64 x 10 x 64 fp32", ways, 0

    def _gating(self) -> Made:
        a, b = self._normal(64, 32), self._normal(64, 32)
        decay, bias = -self._normal(32).exp(), self._normal(32)
        kernel = self.kernels["gating"]
        ways: dict[str, Runner] = {
            "kernel": lambda: kernel(a, b, decay, bias),
            "fast's torch": lambda: gated_delta_rule.gating(a, b, decay, bias),
        }
        return "gating 64 x 32 fp32", ways, 0

    def _greedy(self) -> Made:
        logits = self._normal(64, 8192)
        kernel = self.kernels["greedy"]
        ways: dict[str, Runner] = {
            "kernel": lambda: kernel(logits),
            "fast's torch": lambda: logits.argmax(dim=-1),
        }
        return "greedy 64 x 8192 fp32", ways, 0


def _short(dtype: torch.dtype) -> str:
    return "fp32" if dtype == torch.float32 else "bf16"
