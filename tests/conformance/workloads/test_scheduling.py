"""Random scheduler cases: every combination, cheap, repeatable, and where things happen."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings

from servespec.conformance.workloads.scheduling import (
    LAYOUTS,
    combinations,
    make_case,
    matrix,
    scheduling,
)
from servespec.conformance.workloads.workload import Workload
from servespec.reference.contracts import EngineConfig, Quirks


def test_the_matrix_holds_every_combination_once() -> None:
    assert len(set(matrix())) == len(matrix()) == 240
    for field, values in {
        "layout": set(LAYOUTS),
        "async_scheduling": {False, True},
        "num_speculative_tokens": {0, 1, 3},
        "policy": {"fcfs", "priority"},
        "enable_prefix_caching": {False, True},
        "threshold": {False, True},
        "watermark": {0.0, 0.05},
    }.items():
        assert {getattr(combination, field) for combination in matrix()} == values
    assert not any(c.layout == "hybrid none" and c.enable_prefix_caching for c in matrix())
    assert len({str(combination) for combination in matrix()}) == 240


def test_a_case_is_what_its_combination_says() -> None:
    for combination in matrix():
        config, workload = make_case(combination, 3)
        scheduler, cache = config.scheduler, config.cache
        drafts = config.speculative.num_speculative_tokens if config.speculative else 0
        assert cache.has_gdn == (combination.layout != "dense")
        assert (cache.mamba_cache_mode == "align") == (combination.layout == "hybrid align")
        assert scheduler.async_scheduling == combination.async_scheduling
        assert drafts == combination.num_speculative_tokens
        assert scheduler.policy == combination.policy
        assert cache.enable_prefix_caching == combination.enable_prefix_caching
        assert (scheduler.long_prefill_token_threshold > 0) == combination.threshold
        assert scheduler.watermark == combination.watermark
        assert scheduler.quirks == Quirks.vllm_0_27_1()
        ids = [request.request_id for request in workload.requests]
        assert len(ids) == len(set(ids)) >= 3
        assert all(r.num_prompt_tokens < scheduler.max_model_len for r in workload.requests)


def test_equal_seeds_give_equal_cases_and_others_do_not() -> None:
    assert make_case(matrix()[7], 5) == make_case(matrix()[7], 5)
    assert make_case(matrix()[7], 5) != make_case(matrix()[7], 6)
    assert make_case(matrix()[7], 5)[1] != make_case(matrix()[8], 5)[1]


def test_seeds_reach_every_other_switch() -> None:
    seen: Counter[object] = Counter()
    for combination in matrix():
        for seed in range(2):
            config, workload = make_case(combination, seed)
            scheduler, cache = config.scheduler, config.cache
            seen["chunked", scheduler.enable_chunked_prefill] += 1
            seen["reserve", scheduler.scheduler_reserve_full_isl] += 1
            seen["own budget", scheduler.max_num_scheduled_tokens is not None] += 1
            seen["unit", cache.prefix_match_unit not in (None, cache.block_size)] += 1
            seen["groups", len(cache.groups)] += 1
            seen["method", config.speculative.method if config.speculative else None] += 1
            seen["in flight", workload.max_concurrent_batches] += 1
            for step in workload.steps:
                seen["pause", step.pause] += 1
                seen["reset", step.reset_prefix_cache] += 1
                seen["throttle", step.throttle_prefills] += 1
            for request in workload.requests:
                params = request.sampling_params
                seen["min_tokens", params.min_tokens > 0] += 1
                seen["eos", params.eos_token_id is not None] += 1
                seen["stop", bool(params.stop_token_ids)] += 1
                seen["repetition", params.repetition_detection is not None] += 1
                seen["salt", request.cache_salt] += 1
                seen["lora", request.lora_name] += 1
                seen["priority", min(request.priority, 3)] += 1
                seen["bytes", max(request.prompt_token_ids).bit_length() // 8] += 1
    print(dict(seen))
    # (True and False of nine switches), 4 numbers of groups, 5 methods and none, 2 depths, 4 pause
    # states with None, 3 resets with None, 3 salts, 2 adapters, 3 priorities and higher ones, and
    # tokens of 1 to 3 bytes.
    assert len(seen) == 2 * 9 + 4 + 5 + 2 + 4 + 3 + 3 + 2 + 4 + 3
    assert min(seen.values()) >= 5


@settings(max_examples=50, deadline=None)
@given(scheduling(quirks=Quirks()))
def test_the_strategy_makes_cases_of_the_wanted_profile(
    case: tuple[EngineConfig, Workload],
) -> None:
    config, workload = case
    assert config.scheduler.quirks == Quirks()
    assert workload.requests


@settings(max_examples=20, deadline=None)
@given(combinations())
def test_combinations_are_of_the_matrix(combination: object) -> None:
    assert combination in matrix()
