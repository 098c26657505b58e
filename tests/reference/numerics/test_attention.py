"""Attention against torch in float64 and against its definition.

Bound: scores are sums of head_dim products, weights and outputs sums over the keys; every rounding
is at most eps relative to terms no larger than M = max |v|, and the softmax turns an absolute error
d of a score into a relative one of 2 d. So outputs differ by at most
``(2 |score| (head_dim + 2) + 2 keys + 4) eps M``.
"""

import math

import numpy as np
import pytest
import torch

from servespec.reference.numerics.attention import attention

EPS = np.finfo(np.float64).eps
SCALE = 32**-0.5


def bound(query, key, value):
    score = np.linalg.norm(query, axis=-1).max() * np.linalg.norm(key, axis=-1).max() * SCALE
    head_dim, keys = query.shape[-1], len(key)
    return (2 * score * (head_dim + 2) + 2 * keys + 4) * EPS * np.abs(value).max()


@pytest.mark.parametrize(("n", "kv"), [(1, 1), (1, 300), (2, 2), (2, 9), (7, 40), (40, 40)])
def test_agrees_with_torch(draw, n, kv):
    query, key, value = draw(n, 4, 32), draw(kv, 2, 32), draw(kv, 2, 32)
    mask = torch.ones(n, kv, dtype=torch.bool).tril(kv - n)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(torch.tensor(x).transpose(0, 1) for x in (query, key, value)),
        attn_mask=mask,
        scale=SCALE,
        enable_gqa=True,
    )
    got = attention(query, key, value, SCALE)
    assert np.abs(got - expected.transpose(0, 1).numpy()).max() <= bound(query, key, value)


def test_equals_the_definition(draw):
    n, kv = 3, 6
    query, key, value = draw(n, 6, 8), draw(kv, 2, 8), draw(kv, 2, 8)
    got = attention(query, key, value, 0.3)
    for i in range(n):
        for head in range(6):
            visible = range(kv - n + i + 1)
            scores = [0.3 * math.fsum(query[i, head] * key[j, head // 3]) for j in visible]
            weights = [math.exp(score) for score in scores]
            for d in range(8):
                mixed = math.fsum(
                    w * value[j, head // 3, d] for j, w in zip(visible, weights, strict=True)
                ) / math.fsum(weights)
                assert abs(got[i, head, d] - mixed) <= bound(query, key, value)


def test_a_chunk_sees_what_the_whole_prompt_sees(draw):
    query, key, value = draw(20, 4, 32), draw(20, 2, 32), draw(20, 2, 32)
    whole = attention(query, key, value, SCALE)
    parts = [attention(query[a:b], key[:b], value[:b], SCALE) for a, b in ((0, 1), (1, 9), (9, 20))]
    assert np.abs(np.concatenate(parts) - whole).max() <= bound(query, key, value)


def test_later_tokens_are_invisible(draw):
    query, key, value = draw(4, 4, 32), draw(9, 2, 32), draw(9, 2, 32)
    before = attention(query, key, value, SCALE)
    key[-1], value[-1] = 1e6, 1e6
    after = attention(query, key, value, SCALE)
    assert np.array_equal(before[:-1], after[:-1])
    assert not np.allclose(before[-1], after[-1])


def test_large_scores_do_not_overflow(draw):
    query, key, value = 1e3 * draw(2, 4, 32), 1e3 * draw(5, 2, 32), draw(5, 2, 32)
    with np.errstate(over="raise", invalid="raise"):
        got = attention(query, key, value, SCALE)
    assert np.isfinite(got).all()
