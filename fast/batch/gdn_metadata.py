"""Which rows of a step go through which form of a GDN layer, and where their tokens are.

The layout is one for all GDN groups of a step; only the state blocks differ between them.

Source: ``GDNAttentionMetadataBuilder`` of ``vllm/v1/attention/backends/gdn_attn.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from servespec.fast.batch.buffers import IntArray
from servespec.fast.batch.metadata import leading_decodes

__all__ = ["GdnLayout", "SpecLayout", "gdn_layout", "verified_drafts"]


@dataclass(slots=True, kw_only=True)
class SpecLayout:
    """Rows and tokens with drafts (first of each pair) and without (second).

    Attributes
    ----------
    mask : numpy.ndarray
        ``[R]`` bool.
    listed : numpy.ndarray
        ``[R]`` bool, rows in the arrays of those with drafts: the mask, and dummies behind it if
        no other row has a token.
    query_start_locs : tuple of numpy.ndarray
        int32 cumulative tokens.
    token_indices : tuple of numpy.ndarray
        int64.
    """

    mask: npt.NDArray[np.bool_]
    listed: npt.NDArray[np.bool_]
    query_start_locs: tuple[IntArray, IntArray]
    token_indices: tuple[IntArray, IntArray]


@dataclass(slots=True, kw_only=True)
class GdnLayout:
    """Counts of rows and tokens, and the division of a step with drafts."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    spec: SpecLayout | None = None

    @property
    def num_spec_decodes(self) -> int:
        """Rows with drafts."""
        return 0 if self.spec is None else int(np.count_nonzero(self.spec.mask))

    @property
    def num_spec_decode_tokens(self) -> int:
        """Tokens of rows with drafts."""
        return 0 if self.spec is None else len(self.spec.token_indices[0])


def verified_drafts(scheduled: IntArray, drafts: IntArray) -> IntArray:
    """Return the drafts of rows that hold one token and drafts, -1 for the others.

    Parameters
    ----------
    scheduled, drafts : numpy.ndarray
        ``[R]``.

    Returns
    -------
    numpy.ndarray
        ``[R]``.
    """
    return np.where((drafts > 0) & (scheduled == drafts + 1), drafts, -1)


def gdn_layout(
    query_lens: IntArray,
    computed: IntArray,
    prompt: IntArray,
    verified: IntArray | None,
    fresh_decode: bool,
) -> GdnLayout:
    """Divide the rows of a step.

    Parameters
    ----------
    query_lens, computed, prompt : numpy.ndarray
        ``[R]`` tokens: of the step, computed before it, of the prompt.
    verified : numpy.ndarray or None
        ``[R]``, `verified_drafts`; None without drafts.
    fresh_decode : bool
        Whether one-token rows inside their prompt count as decodes (the quirk
        `gdn_fresh_decode`); otherwise they are prefills, so that no first chunk is a decode.

    Returns
    -------
    GdnLayout
    """
    total = int(query_lens.sum())
    if verified is None or not (verified > 0).any():
        decodes = leading_decodes(query_lens, 1, None if fresh_decode else computed < prompt)
        tokens = int(query_lens[:decodes].sum())
        return GdnLayout(
            num_decodes=decodes,
            num_prefills=len(query_lens) - decodes,
            num_decode_tokens=tokens,
            num_prefill_tokens=total - tokens,
        )
    mask = verified >= 0
    # Dummy rows of a padded batch hold no token.
    num_prefills = int(np.count_nonzero(query_lens[~mask]))
    listed = mask if num_prefills else np.ones_like(mask)
    of_token = np.repeat(mask, query_lens)
    (with_drafts,), (without,) = np.nonzero(of_token), np.nonzero(~of_token)
    return GdnLayout(
        num_decodes=0,
        num_prefills=num_prefills,
        num_decode_tokens=0,
        num_prefill_tokens=len(without),
        spec=SpecLayout(
            mask=mask,
            listed=listed,
            query_start_locs=(_starts(query_lens[listed]), _starts(query_lens[~mask])),
            token_indices=(with_drafts, without),
        ),
    )


def _starts(lengths: IntArray) -> IntArray:
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts
