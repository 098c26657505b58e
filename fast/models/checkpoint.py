"""Reading a Hugging Face checkpoint folder: ``config.json`` and safetensors files.

Everything in the folder is untrusted: shapes and dtypes are compared with the configuration
before a tensor is loaded, nothing outside the folder is opened, and every failure is a
`CheckpointError` that names the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from servespec.fast.models.hf_config import model_config
from servespec.fast.models.parameters import parameter_shapes
from servespec.reference.contracts import CheckpointError, ConfigError, ModelConfig

__all__ = ["load"]

_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_JSON_BYTES = 64 << 20
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Vision tower and multi-token prediction: not part of the text model.
_IGNORED = ("mtp.", "model.mtp.", "visual.", "model.visual.")


def load(path: str | Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Read a checkpoint folder.

    Parameters
    ----------
    path : str or Path
        Folder with ``config.json`` and either ``model.safetensors`` or an index and its shards.

    Returns
    -------
    tuple of (ModelConfig, dict of str to Tensor)
        Parameters by their names in the text model, in the dtype of the file.

    Raises
    ------
    CheckpointError
        Naming the file and what is wrong with it.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    document = _read_json(folder / _CONFIG)
    where = _locate(folder)
    try:
        config = model_config(document, max_layers=len(where))
    except ConfigError as error:
        raise CheckpointError(f"{folder / _CONFIG}: {error}") from None
    shapes = parameter_shapes(config)
    # Tied models are sometimes saved with the copy.
    unknown = sorted(where.keys() - shapes.keys() - {"lm_head.weight"})
    if unknown:
        file, name = where[unknown[0]]
        raise CheckpointError(f"{file}: parameter {name!r} is not part of the configured model")
    missing = sorted(shapes.keys() - where.keys())
    if missing:
        raise CheckpointError(f"{folder}: parameter {missing[0]!r} is in no file")
    return config, {
        name: tensor
        for file in dict.fromkeys(file for file, _ in where.values())
        for name, tensor in _read_tensors(
            file,
            {n: stored for n, (f, stored) in where.items() if f == file and n in shapes},
            shapes,
        ).items()
    }


def _read_json(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            text = stream.read(_MAX_JSON_BYTES + 1)
        document = json.loads(text) if len(text) <= _MAX_JSON_BYTES else None
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from None
    if len(text) > _MAX_JSON_BYTES:
        raise CheckpointError(f"{file}: more than {_MAX_JSON_BYTES} bytes")
    if not isinstance(document, dict):
        raise CheckpointError(f"{file}: a JSON {type(document).__name__}, not an object")
    return document


def _text_name(name: str) -> str | None:
    """Name in the text model, None if it is not part of it."""
    if name.startswith(_IGNORED):
        return None
    return name.replace("model.language_model.", "model.", 1)


def _locate(folder: Path) -> dict[str, tuple[Path, str]]:
    """File and stored name of every parameter of the text model."""
    index = folder / _INDEX
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index}: no object 'weight_map'")
        for shard in weight_map.values():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise CheckpointError(f"{index}: shard {shard!r} is not the name of a file")
        files = list(dict.fromkeys(weight_map.values()))
    else:
        files = [_SINGLE]
    where: dict[str, tuple[Path, str]] = {}
    for file_name in files:
        file = folder / file_name
        try:
            with safe_open(file, framework="pt") as stored:
                names = list(stored.keys())
        except (OSError, SafetensorError) as error:
            raise _unreadable(file, error) from None
        for stored_name in names:
            name = _text_name(stored_name)
            if name is None:
                continue
            if name in where:
                raise CheckpointError(
                    f"{file}: parameter {stored_name!r} is in {where[name][0].name} too"
                )
            where[name] = (file, stored_name)
    return where


def _unreadable(file: Path, error: Exception) -> CheckpointError:
    if not file.exists():
        return CheckpointError(f"{file}: no such file")
    return CheckpointError(f"{file}: not a readable safetensors file: {error}")


def _read_tensors(
    file: Path, names: dict[str, str], shapes: dict[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    tensors = {}
    try:
        with safe_open(file, framework="pt") as stored:
            for name, stored_name in names.items():
                header = stored.get_slice(stored_name)
                shape, dtype = tuple(header.get_shape()), header.get_dtype()
                if shape != shapes[name]:
                    raise CheckpointError(
                        f"{file}: parameter {stored_name!r} has shape {shape}, "
                        f"the configuration makes it {shapes[name]}"
                    )
                if dtype not in _DTYPES:
                    raise CheckpointError(
                        f"{file}: parameter {stored_name!r} is {dtype}, "
                        f"must be one of {', '.join(_DTYPES)}"
                    )
                tensors[name] = stored.get_tensor(stored_name)
    except (OSError, SafetensorError) as error:
        raise _unreadable(file, error) from None
    return tensors
