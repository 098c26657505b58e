"""What an engine refuses."""

import pytest

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
from servespec.reference.scheduling.admission import blocks_alone, check_request

GROUPS = (
    KVCacheGroup(layer_type="linear_attention", layer_indices=(0,)),
    KVCacheGroup(layer_type="linear_attention", layer_indices=(1,)),
    KVCacheGroup(layer_type="full_attention", layer_indices=(2,)),
)


def request(num_prompt, max_tokens):
    return Request(
        request_id="a",
        prompt_token_ids=(1,) * num_prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens),
    )


def cache(num_blocks=100, groups=GROUPS[2:], **fields):
    return CacheConfig(num_gpu_blocks=num_blocks, block_size=4, groups=groups, **fields)


def test_a_prompt_leaves_room_for_a_token():
    scheduler = SchedulerConfig(max_model_len=8)
    check_request(request(7, 1), scheduler, cache())
    with pytest.raises(RequestError, match=r"'a'.*has 8 tokens: must be fewer than.* = 8"):
        check_request(request(8, 1), scheduler, cache())


def test_a_request_fits_the_pool_exactly():
    scheduler = SchedulerConfig(max_model_len=64)
    check_request(request(9, 3), scheduler, cache(num_blocks=4))
    with pytest.raises(CacheTooSmallError, match=r"up to 4 blocks.*must be at most 3"):
        check_request(request(9, 4), scheduler, cache(num_blocks=4))


@pytest.mark.parametrize(
    ("fields", "speculative", "asynchronous", "expected"),
    [
        # 12 tokens in blocks of 4; K = 2 drafts.
        ({}, None, False, 3),
        ({}, "ngram", False, 3),
        ({}, "mtp", False, 4),
        ({"groups": GROUPS}, None, False, 3 + 2),
        ({"groups": GROUPS}, "ngram", False, 3 + 2 * 3),
        ({"groups": GROUPS, "mamba_cache_mode": "align"}, None, False, 3 + 2 * 2),
        ({"groups": GROUPS, "mamba_cache_mode": "align"}, "ngram", False, 3 + 2 * 4),
        ({"groups": GROUPS, "mamba_cache_mode": "align"}, None, True, 3 + 2 * 3),
        (
            {
                "groups": GROUPS,
                "mamba_cache_mode": "align",
                "enable_prefix_caching": True,
                "prefix_match_unit": 2,
            },
            None,
            False,
            4 + 2 * 3,
        ),
    ],
)
def test_blocks_of_a_request_alone(fields, speculative, asynchronous, expected):
    scheduler = SchedulerConfig(max_model_len=64, async_scheduling=asynchronous)
    drafts = None
    if speculative is not None:
        drafts = SpeculativeConfig(method=speculative, num_speculative_tokens=2)
    assert blocks_alone(request(9, 3), scheduler, cache(**fields), drafts) == expected


def test_slots_end_at_max_model_len():
    drafts = SpeculativeConfig(method="mtp", num_speculative_tokens=3)
    assert blocks_alone(request(9, 90), SchedulerConfig(max_model_len=12), cache(), drafts) == 3


def test_a_single_block_of_tokens_needs_no_second_state():
    fields = {"groups": GROUPS, "mamba_cache_mode": "align"}
    assert blocks_alone(request(2, 2), SchedulerConfig(), cache(**fields)) == 1 + 2
