"""The KV of requests: match a prefix, allocate, publish full blocks, fork, release. One owner for pool, index, events.

    match     prompt -> resident blocks, now also referenced by this request
    allocate  room for the tokens of the next step
    publish   blocks that became full are findable by others
    release   tail first, so that what is evicted later is always a leaf of the index

Sharing is by full blocks and only through the index: the n choices of a prompt are n requests whose prefix matches. A
partial last block is computed again rather than copied, so no block ever has two writers and none is ever copied.

Knows nothing of tensors or scheduling; a "holder" is anything with the fields below (`engines/core/request.py`).

Read next: `engines/kv/pool.py`, `engines/kv/radix.py`, `engines/core/scheduler.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engines.api import KVEventBatch
from engines.config import CacheConfig
from engines.kv.events import EventLog
from engines.kv.pool import BlockPool
from engines.kv.radix import RadixIndex, RadixNode


class KVHolder(Protocol):
    """What the manager reads and writes of a request."""

    root: bytes
    block_ids: list[int]
    num_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_published_blocks: int
    tail_node: RadixNode | None

    def block_hash(self, index: int) -> bytes:
        """Chained hash of full block `index`."""
        ...

    def block_tokens(self, index: int) -> tuple[int, ...]:
        """Tokens of full block `index`."""
        ...


class KVManager:
    """Mutated by every method but the properties. `on_free(block_id)` lets tests poison what nobody may read again."""

    def __init__(self, config: CacheConfig, num_blocks: int, *, on_free: Callable[[int], None] | None = None) -> None:
        self.block_size = config.block_size
        self.prefix_cache = config.prefix_cache
        self.index = RadixIndex()
        self.pool = BlockPool(num_blocks, on_evict=self._forget)
        self.events = EventLog(config.block_size, config.event_buffer)
        self._on_free = on_free

    @property
    def capacity_tokens(self) -> int:
        """The longest context that fits when nobody else runs."""
        return self.pool.num_blocks * self.block_size

    def match(self, request: KVHolder) -> int:
        """Reference the longest resident prefix of a request that holds nothing; returns its length in tokens.

        At least one token is always left to compute: logits come from computing, not from the cache.
        """
        assert not request.block_ids, "match() is for a request that holds no blocks"
        if not self.prefix_cache:
            return 0
        path: list[RadixNode] = []
        for number in range((request.num_tokens - 1) // self.block_size):
            node = self.index.find(request.block_hash(number), request.block_tokens(number))
            if node is None:
                break
            path.append(node)
        for node in path:
            self.pool.acquire(node.block_id)
        request.block_ids = [node.block_id for node in path]
        request.tail_node = path[-1] if path else None
        request.num_published_blocks = len(path)
        request.num_computed_tokens = len(path) * self.block_size
        return request.num_computed_tokens

    def allocate(self, request: KVHolder, num_tokens: int) -> bool:
        """Room for the next `num_tokens` tokens, all or nothing; evicts cached blocks when no free one is left."""
        missing = self._missing(request, num_tokens)
        if missing > self.pool.num_available:
            return False
        for _ in range(missing):
            request.block_ids.append(self.pool.allocate())
        return True

    def publish(self, request: KVHolder) -> None:
        """Make the blocks that are full and computed findable.

        If another request has published the same prefix meanwhile, this one adopts those blocks and gives its own back:
        equal tokens after an equal prefix have bitwise equal KV.
        """
        if not self.prefix_cache:
            return
        for number in range(request.num_published_blocks, request.num_computed_tokens // self.block_size):
            block_hash, tokens = request.block_hash(number), request.block_tokens(number)
            node = self.index.find(block_hash, tokens)
            if node is None and self.index.taken(block_hash):
                return  # a hash collision: this chain stays private from here on
            if node is None:
                node = self.index.insert(block_hash, tokens, request.block_ids[number], request.tail_node, request.root)
                self.events.stored(block_hash, node.parent_hash)
            elif node.block_id != request.block_ids[number]:
                self.pool.acquire(node.block_id)
                self._release_block(request.block_ids[number])
                request.block_ids[number] = node.block_id
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
        """Forget every cached block that nobody uses."""
        for block_id in self.pool.cached_in_eviction_order():
            node = self.index.remove(block_id)
            self.events.removed(node.hash)
            self.pool.drop_cached(block_id)
            self._freed(block_id)
        if not len(self.index):
            self.events.cleared()

    def flush_events(self, now_s: float) -> KVEventBatch | None:
        """The step's events as one batch."""
        return self.events.flush(now_s)

    def check_invariants(self) -> None:
        """Pool, index and their relation. Raises AssertionError."""
        self.pool.check_invariants()
        self.index.check_invariants()
        for block_id in self.pool.cached_in_eviction_order():
            assert self.index.node_of(block_id) is not None, f"block {block_id} is cached but not findable"
        indexed = sum(self.index.node_of(block_id) is not None for block_id in range(self.pool.num_blocks))
        assert indexed == len(self.index)

    def _missing(self, request: KVHolder, num_tokens: int) -> int:
        end = request.num_computed_tokens + num_tokens
        return max(0, -(-end // self.block_size) - len(request.block_ids))

    def _release_block(self, block_id: int) -> None:
        if self.pool.release(block_id, indexed=self.index.node_of(block_id) is not None):
            self._freed(block_id)

    def _forget(self, block_id: int) -> None:
        self.events.removed(self.index.remove(block_id).hash)
        self._freed(block_id)

    def _freed(self, block_id: int) -> None:
        if self._on_free is not None:
            self._on_free(block_id)
