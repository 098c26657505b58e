"""Which kernels a model uses, and the whole model on them against the reference."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from servespec.conformance.checks.bounds import logits_bound
from servespec.fast.backends.base import Backend
from servespec.fast.backends.registry import choose
from servespec.fast.cache.memory import CacheMemory
from servespec.fast.engine import Engine
from servespec.fast.models import operations
from servespec.fast.models.operations import Operations, winning_kernels
from servespec.reference import engine as reference
from servespec.reference.contracts import (
    CacheConfig,
    EngineConfig,
    Request,
    RopeConfig,
    SamplingParams,
    SchedulerConfig,
    gdn_groups_first,
)
from servespec.reference.models import qwen3_5, tiny

MODEL = tiny.config(linear_value_head_dim=16)
RECURRENT = {"gated_delta_rule_decode", "gated_delta_rule_rows"}


class Nowhere:
    """A backend that nothing is launched on."""

    device = "cpu"
    num_programs = None

    def __init__(self, name: str, min_dot: int = 1) -> None:
        self.name = name
        self.min_dot = min_dot

    def launch(self, *arguments: object, **constants: object) -> None:
        raise AssertionError("launched")


def test_what_wins_on_a_device():
    cpu, cuda = Nowhere("cpu"), Nowhere("cuda")
    wide, narrow = (winning_kernels(cpu, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert narrow > wide >= RECURRENT
    # Where torch won every measurement.
    assert not narrow & {"varlen_attention", "chunk_gated_delta_rule", "gating", "write_kv"}
    assert winning_kernels(cuda, torch.float32) >= {"varlen_attention", "chunk_gated_delta_rule"}


def test_without_a_backend_there_is_torch():
    assert Operations(MODEL, torch.float32, None).kernels == {}


def test_a_backend_that_is_asked_for_and_missing(monkeypatch):
    monkeypatch.setenv("SERVESPEC_BACKEND", "no such")
    with pytest.raises(ValueError, match="unknown backend 'no such'"):
        Operations.on(torch.device("cpu"), MODEL, torch.float32)


@pytest.fixture
def backend() -> Backend:
    found = choose()
    if found is None:
        pytest.skip("no Triton here: make kernels runs these")
    return found


def test_head_sizes_that_kernels_cannot_take(backend):
    names = {"paged_attention_decode", "norm_rotary", *RECURRENT}
    odd_values = tiny.config(linear_value_head_dim=24)
    rope = RopeConfig(rope_theta=1e4, partial_rotary_factor=0.25)
    odd_heads = dataclasses.replace(MODEL, head_dim=24, rope=rope)
    assert set(Operations(MODEL, torch.float32, backend, names).kernels) == names
    for model, left_out in ((odd_values, RECURRENT), (odd_heads, {"paged_attention_decode"})):
        assert set(Operations(model, torch.float32, backend, names).kernels) == names - left_out
    small = dataclasses.replace(MODEL, linear_key_head_dim=8)
    device = Nowhere("cuda", min_dot=16)
    assert set(Operations(small, torch.float32, backend, names).kernels) == names
    assert set(Operations(small, torch.float32, device, names).kernels) == names - RECURRENT


def test_blocks_that_a_matrix_product_cannot_take_are_left_to_torch(backend):
    """On an accelerator 8 tokens are too few for a tile, so nothing is launched."""
    on_device = Operations(MODEL, torch.float32, Nowhere("cuda", min_dot=16))
    cache = CacheConfig(num_gpu_blocks=4, block_size=8, groups=gdn_groups_first(MODEL.layer_types))
    kv = CacheMemory(MODEL, cache, torch.float32).kv(3)
    assert "varlen_attention" in on_device.kernels
    assert on_device._paged("varlen_attention", kv) is None


@pytest.mark.parametrize("kernels", ["of a CPU", "of a device"])
@pytest.mark.parametrize(
    "cut",
    [
        {"max_num_batched_tokens": 256},
        {"max_num_batched_tokens": 13},
        {"block_size": 48, "kernel_block_size": 16},
        {"mamba_cache_mode": "align", "enable_prefix_caching": True},
    ],
    ids=["long rows", "short rows", "kernel blocks", "aligned"],
)
def test_the_model_on_kernels_is_the_reference(backend, monkeypatch, kernels, cut):
    """Each request's logits, within the bound that holds for any float32 implementation."""
    chosen = operations._CPU_BFLOAT16 if kernels == "of a CPU" else operations._DEVICE
    monkeypatch.setattr(operations, "winning_kernels", lambda *_: chosen)
    used: set[str] = set()

    def watched(backend_used: Backend) -> dict[str, object]:
        def watch(name, run):
            return lambda *args, **options: (used.add(name), run(*args, **options))[1]

        return {name: watch(name, run) for name, run in bound(backend_used).items()}

    bound = operations.operations
    monkeypatch.setattr(operations, "operations", watched)
    budget = cut.get("max_num_batched_tokens", 96)
    config = EngineConfig(
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget, max_model_len=256),
        cache=CacheConfig(
            num_gpu_blocks=80,
            groups=gdn_groups_first(MODEL.layer_types),
            **{name: value for name, value in cut.items() if name != "max_num_batched_tokens"},
        ),
        keep_logits=True,
    )
    weights = tiny.weights(MODEL, 3)
    ours = Engine(MODEL, weights, config)
    for pages in ours.memory.pages:
        pages[:-1].fill_(0xFF)
    state = reference.initial_state(qwen3_5.from_weights(MODEL, weights), config)
    random = np.random.default_rng(0)
    for number, length in enumerate((1, 20, 95, 150, 33)):
        request = Request(
            request_id=str(number),
            prompt_token_ids=tuple(random.integers(0, MODEL.vocab_size, length).tolist()),
            sampling_params=SamplingParams(max_tokens=4),
        )
        ours.add_request(request)
        state = reference.add_request(state, request)
    rows = mixed = 0
    while reference.has_unfinished_requests(state):
        state, expected = reference.step(state)
        got = ours.step(expected.sampled_token_ids)
        assert got.batch == expected.batch
        if expected.batch is None:
            continue
        counts = list(expected.scheduler_output.num_scheduled_tokens.values())
        mixed += 1 in counts and max(counts) > 1
        for row, logits in enumerate(expected.logits):
            limit = logits_bound(logits, MODEL, "float32", expected.batch.seq_lens[row])
            assert float(np.abs(got.logits[row] - logits).max()) <= limit
            rows += 1
    assert rows >= 20
    assert mixed > 0
    assert used == chosen
