"""The graph of a step by table look-up.

Source: ``vllm/v1/cudagraph_dispatcher.py`` and ``_determine_batch_execution_and_padding`` of
``vllm_ascend/worker/model_runner_v1.py``.
"""

from __future__ import annotations

import numpy as np

from servespec.fast.batch.buffers import IntArray
from servespec.reference.contracts import GraphConfig, GraphDispatch

__all__ = ["GraphTable"]


class GraphTable:
    """All dispatch answers, made once: one list for uniform decodes and one for other steps.

    Parameters
    ----------
    graph : GraphConfig
    num_spec : int
        Most drafts of a row.
    max_num_seqs : int
        Most rows of a step.
    """

    def __init__(self, graph: GraphConfig, num_spec: int, max_num_seqs: int) -> None:
        self.mode = graph.mode
        self.query_len = 1 + num_spec
        self._strict = num_spec > 0
        sizes = np.array(graph.capture_sizes if graph.mode != "NONE" else (), np.int64)
        counts = np.arange(1, sizes[-1] + 1) if len(sizes) else sizes
        padded = sizes[np.searchsorted(sizes, counts)].tolist()
        decodes = graph.has_decode_routine
        self._mixed: list[GraphDispatch | None] = []
        self._uniform: list[GraphDispatch | None] = []
        for size in padded:
            mixed = None
            if graph.mixed_mode != "NONE":
                whole = graph.mixed_mode == "FULL"
                rows = min(size, max_num_seqs) if whole else None
                mixed = GraphDispatch(mode=graph.mixed_mode, num_tokens=size, num_reqs=rows)
            uniform = mixed
            if decodes and size // self.query_len >= 1 and size <= self.query_len * max_num_seqs:
                uniform = GraphDispatch(
                    mode="FULL", num_tokens=size, num_reqs=size // self.query_len, uniform=True
                )
            self._mixed.append(mixed)
            self._uniform.append(uniform)

    def is_uniform(self, counts: IntArray, computed: IntArray) -> bool:
        """Tell whether every row holds one token and all its drafts.

        Parameters
        ----------
        counts, computed : numpy.ndarray
            ``[R]`` tokens of the step and before it; with speculation all rows must have some of
            the latter.

        Returns
        -------
        bool
        """
        return bool(
            (counts == self.query_len).all() and not (self._strict and (computed == 0).any())
        )

    def dispatch(self, num_tokens: int, uniform: bool) -> GraphDispatch:
        """Return the graph of a step.

        Parameters
        ----------
        num_tokens : int
        uniform : bool

        Returns
        -------
        GraphDispatch
        """
        answers = self._uniform if uniform else self._mixed
        found = answers[num_tokens - 1] if 1 <= num_tokens <= len(answers) else None
        return found or GraphDispatch(mode="NONE", num_tokens=num_tokens)
