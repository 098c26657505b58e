"""What a person sees while an engine generates."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from servespec.reference.contracts import EngineCoreOutput, Request

__all__ = ["GenerationProgress"]


class GenerationProgress:
    """A bar of finished requests, with the tokens so far and their rate, on standard error.

    Parameters
    ----------
    requests : sequence of Request
    shown : bool
        False makes it do nothing.
    """

    def __init__(self, requests: Sequence[Request], shown: bool = True) -> None:
        self._progress = Progress(
            TextColumn("generating"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("requests  {task.fields[tokens]} tokens  {task.fields[rate]:.0f}/s"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not shown,
        )
        self._task = self._progress.add_task("", total=len(requests), tokens=0, rate=0.0)
        self._tokens = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def update(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Take in what one step gave."""
        if self._progress.disable:
            return
        self._tokens += sum(len(output.new_token_ids) for output in outputs)
        elapsed = self._progress.tasks[0].elapsed
        self._progress.update(
            self._task,
            advance=sum(output.finish_reason is not None for output in outputs),
            tokens=self._tokens,
            rate=self._tokens / elapsed if elapsed else 0.0,
        )
