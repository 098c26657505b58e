"""How an implementation fails, as opposed to decides differently."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["CallFailed", "ImplementationFailed"]


class ImplementationFailed(RuntimeError):  # noqa: N818 - a verdict, named as reports print it
    """An implementation died, hung, raised, or answered something that is no answer.

    Parameters
    ----------
    reason : str
        What happened, in one line.
    lines : iterable of str
        The last lines it wrote, or the end of its traceback.
    """

    def __init__(self, reason: str, lines: Iterable[str] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lines = tuple(lines)

    def __str__(self) -> str:
        if not self.lines:
            return self.reason
        return "\n".join([f"{self.reason}; its last lines:", *(f"  {x}" for x in self.lines)])


class CallFailed(ImplementationFailed):
    """One call raised; the implementation itself lives on, to be asked for a fresh scheduler."""
