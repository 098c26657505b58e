"""Checkpoints written by transformers and by us, whole and broken in every way."""

import json
import pickle
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)

from servespec.reference.contracts import CheckpointError
from servespec.reference.models import checkpoint, tiny
from servespec.reference.models.hf_config import read_config
from servespec.reference.models.parameters import parameter_shapes

CONFIG = tiny.config(vocab_size=32, layer_types=("linear_attention", "full_attention"))
WEIGHTS = tiny.weights(CONFIG, 3)


def transformers_config(config=CONFIG):
    return Qwen3_5TextConfig(**json.loads(checkpoint.to_json(config, "float32")))


def transformers_model(dtype=torch.float32, **changes):
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(transformers_config(tiny.config(**changes))).to(dtype)


@pytest.fixture
def folder(tmp_path):
    checkpoint.save(tmp_path / "model", CONFIG, WEIGHTS)
    return tmp_path / "model"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"layer_types": ("full_attention", "linear_attention")},
        {"linear_conv_kernel_dim": 3, "linear_num_value_heads": 2, "num_key_value_heads": 4},
    ],
)
def test_parameters_are_transformers(changes):
    config = tiny.config(**changes)
    model = Qwen3_5ForCausalLM(transformers_config(config))
    theirs = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        theirs.pop("lm_head.weight")
    assert dict(parameter_shapes(config)) == theirs


def test_the_tiny_model_is_the_same_everywhere():
    config = tiny.config()
    weights = tiny.weights(config, 0)
    assert weights["model.embed_tokens.weight"][0, :3] == pytest.approx(
        np.random.Generator(np.random.PCG64(0)).standard_normal(3), rel=1e-7
    )
    assert all(value.dtype == np.float32 for value in weights.values())
    assert not any(value.flags.writeable for value in weights.values())
    again = tiny.weights(config, 0)
    assert all(np.array_equal(weights[name], again[name]) for name in weights)
    other = tiny.weights(config, 1)
    assert not any(np.array_equal(weights[name], other[name]) for name in weights)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_save_and_load(tmp_path, dtype):
    checkpoint.save(tmp_path / "model", CONFIG, WEIGHTS, dtype)
    config, weights = checkpoint.load(tmp_path / "model")
    assert config == CONFIG
    assert list(weights) == list(WEIGHTS)
    for name, value in weights.items():
        expected = torch.tensor(WEIGHTS[name]).to(getattr(torch, dtype)).float().numpy()
        assert np.array_equal(value, expected), name
        assert value.dtype == np.float32
        assert not value.flags.writeable
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "no temporary folder is left"


def test_bfloat16_rounds_half_to_even(tmp_path):
    weights = dict(WEIGHTS)
    halves = np.arange(64, dtype=np.float32) / 2**8 + 1  # every other value is halfway
    weights["model.norm.weight"] = -halves
    checkpoint.save(tmp_path / "model", CONFIG, weights, "bfloat16")
    loaded = checkpoint.load(tmp_path / "model")[1]["model.norm.weight"]
    assert np.array_equal(loaded, -torch.tensor(halves).bfloat16().float().numpy())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("sharded", [False, True])
def test_loads_what_transformers_saves(tmp_path, dtype, sharded):
    model = transformers_model(getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size="200KB" if sharded else "5GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    config, weights = checkpoint.load(tmp_path)
    assert config == tiny.config()
    for name, value in model.state_dict().items():
        assert np.array_equal(weights[name], value.float().numpy()), name


def test_loads_tied_embeddings_of_transformers(tmp_path):
    model = transformers_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    config, weights = checkpoint.load(tmp_path)
    assert config.tie_word_embeddings
    assert "lm_head.weight" not in weights


@pytest.mark.parametrize("tied", [False, True])
def test_loads_the_text_part_of_a_multimodal_checkpoint(tmp_path, tied):
    torch.manual_seed(0)
    config = Qwen3_5Config(
        tie_word_embeddings=tied,
        text_config=transformers_config().to_dict(),
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 16,
            "out_hidden_size": 64,
        },
    )
    model = Qwen3_5ForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in stored)
    assert any(name.startswith("model.language_model.") for name in stored)
    stored["mtp.fc.weight"] = np.ones(3, np.float32)
    save_file(stored, tmp_path / "model.safetensors")
    ours, weights = checkpoint.load(tmp_path)
    assert ours == replace(CONFIG, tie_word_embeddings=tied)
    assert set(WEIGHTS) - set(weights) == ({"lm_head.weight"} if tied else set())
    assert ("lm_head.weight" in stored) != tied
    language = model.model.language_model.state_dict()
    for name, value in language.items():
        assert np.array_equal(weights[f"model.{name}"], value.numpy()), name


def test_defaults_are_transformers(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "qwen3_5_text"}')
    ours, theirs = read_config(path), Qwen3_5TextConfig()
    assert list(ours.layer_types) == theirs.layer_types
    assert ours.rope.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope.partial_rotary_factor == theirs.rope_parameters["partial_rotary_factor"]
    for name in ("vocab_size", "hidden_size", "linear_value_head_dim", "rms_norm_eps", "head_dim"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_older_spellings_of_the_rotary_fields(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "qwen3_5_text",
                "rope_theta": 5e6,
                "partial_rotary_factor": 0.5,
                "full_attention_interval": 2,
                "num_hidden_layers": 2,
            }
        )
    )
    config = read_config(path)
    assert config.rope.rope_theta == 5e6
    assert config.rotary_dim == 128
    assert config.layer_types == ("linear_attention", "full_attention")


def change_config(folder, **changes):
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def change_tensors(folder, **changes):
    path = folder / "model.safetensors"
    tensors = load_file(path) | {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in tensors.items() if value is not None}, path)


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def shards(folder, mapping):
    (folder / "model.safetensors.index.json").write_text(json.dumps(mapping))


CONFIG_FAULTS = {
    "model_type is 'llama': must be one of qwen3_5": {"model_type": "llama"},
    "model_type is None": {"model_type": None},
    "hidden_size is 'big': must be an integer": {"hidden_size": "big"},
    "hidden_size is True: must be an integer": {"hidden_size": True},
    "hidden_size is 0: must be an integer in [1, 16777216]": {"hidden_size": 0},
    "max_position_embeddings is 1208925819614629174706176": {"max_position_embeddings": 2**80},
    "partial_rotary_factor is 0.25: must be such that head_dim = 6": {"head_dim": 6},
    "rms_norm_eps is -1.0: must be positive": {"rms_norm_eps": -1},
    "rms_norm_eps is nan: must be a finite number": {"rms_norm_eps": float("nan")},
    "rms_norm_eps is inf: must be a finite number": {"rms_norm_eps": float("inf")},
    "layer_types is 'sliding_attention'": {"layer_types": ["sliding_attention"] * 2},
    "layer_types is 5: must be a list": {"layer_types": 5},
    "num_hidden_layers is 3: must be 2": {"num_hidden_layers": 3},
    "num_hidden_layers is 1000000: must be in": {
        "layer_types": None,
        "num_hidden_layers": 10**6,
    },
    "full_attention_interval is 0": {"layer_types": None, "full_attention_interval": 0},
    "hidden_act is 'gelu': must be 'silu'": {"hidden_act": "gelu"},
    "attention_bias is True": {"attention_bias": True},
    "tie_word_embeddings is 1: must be true or false": {"tie_word_embeddings": 1},
    "rope_parameters is 3: must be an object": {"rope_parameters": 3},
    "rope_type is 'yarn'": {"rope_parameters": {"rope_type": "yarn"}},
    "mrope_section is 'ab'": {"rope_parameters": {"mrope_section": "ab"}},
    "text_config is 7: must be an object": {"text_config": 7},
    "tensor 'model.embed_tokens.weight' has shape (32, 64): config.json asks for (33, 64)": {
        "vocab_size": 33
    },
}


@pytest.mark.parametrize("message", CONFIG_FAULTS)
def test_bad_configurations(folder, message):
    change_config(folder, **CONFIG_FAULTS[message])
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(folder)
    text = str(caught.value)
    assert message in text
    assert str(folder) in text
    assert "\n" not in text
    assert len(text) < 400


FAULTS = {
    "no such folder": lambda f: shutil.rmtree(f),
    "config.json: cannot be read: No such file": lambda f: (f / "config.json").unlink(),
    "config.json: not valid JSON": lambda f: cut(f / "config.json", 40),
    "config.json: not a JSON object": lambda f: (f / "config.json").write_text("[1]"),
    "config.json: more than": lambda f: (f / "config.json").write_text(" " * 17_000_000),
    "config.json: not valid JSON: maximum recursion": lambda f: (f / "config.json").write_text(
        "[" * 100_000
    ),
    "config.json: not valid JSON: 'utf-8'": lambda f: (f / "config.json").write_bytes(b"\xff{}"),
    "holds neither model.safetensors nor": lambda f: (f / "model.safetensors").unlink(),
    "model.safetensors: not a valid safetensors file": lambda f: cut(f / "model.safetensors", 5000),
    "not a valid safetensors file: Error while deserializing header": lambda f: cut(
        f / "model.safetensors", 3
    ),
    "not a valid safetensors": lambda f: (f / "model.safetensors").write_bytes(
        pickle.dumps({"model.norm.weight": [1.0]})
    ),
    "safetensors file: Error while": lambda f: (f / "model.safetensors").write_bytes(
        (1 << 62).to_bytes(8, "little") + b"{}"
    ),
    "tensor 'model.norm.weight' is missing": lambda f: change_tensors(f, model__norm__weight=None),
    "tensor 'model.norm.weight' has shape (3,): config.json asks for (64,)": lambda f: (
        change_tensors(f, model__norm__weight=np.ones(3, np.float32))
    ),
    "tensor 'model.norm.weight' has dtype I64: must be one of F32, F16, BF16": lambda f: (
        change_tensors(f, model__norm__weight=np.ones(64, np.int64))
    ),
    "tensor 'model.norm.bias' has no place in the model": lambda f: change_tensors(
        f, model__norm__bias=np.ones(3, np.float32)
    ),
    "tensor 'model.norm.weight' occurs twice": lambda f: change_tensors(
        f, model__language_model__norm__weight=np.ones(64, np.float32)
    ),
    "index.json: not a JSON object with a weight_map": lambda f: shards(f, [1]),
    "index.json: weight_map is not an object": lambda f: shards(f, {"weight_map": 3}),
    "is in '../model/model.safetensors': must be a plain file name": lambda f: shards(
        f, {"weight_map": {"model.norm.weight": "../model/model.safetensors"}}
    ),
    "is in 7: must be": lambda f: shards(f, {"weight_map": {"model.norm.weight": 7}}),
    "b.safetensors: cannot be read: No such file": lambda f: shards(
        f, {"weight_map": {"model.norm.weight": "b.safetensors"}}
    ),
    "is not listed there by model.safetensors.index.json": lambda f: shards(
        f, {"weight_map": {"model.norm.weight": "model.safetensors"}}
    ),
}


@pytest.mark.parametrize("message", FAULTS)
def test_broken_folders(folder, message):
    FAULTS[message](folder)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(folder)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_cut_of_a_file_is_an_error(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for size in [*range(0, 64, 7), 2000, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            checkpoint.load(folder)


def test_save_refuses(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoint.save(tmp_path / "there", CONFIG, WEIGHTS)
    with pytest.raises(CheckpointError, match="cannot be written: No such file"):
        checkpoint.save(tmp_path / "no" / "parent", CONFIG, WEIGHTS)
    with pytest.raises(CheckpointError, match="dtype is 'int8': must be one of float32"):
        checkpoint.save(tmp_path / "model", CONFIG, WEIGHTS, "int8")
    for name, value, message in [
        ("model.norm.weight", np.ones(3, np.float32), r"is \(3,\): must be \(64,\)"),
        ("model.norm.weight", np.full(64, 1e5, np.float32), "float16 cannot hold"),
        ("model.norm.weight", np.full(64, np.nan, np.float32), "float16 cannot hold"),
        ("model.norm.bias", np.ones(3, np.float32), "must be a parameter of the model"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            checkpoint.save(tmp_path / "model", CONFIG, dict(WEIGHTS) | {name: value}, "float16")
    assert [path.name for path in tmp_path.iterdir()] == ["there"], (
        "a failure leaves nothing behind"
    )


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "to_json", fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpoint.save(tmp_path / "model", CONFIG, WEIGHTS)
    assert not list(tmp_path.iterdir())
