"""The hash chain: equal if and only if whole prefixes are."""

import hashlib

from servespec.reference.cache.prefix import extend_hashes, hash_at, hash_tokens, salts
from servespec.reference.contracts import Request


def request(**fields):
    return Request(request_id="a", prompt_token_ids=(1,), **fields)


def chain(tokens, unit=2, **fields):
    return extend_hashes((), request(**fields), tokens, unit)


def test_a_hash_stands_for_the_whole_prefix():
    first, second = chain((1, 2, 3, 4)), chain((1, 2, 3, 5))
    assert first[0] == second[0]
    assert first[1] != second[1]
    # The same two tokens after another beginning.
    assert chain((9, 9, 3, 4))[1] != first[1]


def test_only_full_units_are_hashed_and_known_ones_are_kept():
    hashes = chain((1, 2, 3))
    assert len(hashes) == 1
    longer = extend_hashes(hashes, request(), (1, 2, 3, 4, 5), 2)
    assert longer == chain((1, 2, 3, 4))
    assert extend_hashes(longer, request(), (1, 2, 3, 4, 5), 2) is longer


def test_the_hash_of_a_coarse_block_is_its_last_fine_one():
    assert hash_at(chain((1, 2, 3, 4)), 4, 2) == chain((1, 2, 3, 4))[1]


def test_large_tokens_are_not_folded():
    assert chain((1, 256)) != chain((1, 0))
    assert chain((1, 2**40)) != chain((1, 0))


def test_tenants_and_adapters_are_kept_apart():
    tokens = (1, 2, 3, 4)
    chains = [
        chain(tokens),
        chain(tokens, cache_salt="x"),
        chain(tokens, cache_salt="y"),
        chain(tokens, lora_name="x"),
    ]
    for index in range(2):
        assert len({hashes[index] for hashes in chains}) == 4


def test_the_salt_enters_at_the_start_and_the_adapter_everywhere():
    both = request(cache_salt="s", lora_name="l")
    assert salts(both, True) == ("lora:l", "salt:s")
    assert salts(both, False) == ("lora:l",)


def test_parts_cannot_run_into_each_other():
    assert hash_tokens(b"", (1,), ("ab", "c")) != hash_tokens(b"", (1,), ("a", "bc"))
    assert hash_tokens(b"", (1, 2), ()) != hash_tokens(b"", (1,), ())


def test_the_value_is_the_same_on_every_machine():
    # No parent; two tokens; one text of one byte; all numbers 8 bytes, little-endian.
    parts = (0, 2, 1, 2, 1)
    encoded = b"".join(part.to_bytes(8, "little") for part in parts) + b"x"
    assert hash_tokens(b"", (1, 2), ("x",)) == hashlib.sha256(encoded).digest()
