"""Load and save a Hugging Face checkpoint folder: ``config.json`` and safetensors files.

Files are untrusted: names, shapes and byte ranges are checked against the configuration before
anything is allocated, and every failure is a `CheckpointError` with the file and the reason.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from servespec.reference.contracts import CheckpointError, ConfigError, ModelConfig
from servespec.reference.models.hf_config import read_config, to_json
from servespec.reference.models.parameters import check_weights, parameter_shapes
from servespec.reference.models.tensor_file import (
    DTYPES,
    LARGEST,
    StoredTensor,
    read_header,
    read_tensor,
    write_file,
)

__all__ = ["load", "save"]

Weights = Mapping[str, npt.NDArray[np.float32]]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def _ignored(name: str) -> bool:
    """Whether a parameter belongs to a part that a text model leaves out (drafter, vision)."""
    return name.startswith(("mtp.", "model.mtp.", "model.visual.", "visual."))


def _canonical(name: str) -> str:
    """Return the name in a text-only checkpoint; a multimodal one has a level more."""
    return name.replace("model.language_model.", "model.", 1)


def _shards(index: Path) -> dict[str, str]:
    try:
        mapping = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: not a JSON object with a weight_map") from error
    if not isinstance(mapping, dict):
        raise CheckpointError(f"{index}: weight_map is not an object")
    for name, file in mapping.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index}: {name!r} is in {file!r}: must be a plain file name")
    return mapping


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Find every tensor that may matter, by its text-only name."""
    index = folder / _INDEX
    mapping = _shards(index) if index.exists() else None
    files = [_SINGLE] if mapping is None else sorted(set(mapping.values()))
    if mapping is None and not (folder / _SINGLE).exists():
        raise CheckpointError(f"{folder}: holds neither {_SINGLE} nor {_INDEX}")
    found: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in read_header(folder / file):
            if mapping is not None and mapping.get(tensor.name) != file:
                raise CheckpointError(
                    f"{tensor.path}: tensor {tensor.name!r} is not listed there by {_INDEX}"
                )
            name = _canonical(tensor.name)
            if name in found:
                raise CheckpointError(f"{tensor.path}: tensor {name!r} occurs twice")
            found[name] = tensor
    return found


def load(path: str | os.PathLike[str]) -> tuple[ModelConfig, Weights]:
    """Read a dense Qwen3.5 text model, alone or inside a multimodal checkpoint.

    Parameters
    ----------
    path : path-like
        Folder with ``config.json`` and ``model.safetensors``, or shards with their index.
        Parameters of drafter (``mtp.``) and vision tower are left alone.

    Returns
    -------
    config : ModelConfig
    weights : mapping of str to numpy.ndarray
        Every parameter by its text-only name (`parameter_shapes`), float32, read-only; float16
        and bfloat16 convert exactly.

    Raises
    ------
    CheckpointError
        If a file is missing or broken, a parameter is missing, unknown, of the wrong shape or of
        an unknown type, or the model is of another kind.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    config = read_config(folder / "config.json")
    stored = _stored_tensors(folder)
    shapes = parameter_shapes(config)
    for name, tensor in stored.items():
        tied = name == "lm_head.weight" and config.tie_word_embeddings
        if name not in shapes and not _ignored(name) and not tied:
            raise CheckpointError(
                f"{tensor.path}: tensor {tensor.name!r} has no place in the model"
            )
    for name, shape in shapes.items():
        if name not in stored:
            raise CheckpointError(f"{folder}: tensor {name!r} is missing")
        if stored[name].shape != shape:
            raise CheckpointError(
                f"{stored[name].path}: tensor {stored[name].name!r} has shape"
                f" {stored[name].shape}: config.json asks for {shape}"
            )
    return config, MappingProxyType({name: read_tensor(stored[name]) for name in shapes})


def save(
    path: str | os.PathLike[str], config: ModelConfig, weights: Weights, dtype: str = "float32"
) -> None:
    """Write a folder that `load` and transformers read.

    The folder appears whole or not at all: it is written under another name and renamed.

    Parameters
    ----------
    path : path-like
        Folder to make; its parent must exist.
    config : ModelConfig
    weights : mapping of str to numpy.ndarray
        Exactly the parameters of `parameter_shapes`.
    dtype : {"float32", "float16", "bfloat16"}
        Element type to round to.

    Raises
    ------
    CheckpointError
        If the folder exists, the weights do not fit the configuration or the type, or writing
        fails.
    """
    folder = Path(path)
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype is {dtype!r}: must be one of {', '.join(DTYPES)}")
    try:
        check_weights(config, weights)
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    for name in weights:
        if not np.all(np.abs(weights[name]) <= LARGEST[dtype]):
            raise CheckpointError(f"{folder}: tensor {name!r} has values that {dtype} cannot hold")
    if folder.exists():
        raise CheckpointError(f"{folder}: exists already")
    draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        draft.mkdir()
        write_file(draft / _SINGLE, weights, dtype)
        (draft / "config.json").write_text(to_json(config, dtype), encoding="utf-8")
        draft.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
