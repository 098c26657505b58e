"""Matrix products with weights that never change.

On a CPU oneDNN can keep a weight in the blocked layout that its product wants; otherwise it
rearranges the weight in every call, which costs more than the product when there are few tokens.
The operators are not part of torch's documented interface, so they are looked for, and the plain
product serves where they are missing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Linear"]


def _packed(weight: Tensor) -> Tensor | None:
    if weight.device.type != "cpu":
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        torch.ops.mkldnn._linear_pointwise(
            weight.new_zeros(1, weight.shape[1]), packed, None, "none", [], ""
        )
    except (AttributeError, RuntimeError):
        return None
    return packed


class Linear:
    """``x @ weightᵀ``.

    Parameters
    ----------
    weight : Tensor
        ``[out, in]``; not kept if it can be packed.
    """

    def __init__(self, weight: Tensor) -> None:
        self._packed = _packed(weight)
        self._weight = weight if self._packed is None else None

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, in]`` to ``[T, out]``, same dtype."""
        if self._weight is not None:
            return functional.linear(x, self._weight)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
        return product
