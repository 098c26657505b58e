"""Requests and what becomes of them.

Source: ``vllm/v1/request.py``, ``vllm/sampling_params.py``, ``vllm/v1/engine/__init__.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from servespec.reference.contracts.errors import require

__all__ = [
    "EngineCoreOutput",
    "FinishReason",
    "PauseState",
    "RepetitionDetection",
    "Request",
    "RequestStatus",
    "SamplingParams",
    "require_prompt",
]


class RequestStatus(IntEnum):
    """Where a request stands; everything after `PREEMPTED` is finished.

    The three ``WAITING_FOR_...`` states are hook points for grammars, remote K/V and streaming
    sessions, which are out of scope: nothing here enters them.
    """

    WAITING = 1
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 2
    WAITING_FOR_REMOTE_KVS = 3
    WAITING_FOR_STREAMING_REQ = 4
    RUNNING = 5
    PREEMPTED = 6
    FINISHED_STOPPED = 7
    FINISHED_LENGTH_CAPPED = 8
    FINISHED_ABORTED = 9
    FINISHED_IGNORED = 10
    FINISHED_ERROR = 11
    FINISHED_REPETITION = 12

    @property
    def is_finished(self) -> bool:
        """Whether the request is over."""
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        """What a client is told; None while the request lives."""
        return _FINISH_REASONS.get(self)


class FinishReason(IntEnum):
    """Why a request ended, as a client sees it."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    # vLLM reports an ignored request (one over the length cap) as "length".
    RequestStatus.FINISHED_IGNORED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
}


class PauseState(IntEnum):
    """What the scheduler may still do.

    `PAUSED_NEW` admits no request; `PAUSED_ALL` schedules nothing.
    """

    UNPAUSED = 0
    PAUSED_NEW = 1
    PAUSED_ALL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetection:
    """Stop when the end of the output repeats itself.

    Attributes
    ----------
    max_pattern_size, min_pattern_size : int
        Lengths of pattern looked for, in tokens; a minimum of 0 means 1.
    min_count : int
        Repetitions in a row that stop the request.
    """

    max_pattern_size: int
    min_pattern_size: int = 0
    min_count: int = 2

    def __post_init__(self) -> None:
        name = "RepetitionDetection"
        require(
            self.max_pattern_size >= 1,
            f"{name}.max_pattern_size",
            self.max_pattern_size,
            "at least 1",
        )
        require(
            0 <= self.min_pattern_size <= self.max_pattern_size,
            f"{name}.min_pattern_size",
            self.min_pattern_size,
            f"in [0, max_pattern_size = {self.max_pattern_size}]",
        )
        require(self.min_count >= 2, f"{name}.min_count", self.min_count, "at least 2")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    Attributes
    ----------
    max_tokens : int
        Most output tokens.
    min_tokens : int
        Output tokens before which nothing stops the request, not even a length.
    eos_token_id : int or None
        End-of-sequence token; None ignores it.
    stop_token_ids : tuple of int
        Further tokens that stop the request.
    repetition_detection : RepetitionDetection or None
    temperature : float
        0 means greedy, the only choice so far.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    eos_token_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    repetition_detection: RepetitionDetection | None = None
    temperature: float = 0.0

    def __post_init__(self) -> None:
        name = "SamplingParams"
        require(self.max_tokens >= 1, f"{name}.max_tokens", self.max_tokens, "at least 1")
        require(
            0 <= self.min_tokens <= self.max_tokens,
            f"{name}.min_tokens",
            self.min_tokens,
            f"in [0, max_tokens = {self.max_tokens}]",
        )
        require(
            self.temperature == 0.0, f"{name}.temperature", self.temperature, "0 (greedy sampling)"
        )


def require_prompt(field: str, token_ids: tuple[int, ...]) -> None:
    """Raise `ConfigError` unless a prompt has a token and no negative one.

    Parameters
    ----------
    field : str
        Name of the prompt, as for `require`.
    token_ids : tuple of int

    Raises
    ------
    ConfigError
    """
    require(len(token_ids) > 0, field, token_ids, "at least one token")
    smallest = min(token_ids)
    require(smallest >= 0, field, smallest, "token ids of at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt and what is wanted of it.

    Attributes
    ----------
    request_id : str
        Unique among live requests.
    prompt_token_ids : tuple of int
        At least one token.
    sampling_params : SamplingParams
    priority : int
        Smaller runs earlier under the ``priority`` policy.
    arrival_time : float
        Seconds on any clock; breaks ties of `priority`.
    cache_salt : str or None
        Keeps the prefix hashes of different tenants apart.
    lora_name : str or None
        Hook point: part of the prefix hash only.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    arrival_time: float = 0.0
    cache_salt: str | None = None
    lora_name: str | None = None

    def __post_init__(self) -> None:
        require(len(self.request_id) > 0, "Request.request_id", self.request_id, "not empty")
        require_prompt(f"Request({self.request_id!r}).prompt_token_ids", self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreOutput:
    """What one step gave one request.

    Attributes
    ----------
    request_id : str
    new_token_ids : tuple of int
        Tokens appended in this step, after trimming at a stop.
    finish_reason : FinishReason or None
    stop_reason : int, str or None
        The stop token, or ``"repetition_detected"``.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
