"""Tiers below the KV pool: where full blocks go on living after the pool needs their place. The seam, and DRAM.

A block is named by its chained hash, which covers the tokens before it, the salt of its trust group, and the model's
digest (weights, number format, positions). Tiers are asked by that name and answer with the bytes that were stored, or
with nothing: whatever is damaged, torn or of another layout is a miss. Knows nothing of requests or of the pool.

A tier gives up least recently used blocks, but never one that another of its blocks continues: without its beginning a
prefix is worth nothing.

Read next: `engines/kv/tier_disk.py`, `engines/kv/mover.py` (who calls), `engines/kv/offload.py`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

import numpy as np

from engines.ops.kv_copy import Bytes


@dataclass(frozen=True, slots=True)
class BlockName:
    """A block's chained hash, what it was chained from, and its tokens (u32 LE).

    `parent` is the hash before it, for the first block of a prompt (`is_first`) the root of its trust group.
    """

    hash: bytes
    parent: bytes
    tokens: bytes
    is_first: bool

    @property
    def parent_block(self) -> bytes | None:
        """The block before it, if there is one."""
        return None if self.is_first else self.parent


class BlockTier(Protocol):
    """Blocks by name, bounded in bytes. `holds` may be called from any thread, all else by one at a time."""

    @property
    def medium(self) -> str:
        """What events call it: "dram", "disk"."""
        ...

    def holds(self, block_hash: bytes) -> bool:
        """True if `get` would probably find it. Does no I/O."""
        ...

    def contents(self) -> list[tuple[bytes, bytes | None]]:
        """(hash, parent block's hash) of everything held, parents first: what survived a restart."""
        ...

    def put(self, name: BlockName, data: Bytes) -> list[bytes]:
        """Keep a copy of `data` [block bytes], if that can be; returns the hashes given up for it."""
        ...

    def get(self, name: BlockName, into: Bytes) -> bool:
        """Copy a block into `into`; it becomes young. False: a miss; what was damaged is forgotten."""
        ...

    def touch(self, block_hash: bytes) -> None:
        """A held block becomes young."""
        ...

    def close(self) -> None:
        """Give everything back that does not survive."""
        ...


@dataclass(slots=True)
class _Entry:
    parent: bytes | None
    used: int
    num_children: int = 0


class LeafLru:
    """Names in order of use, of which only those without a child may be given up. O(log n) an operation.

    A heap holds (use, hash) of leaves; what has been used since, or has gained a child, is skipped when it surfaces.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}
        self._leaves: list[tuple[int, bytes]] = []
        self._uses = 0
        self._orphans: dict[bytes, int] = {}  # children of names that are not here (any more)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: bytes) -> bool:
        return name in self._entries

    def add(self, name: bytes, parent: bytes | None) -> None:
        """A new name, the youngest."""
        assert name not in self._entries
        if parent is not None and parent in self._entries:
            self._entries[parent].num_children += 1
        elif parent is not None:
            self._orphans[parent] = self._orphans.get(parent, 0) + 1
        self._entries[name] = _Entry(parent, 0, self._orphans.pop(name, 0))
        self.touch(name)

    def touch(self, name: bytes) -> None:
        """It becomes the youngest."""
        self._uses += 1
        entry = self._entries[name]
        entry.used = self._uses
        self._offer(name, entry)
        if len(self._leaves) > 64 + 2 * len(self._entries):
            self._leaves = [(e.used, n) for n, e in self._entries.items() if not e.num_children]
            heapq.heapify(self._leaves)

    def remove(self, name: bytes) -> None:
        """Forget a name; children stay, and belong to it again if it returns."""
        entry = self._entries.pop(name)
        if entry.num_children:
            self._orphans[name] = entry.num_children
        parent = entry.parent
        if parent is None:
            return
        if parent in self._entries:
            self._entries[parent].num_children -= 1
            self._offer(parent, self._entries[parent])
        elif self._orphans[parent] == 1:
            del self._orphans[parent]
        else:
            self._orphans[parent] -= 1

    def pop_oldest(self) -> bytes:
        """Forget the longest unused name that has no child here, and return it."""
        while True:
            used, name = heapq.heappop(self._leaves)
            entry = self._entries.get(name)
            if entry is not None and entry.used == used and not entry.num_children:
                self.remove(name)
                return name

    def in_chain_order(self) -> list[tuple[bytes, bytes | None]]:
        """(name, parent), parents before their children."""
        ordered: dict[bytes, bytes | None] = {}
        for name in self._entries:
            path, at = [], name
            while at in self._entries and at not in ordered:
                path.append(at)
                at = self._entries[at].parent or b""
            for step in reversed(path):
                ordered[step] = self._entries[step].parent
        return list(ordered.items())

    def check_invariants(self) -> None:
        """Children are counted where they belong, and some leaf can be given up. Raises AssertionError."""
        counts: dict[bytes, int] = {}
        for entry in self._entries.values():
            if entry.parent is not None:
                counts[entry.parent] = counts.get(entry.parent, 0) + 1
        for name, entry in self._entries.items():
            assert entry.num_children == counts.pop(name, 0), "a child was miscounted"
            assert entry.num_children or (entry.used, name) in self._leaves, "a leaf cannot be found"
        assert counts == self._orphans, "orphans were miscounted"

    def _offer(self, name: bytes, entry: _Entry) -> None:
        if not entry.num_children:
            heapq.heappush(self._leaves, (entry.used, name))


class DramTier:
    """Blocks in an arena of fixed places; untouched places take no memory."""

    medium = "dram"

    def __init__(self, capacity_bytes: int, block_bytes: int) -> None:
        """At least one block must fit."""
        places = capacity_bytes // block_bytes
        if places < 1:
            raise ValueError(f"kv_dram_bytes is {capacity_bytes}; one block takes {block_bytes}")
        self._arena: Bytes = np.empty((places, block_bytes), dtype=np.uint8)
        self._free = list(range(places - 1, -1, -1))
        self._places: dict[bytes, tuple[int, BlockName]] = {}
        self._order = LeafLru()
        self._lock = Lock()

    def holds(self, block_hash: bytes) -> bool:
        """See `BlockTier.holds`."""
        with self._lock:
            return block_hash in self._places

    def contents(self) -> list[tuple[bytes, bytes | None]]:
        """See `BlockTier.contents`; memory survives nothing."""
        return self._order.in_chain_order()

    def put(self, name: BlockName, data: Bytes) -> list[bytes]:
        """See `BlockTier.put`."""
        if name.hash in self._places:
            self._order.touch(name.hash)
            return []
        evicted = []
        if not self._free:
            oldest = self._order.pop_oldest()
            with self._lock:
                self._free.append(self._places.pop(oldest)[0])
            evicted.append(oldest)
        place = self._free.pop()
        np.copyto(self._arena[place], data)
        with self._lock:
            self._places[name.hash] = place, name
        self._order.add(name.hash, name.parent_block)
        return evicted

    def get(self, name: BlockName, into: Bytes) -> bool:
        """See `BlockTier.get`."""
        place, stored = self._places.get(name.hash, (0, None))
        if stored != name:
            return False
        np.copyto(into, self._arena[place])
        self._order.touch(name.hash)
        return True

    def touch(self, block_hash: bytes) -> None:
        """See `BlockTier.touch`."""
        if block_hash in self._places:
            self._order.touch(block_hash)

    def close(self) -> None:
        """See `BlockTier.close`."""
        with self._lock:
            self._places.clear()

    def check_invariants(self) -> None:
        """Every place is free or named once. Raises AssertionError."""
        self._order.check_invariants()
        used = [place for place, _ in self._places.values()]
        assert sorted(used + self._free) == list(range(len(self._arena)))
        assert len(self._order) == len(self._places)
