"""Decode-first row order, made by swapping as few rows as possible.

Kernels want the decodes in one leading slice. The order has four regions; only rows that stand in
the wrong region move, each cycle of misplaced rows by swaps with its first row. Inside a region
the order is therefore not preserved.

Source: ``reorder_batch_to_split_decodes_and_prefills`` of ``vllm/v1/attention/backends/utils.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from servespec.reference.contracts import SpeculativeConfig

__all__ = ["Region", "Swap", "apply_swaps", "region", "reorder_threshold", "swaps_into_regions"]

Swap = tuple[int, int]


class Region(IntEnum):
    """Where in the batch a row belongs."""

    DECODE = 0
    SHORT_EXTEND = 1
    LONG_EXTEND = 2
    PREFILL = 3


def reorder_threshold(speculative: SpeculativeConfig | None) -> int:
    """Return the most tokens of a row that may count as a decode: one and the drafts.

    Parameters
    ----------
    speculative : SpeculativeConfig or None

    Returns
    -------
    int
    """
    return 1 if speculative is None else 1 + speculative.num_speculative_tokens


def region(num_computed: int, num_scheduled: int, num_prompt: int, threshold: int) -> Region:
    """Classify one row.

    A first chunk is a prefill whatever its length, so a new prompt of one token stands last.

    Parameters
    ----------
    num_computed, num_scheduled, num_prompt : int
        Tokens of the row.
    threshold : int
        Most tokens of a decode or short extend.

    Returns
    -------
    Region
    """
    if num_computed == 0:
        return Region.PREFILL
    if num_scheduled > threshold:
        return Region.LONG_EXTEND
    return Region.DECODE if num_computed >= num_prompt else Region.SHORT_EXTEND


def swaps_into_regions(regions: Sequence[Region]) -> tuple[Swap, ...]:
    """Return the row swaps that bring a batch into region order.

    The misplaced rows, taken region by region, belong to the misplaced places from the left. That
    assignment is a permutation; each of its cycles is resolved by swapping the cycle's first row
    with the place it belongs to until the row that belongs there has come home.

    Parameters
    ----------
    regions : sequence of Region
        For each row, before reordering.

    Returns
    -------
    tuple of (int, int)
        In the order in which they are carried out.
    """
    places = [
        row
        for row, (is_in, wanted) in enumerate(zip(regions, sorted(regions), strict=True))
        if is_in != wanted
    ]
    movers = sorted(places, key=lambda row: regions[row])
    destination = dict(zip(movers, places, strict=True))
    swaps: list[Swap] = []
    settled: set[int] = set()
    for first in movers:
        if first in settled:
            continue
        target = destination[first]
        while target != first:
            swaps.append((first, target))
            settled.add(target)
            target = destination[target]
    return tuple(swaps)


def apply_swaps(rows: Sequence[str], swaps: Sequence[Swap]) -> tuple[str, ...]:
    """Swap rows in order.

    Parameters
    ----------
    rows : sequence of str
    swaps : sequence of (int, int)

    Returns
    -------
    tuple of str
    """
    result = list(rows)
    for a, b in swaps:
        result[a], result[b] = result[b], result[a]
    return tuple(result)
