"""Arrays that live as long as the engine: growing stores, and step buffers with a device twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["POISON", "Array", "IntArray", "StepBuffer", "grown"]

POISON = -7
"""What a check writes where nothing valid stands; no id, count or position is negative."""

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.integer[Any]]


def grown(array: Array, axis: int, needed: int) -> Array:
    """Return an array with room for `needed` entries along an axis, its old content in front.

    Parameters
    ----------
    array : numpy.ndarray
    axis : int
    needed : int

    Returns
    -------
    numpy.ndarray
        The array itself if it is large enough, else one of at least twice the size, new entries
        zero.
    """
    size = array.shape[axis]
    if needed <= size:
        return array
    extra = [(0, 0)] * array.ndim
    extra[axis] = (0, max(needed, 2 * size) - size)
    return np.pad(array, extra)


class StepBuffer:
    """Host array that is filled every step, and the tensor that a model reads.

    On a CPU both are one memory and nothing is copied.

    Parameters
    ----------
    shape : tuple of int
    dtype : numpy dtype
    device : torch.device
    """

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike, device: torch.device) -> None:
        self.host: Array = np.zeros(shape, dtype)
        self._shares = device.type == "cpu"
        self._device = device
        self._adopt()

    def _adopt(self) -> None:
        tensor = torch.from_numpy(self.host)
        self._tensor = tensor if self._shares else torch.zeros_like(tensor, device=self._device)

    def reserve(self, rows: int, columns: int | None = None) -> Array:
        """Make room and return the host array.

        Parameters
        ----------
        rows : int
        columns : int or None

        Returns
        -------
        numpy.ndarray
        """
        larger = grown(self.host, 0, rows)
        if columns is not None:
            larger = grown(larger, 1, columns)
        if larger is not self.host:
            self.host = larger
            self._adopt()
        return self.host

    def poison(self) -> None:
        """Overwrite everything; the next step must not read what this one does not write."""
        self.host[...] = True if self.host.dtype == np.bool_ else POISON

    def put(self, values: Array, rows: int | None = None, fill: int = 0) -> None:
        """Write values to the front, and `fill` behind them up to `rows`.

        Parameters
        ----------
        values : numpy.ndarray
        rows : int or None
            None means as many as there are values.
        fill : int
        """
        count = len(values)
        rows = count if rows is None else rows
        columns = values.shape[1] if values.ndim == 2 else None
        host = self.reserve(rows, columns)
        if columns is None:
            host[:count] = values
        else:
            host[:count, :columns] = values
        host[count:rows] = fill

    def publish(self, rows: int, columns: int | None = None) -> torch.Tensor:
        """Return the leading part as the device sees it.

        Parameters
        ----------
        rows : int
        columns : int or None
            For a two-dimensional buffer, its leading columns.

        Returns
        -------
        torch.Tensor
            A view; the next step overwrites it.
        """
        view = self._tensor[:rows] if columns is None else self._tensor[:rows, :columns]
        if not self._shares:
            host = self.host[:rows] if columns is None else self.host[:rows, :columns]
            view.copy_(torch.from_numpy(host), non_blocking=True)
        return view
