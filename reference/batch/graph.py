"""Which captured graph a step runs in, and how many tokens that pads it to.

A graph exists for a list of token counts, so a step takes the smallest that holds it; one that no
graph fits runs eagerly.

Source: ``vllm/v1/cudagraph_dispatcher.py`` and ``_determine_batch_execution_and_padding`` of
``vllm_ascend/worker/model_runner_v1.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from servespec.reference.contracts import GraphConfig, GraphDispatch

__all__ = ["dispatch", "is_uniform_decode"]


def is_uniform_decode(
    num_scheduled_tokens: Sequence[int], num_computed_tokens: Sequence[int], num_spec: int
) -> bool:
    """Tell whether all rows have one token and all their drafts.

    With speculation a prompt of just that length would look the same, so every row must have
    computed something then. Without it a step of new one-token prompts is a uniform decode.

    Parameters
    ----------
    num_scheduled_tokens, num_computed_tokens : sequence of int
        For each row.
    num_spec : int
        Most drafts of a row; 0 without speculation.

    Returns
    -------
    bool
    """
    if num_spec > 0 and not all(computed > 0 for computed in num_computed_tokens):
        return False
    return all(scheduled == 1 + num_spec for scheduled in num_scheduled_tokens)


def dispatch(
    graph: GraphConfig, num_tokens: int, uniform_decode: bool, num_spec: int, max_num_seqs: int
) -> GraphDispatch:
    """Choose the graph of a step.

    A uniform decode takes a full graph captured for uniform decodes if there are any, and any
    other batch (or one such graph does not fit) the graph of mixed batches.

    Parameters
    ----------
    graph : GraphConfig
    num_tokens : int
        Tokens of the step.
    uniform_decode : bool
        `is_uniform_decode`.
    num_spec : int
        Most drafts of a row.
    max_num_seqs : int
        Most rows of a step.

    Returns
    -------
    GraphDispatch
    """
    eager = GraphDispatch(mode="NONE", num_tokens=num_tokens)
    if graph.mode == "NONE" or not 0 < num_tokens <= graph.capture_sizes[-1]:
        return eager
    padded = min(size for size in graph.capture_sizes if size >= num_tokens)
    query_len = 1 + num_spec
    if (
        uniform_decode
        and graph.has_decode_routine
        and query_len <= padded <= query_len * max_num_seqs
    ):
        return GraphDispatch(
            mode="FULL",
            num_tokens=padded,
            num_reqs=min(padded // query_len, max_num_seqs),
            uniform=True,
        )
    if graph.mixed_mode == "FULL":
        return GraphDispatch(mode="FULL", num_tokens=padded, num_reqs=min(padded, max_num_seqs))
    if graph.mixed_mode == "PIECEWISE":
        return GraphDispatch(mode="PIECEWISE", num_tokens=padded)
    return eager
