"""The short causal convolution in front of a GDN layer, with the state that lets it go on.

Source: ``causal_conv1d_fn`` and ``causal_conv1d_update`` of transformers'
``models/qwen3_5/modeling_qwen3_5.py``; ``vllm/model_executor/layers/mamba/ops/causal_conv1d.py``.
"""

from __future__ import annotations

import numpy as np

from servespec.reference.numerics.activations import silu
from servespec.reference.numerics.arrays import Array, frozen

__all__ = ["causal_convolution"]


def causal_convolution(inputs: Array, weight: Array, state: Array) -> tuple[Array, Array]:
    """Convolve each channel with its own taps, then apply SiLU.

    With ``w`` taps, ``y_t = silu(sum_j weight[:, j] * u_{t - (w - 1) + j})``: the last tap meets
    the current input. The state holds the ``w - 1`` inputs before the first one, raw (before
    taps and activation); a request starts from zeros.

    Parameters
    ----------
    inputs : numpy.ndarray
        ``[n, channels]``, u.
    weight : numpy.ndarray
        ``[channels, taps]``.
    state : numpy.ndarray
        ``[taps - 1, channels]``, oldest input first.

    Returns
    -------
    outputs : numpy.ndarray
        ``[n, channels]``.
    state : numpy.ndarray
        ``[taps - 1, channels]``, the inputs before the next one.
    """
    n, taps = len(inputs), weight.shape[1]
    window = np.concatenate([state, inputs])
    outputs = np.zeros_like(inputs)
    for tap in range(taps):
        outputs += window[tap : tap + n] * weight[:, tap]
    return silu(outputs), frozen(window[n:].copy())
