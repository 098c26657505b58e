"""No public function of numerics, memory, models and engine changes what it is given.

Arguments are passed writable, so that a write would succeed, and compared afterwards down to the
bytes; arrays in results must refuse writing.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import types
from collections.abc import Mapping

import numpy as np
import pytest

import servespec.reference.models
import servespec.reference.numerics
from servespec.reference import engine
from servespec.reference.cache import memory
from servespec.reference.contracts import (
    BlockCopy,
    CacheConfig,
    EngineConfig,
    Request,
    SamplingParams,
    SchedulerConfig,
    gdn_groups_first,
)
from servespec.reference.models import qwen3_5, tiny

random = np.random.default_rng(5)
CONFIG = tiny.config(layer_types=("linear_attention", "full_attention"), vocab_size=40)
ENGINE = EngineConfig(
    scheduler=SchedulerConfig(max_model_len=64, max_num_batched_tokens=8),
    cache=CacheConfig(num_gpu_blocks=30, block_size=4, groups=gdn_groups_first(CONFIG.layer_types)),
    keep_logits=True,
)
GDN, FULL = ENGINE.cache.groups
REQUEST = Request(request_id="x", prompt_token_ids=(1, 2, 3))


def draw(*shape):
    return random.standard_normal(shape)


def stepped():
    """An engine in the middle of its work."""
    state = engine.initial_state(qwen3_5.from_weights(CONFIG, tiny.weights(CONFIG, 0)), ENGINE)
    for name, length in (("a", 5), ("b", 11)):
        prompt = tuple(random.integers(0, 40, length).tolist())
        state = engine.add_request(state, Request(request_id=name, prompt_token_ids=prompt))
    return engine.step(state)


STATE, RECORD = stepped()
PAGE = (np.array([4, 5]), np.array([0, 1]), draw(2, 2, 32), draw(2, 2, 32))
HELD = memory.write_kv(memory.initial_memory((GDN, FULL), 4), 1, *PAGE)
GDN_STATE = memory.GdnState(0, draw(3, 160), draw(4, 24, 16), 2)
WITH_STATE = memory.write_states(HELD, {2: GDN_STATE})
DELTA = (draw(5, 2, 16), draw(5, 2, 16), draw(5, 4, 24), -np.abs(draw(5, 4)), draw(5, 4))

CALLS = {
    "numerics.arrays.frozen": [draw(3)],
    "numerics.activations.sigmoid": [draw(3)],
    "numerics.activations.silu": [draw(3)],
    "numerics.activations.softplus": [draw(3)],
    "numerics.norms.rms_norm": [draw(3, 4), draw(4), 1e-6],
    "numerics.norms.gated_rms_norm": [draw(3, 4), draw(3, 4), draw(4), 1e-6],
    "numerics.norms.l2_norm": [draw(3, 4)],
    "numerics.rotary.rotary_angles": [np.arange(12).reshape(3, 4), 8, 1e4, (2, 1, 1)],
    "numerics.rotary.apply_rotary": [draw(4, 2, 32), draw(4, 4)],
    "numerics.attention.attention": [draw(2, 4, 8), draw(5, 2, 8), draw(5, 2, 8), 0.3],
    "numerics.convolution.causal_convolution": [draw(5, 6), draw(6, 4), draw(3, 6)],
    "numerics.gated_delta_rule.gating": [draw(3, 4), draw(3, 4), draw(4), draw(4)],
    "numerics.gated_delta_rule.recurrent_gated_delta_rule": [*DELTA, draw(4, 24, 16)],
    "numerics.gated_delta_rule.chunked_gated_delta_rule": [*DELTA, draw(4, 24, 16), 2],
    "numerics.mlp.mlp": [draw(3, 4), draw(6, 4), draw(6, 4), draw(4, 6)],
    "numerics.sampling.greedy": [draw(3, 9)],
    "numerics.sampling.inverse_transform": [np.array([0.5, 0.25, 0.25]), 0.6],
    "numerics.sampling.sampling_probabilities": [draw(9), 0.7, 5, 0.9],
    "numerics.sampling.top_k": [draw(9), 4],
    "numerics.sampling.top_p": [np.array([0.5, 0.25, 0.25]), 0.6],
    "cache.memory.initial_memory": [(GDN, FULL), 4],
    "cache.memory.write_kv": [HELD, 1, *PAGE],
    "cache.memory.read_kv": [HELD, 1, [1], 2],
    "cache.memory.write_states": [HELD, {2: GDN_STATE}],
    "cache.memory.read_state": [WITH_STATE, 0, 2, 2],
    "cache.memory.zero_blocks": [WITH_STATE, [1]],
    "cache.memory.copy_blocks": [WITH_STATE, [BlockCopy(src_block_id=1, dst_block_id=3)]],
    "cache.memory.move_states": [WITH_STATE, GDN, {3: 2}],
    "models.tiny.config": [],
    "models.tiny.weights": [CONFIG, 0],
    "models.parameters.layer_shapes": [CONFIG, "full_attention"],
    "models.parameters.parameter_shapes": [CONFIG],
    "models.parameters.check_weights": [CONFIG, dict(tiny.weights(CONFIG, 0))],
    "models.hf_config.to_json": [CONFIG, "float32"],
    "models.qwen3_5.from_weights": [
        CONFIG,
        {name: value.copy() for name, value in tiny.weights(CONFIG, 0).items()},
    ],
    "models.qwen3_5.forward": [
        STATE.model,
        RECORD.batch,
        ENGINE.cache.groups,
        memory.initial_memory((GDN, FULL), 4),
    ],
    "engine.initial_state": [STATE.model, ENGINE],
    "engine.add_request": [STATE, REQUEST],
    "engine.step": [STATE, {"a": (3,)}],
    "engine.abort_requests": [STATE, ["a"]],
    "engine.has_unfinished_requests": [STATE],
    "engine.snapshot": [STATE],
    "engine.generate": [STATE.model, ENGINE, [[1, 2], [3]], SamplingParams(max_tokens=2)],
}
# Their own tests compare their arguments.
ELSEWHERE = ("numerics.bfloat16.", "numerics.int8_kv.", "numerics.layouts.")
# These read or write files; what they are given is compared in their own tests.
FILES = {
    "models.checkpoint.load",
    "models.checkpoint.save",
    "models.hf_config.read_config",
    "models.tensor_file.read_header",
    "models.tensor_file.read_tensor",
    "models.tensor_file.write_file",
}


def modules():
    for package in (servespec.reference.numerics, servespec.reference.models):
        for info in pkgutil.iter_modules(package.__path__):
            yield importlib.import_module(f"{package.__name__}.{info.name}")
    yield memory
    yield engine


def public_functions():
    return {
        f"{module.__name__.removeprefix('servespec.reference.')}.{name}": getattr(module, name)
        for module in modules()
        for name in module.__all__
        if inspect.isfunction(getattr(module, name))
    }


def fingerprint(value):
    """Everything a value holds, in a form that does not change with it."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes(), value.flags.writeable
    if dataclasses.is_dataclass(value):
        return tuple(fingerprint(getattr(value, f.name)) for f in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return tuple((key, fingerprint(entry)) for key, entry in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(fingerprint(entry) for entry in value)
    return repr(value)


def arrays(value, seen):
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, np.ndarray):
        yield value
    elif dataclasses.is_dataclass(value):
        for f in dataclasses.fields(value):
            yield from arrays(getattr(value, f.name), seen)
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from arrays(entry, seen)
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from arrays(entry, seen)


def test_every_public_function_is_listed():
    here = {name for name in public_functions() if not name.startswith(ELSEWHERE)}
    assert here == CALLS.keys() | FILES


@pytest.mark.parametrize("name", CALLS)
def test_leaves_its_arguments_alone(name):
    arguments = CALLS[name]
    before = fingerprint(arguments)
    result = public_functions()[name](*arguments)
    assert fingerprint(arguments) == before
    given = {id(array) for array in arrays(arguments, set())}
    for array in arrays(result, set()):
        assert id(array) in given or not array.flags.writeable
    assert not isinstance(result, Mapping) or isinstance(result, types.MappingProxyType)
    # A second call with the same arguments gives the same result.
    assert fingerprint(public_functions()[name](*arguments)) == fingerprint(result)
