"""The KV of requests: match a prefix, allocate, publish full blocks, release. One owner of pool, index and events.

    match     prompt -> resident blocks, now also referenced by this request
    allocate  room for the tokens of the next step
    publish   blocks that became full can be found by others
    release   tail first, so that what is evicted later is always a leaf of the index

The blocks of one request:

    | published ........... | full, private (name taken) | partial |  room for the step
    0        num_published_blocks          num_computed_tokens / block_size

Sharing is by full blocks and only through the index. The n choices of a prompt are n requests: the first computes it,
the others match it (`engines/core/engine.py`) and compute the partial last block again. So no block ever has two
writers, none is ever copied, and a fork is the same code as a prefix hit; a copy on write would save less than one
block of tokens a choice.

Knows nothing of tensors or scheduling; a "holder" is anything with the fields below (`engines/core/request.py`).

Read next: `engines/kv/pool.py`, `engines/kv/radix.py`, `engines/core/scheduler.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from engines.api import KVEventBatch
from engines.config import CacheConfig
from engines.kv.events import EventLog
from engines.kv.pool import BlockPool
from engines.kv.radix import RadixIndex, RadixNode
from engines.text.block_hash import root_hash


class KVHolder(Protocol):
    """What the manager reads and writes of a request. `root` names its trust group."""

    root: bytes
    block_ids: list[int]
    num_tokens: int
    num_computed_tokens: int
    num_published_blocks: int
    tail_node: RadixNode | None

    def full_block(self, number: int) -> tuple[bytes, bytes]:
        """(chained hash, tokens as u32 LE) of full block `number`."""
        ...


class BlockWatcher(Protocol):
    """Hears which blocks can be found, and keeps some in place (`engines/kv/offload.py`)."""

    def published(self, block_id: int, node: RadixNode) -> None:
        """A block can be found from now on."""
        ...

    def forgotten(self, block_id: int) -> None:
        """A block can no longer be found, and is about to be written again."""
        ...

    def references(self) -> Iterator[int]:
        """Blocks that the watcher holds, once a reference."""
        ...


class KVManager:
    """Mutated by every method but the properties and `num_missing`.

    `on_free(block_id)` is called when a block's content may not be read again: tests poison it there. With
    `prefix_cache` off each request is a trust group of its own and no event is recorded; all else is the same.
    """

    def __init__(self, config: CacheConfig, num_blocks: int, *, on_free: Callable[[int], None] | None = None) -> None:
        self.block_size = config.block_size
        self.index = RadixIndex()
        self.pool = BlockPool(num_blocks, on_evict=self._forget)
        self.events = EventLog(config.block_size, config.event_buffer if config.prefix_cache else 0)
        self.watcher: BlockWatcher | None = None
        self._prefix_cache = config.prefix_cache
        self._on_free = on_free

    def root(self, cache_salt: bytes, digest: str, request_number: int) -> bytes:
        """Name of a request's trust group. `request_number` is unique."""
        own = b"" if self._prefix_cache else request_number.to_bytes(8, "little")
        return root_hash(cache_salt, digest, extra=own)

    def match(self, request: KVHolder) -> None:
        """Reference the longest resident prefix of a request that holds nothing; sets its `num_computed_tokens`.

        At least one token is always left to compute: logits come from computing, not from the cache.
        """
        assert not request.block_ids, "match() is for a request that holds no blocks"
        limit = (request.num_tokens - 1) // self.block_size
        path = self.index.match(request.root, map(request.full_block, range(limit)))
        for node in path:
            self.pool.acquire(node.block_id)
        request.block_ids = [node.block_id for node in path]
        request.tail_node = path[-1] if path else None
        request.num_published_blocks = len(path)
        request.num_computed_tokens = len(path) * self.block_size

    def num_missing(self, request: KVHolder, num_tokens: int) -> int:
        """Blocks to allocate before the next `num_tokens` tokens can be computed."""
        end = request.num_computed_tokens + num_tokens
        return max(0, -(-end // self.block_size) - len(request.block_ids))

    def allocate(self, request: KVHolder, num_tokens: int) -> bool:
        """Room for the next `num_tokens` tokens, all or nothing; evicts cached blocks when no free one is left."""
        missing = self.num_missing(request, num_tokens)
        if missing > self.pool.num_available:
            return False
        for _ in range(missing):
            request.block_ids.append(self.pool.allocate())
        return True

    def publish(self, request: KVHolder) -> None:
        """Make the blocks that are full and computed findable.

        If another request has published the same prefix meanwhile, this one adopts those blocks and gives its own back:
        equal tokens after an equal prefix have equal KV, and one name has one block. If a name is taken by other tokens
        (a hash collision), this request's blocks stay private from there on.
        """
        for number in range(request.num_published_blocks, request.num_computed_tokens // self.block_size):
            node = self._publish_block(request, number)
            if node is None:
                return
            request.tail_node = node
            request.num_published_blocks = number + 1

    def release(self, request: KVHolder) -> None:
        """Give up all blocks, last first. Published ones stay findable until evicted."""
        for block_id in reversed(request.block_ids):
            self._release_block(block_id)
        request.block_ids = []
        request.tail_node = None
        request.num_published_blocks = 0
        request.num_computed_tokens = 0

    def clear(self) -> None:
        """Forget every cached block; what is in use stays findable."""
        self.pool.evict_all()
        if not len(self.index) and self.watcher is None:  # a tier may hold what the pool does not
            self.events.cleared()

    def flush_events(self, now_s: float) -> KVEventBatch | None:
        """The events since the last flush as one batch."""
        return self.events.flush(now_s)

    def check_invariants(self) -> None:
        """Pool, index, events and their relation. Raises AssertionError."""
        self.pool.check_invariants()
        self.index.check_invariants()
        self.events.check_invariants()
        for block_id in self.pool.cached_in_eviction_order():
            assert self.index.has_block(block_id), f"block {block_id} is cached but cannot be found"
        indexed = [block_id for block_id in range(self.pool.num_blocks) if self.index.has_block(block_id)]
        assert len(indexed) == len(self.index), "the index names blocks that do not exist"
        unreferenced = {block_id for block_id in indexed if not self.pool.ref_counts[block_id]}
        assert unreferenced == set(self.pool.cached_in_eviction_order()), "a free block can still be found"

    def _publish_block(self, request: KVHolder, number: int) -> RadixNode | None:
        block, own = request.full_block(number), request.block_ids[number]
        parent = request.tail_node or self.index.root(request.root)
        node = self.index.child(parent, *block)
        if node is not None:
            self.pool.acquire(node.block_id)
            self._release_block(own)
            request.block_ids[number] = node.block_id
        elif not self.index.has_name(block[0]):
            node = self.index.insert(request.root, request.tail_node, block, own)
            self.events.stored(node.hash, request.tail_node.hash if request.tail_node else None)
            if self.watcher is not None:
                self.watcher.published(own, node)
        return node

    def _release_block(self, block_id: int) -> None:
        if self.pool.release(block_id, keep=self.index.has_block(block_id)):
            self._freed(block_id)

    def _forget(self, block_id: int) -> None:
        self.events.removed(self.index.remove(block_id).hash)
        if self.watcher is not None:
            self.watcher.forgotten(block_id)
        self._freed(block_id)

    def _freed(self, block_id: int) -> None:
        if self._on_free is not None:
            self._on_free(block_id)
