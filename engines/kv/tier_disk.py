"""KV blocks on disk: one file a block, written beside its name and renamed, believed only if its checksum fits.

    folder/<layout>/slot-<n>/<hash>-<parent | root>.kv

A file: 8 bytes of magic; SHA-256 of what follows; hash, parent (16 bytes each); token bytes and block bytes (u32 LE
each); tokens; block. Nothing is synced: after a power cut a torn file fails its checksum and is a miss, as is one that
somebody changed. A worker locks a slot for itself, the lowest that is free, so that a restarted worker finds what the
one before it wrote and `capacity_bytes` bounds each worker. File times keep the order of use over restarts.

Knows nothing of what the bytes mean. Read next: `engines/kv/tiers.py`, `engines/kv/mover.py`.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import logging
import os
import struct
from contextlib import suppress
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import IO

from engines.kv.tiers import BlockName, LeafLru
from engines.ops.kv_copy import Bytes
from engines.text.block_hash import HASH_BYTES

MAGIC = b"FACETKV1"
SUM_BYTES = 32
FACTS = struct.Struct(f"<{HASH_BYTES}s{HASH_BYTES}sII")
FIRST = "root"
SUFFIX = ".kv"
log = logging.getLogger("facet.engine")


class DiskTier:
    """Survives a restart of its worker. See `BlockTier`."""

    medium = "disk"

    def __init__(self, folder: Path, capacity_bytes: int, block_bytes: int, layout: str) -> None:
        """Lists what is there, opens nothing. Raises OSError if the folder cannot be used."""
        self._file_bytes = len(MAGIC) + SUM_BYTES + FACTS.size + block_bytes
        self._block_bytes = block_bytes
        if capacity_bytes < self._file_bytes:
            raise ValueError(f"kv_disk_bytes is {capacity_bytes}; one block takes {self._file_bytes} and its tokens")
        self._capacity = capacity_bytes
        self._slot, self._lock_file = _own_slot(folder / hashlib.sha256(layout.encode()).hexdigest()[:16])
        self._files: dict[bytes, tuple[Path, int]] = {}
        self._order = LeafLru()
        self._lock = Lock()
        self.used_bytes = 0
        self._scan()

    def holds(self, block_hash: bytes) -> bool:
        """See `BlockTier.holds`."""
        with self._lock:
            return block_hash in self._files

    def contents(self) -> list[tuple[bytes, bytes | None]]:
        """See `BlockTier.contents`."""
        return self._order.in_chain_order()

    def put(self, name: BlockName, data: Bytes) -> list[bytes]:
        """See `BlockTier.put`."""
        if name.hash in self._files:
            self.touch(name.hash)
            return []
        facts = FACTS.pack(name.hash, name.parent, len(name.tokens), data.nbytes) + name.tokens
        total = hashlib.sha256(facts)
        total.update(data.data)
        size = len(MAGIC) + SUM_BYTES + len(facts) + data.nbytes
        evicted = []
        while self._files and self.used_bytes + size > self._capacity:
            evicted.append(self._give_up_oldest())
        path = self._path(name.hash, name.parent_block)
        temporary = path.with_suffix(".new")
        try:
            with temporary.open("wb") as file:
                file.write(MAGIC + total.digest() + facts)
                file.write(data.data)
            temporary.replace(path)
        except OSError as error:
            log.warning("a KV block is not kept on disk: %s", error)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            return evicted
        self._admit(name.hash, name.parent_block, size)
        return evicted

    def get(self, name: BlockName, into: Bytes) -> bool:
        """See `BlockTier.get`."""
        if name.hash not in self._files:
            return False
        path = self._path(name.hash, name.parent_block)
        try:
            with FileIO(path) as file:
                fine = self._read(file, name, into)
        except OSError:
            fine = False
        if not fine:
            self._forget(name.hash)
            return False
        self.touch(name.hash)
        return True

    def touch(self, block_hash: bytes) -> None:
        """See `BlockTier.touch`."""
        if block_hash in self._files:
            self._order.touch(block_hash)
            with suppress(OSError):
                os.utime(self._files[block_hash][0])

    def close(self) -> None:
        """See `BlockTier.close`: the files stay, the slot is free for the next worker."""
        self._lock_file.close()

    def check_invariants(self) -> None:
        """Names, sizes and the bound agree. Raises AssertionError."""
        self._order.check_invariants()
        assert len(self._order) == len(self._files)
        assert self.used_bytes == sum(size for _, size in self._files.values()) <= self._capacity

    def _read(self, file: FileIO, name: BlockName, into: Bytes) -> bool:
        head = file.read(len(MAGIC) + SUM_BYTES + FACTS.size + len(name.tokens))
        facts = FACTS.pack(name.hash, name.parent, len(name.tokens), into.nbytes) + name.tokens
        if head[: len(MAGIC)] != MAGIC or head[len(MAGIC) + SUM_BYTES :] != facts:
            return False
        done = 0
        while done < into.nbytes:
            count = file.readinto(into[done:].data)
            if not count:
                return False
            done += count
        total = hashlib.sha256(facts)
        total.update(into.data)
        return total.digest() == head[len(MAGIC) : len(MAGIC) + SUM_BYTES] and not file.read(1)

    def _scan(self) -> None:
        """What an earlier worker left, oldest use first; what it left half written goes."""
        found: list[tuple[int, bytes, bytes | None, int]] = []
        with os.scandir(self._slot) as entries:
            for entry in entries:
                named = _parse(entry.name)
                if named is not None:
                    facts = entry.stat()
                    found.append((facts.st_mtime_ns, *named, facts.st_size))
                elif entry.name.endswith(".new"):
                    Path(entry.path).unlink(missing_ok=True)
        for _, block_hash, parent, size in sorted(found, key=lambda one: one[0]):
            self._admit(block_hash, parent, size)
        while self.used_bytes > self._capacity:
            self._give_up_oldest()

    def _admit(self, block_hash: bytes, parent: bytes | None, size: int) -> None:
        with self._lock:
            self._files[block_hash] = self._path(block_hash, parent), size
        self._order.add(block_hash, parent)
        self.used_bytes += size

    def _give_up_oldest(self) -> bytes:
        oldest = self._order.pop_oldest()
        with self._lock:
            path, size = self._files.pop(oldest)
        self.used_bytes -= size
        path.unlink(missing_ok=True)
        return oldest

    def _forget(self, block_hash: bytes) -> None:
        self._order.remove(block_hash)
        with self._lock:
            path, size = self._files.pop(block_hash)
        self.used_bytes -= size
        path.unlink(missing_ok=True)

    def _path(self, block_hash: bytes, parent: bytes | None) -> Path:
        return self._slot / f"{block_hash.hex()}-{parent.hex() if parent is not None else FIRST}{SUFFIX}"


def _own_slot(folder: Path) -> tuple[Path, IO[bytes]]:
    """The lowest slot that no living worker holds, and the lock that keeps it ours until it is closed."""
    for number in itertools.count():
        slot = folder / f"slot-{number}"
        slot.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (slot / "lock").open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        return slot, file
    raise AssertionError("unreachable: slots have no end")


def _parse(file_name: str) -> tuple[bytes, bytes | None] | None:
    """(hash, parent block) of a block's file name; None for any other name."""
    stem, dot, suffix = file_name.partition(".")
    block, dash, parent = stem.partition("-")
    if dot + suffix != SUFFIX or not dash or len(block) != 2 * HASH_BYTES:
        return None
    try:
        return bytes.fromhex(block), None if parent == FIRST else bytes.fromhex(parent)
    except ValueError:
        return None
