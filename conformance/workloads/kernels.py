"""Cases for kernels: shapes and index patterns as data, numbers from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import strategies as st

from servespec.reference.contracts import require

__all__ = ["OPERATIONS", "KernelCase", "kernel_cases", "make_kernel_case"]

OPERATIONS = (
    "write_kv",
    "write_int8",
    "paged_attention_decode",
    "varlen_attention",
    "packed_attention",
    "int8_attention_decode",
    "int8_varlen_attention",
    "convolution_decode",
    "convolution_rows",
    "convolution_speculative",
    "gating",
    "gated_delta_rule_decode",
    "gated_delta_rule_rows",
    "gated_delta_rule_speculative",
    "chunk_gated_delta_rule",
    "rms_norm",
    "gated_rms_norm",
    "l2_norm",
    "norm_rotary",
    "greedy",
    "sample",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """One call of one operation.

    Attributes
    ----------
    operation : str
        One of `OPERATIONS`.
    seed : int
        Of the numbers and of which slots and blocks are used.
    lengths : tuple of int
        Tokens of each row.
    contexts : tuple of int
        Keys of each row before these tokens.
    heads, share : int
        K/V or key heads, and query or value heads for each of them.
    dim : int
        Of a head; a power of two.
    block_size : int
        Tokens of a page.
    parts : int
        Among how many programs the keys of a decode row are divided.
    gap : int
        Elements between what lies side by side in memory.
    null_rows : bool
        Whether some rows are padding.
    shared_blocks : bool
        Whether rows share pages, as after a prefix hit.
    """

    operation: str
    seed: int = 0
    lengths: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (0,)
    heads: int = 1
    share: int = 1
    dim: int = 32
    block_size: int = 16
    parts: int = 1
    gap: int = 0
    null_rows: bool = False
    shared_blocks: bool = False

    def __post_init__(self) -> None:
        where = "KernelCase"
        require(
            self.operation in OPERATIONS,
            f"{where}.operation",
            self.operation,
            f"one of {', '.join(OPERATIONS)}",
        )
        require(0 <= self.seed < 2**32, f"{where}.seed", self.seed, "in [0, 2**32)")
        require(
            1 <= len(self.lengths) <= 64 and all(0 <= n <= 4096 for n in self.lengths),
            f"{where}.lengths",
            self.lengths,
            "1 to 64 numbers in [0, 4096]",
        )
        require(
            len(self.contexts) == len(self.lengths) and all(0 <= n <= 4096 for n in self.contexts),
            f"{where}.contexts",
            self.contexts,
            "as many numbers in [0, 4096] as lengths",
        )
        for name in ("heads", "share", "parts"):
            value = getattr(self, name)
            require(1 <= value <= 16, f"{where}.{name}", value, "in [1, 16]")
        require(self.dim in (32, 64, 128, 256), f"{where}.dim", self.dim, "32, 64, 128 or 256")
        require(1 <= self.block_size <= 1024, f"{where}.block_size", self.block_size, "1 to 1024")
        require(0 <= self.gap <= 64, f"{where}.gap", self.gap, "in [0, 64]")

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self.lengths)


def make_kernel_case(seed: int) -> KernelCase:
    """Expand a seed into a case; lengths are often at the edge of a page or a chunk.

    Parameters
    ----------
    seed : int
        In [0, 2**32).
    """
    fill = random.Random(seed)
    operation = fill.choice(OPERATIONS)
    block_size = fill.choice((16, 32, 48))
    edges = (0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size)
    rows = fill.randint(1, 4)
    if operation.endswith("_decode"):
        lengths = [1] * rows
    elif operation.endswith("_speculative"):
        lengths = [fill.randint(0, 4) for _ in range(rows)]
    elif operation == "chunk_gated_delta_rule":
        rows = min(rows, 2)
        lengths = [fill.choice((0, 1, 5, 63, 64, 65, 130)) for _ in range(rows)]
    else:
        lengths = [fill.choice((fill.randint(0, 5), fill.choice(edges))) for _ in range(rows)]
    if not any(lengths):
        lengths[0] = 1
    contexts = [fill.choice((fill.randint(0, 40), fill.choice(edges))) for _ in range(rows)]
    return KernelCase(
        operation=operation,
        seed=seed,
        lengths=tuple(lengths),
        contexts=tuple(contexts),
        heads=fill.randint(1, 2),
        # Few values: every one is compiled.
        share=fill.choice((1, 3)),
        dim=fill.choice((32, 64)),
        block_size=block_size,
        parts=fill.choice((1, 3)),
        gap=fill.choice((0, 8)),
        null_rows=fill.random() < 0.5,
        shared_blocks=fill.random() < 0.7,
    )


def kernel_cases() -> st.SearchStrategy[KernelCase]:
    """Cases of every operation."""
    return st.builds(make_kernel_case, st.integers(0, 2**32 - 1))
