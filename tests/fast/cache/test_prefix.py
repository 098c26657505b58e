from __future__ import annotations

import numpy as np

from servespec.fast.cache.prefix import HashChain, group_key
from servespec.reference.contracts import Request


def hashes(
    tokens: list[int], size: int = 4, salt: str | None = None, lora: str | None = None
) -> list[bytes]:
    request = Request(
        request_id="r", prompt_token_ids=tuple(tokens), cache_salt=salt, lora_name=lora
    )
    chain = HashChain(request, size)
    chain.extend(np.array(tokens, dtype=np.int32))
    return chain.hashes


def test_only_full_blocks_are_hashed() -> None:
    assert [len(hashes(list(range(1, n + 1)))) for n in (3, 4, 7, 8)] == [0, 1, 1, 2]


def test_a_hash_stands_for_the_whole_prefix() -> None:
    a, b = hashes([1, 2, 3, 4, 5, 6, 7, 8]), hashes([9, 2, 3, 4, 5, 6, 7, 8])
    assert a[0] != b[0]
    assert a[1] != b[1]
    assert hashes([1, 2, 3, 4, 0, 0, 0, 0])[0] == a[0]


def test_equal_blocks_at_different_places_differ() -> None:
    first, second = hashes([1, 2, 3, 4, 1, 2, 3, 4])
    assert first != second


def test_tokens_that_agree_modulo_256_differ() -> None:
    assert hashes([1, 2, 3, 4]) != hashes([257, 2, 3, 4])


def test_extending_gives_what_hashing_at_once_gives() -> None:
    request = Request(request_id="r", prompt_token_ids=(1,))
    chain = HashChain(request, 4)
    tokens = np.arange(1, 20, dtype=np.int32)
    for n in (3, 9, 9, 19):
        chain.extend(tokens[:n])
    assert chain.hashes == hashes(tokens.tolist())


def test_salt_and_adapter_keep_tenants_apart() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    found = [
        hashes(tokens, salt=salt, lora=lora)
        for salt, lora in [(None, None), ("a", None), (None, "a"), ("a", "a"), ("aa", None)]
    ]
    for index in range(2):
        assert len({chain[index] for chain in found}) == len(found)


def test_an_empty_salt_is_no_salt() -> None:
    assert hashes([1, 2, 3, 4], salt="") == hashes([1, 2, 3, 4])


def test_groups_do_not_share_keys() -> None:
    digest = hashes([1, 2, 3, 4])[0]
    assert group_key(digest, 0) != group_key(digest, 1)
