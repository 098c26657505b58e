"""The prefix hash chain: equal hashes mean equal tokens from the very first one.

Each full unit of tokens gets a hash of its tokens and of the hash before it, so one hash stands
for a whole prefix. Units are as fine as the finest boundary at which a hit may end; a group with
larger blocks uses the last hash inside each of its blocks.

The value differs from vLLM's (which hashes a pickle with a per-process seed); what must agree is
which prefixes are equal. It is a function of its arguments alone, so runs can be repeated.

Sources: ``hash_block_tokens``, ``generate_block_hash_extra_keys``, ``get_request_block_hasher``
and ``BlockHashListWithBlockSize`` of ``vllm/v1/core/kv_cache_utils.py``.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from servespec.reference.contracts import Request

__all__ = ["extend_hashes", "hash_at", "hash_tokens", "salts"]


def hash_tokens(parent: bytes, token_ids: Sequence[int], extra: Sequence[str] = ()) -> bytes:
    """Hash one unit of tokens after its prefix.

    Parameters
    ----------
    parent : bytes
        Hash of the prefix before, or ``b""`` at the start.
    token_ids : sequence of int
        The unit's tokens, each below 2**63.
    extra : sequence of str
        Whatever else must be equal for the contents to be equal.

    Returns
    -------
    bytes
        32 bytes (SHA-256). Every part is preceded by its length, so no two different inputs are
        encoded alike.
    """
    digest = hashlib.sha256(struct.pack("<q", len(parent)) + parent)
    digest.update(struct.pack(f"<{len(token_ids) + 1}q", len(token_ids), *token_ids))
    for text in extra:
        encoded = text.encode()
        digest.update(struct.pack("<q", len(encoded)) + encoded)
    return digest.digest()


def salts(request: Request, is_first: bool) -> tuple[str, ...]:
    """Return what beside tokens keeps prefixes apart.

    The name of a LoRA adapter changes every block's content. A tenant's salt is needed in the
    first unit only, because the chain carries it on.

    Parameters
    ----------
    request : Request
    is_first : bool
        Whether the unit starts at token 0.
    """
    names = () if request.lora_name is None else (f"lora:{request.lora_name}",)
    if is_first and request.cache_salt:
        return (*names, f"salt:{request.cache_salt}")
    return names


def extend_hashes(
    hashes: tuple[bytes, ...], request: Request, token_ids: Sequence[int], unit: int
) -> tuple[bytes, ...]:
    """Hash the full units that `hashes` does not cover yet.

    Parameters
    ----------
    hashes : tuple of bytes
        Hashes of the first units.
    request : Request
    token_ids : sequence of int
        All known tokens, prompt and output.
    unit : int
        Tokens per hash.

    Returns
    -------
    tuple of bytes
        ``len(token_ids) // unit`` hashes.
    """
    count = len(token_ids) // unit
    if count <= len(hashes):
        return hashes
    chain = list(hashes)
    for index in range(len(hashes), count):
        parent = chain[-1] if chain else b""
        tokens = token_ids[index * unit : (index + 1) * unit]
        chain.append(hash_tokens(parent, tokens, salts(request, index == 0)))
    return tuple(chain)


def hash_at(hashes: Sequence[bytes], num_tokens: int, unit: int) -> bytes:
    """Return the hash of the prefix of `num_tokens`, a multiple of `unit`."""
    return hashes[num_tokens // unit - 1]
