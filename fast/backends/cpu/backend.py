"""Launching compiled kernels on a CPU.

Nothing checks bounds here: a kernel that reads or writes outside its tensors damages the process,
as it would damage a device's memory. The interpreter is the backend that checks.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from servespec.fast.backends import ascend
from servespec.fast.backends.binding import argument_type, signature
from servespec.fast.backends.cpu import native
from servespec.fast.backends.cpu.lowering import lower

__all__ = ["CpuBackend"]

_LLVM_TYPES = {"i32": "i32", "fp32": "float"}
_C_TYPES = {"i32": ctypes.c_int32, "fp32": ctypes.c_float}


class _Kernel:
    """One specialisation, ready to run."""

    def __init__(self, types: Sequence[str], code: native.Code) -> None:
        self.is_parallel = code.is_parallel
        arguments: list[Any] = [_C_TYPES.get(kind, ctypes.c_void_p) for kind in types]
        grid = [ctypes.c_int32] * 3
        function = ctypes.CFUNCTYPE(None, *arguments, *grid, ctypes.c_int64, ctypes.c_int64)
        self.run: Callable[..., None] = function(native.load(code))


class CpuBackend:
    """Kernels compiled for this processor."""

    name = "cpu"
    device = "cpu"
    min_dot = 1

    def __init__(self) -> None:
        self._kernels: dict[tuple[object, ...], _Kernel] = {}

    def launch(self, kernel: Any, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
        """Run a kernel; returns when it is done. See `Backend.launch`."""
        types = tuple(map(argument_type, arguments))
        key = (kernel, types, tuple(constants.items()))
        compiled = self._kernels.get(key)
        if compiled is None:
            named = signature(kernel, arguments, constants)
            compiled = _Kernel(types, _code(kernel, named, constants))
            self._kernels[key] = compiled
        x, y, z = (*grid, 1, 1, 1)[:3]
        values = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        count = x * y * z
        threads = min(torch.get_num_threads(), count) if compiled.is_parallel else 1
        if threads <= 1:
            compiled.run(*values, x, y, z, 0, count)
            return
        bounds = [count * part // threads for part in range(threads + 1)]
        runs = [
            _pool(threads).submit(compiled.run, *values, x, y, z, start, stop)
            for start, stop in pairwise(bounds[1:])
        ]
        compiled.run(*values, x, y, z, 0, bounds[1])
        for run in runs:
            run.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="servespec-kernel")


@cache
def _versions() -> str:
    """Describe what the code of a kernel depends on besides its source."""
    here = Path(__file__).parent
    sources = [here.parent / "ascend.py", *sorted(here.glob("*.py"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    packages = (f"{name} {metadata.version(name)}" for name in ("triton-ascend", "ascendnpu-ir"))
    return f"{digest} {' '.join(packages)} {native.host()}"


def _code(kernel: Any, types: Mapping[str, str], constants: Mapping[str, object]) -> native.Code:
    """Compile a kernel, unless a process before did."""
    described = f"{kernel.cache_key} {dict(types)} {dict(constants)} {_versions()}"
    key = hashlib.sha256(described.encode()).hexdigest()
    code = native.read(key)
    if code is None:
        linalg = ascend.to_linalg(kernel, types, constants)
        entry = f"servespec_{key[:16]}"
        module = lower(linalg.module)
        module = module.replace(
            f"define void @{linalg.name}(", f"define internal void @{linalg.name}("
        )
        code = native.compile_ir(
            module + _launcher(linalg.name, entry, list(types.values())),
            entry,
            # Atomic operations come out as plain reads and writes.
            is_parallel="atomic" not in linalg.module.lower(),
        )
        native.write(key, code)
    return code


def _launcher(kernel: str, entry: str, types: Sequence[str]) -> str:
    """LLVM IR of a function that runs the program instances ``[start, stop)`` of a grid.

    The kernel takes two buffers that it doesn't use here, its arguments, the grid and the
    instance. A buffer is passed as a memref: two pointers, offset, size and stride.
    """
    parameters, values = [], ["ptr null, ptr null, i64 0, i64 0, i64 1"] * 2
    for index, kind in enumerate(types):
        name = f"%a{index}"
        if kind.startswith("*"):
            parameters.append(f"ptr {name}")
            values.append(f"ptr {name}, ptr {name}, i64 0, i64 {2**63 - 1}, i64 1")
        else:
            parameters.append(f"{_LLVM_TYPES[kind]} {name}")
            values.append(f"{_LLVM_TYPES[kind]} {name}")
    parameters += ["i32 %gx", "i32 %gy", "i32 %gz", "i64 %start", "i64 %stop"]
    values += ["i32 %gx", "i32 %gy", "i32 %gz", "i32 %x", "i32 %y", "i32 %z"]
    return f"""
define void @{entry}({", ".join(parameters)}) {{
entry:
  %width = sext i32 %gx to i64
  %height = sext i32 %gy to i64
  %any = icmp slt i64 %start, %stop
  br i1 %any, label %loop, label %done
loop:
  %i = phi i64 [ %start, %entry ], [ %next, %loop ]
  %x64 = urem i64 %i, %width
  %row = udiv i64 %i, %width
  %y64 = urem i64 %row, %height
  %z64 = udiv i64 %row, %height
  %x = trunc i64 %x64 to i32
  %y = trunc i64 %y64 to i32
  %z = trunc i64 %z64 to i32
  call void @{kernel}({", ".join(values)})
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %stop
  br i1 %more, label %loop, label %done
done:
  ret void
}}
"""
