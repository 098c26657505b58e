"""Captured graphs: which sizes exist, and the one a step runs in.

Names are vLLM 0.27.1's (``CUDAGraphMode``, ``BatchDescriptor``); Ascend uses the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from servespec.reference.contracts.errors import require

__all__ = ["GraphConfig", "GraphDispatch", "GraphMode", "RuntimeGraphMode"]

GraphMode = Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
RuntimeGraphMode = Literal["NONE", "PIECEWISE", "FULL"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig:
    """Which graphs are captured.

    Attributes
    ----------
    mode : str
        ``PIECEWISE``: all but attention; ``FULL``: everything, for any batch;
        ``FULL_DECODE_ONLY``: everything, for uniform decodes, others run eagerly;
        ``FULL_AND_PIECEWISE``: the former for uniform decodes, piecewise for others.
    capture_sizes : tuple of int
        Token counts with a graph, ascending.

    Notes
    -----
    Source: ``vllm/config/compilation.py``.
    """

    mode: GraphMode = "NONE"
    capture_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        modes = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
        require(self.mode in modes, "GraphConfig.mode", self.mode, f"one of {', '.join(modes)}")
        sizes = self.capture_sizes
        require(
            all(size >= 1 for size in sizes) and list(sizes) == sorted(set(sizes)),
            "GraphConfig.capture_sizes",
            sizes,
            "ascending token counts of at least 1",
        )
        require(
            self.mode == "NONE" or len(sizes) > 0,
            "GraphConfig.capture_sizes",
            sizes,
            f"not empty with mode {self.mode}",
        )

    @property
    def mixed_mode(self) -> RuntimeGraphMode:
        """What is captured for batches of any kind."""
        if self.mode in ("PIECEWISE", "FULL_AND_PIECEWISE"):
            return "PIECEWISE"
        return "FULL" if self.mode == "FULL" else "NONE"

    @property
    def has_decode_routine(self) -> bool:
        """Whether uniform decodes have full graphs of their own."""
        return self.mode in ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphDispatch:
    """The graph of one step.

    Attributes
    ----------
    mode : {"NONE", "PIECEWISE", "FULL"}
        ``NONE`` means the step runs eagerly.
    num_tokens : int
        Tokens the step is padded to.
    num_reqs : int or None
        Rows the graph was captured for; None if it does not depend on them.
    uniform : bool
        Whether the graph is one for uniform decodes.
    """

    mode: RuntimeGraphMode
    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
