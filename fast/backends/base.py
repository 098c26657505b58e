"""What a backend is: a way to run Triton kernels on some device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Backend", "BackendError", "CompileError"]


class BackendError(ValueError):
    """A backend cannot run here, or was given something that it cannot run."""


class CompileError(BackendError):
    """A kernel cannot be compiled; the text is the compiler's reason."""


class Backend(Protocol):
    """A way to run kernels.

    Attributes
    ----------
    name : str
        ``npu``, ``cuda``, ``cpu`` or ``interpreter``.
    device : str
        Where its tensors live, as torch names it.
    min_dot : int
        Least rows of a matrix product: cube and tensor cores want 16, a CPU takes any.
    """

    name: str
    device: str
    min_dot: int

    def launch(self, kernel: Any, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
        """Run a kernel.

        Parameters
        ----------
        kernel : triton.JITFunction
        grid : sequence of int
            Program instances along up to three axes, as many as there is work: a backend whose
            device wants no more than it has cores makes a loop of the rest.
        *arguments
            Tensors, ints below ``2**31`` and floats, in the kernel's order.
        **constants
            Its ``tl.constexpr`` parameters.
        """
        ...
