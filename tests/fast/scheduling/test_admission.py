from __future__ import annotations

import dataclasses

import pytest

from servespec.fast.scheduling.admission import check_request
from servespec.reference.contracts import (
    CacheConfig,
    CacheTooSmallError,
    KVCacheGroup,
    Request,
    RequestError,
    SamplingParams,
    SchedulerConfig,
    SpeculativeConfig,
)

ATTENTION = KVCacheGroup(layer_type="full_attention", layer_indices=(0,))
GDN = KVCacheGroup(layer_type="linear_attention", layer_indices=(1,))
SCHEDULER = SchedulerConfig(max_model_len=32, max_num_batched_tokens=32)


def request(num_prompt: int, max_tokens: int) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=(1,) * num_prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens),
    )


def cache(blocks: int, *groups: KVCacheGroup, mode: str = "none") -> CacheConfig:
    return CacheConfig(num_gpu_blocks=blocks, block_size=4, groups=groups, mamba_cache_mode=mode)


def test_a_prompt_has_to_leave_room_for_a_token() -> None:
    check_request(request(31, 1), SCHEDULER, cache(20, ATTENTION))
    with pytest.raises(RequestError, match="has 32 tokens: must be fewer than max_model_len = 32"):
        check_request(request(32, 1), SCHEDULER, cache(20, ATTENTION))


def test_a_request_has_to_fit_alone() -> None:
    # 16 places take 4 blocks, and there is the null block.
    check_request(request(9, 7), SCHEDULER, cache(5, ATTENTION))
    with pytest.raises(CacheTooSmallError, match="17 tokens need 5 blocks: num_gpu_blocks = 5"):
        check_request(request(9, 8), SCHEDULER, cache(5, ATTENTION))


def test_output_beyond_the_longest_sequence_does_not_count() -> None:
    check_request(request(9, 1000), SCHEDULER, cache(9, ATTENTION))


def test_gdn_states_count() -> None:
    # One state in mode none, two at a time in mode align.
    check_request(request(9, 7), SCHEDULER, cache(6, GDN, ATTENTION))
    with pytest.raises(CacheTooSmallError):
        check_request(request(9, 7), SCHEDULER, cache(6, GDN, ATTENTION, mode="align"))
    check_request(request(9, 7), SCHEDULER, cache(7, GDN, ATTENTION, mode="align"))
    # A sequence within one block never has two states.
    check_request(request(2, 2), SCHEDULER, cache(3, GDN, ATTENTION, mode="align"))


def test_draft_states_and_lookahead_count() -> None:
    drafts = SpeculativeConfig(method="mtp", num_speculative_tokens=2)
    with pytest.raises(CacheTooSmallError, match="16 tokens need 5 blocks"):
        check_request(request(9, 7), SCHEDULER, cache(5, ATTENTION), drafts)
    check_request(request(9, 7), SCHEDULER, cache(6, ATTENTION), drafts)
    with pytest.raises(CacheTooSmallError, match="16 tokens need 8 blocks"):
        check_request(request(9, 7), SCHEDULER, cache(8, GDN, ATTENTION), drafts)
    check_request(request(9, 7), SCHEDULER, cache(9, GDN, ATTENTION), drafts)


def test_a_step_in_flight_keeps_a_state() -> None:
    config = dataclasses.replace(SCHEDULER, async_scheduling=True)
    with pytest.raises(CacheTooSmallError, match="16 tokens need 7 blocks"):
        check_request(request(9, 7), config, cache(7, GDN, ATTENTION, mode="align"))
    check_request(request(9, 7), config, cache(8, GDN, ATTENTION, mode="align"))


def test_copies_of_fine_hits_count() -> None:
    fine = dataclasses.replace(
        cache(8, GDN, ATTENTION, mode="align"), enable_prefix_caching=True, prefix_match_unit=2
    )
    with pytest.raises(CacheTooSmallError, match="16 tokens need 8 blocks"):
        check_request(request(9, 7), SCHEDULER, fine)
    check_request(request(9, 7), SCHEDULER, dataclasses.replace(fine, num_gpu_blocks=9))
