"""Which backend runs the kernels here, and why the others don't.

The two Tritons (upstream's and triton-ascend) share the package name ``triton``: whichever was
installed last has overwritten files of the other, and neither works. That is an error, found
before anything of them is imported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib import metadata, util

import torch

from servespec.fast.backends.base import Backend, BackendError

__all__ = ["BACKENDS", "Status", "backend", "choose", "statuses"]

BACKENDS = ("npu", "cuda", "cpu", "interpreter")
"""Names of all backends."""

VARIABLE = "SERVESPEC_BACKEND"
"""Environment variable that overrides the choice: a name of `BACKENDS`, or ``torch``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What this machine can do with a backend.

    Attributes
    ----------
    name : str
    reason : str or None
        Why it cannot run here; None if it can.
    """

    name: str
    reason: str | None


def _has(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _check_one_triton() -> None:
    if _has("triton") and _has("triton-ascend"):
        raise BackendError(
            "triton and triton-ascend are both installed, and share one folder, so neither works:"
            " pip uninstall both, then install the one for this machine"
            " (extras: cuda for triton; cpu or ascend for triton-ascend)"
        )


def _reason(name: str) -> str | None:
    ascend = "triton-ascend is not installed (extra {}, Python 3.11 only)"
    if name == "npu":
        if not _has("triton-ascend"):
            return ascend.format("ascend")
        if util.find_spec("torch_npu") is None:
            return "torch_npu is not installed (extra ascend)"
        from servespec.fast.backends.npu import device_reason

        return device_reason()
    if name == "cuda":
        if not _has("triton"):
            return "triton is not installed (extra cuda)"
        return None if torch.cuda.is_available() else "torch finds no CUDA device"
    if name == "cpu":
        if not _has("triton-ascend"):
            return ascend.format("cpu")
        missing = [
            package
            for package, module in (("ascendnpu-ir", "ascendnpuir"), ("llvmlite", "llvmlite"))
            if util.find_spec(module) is None
        ]
        return f"{' and '.join(missing)} not installed (extra cpu)" if missing else None
    if not _has("triton"):
        return "triton is not installed (extra cuda)"
    return None


def statuses() -> tuple[Status, ...]:
    """Return what this machine can run, in order of preference.

    Raises
    ------
    BackendError
        Both Tritons are installed.
    """
    _check_one_triton()
    return tuple(Status(name=name, reason=_reason(name)) for name in BACKENDS)


@cache
def backend(name: str) -> Backend:
    """Return a backend.

    Parameters
    ----------
    name : str

    Raises
    ------
    BackendError
        It is unknown or cannot run here.
    """
    _check_one_triton()
    if name not in BACKENDS:
        raise BackendError(f"unknown backend {name!r}: must be one of {', '.join(BACKENDS)}")
    reason = _reason(name)
    if reason is not None:
        raise BackendError(f"backend {name} cannot run here: {reason}")
    if name == "npu":
        from servespec.fast.backends.npu import NpuBackend

        return NpuBackend()
    if name == "cuda":
        from servespec.fast.backends.cuda import CudaBackend

        return CudaBackend()
    if name == "cpu":
        from servespec.fast.backends.cpu.backend import CpuBackend

        return CpuBackend()
    from servespec.fast.backends.interpreter import InterpreterBackend

    return InterpreterBackend()


def choose(device: torch.device | str = "cpu") -> Backend | None:
    """Return the backend for a device; None if the plain torch operations serve it.

    The interpreter is never chosen, as it is far slower than torch: ``SERVESPEC_BACKEND`` asks
    for it.

    Parameters
    ----------
    device : torch.device or str

    Raises
    ------
    BackendError
        Both Tritons are installed, or the backend asked for cannot run here.
    """
    _check_one_triton()
    named = os.environ.get(VARIABLE)
    if named:
        return None if named == "torch" else backend(named)
    kind = torch.device(device).type
    if kind not in ("npu", "cuda", "cpu") or _reason(kind) is not None:
        return None
    return backend(kind)
