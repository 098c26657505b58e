"""A workload: what happens around the steps of a scheduler or an engine, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from servespec.reference.contracts import PauseState, Request, require

__all__ = ["Workload", "WorkloadStep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadStep:
    """What happens before one step is scheduled, in the order of the fields.

    Attributes
    ----------
    add : tuple of Request
        Requests that arrive.
    abort : tuple of str
        Ids aborted one by one; ids that are not alive are ignored.
    pause : PauseState or None
        New pause state; None leaves it.
    reset_prefix_cache : bool or None
        Forget all hashes; True also preempts the running requests. None does nothing.
    throttle_prefills : bool
        Whether data-parallel throttling holds prefills back in this step.
    """

    add: tuple[Request, ...] = ()
    abort: tuple[str, ...] = ()
    pause: PauseState | None = None
    reset_prefix_cache: bool | None = None
    throttle_prefills: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Steps with events, followed by steps without any until all requests ended.

    Attributes
    ----------
    steps : tuple of WorkloadStep
    max_steps : int
        Steps after which a run ends in any case.
    token_seed : int
        Without a model, the token at position p of a request is a pure function of this seed, the
        request id and p, whatever the schedule; so all implementations see the same tokens.
    num_token_ids : int
        Sampled tokens (and drafts) without a model are below this number.
    acceptance : float
        Without a model, the share of drafts that equal the token sampled at their position.
    max_concurrent_batches : int
        With asynchronous scheduling, most steps in flight. vLLM has 2, and one more for each
        further pipeline stage.
    """

    steps: tuple[WorkloadStep, ...]
    max_steps: int = 200
    token_seed: int = 0
    num_token_ids: int = 50
    acceptance: float = 0.7
    max_concurrent_batches: int = 2

    def __post_init__(self) -> None:
        require(self.max_steps >= 1, "Workload.max_steps", self.max_steps, "at least 1")
        require(self.num_token_ids >= 2, "Workload.num_token_ids", self.num_token_ids, "at least 2")
        require(0.0 <= self.acceptance <= 1.0, "Workload.acceptance", self.acceptance, "in [0, 1]")
        require(
            1 <= self.max_concurrent_batches <= 8,
            "Workload.max_concurrent_batches",
            self.max_concurrent_batches,
            "in [1, 8]",
        )

    @property
    def requests(self) -> tuple[Request, ...]:
        """All requests in order of arrival."""
        return tuple(request for step in self.steps for request in step.add)
