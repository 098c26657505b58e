"""From the text given to ``--impl`` to an implementation."""

from __future__ import annotations

import importlib
import shlex
import shutil
import sys
from pathlib import Path

from servespec.conformance.adapters.failure import ImplementationFailed
from servespec.conformance.adapters.process import Peer, ProcessImplementation
from servespec.conformance.adapters.v0_process import V0ProcessImplementation
from servespec.conformance.verdicts import attempt

__all__ = [
    "BUILT_IN",
    "COMMANDS",
    "FACTORIES",
    "LoadingError",
    "load",
    "load_vllm",
    "load_vllm_v0",
    "offers",
    "start",
]

BUILT_IN = {
    "fast": "the fast path of this package: torch, and kernels where they win",
    "reference": "the reference itself, as a check of the checks",
    "vllm": "the scheduler of vLLM 0.27.1 in an environment of its own (--python PATH)",
    "vllm-v0": "the V0 scheduler of vLLM 0.5.1 (--python PATH --root FOLDER of the unpacked wheel)",
}
"""Implementations known by name, and what they are."""

COMMANDS: dict[str, type[ProcessImplementation] | type[V0ProcessImplementation]] = {
    "process": ProcessImplementation,
    "process-v0": V0ProcessImplementation,
}
"""What a program that speaks the line protocol is named by, before a colon and its command."""

FACTORIES = (
    "make_scheduler",
    "make_v0_scheduler",
    "make_batch",
    "make_attention",
    "make_engine",
    "make_kernels",
)
"""Methods of which an implementation offers at least one."""


class LoadingError(ValueError):
    """An implementation cannot be loaded; the text names it and says why."""


def load(name: str, python: str | None = None, root: str | None = None) -> object:
    """Return an implementation.

    Parameters
    ----------
    name : str
        A key of `BUILT_IN`; or ``package.module:object``, imported with the working directory on
        the path (a class is called without arguments); or a key of `COMMANDS`, a colon and the
        command of a program, words quoted as in a shell.
    python : str, optional
        Interpreter of the environment that ``vllm`` or ``vllm-v0`` lives in.
    root : str, optional
        Folder of the unpacked wheel that ``vllm-v0`` runs.

    Raises
    ------
    LoadingError
        If there is no such implementation, it cannot be imported, or it offers no factory.
    """
    if python is not None and name not in ("vllm", "vllm-v0"):
        raise LoadingError(f"--python is for --impl vllm and vllm-v0, not for {name!r}")
    if root is not None and name != "vllm-v0":
        raise LoadingError(f"--root is for --impl vllm-v0, not for {name!r}")
    if name == "fast":
        from servespec.conformance.adapters.fast import FastImplementation

        return FastImplementation()
    if name == "reference":
        from servespec.conformance.adapters.reference import ReferenceImplementation

        return ReferenceImplementation()
    if name == "vllm":
        if python is None:
            raise LoadingError("--impl vllm needs --python, the interpreter that has vLLM")
        return load_vllm(python)
    if name == "vllm-v0":
        if python is None or root is None:
            raise LoadingError(
                "--impl vllm-v0 needs --python, an interpreter with torch, transformers, psutil"
                " and msgspec, and --root, the folder of the unpacked wheel of vLLM 0.5.1"
            )
        return load_vllm_v0(python, root)
    prefix, colon, command = name.partition(":")
    if colon and prefix in COMMANDS:
        return COMMANDS[prefix](_words(name, command))
    return _import(name)


def _words(name: str, command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise LoadingError(f"--impl {name}: {error}") from error
    if not words:
        raise LoadingError(f"--impl {name}: no program")
    if shutil.which(words[0]) is None:
        raise LoadingError(f"--impl {name}: no program {words[0]!r}")
    return words


def load_vllm(python: str) -> ProcessImplementation:
    """Return vLLM's scheduler in a process of its own.

    Parameters
    ----------
    python : str
        Interpreter of the environment that vLLM lives in.

    Raises
    ------
    LoadingError
        If there is no such interpreter.
    """
    from servespec.conformance.adapters.vllm import vllm_implementation

    if not Path(python).is_file():
        raise LoadingError(f"--python {python}: no such file")
    return vllm_implementation(python)


def load_vllm_v0(python: str, root: str) -> V0ProcessImplementation:
    """Return vLLM's V0 scheduler in a process of its own.

    Parameters
    ----------
    python : str
        Interpreter with what the wheel imports.
    root : str
        Folder of the unpacked wheel.

    Raises
    ------
    LoadingError
        If there is no such interpreter or no such wheel.
    """
    from servespec.conformance.adapters.vllm_v0 import vllm_v0_implementation

    if not Path(python).is_file():
        raise LoadingError(f"--python {python}: no such file")
    if not Path(root, "vllm", "core", "scheduler.py").is_file():
        raise LoadingError(f"--root {root}: holds no vllm/core/scheduler.py")
    return vllm_v0_implementation(python, root)


def start(implementation: object, name: str) -> None:
    """Start the program of an implementation that has one, which else starts when first needed.

    Parameters
    ----------
    implementation : object
    name : str
        As for `load`.

    Raises
    ------
    LoadingError
        If it does not start or does not speak the line protocol.
    """
    if isinstance(implementation, Peer):
        try:
            implementation.start()
        except ImplementationFailed as error:
            last = f": {error.lines[-1].strip()}" if error.lines else ""
            raise LoadingError(f"cannot start --impl {name}: {error.reason}{last}") from error


def offers(implementation: object) -> tuple[str, ...]:
    """Return the factories an implementation has."""
    return tuple(f for f in FACTORIES if callable(getattr(implementation, f, None)))


def _import(name: str) -> object:
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        known = ", ".join(BUILT_IN)
        raise LoadingError(
            f"unknown implementation {name!r}: give {known}, module:object or 'process:COMMAND'"
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: object = attempt(importlib.import_module, module_name)
    except ImplementationFailed as error:
        reason = error.reason.removeprefix("import_module raised ")
        raise LoadingError(f"cannot import {module_name!r} of --impl {name}: {reason}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise LoadingError(f"module {module_name!r} of --impl {name} has no {path!r}")
        found = getattr(found, part)
    if isinstance(found, type):
        try:
            found = attempt(found)
        except ImplementationFailed as error:
            raise LoadingError(f"--impl {name}: {error.reason}") from error
    if not offers(found):
        raise LoadingError(f"--impl {name} has none of {', '.join(FACTORIES)}")
    return found
