"""When a request ends, judged by its newest token.

Source: ``check_stop`` of ``vllm/v1/core/sched/utils.py``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from servespec.fast.scheduling.requests import RequestTable
from servespec.reference.contracts import RepetitionDetection, RequestStatus

__all__ = ["StopReason", "stop_status"]

StopReason = int | str | None


def stop_status(requests: RequestTable, slot: int) -> tuple[RequestStatus, StopReason] | None:
    """Judge a request after its newest token: EOS, stop tokens, length, repetition, in this order.

    Returns
    -------
    (RequestStatus, int, str or None) or None
        How it ends and what a client is told of it; None if it goes on.
    """
    num_tokens = int(requests.num_tokens[slot])
    if num_tokens < requests.stop_from[slot]:
        # Only a sequence that can grow no further stops before its time.
        if num_tokens >= requests.hard_limit:
            return RequestStatus.FINISHED_LENGTH_CAPPED, None
        return None
    params = requests.request(slot).sampling_params
    token = int(requests.token_ids[slot, num_tokens - 1])
    if token == params.eos_token_id:
        return RequestStatus.FINISHED_STOPPED, None
    if token in params.stop_token_ids:
        return RequestStatus.FINISHED_STOPPED, token
    if num_tokens >= requests.length_limit[slot]:
        return RequestStatus.FINISHED_LENGTH_CAPPED, None
    detection = params.repetition_detection
    if detection is not None:
        output = requests.token_ids[slot, requests.num_prompt[slot] : num_tokens]
        if _repeats(output, detection):
            return RequestStatus.FINISHED_REPETITION, "repetition_detected"
    return None


def _repeats(output: npt.NDArray[np.int32], detection: RepetitionDetection) -> bool:
    """Whether the output ends in `min_count` copies of one pattern of an allowed length."""
    for size in range(max(detection.min_pattern_size, 1), detection.max_pattern_size + 1):
        length = size * detection.min_count
        if length > len(output):
            return False
        copies = output[-length:].reshape(detection.min_count, size)
        if (copies == copies[-1]).all():
            return True
    return False
