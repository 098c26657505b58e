"""Writing files so that nothing is ever half there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file under a temporary name and rename it.

    Parameters
    ----------
    path : Path
        Its folder is made if missing.
    data : bytes
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)  # mkstemp makes private files
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
