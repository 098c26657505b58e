"""The label an Ascend worker gives a whole step.

All labels compute one equation, causal attention over each request's tokens; the label only
chooses how the work is handed to the kernels.

Notes
-----
Source: ``_build_attn_state`` of ``vllm_ascend/worker/model_runner_v1.py``. Descriptions of it as
a table of independent conditions are wrong on four points, and the code is followed here: it is a
list in order of precedence; with chunked prefill enabled a prefix hit is ``ChunkedPrefill``, and
``PrefillCacheHit`` exists only without it; whether a batch mixes prefills and decodes is never
asked; and a verification step of a method other than MTP is stored as ``ChunkedPrefill``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from servespec.reference.contracts import AttentionState, SpeculativeMethod

__all__ = ["ClassifiedState", "classify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedState:
    """The two labels of one step.

    Attributes
    ----------
    returned : AttentionState
        What the worker goes on with; decides whether the step counts as one with prefills.
    stored : AttentionState
        What the attention metadata carries.
    """

    returned: AttentionState
    stored: AttentionState


def classify(
    num_computed_tokens: Sequence[int],
    num_scheduled_tokens: Sequence[int],
    num_draft_tokens: Sequence[int],
    speculative_method: SpeculativeMethod | None,
    enable_chunked_prefill: bool,
) -> ClassifiedState:
    """Label a step; the first rule that holds wins.

    1. No row has computed tokens: ``PrefillNoCache``.
    2. Every row has one token: ``DecodeOnly``, or ``SpecDecoding`` if MTP drafts.
    3. Every row has one token beside its drafts: with speculation ``SpecDecoding``, stored as
       ``ChunkedPrefill`` unless MTP drafts; without, ``ChunkedPrefill``.
    4. Chunked prefill is enabled: ``ChunkedPrefill``.
    5. Otherwise ``PrefillCacheHit``.

    Parameters
    ----------
    num_computed_tokens, num_scheduled_tokens, num_draft_tokens : sequence of int
        For each row; drafts are among the scheduled tokens.
    speculative_method : str or None
    enable_chunked_prefill : bool

    Returns
    -------
    ClassifiedState
    """
    is_mtp = speculative_method == "mtp"
    if all(computed == 0 for computed in num_computed_tokens):
        return _both(AttentionState.PREFILL_NO_CACHE)
    if all(scheduled == 1 for scheduled in num_scheduled_tokens):
        return _both(AttentionState.SPEC_DECODING if is_mtp else AttentionState.DECODE_ONLY)
    if all(
        scheduled - drafts == 1
        for scheduled, drafts in zip(num_scheduled_tokens, num_draft_tokens, strict=True)
    ):
        if speculative_method is None:
            return _both(AttentionState.CHUNKED_PREFILL)
        return ClassifiedState(
            returned=AttentionState.SPEC_DECODING,
            stored=AttentionState.SPEC_DECODING if is_mtp else AttentionState.CHUNKED_PREFILL,
        )
    if enable_chunked_prefill:
        return _both(AttentionState.CHUNKED_PREFILL)
    return _both(AttentionState.PREFILL_CACHE_HIT)


def _both(state: AttentionState) -> ClassifiedState:
    return ClassifiedState(returned=state, stored=state)
