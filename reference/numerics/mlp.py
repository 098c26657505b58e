"""The gated feed-forward layer.

Source: ``Qwen3_5MLP`` of transformers; Shazeer, "GLU Variants Improve Transformer",
arXiv 2002.05202.
"""

from __future__ import annotations

from servespec.reference.numerics.activations import silu
from servespec.reference.numerics.arrays import Array, frozen

__all__ = ["mlp"]


def mlp(x: Array, gate_proj: Array, up_proj: Array, down_proj: Array) -> Array:
    """``down_proj (silu(gate_proj x) * up_proj x)``.

    Parameters
    ----------
    x : numpy.ndarray
        ``[tokens, hidden]``.
    gate_proj, up_proj : numpy.ndarray
        ``[intermediate, hidden]``.
    down_proj : numpy.ndarray
        ``[hidden, intermediate]``.

    Returns
    -------
    numpy.ndarray
        ``[tokens, hidden]``.
    """
    return frozen((silu(frozen(x @ gate_proj.T)) * (x @ up_proj.T)) @ down_proj.T)
