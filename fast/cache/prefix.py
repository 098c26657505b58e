"""Prefix hashes: equal hash, equal prefix.

``h_i = H(h_(i-1), tokens of block i, extra keys)``: a chain, so that the hash of a block stands
for everything before it as well. Hashes are made when they are first needed, not when a token
arrives. Source: ``get_request_block_hasher`` and ``hash_block_tokens`` of
``vllm/v1/core/kv_cache_utils.py``; the bytes differ from vLLM's, only equality matters.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from servespec.reference.contracts import Request

__all__ = ["HashChain", "group_key"]


class HashChain:
    """The hashes of one request, extended as its tokens become known.

    Parameters
    ----------
    request : Request
        Its LoRA name enters every hash, its salt the first one.
    block_size : int
        Tokens in one hash.

    Attributes
    ----------
    hashes : list of bytes
        One for each full block hashed so far.
    """

    __slots__ = ("_every", "_first", "block_size", "hashes")

    def __init__(self, request: Request, block_size: int) -> None:
        self.block_size = block_size
        self.hashes: list[bytes] = []
        # A length before each text keeps ("ab", "c") and ("a", "bc") apart.
        self._every = _framed(request.lora_name)
        self._first = _framed(request.cache_salt)

    def extend(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Hash every full block of `token_ids`, the tokens of the request known so far.

        Parameters
        ----------
        token_ids : array of int32, shape (number of tokens,)
        """
        hashes = self.hashes
        size = self.block_size
        for index in range(len(hashes), len(token_ids) // size):
            tokens = token_ids[index * size : (index + 1) * size].tobytes()
            before = hashes[-1] if index else self._first
            hashes.append(hashlib.sha256(before + self._every + tokens).digest())


def _framed(text: str | None) -> bytes:
    """Encode a text so that no two sequences of texts give the same bytes; None is distinct."""
    if not text:
        return b"\x00"
    data = text.encode()
    return b"\x01" + len(data).to_bytes(8, "big") + data


def group_key(digest: bytes, group: int) -> bytes:
    """Return the key under which a block of `group` is entered in the pool."""
    return digest + group.to_bytes(4, "big")
