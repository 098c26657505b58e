"""Writing files so that nothing is ever half there."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from pathlib import Path

__all__ = ["OutputError", "require_writable", "unused", "write_atomically"]

# Opened and written to as they are; any other device, pipe or socket is refused.
_STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/null")


class OutputError(ValueError):
    """A file cannot be written; the text names it and says why."""


def require_writable(path: Path) -> None:
    """Refuse a path that could not be written, before any work is done for it.

    A file is written beside the path and removed again, folders that had to be made for it
    included: permissions alone do not tell of a read-only or virtual file system.

    Parameters
    ----------
    path : Path
        Of a file; its folder need not exist yet.

    Raises
    ------
    OutputError
    """
    if str(path) in _STREAMS:
        return
    target = _target(path)
    made: list[Path] = []
    try:
        missing = list(itertools.takewhile(lambda folder: not folder.exists(), target.parents))
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            made.append(folder)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".servespec-") as file:
            file.write(b"?")
            file.flush()
    except OSError as error:
        raise _error(path, error) from error
    finally:
        for folder in reversed(made):
            with contextlib.suppress(OSError):  # another run may have put something there
                folder.rmdir()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file under a temporary name and rename it.

    Where the path is a symbolic link, what it leads to is written. Standard output, standard error
    and the null device may be named as well.

    Parameters
    ----------
    path : Path
        Its folder is made if missing.
    data : bytes

    Raises
    ------
    OutputError
    """
    try:
        if str(path) in _STREAMS:
            with path.open("ab") as file:
                file.write(data)
        else:
            _replace(_target(path), data)
    except OSError as error:
        raise _error(path, error) from error


def unused(folder: Path, stem: str) -> Path:
    """Return a path for a case file that no earlier run has written.

    Parameters
    ----------
    folder : Path
    stem : str
        Of the name; a number follows.
    """
    paths = (folder / f"{stem}-{number:03}.json" for number in itertools.count())
    return next(path for path in paths if not os.path.lexists(path))


def _target(path: Path) -> Path:
    """Return the file that a path leads to, which need not exist, or refuse what is no file."""
    try:
        target = path.resolve()
        is_folder, exists, is_file = target.is_dir(), target.exists(), target.is_file()
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError before 3.13
        raise OutputError(f"cannot write {path}: {error}") from error
    if is_folder:
        raise OutputError(f"cannot write {path}: it is a folder")
    if exists and not is_file:
        raise OutputError(f"cannot write {path}: it is neither a regular file nor a new one")
    return target


def _replace(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:200]}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)  # mkstemp makes private files
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _error(path: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot write {path}: {error.strerror or error}")
