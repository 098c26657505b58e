"""One call of an operation: its memory, the call itself, the comparison of what it gives.

Bounds follow `servespec.conformance.checks.bounds`: a float32 reduction of n terms errs by
``u sqrt(n)`` relative to the size of what it sums, with the same factors for conditioning and for
the largest of many. Where values pass through bfloat16 on the way (the weights of an attention
over bfloat16, and every bfloat16 result) each passage may err by ``2**-8`` of the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from servespec.conformance.adapters.failure import ImplementationFailed
from servespec.conformance.cases.case import Case
from servespec.conformance.checks.bounds import CONDITION, TAIL
from servespec.conformance.checks.guarded import Allocations, Memory
from servespec.conformance.verdicts import DivergedError, Divergence, Tally, attempt
from servespec.conformance.workloads.kernels import KernelCase

__all__ = ["NARROW", "Array", "Call", "Operations", "Written", "error_bound"]

Array = npt.NDArray[np.float64]
Written = dict[str, npt.NDArray[np.bool_]]
Operations = Mapping[str, Callable[..., Any]]

NARROW = 2.0**-8
_UNIT = 2.0**-24
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def error_bound(terms: int, size: float) -> float:
    """Return by how much a float32 reduction may err.

    Parameters
    ----------
    terms : int
        Of the sum.
    size : float
        Of what is summed.
    """
    return TAIL * CONDITION * _UNIT * math.sqrt(terms) * size


class Call:
    """What one case needs: numbers, memory, the operations, the tally."""

    def __init__(self, case: Case, operations: Operations, tally: Tally, device: str) -> None:
        assert case.kernel is not None
        self.case: KernelCase = case.kernel
        self.dtype = _DTYPES[case.dtype]
        self.operations = operations
        self.tally = tally
        self.random = np.random.default_rng(self.case.seed)
        self.memory = Memory(self.case.gap, device)
        self.rows = len(self.case.lengths)
        self.starts = np.cumsum((0, *self.case.lengths)).astype(np.int32)

    def numbers(self, *shape: int, scale: float = 1.0) -> Array:
        """Return normal numbers that the dtype can hold."""
        values = torch.from_numpy(self.random.standard_normal(shape) * scale)
        return values.to(self.dtype).double().numpy()

    def floats(self, *shape: int, scale: float = 1.0) -> Array:
        """Return normal numbers of float32."""
        values = self.random.standard_normal(shape) * scale
        return values.astype(np.float32).astype(np.float64)

    def put(self, name: str, values: npt.NDArray[Any], dtype: torch.dtype | None = None) -> Tensor:
        """Place numbers of the case's dtype, or of another."""
        return self.memory.put(name, values, dtype or self.dtype)

    def dense(self, name: str, values: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
        """Place values that an operation wants without gaps."""
        return self.memory.put(name, values, dtype, dense=True)

    def ints(self, name: str, values: npt.NDArray[Any]) -> Tensor:
        """Place integers as int32."""
        return self.memory.put(name, values.astype(np.int32), torch.int32)

    def run(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call the implementation."""
        operation = self.operations.get(name)
        if operation is None:
            raise ImplementationFailed(f"make_kernels gives no operation {name!r}")
        self.memory.seal()
        with Allocations(self.memory):
            return attempt(operation, *arguments, **options)

    def compare(self, name: str, expected: Array, got: Any, bound: float) -> None:
        """Compare a result, or part of an in-place tensor."""
        if not isinstance(got, Tensor) or tuple(got.shape) != expected.shape:
            shape = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
            raise ImplementationFailed(f"{name} is {shape}: must be a tensor of {expected.shape}")
        numbers = got.double().cpu().numpy()
        if got.dtype == torch.bfloat16:
            bound = bound + NARROW * float(np.abs(expected).max(initial=0.0))
        error = np.where(np.isfinite(numbers), np.abs(numbers - expected), np.inf)
        self.tally.counts["numbers"] += expected.size
        if error.size and error.max() > bound:
            where = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
            raise DivergedError(
                Divergence(
                    field=f"{self.case.operation}.{name}{list(where)}",
                    expected=f"{expected[where]:.8g} +- {bound:.2g}",
                    got=f"{numbers[where]:.8g}",
                )
            )

    def slots(self, count: int, *, columns: int = 1) -> npt.NDArray[np.int32]:
        """Return distinct state slots, some of them padding if the case says so."""
        slots = self.random.permutation(np.arange(1, count * columns + 3))[: count * columns]
        slots = slots.reshape(count, columns).astype(np.int32)
        if self.case.null_rows and count > 1:
            slots[self.random.integers(count)] = self.random.choice([0, -1])
            self.tally.counts["null_rows"] += 1
        return slots
