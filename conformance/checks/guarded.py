"""Tensors in memory whose every other byte is watched.

A tensor is a view into a larger buffer filled with ones, which every float format reads as NaN and
every signed integer as -1. What a kernel reads from outside its tensors therefore shows in its
numbers, and what it writes there shows in the buffer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from servespec.conformance.verdicts import DivergedError, Divergence

__all__ = ["Guarded", "Memory"]

_GUARD = 64


class Guarded:
    """One tensor.

    Parameters
    ----------
    name : str
    shape : tuple of int
    dtype : torch.dtype
    gap : int
        Elements between the entries of the first axis.
    """

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, gap: int = 0) -> None:
        self.name = name
        inner = int(np.prod(shape[1:]))
        stride = inner + gap
        size = shape[0] * stride + 2 * _GUARD
        self.buffer = torch.full((size * dtype.itemsize,), 0xFF, dtype=torch.uint8)
        flat = self.buffer.view(dtype)[_GUARD : _GUARD + shape[0] * stride]
        rows = flat.view(shape[0], stride)[:, :inner]
        self.tensor: Tensor = torch.unflatten(rows, 1, shape[1:] or (1,))
        if len(shape) == 1:
            self.tensor = self.tensor[:, 0]
        self._before = self.buffer

    def seal(self) -> None:
        """Remember the bytes as they are now."""
        self._before = self.buffer.clone()

    def check(self, written: npt.NDArray[np.bool_] | None = None) -> None:
        """Require that nothing changed but what `written` marks.

        Parameters
        ----------
        written : numpy.ndarray or None
            Bool, of the tensor's shape or of its leading axes; None: nothing.

        Raises
        ------
        DivergedError
        """
        after = self.buffer.clone()
        if written is not None and written.any():
            mask = torch.from_numpy(written)
            offset = self.tensor.storage_offset()
            size, stride = self.tensor.size(), self.tensor.stride()
            view = after.view(self.tensor.dtype).as_strided(size, stride, offset)
            before = self._before.view(self.tensor.dtype).as_strided(size, stride, offset)
            view[mask] = before[mask]
        changed = (after != self._before).nonzero()
        if len(changed):
            where = int(changed[0]) // self.tensor.dtype.itemsize - _GUARD
            raise DivergedError(
                Divergence(
                    field=f"{self.name}.memory",
                    expected="unchanged",
                    got=f"element {where} of the buffer was written ({len(changed)} bytes in all)",
                )
            )


class Memory:
    """The tensors of one call."""

    def __init__(self, gap: int) -> None:
        self.gap = gap
        self.tensors: list[Guarded] = []

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Guarded:
        """Return a tensor that holds nothing but poison."""
        guarded = Guarded(name, shape, dtype, self.gap if len(shape) > 1 else 0)
        self.tensors.append(guarded)
        return guarded

    def put(self, name: str, values: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
        """Return a tensor that holds some values."""
        guarded = self.empty(name, values.shape, dtype)
        guarded.tensor.copy_(torch.from_numpy(np.array(values)))
        return guarded.tensor

    def seal(self) -> None:
        """Remember every byte."""
        for guarded in self.tensors:
            guarded.seal()

    def check(self, written: dict[str, npt.NDArray[np.bool_]]) -> None:
        """Require that nothing changed but what is marked, by the names of the tensors."""
        for guarded in self.tensors:
            guarded.check(written.get(guarded.name))
