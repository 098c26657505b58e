"""Whatever the schedule, the tokens of a request are the same; and what an engine refuses."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from servespec.reference import engine
from servespec.reference.contracts import (
    CacheConfig,
    CacheTooSmallError,
    ConfigError,
    DuplicateRequestError,
    EngineConfig,
    FinishReason,
    Quirks,
    Request,
    RequestError,
    SamplingParams,
    SchedulerConfig,
    SpeculativeConfig,
    gdn_groups_first,
)
from servespec.reference.models import tiny
from servespec.reference.models.qwen3_5 import from_weights

DENSE = ("full_attention",) * 3
random = np.random.default_rng(11)
PROMPTS = tuple(tuple(random.integers(0, 512, n).tolist()) for n in (1, 5, 23, 40))


@pytest.fixture(scope="module")
def hybrid():
    config = tiny.config(layer_types=("linear_attention",) * 2 + ("full_attention",))
    return from_weights(config, tiny.weights(config, 1))


@pytest.fixture(scope="module")
def dense():
    config = tiny.config(layer_types=DENSE)
    return from_weights(config, tiny.weights(config, 1))


def config(model, *, blocks=200, block_size=4, cache=None, **scheduler):
    return EngineConfig(
        scheduler=SchedulerConfig(**{"max_model_len": 128, **scheduler}),
        cache=CacheConfig(
            num_gpu_blocks=blocks,
            block_size=block_size,
            groups=gdn_groups_first(model.config.layer_types),
            **(cache or {}),
        ),
        keep_logits=True,
    )


def serve(model, settings, prompts=PROMPTS, max_tokens=6, arrivals=None):
    """Serve prompts that arrive before the given steps; tokens by prompt, records."""
    state = engine.initial_state(model, settings)
    waiting = [
        (
            arrivals[index] if arrivals else 0,
            Request(
                request_id=f"r{index}",
                prompt_token_ids=tuple(prompt),
                sampling_params=SamplingParams(max_tokens=max_tokens),
                arrival_time=float(index),
                priority=-index,
            ),
        )
        for index, prompt in enumerate(prompts)
    ]
    tokens = {request.request_id: () for _, request in waiting}
    records = []
    while waiting or engine.has_unfinished_requests(state):
        for entry in [entry for entry in waiting if entry[0] <= len(records)]:
            state = engine.add_request(state, entry[1])
            waiting.remove(entry)
        state, record = engine.step(state)
        records.append(record)
        for output in record.outputs:
            tokens[output.request_id] += output.new_token_ids
        assert len(records) < 2000
    return tuple(tokens.values()), records


def counts(records):
    """How often the interesting things happened."""
    found = Counter()
    for record in records:
        output = record.scheduler_output
        found["preempted"] += len(output.preempted_req_ids)
        found["resumed"] += len(output.scheduled_cached_reqs.resumed_req_ids)
        found["copies"] += len(output.kv_cache_block_copies)
        found["hits"] += sum(new.num_computed_tokens > 0 for new in output.scheduled_new_reqs)
        if record.batch is not None:
            found["split"] += record.batch.sampled.count(False)
            found["mixed"] += len(set(record.batch.num_scheduled_tokens)) > 1
            found["swaps"] += len(record.batch.swaps)
    return found


@pytest.fixture(scope="module")
def alone(hybrid):
    """Tokens of each prompt served by itself, whole."""
    tokens = tuple(serve(hybrid, config(hybrid), [prompt])[0][0] for prompt in PROMPTS)
    assert all(len(out) == 6 for out in tokens)
    assert len(set(sum(tokens, ()))) > 12, "outputs must vary"
    return tokens


def test_batched(hybrid, alone):
    tokens, records = serve(hybrid, config(hybrid), arrivals=(0, 1, 3, 4))
    assert tokens == alone
    assert counts(records)["mixed"] >= 3


def test_every_budget(hybrid, alone):
    found = Counter()
    for budget in range(1, sum(map(len, PROMPTS)) + 2):
        tokens, records = serve(hybrid, config(hybrid, max_num_batched_tokens=budget))
        assert tokens == alone, f"budget {budget}"
        found += counts(records)
    print(dict(found))
    assert found["split"] > 100
    assert found["swaps"] > 0


@pytest.mark.parametrize(
    "scheduler",
    [
        {"long_prefill_token_threshold": 3},
        {"policy": "priority", "max_num_seqs": 2},
        {"async_scheduling": True, "max_num_batched_tokens": 7},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
    ],
)
def test_scheduling_switches(hybrid, alone, scheduler):
    tokens, _ = serve(hybrid, config(hybrid, **scheduler), arrivals=(0, 1, 2, 3))
    assert tokens == alone


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_forced_preemption(hybrid, alone, policy):
    settings = config(hybrid, blocks=16, policy=policy, scheduler_reserve_full_isl=False)
    tokens, records = serve(hybrid, settings, arrivals=(0, 0, 1, 2))
    assert tokens == alone
    found = counts(records)
    print(dict(found))
    assert found["preempted"] > 0
    assert found["resumed"] > 0


def test_prefix_hits_of_a_dense_model(dense):
    shared = PROMPTS[3]
    prompts = (shared, (*shared[:30], 7, 8, 9), shared, (*shared, 5))
    settings = config(dense)
    cached = config(dense, cache={"enable_prefix_caching": True})
    expected = tuple(serve(dense, settings, [prompt])[0][0] for prompt in prompts)
    tokens, records = serve(dense, cached, prompts, arrivals=(0, 2, 3, 12))
    assert tokens == expected
    hits = {
        new.req_id: new.num_computed_tokens
        for record in records
        for new in record.scheduler_output.scheduled_new_reqs
    }
    # Whole blocks of 4, never the last token: 28 of 30 shared, 36 of 40, 40 of 41.
    assert hits == {"r0": 0, "r1": 28, "r2": 36, "r3": 40}


def test_prefix_hits_survive_preemption_and_eviction(dense):
    shared = PROMPTS[3]
    prompts = [(*shared[: 8 * n], n, n + 1, n + 2) for n in (1, 2, 3, 4, 2, 3)]
    expected = tuple(serve(dense, config(dense), [prompt])[0][0] for prompt in prompts)
    settings = config(
        dense,
        blocks=14,
        cache={"enable_prefix_caching": True},
        scheduler_reserve_full_isl=False,
        max_num_batched_tokens=24,
    )
    tokens, records = serve(dense, settings, prompts, arrivals=(0, 0, 0, 0, 30, 30))
    assert tokens == expected
    found = counts(records)
    print(dict(found))
    assert found["preempted"] > 0
    assert found["hits"] > 0


@pytest.mark.parametrize("unit", [None, 2])
@pytest.mark.parametrize("budget", [4, 16, 64])
def test_prefix_hits_of_a_hybrid_model(hybrid, unit, budget):
    """In mode ``align`` states move from block to block and are found again at boundaries."""
    shared = PROMPTS[3]
    prompts = (shared[:39], (*shared[:34], 7, 8, 9), shared, (*shared, 5, 6))
    expected = tuple(serve(hybrid, config(hybrid), [prompt])[0][0] for prompt in prompts)
    settings = config(
        hybrid,
        cache={
            "enable_prefix_caching": True,
            "mamba_cache_mode": "align",
            "prefix_match_unit": unit,
        },
        max_num_batched_tokens=budget,
    )
    tokens, records = serve(hybrid, settings, prompts, arrivals=(0, 20, 40, 60))
    assert tokens == expected
    found = counts(records)
    print(dict(found))
    assert found["hits"] > 0
    assert (found["copies"] > 0) == (unit is not None), "hits inside a block copy it"


def test_blocks_given_out_again_are_cleared(hybrid):
    """The zeroing list reaches the memory: a reused block holds this step's tokens only."""
    state = engine.initial_state(hybrid, config(hybrid, blocks=20))
    reused = 0
    for round_ in range(3):
        state = engine.add_request(
            state,
            Request(
                request_id=str(round_),
                prompt_token_ids=PROMPTS[3],
                sampling_params=SamplingParams(max_tokens=8),
            ),
        )
        while engine.has_unfinished_requests(state):
            before = state.memory.contents
            state, record = engine.step(state)
            for block in record.scheduler_output.new_block_ids_to_zero:
                for (_, at), page in state.memory.contents.items():
                    if at == block:
                        held = set(page.positions[page.positions >= 0].tolist())
                        assert held <= set(record.batch.positions)
                reused += any(at == block for _, at in before)
    print(f"{reused} blocks reused")
    assert reused > 10


def test_steps_are_pure(hybrid):
    """A state can be stepped again, or later, with the same result."""
    state = engine.initial_state(hybrid, config(hybrid, max_num_batched_tokens=9))
    for index, prompt in enumerate(PROMPTS):
        state = engine.add_request(state, Request(request_id=str(index), prompt_token_ids=prompt))
    states, records = [state], []
    for _ in range(12):
        state, record = engine.step(states[-1])
        states.append(state)
        records.append(record)
    for before, record in zip(states, records, strict=False):
        _, again = engine.step(before)
        assert again.scheduler_output == record.scheduler_output
        assert again.batch == record.batch
        assert again.sampled_token_ids == record.sampled_token_ids
        assert np.array_equal(again.logits, record.logits)
        assert not again.logits.flags.writeable


def test_records(hybrid):
    settings = config(hybrid)
    state = engine.initial_state(hybrid, settings)
    state = engine.add_request(state, Request(request_id="a", prompt_token_ids=PROMPTS[1]))
    state, first = engine.step(state)
    state, second = engine.step(state)
    assert (first.step, second.step) == (0, 1)
    assert first.logits.shape == (1, 512)
    assert first.sampled_token_ids == {"a": (int(first.logits[0].argmax()),)}
    assert second.batch.token_ids == first.sampled_token_ids["a"]
    without = replace(settings, keep_logits=False)
    state = engine.add_request(
        engine.initial_state(hybrid, without), Request(request_id="a", prompt_token_ids=(1,))
    )
    assert engine.step(state)[1].logits is None


def test_forced_tokens_go_on_while_the_record_keeps_the_choice(hybrid):
    state = engine.initial_state(hybrid, config(hybrid, max_num_batched_tokens=4))
    state = engine.add_request(state, Request(request_id="a", prompt_token_ids=PROMPTS[1]))
    state, record = engine.step(state, {"a": (17,)})
    assert record.sampled_token_ids == {}, "a chunk keeps no token, so nothing is forced"
    own = engine.step(state)[1]
    state, record = engine.step(state, {"a": (17,), "b": (3,)})
    assert record.sampled_token_ids == own.sampled_token_ids != {"a": (17,)}
    assert record.outputs[0].new_token_ids == (17,)
    _, record = engine.step(state)
    assert record.batch.token_ids == (17,)


def test_finishing_and_aborting(hybrid):
    state = engine.initial_state(hybrid, config(hybrid))
    for name, tokens in (("a", 2), ("b", 20)):
        state = engine.add_request(
            state,
            Request(
                request_id=name,
                prompt_token_ids=PROMPTS[1],
                sampling_params=SamplingParams(max_tokens=tokens),
            ),
        )
    state, _ = engine.step(state)
    state, record = engine.step(state)
    assert [output.finish_reason for output in record.outputs] == [FinishReason.LENGTH, None]
    state = engine.abort_requests(state, ["b", "unknown"])
    assert not engine.has_unfinished_requests(state)
    state, record = engine.step(state)
    assert record.batch is None
    assert record.outputs == ()
    assert record.scheduler_output.finished_req_ids == {"a", "b"}
    assert len(engine.snapshot(state).free_blocks) == 199
    # A finished id may be used again, with whatever its blocks held before.
    state = engine.add_request(state, Request(request_id="a", prompt_token_ids=PROMPTS[2]))
    expected = serve(hybrid, config(hybrid), [PROMPTS[2]])[0][0][0]
    assert engine.step(state)[1].sampled_token_ids == {"a": (expected,)}


def test_generate(hybrid, alone):
    assert engine.generate(hybrid, config(hybrid), PROMPTS, SamplingParams(max_tokens=6)) == alone
    assert engine.generate(hybrid, config(hybrid), (), SamplingParams()) == ()


def test_generate_does_not_hang(hybrid):
    """Under vLLM's rule a request with min_tokens beyond the model's length never ends."""
    sampling = SamplingParams(max_tokens=20, min_tokens=20)
    quirks = Quirks(min_tokens_outlive_model_len=True)
    settings = config(hybrid, max_model_len=8, quirks=quirks)
    with pytest.raises(RequestError, match="nothing can be scheduled any more"):
        engine.generate(hybrid, settings, [PROMPTS[1]], sampling)


def test_refusals(hybrid):
    state = engine.initial_state(hybrid, config(hybrid, blocks=5))
    state = engine.add_request(
        state,
        Request(
            request_id="a", prompt_token_ids=(1,), sampling_params=SamplingParams(max_tokens=2)
        ),
    )
    with pytest.raises(DuplicateRequestError, match="'a'"):
        engine.add_request(
            state,
            Request(
                request_id="a", prompt_token_ids=(2,), sampling_params=SamplingParams(max_tokens=2)
            ),
        )
    with pytest.raises(RequestError, match="512: must be below vocab_size = 512"):
        engine.add_request(state, Request(request_id="b", prompt_token_ids=(1, 512)))
    with pytest.raises(RequestError, match="max_model_len = 128"):
        engine.add_request(state, Request(request_id="b", prompt_token_ids=(1,) * 128))
    with pytest.raises(CacheTooSmallError, match="'b'"):
        engine.add_request(state, Request(request_id="b", prompt_token_ids=(1,) * 30))
    with pytest.raises(ConfigError, match=r"CacheConfig\.groups"):
        engine.initial_state(
            hybrid,
            replace(
                config(hybrid), cache=CacheConfig(num_gpu_blocks=9, groups=gdn_groups_first(DENSE))
            ),
        )
    with pytest.raises(ConfigError, match=r"EngineConfig\.speculative"):
        engine.initial_state(
            hybrid,
            replace(
                config(hybrid),
                speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=1),
            ),
        )
