"""What one V0 step may still hold.

Source: ``SchedulingBudget`` of ``vllm/core/scheduler.py`` of vLLM 0.5.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["SchedulingBudget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingBudget:
    """Tokens and sequences of a step, spent request by request.

    Each request is registered once for either count; a second registration changes nothing. So
    the default policy can register the sequences of all running groups before it looks at
    prompts, and its later passes need not know.

    Attributes
    ----------
    token_budget, max_num_seqs : int
        The limits.
    num_batched_tokens, num_curr_seqs : int
        What is spent.
    with_tokens, with_seqs : frozenset of str
        Requests registered for tokens and for sequences.
    """

    token_budget: int
    max_num_seqs: int
    num_batched_tokens: int = 0
    num_curr_seqs: int = 0
    with_tokens: frozenset[str] = frozenset()
    with_seqs: frozenset[str] = frozenset()

    @property
    def remaining_token_budget(self) -> int:
        """Tokens left; negative once a group of several sequences overran the budget."""
        return self.token_budget - self.num_batched_tokens

    def can_schedule(self, num_new_tokens: int, num_new_seqs: int) -> bool:
        """Tell whether both limits leave room."""
        return (
            self.num_batched_tokens + num_new_tokens <= self.token_budget
            and self.num_curr_seqs + num_new_seqs <= self.max_num_seqs
        )

    def add_num_batched_tokens(self, request_id: str, count: int) -> SchedulingBudget:
        """Register a request's tokens."""
        if request_id in self.with_tokens:
            return self
        return replace(
            self,
            num_batched_tokens=self.num_batched_tokens + count,
            with_tokens=self.with_tokens | {request_id},
        )

    def add_num_seqs(self, request_id: str, count: int) -> SchedulingBudget:
        """Register a request's sequences."""
        if request_id in self.with_seqs:
            return self
        return replace(
            self,
            num_curr_seqs=self.num_curr_seqs + count,
            with_seqs=self.with_seqs | {request_id},
        )

    def subtract_num_seqs(self, request_id: str, count: int) -> SchedulingBudget:
        """Take back a request's sequences, if they are registered."""
        if request_id not in self.with_seqs:
            return self
        return replace(
            self,
            num_curr_seqs=self.num_curr_seqs - count,
            with_seqs=self.with_seqs - {request_id},
        )
