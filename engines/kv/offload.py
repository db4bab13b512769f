"""The engine's side of the tiers: which blocks are copied down, which are brought back, and for whom.

    publish ──▶ offered to the mover ──▶ in the tiers (unless the pool reuses the block first)
    request ──▶ loading: fresh blocks of the pool are filled, published, released ──▶ an ordinary prefix hit

For a waiting request whose prefix goes on in a tier, a `Load` takes what the pool has of it and fresh blocks for the
rest; when the mover is done, what came is published like computed blocks and given back, and the request finds it by
matching. A load that nobody wants any more ends the same way.

Runs on the engine's thread, waits for nothing unless told to. Knows nothing of tensors or scheduling.

Read next: `engines/kv/mover.py`, `engines/kv/manager.py`, `engines/core/scheduler.py` (who asks).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from engines.kv.manager import KVHolder, KVManager
from engines.kv.mover import Changes, LoadJob, Mover, Result, StoreJob
from engines.kv.radix import RadixNode
from engines.kv.tiers import BlockName, BlockTier


class Load:
    """Holds the blocks of a prefix while the mover fills those that the pool lacked. A `KVHolder`."""

    def __init__(self, wanted: KVHolder) -> None:
        self.wanted = wanted
        self.root = wanted.root
        self.num_tokens = wanted.num_tokens
        self.block_ids: list[int] = []
        self.num_computed_tokens = 0
        self.num_published_blocks = 0
        self.tail_node: RadixNode | None = None

    def full_block(self, number: int) -> tuple[bytes, bytes]:
        """As the request's."""
        return self.wanted.full_block(number)


class Offload:
    """Offers published blocks to the tiers and brings prefixes back. Made once, for one `KVManager`."""

    def __init__(self, kv: KVManager, mover: Mover, tiers: Sequence[BlockTier]) -> None:
        """What the tiers hold already is told in the first batch of events."""
        self._kv, self._mover, self._tiers = kv, mover, tiers
        self._offered: dict[int, StoreJob] = {}
        self._loads: dict[int, Load] = {}
        self._tickets = itertools.count()
        self.num_loaded_blocks = 0
        self.num_stored_blocks = 0
        kv.watcher = self
        for tier in tiers:
            for block_hash, parent in tier.contents():
                kv.events.stored(block_hash, parent, tier.medium)

    # -- told by the KV manager ---------------------------------------------------------------------------------------

    def published(self, block_id: int, node: RadixNode) -> None:
        """A block can be found from now on, and will not change while it can."""
        if not all(tier.holds(node.hash) for tier in self._tiers):
            parent = node.parent
            assert parent is not None, "a root is never published"
            job = StoreJob(block_id, BlockName(node.hash, parent.hash, node.tokens, parent.parent is None))
            self._offered[block_id] = job
            self._mover.submit(job)

    def forgotten(self, block_id: int) -> None:
        """The pool is about to reuse a block."""
        job = self._offered.pop(block_id, None)
        if job is not None:
            job.is_cancelled = True

    def references(self) -> Iterator[int]:
        """Blocks held here, once a reference."""
        for load in self._loads.values():
            yield from load.block_ids

    # -- told by the scheduler ----------------------------------------------------------------------------------------

    def fetch(self, request: KVHolder, num_promised: int) -> bool:
        """Begin to load what the tiers have of a request's prefix beyond the pool's; False if that is nothing.

        Nothing is begun either if the whole request would not fit beside `num_promised` blocks.
        """
        kv, load = self._kv, Load(request)
        kv.match(load)
        names = self._in_tiers(load)
        room = kv.pool.num_available - num_promised
        if not names or kv.num_missing(load, load.num_tokens - load.num_computed_tokens) > room:
            kv.release(load)
            return False
        resident = len(load.block_ids)
        fits = kv.allocate(load, len(names) * kv.block_size)
        assert fits, "the room was counted"
        ticket = next(self._tickets)
        self._loads[ticket] = load
        self._mover.submit(LoadJob(ticket, names, tuple(load.block_ids[resident:])))
        return True

    def pump(self) -> list[KVHolder]:
        """Take what the mover has finished; the requests whose loads have ended."""
        return [load for result in self._mover.take_results() if (load := self._finish(result)) is not None]

    def on_result(self, callback: Callable[[], None]) -> None:
        """Call on the mover's thread whenever there is a result: it wakes an engine that has nothing else to do."""
        self._mover.on_result = callback

    def has_results(self) -> bool:
        """True if `pump` has something to take."""
        return self._mover.has_results()

    @property
    def is_busy(self) -> bool:
        """True while the mover has work, whose end will be a result."""
        return self._mover.num_unfinished > 0

    def wait(self, timeout_s: float) -> None:
        """Block until there is a result."""
        self._mover.wait(timeout_s)

    def settle(self, timeout_s: float) -> None:
        """Wait for all copies, as long as there is one at least every `timeout_s`. Nothing may run."""
        while self.is_busy:
            self._mover.wait(timeout_s)
            if not self.has_results():
                return
            self.pump()

    def close(self) -> None:
        """End the mover and close the tiers."""
        self._mover.close()

    def check_invariants(self) -> None:
        """What is offered can be found in the index; every job is known. Raises AssertionError."""
        for block_id, job in self._offered.items():
            assert self._kv.index.has_block(block_id), f"block {block_id} is offered but cannot be found"
            assert not job.is_cancelled
        assert self._mover.num_unfinished >= len(self._offered) + len(self._loads)

    def _in_tiers(self, load: Load) -> list[BlockName]:
        """Names of the blocks after those that `load` holds, as far as some tier has them."""
        names: list[BlockName] = []
        for number in range(len(load.block_ids), (load.num_tokens - 1) // self._kv.block_size):
            block_hash, tokens = load.full_block(number)
            if not any(tier.holds(block_hash) for tier in self._tiers):
                break
            parent = load.full_block(number - 1)[0] if number else load.root
            names.append(BlockName(block_hash, parent, tokens, number == 0))
        return names

    def _finish(self, result: Result) -> KVHolder | None:
        self._tell(result.changes)
        if isinstance(result.job, StoreJob):
            if self._offered.get(result.job.block_id) is result.job:
                del self._offered[result.job.block_id]
            self.num_stored_blocks += bool(result.changes.stored)
            return None
        load = self._loads.pop(result.job.ticket)
        load.num_computed_tokens += result.num_loaded * self._kv.block_size
        self._kv.publish(load)
        self._kv.release(load)
        self.num_loaded_blocks += result.num_loaded
        return load.wanted

    def _tell(self, changes: Changes) -> None:
        for medium, block_hash in changes.removed:
            self._kv.events.removed(block_hash, medium)
        for medium, block_hash, parent in changes.stored:
            self._kv.events.stored(block_hash, parent, medium)
