"""Packed and paged operands give the same numbers, and the numbers are those of torch."""

import numpy as np
import torch
from torch.nn import functional

from servespec.reference.numerics.layouts import (
    bnsd,
    causal_mask,
    packed_attention,
    paged_attention,
    tnd,
)

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 8, 4


def draw_step(seed):
    """Rows of random lengths, their K and V both packed and scattered over poisoned pages."""
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 6))
    query_lens = random.integers(1, 9, count)
    seq_lens = query_lens + random.integers(0, 20, count) * random.integers(0, 2, count)
    query = random.standard_normal((query_lens.sum(), HEADS, DIM))
    keys = [random.standard_normal((n, KV_HEADS, DIM)) for n in seq_lens]
    values = [random.standard_normal((n, KV_HEADS, DIM)) for n in seq_lens]
    needed = -(-seq_lens // BLOCK)
    ids = random.permutation(np.arange(1, 1 + needed.sum()))
    pages = np.full((2, 1 + needed.sum(), BLOCK, KV_HEADS, DIM), np.nan)
    tables = []
    for row, blocks in enumerate(np.split(ids, np.cumsum(needed)[:-1])):
        for position in range(seq_lens[row]):
            block, offset = blocks[position // BLOCK], position % BLOCK
            pages[0, block, offset] = keys[row][position]
            pages[1, block, offset] = values[row][position]
        tables.append((*blocks.tolist(), 0, 0))
    return query_lens, seq_lens, query, keys, values, pages, tables


def test_packed_and_paged_are_one_equation():
    scale = DIM**-0.5
    for seed in range(40):
        query_lens, seq_lens, query, keys, values, pages, tables = draw_step(seed)
        packed = packed_attention(
            query,
            np.concatenate(keys),
            np.concatenate(values),
            np.cumsum(query_lens).tolist(),
            np.cumsum(seq_lens).tolist(),
            scale,
        )
        ends = np.cumsum(query_lens).tolist()
        paged = paged_attention(query, pages[0], pages[1], ends, tables, seq_lens.tolist(), scale)
        assert np.array_equal(packed, paged)
        for row, end in enumerate(ends):
            n, m = int(query_lens[row]), int(seq_lens[row])
            # Bottom-right causal: the last rows of the compressed mask's pattern.
            mask = torch.from_numpy(causal_mask(m)[m - n :] == 0)
            expected = functional.scaled_dot_product_attention(
                torch.from_numpy(query[end - n : end]).transpose(0, 1)[None],
                torch.from_numpy(keys[row]).transpose(0, 1)[None],
                torch.from_numpy(values[row]).transpose(0, 1)[None],
                attn_mask=mask,
                enable_gqa=True,
            )[0].transpose(0, 1)
            # float64, sums of at most 8 products and 28 weights: far below 1e-12.
            assert np.abs(paged[end - n : end] - expected.numpy()).max() < 1e-12


def test_the_mask_is_a_strict_upper_triangle():
    mask = causal_mask()
    assert mask.shape == (2048, 2048)
    assert mask.dtype == np.int8
    assert mask.sum() == 2048 * 2047 // 2
    assert mask[5, 5] == 0
    assert mask[5, 6] == 1


def test_one_token_rows_as_a_batch():
    tokens = np.arange(24).reshape(2, 3, 4)
    assert bnsd(tokens).shape == (2, 3, 1, 4)
    assert np.array_equal(tnd(bnsd(tokens)), tokens)
    assert np.shares_memory(bnsd(tokens), tokens)


def test_arguments_stay_as_they_were():
    query_lens, seq_lens, query, keys, values, pages, tables = draw_step(3)
    ends = np.cumsum(query_lens).tolist()
    packed = np.concatenate(keys), np.concatenate(values)
    given = (query, *packed, pages)
    before = [array.copy() for array in given]
    out = packed_attention(query, *packed, ends, np.cumsum(seq_lens).tolist(), 0.5)
    paged_attention(query, *pages, ends, tables, seq_lens.tolist(), 0.5)
    for array, copy in zip(given, before, strict=True):
        np.testing.assert_array_equal(array, copy)
    assert not out.flags.writeable
