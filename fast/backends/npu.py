"""Kernels on an Ascend NPU, by triton-ascend and torch_npu.

The vector cores of a chip run as many program instances at a time as there are of them, and a
launch may have at most 65535. A larger grid is legal below that and only costs a little speed;
``TRITON_ALL_BLOCKS_PARALLEL`` makes the compiler turn it into a loop.

Sources: vllm-ascend's ``ops/triton/triton_utils.py`` for the core counts, torch_npu's documentation
for the autoload switch. Nothing here has run on a device yet.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Sequence
from typing import Any

from servespec.fast.backends.base import BackendError
from servespec.fast.backends.binding import signature

__all__ = ["NpuBackend", "device_reason"]

_MAX_GRID = 65535


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
        os.environ.setdefault("TRITON_ALL_BLOCKS_PARALLEL", "1")
        driver = importlib.import_module("triton.runtime.driver").active
        properties = driver.utils.get_device_properties(driver.get_current_device())
        self.num_programs: int | None = properties["num_vectorcore"]

    def launch(self, kernel: Any, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
        """Run a kernel on the current stream. See `Backend.launch`.

        Raises
        ------
        BackendError
            The grid is larger than a launch may be.
        """
        signature(kernel, arguments, constants)
        if math.prod(grid) > _MAX_GRID:
            raise BackendError(
                f"kernel {kernel.__name__} has a grid of {math.prod(grid)}:"
                f" must be at most {_MAX_GRID} on npu"
            )
        kernel[tuple(grid)](*arguments, **constants)
