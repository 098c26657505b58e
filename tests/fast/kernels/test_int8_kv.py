"""INT8 K/V in place: the recorded tensors, and every state against the reference."""

from collections import Counter

import numpy as np
import pytest
import torch

from servespec.fast.kernels.int8_kv import (
    Int8Cache,
    Int8Step,
    gather_int8,
    int8_attention,
    quantize_int8,
    write_int8,
)
from servespec.reference.batch.metadata import attention_metadata
from servespec.reference.contracts import AttentionState, ConfigError
from servespec.reference.numerics import int8_kv

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 64, 32


def test_recorded_tensors_bit_for_bit(vectors):
    recorded = vectors("int8_kv")
    assert len(recorded) == 20
    for line in recorded:
        shape = line["num_kv_heads"], line["head_dim"]
        for name in ("key", "value"):
            scale = torch.tensor(line[f"{name}_scale"]).view(shape).to(torch.bfloat16)
            values = torch.tensor(line[name]).to(torch.bfloat16)
            assert quantize_int8(values, scale).tolist() == line[f"{name}_int8"]


def test_tokens_come_back_from_scattered_blocks():
    scale = torch.full((KV_HEADS, DIM), 0.5)
    cache = Int8Cache.allocate(5, BLOCK, scale, scale)
    cache.key.fill_(-7)
    tokens = torch.randint(-20, 20, (40, KV_HEADS, DIM)).float() / 2
    slots = torch.cat([torch.arange(BLOCK) + 3 * BLOCK, torch.arange(8) + BLOCK])
    slots[-1] = -1
    write_int8(cache, tokens, tokens, slots)
    read = gather_int8(cache.key, torch.tensor([[3, 1, 0]]))[0]
    assert torch.equal(read[:39], (tokens[:39] * 2).to(torch.int8))
    assert (read[39:] == -7).all()


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(2, 48), "head_dim a multiple of 32"),
        (torch.ones(64), "head_dim a multiple of 32"),
        (torch.zeros(2, 64), "is 0.0: must be positive"),
    ],
)
def test_bad_scales_are_refused(scale, message):
    with pytest.raises(ConfigError, match=message):
        Int8Cache.allocate(2, BLOCK, scale, scale)


def draw_rows(random, state):
    """Tokens before and now of each row, decodes first, and how many are decodes."""
    if state is AttentionState.PREFILL_NO_CACHE:
        return [(0, int(random.integers(1, 20))) for _ in range(random.integers(1, 4))]
    decodes = [(int(random.integers(1, 40)), 1) for _ in range(random.integers(1, 4))]
    if state is AttentionState.DECODE_ONLY:
        return decodes
    fresh = random.random() < 0.5
    return decodes + [
        (0 if fresh else int(random.integers(0, 30)), int(random.integers(2, 20)))
        for _ in range(random.integers(1, 4))
    ]


@pytest.mark.parametrize("profile", ["pinned", "invariant"])
def test_every_state_against_the_reference(profile):
    counts = Counter()
    for seed in range(60):
        random = np.random.default_rng(seed)
        state = list(AttentionState)[seed % 5]
        rows = draw_rows(random, state)
        query_lens = [count for _, count in rows]
        seq_lens = [before + count for before, count in rows]
        scales = int8_kv.int8_scales(
            *random.uniform(0.02, 0.08, (2, KV_HEADS * DIM)), KV_HEADS, DIM
        )
        cache = Int8Cache.allocate(
            1 + 2 * len(rows),
            BLOCK,
            torch.tensor(scales.key, dtype=torch.float32),
            torch.tensor(scales.value, dtype=torch.float32),
        )
        # What no row wrote must not matter, however large.
        cache.key.fill_(127)
        cache.value.fill_(-128)
        tables = random.permutation(np.arange(1, 1 + 2 * len(rows))).reshape(-1, 2)
        own, slots = [], []
        for table, (before, count) in zip(tables, rows, strict=True):
            position = np.arange(before + count)
            where = table[position // BLOCK] * BLOCK + position % BLOCK
            tokens = torch.from_numpy(
                random.standard_normal((before + count, HEADS + 2 * KV_HEADS, DIM))
            ).to(torch.bfloat16)
            _, key, value = tokens.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            write_int8(cache, key, value, torch.from_numpy(where))
            own.append(tokens[before:])
            slots += where[before:].tolist()
        query, key, value = torch.cat(own).float().split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        starts = np.concatenate([[0], np.cumsum(query_lens)])
        metadata = attention_metadata(starts.tolist(), seq_lens, tables.tolist(), slots, 0, state)
        step = Int8Step(
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.tensor(seq_lens),
            block_table=torch.from_numpy(tables),
            num_decodes=metadata.num_decodes,
            attn_state=state,
        )
        got = int8_attention(query, key, value, cache, step, DIM**-0.5, profile)
        shape = (1 + 2 * len(rows), BLOCK, KV_HEADS, DIM)
        pages = int8_kv.Int8Pages(
            key=cache.key.numpy().reshape(shape), value=cache.value.numpy().reshape(shape)
        )
        arrays = [tensor.double().numpy() for tensor in (query, key, value)]
        expected = int8_kv.int8_attention(*arrays, pages, metadata, scales, DIM**-0.5, profile)
        # Both use the same K and V. float32 rounds a score of at most |q||k| / 8 in 64 + 2 steps,
        # which moves a weight by twice that relatively, and sums at most 50 weighted values.
        largest = [
            max(
                np.abs(int8_kv.dequantize(integers, scale)).max()
                for integers in int8_kv.gather_rows(cached, tables.tolist(), seq_lens)
            )
            for cached, scale in ((pages.key, scales.key), (pages.value, scales.value))
        ]
        score = np.linalg.norm(arrays[0], axis=-1).max() * max(largest[0], 5) * DIM**0.5 / 8
        eps = np.finfo(np.float32).eps
        bound = (2 * (DIM + 2) * score + 50 + 2) * eps * max(largest[1], 5)
        assert np.abs(got.double().numpy() - expected).max() < bound
        kept = int8_kv.rows_kept_float(metadata, profile)
        counts["rows kept float"] += sum(kept)
        counts["rows read back"] += len(kept) - sum(kept)
    print(dict(counts))
    assert counts["rows read back"] > 50
    assert (counts["rows kept float"] > 30) == (profile == "pinned")


def test_a_mixed_step_with_verification_rows_is_ill_formed():
    ones = torch.ones(KV_HEADS, DIM)
    step = Int8Step(
        query_start_loc=torch.tensor([0, 3, 8]),
        seq_lens=torch.tensor([9, 5]),
        block_table=torch.tensor([[1], [2]]),
        num_decodes=1,
        attn_state=AttentionState.CHUNKED_PREFILL,
    )
    tokens = torch.ones(8, HEADS, DIM)
    key = torch.ones(8, KV_HEADS, DIM)
    cache = Int8Cache.allocate(3, BLOCK, ones, ones)
    with pytest.raises(ValueError, match="one token in each decode row, not 3 in all"):
        int8_attention(tokens, key, key, cache, step, 0.125, "pinned")
    assert int8_attention(tokens, key, key, cache, step, 0.125, "invariant").shape == tokens.shape
