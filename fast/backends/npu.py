"""Kernels on an Ascend NPU, by triton-ascend and torch_npu.

A chip runs as many program instances at a time as it has cores: vector cores, or cube cores where a
kernel multiplies matrices. ``TRITON_ALL_BLOCKS_PARALLEL`` lets a grid be of any size. The launcher
then starts one block a core at the most, and the compiler (``--enable-auto-blockify-loop``) puts
the kernel into a loop that begins at the block's index, strides by the number of cores of the
target, and ends at the product of the grid's three extents; the three program ids are computed from
the loop's index. The driver must report no fewer cores than the compiler knows of the target, or
instances would be left out. `servespec compile` compiles with that option.

Code without the loop, started that way, would leave most of the grid out, and triton-ascend's cache
does not tell the two apart. So kernels launched here have a cache of their own, and the variable is
set during a launch alone: other kernels of the process are compiled and launched as ever.

What a launch needs of the device's memory for exchange between cube and vector cores is allocated
for the whole grid, not for the blocks started.

Sources: ``runtime/jit.py``, ``compiler/compiler.py``, ``backends/ascend/compiler.py`` and
``driver.py`` of triton-ascend 3.2.0; modules that ascendnpu-ir 1.2.0 makes. Nothing here has run on
a device yet.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from servespec.fast.backends.base import BackendError
from servespec.fast.backends.binding import signature

__all__ = ["NpuBackend", "device_reason"]

# The index of the loop, and what it becomes after the last stride, are of 32 bits.
_LARGEST = 2**30


def device_reason() -> str | None:
    """Return why no NPU can be used; None if one can."""
    try:
        module = importlib.import_module("torch_npu")
    except ImportError as error:
        # Without CANN its libraries are not found.
        return f"torch_npu does not load: {' '.join(str(error).split())}"
    return None if module.npu.is_available() else "torch_npu finds no device"


class NpuBackend:
    """triton-ascend's own launcher.

    Raises
    ------
    BackendError
        There is no device.
    """

    name = "npu"
    device = "npu"
    min_dot = 16

    def __init__(self) -> None:
        reason = device_reason()
        if reason is not None:
            raise BackendError(f"backend npu cannot run here: {reason}")
        cache = os.environ.get("TRITON_CACHE_DIR", "").strip() or Path.home() / ".triton" / "cache"
        self._environment = {
            "TRITON_ALL_BLOCKS_PARALLEL": "1",
            "TRITON_CACHE_DIR": str(Path(cache, "all-blocks-parallel")),
        }

    def launch(self, kernel: Any, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
        """Run a kernel on the current stream. See `Backend.launch`.

        Raises
        ------
        BackendError
            The grid has more instances than the index of the loop can count.
        """
        signature(kernel, arguments, constants)
        if math.prod(grid) > _LARGEST:
            raise BackendError(
                f"kernel {kernel.__name__} has a grid of {math.prod(grid)}: must be at most 2**30"
            )
        with _environment(self._environment):
            kernel[tuple(grid)](*arguments, **constants)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
