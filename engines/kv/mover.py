"""The thread that copies blocks between the pool and the tiers, so that no step waits for a copy or a disk.

Jobs go in from the engine's thread, results come out to it; loads go before stores, for a request waits for them. The
thread starts with the first job; it writes only blocks that the engine's thread keeps for the load. Knows nothing of
requests or of the pool's books.

Read next: `engines/kv/offload.py` (the other side), `engines/kv/tiers.py`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Condition, Thread

import numpy as np

from engines.kv.tiers import BlockName, BlockTier
from engines.ops.kv_copy import BlockCopier, Bytes

log = logging.getLogger("facet.engine")


@dataclass(slots=True)
class Changes:
    """What a job did to the tiers, by medium: (hash, parent block) now held, and hashes no longer held."""

    stored: list[tuple[str, bytes, bytes | None]] = field(default_factory=list)
    removed: list[tuple[str, bytes]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class StoreJob:
    """Copy a block of the pool to every tier that lacks it.

    The engine's thread sets `is_cancelled` before the block may be written again: what was read until then is whole,
    what is read while the flag is set is thrown away. So the pool never waits for a copy.
    """

    block_id: int
    name: BlockName
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Copy blocks into the pool, in chain order, up to the first that is in no tier. `ticket` is the caller's own."""

    ticket: int
    names: Sequence[BlockName]
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Result:
    """A finished job; of a load, how many blocks came. A block of a tier may be gone although `holds` said yes."""

    job: StoreJob | LoadJob
    num_loaded: int
    changes: Changes


class Mover:
    """`on_result` is called on the mover's thread after each result, to wake whoever waits for one."""

    def __init__(self, copier: BlockCopier, tiers: Sequence[BlockTier]) -> None:
        """Tiers nearest first."""
        self.on_result: Callable[[], None] = lambda: None
        self._copier, self._tiers = copier, tiers
        self._buffers = np.empty((2, copier.block_bytes), dtype=np.uint8)
        # Reads the next block of a load while the last one is written: it has its turn at the tiers only then.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="facet-kv-reader")
        self._loads: deque[LoadJob] = deque()
        self._stores: deque[StoreJob] = deque()
        self._results: deque[Result] = deque()
        self._changed = Condition()
        self._thread: Thread | None = None
        self._closed = False
        self.num_unfinished = 0  # written by the engine's thread only

    def submit(self, job: StoreJob | LoadJob) -> None:
        """Queue a job."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="facet-kv-mover", daemon=True)
            self._thread.start()
        self.num_unfinished += 1
        with self._changed:
            if isinstance(job, LoadJob):
                self._loads.append(job)
            else:
                self._stores.append(job)
            self._changed.notify_all()

    def has_results(self) -> bool:
        """True if `take_results` would return some."""
        return bool(self._results)

    def take_results(self) -> list[Result]:
        """Results since the last call."""
        taken = []
        while self._results:
            taken.append(self._results.popleft())
        self.num_unfinished -= len(taken)
        return taken

    def wait(self, timeout_s: float) -> None:
        """Return when there is a result, or after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._results) or self._closed, timeout_s)

    def close(self) -> None:
        """Finish the job at hand, forget the others, close the tiers."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._reader.shutdown()
        for tier in self._tiers:
            tier.close()

    # -- below: the mover's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._next()) is not None:
            changes, num_loaded = Changes(), 0
            try:
                if isinstance(job, LoadJob):
                    num_loaded = self._load(job, changes)
                else:
                    self._store(job, changes)
            except Exception:
                # Neither a lost copy nor a failed read may end the engine: it computes what it does not find.
                log.exception("a KV block could not be copied")
            with self._changed:
                self._results.append(Result(job, num_loaded, changes))
                self._changed.notify_all()
            self.on_result()

    def _next(self) -> StoreJob | LoadJob | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._loads) or bool(self._stores))
            if self._closed:
                return None
            return self._loads.popleft() if self._loads else self._stores.popleft()

    def _load(self, job: LoadJob, changes: Changes) -> int:
        count = len(job.names)
        ahead = self._reader.submit(self._fetch, job.names[0], changes, self._buffers[0])
        for number, block_id in enumerate(job.block_ids):
            if not ahead.result():
                return number
            if number + 1 < count:
                ahead = self._reader.submit(self._fetch, job.names[number + 1], changes, self._buffers[1 - number % 2])
            self._copier.write(block_id, self._buffers[number % 2])
        return count

    def _fetch(self, name: BlockName, changes: Changes, into: Bytes) -> bool:
        """From the nearest tier that has it."""
        for tier in self._tiers:
            held = tier.holds(name.hash)
            if held and tier.get(name, into):
                return True
            if held and not tier.holds(name.hash):
                changes.removed.append((tier.medium, name.hash))
        return False

    def _store(self, job: StoreJob, changes: Changes) -> None:
        read, buffer = False, self._buffers[0]
        for tier in self._tiers:
            if tier.holds(job.name.hash):
                tier.touch(job.name.hash)
                continue
            if not read:
                if not job.is_cancelled:
                    self._copier.read(job.block_id, buffer)
                if job.is_cancelled:
                    return
                read = True
            changes.removed += [(tier.medium, block_hash) for block_hash in tier.put(job.name, buffer)]
            if tier.holds(job.name.hash):
                changes.stored.append((tier.medium, job.name.hash, job.name.parent_block))
