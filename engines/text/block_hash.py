"""Names of KV blocks: a SHA-256 chain over (parent, tokens), rooted in who may share them.

The engine's prefix index and the router's map of residency compute the same names from token ids alone. Knows nothing
of where a block lies or whether it exists.

Read next: `engines/kv/radix.py` (what is indexed by these), `engines/kv/events.py` (how residency is told).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import numpy as np

HASH_BYTES = 16


def root_hash(cache_salt: bytes, digest: str, *, extra: bytes = b"") -> bytes:
    """The parent of every first block of one trust group on one set of weights.

    `cache_salt`: HMAC of the tenant under the server's secret, so that no tenant can name another's root. `digest`:
    weights and number format. `extra`: whatever else changes the KV (an adapter, say). Each part is length-prefixed,
    so no two tuples collide by concatenation.
    """
    parts = (cache_salt, digest.encode(), extra)
    return sha256(b"".join(len(part).to_bytes(4, "big") + part for part in parts)).digest()[:HASH_BYTES]


def child_hash(parent: bytes, token_bytes: bytes) -> bytes:
    """Hash of the block whose tokens (u32 LE) are `token_bytes` and that follows `parent`."""
    return sha256(parent + token_bytes).digest()[:HASH_BYTES]


def block_hashes(token_ids: Sequence[int], block_size: int, root: bytes) -> list[bytes]:
    """Hashes of all full blocks, in order; a partial last block has none."""
    full = len(token_ids) // block_size
    data = np.asarray(token_ids[: full * block_size], dtype="<u4").tobytes()
    stride = 4 * block_size
    hashes: list[bytes] = []
    parent = root
    for start in range(0, full * stride, stride):
        parent = child_hash(parent, data[start : start + stride])
        hashes.append(parent)
    return hashes
