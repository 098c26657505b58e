"""Reading checkpoint folders, sound and broken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from servespec.fast.models import checkpoint
from servespec.reference.contracts import CheckpointError


@pytest.fixture
def folder(witness, tmp_path: Path) -> Path:
    target = tmp_path / "model"
    shutil.copytree(witness.folder, target)
    return target


def edit(file: Path, **changes: Any) -> None:
    document = json.loads(file.read_text())
    for key, value in changes.items():
        if value is ...:
            del document[key]
        else:
            document[key] = value
    file.write_text(json.dumps(document))


def test_values_are_those_of_transformers(witness, folder):
    config, weights = checkpoint.load(folder)
    state = witness.model.state_dict()
    assert weights.keys() == state.keys()
    assert all(torch.equal(weights[name], state[name]) for name in state)
    theirs = witness.model.config
    for name in ("vocab_size", "hidden_size", "head_dim", "linear_value_head_dim", "rms_norm_eps"):
        assert getattr(config, name) == getattr(theirs, name)
    assert list(config.layer_types) == theirs.layer_types
    assert config.rope.rope_theta == theirs.rope_parameters["rope_theta"]
    assert config.rope.partial_rotary_factor == theirs.rope_parameters["partial_rotary_factor"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_are_kept(folder, dtype):
    file = folder / "model.safetensors"
    narrow = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    save_file(narrow, file)
    _, weights = checkpoint.load(folder)
    assert all(torch.equal(weights[name], narrow[name]) for name in narrow)


def test_shards(witness, tmp_path):
    witness.model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    _, weights = checkpoint.load(tmp_path)
    state = witness.model.state_dict()
    assert all(torch.equal(weights[name], state[name]) for name in state)


def test_multimodal_layout(folder):
    """Nested configuration, prefixed names, and parts that are not the text model's."""
    file = folder / "model.safetensors"
    plain = load_file(file)
    nested = {
        name.replace("model.", "model.language_model.", 1) if name != "lm_head.weight" else name: t
        for name, t in plain.items()
    }
    nested["model.visual.patch_embed.proj.weight"] = torch.zeros(2, 2)
    nested["mtp.fc.weight"] = torch.zeros(2, 2)
    save_file(nested, file)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "text_config": text, "vision_config": {}})
    )
    _, weights = checkpoint.load(folder)
    assert weights.keys() == plain.keys()
    assert all(torch.equal(weights[name], plain[name]) for name in plain)


def test_layer_pattern_and_rotary_defaults(folder):
    edit(folder / "config.json", layer_types=..., rope_parameters=None)
    config, _ = checkpoint.load(folder)
    kinds = ["linear_attention"] * 3 + ["full_attention", "linear_attention"]
    assert list(config.layer_types) == kinds
    # The defaults of Qwen3_5TextConfig.
    assert (config.rope.rope_theta, config.rope.partial_rotary_factor) == (1e4, 0.25)


def test_a_tied_model_saved_with_the_copy(folder):
    edit(folder / "config.json", tie_word_embeddings=True)
    config, weights = checkpoint.load(folder)
    assert config.tie_word_embeddings
    assert "lm_head.weight" not in weights


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "wrong kind": ({"hidden_size": "64"}, "hidden_size is '64'"),
    "boolean": ({"num_attention_heads": True}, "num_attention_heads is True"),
    "negative": ({"vocab_size": -5}, "vocab_size is -5"),
    "huge": ({"vocab_size": 10**15}, "vocab_size is 1000000000000000"),
    "another model": ({"model_type": "llama"}, "model_type is 'llama'"),
    "mixture of experts": ({"model_type": "qwen3_5_moe_text"}, "model_type"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "biases": ({"attention_bias": True}, "attention_bias is True"),
    "no layers": ({"layer_types": []}, "layer_types"),
    "unknown layer": ({"layer_types": ["mamba"] * 5}, "layer_types is 'mamba'"),
    "layers of no kind": ({"layer_types": 5}, "layer_types is 5"),
    "many names": ({"layer_types": ["full_attention"] * 1000}, "len(layer_types) is 1000"),
    "infinite": ({"rope_parameters": {"rope_theta": 1e400}}, "rope_theta is inf"),
    "many layers": ({"layer_types": ..., "num_hidden_layers": 10**7}, "num_hidden_layers"),
    "scaled rotary": ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
    "rotary of no kind": ({"rope_parameters": [1]}, "rope_parameters"),
    "heads do not divide": ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
    "epsilon": ({"rms_norm_eps": 0}, "rms_norm_eps"),
    "not a number": ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
    "nested nothing": ({"text_config": 3}, "text_config is 3"),
    "tied maybe": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configurations(folder, name):
    changes, message = BAD_CONFIGS[name]
    edit(folder / "config.json", **changes)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(folder)
    assert str(folder / "config.json") in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def broken(folder: Path, name: str) -> tuple[str, str]:
    """Break a folder; return the file and the reason that the error must name."""
    single, config = folder / "model.safetensors", folder / "config.json"
    index = folder / "model.safetensors.index.json"
    tensors = load_file(single)
    if name == "no folder":
        shutil.rmtree(folder)
        return str(folder), "no such folder"
    if name == "no config":
        config.unlink()
        return "config.json", "No such file"
    if name == "half a config":
        config.write_text(config.read_text()[:50])
        return "config.json", "not JSON"
    if name == "deep config":
        config.write_text("[" * 100_000)
        return "config.json", "not JSON"
    if name == "config is a list":
        config.write_text("[]")
        return "config.json", "list"
    if name == "config is not text":
        config.write_bytes(b"\xff\xfe\x00")
        return "config.json", "not JSON"
    if name == "no weights":
        single.unlink()
        return "model.safetensors", "no such file"
    if name == "half the weights":
        single.write_bytes(single.read_bytes()[: single.stat().st_size // 2])
        return "model.safetensors", "not a readable safetensors file"
    if name == "empty weights":
        single.write_bytes(b"")
        return "model.safetensors", "not a readable safetensors file"
    if name == "header claims the world":
        single.write_bytes((2**63).to_bytes(8, "little") + b"{}")
        return "model.safetensors", "not a readable safetensors file"
    if name == "missing parameter":
        del tensors["model.layers.2.linear_attn.A_log"]
        save_file(tensors, single)
        return "model", "parameter 'model.layers.2.linear_attn.A_log' is in no file"
    if name == "unknown parameter":
        tensors["model.layers.3.self_attn.q_proj.bias"] = torch.zeros(3)
        save_file(tensors, single)
        return "model.safetensors", "self_attn.q_proj.bias' is not part of"
    if name == "shape":
        tensors["model.norm.weight"] = torch.zeros(63)
        save_file(tensors, single)
        return "model.safetensors", "'model.norm.weight' has shape (63,)"
    if name == "dtype":
        tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.int64)
        save_file(tensors, single)
        return "model.safetensors", "'model.norm.weight' is I64"
    if name == "named twice":
        tensors["model.language_model.norm.weight"] = torch.zeros(64)
        save_file(tensors, single)
        return "model.safetensors", "norm.weight' is in"
    if name == "index without a map":
        index.write_text("{}")
        return "index.json", "weight_map"
    if name == "shard outside":
        index.write_text(json.dumps({"weight_map": {"x": "../other.safetensors"}}))
        return "index.json", "'../other.safetensors' is not the name of a file"
    if name == "shard is a list":
        index.write_text(json.dumps({"weight_map": {"x": [3]}}))
        return "index.json", "shard [3]"
    assert name == "shard missing"
    index.write_text(json.dumps({"weight_map": {"x": "other.safetensors"}}))
    return "other.safetensors", "no such file"


@pytest.mark.parametrize(
    "name",
    [
        "no folder",
        "no config",
        "half a config",
        "deep config",
        "config is a list",
        "config is not text",
        "no weights",
        "half the weights",
        "empty weights",
        "header claims the world",
        "missing parameter",
        "unknown parameter",
        "shape",
        "dtype",
        "named twice",
        "index without a map",
        "shard outside",
        "shard is a list",
        "shard missing",
    ],
)
def test_broken_folders(folder, name):
    file, reason = broken(folder, name)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(folder)
    assert file in str(caught.value)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_configuration_that_is_too_large(folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "_MAX_JSON_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"config\.json: more than 100 bytes"):
        checkpoint.load(folder)


def test_a_path_that_is_a_file(folder):
    with pytest.raises(CheckpointError, match="no such folder"):
        checkpoint.load(folder / "config.json")
