"""The gated delta rule: the recurrence that a GDN layer keeps instead of K/V.

A value head has a state matrix ``S [value_dim, key_dim]``, a map from keys to values. Each token
first fades it, then corrects what it returns for the token's key towards the token's value, then
reads it with the query:

    S <- exp(g) S;   S <- S + beta (v - S k) k^T;   o = S q

The recurrent form does this token by token; the chunked form solves a triangular system for a
whole chunk of corrections at once and does the rest with matrix products. In exact arithmetic
they are equal.

Source: Yang et al., "Gated Delta Networks", arXiv 2412.06464; ``torch_recurrent_gated_delta_rule``
and ``torch_chunk_gated_delta_rule`` of transformers' ``models/qwen3_5/modeling_qwen3_5.py``. The
state is laid out as vLLM stores it; transformers keeps its transpose.
"""

from __future__ import annotations

import numpy as np

from servespec.reference.numerics.activations import sigmoid, softplus
from servespec.reference.numerics.arrays import Array, frozen

__all__ = ["CHUNK_SIZE", "chunked_gated_delta_rule", "gating", "recurrent_gated_delta_rule"]

CHUNK_SIZE = 64
"""Tokens that one triangular system covers."""


def gating(a: Array, b: Array, A_log: Array, dt_bias: Array) -> tuple[Array, Array]:
    """Decay and learning rate of every token and value head.

    ``g = -exp(A_log) * softplus(a + dt_bias)`` is the logarithm of the decay and never positive,
    so a state never grows by itself; ``beta = sigmoid(b)``.

    Parameters
    ----------
    a, b : numpy.ndarray
        ``[n, value heads]``, projections of the token.
    A_log, dt_bias : numpy.ndarray
        ``[value heads]``.

    Returns
    -------
    g : numpy.ndarray
        ``[n, value heads]``, at most 0.
    beta : numpy.ndarray
        ``[n, value heads]``, in [0, 1].
    """
    return frozen(-np.exp(A_log) * softplus(frozen(a + dt_bias))), sigmoid(b)


def _by_value_head(query: Array, key: Array, value_heads: int) -> tuple[Array, Array]:
    """Scale the query by ``key_dim ** -0.5`` and repeat key heads for their value heads.

    Key head ``h`` serves the value heads ``h * r .. h * r + r - 1`` with ``r`` value heads for
    each key head. The results have the head in front: ``[value heads, n, key_dim]``.
    """
    repeats = value_heads // query.shape[1]
    scaled = query * query.shape[-1] ** -0.5
    return (
        np.repeat(scaled, repeats, axis=1).transpose(1, 0, 2),
        np.repeat(key, repeats, axis=1).transpose(1, 0, 2),
    )


def recurrent_gated_delta_rule(
    query: Array, key: Array, value: Array, g: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """Go token by token: the definition.

    Parameters
    ----------
    query, key : numpy.ndarray
        ``[n, key heads, key_dim]``, of unit length (`servespec.reference.numerics.norms.l2_norm`);
        the scale ``key_dim ** -0.5`` is applied here.
    value : numpy.ndarray
        ``[n, value heads, value_dim]``.
    g, beta : numpy.ndarray
        ``[n, value heads]``, from `gating`.
    state : numpy.ndarray
        ``[value heads, value_dim, key_dim]``; zeros at the start of a request.

    Returns
    -------
    outputs : numpy.ndarray
        ``[n, value heads, value_dim]``.
    state : numpy.ndarray
        ``[value heads, value_dim, key_dim]`` after the last token.
    """
    queries, keys = _by_value_head(query, key, value.shape[1])
    decay = np.exp(g)
    outputs = np.empty_like(value)
    for t in range(len(value)):
        k = keys[:, t, :, None]
        state = decay[t][:, None, None] * state
        delta = beta[t][:, None] * (value[t] - (state @ k)[..., 0])
        state = state + delta[..., None] * k.transpose(0, 2, 1)
        outputs[t] = (state @ queries[:, t, :, None])[..., 0]
    return frozen(outputs), frozen(state)


def chunked_gated_delta_rule(
    query: Array,
    key: Array,
    value: Array,
    g: Array,
    beta: Array,
    state: Array,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Array, Array]:
    """Compute the same chunk by chunk.

    Let ``G`` be the running sum of `g` within a chunk and ``S`` the state before it. The
    correction that token ``i`` adds, ``d_i = beta_i (v_i - S_i k_i)``, depends on the earlier ones
    only through what they left in the state, so all ``d`` solve ``(I + L) d = r`` with

        L_ij = beta_i exp(G_i - G_j) k_i . k_j  for j < i,
        r_i  = beta_i (v_i - exp(G_i) S k_i).

    Then ``o_i = exp(G_i) S q_i + sum_{j <= i} exp(G_i - G_j) (q_i . k_j) d_j`` and the state after
    the chunk is ``exp(G_last) S + sum_j exp(G_last - G_j) d_j k_j^T``. All exponents are at most
    0, so nothing overflows; those above the diagonal would be positive and are masked before the
    exponential.

    Parameters
    ----------
    query, key, value, g, beta, state
        As for `recurrent_gated_delta_rule`.
    chunk_size : int
        Tokens in a chunk; the last one may be shorter.

    Returns
    -------
    outputs, state : numpy.ndarray
        As for `recurrent_gated_delta_rule`.
    """
    queries, keys = _by_value_head(query, key, value.shape[1])
    values, logs, rates = value.transpose(1, 0, 2), g.T, beta.T[..., None]
    outputs = np.empty_like(values)
    for start in range(0, len(value), chunk_size):
        chunk = slice(start, start + chunk_size)
        q, k, v, rate = queries[:, chunk], keys[:, chunk], values[:, chunk], rates[:, chunk]
        G = np.cumsum(logs[:, chunk], axis=1)[..., None]
        size = k.shape[1]
        difference = G - G.transpose(0, 2, 1)
        decay = np.exp(np.where(np.tri(size, dtype=bool), difference, -np.inf))
        keys_t, state_t = k.transpose(0, 2, 1), state.transpose(0, 2, 1)
        L = np.tril(rate * (k @ keys_t) * decay, -1)
        d = np.linalg.solve(np.eye(size) + L, rate * (v - np.exp(G) * (k @ state_t)))
        outputs[:, chunk] = np.exp(G) * (q @ state_t) + ((q @ keys_t) * decay) @ d
        last = G[:, -1:]
        state = np.exp(last) * state + (np.exp(last - G) * d).transpose(0, 2, 1) @ k
    return frozen(outputs.transpose(1, 0, 2)), frozen(state)
