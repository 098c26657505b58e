"""Random steps for attention alone: rows at block edges, shared and repeated pages.

Hypothesis draws one seed, which a plain generator expands: few of its choices would be worth
shrinking, and the shrinker of cases takes rows and steps away by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import strategies as st

from servespec.conformance.workloads.workload_attention import (
    AttentionCase,
    AttentionConfig,
    AttentionRow,
    AttentionStep,
)
from servespec.reference.batch.attention_state import classify
from servespec.reference.contracts import AttentionState, SpeculativeMethod

__all__ = ["attention_cases", "random_attention_case"]

_HEADS = ((1, 1), (2, 2), (4, 2), (6, 1), (8, 2))
_KINDS = ("fresh", "decode", "mixed", "mixed", "verify")


@dataclass(slots=True)
class _Life:
    """A request over the steps: its length so far, and its blocks."""

    length: int
    blocks: list[int]


@dataclass(slots=True)
class _Maker:
    random: Random
    block_size: int
    kernel_block_size: int
    pinned: bool
    lives: list[_Life] = field(default_factory=list)
    num_blocks: int = 1

    def step(self) -> AttentionStep:
        random, kind = self.random, self.random.choice(_KINDS)
        free = [] if kind == "fresh" else random.sample(self.lives, len(self.lives))
        rows: list[AttentionRow] = []
        drafts: list[int] = []
        grown: list[tuple[_Life, int]] = []
        for _ in range(random.randint(1, 6)):
            life = free.pop() if free and random.random() < 0.7 else self._birth(kind)
            scheduled, extra = 1, 0
            if kind == "verify":
                extra = random.randint(1, 3)
                scheduled = 1 + extra
            elif kind == "fresh" or (kind == "mixed" and random.random() < 0.5):
                scheduled = self._length()
            row = self._row(life, scheduled)
            rows.append(row)
            drafts.append(extra)
            # Rejected drafts are written again by the next step.
            grown.append((life, row.seq_len - random.randint(0, extra)))
        for life, length in grown:
            life.length = length
        return self._labelled(rows, drafts, kind)

    def _labelled(self, rows: list[AttentionRow], drafts: list[int], kind: str) -> AttentionStep:
        method: SpeculativeMethod | None = None
        if any(drafts):
            # A verification that is labelled ChunkedPrefill is ill-formed with INT8 K/V.
            method = "mtp" if self.pinned else self.random.choice(("mtp", "ngram"))
        state = classify(
            [row.num_computed_tokens for row in rows],
            [row.num_scheduled_tokens for row in rows],
            drafts,
            method,
            self.random.random() < 0.8,
        ).stored
        ill_formed = self.pinned and state is AttentionState.CHUNKED_PREFILL
        return AttentionStep(
            rows=tuple(sorted(rows, key=lambda row: row.num_scheduled_tokens > 1)),
            attn_state=state,
            num_speculative_tokens=max(drafts),
            num_dummy_rows=0 if ill_formed else self.random.choice((0, 0, 1, 3)),
            num_padding_tokens=self.random.choice((0, 0, 1, 5)),
        )

    def _length(self) -> int:
        size, kernel = self.block_size, self.kernel_block_size
        edges = (1, 1, 2, size - 1, size, size + 1, 2 * size, kernel - 1, kernel + 1)
        # 64 queries are a tile of many kernels.
        rare = (63, 64, 65, 130)
        draw = self.random.random()
        if draw < 0.6:
            return max(1, self.random.choice(edges))
        return self.random.choice(rare) if draw > 0.95 else self.random.randint(1, 40)

    def _birth(self, kind: str) -> _Life:
        new = kind == "fresh" or (kind == "mixed" and self.random.random() < 0.4)
        life = _Life(0 if new else self._length(), [])
        full = life.length // self.block_size
        known = [block for other in self.lives for block in self._complete(other)]
        for _ in range(full):
            draw = self.random.random()
            if known and draw < 0.3:
                life.blocks.append(self.random.choice(known))
            elif life.blocks and draw > 0.85:
                life.blocks.append(self.random.choice(life.blocks))
            else:
                life.blocks.append(self._take())
        self.lives.append(life)
        return life

    def _complete(self, life: _Life) -> list[int]:
        """Return the blocks of a request that no later step writes to."""
        return life.blocks[: life.length // self.block_size]

    def _row(self, life: _Life, scheduled: int) -> AttentionRow:
        needed = -(-(life.length + scheduled) // self.block_size)
        life.blocks += [self._take() for _ in range(needed - len(life.blocks))]
        return AttentionRow(
            num_computed_tokens=life.length,
            num_scheduled_tokens=scheduled,
            block_ids=tuple(life.blocks[:needed]),
        )

    def _take(self) -> int:
        self.num_blocks += 1
        return self.num_blocks - 1


def random_attention_case(random: Random) -> AttentionCase:
    """Return a few steps over one cache.

    Parameters
    ----------
    random : random.Random

    Returns
    -------
    AttentionCase
    """
    heads, kv_heads = random.choice(_HEADS)
    int8 = random.random() < 0.5
    block_size = random.choice((1, 2, 4, 6, 16, 32))
    divisors = [size for size in range(1, block_size + 1) if block_size % size == 0]
    kernel = block_size if int8 else random.choice(divisors)
    pinned = int8 and random.random() < 0.5
    maker = _Maker(random, block_size, kernel, pinned)
    steps = tuple(maker.step() for _ in range(random.randint(1, 3)))
    spare = random.randint(1, 4)
    ids = list(range(1, maker.num_blocks + spare))
    random.shuffle(ids)
    return AttentionCase(
        config=AttentionConfig(
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=random.choice((32, 64)) if int8 else random.choice((8, 16, 24, 64)),
            block_size=block_size,
            num_blocks=maker.num_blocks + spare,
            kernel_block_size=kernel,
            kv_cache_dtype="int8" if int8 else "auto",
            int8_profile="pinned" if pinned else "invariant",
        ),
        steps=tuple(_with_blocks(step, ids) for step in steps),
        seed=random.randrange(2**32),
        query_scale=random.choice((1.0, 1.0, 4.0)),
    )


def _with_blocks(step: AttentionStep, ids: list[int]) -> AttentionStep:
    """Scatter the blocks of a step over the pool."""
    rows = (
        replace(row, block_ids=tuple(ids[block - 1] for block in row.block_ids))
        for row in step.rows
    )
    return replace(step, rows=tuple(rows))


def attention_cases() -> st.SearchStrategy[AttentionCase]:
    """Return random steps for attention alone."""
    return st.integers(0, 2**32 - 1).map(lambda seed: random_attention_case(Random(seed)))
