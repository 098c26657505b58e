"""The memory that attention and GDN layers share."""

from __future__ import annotations

import pytest
import torch

from servespec.fast.cache.memory import (
    CacheMemory,
    aligned_block_size,
    attention_token_bytes,
    bytes_per_block,
    gdn_state_bytes,
)
from servespec.reference.contracts import (
    BlockCopy,
    CacheConfig,
    ConfigError,
    KVCacheGroup,
    ModelConfig,
    SchedulerOutput,
    gdn_groups_first,
)

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def model(layers: int = 4, **changes) -> ModelConfig:
    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "layer_types": tuple(
            "linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)
        ),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 6,
    }
    return ModelConfig(**sizes | changes)


def memory(config: ModelConfig, dtype: torch.dtype, block_size: int = 3, **more) -> CacheMemory:
    cache = CacheConfig(
        num_gpu_blocks=5, block_size=block_size, groups=gdn_groups_first(config.layer_types)
    )
    return CacheMemory(config, cache, dtype, poison=True, **more)


# Qwen3.5-9B, whose blocks vLLM 0.27.1 makes 528 tokens, and 544 with three drafts (recorded from
# its own `_align_hybrid_block_size` with bfloat16 K/V and float32 states).
NINE_B = model(
    32,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
)


@pytest.mark.parametrize(("drafts", "block_size"), [(0, 528), (3, 544)])
def test_block_size_is_that_of_vllm(drafts, block_size):
    assert aligned_block_size(NINE_B, torch.bfloat16, drafts) == block_size


def test_the_aligned_block_is_the_smallest_that_covers_a_state():
    for dtype in BITS:
        size = aligned_block_size(model(), dtype, multiple=1)
        token = attention_token_bytes(model(), dtype)
        state = gdn_state_bytes(model(), dtype)
        assert (size - 1) * token < state <= size * token
    assert aligned_block_size(model(layer_types=("full_attention",)), torch.float32) == 16


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_shapes_and_sharing(dtype, block_size):
    store = memory(model(8), dtype, block_size, num_speculative_tokens=2)
    assert store.attention_layers == ((3, 7),)
    assert store.gdn_layers == ((0, 4), (1, 5), (2, 6))
    assert len(store.pages) == 2
    kv, states = store.kv(3), store.gdn(1)
    assert kv.key.shape == kv.value.shape == (5, block_size, 2, 8)
    assert kv.key.dtype == states.conv.dtype == dtype
    assert states.ssm.shape == (5, 2, 6, 4)
    assert states.ssm.dtype == torch.float32
    assert states.conv.shape == (5, 3 + 2, 2 * 8 + 12)
    # Layers 0, 1, 2 and 3 stand first in their groups and share pages; layer 4 stands second.
    assert store.gdn(0).ssm.data_ptr() == states.ssm.data_ptr() == kv.key.data_ptr()
    assert store.gdn(4).ssm.data_ptr() == store.kv(7).key.data_ptr() != kv.key.data_ptr()
    assert store.pages[0].shape[0] == 6
    page = store.pages[0].shape[1]
    assert page == bytes_per_block(
        model(), gdn_groups_first(model().layer_types), block_size, dtype, 2
    )
    assert page >= max(
        block_size * attention_token_bytes(model(), dtype), gdn_state_bytes(model(), dtype, 2)
    )


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_no_view_reaches_into_another_page_or_part(dtype, block_size):
    """Write every view of one block in turn: no other block and no sibling view changes."""
    store = memory(model(), dtype, block_size)
    kv, states = store.kv(3), store.gdn(0)
    for ours, sibling in ((kv.key, kv.value), (states.ssm, states.conv)):
        for target, other in ((ours, sibling), (sibling, ours)):
            store.pages[0][:5].fill_(0xFF)
            target[2] = 1.0
            assert bool(other[2].isnan().all())
            assert bool(target[2].eq(1.0).all())
            blocks = [0, 1, 3, 4]
            assert bool(store.pages[0][blocks].eq(0xFF).all())
            assert bool(store.pages[0][5].eq(0).all())


@pytest.mark.parametrize("dtype", BITS)
def test_rows_name_the_same_elements(dtype):
    store = memory(model(), dtype)
    kv = store.kv(3)
    kv.key.copy_(torch.arange(kv.key.numel()).view(kv.key.shape))
    kv.value.copy_(-torch.arange(kv.key.numel()).view(kv.key.shape))
    for block in range(5):
        for offset in range(3):
            row = block * kv.rows_per_page + offset
            assert torch.equal(kv.rows[row], kv.key[block, offset].flatten())
            assert torch.equal(kv.rows[row + kv.block_size], kv.value[block, offset].flatten())
    assert bool(kv.rows[kv.zero_row].eq(0).all())


def test_memory_starts_poisoned_on_request():
    store = memory(model(), torch.bfloat16)
    for view in (store.kv(3).key, store.kv(3).value, store.gdn(2).ssm, store.gdn(2).conv):
        assert bool(view.isnan().all())


def test_zeroing_and_copies():
    store = memory(model(8), torch.float32)
    for layer in (3, 7):
        store.kv(layer).key.copy_(torch.arange(5.0)[:, None, None, None].expand(5, 3, 2, 8))
    # A chain: 1 is copied to 2 as it was after clearing, not as 4 leaves it.
    output = SchedulerOutput(
        new_block_ids_to_zero=(4,),
        kv_cache_block_copies=(
            BlockCopy(src_block_id=4, dst_block_id=1),
            BlockCopy(src_block_id=1, dst_block_id=2),
        ),
    )
    store.apply(output)
    for layer in (3, 7):
        assert store.kv(layer).key[:, 0, 0, 0].tolist() == [0, 0, 1, 3, 0]
    store.apply(SchedulerOutput())
    assert store.kv(3).key[:, 0, 0, 0].tolist() == [0, 0, 1, 3, 0]


@pytest.mark.parametrize("dtype", BITS)
def test_states_are_cleared_and_moved_by_group(dtype):
    store = memory(model(8), dtype)
    layers = store.gdn_layers[1]
    store.clear_states(layers, torch.tensor([2]))
    for layer in layers:
        assert bool(store.gdn(layer).ssm[2].eq(0).all())
        assert bool(store.gdn(layer).conv[2].eq(0).all())
        assert bool(store.gdn(layer).ssm[[0, 1, 3, 4]].isnan().all())
        store.gdn(layer).ssm[1] = layer
        store.gdn(layer).conv[1] = layer
    store.move_states(layers, torch.tensor([1, 2]), torch.tensor([3, 4]))
    for layer in layers:
        for slot, value in ((1, layer), (3, layer), (2, 0), (4, 0)):
            assert bool(store.gdn(layer).ssm[slot].eq(value).all())
            assert bool(store.gdn(layer).conv[slot].eq(value).all())


@pytest.mark.parametrize(
    "groups",
    [
        (("linear_attention", (0, 1, 2)),),
        (("linear_attention", (0, 1, 3)), ("full_attention", (2,))),
        (("linear_attention", (0, 1, 2)), ("full_attention", (3, 4))),
    ],
)
def test_groups_that_are_not_the_models_layers(groups):
    cache = CacheConfig(
        num_gpu_blocks=5,
        groups=tuple(KVCacheGroup(layer_type=k, layer_indices=i) for k, i in groups),
    )
    with pytest.raises(ConfigError, match=r"CacheConfig\.groups"):
        CacheMemory(model(), cache, torch.float32)
