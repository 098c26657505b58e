"""Both engines under the legacy V0 scheduler: in step with each other, and the tokens of V1."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from servespec.conformance.adapters.fast import FastImplementation
from servespec.conformance.adapters.reference import ReferenceImplementation, tiny_weights
from servespec.conformance.cases.case import Case, TinyModel
from servespec.conformance.checks.engine import check
from servespec.conformance.verdicts import run_check
from servespec.conformance.workloads.workload import Workload, WorkloadStep
from servespec.fast.engine import Engine
from servespec.reference import engine as reference_engine
from servespec.reference.contracts import (
    CacheConfig,
    CacheTooSmallError,
    ConfigError,
    EngineConfig,
    FinishReason,
    RepetitionDetection,
    Request,
    RequestError,
    SamplingParams,
    gdn_groups_first,
)
from servespec.reference.contracts.v0 import V0CacheConfig, V0SchedulerConfig
from servespec.reference.contracts.v0_engine import v0_engine_config
from servespec.reference.models import tiny
from servespec.reference.models.qwen3_5 import from_weights

HYBRID = TinyModel(
    config=tiny.config(layer_types=("linear_attention", "linear_attention", "full_attention"))
)
DENSE = TinyModel(config=tiny.config(layer_types=("full_attention", "full_attention")), seed=1)
MAX_LEN = 40


def v0_config(model, gpu=14, cpu=40, **scheduler):
    policy = {"max_num_seqs": 6, "max_model_len": MAX_LEN, "max_num_batched_tokens": 48}
    return v0_engine_config(
        model.config.layer_types,
        V0SchedulerConfig(**{**policy, **scheduler}),
        V0CacheConfig(num_gpu_blocks=gpu, num_cpu_blocks=cpu, block_size=4),
        keep_logits=True,
    )


def requests(seed, count=7):
    rng = np.random.default_rng(seed)
    return tuple(
        Request(
            request_id=f"r{index}",
            prompt_token_ids=tuple(rng.integers(0, 100, rng.integers(1, 24)).tolist()),
            sampling_params=SamplingParams(
                max_tokens=int(rng.integers(2, 16)),
                eos_token_id=int(rng.integers(0, 100)),
                stop_token_ids=tuple(rng.integers(0, 100, 3).tolist()),
            ),
            arrival_time=float(index),
        )
        for index in range(count)
    )


def workload(wanted, abort=()):
    steps = [WorkloadStep(add=wanted[:3]), WorkloadStep(), WorkloadStep(add=wanted[3:])]
    return Workload(steps=(*steps, WorkloadStep(abort=abort)), max_steps=400)


POLICIES = {
    "default, recompute": {},
    "default, swap": {"preemption_mode": "swap"},
    "chunked, recompute": {"enable_chunked_prefill": True, "max_num_batched_tokens": 9},
    "chunked, swap": {
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 24,
        "preemption_mode": "swap",
    },
    "chunked, aligned to 4": {
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 11,
        "chunk_alignment": 4,
    },
    # Not with swapping or chunks, at which it gives up sooner or later.
    "newer block manager": {"use_v2_block_manager": True},
}


@pytest.mark.parametrize("model", [HYBRID, DENSE], ids=["hybrid", "dense"])
@pytest.mark.parametrize("name", POLICIES)
def test_fast_and_reference_engines_agree_in_every_layer(name, model):
    counts = Counter()
    for seed in range(2):
        config = v0_config(model, **POLICIES[name])
        wanted = requests(seed)
        case = Case(suite="engine", config=config, workload=workload(wanted, ("r1",)), model=model)
        result = run_check(check, case, FastImplementation())
        assert result.divergence is None, str(result.divergence)
        counts.update(result.counts, steps=result.steps, tokens=result.tokens)
    print(name, dict(counts))
    assert counts["preemptions"] > 0
    assert counts["resumptions"] > 0
    assert (counts["block_copies"] > 0) == (config.v0.scheduler.preemption_mode == "swap")
    assert (counts["mixed_batches"] > 0) == config.v0.scheduler.enable_chunked_prefill


def served(engine, wanted):
    tokens = {request.request_id: () for request in wanted}
    reasons = {}
    preempted = 0
    for request in wanted:
        engine.add_request(request)
    for _ in range(400):
        if not engine.has_unfinished_requests():
            return tokens, reasons, preempted
        record = engine.step()
        preempted += len(record.scheduler_output.preempted_req_ids)
        for output in record.outputs:
            tokens[output.request_id] += output.new_token_ids
            reasons[output.request_id] = (output.finish_reason, output.stop_reason)
    raise AssertionError("the requests do not end")


@pytest.mark.parametrize("model", [HYBRID, DENSE], ids=["hybrid", "dense"])
@pytest.mark.parametrize("make", [ReferenceImplementation, FastImplementation])
def test_v0_gives_the_tokens_of_v1(make, model):
    weights = tiny_weights(model)
    wanted = requests(11)
    roomy = EngineConfig(
        scheduler=v0_config(model).scheduler,
        cache=CacheConfig(
            num_gpu_blocks=200, block_size=4, groups=gdn_groups_first(model.config.layer_types)
        ),
    )
    v1 = make().make_engine(model.config, weights, roomy)
    expected, reasons, _ = served(v1, wanted)
    assert {reason for reason, _ in reasons.values()} >= {FinishReason.LENGTH}
    fallen = 0
    for policy in POLICIES.values():
        engine = make().make_engine(model.config, weights, v0_config(model, **policy))
        tokens, ends, preempted = served(engine, wanted)
        assert tokens == expected
        assert ends == reasons
        fallen += preempted
    print(sum(map(len, expected.values())), "tokens,", fallen, "preemptions")
    assert fallen > len(POLICIES)


@pytest.mark.parametrize("make", [ReferenceImplementation, FastImplementation])
def test_the_length_limit_of_v0_is_one_token_further(make):
    config = v0_config(DENSE)
    engine = make().make_engine(DENSE.config, tiny_weights(DENSE), config)
    long = Request(
        request_id="a",
        prompt_token_ids=(5,) * 36,
        sampling_params=SamplingParams(max_tokens=100),
    )
    tokens, reasons, _ = served(engine, (long,))
    # V0 ends a sequence that is longer than 40: 36 of the prompt and 5 more.
    assert len(tokens["a"]) == 5
    assert reasons["a"] == (FinishReason.LENGTH, None)


@pytest.mark.parametrize("make", [ReferenceImplementation, FastImplementation])
def test_an_id_may_be_used_again_at_once(make):
    engine = make().make_engine(HYBRID.config, tiny_weights(HYBRID), v0_config(HYBRID))
    first, second = requests(3, 2)
    alone, _, _ = served(
        make().make_engine(HYBRID.config, tiny_weights(HYBRID), v0_config(HYBRID)), (second,)
    )
    engine.add_request(first)
    engine.step()
    engine.abort_requests((first.request_id, "unknown"))
    again = replace(second, request_id=first.request_id)
    tokens, _, _ = served(engine, (again,))
    assert tokens[first.request_id] == alone[second.request_id]


@pytest.mark.parametrize("make", [ReferenceImplementation, FastImplementation])
def test_a_request_that_v0_cannot_serve_is_refused(make):
    engine = make().make_engine(DENSE.config, tiny_weights(DENSE), v0_config(DENSE, gpu=6))
    params = SamplingParams(max_tokens=4)
    fits = Request(request_id="a", prompt_token_ids=(1,) * 16, sampling_params=params)
    engine.add_request(fits)  # 20 tokens in 5 blocks, and a free one
    with pytest.raises(CacheTooSmallError, match=r"'b'.*7 GPU blocks.*at most 6"):
        engine.add_request(replace(fits, request_id="b", prompt_token_ids=(1,) * 17))
    late = SamplingParams(max_tokens=6, min_tokens=6)
    endless = Request(request_id="d", prompt_token_ids=(1,) * 36, sampling_params=late)
    with pytest.raises(RequestError, match="min_tokens is 6: must be at most 5"):
        engine.add_request(endless)
    detection = RepetitionDetection(max_pattern_size=2)
    with pytest.raises(RequestError, match="repetition_detection"):
        engine.add_request(
            replace(
                fits,
                request_id="c",
                sampling_params=replace(params, repetition_detection=detection),
            )
        )


def test_generate_serves_prompts_through_preemption():
    prompts = [list(request.prompt_token_ids) for request in requests(5)]
    params = SamplingParams(max_tokens=12)
    for policy in POLICIES.values():
        config = v0_config(HYBRID, gpu=11, **policy)
        model = from_weights(HYBRID.config, tiny_weights(HYBRID))
        expected = reference_engine.generate(model, config, prompts, params)
        fast = Engine(HYBRID.config, tiny_weights(HYBRID), config)
        assert fast.generate(prompts, params, progress=False) == [list(t) for t in expected]
        assert {len(tokens) for tokens in expected} == {12}


def test_a_swapped_prefill_that_can_never_return_is_an_error_not_a_hang():
    policy = {
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 8,
        "preemption_mode": "swap",
    }
    # 1 and 6 blocks; the decode takes the last one, so the prefill, 4 tokens into its 24, is
    # swapped out. It would need 20 tokens at once to come back.
    config = v0_config(DENSE, gpu=8, **policy)
    prompts = [[1] * 4, [2] * 24]
    params = [SamplingParams(max_tokens=16), SamplingParams(max_tokens=2)]
    fast = Engine(DENSE.config, tiny_weights(DENSE), config)
    with pytest.raises(RequestError, match="nothing can be scheduled"):
        fast.generate(prompts, params, progress=False)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"scheduler": {"max_model_len": MAX_LEN}}, "SchedulerConfig.max_model_len"),
        ({"scheduler": {"max_num_seqs": 5}}, "SchedulerConfig.max_num_seqs"),
        ({"cache": {"num_gpu_blocks": 54}}, "CacheConfig.num_gpu_blocks"),
        ({"cache": {"block_size": 8}}, "CacheConfig.block_size"),
        ({"cache": {"enable_prefix_caching": True}}, "CacheConfig.enable_prefix_caching"),
        ({"cache": {"mamba_cache_mode": "align"}}, "CacheConfig.mamba_cache_mode"),
    ],
)
def test_an_engine_that_does_not_fit_v0_is_refused(change, field):
    config = v0_config(DENSE)
    changed = {part: replace(getattr(config, part), **fields) for part, fields in change.items()}
    with pytest.raises(ConfigError, match=field):
        replace(config, **changed)


@pytest.mark.parametrize(
    "change",
    [{"delay_factor": 1.0}, {"num_lookahead_slots": 2, "use_v2_block_manager": True}],
)
def test_an_engine_has_neither_a_clock_nor_a_drafter(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        v0_config(HYBRID, **change)
