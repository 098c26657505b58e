"""What the fast batch does by itself: growth, errors, and reuse of slots."""

import pytest

from servespec.fast.batch import InputBatch
from servespec.reference.contracts import (
    CacheConfig,
    CachedRequestData,
    EngineConfig,
    KVCacheGroup,
    NewRequestData,
    Quirks,
    RequestError,
    SamplingParams,
    SchedulerConfig,
    SchedulerOutput,
    UnknownRequestError,
)

CACHE = CacheConfig(
    num_gpu_blocks=2000,
    block_size=4,
    groups=(
        KVCacheGroup(layer_type="linear_attention", layer_indices=(0,)),
        KVCacheGroup(layer_type="full_attention", layer_indices=(1,)),
    ),
)


def config(**scheduler):
    fields = {"max_num_seqs": 2, "max_num_batched_tokens": 8192, "max_model_len": 8192}
    return EngineConfig(scheduler=SchedulerConfig(**{**fields, **scheduler}), cache=CACHE)


def admit(lengths, blocks=None, finished=()):
    return SchedulerOutput(
        scheduled_new_reqs=tuple(
            NewRequestData(
                req_id=req_id,
                prompt_token_ids=tuple(range(length)),
                sampling_params=SamplingParams(),
                block_ids=((5,), tuple(range(1, 1 + (blocks or -(-length // 4))))),
                num_computed_tokens=0,
            )
            for req_id, length in lengths.items()
        ),
        num_scheduled_tokens=lengths,
        finished_req_ids=frozenset(finished),
    )


def test_a_prompt_longer_than_the_first_buffers():
    batch = InputBatch(config())
    inputs = batch.prepare(admit({"long": 5000}))
    assert inputs.token_ids.tolist() == list(range(5000))
    assert inputs.attention[0].block_table.shape == (1, 1250)
    assert inputs.attention[0].slot_mapping.tolist() == list(range(4, 5004))


def test_more_known_requests_than_rows():
    batch = InputBatch(config())
    for step in range(5):
        batch.prepare(admit({f"{step}a": 6, f"{step}b": 3}))
        assert batch.record().req_ids == (f"{step}a", f"{step}b")
    back = SchedulerOutput(
        scheduled_cached_reqs=CachedRequestData(
            req_ids=("0b",),
            new_block_ids=(None,),
            num_computed_tokens=(1,),
            num_output_tokens=(0,),
        ),
        num_scheduled_tokens={"0b": 2},
    )
    assert batch.prepare(back).token_ids.tolist() == [1, 2]


def test_more_rows_than_configured():
    inputs = InputBatch(config()).prepare(admit(dict.fromkeys("abcde", 2)))
    assert inputs.query_start_loc.tolist() == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("quirk", [False, True])
def test_gdn_fresh_decode(quirk):
    """vllm#51562: a one-token first chunk is no decode, except with the quirk."""
    batch = InputBatch(config(quirks=Quirks(gdn_fresh_decode=quirk)))
    group = batch.prepare(admit({"a": 1})).gdn[0]
    assert (group.num_decodes, group.num_prefills) == ((1, 0) if quirk else (0, 1))
    assert group.has_initial_state.tolist() == [False]


def test_bad_plans_are_refused_by_name():
    batch = InputBatch(config())
    with pytest.raises(UnknownRequestError, match="ghost"):
        batch.prepare(SchedulerOutput(num_scheduled_tokens={"ghost": 1}))
    batch.prepare(admit({"a": 4}))
    gone = SchedulerOutput(num_scheduled_tokens={"a": 1}, finished_req_ids=frozenset({"a"}))
    with pytest.raises(UnknownRequestError, match="a"):
        batch.prepare(gone)
    assert batch.req_ids == ["a"]
    with pytest.raises(RequestError, match=r"'b': 1 blocks of 4 tokens cannot hold 6 tokens"):
        batch.prepare(admit({"b": 6}, blocks=1))
    with pytest.raises(ValueError, match="no step has been prepared"):
        InputBatch(config()).record()
    over = admit({"c": 4})
    with pytest.raises(RequestError, match=r"'c': 5 tokens scheduled .* within the 4 known"):
        batch.prepare(
            SchedulerOutput(
                scheduled_new_reqs=over.scheduled_new_reqs, num_scheduled_tokens={"c": 5}
            )
        )
