"""Causal attention of one request over its logical tokens.

Source: Vaswani et al., "Attention Is All You Need", arXiv 1706.03762; Ainslie et al., "GQA",
arXiv 2305.13245; the mask is FIA's sparse mode 3 (``vllm_ascend/attention/attention_v1.py``).
"""

from __future__ import annotations

import numpy as np

from servespec.reference.numerics.arrays import Array, frozen

__all__ = ["attention"]


def attention(query: Array, key: Array, value: Array, scale: float) -> Array:
    """Softmax attention in which the queries are the last tokens of the sequence.

    Every attention state (a new prompt, a later chunk, a decode) is this one equation: query
    ``i`` of ``n`` is token ``kv - n + i`` and sees the keys ``j <= kv - n + i`` (the causal mask
    is aligned to the bottom right corner). Query head ``h`` reads K/V head
    ``h // (query heads / K/V heads)``.

    Parameters
    ----------
    query : numpy.ndarray
        ``[n, query heads, head_dim]``; a row without queries has no result.
    key, value : numpy.ndarray
        ``[kv, K/V heads, head_dim]`` with ``kv >= n``: all tokens so far, these included.
    scale : float
        Factor of the scores, ``head_dim ** -0.5`` for Qwen3.5.

    Returns
    -------
    numpy.ndarray
        ``[n, query heads, head_dim]``.
    """
    n, heads, head_dim = query.shape
    kv, kv_heads, _ = key.shape
    group = heads // kv_heads
    grouped = query.reshape(n, kv_heads, group, head_dim).transpose(1, 2, 0, 3)
    scores = grouped @ key.transpose(1, 2, 0)[:, None] * scale  # [K/V heads, group, n, kv]
    if n > 1:
        scores = np.where(np.arange(kv) <= np.arange(kv - n, kv)[:, None], scores, -np.inf)
    # The largest score becomes 0, so the exponentials cannot overflow and one of them is 1.
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = weights @ value.transpose(1, 0, 2)[:, None]
    return frozen(mixed.transpose(2, 0, 1, 3).reshape(n, heads, head_dim))
