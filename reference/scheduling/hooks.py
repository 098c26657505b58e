"""Where features that are out of scope would take part, named and typed but without behaviour.

vLLM's scheduler also loads K/V from elsewhere, runs encoders, swaps LoRA adapters and follows
grammars. Each has a fixed place in a step; the protocols below say which question is asked there,
so that a later version can add the answer without moving anything else.

Source: the calls to connectors, encoder cache, LoRA limits and structured output in
``vllm/v1/core/sched/scheduler.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from servespec.reference.contracts import BlockTable, RequestStatus
from servespec.reference.scheduling.state import RequestState

__all__ = ["BLOCKED_STATUSES", "AdapterSlots", "EncoderBudget", "Grammar", "KVConnector"]

BLOCKED_STATUSES = frozenset(
    (
        RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
        RequestStatus.WAITING_FOR_REMOTE_KVS,
        RequestStatus.WAITING_FOR_STREAMING_REQ,
    )
)
"""States in which a request is set aside when its turn comes."""


class KVConnector(Protocol):
    """K/V that other engines or tiers hold; asked in `waiting` after the local prefix hit."""

    def num_matched_tokens(self, request: RequestState, num_local: int) -> int | None:
        """Tokens to be had beyond the local hit; None sets the request aside."""

    def delays_free(self, request: RequestState, blocks: BlockTable) -> bool:
        """Whether blocks of an ended request are still being sent."""


class EncoderBudget(Protocol):
    """Encoder inputs (images, audio); asked before blocks are allocated."""

    def admitted_tokens(self, request: RequestState, start: int, num_tokens: int) -> int:
        """Tokens up to the first input that does not fit the step."""


class AdapterSlots(Protocol):
    """LoRA adapters that fit into one step; asked in `waiting` before the prefix hit."""

    def has_room(self, request: RequestState, scheduled: Sequence[str]) -> bool:
        """Whether the request's adapter can join those of the scheduled requests."""


class Grammar(Protocol):
    """Structured output; asked in `update` for sampled tokens and for drafts."""

    def accepted(self, request: RequestState, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Leading tokens that the grammar allows."""
