"""Where parts that are out of scope would take part in scheduling.

Nothing here does anything. K/V and encoder connectors, LoRA, grammars and streaming sessions each
have a place in vLLM's scheduler (``vllm/v1/core/sched/scheduler.py``); a subclass given to the
`Scheduler` stands in it.
"""

from __future__ import annotations

from servespec.reference.contracts import Request

__all__ = ["Hooks"]


class Hooks:
    """Answers that change nothing."""

    def may_start(self, request: Request) -> bool:
        """Whether a waiting request may be looked at in this step.

        False passes it over, as vLLM does while a grammar is compiled, remote K/V or an input
        stream is awaited, a connector is undecided or the cap on LoRA adapters is reached.
        """
        return True

    def valid_drafts(self, request: Request, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the drafts that may be scheduled: a grammar keeps those it accepts."""
        return drafts

    def on_finished(self, request: Request) -> None:
        """Take note that a request ended, just before its blocks are freed: a connector saves."""
