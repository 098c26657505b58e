"""Full attention, and all groups together: hits, slots, caching, freeing."""

from dataclasses import dataclass, replace

import pytest

from servespec.reference.cache import full_attention, groups
from servespec.reference.cache.layout import GroupKind, make_layout
from servespec.reference.cache.prefix import extend_hashes
from servespec.reference.cache.table import EMPTY
from servespec.reference.contracts import (
    CacheConfig,
    KVCacheGroup,
    Request,
    SchedulerConfig,
    SpeculativeConfig,
)

GDN = KVCacheGroup(layer_type="linear_attention", layer_indices=(0,))
ATTENTION = KVCacheGroup(layer_type="full_attention", layer_indices=(1,))


@dataclass(frozen=True)
class Asking:
    """What the cache asks of a request."""

    request_id: str
    tokens: tuple[int, ...]
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    unit: int = 4

    @property
    def num_tokens(self):
        return len(self.tokens)

    num_prompt_tokens = num_tokens

    @property
    def block_hashes(self):
        request = Request(request_id=self.request_id, prompt_token_ids=self.tokens)
        return extend_hashes((), request, self.tokens, self.unit)


def make(*layers, num_blocks=20, caching=True, mode="align", unit=None, method=None, **fields):
    cache = CacheConfig(
        num_gpu_blocks=num_blocks,
        block_size=4,
        groups=layers or (ATTENTION,),
        enable_prefix_caching=caching,
        mamba_cache_mode=mode,
        prefix_match_unit=unit,
    )
    speculative = method and SpeculativeConfig(method=method, num_speculative_tokens=2)
    scheduler = SchedulerConfig(max_model_len=64, **fields)
    return groups.initial_cache(make_layout(scheduler, cache, speculative))


def admit(cache, request, num_tokens=None):
    hit = groups.find_longest_cache_hit(cache, request)
    count = (num_tokens or request.num_tokens) - hit.num_tokens
    return groups.allocate_slots(cache, request, count, hit)


def test_kinds_and_sizes_of_groups():
    layout = make(GDN, ATTENTION, mode="none", caching=False, method="ngram").layout
    assert [(g.kind, g.block_size, g.num_speculative_blocks) for g in layout.groups] == [
        (GroupKind.GDN_NONE, 64, 2),
        (GroupKind.FULL_ATTENTION, 4, 0),
    ]
    assert not layout.is_aligned
    layout = make(GDN, ATTENTION, unit=2).layout
    assert layout.groups[0].block_size == 4
    assert (layout.is_fine, layout.hash_block_size) == (True, 2)


def test_one_group_is_hashed_by_whole_blocks():
    assert make(ATTENTION, unit=2).layout.hash_block_size == 4
    assert make(GDN, unit=2).layout.hash_block_size == 4


def test_the_last_token_is_never_hit():
    cache, _ = admit(make(), Asking("a", tuple(range(8))))
    for length, expected in ((8, 4), (9, 8), (4, 0), (5, 4)):
        hit = groups.find_longest_cache_hit(cache, Asking("b", tuple(range(length))))
        assert hit.num_tokens == expected


def test_eagle_costs_the_last_block_of_a_hit():
    cache, _ = admit(make(method="eagle"), Asking("a", tuple(range(12))))
    hit = groups.find_longest_cache_hit(cache, Asking("b", tuple(range(13))))
    assert (hit.num_tokens, len(hit.blocks[0])) == (8, 2)


def test_attention_is_cut_to_the_state_and_tells_of_the_rest():
    cache = make(GDN, ATTENTION)
    cache, _ = admit(cache, Asking("a", tuple(range(8))))
    cache, _ = groups.allocate_slots(
        groups.new_step(cache), Asking("a", tuple(range(16)), num_computed_tokens=8), 8
    )
    # b shares 12 tokens with a, whose states are those after 8 and 16.
    hit = groups.find_longest_cache_hit(cache, Asking("b", (*range(13), 90)))
    assert (hit.num_tokens, hit.shared_prefix_boundary) == (8, 12)
    assert [len(blocks) for blocks in hit.blocks] == [2, 2]


def test_a_model_of_gdn_layers_alone_hits_its_states():
    cache, _ = admit(make(GDN), Asking("a", tuple(range(8))))
    hit = groups.find_longest_cache_hit(cache, Asking("b", tuple(range(9))))
    assert (hit.blocks, hit.num_tokens, hit.shared_prefix_boundary) == (((0, 1),), 8, 0)


def test_a_hit_inside_a_block_takes_the_longest_unit():
    cache = make(GDN, ATTENTION, unit=1)
    cache, _ = admit(cache, Asking("a", tuple(range(6)), unit=1))
    group = cache.layout.groups[1]
    asking = Asking("b", tuple(range(9)), unit=1)
    found = full_attention.find_longest_hit(
        cache.pool, (group,), asking.block_hashes, 8, 1, use_eagle=False
    )
    assert (len(found[0][0]), found[1]) == (2, 6)
    # A drafter that reads hidden states costs one unit, which leaves the block shared.
    found = full_attention.find_longest_hit(
        cache.pool, (group,), asking.block_hashes, 8, 1, use_eagle=True
    )
    assert (len(found[0][0]), found[1]) == (2, 5)


def test_hits_are_held_before_any_group_takes_a_block():
    cache = make(GDN, ATTENTION, num_blocks=6)
    cache, _ = admit(cache, Asking("a", tuple(range(4))))
    cache = groups.new_step(groups.free(cache, "a"))
    assert cache.pool.free[-2:] == (1, 2)
    cache, blocks = admit(cache, Asking("b", tuple(range(6))))
    assert cache.block_table("b") == ((1, 3), (2, 4))
    assert blocks == ((3,), (4,))


def test_no_room_leaves_the_cache_as_it_was():
    cache = make(num_blocks=3)
    assert admit(cache, Asking("a", tuple(range(9)))) == (cache, None)
    # The gate asks for room for all known tokens, the step itself for its own only.
    request = Asking("a", tuple(range(9)))
    assert groups.allocate_slots(cache, request, 4, full_sequence_must_fit=True) == (cache, None)
    assert groups.allocate_slots(cache, request, 4)[1] == ((1,),)
    assert groups.allocate_slots(cache, request, 4, num_reserved=2)[1] is None


def test_states_are_freed_even_if_there_is_no_room():
    cache = make(GDN, ATTENTION, num_blocks=6)
    tokens = tuple(range(40))
    cache, _ = groups.allocate_slots(cache, Asking("a", tokens), 4)
    cache, _ = groups.allocate_slots(cache, Asking("a", tokens, num_computed_tokens=4), 4)
    assert cache.pool.free == (5,)
    after, blocks = groups.allocate_slots(cache, Asking("a", tokens, num_computed_tokens=8), 16)
    assert blocks is None
    assert after.block_table("a")[0] == (0, 3)
    assert after.pool.free == (5, 1)


def test_lookahead_takes_slots_of_attention_and_no_state():
    cache = make(GDN, ATTENTION, method="mtp")
    cache, _ = groups.allocate_slots(cache, Asking("a", tuple(range(4))), 4)
    assert [len(row) for row in cache.block_table("a")] == [3, 2]


def test_drafts_are_not_hashed():
    cache = make()
    cache, _ = groups.allocate_slots(cache, Asking("a", (1, 2, 3)), 5)
    assert cache.pool.hashes == {}


def test_blocks_are_freed_group_by_group_from_the_tail():
    cache = make(GDN, ATTENTION, caching=False, mode="none", num_blocks=5)
    cache, _ = groups.allocate_slots(cache, Asking("a", tuple(range(8))), 8)
    assert cache.block_table("a") == ((1,), (2, 3))
    assert groups.free(cache, "a").pool.free == (4, 1, 3, 2)
    assert groups.free(cache, "unknown") == cache


def test_common_prefix_counts_what_everybody_holds():
    cache, _ = admit(make(), Asking("a", tuple(range(12))))
    assert groups.num_common_prefix_blocks(cache, "a") == (3,)
    cache, _ = admit(cache, Asking("b", (*range(8), 90)))
    assert groups.num_common_prefix_blocks(cache, "a") == (2,)


@pytest.mark.parametrize("caching", [True, False])
def test_gdn_groups_have_no_common_prefix(caching):
    cache = make(GDN, ATTENTION, caching=caching)
    cache, _ = groups.allocate_slots(cache, Asking("a", tuple(range(4))), 4)
    assert groups.num_common_prefix_blocks(cache, "a") == ((0, 1) if caching else (0, 0))


def test_what_was_not_computed_can_be_withdrawn():
    cache, _ = admit(make(), Asking("a", tuple(range(4))))
    request = Asking("a", tuple(range(12)), num_computed_tokens=4)
    cache, _ = groups.allocate_slots(cache, request, 8)
    assert set(cache.pool.hashes) == {1, 2, 3}
    assert set(groups.withdraw_uncomputed(cache, request).pool.hashes) == {1}


def test_a_copy_is_drained_once_and_lets_go_of_both_ends():
    cache = make(GDN, ATTENTION, unit=2)
    asking = Asking("a", tuple(range(6)), unit=2)
    cache, _ = admit(cache, asking)
    cache = groups.new_step(cache)
    cache, _ = groups.allocate_slots(cache, replace(asking, num_computed_tokens=6), 1)
    ((group, copy),) = cache.copies
    assert group == 0
    cache, copies = groups.take_copies(cache)
    assert [(c.src_block_id, c.dst_block_id) for c in copies] == [copy]
    assert cache.pool.ref_counts[copy.source] == 1
    assert cache.pool.ref_counts[copy.target] == 0
    assert groups.take_copies(cache) == (cache, ())


def test_fresh_blocks_are_drained_in_group_order():
    cache = make(ATTENTION, GDN)
    cache, _ = groups.allocate_slots(cache, Asking("a", tuple(range(8))), 8)
    cache, fresh = groups.take_fresh_blocks(cache)
    assert fresh == (1, 2)
    assert groups.take_fresh_blocks(cache) == (cache, ())


def test_a_request_without_blocks_has_an_empty_row():
    assert EMPTY.blocks == ()
