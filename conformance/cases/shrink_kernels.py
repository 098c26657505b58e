"""Simpler variants of a kernel case, the greatest leaps first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from servespec.conformance.workloads.kernels import KernelCase

__all__ = ["kernel_changes"]

KernelChange = Callable[[KernelCase], KernelCase]


def kernel_changes(case: KernelCase) -> Iterator[KernelChange]:
    """Yield changes that make a kernel case simpler; some may be refused.

    Parameters
    ----------
    case : KernelCase

    Yields
    ------
    callable
        From a case to a simpler one.
    """
    for row in range(len(case.lengths)):
        yield partial(_without_row, row=row)
    plain: tuple[dict[str, Any], ...] = (
        {"null_rows": False},
        {"shared_blocks": False},
        {"gap": 0},
        {"parts": 1},
        {"share": 1},
        {"heads": 1},
        {"dim": 32},
        {"block_size": 16},
    )
    for fields in plain:
        yield partial(replace, **fields)
    for row in range(len(case.lengths)):
        for divisor in (case.lengths[row] + 1, 2):
            yield partial(_shorter, name="contexts", row=row, divisor=divisor)
            yield partial(_shorter, name="lengths", row=row, divisor=divisor)


def _without_row(case: KernelCase, row: int) -> KernelCase:
    if row >= len(case.lengths) or len(case.lengths) == 1:
        return case
    return replace(
        case,
        lengths=case.lengths[:row] + case.lengths[row + 1 :],
        contexts=case.contexts[:row] + case.contexts[row + 1 :],
    )


def _shorter(case: KernelCase, name: str, row: int, divisor: int) -> KernelCase:
    values = list(getattr(case, name))
    if row >= len(values):
        return case
    values[row] //= divisor
    if name == "lengths" and not any(values):
        return case
    change: dict[str, Any] = {name: tuple(values)}
    return replace(case, **change)
