"""The engine: tokens of transformers whatever the schedule, records, errors."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from servespec.fast.engine import Engine, default_config
from servespec.fast.models import checkpoint
from servespec.reference.contracts import (
    CacheConfig,
    CacheTooSmallError,
    CheckpointError,
    ConfigError,
    DuplicateRequestError,
    EngineConfig,
    FinishReason,
    ModelConfig,
    Request,
    RequestError,
    SamplingParams,
    SchedulerConfig,
    SpeculativeConfig,
    gdn_groups_first,
)

LENGTHS = (1, 2, 3, 5, 16, 17, 40, 63, 64, 65, 100, 130)
NEW = 24


@dataclasses.dataclass(frozen=True)
class Model:
    config: ModelConfig
    weights: dict[str, torch.Tensor]
    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def model(witness) -> Model:
    """Prompts, and what transformers makes of them greedily.

    The argmax of a float32 run is another run's too if the margin exceeds the rounding, which for
    these models is below 1e-4: the smallest margin met is asserted, so that equal tokens are no
    accident.
    """
    config, weights = checkpoint.load(witness.folder)
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 160, length).tolist() for length in LENGTHS]
    # Prompts that begin alike, for prefix hits.
    prompts += [prompts[-1][:100] + rng.integers(0, 160, 7).tolist() for _ in range(3)]
    expected = [witness.greedy(prompt, NEW) for prompt in prompts]
    for prompt, tokens in zip(prompts, expected, strict=True):
        logits = np.sort(witness.logits(prompt + tokens)[len(prompt) - 1 : -1], axis=-1)
        assert float((logits[:, -1] - logits[:, -2]).min()) > 2e-4
    return Model(config, weights, witness.folder, prompts, expected)


def engine_config(model: Model, **changes: Any) -> EngineConfig:
    scheduler = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256}
    cache = {"num_gpu_blocks": 120, "block_size": 16}
    fields = {field.name for field in dataclasses.fields(SchedulerConfig)}
    for name, value in changes.items():
        (scheduler if name in fields else cache)[name] = value
    return EngineConfig(
        scheduler=SchedulerConfig(**scheduler),
        cache=CacheConfig(**cache, groups=gdn_groups_first(model.config.layer_types)),
    )


def make(model: Model, dtype: str = "float32", **changes: Any) -> Engine:
    engine = Engine(model.config, model.weights, engine_config(model, **changes), dtype)
    poison(engine)
    return engine


def poison(engine: Engine) -> None:
    for pages in engine.memory.pages:
        pages[:-1].fill_(0xFF)


def request(name: str, prompt: list[int], max_tokens: int = NEW, **more: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens, **more),
    )


SCHEDULES: dict[str, dict[str, Any]] = {
    "one after the other": {"max_num_seqs": 1, "max_num_batched_tokens": 256},
    "a small budget": {"max_num_batched_tokens": 11},
    "a budget of one": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "long chunks held back": {"long_prefill_token_threshold": 7},
    "whole prompts only": {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
    "a tiny pool": {"num_gpu_blocks": 30, "block_size": 8, "scheduler_reserve_full_isl": False},
    "aligned states": {"mamba_cache_mode": "align", "max_num_batched_tokens": 100},
    "prefix hits": {"mamba_cache_mode": "align", "enable_prefix_caching": True},
    "async": {"async_scheduling": True},
    "tokens as pages": {"block_size": 1, "num_gpu_blocks": 600},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_tokens_are_those_of_transformers(model, name):
    engine = make(model, **SCHEDULES[name])
    seen: collections.Counter[str] = collections.Counter()
    # A step a token takes long.
    prompts = model.prompts[:7] if name == "a budget of one" else model.prompts
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        engine.add_request(request(str(i), prompt))
    while engine.has_unfinished_requests():
        record = engine.step()
        plan = record.scheduler_output
        seen["preempted"] += len(plan.preempted_req_ids)
        seen["hit"] += sum(new.num_computed_tokens > 0 for new in plan.scheduled_new_reqs)
        if record.batch is not None:
            seen["chunks"] += sum(not sampled for sampled in record.batch.sampled)
            seen["mixed"] += {1} < set(record.batch.num_scheduled_tokens)
        for output in record.outputs:
            tokens[output.request_id] += output.new_token_ids
    assert list(tokens.values()) == model.expected[: len(prompts)]
    if name == "a tiny pool":
        assert seen["preempted"] > 3
    if name == "prefix hits":
        assert seen["hit"] >= 2
    if name in ("a small budget", "long chunks held back"):
        assert seen["chunks"] > 20
        assert seen["mixed"] > 5


def test_generate(model, capsys):
    engine = make(model, max_num_seqs=6)
    assert engine.generate(model.prompts, SamplingParams(max_tokens=NEW)) == model.expected
    # Blocks left by the first run hold the states and keys of other requests now.
    again = engine.generate(
        model.prompts[::-1], [SamplingParams(max_tokens=n) for n in range(1, 16)], progress=False
    )
    assert again == [e[:n] for e, n in zip(model.expected[::-1], range(1, 16), strict=True)]
    assert engine.generate([]) == []
    assert capsys.readouterr().out == ""
    assert engine.record


def test_a_checkpoint_with_all_defaults(model):
    engine = Engine.from_checkpoint(model.folder)
    cache = engine.config.cache
    # The smallest multiple of 16 tokens whose K and V (2 heads of 16, float32) cover a state of
    # 4 heads x 12 x 16 float32 and a window of 3 x 112.
    assert cache.block_size == 16 * -(-(4 * 4 * 12 * 16 + 4 * 3 * 112) // (16 * 2 * 2 * 16 * 4))
    assert engine.config.scheduler.max_model_len == 1024
    assert engine.generate(model.prompts, SamplingParams(max_tokens=NEW), False) == model.expected


def test_the_default_pool_takes_the_bytes_given_or_one_request(model):
    small, large = default_config(model.config, cache_bytes=0), default_config(model.config)
    groups = large.cache.groups
    blocks = -(-1024 // large.cache.block_size)
    full = sum(group.layer_type == "full_attention" for group in groups)
    assert small.cache.num_gpu_blocks == 1 + (len(groups) - full) + full * blocks
    engine = Engine(model.config, model.weights, large)
    size = sum(pages[:-1].numel() for pages in engine.memory.pages)
    assert 0.99 * 2**30 < size <= 2**30
    prompt = model.prompts[0] * 1020
    only = Engine(model.config, model.weights, small)
    assert len(only.generate([prompt], SamplingParams(max_tokens=4), False)[0]) == 4


def test_bfloat16_generates_through_every_schedule(model):
    """Rounding moves argmaxes, so tokens are compared on rounded logits of one engine only."""
    lengths = set()
    for name in ("a small budget", "a tiny pool", "prefix hits"):
        out = make(model, "bfloat16", **SCHEDULES[name]).generate(
            model.prompts, SamplingParams(max_tokens=NEW), False
        )
        lengths |= {len(tokens) for tokens in out}
        agree = [
            a == b
            for x, y in zip(out, model.expected, strict=True)
            for a, b in zip(x, y, strict=True)
        ]
        # A chance match would be one in 160; sequences part for good at the first near tie.
        assert np.mean(agree) > 0.3
    assert lengths == {NEW}


def test_records(model):
    engine = Engine(
        model.config,
        model.weights,
        dataclasses.replace(engine_config(model), keep_logits=True),
    )
    prompt, expected = model.prompts[6], model.expected[6]
    engine.add_request(request("a", prompt, 2))
    first = engine.step()
    assert first.step == 0
    assert first.batch is not None
    assert first.batch.token_ids == tuple(prompt)
    assert first.logits is not None
    assert first.logits.shape == (1, model.config.vocab_size)
    assert first.logits.dtype == np.float32
    assert first.sampled_token_ids == {"a": (expected[0],)}
    second = engine.step()
    assert second.step == 1
    assert second.outputs[0].new_token_ids == (expected[1],)
    assert second.outputs[0].finish_reason is FinishReason.LENGTH
    empty = engine.step()
    assert empty.batch is None
    assert empty.logits is None
    assert empty.scheduler_output.finished_req_ids == {"a"}

    engine.record = False
    engine.add_request(request("b", prompt, 2))
    lean = engine.step()
    assert lean.batch is None
    assert lean.logits is None
    assert lean.sampled_token_ids == {"b": (expected[0],)}


def test_forced_tokens_go_on_while_the_record_names_the_own_choice(model):
    prompt, expected = model.prompts[5], model.expected[5]
    other = (expected[0] + 1) % 160
    engine = make(model)
    engine.add_request(request("a", prompt, 3))
    engine.add_request(request("b", prompt, 3))
    record = engine.step({"a": (other,)})
    assert record.sampled_token_ids == {"a": (expected[0],), "b": (expected[0],)}
    assert {o.request_id: o.new_token_ids for o in record.outputs} == {
        "a": (other,),
        "b": (expected[0],),
    }
    record = engine.step()
    assert record.batch is not None
    assert record.batch.token_ids == (other, expected[0])
    assert record.sampled_token_ids["b"] == (expected[1],)


def test_stop_tokens_and_aborts(model):
    engine = make(model)
    stop = model.expected[7][3]
    engine.add_request(request("a", model.prompts[7], eos_token_id=stop))
    engine.add_request(request("b", model.prompts[8]))
    outputs = []
    for step in range(8):
        if step == 2:
            engine.abort_requests(["b", "never seen"])
        outputs += engine.step().outputs
    assert not engine.has_unfinished_requests()
    tokens = [t for o in outputs if o.request_id == "a" for t in o.new_token_ids]
    assert tokens == model.expected[7][: model.expected[7].index(stop) + 1]
    assert [o.finish_reason for o in outputs if o.request_id == "a"][-1] is FinishReason.STOP
    snapshot = engine.snapshot()
    assert len(snapshot.free_blocks) == 119
    assert not snapshot.block_tables


def test_refused_requests(model):
    engine = make(model, num_gpu_blocks=12)
    engine.add_request(request("a", [1, 2, 3]))
    cases = [
        (request("a", [1]), DuplicateRequestError, "'a'"),
        (request("b", [1, 160]), RequestError, "holds 160: must be below vocab_size = 160"),
        (request("c", [1] * 256), RequestError, "max_model_len = 256"),
        (request("d", [1] * 200), CacheTooSmallError, "num_gpu_blocks = 12"),
    ]
    for refused, error, message in cases:
        with pytest.raises(error, match=message):
            engine.add_request(refused)
    with pytest.raises(ConfigError, match="at least one token"):
        request("e", [])
    assert set(engine.snapshot().num_computed_tokens) == {"a"}


def test_generate_refuses_all_or_nothing(model):
    engine = make(model)
    with pytest.raises(RequestError, match="vocab_size"):
        engine.generate([[1], [2, 999]])
    with pytest.raises(ConfigError, match=r"len\(sampling\) is 1"):
        engine.generate([[1], [2]], [SamplingParams()])
    assert not engine.has_unfinished_requests()
    engine.add_request(request("a", [1]))
    with pytest.raises(RequestError, match="other requests are unfinished"):
        engine.generate([[1]])


def test_an_interrupted_generate_leaves_an_idle_engine(model, monkeypatch):
    engine = make(model)
    forward, calls = engine.model.forward, []

    def interrupted(*args: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return forward(*args)

    monkeypatch.setattr(engine.model, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(model.prompts, SamplingParams(max_tokens=NEW), False)
    assert not engine.has_unfinished_requests()
    assert engine.record
    assert engine.generate(model.prompts, SamplingParams(max_tokens=NEW), False) == model.expected


def test_wrong_configurations(model, tmp_path):
    good = engine_config(model)
    with pytest.raises(ConfigError, match="dtype is 'float16': must be one of float32, bfloat16"):
        Engine(model.config, model.weights, good, dtype="float16")
    for device in ("abacus", "cuda:99", "meta:x"):
        with pytest.raises(ConfigError, match=f"device is '{device}'"):
            Engine(model.config, model.weights, good, device=device)
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    with pytest.raises(ConfigError, match="no drafter"):
        Engine(model.config, model.weights, dataclasses.replace(good, speculative=drafts))
    groups = good.cache.groups[:-1]
    few = dataclasses.replace(good, cache=dataclasses.replace(good.cache, groups=groups))
    with pytest.raises(ConfigError, match=r"CacheConfig\.groups"):
        Engine(model.config, model.weights, few)
    for changes, field in (
        ({"num_gpu_blocks": 10**12}, r"CacheConfig\.num_gpu_blocks is 1000000000000"),
        ({"max_model_len": 10**14}, r"SchedulerConfig\.max_model_len is 100000000000000"),
        ({"max_num_batched_tokens": 10**14}, r"max_num_batched_tokens is \(8, 100000000000000\)"),
    ):
        with pytest.raises(ConfigError, match=field):
            make(model, **changes)
    with pytest.raises(CheckpointError, match="no such folder"):
        Engine.from_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="dtype"):
        Engine.from_checkpoint(tmp_path / "nowhere", dtype="int8")


def test_a_model_that_gives_no_numbers(model):
    """A caller of `generate` is told; what a server makes of it is the server's affair."""
    norm = model.weights["model.norm.weight"] * float("nan")
    weights = {**model.weights, "model.norm.weight": norm}
    engine = Engine(model.config, weights, engine_config(model))
    with pytest.raises(ValueError, match="logits of row 0 contain NaN"):
        engine.generate([model.prompts[0]], progress=False)
    assert not engine.has_unfinished_requests()
    engine.add_request(request("a", model.prompts[0], 1))
    assert engine.step().outputs
