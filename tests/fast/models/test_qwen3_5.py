"""The whole model against transformers in float32, however a sequence is cut into steps."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from servespec.conformance.checks.bounds import logits_bound
from servespec.fast.engine import Engine
from servespec.fast.models import checkpoint
from servespec.fast.models.qwen3_5 import Qwen3_5
from servespec.reference.contracts import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    Request,
    SamplingParams,
    SchedulerConfig,
    gdn_groups_first,
)


def config(model, **changes) -> EngineConfig:
    scheduler = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512}
    cache = {"num_gpu_blocks": 200, "block_size": 16}
    for name, value in changes.items():
        (scheduler if name in scheduler or name.startswith("long") else cache)[name] = value
    return EngineConfig(
        scheduler=SchedulerConfig(**scheduler),
        cache=CacheConfig(**cache, groups=gdn_groups_first(model.layer_types)),
        keep_logits=True,
    )


def poisoned(model, weights, engine_config, dtype="float32") -> Engine:
    """An engine whose memory holds NaN wherever nothing was written."""
    engine = Engine(model, weights, engine_config, dtype)
    for pages in engine.memory.pages:
        pages[:-1].fill_(0xFF)
    return engine


def run(engine: Engine, sequences: list[list[int]], prompts: list[int]):
    """Feed sequences, each its first tokens as the prompt and the others as if sampled.

    Returns, for every sequence, its logits by position of the token they belong to.
    """
    got: list[dict[int, np.ndarray]] = [{} for _ in sequences]
    for index, (tokens, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        engine.add_request(
            Request(
                request_id=str(index),
                prompt_token_ids=tuple(tokens[:prompt]),
                sampling_params=SamplingParams(max_tokens=len(tokens) - prompt + 1),
            )
        )
    fed = dict(enumerate(prompts))
    while engine.has_unfinished_requests():
        forced = {str(i): (s[fed[i]] if fed[i] < len(s) else 0,) for i, s in enumerate(sequences)}
        record = engine.step(forced)
        assert record.batch is not None
        assert record.logits is not None
        assert record.logits.dtype == np.float32
        for row, req_id in enumerate(record.batch.req_ids):
            got[int(req_id)][record.batch.seq_lens[row] - 1] = record.logits[row]
        for req_id in record.sampled_token_ids:
            fed[int(req_id)] += 1
    return got


def sequences(rng, lengths: list[int]) -> list[list[int]]:
    return [rng.integers(0, 160, length).tolist() for length in lengths]


CUTS = {
    "whole prompts": {"max_num_batched_tokens": 512},
    "chunks of a shared budget": {"max_num_batched_tokens": 37},
    "chunks of five": {"long_prefill_token_threshold": 5},
    "pages of one token": {"block_size": 1, "num_gpu_blocks": 1000},
    "pages that cover a state": {"block_size": 64},
    "kernel blocks": {"block_size": 48, "kernel_block_size": 16},
    "aligned states": {"mamba_cache_mode": "align", "enable_prefix_caching": True},
}


@pytest.mark.parametrize("cut", CUTS)
def test_logits_are_those_of_transformers(witness, cut):
    model, weights = checkpoint.load(witness.folder)
    rng = np.random.default_rng(0)
    lengths, prompts = [1, 40, 90, 171, 12, 66], [1, 36, 60, 140, 3, 64]
    tokens = sequences(rng, lengths)
    got = run(poisoned(model, weights, config(model, **CUTS[cut])), tokens, prompts)
    worst, compared = 0.0, 0
    for sequence, prompt, ours in zip(tokens, prompts, got, strict=True):
        expected = witness.logits(sequence)
        assert set(ours) >= set(range(prompt - 1, len(sequence)))
        for position, logits in ours.items():
            if position < len(sequence):
                # Both are float32, so both may be off from the exact value by the bound.
                bound = 2 * logits_bound(expected[position], model, "float32", position + 1)
                worst = max(worst, float(np.abs(logits - expected[position]).max()) / bound)
                compared += 1
    assert worst <= 1.0
    assert compared > 70


def rms(errors: list[np.ndarray]) -> float:
    return float(np.sqrt(np.mean(np.square(errors))))


def test_bfloat16_errs_no_more_than_transformers_does(witness):
    """Both round the same products to bfloat16, so their errors are draws of one size.

    Ours keeps the convolution, the norms and the recurrence in float32 where transformers rounds
    between them, so it should err less; a factor of 1.5 covers the chance of few independent
    rows. A fault would be as large as the logits, twenty times that.
    """
    model, weights = checkpoint.load(witness.folder)
    tokens, prompts = sequences(np.random.default_rng(1), [150, 20, 100, 60]), [120, 9, 50, 33]
    rounded = {name: tensor.bfloat16() for name, tensor in weights.items()}
    exact = {name: tensor.float() for name, tensor in rounded.items()}
    engine = poisoned(model, rounded, config(model), "bfloat16")
    assert engine.memory.kv(3).key.dtype == torch.bfloat16
    assert engine.memory.gdn(0).ssm.dtype == torch.float32
    # Float32 on the same rounded weights, for which transformers vouches above.
    wide = run(poisoned(model, exact, config(model)), tokens, prompts)
    narrow = run(engine, tokens, prompts)
    theirs = dataclasses.replace(witness, model=copy.deepcopy(witness.model).bfloat16())
    ours_off, theirs_off = [], []
    for sequence, ours, expected in zip(tokens, narrow, wide, strict=True):
        witnessed = theirs.logits(sequence)
        for position in set(expected) & set(range(len(sequence))):
            ours_off.append(ours[position] - expected[position])
            theirs_off.append(witnessed[position] - expected[position])
    assert len(ours_off) > 100
    assert 1e-3 < rms(ours_off) <= 1.5 * rms(theirs_off)


def test_weights_as_arrays_and_tied_embeddings(build_witness):
    tied = build_witness(tie_word_embeddings=True, num_hidden_layers=4)
    model, weights = checkpoint.load(tied.folder)
    assert model.tie_word_embeddings
    arrays = {name: tensor.numpy() for name, tensor in weights.items()}
    for array in arrays.values():
        array.setflags(write=False)
    tokens = sequences(np.random.default_rng(2), [30])
    (got,) = run(poisoned(model, arrays, config(model)), tokens, [30])
    expected = tied.logits(tokens[0])[29]
    bound = 2 * logits_bound(expected, model, "float32", 30)
    assert float(np.abs(got[29] - expected).max()) <= bound


@pytest.mark.parametrize("only", ["linear_attention", "full_attention"])
def test_models_of_one_layer_type(build_witness, only):
    built = build_witness(layer_types=[only] * 2, num_hidden_layers=2)
    model, weights = checkpoint.load(built.folder)
    tokens = sequences(np.random.default_rng(3), [75, 8])
    got = run(poisoned(model, weights, config(model)), tokens, [70, 8])
    for sequence, ours in zip(tokens, got, strict=True):
        expected = built.logits(sequence)
        for position in set(ours) & set(range(len(sequence))):
            bound = 2 * logits_bound(expected[position], model, "float32", position + 1)
            assert float(np.abs(ours[position] - expected[position]).max()) <= bound


def test_parameters_that_do_not_fit(witness):
    model, weights = checkpoint.load(witness.folder)
    name = "model.layers.1.linear_attn.A_log"
    with pytest.raises(ConfigError, match=r"A_log'\] is None: must be there, of shape \(4,\)"):
        Qwen3_5(model, {n: w for n, w in weights.items() if n != name})
    with pytest.raises(ConfigError, match=r"shape of weights\['model.embed_tokens.weight'\]"):
        Qwen3_5(dataclasses.replace(model, vocab_size=161), weights)
