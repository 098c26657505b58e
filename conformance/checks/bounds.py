"""How far the logits of a correct implementation may lie from the reference's.

The reference computes in float64, whose rounding (unit roundoff ``2**-53``) is nothing beside that
of the implementation. Let ``u`` be the unit roundoff of the implementation's type: ``2**-24`` for
float32, ``2**-8`` for bfloat16.

1. One reduction. A sum of n products rounds n times. Partial sums of terms without a common sign
   grow like the square root of their count, and rounding errors are as good as independent
   (Higham and Mary 2019, "A new approach to probabilistic rounding error analysis"), so the error
   has standard deviation ``u sqrt(n / 2)`` relative to the size of the result; ``u sqrt(n)`` covers
   it for any order of summation. bfloat16 is accumulated in float32 and rounded once at the end,
   which is the same with n = 1.
2. The whole model. A sublayer adds to the residual stream; its reductions, one after the other,
   each bring an independent relative error, so squares add: ``u sqrt(sum of all n)`` over the
   longest path through every layer (`reduction_length`). Attention over m keys reduces over
   head_dim and over m, twice (softmax and values). A GDN state sums up to m outer products.
3. Conditioning. Softmax, ``exp(g)``, sigmoid gates and ``rsqrt`` turn a relative error of their
   argument into one of their result at a rate that is the argument's size: scores, log decays and
   gate inputs of a normed model are of size 1 to 4. `CONDITION` = 4.
4. The largest of many. The bound must hold for every logit of a run. Of a million roughly normal
   errors the largest is below 5 standard deviations. `TAIL` = 5.

The error of one logit is relative to the size of the row it stands in, its root mean square s.

Ties. The gap between the two greatest of V normal logits is about exponential with mean
``s / sqrt(2 ln V)``, not below s / 3.6 for the vocabularies drawn here. Two errors of standard
deviation ``e = u sqrt(n) s`` differ by about 1.1 e on average, so rounding swaps the two tokens
with a probability of some ``4 u sqrt(n)``: 2e-5 in float32 and 0.16 in bfloat16 for the embedded
model, whose path has 5000 terms in 110 reductions. `TIE_SHARES` rounds these up; a share above it
points at lost precision, even where every single tie can be explained.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from servespec.conformance.cases.case import Dtype
from servespec.reference.contracts import ModelConfig

__all__ = ["TIE_SHARES", "logits_bound", "reduction_length", "token_margin_bound"]

CONDITION = 4.0
TAIL = 5.0

TIE_SHARES: dict[Dtype, float] = {"float32": 1e-4, "bfloat16": 0.2}
"""Largest share of a run's tokens that may tie."""

_UNIT_ROUNDOFF: dict[Dtype, float] = {"float32": 2.0**-24, "bfloat16": 2.0**-8}


def reduction_length(model: ModelConfig, num_keys: int) -> tuple[int, int]:
    """Return the lengths of all reductions on the longest path to a logit, and their number.

    Parameters
    ----------
    model : ModelConfig
    num_keys : int
        Tokens of the sequence up to the one the logits belong to.

    Returns
    -------
    length, number : int
    """
    hidden = model.hidden_size
    mlp = (hidden, hidden, model.intermediate_size)  # norm, gate and up, down
    key, value = model.linear_key_head_dim, model.linear_value_head_dim
    linear = (
        hidden,  # norm
        hidden,  # input projections
        model.linear_conv_kernel_dim,
        key,  # l2 norm
        key,  # S k, the value the state already predicts
        num_keys,  # the state, a sum over tokens
        key,  # S q
        value,  # gated norm
        model.linear_num_value_heads * value,  # output projection
    )
    full = (
        hidden,
        hidden,
        model.head_dim,  # head norms
        model.head_dim,  # scores
        num_keys,  # softmax
        num_keys,  # values
        model.num_attention_heads * model.head_dim,
    )
    path = [hidden, hidden]  # last norm, output projection
    for kind in model.layer_types:
        path += (linear if kind == "linear_attention" else full) + mlp
    return sum(path), len(path)


def logits_bound(
    logits: npt.NDArray[np.floating], model: ModelConfig, dtype: Dtype, num_keys: int
) -> float:
    """Return the largest error allowed to one logit of a row.

    Parameters
    ----------
    logits : numpy.ndarray
        ``[vocab_size]``, the reference's row.
    model : ModelConfig
    dtype : {"float32", "bfloat16"}
        What the implementation computes in.
    num_keys : int
        Length of the sequence that the row ends.

    Returns
    -------
    float
    """
    length, number = reduction_length(model, num_keys)
    terms = length if dtype == "float32" else number
    size = float(np.sqrt(np.mean(np.square(logits))))
    return TAIL * CONDITION * _UNIT_ROUNDOFF[dtype] * float(np.sqrt(terms)) * size


def token_margin_bound(
    logits: npt.NDArray[np.floating], model: ModelConfig, dtype: Dtype, num_keys: int
) -> float:
    """Return the reference's margin between two tokens below which rounding may swap them.

    Both logits may err by `logits_bound`, in opposite directions. Parameters as there.
    """
    return 2.0 * logits_bound(logits, model, dtype, num_keys)
