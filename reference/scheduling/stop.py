"""When a request is over.

Source: ``check_stop`` and ``check_sequence_repetition`` of ``vllm/v1/core/sched/utils.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from servespec.reference.contracts import RepetitionDetection, RequestStatus
from servespec.reference.scheduling.state import RequestState

__all__ = ["check_stop", "is_repeating"]


def check_stop(
    request: RequestState, max_model_len: int, min_tokens_outlive_model_len: bool
) -> RequestState:
    """End a request whose last token is a reason to.

    In this order: nothing before ``min_tokens`` outputs; the end-of-sequence token; a stop token;
    a length (of the model or of the request); a repetition.

    Parameters
    ----------
    request : RequestState
        With at least one output token.
    max_model_len : int
    min_tokens_outlive_model_len : bool
        Whether ``min_tokens`` holds off even the length of the model, as in vLLM 0.27.1, where a
        request that cannot reach ``min_tokens`` within ``max_model_len`` never ends (#51299).

    Returns
    -------
    RequestState
        The same, or with a finished status and its `stop_reason`.
    """
    params = request.request.sampling_params
    num_outputs = request.num_output_tokens
    is_full = request.num_tokens >= max_model_len
    if num_outputs < params.min_tokens:
        if is_full and not min_tokens_outlive_model_len:
            return replace(request, status=RequestStatus.FINISHED_LENGTH_CAPPED)
        return request
    last = request.all_token_ids[-1]
    if last == params.eos_token_id:
        return replace(request, status=RequestStatus.FINISHED_STOPPED)
    if last in params.stop_token_ids:
        return replace(request, status=RequestStatus.FINISHED_STOPPED, stop_reason=last)
    if is_full or num_outputs >= params.max_tokens:
        return replace(request, status=RequestStatus.FINISHED_LENGTH_CAPPED)
    repetition = params.repetition_detection
    if repetition is not None and is_repeating(request.output_token_ids, repetition):
        return replace(
            request, status=RequestStatus.FINISHED_REPETITION, stop_reason="repetition_detected"
        )
    return request


def is_repeating(token_ids: Sequence[int], detection: RepetitionDetection) -> bool:
    """Whether the tokens end with some pattern ``min_count`` times in a row.

    Parameters
    ----------
    token_ids : sequence of int
    detection : RepetitionDetection
    """
    for size in range(max(detection.min_pattern_size, 1), detection.max_pattern_size + 1):
        span = size * detection.min_count
        if span > len(token_ids):
            return False
        tail = token_ids[-span:]
        if tail[size:] == tail[:-size]:
            return True
    return False
