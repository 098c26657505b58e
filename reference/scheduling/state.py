"""What the scheduler remembers between two calls.

Sources: ``vllm/v1/request.py``, ``Scheduler.__init__`` of ``vllm/v1/core/sched/scheduler.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from servespec.reference.cache.groups import CacheState
from servespec.reference.cache.layout import CacheLayout
from servespec.reference.contracts import (
    CacheConfig,
    PauseState,
    Quirks,
    Request,
    RequestStatus,
    SchedulerConfig,
    SpeculativeConfig,
)

__all__ = ["RequestState", "SchedulerState"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestState:
    """A live request.

    In the rules, ``C`` is `num_computed_tokens`, ``N`` is `num_tokens`, ``P`` the prompt's length,
    ``S`` the number of `spec_token_ids` and ``H`` is `num_output_placeholders`. For a request past
    its prompt C = N - 1 + H holds between two steps.

    Attributes
    ----------
    request : Request
    all_token_ids : tuple of int
        Prompt and output.
    block_hashes : tuple of bytes
        Prefix hashes of all full units of `all_token_ids`; empty without prefix caching.
    status : RequestStatus
    num_computed_tokens : int
        Tokens whose K/V and states are there once the steps in flight are over, as if all their
        drafts were accepted.
    spec_token_ids : tuple of int
        Drafts to be scheduled next; -1 stands for one that only the worker knows.
    num_output_placeholders : int
        Asynchronous scheduling: tokens, drafts included, that steps in flight may yet add.
    num_in_flight_tokens : int
        Scheduled tokens whose step has not returned.
    num_stale_output_tokens : int
        Those of them that were scheduled before the last preemption.
    drop_stale_output : bool
        Whether the output of stale tokens is thrown away instead of kept.
    is_prefill_chunk : bool
        Whether the last step left known tokens to be computed.
    shared_prefix_boundary : int
        Where a chunk should end so that others can share the state there; 0 means nowhere.
    num_preemptions : int
    stop_reason : int, str or None
        The stop token, or ``"repetition_detected"``, of a request that ended by it.
    """

    request: Request
    all_token_ids: tuple[int, ...]
    block_hashes: tuple[bytes, ...] = ()
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    spec_token_ids: tuple[int, ...] = ()
    num_output_placeholders: int = 0
    num_in_flight_tokens: int = 0
    num_stale_output_tokens: int = 0
    drop_stale_output: bool = False
    is_prefill_chunk: bool = False
    shared_prefix_boundary: int = 0
    num_preemptions: int = 0
    stop_reason: int | str | None = None

    @property
    def request_id(self) -> str:
        """Name of the request."""
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output."""
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Known output tokens."""
        return len(self.all_token_ids) - len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """Known output tokens."""
        return self.all_token_ids[len(self.request.prompt_token_ids) :]

    @property
    def queue_key(self) -> tuple[int, float, str]:
        """Order in the queues under the ``priority`` policy, smallest first."""
        return self.request.priority, self.request.arrival_time, self.request.request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """Everything between two calls.

    Attributes
    ----------
    config, cache_config, speculative_config
        As given to `servespec.reference.scheduling.v1.initial_state`.
    cache : CacheState
    requests : mapping of str to RequestState
        All live requests in order of arrival.
    running : tuple of str
        In order of admission.
    waiting : tuple of str
        In the order in which they would be taken.
    skipped_waiting : tuple of str
        Requests that were passed over in an earlier step, in the same order.
    finished_req_ids : frozenset of str
        Requests that ended since the last plan.
    preempted_req_ids : frozenset of str
        Requests preempted since the last plan.
    prev_step_req_ids : frozenset of str
        Requests scheduled in the last step.
    prefill_capacity_bound : bool
        Data-parallel throttling: whether the last step that admitted left requests waiting.
    pause_state : PauseState
    """

    config: SchedulerConfig
    cache_config: CacheConfig
    speculative_config: SpeculativeConfig | None
    cache: CacheState
    requests: Mapping[str, RequestState] = field(default_factory=dict)
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    skipped_waiting: tuple[str, ...] = ()
    finished_req_ids: frozenset[str] = frozenset()
    preempted_req_ids: frozenset[str] = frozenset()
    prev_step_req_ids: frozenset[str] = frozenset()
    prefill_capacity_bound: bool = False
    pause_state: PauseState = PauseState.UNPAUSED

    @property
    def layout(self) -> CacheLayout:
        """How groups divide sequences into blocks."""
        return self.cache.layout

    @property
    def quirks(self) -> Quirks:
        """Oddities to reproduce."""
        return self.config.quirks

    @property
    def num_spec_tokens(self) -> int:
        """Most drafts of one request in one step, written K."""
        speculative = self.speculative_config
        return 0 if speculative is None else speculative.num_speculative_tokens

    def with_request(self, request: RequestState) -> SchedulerState:
        """Return the state with one request added or replaced."""
        return replace(self, requests={**self.requests, request.request_id: request})
