"""Element-wise gates."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

__all__ = ["sigmoid_gate", "silu_and_mul"]


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of a merged projection.

    Parameters
    ----------
    gate_up : Tensor
        ``[T, 2 * n]``: the gate's n columns, then the n of what it gates.

    Returns
    -------
    Tensor
        ``[T, n]``, same dtype.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return ``x * sigmoid(gate)``, same shape and dtype."""
    return gate.sigmoid().mul_(x)
