"""The embedded store: one SQLite file in WAL mode, one connection on one thread, off the event loop.

Other processes (the CLI) may write the same file; `version()` tells. Knows nothing of what the rows mean.

Read next: `gateway/stores/base.py`.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from gateway.stores.base import KeyRecord, StoreError, UsageRow

T = TypeVar("T")
BUSY_TIMEOUT_S = 5.0
SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (
    id TEXT PRIMARY KEY, digest TEXT NOT NULL UNIQUE, name TEXT NOT NULL, tenant TEXT NOT NULL, role TEXT NOT NULL,
    hint TEXT NOT NULL, created_s REAL NOT NULL, revoked_s REAL
) STRICT;
CREATE TABLE IF NOT EXISTS usage (
    request_id TEXT NOT NULL, step TEXT NOT NULL, member INTEGER NOT NULL, attempt INTEGER NOT NULL,
    at_s REAL NOT NULL, tenant TEXT NOT NULL, key_id TEXT NOT NULL, aspect TEXT NOT NULL, model TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    cost_usd_micros INTEGER NOT NULL, status INTEGER NOT NULL,
    PRIMARY KEY (request_id, step, member, attempt)
) STRICT;
CREATE INDEX IF NOT EXISTS usage_at ON usage (at_s);
"""
KEY_FIELDS = tuple(field.name for field in msgspec.structs.fields(KeyRecord))
USAGE_FIELDS = tuple(field.name for field in msgspec.structs.fields(UsageRow))


class SqliteStore:
    """`Store` in a file. Make it with `await SqliteStore.open(path)`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="facet-sqlite")
        self._connection: sqlite3.Connection | None = None

    @classmethod
    async def open(cls, path: Path) -> SqliteStore:
        """Create the file (0600, in a folder of 0700) and its tables if need be. Raises StoreError."""
        store = cls(path)
        try:
            await store._run(store._connect)
        except BaseException:
            store._thread.shutdown()
            raise
        return store

    async def add_key(self, record: KeyRecord) -> None:
        """One insert."""
        await self._run(partial(self._insert, "keys", KEY_FIELDS, [record], "INSERT"))

    async def keys(self) -> list[KeyRecord]:
        """Oldest first."""
        rows = await self._query(f"SELECT {', '.join(KEY_FIELDS)} FROM keys ORDER BY created_s, id")
        return [msgspec.convert(dict(zip(KEY_FIELDS, row, strict=True)), KeyRecord) for row in rows]

    async def revoke_key(self, key_id: str, at_s: float) -> bool:
        """One update."""
        statement = "UPDATE keys SET revoked_s = ? WHERE id = ? AND revoked_s IS NULL"

        def update(connection: sqlite3.Connection) -> int:
            with connection:
                return connection.execute(statement, (at_s, key_id)).rowcount

        return await self._run(update) == 1

    async def version(self) -> int:
        """SQLite's data_version: differs after a write by another connection."""
        (row,) = await self._query("PRAGMA data_version")
        return hash(row)

    async def append_usage(self, rows: Sequence[UsageRow]) -> int:
        """One transaction."""
        return await self._run(partial(self._insert, "usage", USAGE_FIELDS, rows, "INSERT OR IGNORE"))

    async def usage(self, since_s: float = 0.0) -> list[UsageRow]:
        """Oldest first."""
        statement = f"SELECT {', '.join(USAGE_FIELDS)} FROM usage WHERE at_s >= ? ORDER BY at_s, request_id"
        rows = await self._query(statement, (since_s,))
        return [msgspec.convert(dict(zip(USAGE_FIELDS, row, strict=True)), UsageRow) for row in rows]

    async def close(self) -> None:
        """Close the file and end the thread."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await asyncio.get_running_loop().run_in_executor(self._thread, connection.close)
        self._thread.shutdown()

    async def _query(self, statement: str, values: Sequence[object] = ()) -> list[tuple[object, ...]]:
        return await self._run(lambda connection: connection.execute(statement, values).fetchall())

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """`work` on the store's thread; SQLite's errors become StoreError."""

        def guarded() -> T:
            try:
                if self._connection is None:
                    self._connection = self._made()
                return work(self._connection)
            except (sqlite3.Error, OSError) as error:
                raise StoreError(f"{self._path}: {error}") from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, guarded)

    def _made(self) -> sqlite3.Connection:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
        return sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S, check_same_thread=False)

    def _connect(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found > SCHEMA_VERSION:
            raise StoreError(
                f"{self._path} was written by a newer Facet (schema {found}, this one knows {SCHEMA_VERSION})"
            )
        with connection:
            connection.executescript(SCHEMA)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @staticmethod
    def _insert(
        table: str,
        fields: Sequence[str],
        records: Sequence[msgspec.Struct],
        verb: str,
        connection: sqlite3.Connection,
    ) -> int:
        marks = ", ".join("?" * len(fields))
        statement = f"{verb} INTO {table} ({', '.join(fields)}) VALUES ({marks})"
        with connection:
            values = [tuple(getattr(record, field) for field in fields) for record in records]
            return connection.executemany(statement, values).rowcount
