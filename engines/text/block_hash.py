"""Names of KV blocks: a SHA-256 chain over (parent, tokens), rooted in who may share them.

The engine's prefix index and the router's map of residency compute the same names from token ids alone. Knows nothing
of where a block lies or whether it exists, and needs no torch.

Read next: `engines/kv/radix.py` (what is indexed by these), `engines/kv/events.py` (how residency is told).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import numpy as np

HASH_BYTES = 16
TOKEN_BYTES = 4


def root_hash(cache_salt: bytes, digest: str, *, extra: bytes = b"") -> bytes:
    """The parent of every first block of one trust group on one set of weights.

    `cache_salt`: HMAC of the tenant under the server's secret, so that no tenant can name another's root. `digest`:
    weights and number format. `extra`: whatever else changes the KV (an adapter, say).
    """
    return _hash(cache_salt, digest.encode(), extra)


def child_hash(parent: bytes, block_tokens: bytes) -> bytes:
    """Hash of the block that holds `block_tokens` (u32 LE each) and follows `parent` (a block's hash, or the root)."""
    return _hash(parent, block_tokens)


def block_hashes(token_ids: Sequence[int], block_size: int, root: bytes) -> list[bytes]:
    """Hashes of all full blocks, in order; a partial last block has none. Ids outside u32 raise OverflowError."""
    full = len(token_ids) // block_size
    data = np.asarray(token_ids[: full * block_size], dtype="<u4").tobytes()
    stride = TOKEN_BYTES * block_size
    hashes: list[bytes] = []
    parent = root
    for start in range(0, full * stride, stride):
        parent = child_hash(parent, data[start : start + stride])
        hashes.append(parent)
    return hashes


def _hash(*parts: bytes) -> bytes:
    """Each part is preceded by its length, so that no two tuples of parts become the same bytes."""
    return sha256(b"".join(len(part).to_bytes(4, "little") + part for part in parts)).digest()[:HASH_BYTES]
