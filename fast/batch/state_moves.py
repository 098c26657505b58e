"""Moves of aligned GDN states, for all rows at once.

Source: ``preprocess_mamba`` and ``postprocess_mamba_fused_kernel`` of
``vllm/v1/worker/mamba_utils.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from servespec.fast.batch.buffers import IntArray

__all__ = ["ColumnMoves", "moves_to_step", "saves_at_boundaries"]


@dataclass(slots=True, kw_only=True)
class ColumnMoves:
    """Moves between columns of the block tables.

    Attributes
    ----------
    rows : numpy.ndarray
        ``[M]`` rows with a move.
    sources, destinations, offsets : numpy.ndarray
        ``[M]``; the recurrent state lies `offsets` columns behind the source, the convolution
        window that many positions into it.
    """

    rows: IntArray
    sources: IntArray
    destinations: IntArray
    offsets: IntArray

    @classmethod
    def where(
        cls,
        moving: npt.NDArray[np.bool_],
        sources: IntArray,
        destinations: IntArray,
        offsets: IntArray,
    ) -> ColumnMoves:
        """Keep the rows of a mask."""
        everything = cls(
            rows=np.arange(len(moving)),
            sources=sources,
            destinations=destinations,
            offsets=offsets,
        )
        return everything.only(moving)

    def only(self, moving: npt.NDArray[np.bool_]) -> ColumnMoves:
        """Return the moves of a mask over these moves."""
        return ColumnMoves(
            rows=self.rows[moving],
            sources=self.sources[moving],
            destinations=self.destinations[moving],
            offsets=self.offsets[moving],
        )


def moves_to_step(
    computed: IntArray, last_seq_len: IntArray, seq_lens: IntArray, accepted: IntArray, size: int
) -> ColumnMoves:
    """Return the moves that bring running states to the blocks of the step's last tokens.

    Parameters
    ----------
    computed, last_seq_len, seq_lens, accepted : numpy.ndarray
        ``[R]``: tokens before the step, after the latest one (0: none), after this one; tokens
        the latest one sampled.
    size : int
        Tokens of a state block.

    Returns
    -------
    ColumnMoves
    """
    held = np.where(last_seq_len > 0, last_seq_len, computed)
    sources, destinations = (held - 1) // size, (seq_lens - 1) // size
    moving = (held > 0) & (sources != destinations)
    return ColumnMoves.where(moving, sources, destinations, accepted - 1)


def saves_at_boundaries(
    seq_lens: IntArray, drafts: IntArray, accepted: IntArray, size: int
) -> ColumnMoves:
    """Return the copies that keep states at block boundaries which accepted drafts crossed.

    Parameters
    ----------
    seq_lens, drafts, accepted : numpy.ndarray
        ``[R]``: tokens after the step with all drafts, drafts, tokens sampled.
    size : int
        Tokens of a state block.

    Returns
    -------
    ColumnMoves
        Also of states that end in the column they are in.
    """
    verified = seq_lens - drafts
    boundary = (verified + accepted - 1) // size * size
    return ColumnMoves.where(
        boundary >= verified, (seq_lens - 1) // size, boundary // size - 1, boundary - verified
    )
