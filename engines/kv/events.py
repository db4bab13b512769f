"""What became of blocks, told to routers: batches with sequence numbers and a replay ring (vLLM's KV event form).

Knows nothing of sockets: `engines/local.py` and `engines/worker.py` carry the batches.

Read next: `engines/kv/manager.py` (who records), `engines/api.py` (the structs).
"""

from __future__ import annotations

from collections import deque

from engines.api import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch


class EventLog:
    """Collects the events of a step; `flush` makes them a batch. The last `capacity` batches can be replayed.

    With `capacity` 0 nothing is recorded.
    """

    def __init__(self, block_size: int, capacity: int) -> None:
        self._block_size = block_size
        self._capacity = capacity
        self._pending: list[KVEvent] = []
        self._batches: deque[KVEventBatch] = deque(maxlen=capacity)
        self._next_seq = 0

    def stored(self, block_hash: bytes, parent_hash: bytes | None, medium: str | None = None) -> None:
        """A block became findable; a chain stored in order becomes one event. No parent: the first of a prompt.

        `medium`: the tier that holds it, None for the pool.
        """
        last = self._pending[-1] if self._pending else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == parent_hash and last.medium == medium:
            last.block_hashes.append(block_hash)
        else:
            self._add(BlockStored([block_hash], parent_hash, [], self._block_size, medium=medium))

    def removed(self, block_hash: bytes, medium: str | None = None) -> None:
        """A block is no longer findable there; removals in a row become one event."""
        last = self._pending[-1] if self._pending else None
        if isinstance(last, BlockRemoved) and last.medium == medium:
            last.block_hashes.append(block_hash)
        else:
            self._add(BlockRemoved([block_hash], medium))

    def cleared(self) -> None:
        """Nothing is findable any more; what has not been flushed yet need not be told."""
        self._pending.clear()
        self._add(AllBlocksCleared())

    def flush(self, now_s: float) -> KVEventBatch | None:
        """The events since the last flush as the next batch; None if there were none."""
        if not self._pending:
            return None
        batch = KVEventBatch(now_s, self._pending, self._next_seq)
        self._pending = []
        self._next_seq += 1
        self._batches.append(batch)
        return batch

    def since(self, seq: int) -> list[KVEventBatch]:
        """Batches from `seq` on that are still held. If the first is a later one, the reader has missed some."""
        return [batch for batch in self._batches if batch.seq >= seq]

    def check_invariants(self) -> None:
        """The ring has no gap and ends before the next number. Raises AssertionError."""
        held = [batch.seq for batch in self._batches]
        assert held == list(range(self._next_seq - len(held), self._next_seq))
        assert all(batch.events for batch in self._batches)

    def _add(self, event: KVEvent) -> None:
        if self._capacity:
            self._pending.append(event)
