"""One safetensors file: what it holds, one tensor of it, and writing one.

The library's NumPy side knows no bfloat16, so it is asked to validate a file and the bytes are
read here. Nothing is ever unpickled. Format: 8 bytes header length (little endian), a JSON header
with dtype, shape and byte range of each tensor, then the bytes
(https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from servespec.reference.contracts import CheckpointError
from servespec.reference.numerics.bfloat16 import round_bfloat16

__all__ = ["DTYPES", "LARGEST", "StoredTensor", "read_header", "read_tensor", "write_file"]

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Names of torch and transformers, and those in the file."""

LARGEST = {
    "float32": float(np.finfo(np.float32).max),
    "float16": float(np.finfo(np.float16).max),
    "bfloat16": (2.0 - 2.0**-7) * 2.0**127,
}
"""Largest finite value of each type."""

_STORAGE: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes
    ----------
    path : pathlib.Path
    name : str
        In the file.
    dtype : str
        ``F32``, ``F16``, ``BF16`` or another of the format's names.
    shape : tuple of int
    offset : int
        Byte in the file.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_header(path: Path) -> tuple[StoredTensor, ...]:
    """List the tensors of a file without reading them.

    Parameters
    ----------
    path : pathlib.Path

    Returns
    -------
    tuple of StoredTensor

    Raises
    ------
    CheckpointError
        If there is no such file, or it is not a whole and consistent safetensors file: the header
        is not JSON, or byte ranges overlap, do not fit the shapes or do not fill the file.
    """
    try:
        with safe_open(path, framework="numpy"):
            pass  # opening checks the header against the file's size and allocates nothing
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a valid safetensors file: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    return tuple(
        StoredTensor(
            path=path,
            name=name,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            offset=8 + length + entry["data_offsets"][0],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    )


def read_tensor(tensor: StoredTensor) -> npt.NDArray[np.float32]:
    """Read a tensor as float32; all three stored types convert exactly.

    Parameters
    ----------
    tensor : StoredTensor

    Returns
    -------
    numpy.ndarray
        Read-only.

    Raises
    ------
    CheckpointError
        If the element type is not a supported one or the bytes cannot be read.
    """
    where = f"{tensor.path}: tensor {tensor.name!r}"
    if tensor.dtype not in _STORAGE:
        raise CheckpointError(
            f"{where} has dtype {tensor.dtype}: must be one of {', '.join(_STORAGE)}"
        )
    count = int(np.prod(tensor.shape, dtype=np.int64))
    try:
        stored = np.fromfile(
            tensor.path, dtype=_STORAGE[tensor.dtype], count=count, offset=tensor.offset
        )
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror or error}") from error
    if stored.size != count:
        raise CheckpointError(f"{where} is cut short: {stored.size} of {count} elements")
    if tensor.dtype == "BF16":
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    values = np.array(stored, dtype=np.float32).reshape(tensor.shape)
    values.flags.writeable = False
    return values


def _stored(values: npt.NDArray[np.float32], dtype: str) -> bytes:
    if dtype != "bfloat16":
        return np.ascontiguousarray(values, dtype=_STORAGE[DTYPES[dtype]]).tobytes()
    bits = round_bfloat16(values).astype(np.float32).view(np.uint32)
    return (bits >> 16).astype("<u2").tobytes()


def write_file(path: Path, tensors: Mapping[str, npt.NDArray[np.float32]], dtype: str) -> None:
    """Write finite tensors to a new file.

    Parameters
    ----------
    path : pathlib.Path
    tensors : mapping of str to numpy.ndarray
    dtype : {"float32", "float16", "bfloat16"}
        Element type in the file; values are rounded half to even.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    width = _STORAGE[DTYPES[dtype]].itemsize
    for name, values in tensors.items():
        end = offset + values.size * width
        header[name] = {
            "dtype": DTYPES[dtype],
            "shape": list(values.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the data start on a multiple of 8
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            file.write(_stored(values, dtype))
