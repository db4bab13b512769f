"""What became of blocks, told to routers: batches with sequence numbers and a replay buffer (vLLM's KV event form).

Knows nothing of sockets: `engines/local.py` and `engines/worker.py` carry the batches.

Read next: `engines/kv/manager.py` (who records), `engines/api.py` (the structs).
"""

from __future__ import annotations

from collections import deque

from engines.api import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch


class EventLog:
    """Collects the events of a step; `flush` makes them a batch. The last `capacity` batches can be replayed."""

    def __init__(self, block_size: int, capacity: int) -> None:
        self._block_size = block_size
        self._pending: list[KVEvent] = []
        self._batches: deque[KVEventBatch] = deque(maxlen=max(1, capacity))
        self._next_seq = 0

    def stored(self, block_hash: bytes, parent_hash: bytes) -> None:
        """A block became findable; chains in order of storing are merged into one event."""
        last = self._pending[-1] if self._pending else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == parent_hash:
            last.block_hashes.append(block_hash)
        else:
            self._pending.append(BlockStored([block_hash], parent_hash, [], self._block_size))

    def removed(self, block_hash: bytes) -> None:
        """A block is no longer findable."""
        last = self._pending[-1] if self._pending else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(block_hash)
        else:
            self._pending.append(BlockRemoved([block_hash]))

    def cleared(self) -> None:
        """Nothing is findable any more."""
        self._pending.append(AllBlocksCleared())

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
        """Batches from `seq` on that are still held; a later first one is a gap to the reader."""
        return [batch for batch in self._batches if batch.seq >= seq]
