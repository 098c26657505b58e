"""Every launch that the models need: kernels with the shapes and dtypes they are compiled for.

A configuration is a call of an operation on small tensors; the backend that it is given takes down
what would be launched, so that what is compiled is what is run. Only the dimensions that are
compile-time constants matter: head sizes, block sizes, dtypes, numbers of state columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from servespec.fast.backends.binding import signature
from servespec.fast.kernels.operations import operations

__all__ = ["Configuration", "Launch", "RecordingBackend", "configurations"]

_BLOCKS = 4
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A kernel and what it is compiled for.

    Attributes
    ----------
    kernel : triton.JITFunction
    types : dict of str to str
        Of its arguments.
    constants : dict of str to object
    """

    kernel: Any
    types: dict[str, str]
    constants: dict[str, object]


class RecordingBackend:
    """Takes down launches as an NPU would be given them, and runs none."""

    name = "npu"
    device = "cpu"
    min_dot = 16

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def launch(self, kernel: Any, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
        """Take down a launch. See `servespec.fast.backends.base.Backend.launch`."""
        types = signature(kernel, arguments, constants)
        self.launches.append(Launch(kernel=kernel, types=types, constants=constants))


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A call of an operation.

    Attributes
    ----------
    operation : str
        A key of `servespec.fast.kernels.operations.operations`.
    name : str
        What distinguishes the configuration.
    arguments : tuple
    options : mapping of str to object
    """

    operation: str
    name: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def launches(self) -> list[Launch]:
        """Return what it launches, one entry a kernel; imports Triton."""
        backend = RecordingBackend()
        operations(backend)[self.operation](*self.arguments, **self.options)
        return list({id(launch.kernel): launch for launch in backend.launches}.values())


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def configurations() -> Iterator[Configuration]:
    """Yield all configurations."""
    yield from _attention()
    yield from _kv_cache()
    yield from _gated_delta_net()
    yield from _pointwise()


def _attention() -> Iterator[Configuration]:
    table, one, starts = _ints(*range(_BLOCKS))[None], _ints(1), _ints(0, 128)
    for dim in (64, 128, 256):
        for page in (16, 128):
            for name, dtype in _DTYPES.items():
                pages = (_ones(_BLOCKS, page, 2, dim, dtype=dtype),) * 2
                yield Configuration(
                    operation="paged_attention_decode",
                    name=f"D={dim} page={page} {name}",
                    arguments=(_ones(1, 8, dim, dtype=dtype), *pages, table, one, 0.1),
                    options={"parts": 4 if page == 128 and name == "bf16" else 1},
                )
                query = _ones(128, 8, dim, dtype=dtype)
                yield Configuration(
                    operation="varlen_attention",
                    name=f"D={dim} page={page} {name}",
                    arguments=(query, *pages, table, starts, one, 128, 0.1),
                )
            int8 = (
                *(_ones(_BLOCKS, 2, dim // 32, page, 32, dtype=torch.int8),) * 2,
                *(_ones(2, dim, dtype=torch.bfloat16),) * 2,
            )
            name = f"D={dim} page={page} int8"
            query = _ones(128, 8, dim, dtype=torch.bfloat16)
            yield Configuration(
                operation="int8_attention_decode",
                name=name,
                arguments=(query[:1], *int8, table, one, 0.1),
                options={"parts": 4 if page == 128 else 1},
            )
            yield Configuration(
                operation="int8_varlen_attention",
                name=name,
                arguments=(query, *int8, table, starts, one, 128, 0.1),
            )
        packed = (_ones(128, 2, dim, dtype=torch.bfloat16),) * 2
        yield Configuration(
            operation="packed_attention",
            name=f"D={dim} bf16",
            arguments=(
                *(_ones(128, 8, dim, dtype=torch.bfloat16), *packed),
                *(starts, starts, one, 128, 0.1),
            ),
        )


def _kv_cache() -> Iterator[Configuration]:
    for dim in (64, 128, 256):
        for name, dtype in _DTYPES.items():
            yield Configuration(
                operation="write_kv",
                name=f"D={dim} {name}",
                arguments=(
                    *(_ones(1, 2, dim, dtype=dtype),) * 2,
                    *(_ones(_BLOCKS, 16, 2, dim, dtype=dtype),) * 2,
                    _ints(1),
                ),
            )
        yield Configuration(
            operation="write_int8",
            name=f"D={dim} int8",
            arguments=(
                *(_ones(1, 2, dim, dtype=torch.bfloat16),) * 2,
                *(_ones(_BLOCKS, 2, dim // 32, 128, 32, dtype=torch.int8),) * 2,
                *(_ones(2, dim, dtype=torch.bfloat16),) * 2,
                _ints(1),
            ),
        )


def _gated_delta_net() -> Iterator[Configuration]:
    one, starts = _ints(1), _ints(0, 1)
    states = _ones(4, 4, 128, 128)
    token = (*(_ones(1, 2, 128),) * 2, _ones(1, 4, 128), *(_ones(1, 4),) * 2, states)
    yield Configuration(
        operation="gating",
        name="bf16",
        arguments=(*(_ones(1, 32, dtype=torch.bfloat16),) * 2, *(_ones(32),) * 2),
    )
    yield Configuration(
        operation="gated_delta_rule_decode", name="128x128 fp32", arguments=(*token, one)
    )
    for columns in (1, 4):
        yield Configuration(
            operation="gated_delta_rule_rows",
            name=f"128x128 fp32 columns={columns}",
            arguments=(*token, _ints(*[1] * columns)[None], one, starts),
        )
    yield Configuration(
        operation="chunk_gated_delta_rule",
        name="128x128 fp32",
        arguments=(*token, one, starts, _ints(0, 1)[None]),
    )
    for name, dtype in _DTYPES.items():
        window = _ones(4, 6, 8192, dtype=dtype)
        inputs = (_ones(1, 8192, dtype=dtype), _ones(4, 8192), window, one)
        yield Configuration(
            operation="convolution_decode", name=f"width=4 {name}", arguments=inputs
        )
        for accepted, kind in ((None, ""), (one, " speculative")):
            yield Configuration(
                operation="convolution_rows",
                name=f"width=4 {name}{kind}",
                arguments=(*inputs, starts, one, accepted),
            )


def _pointwise() -> Iterator[Configuration]:
    heads = _ones(1, 4, 128)
    for name, dtype in _DTYPES.items():
        yield Configuration(
            operation="rms_norm",
            name=f"n=4096 {name}",
            arguments=(_ones(1, 4096, dtype=dtype), _ones(4096), 1e-6, dtype),
        )
        yield Configuration(
            operation="gated_rms_norm",
            name=f"n=128 {name}",
            arguments=(heads, heads.to(dtype), _ones(128), 1e-6, dtype),
        )
        for dim in (64, 128, 256):
            x = _ones(1, 4, dim, dtype=dtype)
            yield Configuration(
                operation="norm_rotary",
                name=f"D={dim} {name}",
                arguments=(x, _ones(4, dim), _ones(1, dim // 4), 1e-6, dtype),
            )
    yield Configuration(operation="l2_norm", name="n=128 fp32", arguments=(heads,))
    logits = _ones(1, 248320)
    yield Configuration(operation="greedy", name="fp32", arguments=(logits,))
    yield Configuration(
        operation="sample",
        name="fp32",
        arguments=(logits, _ones(1), _ints(1), _ones(1), _ones(1)),
    )
