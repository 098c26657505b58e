"""Dummy rows that bring a step up to the size of its graph.

The fused attention operator of Ascend takes as many query tokens as its last cumulative length
says, so tokens that only pad a step must belong to some row. GDN layers are told nothing of such
tokens: their cumulative lengths repeat the last value, and a dummy row has no token there.

Source: ``_pad_query_start_loc_for_fia`` of ``vllm_ascend/worker/model_runner_v1.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from servespec.reference.contracts import GraphMode

__all__ = ["pad_query_start_loc"]


def pad_query_start_loc(
    query_start_loc: Sequence[int],
    num_tokens_padded: int,
    num_reqs_padded: int | None,
    graph_mode: GraphMode,
    uniform_decode_query_len: int,
) -> tuple[int, ...]:
    """Append dummy rows to the cumulative lengths of a step.

    If the padded size is that many rows of a uniform decode, dummies of that shape are appended,
    except with mode ``FULL``, whose graphs are not captured row by row. Otherwise one dummy row
    takes all padding; none is needed if there is no padding.

    Parameters
    ----------
    query_start_loc : sequence of int
        R + 1 cumulative token counts.
    num_tokens_padded : int
    num_reqs_padded : int or None
        Rows the graph was captured for; None means R.
    graph_mode : str
        The configured mode.
    uniform_decode_query_len : int
        Tokens of a row in a uniform decode: one and the most drafts.

    Returns
    -------
    tuple of int

    Notes
    -----
    The rule goes by counts alone. A batch of unequal rows whose padded size happens to be its
    number of rows times the uniform length gets no dummy, as in the pinned code.
    """
    starts = tuple(query_start_loc)
    num_reqs, last = len(starts) - 1, starts[-1]
    if graph_mode == "FULL" or num_reqs_padded is None:
        num_reqs_padded = num_reqs
    if graph_mode != "FULL" and num_tokens_padded == num_reqs_padded * uniform_decode_query_len:
        missing = range(1, num_reqs_padded - num_reqs + 1)
        return starts + tuple(last + row * uniform_decode_query_len for row in missing)
    return (*starts, num_tokens_padded) if last < num_tokens_padded else starts
