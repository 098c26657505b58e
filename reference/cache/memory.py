"""What the blocks hold: pages of K/V and GDN states, as an immutable value.

Layers share storage the way vLLM's raw tensors do: the i-th layers of all groups use the same
tensor, so a block given to another group loses what the former one wrote, and each group reads
only what one of its own layers wrote.

Everything written is marked with what it belongs to: a slot with the position of its token, a
state with the number of tokens it has absorbed. A read states what it expects and fails on
anything else, so a slot or state that nobody wrote, or that is left over from an earlier owner at
another place, cannot pass silently.

Sources: ``_allocate_kv_cache_tensors`` of ``vllm/v1/worker/gpu_model_runner.py``,
``vllm/v1/kv_cache_interface.py``; the copy of states between blocks is ``preprocess_mamba`` of
``vllm/v1/worker/mamba_utils.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from servespec.reference.contracts import BlockCopy, KVCacheGroup
from servespec.reference.numerics.arrays import Array, frozen

__all__ = [
    "GdnState",
    "Memory",
    "MemoryAccessError",
    "Page",
    "copy_blocks",
    "initial_memory",
    "move_states",
    "read_kv",
    "read_state",
    "write_kv",
    "write_states",
    "zero_blocks",
]

_UNWRITTEN = -1


class MemoryAccessError(ValueError):
    """A step reads what was never written for it, or writes where it must not."""


@dataclass(frozen=True, slots=True, eq=False)
class Page:
    """K/V of one layer in one block; slots never written hold NaN.

    Attributes
    ----------
    layer : int
        Who wrote it.
    keys, values : numpy.ndarray
        ``[block_size, K/V heads, head_dim]``.
    positions : numpy.ndarray
        ``[block_size]`` int64, the token position written to each slot; -1 for none.
    """

    layer: int
    keys: Array
    values: Array
    positions: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class GdnState:
    """State of one GDN layer in one block.

    Attributes
    ----------
    layer : int
        Who wrote it.
    convolution : numpy.ndarray
        ``[taps - 1, channels]``, the last raw inputs, oldest first.
    recurrent : numpy.ndarray
        ``[value heads, value_dim, key_dim]``.
    num_tokens : int
        Tokens the state has absorbed.
    """

    layer: int
    convolution: Array
    recurrent: Array
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """All blocks of the pool; steps share what they left alone.

    Attributes
    ----------
    block_size : int
        Tokens in a page.
    kernel_block_size : int
        Tokens that an entry of a kernel block table spans, a divisor of `block_size`; manager
        block ``b`` is the kernel blocks ``b * block_size / kernel_block_size`` and following.
    tensor_of : mapping of int to int
        For each layer, its place in its group: which tensor it shares.
    contents : mapping of (int, int) to Page or GdnState
        By tensor and manager block; absent if never written.
    """

    block_size: int
    kernel_block_size: int
    tensor_of: Mapping[int, int]
    contents: Mapping[tuple[int, int], Page | GdnState] = field(
        default_factory=lambda: MappingProxyType({})
    )


def initial_memory(
    groups: Sequence[KVCacheGroup], block_size: int, kernel_block_size: int | None = None
) -> Memory:
    """Return a memory nobody has written to.

    Parameters
    ----------
    groups : sequence of KVCacheGroup
    block_size : int
        Tokens in one block of a full-attention group.
    kernel_block_size : int or None
        Tokens in one kernel block; None means `block_size`.

    Returns
    -------
    Memory
    """
    tensor_of = {layer: i for group in groups for i, layer in enumerate(group.layer_indices)}
    return Memory(
        block_size, kernel_block_size or block_size, tensor_of=MappingProxyType(tensor_of)
    )


def _with(memory: Memory, changes: Mapping[tuple[int, int], Page | GdnState]) -> Memory:
    for _, block in changes:
        if block <= 0:
            raise MemoryAccessError(f"block {block} is written: block 0 is the null block")
    return replace(memory, contents=MappingProxyType({**memory.contents, **changes}))


def write_kv(
    memory: Memory,
    layer: int,
    slot_mapping: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    keys: Array,
    values: Array,
) -> Memory:
    """Store the K/V of a step's tokens.

    Parameters
    ----------
    memory : Memory
    layer : int
    slot_mapping : numpy.ndarray
        ``[tokens]`` int64, ``block * block size + offset``; the same number for manager and for
        kernel blocks. No two are equal.
    positions : numpy.ndarray
        ``[tokens]`` int64.
    keys, values : numpy.ndarray
        ``[tokens, K/V heads, head_dim]``.

    Returns
    -------
    Memory

    Raises
    ------
    MemoryAccessError
        If two tokens go to one slot, or one goes to the null block.
    """
    if len(set(slot_mapping.tolist())) != len(slot_mapping):
        raise MemoryAccessError(f"layer {layer}: two tokens of a step are written to one slot")
    tensor = memory.tensor_of[layer]
    blocks, offsets = np.divmod(slot_mapping, memory.block_size)
    changes: dict[tuple[int, int], Page | GdnState] = {}
    for block in dict.fromkeys(blocks.tolist()):
        rows = np.flatnonzero(blocks == block)
        old = memory.contents.get((tensor, block))
        if isinstance(old, Page) and old.layer == layer:
            arrays = old.keys.copy(), old.values.copy(), old.positions.copy()
        else:
            size = (memory.block_size, *keys.shape[1:])
            arrays = (
                np.full(size, np.nan),
                np.full(size, np.nan),
                np.full(memory.block_size, _UNWRITTEN),
            )
        for array, new in zip(arrays, (keys, values, positions), strict=True):
            array[offsets[rows]] = new[rows]
            array.flags.writeable = False
        changes[tensor, block] = Page(layer, *arrays)
    return _with(memory, changes)


def read_kv(
    memory: Memory, layer: int, block_table: Sequence[int], seq_len: int
) -> tuple[Array, Array]:
    """Gather the K/V of a request's tokens 0 to ``seq_len - 1``.

    Parameters
    ----------
    memory : Memory
    layer : int
    block_table : sequence of int
        Kernel blocks of the request in logical order; entries beyond the tokens are not read.
    seq_len : int

    Returns
    -------
    keys, values : numpy.ndarray
        ``[seq_len, K/V heads, head_dim]``.

    Raises
    ------
    MemoryAccessError
        If a slot does not hold the token of that position.
    """
    tensor, size = memory.tensor_of[layer], memory.kernel_block_size
    pages: list[Page] = []
    parts: list[slice] = []
    for block in block_table[: -(-seq_len // size)]:
        manager, offset = divmod(block * size, memory.block_size)
        page = memory.contents.get((tensor, manager))
        if not isinstance(page, Page) or page.layer != layer:
            raise MemoryAccessError(f"layer {layer} reads K/V of block {manager}: it wrote none")
        pages.append(page)
        parts.append(slice(offset, offset + size))
    held = [page.positions[part] for page, part in zip(pages, parts, strict=True)]
    found = np.concatenate(held)[:seq_len] if held else np.empty(0, dtype=np.int64)
    expected = np.arange(seq_len)
    if found.shape != expected.shape or (found != expected).any():
        wrong = np.flatnonzero(found != expected[: len(found)])
        at = int(wrong[0]) if wrong.size else len(found)
        holds = "no block" if at >= len(found) else f"position {found[at]} (-1: never written)"
        raise MemoryAccessError(f"layer {layer} reads the K/V of position {at}: finds {holds}")
    keys = [page.keys[part] for page, part in zip(pages, parts, strict=True)]
    values = [page.values[part] for page, part in zip(pages, parts, strict=True)]
    return frozen(np.concatenate(keys)[:seq_len]), frozen(np.concatenate(values)[:seq_len])


def read_state(memory: Memory, layer: int, block: int, num_tokens: int) -> GdnState:
    """Return the state after a request's first `num_tokens` tokens.

    Parameters
    ----------
    memory : Memory
    layer, block : int
    num_tokens : int
        Tokens it must have absorbed.

    Returns
    -------
    GdnState

    Raises
    ------
    MemoryAccessError
        If the block holds no state of this layer, or one after another number of tokens.
    """
    state = memory.contents.get((memory.tensor_of[layer], block))
    if not isinstance(state, GdnState) or state.layer != layer:
        raise MemoryAccessError(f"layer {layer} reads the state of block {block}: it wrote none")
    if state.num_tokens != num_tokens:
        raise MemoryAccessError(
            f"layer {layer} reads the state of block {block} after {num_tokens} tokens:"
            f" it holds the one after {state.num_tokens}"
        )
    return state


def write_states(memory: Memory, states: Mapping[int, GdnState]) -> Memory:
    """Store states of one layer by block.

    Parameters
    ----------
    memory : Memory
    states : mapping of int to GdnState

    Returns
    -------
    Memory

    Raises
    ------
    MemoryAccessError
        If one goes to the null block.
    """
    return _with(
        memory, {(memory.tensor_of[state.layer], block): state for block, state in states.items()}
    )


def zero_blocks(memory: Memory, blocks: Iterable[int]) -> Memory:
    """Clear blocks, as `SchedulerOutput.new_block_ids_to_zero` asks.

    A cleared block counts as never written: its zeros are there to keep a kernel's masked lanes
    finite, not to be read.

    Parameters
    ----------
    memory : Memory
    blocks : iterable of int

    Returns
    -------
    Memory
    """
    cleared = frozenset(blocks)
    if not cleared:
        return memory
    kept = {at: content for at, content in memory.contents.items() if at[1] not in cleared}
    return replace(memory, contents=MappingProxyType(kept))


def copy_blocks(memory: Memory, copies: Iterable[BlockCopy]) -> Memory:
    """Copy whole blocks, as `SchedulerOutput.kv_cache_block_copies` asks; all read first.

    Parameters
    ----------
    memory : Memory
    copies : iterable of BlockCopy

    Returns
    -------
    Memory
    """
    changes = {
        (tensor, copy.dst_block_id): memory.contents[tensor, copy.src_block_id]
        for copy in copies
        for tensor in frozenset(memory.tensor_of.values())
        if (tensor, copy.src_block_id) in memory.contents
    }
    return _with(memory, changes) if changes else memory


def move_states(memory: Memory, group: KVCacheGroup, moves: Mapping[int, int]) -> Memory:
    """Copy the states of a GDN group's layers from block to block.

    In mode ``align`` a request's state moves on to a new block at every boundary and leaves a
    copy behind for others to find.

    Parameters
    ----------
    memory : Memory
    group : KVCacheGroup
    moves : mapping of int to int
        Destination block to source block.

    Returns
    -------
    Memory

    Raises
    ------
    MemoryAccessError
        If a source holds no state of the group.
    """
    changes: dict[tuple[int, int], Page | GdnState] = {}
    for layer in group.layer_indices:
        tensor = memory.tensor_of[layer]
        for destination, source in moves.items():
            state = memory.contents.get((tensor, source))
            if not isinstance(state, GdnState) or state.layer != layer:
                raise MemoryAccessError(
                    f"layer {layer} moves the state of block {source}: it wrote none"
                )
            changes[tensor, destination] = state
    return _with(memory, changes) if changes else memory
