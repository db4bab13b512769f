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
    """Allocator of `num_blocks` block ids. All operations are O(1) a block.

    `on_evict(block_id)` is called when a cached block is about to be reused, so that the index forgets it first.
    """

    def __init__(self, num_blocks: int, *, on_evict: Callable[[int], None]) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, must be at least 1")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._on_evict = on_evict
        # Popped from the end: a fresh pool hands out 0, 1, 2, ...
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
            block_id = next(iter(self._cached))
            self._on_evict(block_id)
            del self._cached[block_id]
        assert self.ref_counts[block_id] == 0
        self.ref_counts[block_id] = 1
        return block_id

    def acquire(self, block_id: int) -> None:
        """One more reference to a used or cached block."""
        if self.ref_counts[block_id] == 0:
            del self._cached[block_id]
        self.ref_counts[block_id] += 1

    def release(self, block_id: int, *, indexed: bool) -> bool:
        """One reference less. An unreferenced block becomes cached if `indexed`, else free. True if it became free."""
        assert self.ref_counts[block_id] > 0, f"block {block_id} released more often than acquired"
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id]:
            return False
        if indexed:
            self._cached[block_id] = None
            return False
        self._free.append(block_id)
        return True

    def drop_cached(self, block_id: int) -> None:
        """A cached block was taken out of the index: it is free now."""
        del self._cached[block_id]
        self._free.append(block_id)

    def is_cached(self, block_id: int) -> bool:
        """True if unreferenced and indexed."""
        return block_id in self._cached

    def cached_in_eviction_order(self) -> list[int]:
        """Cached blocks, next victim first."""
        return list(self._cached)

    def check_invariants(self) -> None:
        """free + cached + used = total, and every block is in one state. Raises AssertionError."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, f"blocks both free and cached: {free & cached}"
        used = {block_id for block_id, count in enumerate(self.ref_counts) if count > 0}
        assert not used & (free | cached), f"referenced blocks in a list: {used & (free | cached)}"
        assert len(free) + len(cached) + len(used) == self.num_blocks
        assert min(self.ref_counts) >= 0
