"""Which KV blocks are whose: ids, reference counts, and the order in which unreferenced blocks are given up.

Every block is in exactly one state:

    free    nobody refers to it and it holds nothing worth keeping
    cached  nobody refers to it, but the prefix index can still find it; evicted oldest first
    used    ref_count >= 1

Knows nothing of tokens, hashes or tensors.

Read next: `engines/kv/radix.py`, `engines/kv/manager.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class BlockPool:
    """Allocator of `num_blocks` block ids. Every operation is O(1) a block.

    `on_evict(block_id)` is called when a cached block is about to be reused, so that the index forgets it first.
    The cached blocks are an OrderedDict, which is a doubly linked list with a map into it.
    """

    def __init__(self, num_blocks: int, *, on_evict: Callable[[int], None]) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, must be at least 1")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._on_evict = on_evict
        # Popped from the end: a fresh pool hands out 0, 1, 2, ...; then what was freed last is used first.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks that the index can still find."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with a reference."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """How many blocks `allocate` could hand out now."""
        return self.num_free + self.num_cached

    def allocate(self) -> int:
        """A block with ref_count 1: a free one, else the longest unused cached one. Caller checks `num_available`."""
        if self._free:
            block_id = self._free.pop()
        else:
            assert self._cached, "allocate from an exhausted pool: check num_available first"
            block_id, _ = self._cached.popitem(last=False)
            self._on_evict(block_id)
        assert self.ref_counts[block_id] == 0
        self.ref_counts[block_id] = 1
        return block_id

    def acquire(self, block_id: int) -> None:
        """One more reference to a used or cached block."""
        if self.ref_counts[block_id] == 0:
            del self._cached[block_id]
        self.ref_counts[block_id] += 1

    def release(self, block_id: int, *, keep: bool) -> bool:
        """One reference less; True if the block became free. An unreferenced block becomes cached if `keep`."""
        assert self.ref_counts[block_id] > 0, f"block {block_id} released more often than acquired"
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id]:
            return False
        if keep:
            self._cached[block_id] = None
            return False
        self._free.append(block_id)
        return True

    def evict_all(self) -> list[int]:
        """Make every cached block free, as `allocate` would do one by one; returns them in that order."""
        evicted = list(self._cached)
        for block_id in evicted:
            del self._cached[block_id]
            self._on_evict(block_id)
            self._free.append(block_id)
        return evicted

    def cached_in_eviction_order(self) -> list[int]:
        """Cached blocks, next victim first."""
        return list(self._cached)

    def check_invariants(self) -> None:
        """free + cached + used = total, and every block is in one state. Raises AssertionError."""
        free, cached = set(self._free), set(self._cached)
        used = {block_id for block_id, count in enumerate(self.ref_counts) if count > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert free.isdisjoint(cached), f"blocks both free and cached: {free & cached}"
        assert used.isdisjoint(free | cached), f"referenced blocks up for allocation: {used & (free | cached)}"
        assert free | cached | used == set(range(self.num_blocks)), "a block is lost"
        assert min(self.ref_counts) >= 0
        assert self.num_free + self.num_cached + self.num_used == self.num_blocks
        assert self.num_used == len(used)
