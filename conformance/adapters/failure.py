"""How an implementation fails, as opposed to decides differently."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["CallFailed", "ImplementationFailed", "TimedOut", "printable"]

_LONGEST = 400


def printable(text: str, most: int = _LONGEST) -> str:
    """Return a text of an implementation's as one that any terminal and any file can take.

    Parameters
    ----------
    text : str
    most : int
        Characters after which it is cut.

    Returns
    -------
    str
        With control characters and lone surrogates as escapes.
    """
    if len(text) > most:
        text = f"{text[:most]}..."
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class ImplementationFailed(RuntimeError):  # noqa: N818 - a verdict, named as reports print it
    """An implementation died, hung, raised, or answered something that is no answer.

    Parameters
    ----------
    reason : str
        What happened, in one line; kept as `printable` makes it, and so are the lines.
    lines : iterable of str
        The last lines it wrote, or the end of its traceback.
    """

    def __init__(self, reason: str, lines: Iterable[str] = ()) -> None:
        super().__init__(reason)
        self.reason = printable(reason)
        self.lines = tuple(map(printable, lines))

    def __str__(self) -> str:
        if not self.lines:
            return self.reason
        return "\n".join([f"{self.reason}; its last lines:", *(f"  {x}" for x in self.lines)])


class TimedOut(ImplementationFailed):
    """It gave no answer in time."""


class CallFailed(ImplementationFailed):
    """One call raised; the implementation itself lives on, to be asked for a fresh scheduler."""
