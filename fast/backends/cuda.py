"""Kernels on CUDA, by upstream Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from servespec.fast.backends.base import BackendError
from servespec.fast.backends.binding import signature

__all__ = ["CudaBackend", "compile_cubin"]


class CudaBackend:
    """Triton's own launcher.

    Raises
    ------
    BackendError
        torch finds no device.
    """

    name = "cuda"
    device = "cuda"
    min_dot = 16

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise BackendError("backend cuda cannot run here: torch finds no CUDA device")

    def launch(self, kernel: Any, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
        """Run a kernel on the current stream. See `Backend.launch`."""
        signature(kernel, arguments, constants)
        kernel[tuple(grid)](*arguments, **constants)


def compile_cubin(
    kernel: Any, types: dict[str, str], constants: dict[str, object], capability: int = 90
) -> bytes:
    """Compile a kernel without a device.

    Parameters
    ----------
    kernel : triton.JITFunction
    types : dict of str to str
        Types of its parameters, as `signature` gives them.
    constants : dict of str to object
    capability : int
        Compute capability, ten times.

    Returns
    -------
    bytes
        The machine code.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [parameter.name for parameter in kernel.params]
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs=dict(constants),
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    cubin: bytes = compiled.asm["cubin"]
    return cubin
