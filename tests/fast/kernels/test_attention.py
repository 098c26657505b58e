"""Attention and K/V pages against the definition, one query at a time, in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from servespec.fast.cache.memory import CacheMemory, PagedKV
from servespec.fast.kernels.attention import plan_attention, varlen_attention
from servespec.fast.kernels.kv_cache import packed_kv, plan_slots, write_kv
from servespec.reference.contracts import CacheConfig, ModelConfig, gdn_groups_first

LAYER = 1
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def memory(
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    kernel: int,
    blocks: int,
    dtype: torch.dtype,
) -> CacheMemory:
    model = ModelConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        layer_types=("linear_attention", "full_attention"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=3,
        linear_value_head_dim=5,
    )
    cache = CacheConfig(
        num_gpu_blocks=blocks,
        block_size=block_size,
        kernel_block_size=kernel,
        groups=gdn_groups_first(model.layer_types),
    )
    return CacheMemory(model, cache, dtype, poison=True)


class Rows:
    """Rows of random K/V written to random pages of a poisoned memory, and their queries."""

    def __init__(
        self,
        seed: int,
        queries: list[int],
        contexts: list[int],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 16,
        block_size: int = 8,
        kernel: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        rng = np.random.default_rng(seed)
        kernel = kernel or block_size
        lengths = [q + c for q, c in zip(queries, contexts, strict=True)]
        needed = [-(-length // block_size) for length in lengths]
        total = sum(needed) + 4
        self.memory = memory(heads, kv_heads, dim, block_size, kernel, total, dtype)
        self.kv: PagedKV = self.memory.kv(LAYER)
        blocks = iter(rng.permutation(np.arange(1, total)).tolist())
        self.tables = [[next(blocks) for _ in range(count)] for count in needed]
        tokens = sum(lengths)
        generator = torch.Generator().manual_seed(seed)
        shape = (tokens, kv_heads, dim)
        self.key = torch.randn(shape, generator=generator).to(dtype)
        self.value = torch.randn(shape, generator=generator).to(dtype)
        self.query = torch.randn((sum(queries), heads, dim), generator=generator).to(dtype)
        slots = [
            table[position // block_size] * block_size + position % block_size
            for table, length in zip(self.tables, lengths, strict=True)
            for position in range(length)
        ]
        write_kv(self.key, self.value, self.kv, plan_slots(torch.tensor(slots), self.kv))
        ratio = block_size // kernel
        expanded = [[b * ratio + i for b in table for i in range(ratio)] for table in self.tables]
        width = max(map(len, expanded))
        self.block_table = torch.tensor(
            [row + [0] * (width - len(row)) for row in expanded], dtype=torch.int32
        )
        self.query_start_loc = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        self.queries, self.lengths = queries, lengths

    def plan(self):
        return plan_attention(self.query_start_loc, self.seq_lens, self.block_table, self.kv)

    def attend(self) -> torch.Tensor:
        return varlen_attention(self.query, self.kv, self.plan())

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The definition, and the error allowed to each output element.

        A score of D products is off by at most (D + 2) u sum|q k| / sqrt(D); a softmax weight by
        twice that and, for the exponential (20 units in the last place in vectorised code) and the
        sum of m weights, by (m + 40) u, all relative; the weighted mean of m values adds m u.
        bfloat16 accumulates in float32 and rounds the weights and the result once each.
        """
        share = self.query.shape[1] // self.key.shape[1]
        dim = self.query.shape[2]
        outputs, bounds = [], []
        starts = [0, *itertools.accumulate(self.lengths)]
        at = 0
        for start, count, length in zip(starts, self.queries, self.lengths, strict=False):
            key = self.key[start : start + length].double().repeat_interleave(share, dim=1)
            value = self.value[start : start + length].double().repeat_interleave(share, dim=1)
            for i in range(count):
                seen = i + length - count + 1
                query = self.query[at].double()
                at += 1
                score = torch.einsum("hd,mhd->hm", query, key[:seen]) * dim**-0.5
                weight = score.softmax(-1)
                outputs.append(torch.einsum("hm,mhd->hd", weight, value[:seen]))
                size = torch.einsum("hd,mhd->hm", query.abs(), key[:seen].abs()).max()
                u = 2.0**-24
                relative = 2 * (dim + 2) * u * size * dim**-0.5 + (2 * seen + 40) * u
                if self.query.dtype is torch.bfloat16:
                    relative = relative + 2 * ROUNDOFF[torch.bfloat16]
                bounds.append(relative * value[:seen].abs().max())
        return torch.stack(outputs), torch.stack(bounds)

    def check(self) -> None:
        expected, bounds = self.expected()
        error = (self.attend().double() - expected).abs().amax(dim=(1, 2))
        assert bool((error <= bounds).all()), (error / bounds).max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("block_size", "kernel"), [(1, 1), (6, 6), (48, 16)])
def test_random_batches(heads, kv_heads, block_size, kernel, dtype):
    rng = np.random.default_rng(heads * 100 + block_size)
    kinds = set()
    for seed in range(4):
        rows = int(rng.integers(1, 9))
        queries = rng.choice([1, 1, 1, 2, 5, 63, 64, 65, 130], rows).tolist()
        contexts = rng.choice([0, 0, 1, 7, 48, 100, 301], rows).tolist()
        kinds |= {(q > 1, c > 0) for q, c in zip(queries, contexts, strict=True)}
        Rows(
            seed,
            queries,
            contexts,
            heads=heads,
            kv_heads=kv_heads,
            block_size=block_size,
            kernel=kernel,
            dtype=dtype,
        ).check()
    # Decodes and prefills, with and without a context.
    assert kinds == set(itertools.product((False, True), repeat=2))


def test_many_decodes_of_all_lengths():
    rng = np.random.default_rng(5)
    Rows(0, [1] * 70, rng.integers(0, 400, 70).tolist(), dim=32).check()


def test_one_key_more_or_less_shows():
    rows = Rows(3, [1, 70, 3], [40, 5, 11])
    expected, bounds = rows.expected()
    for change in (-1, 1):
        rows.seq_lens += change
        plan = rows.plan()
        rows.seq_lens -= change
        got = varlen_attention(rows.query, rows.kv, plan).double()
        error = (got - expected).abs().amax(dim=(1, 2))
        # One key more is poisoned where the page has one, or simply another one.
        assert not bool((error <= bounds).all())


def test_a_result_does_not_depend_on_batch_mates_beyond_rounding():
    queries, contexts = [1, 9, 64, 1], [300, 20, 64, 3]
    together = Rows(7, queries, contexts)
    out = together.attend()
    _, bounds = together.expected()
    at = 0
    for row, count in enumerate(queries):
        part = slice(at, at + count)
        at += count
        plan = plan_attention(
            torch.tensor([0, count], dtype=torch.int32),
            together.seq_lens[row : row + 1],
            together.block_table[row : row + 1],
            together.kv,
        )
        alone = varlen_attention(together.query[part], together.kv, plan)
        difference = (alone - out[part]).abs().amax(dim=(1, 2)).double()
        assert bool((difference <= 2 * bounds[part]).all())


def test_work_is_in_proportion_to_the_keys():
    rng = np.random.default_rng(11)
    queries = rng.choice([1, 1, 1, 1, 3, 64, 500], 60).tolist()
    contexts = rng.integers(0, 900, 60).tolist()
    rows = Rows(1, queries, contexts, kv_heads=1, dim=8)
    gathered = sum(len(group.key_rows) for group in rows.plan().groups)
    tiles = [
        min(context + 64 * (tile + 1), context + count)
        for count, context in zip(queries, contexts, strict=True)
        for tile in range(-(-count // 64))
    ]
    # A group is at least three quarters full.
    assert sum(tiles) <= gathered <= sum(tiles) / 0.75


def test_padding_slots_write_nothing():
    store = memory(2, 1, 8, 3, 3, 5, torch.float32)
    kv = store.kv(LAYER)
    before = kv.rows.clone()
    key, value = torch.randn(4, 1, 8), torch.randn(4, 1, 8)
    write_kv(key, value, kv, plan_slots(torch.tensor([7, -1, 3, -1]), kv))
    assert torch.equal(kv.key[2, 1], key[0])
    assert torch.equal(kv.value[2, 1], value[0])
    assert torch.equal(kv.key[1, 0], key[2])
    assert torch.equal(kv.value[1, 0], value[2])
    changed = (kv.rows.view(torch.int32) != before.view(torch.int32)).any(dim=1)
    assert int(changed.sum()) == 4


def test_packed_keys_are_one_page_of_single_tokens():
    rows = Rows(2, [3, 1, 70], [5, 40, 0])
    kv, table = packed_kv(
        rows.key, rows.value, torch.tensor([0, *itertools.accumulate(rows.lengths)])
    )
    plan = plan_attention(rows.query_start_loc, rows.seq_lens, table, kv)
    assert torch.equal(varlen_attention(rows.query, kv, plan), rows.attend())
