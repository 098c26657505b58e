"""Both packages read ``config.json`` alike: what one refuses, the other refuses too."""

from __future__ import annotations

import json

import pytest

from servespec.fast.models import checkpoint as fast
from servespec.reference.models import checkpoint as reference
from servespec.reference.models import tiny
from servespec.reference.models.hf_config import to_json

ODD = (None, "x", "", True, False, 0, 1, -1, 3, 1.5, 10**30, 2**31, float("nan"), [], [2, 1], {})
FIELDS = (
    "num_hidden_layers",
    "layer_types",
    "hidden_size",
    "head_dim",
    "num_key_value_heads",
    "linear_key_head_dim",
    "linear_conv_kernel_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "text_config",
    "hidden_act",
    "model_type",
)
# Read only where there are no rope_parameters, as transformers before 5 wrote them.
OLD = ("rope_scaling", "rope_theta", "partial_rotary_factor")
ROPE = ("rope_type", "rope_theta", "partial_rotary_factor", "mrope_section")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    config = tiny.config(layer_types=("linear_attention", "full_attention"))
    reference.save(path, config, tiny.weights(config, 0))
    return path


def both(folder, text: bytes):
    """What each loader makes of a configuration: a ModelConfig, or None if it refuses."""
    (folder / "config.json").write_bytes(text)
    answers = []
    for loader in (reference, fast):
        try:
            answers.append(loader.load(folder)[0])
        except ValueError:
            answers.append(None)
    return answers


@pytest.mark.parametrize("name", [*FIELDS, *(f"rope_parameters.{key}" for key in ROPE)])
def test_odd_values(folder, name):
    config = tiny.config(layer_types=("linear_attention", "full_attention"))
    original = json.loads(to_json(config, "float32"))
    outer, _, inner = name.rpartition(".")
    refused = 0
    absent = object()
    for value in (*ODD, absent):
        document = json.loads(json.dumps(original))
        place = document[outer] if outer else document
        if value is absent:
            place.pop(inner, None)
        else:
            place[inner] = value
        if name in OLD:
            document.pop("rope_parameters")
        ours, theirs = both(folder, json.dumps(document).encode())
        assert ours == theirs, (name, value)
        refused += ours is None
    assert refused > 0


def test_byte_order_mark(folder):
    config = tiny.config(layer_types=("linear_attention", "full_attention"))
    text = to_json(config, "float32").encode()
    assert both(folder, b"\xef\xbb\xbf" + text) == [config, config]
