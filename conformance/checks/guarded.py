"""Tensors in memory whose every other byte is watched.

A tensor is a view into a larger buffer filled with ones, which every float format reads as NaN and
every signed integer as -1. What a kernel reads from outside its tensors therefore shows in its
numbers, and what it writes there shows in the buffer. `Allocations` gives the tensors that are
made during a call such memory too: its results and scratch are guarded as its arguments are, and
an element that no kernel wrote shows as NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from servespec.conformance.verdicts import DivergedError, Divergence

__all__ = ["Allocations", "Guarded", "Memory"]

_GUARD = 64
# What they return holds nothing yet, or something that is kept.
_POISONED: frozenset[Callable[..., Any]] = frozenset(
    (
        *(torch.empty, torch.empty_like, torch.empty_strided),
        *(Tensor.new_empty, Tensor.new_empty_strided),
    )
)
_FILLED: frozenset[Callable[..., Any]] = frozenset(
    (
        *(torch.zeros, torch.ones, torch.full, torch.zeros_like, torch.ones_like, torch.full_like),
        *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full),
        *(Tensor.clone, Tensor.contiguous, Tensor.to),
    )
)


class Guarded:
    """One tensor.

    Parameters
    ----------
    name : str
    shape : tuple of int
    dtype : torch.dtype
    stride : tuple of int
        In elements, none negative.
    device : torch.device or str
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        stride: tuple[int, ...],
        device: torch.device | str = "cpu",
    ) -> None:
        self.name = name
        reach = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
        size = 2 * _GUARD + (reach if 0 not in shape else 0)
        self.buffer = torch.full((size * dtype.itemsize,), 0xFF, dtype=torch.uint8, device=device)
        self.tensor: Tensor = self.buffer.view(dtype).as_strided(shape, stride, _GUARD)
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
            mask = torch.from_numpy(np.array(written)).to(after.device)
            size, stride = self.tensor.size(), self.tensor.stride()
            view = after.view(self.tensor.dtype).as_strided(size, stride, _GUARD)
            before = self._before.view(self.tensor.dtype).as_strided(size, stride, _GUARD)
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
    """The tensors of one call.

    Parameters
    ----------
    gap : int
        Elements between the entries of the first axis, unless a tensor is to be without.
    device : torch.device or str
        Of the tensors.
    """

    def __init__(self, gap: int, device: torch.device | str = "cpu") -> None:
        self._gap = gap
        self._device = device
        self._tensors: list[Guarded] = []
        self._made: list[Guarded] = []

    def empty(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, dense: bool = False
    ) -> Guarded:
        """Return a tensor that holds nothing but poison."""
        stride = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
        if len(shape) > 1 and not dense:
            stride[0] += self._gap
        guarded = Guarded(name, shape, dtype, tuple(stride), self._device)
        self._tensors.append(guarded)
        return guarded

    def put(
        self, name: str, values: npt.NDArray[Any], dtype: torch.dtype, *, dense: bool = False
    ) -> Tensor:
        """Return a tensor that holds some values."""
        guarded = self.empty(name, values.shape, dtype, dense=dense)
        guarded.tensor.copy_(torch.from_numpy(np.array(values)))
        return guarded.tensor

    def make(self, name: str, like: Tensor, *, filled: bool) -> Tensor:
        """Return a tensor in place of one that an implementation allocates.

        Parameters
        ----------
        name : str
        like : Tensor
            Has the shape, strides, dtype and device.
        filled : bool
            Whether its values are kept; otherwise it holds poison.
        """
        guarded = Guarded(name, tuple(like.shape), like.dtype, like.stride(), like.device)
        if filled:
            guarded.tensor.copy_(like)
        guarded.seal()
        self._made.append(guarded)
        return guarded.tensor

    def seal(self) -> None:
        """Remember every byte."""
        for guarded in self._tensors:
            guarded.seal()

    def check(self, written: Mapping[str, npt.NDArray[np.bool_]]) -> None:
        """Require that nothing changed but what is marked, by the names of the tensors.

        What the call allocated for itself it may write as a whole.

        Raises
        ------
        DivergedError
        """
        for guarded in self._tensors:
            guarded.check(written.get(guarded.name))
        for guarded in self._made:
            guarded.check(np.ones(guarded.tensor.shape, np.bool_))


class Allocations(TorchFunctionMode):
    """While it is active, what torch is asked to allocate lies in guarded memory.

    Copies are allocations too; other results of operations are as they always are.

    Parameters
    ----------
    memory : Memory
        Gets the tensors.
    """

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace what an allocating function returns."""
        result = func(*args, **(kwargs or {}))
        if func not in _POISONED and func not in _FILLED:
            return result
        if args and isinstance(args[0], Tensor) and _shares(result, args[0]):
            return result  # there was nothing to copy
        name = f"{func.__name__}{list(result.shape)}"
        return self._memory.make(name, result, filled=func in _FILLED)


def _shares(left: Tensor, right: Tensor) -> bool:
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
