"""Steps of one attention layer over one cache, as plain data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from servespec.reference.contracts import AttentionState, require

__all__ = ["AttentionCase", "AttentionConfig", "AttentionRow", "AttentionStep"]

NZ_WIDTH = 32
# A case comes from outside: what follows bounds the work that checking one takes.
MAX_TOKENS = 4096
MAX_ROWS = 1024
MAX_STEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """One layer and its cache.

    Attributes
    ----------
    num_attention_heads, num_key_value_heads, head_dim : int
    block_size, num_blocks : int
        Tokens in a block of the pool, and blocks; block 0 is the null block.
    kernel_block_size : int
        Tokens in an entry of a block table; divides `block_size`.
    kv_cache_dtype : {"auto", "int8"}
        ``auto`` keeps K and V as they are computed; ``int8`` needs a `head_dim` that is a multiple
        of 32 and one block size.
    int8_profile : {"pinned", "invariant"}
        See `servespec.reference.numerics.int8_kv`.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    kernel_block_size: int
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    int8_profile: Literal["pinned", "invariant"] = "invariant"

    def __post_init__(self) -> None:
        for name in ("num_key_value_heads", "head_dim", "kernel_block_size"):
            value = getattr(self, name)
            require(value >= 1, f"AttentionConfig.{name}", value, "at least 1")
        require(self.num_blocks >= 2, "AttentionConfig.num_blocks", self.num_blocks, "at least 2")
        heads = self.num_attention_heads
        require(
            heads >= 1 and heads % self.num_key_value_heads == 0,
            "AttentionConfig.num_attention_heads",
            heads,
            f"a multiple of {self.num_key_value_heads} K/V heads",
        )
        size, kernel = self.block_size, self.kernel_block_size
        require(
            size >= 1 and size % kernel == 0,
            "AttentionConfig.block_size",
            size,
            f"a multiple of the kernel's {kernel}",
        )
        if self.kv_cache_dtype == "int8":
            require(
                self.head_dim % NZ_WIDTH == 0,
                "AttentionConfig.head_dim",
                self.head_dim,
                f"a multiple of {NZ_WIDTH} with INT8 K/V",
            )
            require(
                kernel == size,
                "AttentionConfig.kernel_block_size",
                kernel,
                f"block_size = {size} with INT8 K/V",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRow:
    """One request in one step.

    Attributes
    ----------
    num_computed_tokens, num_scheduled_tokens : int
        Tokens in the cache before the step, and those of the step.
    block_ids : tuple of int
        Pool blocks, enough for both. A block may appear in several rows, and twice in one, as long
        as the step writes no slot twice.
    """

    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        computed, scheduled = self.num_computed_tokens, self.num_scheduled_tokens
        require(
            0 <= computed <= MAX_TOKENS,
            "AttentionRow.num_computed_tokens",
            computed,
            f"in [0, {MAX_TOKENS}]",
        )
        require(
            1 <= scheduled <= MAX_TOKENS,
            "AttentionRow.num_scheduled_tokens",
            scheduled,
            f"in [1, {MAX_TOKENS}]",
        )

    @property
    def seq_len(self) -> int:
        """Tokens after the step."""
        return self.num_computed_tokens + self.num_scheduled_tokens

    def slots(self, start: int, end: int, block_size: int) -> tuple[int, ...]:
        """Return where the tokens from `start` up to `end` live."""
        return tuple(
            self.block_ids[position // block_size] * block_size + position % block_size
            for position in range(start, end)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """One step.

    Attributes
    ----------
    rows : tuple of AttentionRow
        Decodes first.
    attn_state : AttentionState
        The stored label; with INT8 K/V under ``pinned`` it decides what is read back.
    num_speculative_tokens : int
        A leading row of up to one token more counts as a decode.
    num_dummy_rows : int
        Rows without tokens and without keys, behind the others.
    num_padding_tokens : int
        Tokens behind those of the rows that have no slot (-1) and must be written nowhere.
    """

    rows: tuple[AttentionRow, ...]
    attn_state: AttentionState
    num_speculative_tokens: int = 0
    num_dummy_rows: int = 0
    num_padding_tokens: int = 0

    def __post_init__(self) -> None:
        rows = len(self.rows)
        require(1 <= rows <= MAX_ROWS, "number of AttentionStep.rows", rows, f"in [1, {MAX_ROWS}]")
        tokens = sum(row.num_scheduled_tokens for row in self.rows)
        most = 4 * MAX_TOKENS
        require(tokens <= most, "tokens of AttentionStep.rows", tokens, f"at most {most}")
        for name in ("num_speculative_tokens", "num_dummy_rows", "num_padding_tokens"):
            value = getattr(self, name)
            require(0 <= value <= MAX_ROWS, f"AttentionStep.{name}", value, f"in [0, {MAX_ROWS}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """Steps over one cache.

    Attributes
    ----------
    config : AttentionConfig
    steps : tuple of AttentionStep
        A later step finds what the earlier ones wrote. Tokens that count as computed and that no
        step wrote are written before the first step that reads them.
    seed : int
        Of queries, keys, values and scales.
    query_scale : float
        Size of the queries: large ones make the softmax pick one key.
    """

    config: AttentionConfig
    steps: tuple[AttentionStep, ...]
    seed: int = 0
    query_scale: float = 1.0

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**32, "AttentionCase.seed", self.seed, "in [0, 2**32)")
        require(
            0.0 < self.query_scale <= 1e3,
            "AttentionCase.query_scale",
            self.query_scale,
            "in (0, 1e3]",
        )
        steps = len(self.steps)
        require(steps <= MAX_STEPS, "number of AttentionCase.steps", steps, f"at most {MAX_STEPS}")
        size, blocks = self.config.block_size, self.config.num_blocks
        for number, step in enumerate(self.steps):
            written: Counter[int] = Counter()
            for index, row in enumerate(step.rows):
                where = f"AttentionCase.steps[{number}].rows[{index}].block_ids"
                needed = -(-row.seq_len // size)
                require(
                    len(row.block_ids) >= needed, where, row.block_ids, f"at least {needed} blocks"
                )
                require(
                    all(0 < block < blocks for block in row.block_ids),
                    where,
                    row.block_ids,
                    f"in [1, {blocks})",
                )
                written.update(row.slots(row.num_computed_tokens, row.seq_len, size))
                slot, times = written.most_common(1)[0]
                require(times == 1, where, row.block_ids, f"such that slot {slot} is written once")
