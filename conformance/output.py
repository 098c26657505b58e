"""Writing files so that nothing is ever half there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["OutputError", "require_writable", "write_atomically"]


class OutputError(ValueError):
    """A file cannot be written; the text names it and says why."""


def require_writable(path: Path) -> None:
    """Refuse a path that could not be written, before any work is done for it.

    Parameters
    ----------
    path : Path
        Of a file; its folder need not exist yet.

    Raises
    ------
    OutputError
    """
    if path.is_dir():
        raise OutputError(f"cannot write {path}: it is a folder")
    folder = next(parent for parent in (path.absolute()).parents if parent.exists())
    if not folder.is_dir():
        raise OutputError(f"cannot write {path}: {folder} is no folder")
    if not os.access(folder, os.W_OK):
        raise OutputError(f"cannot write {path}: {folder} is not writable")


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
