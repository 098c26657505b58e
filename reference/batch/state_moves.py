"""Where aligned GDN states go from one step to the next.

In mode ``align`` a request has a state block for every `block_size` tokens, so that a prefix can
be taken up again at each boundary. The running state lives in the block of the step's last token
and, with drafts, in the ones behind it. It therefore moves on as the request grows, and is saved
to the block of a boundary that a step with accepted drafts stepped over.

Source: ``preprocess_mamba`` and ``postprocess_mamba_fused_kernel`` of
``vllm/v1/worker/mamba_utils.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from servespec.reference.contracts import StateMove

__all__ = ["Boundary", "boundary_crossed", "move_before_step", "state_move"]

# Columns of the table that a state is copied from and to, and how far into the step it lies.
Boundary = tuple[int, int, int]


def move_before_step(
    num_computed: int, last_seq_len: int, seq_len: int, num_accepted: int, block_size: int
) -> Boundary | None:
    """Return the move that brings the running state to the block of this step.

    Parameters
    ----------
    num_computed : int
        Tokens computed before the step.
    last_seq_len : int
        Tokens computed after the latest step of the request, drafts included; 0 if there was none
        since it came or came back, and then a prefix hit may have left a state.
    seq_len : int
        Tokens computed after this step, drafts included.
    num_accepted : int
        Tokens the latest step sampled.
    block_size : int
        Tokens of a state block.

    Returns
    -------
    (int, int, int) or None
        Source column, destination column and offset; None if the state is there already, or
        there is none.
    """
    source = ((last_seq_len or num_computed) - 1) // block_size
    destination = (seq_len - 1) // block_size
    if source < 0 or source == destination:
        return None
    return source, destination, num_accepted - 1


def boundary_crossed(
    seq_len: int, num_drafts: int, num_accepted: int, block_size: int
) -> Boundary | None:
    """Return the copy that saves the state at a block boundary which accepted drafts crossed.

    The step wrote a state for each of its positions, those of rejected drafts too. The one at the
    last boundary at or before the new end is worth keeping if it lies among them.

    Parameters
    ----------
    seq_len : int
        Tokens computed after the step, drafts included.
    num_drafts, num_accepted : int
        Drafts of the step, and tokens it sampled.
    block_size : int
        Tokens of a state block.

    Returns
    -------
    (int, int, int) or None
        Source column, destination column and offset; None if no boundary was crossed. If both
        columns are one, the state has come to rest in it and counts as accepted once.
    """
    first_end = seq_len - num_drafts
    boundary = (first_end + num_accepted - 1) // block_size * block_size
    if boundary < first_end:
        return None
    return (seq_len - 1) // block_size, boundary // block_size - 1, boundary - first_end


def state_move(req_id: str, block_ids: Sequence[int], boundary: Boundary) -> StateMove:
    """Translate columns into blocks of one group.

    Parameters
    ----------
    req_id : str
    block_ids : sequence of int
        The request's blocks in the group.
    boundary : (int, int, int)

    Returns
    -------
    StateMove
    """
    source, destination, offset = boundary
    return StateMove(
        req_id=req_id,
        ssm_src_block_id=block_ids[source + offset],
        conv_src_block_id=block_ids[source],
        conv_offset=offset,
        dst_block_id=block_ids[destination],
    )
