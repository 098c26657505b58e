"""The label of a step, from its columns.

Source: ``_build_attn_state`` of ``vllm_ascend/worker/model_runner_v1.py``.
"""

from __future__ import annotations

from servespec.fast.batch.buffers import IntArray
from servespec.reference.contracts import AttentionState, SpeculativeMethod

__all__ = ["attention_state"]


def attention_state(
    computed: IntArray,
    scheduled: IntArray,
    drafts: IntArray,
    method: SpeculativeMethod | None,
    chunked_prefill: bool,
) -> tuple[AttentionState, AttentionState]:
    """Return the label a worker goes on with and the one its metadata carries.

    Parameters
    ----------
    computed, scheduled, drafts : numpy.ndarray
        ``[R]``; drafts are among the scheduled tokens.
    method : str or None
    chunked_prefill : bool

    Returns
    -------
    returned, stored : AttentionState
    """
    verified = AttentionState.CHUNKED_PREFILL
    if not computed.any():
        state = AttentionState.PREFILL_NO_CACHE
    elif (scheduled == 1).all():
        state = AttentionState.SPEC_DECODING if method == "mtp" else AttentionState.DECODE_ONLY
    elif (scheduled - drafts == 1).all():
        if method is not None:
            if method == "mtp":
                verified = AttentionState.SPEC_DECODING
            return AttentionState.SPEC_DECODING, verified
        state = verified
    elif chunked_prefill:
        state = AttentionState.CHUNKED_PREFILL
    else:
        state = AttentionState.PREFILL_CACHE_HIT
    return state, state
