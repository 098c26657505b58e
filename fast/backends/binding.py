"""Arguments of a launch as types and values."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from servespec.fast.backends.base import BackendError

__all__ = ["Signature", "argument_type", "signature"]

Signature = tuple[str, ...]
"""Types of the arguments, in the kernel's order."""

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
_LIMIT = 1 << 31


def argument_type(value: object) -> str:
    """Return the Triton type of an argument.

    Raises
    ------
    BackendError
        It is no tensor of a known dtype, no int in ``[-2**31, 2**31)`` and no float.
    """
    if isinstance(value, Tensor):
        if value.dtype not in _POINTERS:
            raise BackendError(f"a tensor of {value.dtype} cannot be given to a kernel")
        return _POINTERS[value.dtype]
    if isinstance(value, int):
        if not -_LIMIT <= value < _LIMIT:
            raise BackendError(f"argument {value} is out of range: must be in [-2**31, 2**31)")
        return "i32"
    if isinstance(value, float):
        return "fp32"
    raise BackendError(f"a kernel cannot be given {type(value).__name__}: tensor, int or float")


@cache
def _parameters(kernel: Any) -> tuple[tuple[str, ...], frozenset[str]]:
    # An interpreted kernel has no parameters of its own, but every kernel has its function.
    parameters = inspect.signature(kernel.fn).parameters.values()
    constant = frozenset(p.name for p in parameters if "constexpr" in str(p.annotation))
    return tuple(p.name for p in parameters if p.name not in constant), constant


def signature(
    kernel: Any, arguments: Sequence[object], constants: Mapping[str, object]
) -> dict[str, str]:
    """Return the types of a launch's arguments by their names.

    Parameters
    ----------
    kernel : triton.JITFunction
    arguments : sequence
        In the kernel's order.
    constants : mapping of str to object

    Raises
    ------
    BackendError
        Arguments are missing or too many.
    """
    names, expected = _parameters(kernel)
    if len(names) != len(arguments) or expected != constants.keys():
        raise BackendError(
            f"kernel {kernel.__name__} takes {names} and {tuple(sorted(expected))},"
            f" not {len(arguments)} arguments and {tuple(sorted(constants))}"
        )
    return {n: argument_type(value) for n, value in zip(names, arguments, strict=True)}
