"""Kernels in upstream Triton's interpreter, on a CPU: slow, but it checks.

Every pointer remembers the tensor it was made from. A read or write that leaves the memory of that
tensor's elements raises, even where another tensor lies. Program instances run in a shuffled
order, so that one that leans on what another wrote shows.

The interpreter as shipped keeps bfloat16 as integers and computes with those in places; three of
its operations are replaced by ones that go through float32 and round to nearest, halves to even.

TileLens (PyPI) has such a check too: it proves, with an SMT solver, that no access of a traced
kernel can leave its tensor. It brings a solver, a web server and more along, and a kernel under it
computes nothing; here every access of an ordinary run is looked at, whose results are compared.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from servespec.fast.backends.base import BackendError
from servespec.fast.backends.binding import signature

# Triton decides when a kernel is defined; kernels are imported after this module.
os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl
from triton.runtime import interpreter

__all__ = ["AccessError", "InterpreterBackend"]


class AccessError(BackendError):
    """A kernel read or wrote outside the tensor that its pointer belongs to."""


class InterpreterBackend:
    """Launches that run every program instance in Python."""

    name = "interpreter"
    device = "cpu"
    min_dot = 1

    def __init__(self) -> None:
        _repair()

    def launch(self, kernel: Any, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
        """Run a kernel; returns when it is done. See `Backend.launch`.

        Raises
        ------
        AccessError
        """
        types = signature(kernel, arguments, constants)
        function = kernel.rewrite()
        values = {
            name: interpreter._implicit_cvt(value)
            for name, value in zip(types, arguments, strict=True)
        }
        for name, value in zip(types, arguments, strict=True):
            if isinstance(value, Tensor):
                _mark(values[name].handle, (name, *_span(value)))
        builder = interpreter.interpreter_builder
        extents = (*grid, 1, 1, 1)[:3]
        builder.set_grid_dim(*extents)
        order = list(range(math.prod(extents)))
        random.Random(0).shuffle(order)
        with _language(function):
            for number in order:
                rest, x = divmod(number, extents[0])
                z, y = divmod(rest, extents[1])
                builder.set_grid_idx(x, y, z)
                function(**values, **constants)


@contextmanager
def _language(function: Any) -> Iterator[None]:
    scope = interpreter._patch_lang(function)
    try:
        yield
    finally:
        scope.restore()


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first and last byte, exclusive, of a tensor's elements."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def _mark(pointer: Any, owner: tuple[str, int, int]) -> None:
    pointer.attr["owner"] = owner


def _carry(source: Any, result: Any) -> Any:
    """Let a pointer made from another one belong to the same tensor."""
    if "owner" in source.attr:
        result.attr["owner"] = source.attr["owner"]
    return result


def _check(pointers: Any, mask: Any, what: str) -> None:
    addresses = pointers.data[mask.data.astype(bool)]
    if not addresses.size:
        return
    if "owner" not in pointers.attr:
        raise AccessError(f"a kernel {what}s through a pointer of unknown origin")
    name, start, stop = pointers.attr["owner"]
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    low, high = int(addresses.min()), int(addresses.max()) + size
    if low < start or high > stop:
        raise AccessError(
            f"a kernel {what}s bytes [{low - start}, {high - start}) of {name}:"
            f" must be in [0, {stop - start})"
        )


def _float32(handle: Any) -> Any:
    if handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16:
        wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)
    return handle


def _bfloat16(values: Any) -> Any:
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).reshape(np.shape(values))


@cache
def _repair() -> None:
    """Replace what the interpreter does wrong, and watch what it reads and writes."""
    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle

    def replace(name: str, make: Callable[[Any], Any]) -> None:
        setattr(builder, name, make(getattr(builder, name)))

    def dot(old: Any) -> Any:
        return lambda self, a, b, *rest: old(self, _float32(a), _float32(b), *rest)

    def binary(old: Any) -> Any:
        def run(self: Any, left: Any, right: Any, operation: Any) -> Any:
            if left.dtype.scalar == tl.bfloat16:
                result = operation(_float32(left).data, _float32(right).data)
                return handle(_bfloat16(result), tl.bfloat16)
            return old(self, left, right, operation)

        return run

    def cast(old: Any) -> Any:
        def run(self: Any, source: Any, kind: Any) -> Any:
            if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
                return handle(_bfloat16(source.data), tl.bfloat16)
            return old(self, source, kind)

        return run

    def carried(old: Any) -> Any:
        return lambda self, source, *rest: _carry(source, old(self, source, *rest))

    def splat(old: Any) -> Any:
        return lambda self, kind, source: _carry(source, old(self, kind, source))

    def load(old: Any) -> Any:
        def run(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            _check(pointers, mask, "read")
            return old(self, pointers, mask, *rest)

        return run

    def store(old: Any) -> Any:
        def run(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            _check(pointers, mask, "write")
            return old(self, pointers, value, mask, *rest)

        return run

    replace("create_dot", dot)
    replace("binary_op", binary)
    replace("cast_impl", cast)
    for name in ("create_fp_trunc", "create_fp_ext"):
        setattr(builder, name, lambda self, source, kind: self.cast_impl(source, kind))
    for name in ("create_addptr", "create_expand_dims", "create_broadcast", "create_trans"):
        replace(name, carried)
    replace("create_splat", splat)
    replace("create_masked_load", load)
    replace("create_masked_store", store)
