"""The consoles that everything for a person is written to."""

from __future__ import annotations

import os

from rich.console import Console

__all__ = ["make_console"]


def make_console(*, stderr: bool = False) -> Console:
    """Return a console; with ``NO_COLOR`` set it writes no styles, bold and dim included.

    Parameters
    ----------
    stderr : bool
        Whether it writes to standard error.
    """
    return Console(stderr=stderr, color_system=None if os.environ.get("NO_COLOR") else "auto")
