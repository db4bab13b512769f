"""What the gateway keeps: virtual keys and the ledger. One seam; the embedded implementation is SQLite.

Times are seconds since the epoch, money is micro-USD, both integers or floats as named. Knows nothing of HTTP.

Read next: `gateway/stores/sqlite.py`, `gateway/tenants.py`, `gateway/ledger.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

Role = Literal["user", "admin"]


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A virtual key as stored: `digest` is its HMAC-SHA256 under the server's secret, never the key itself."""

    id: str
    digest: str
    name: str
    tenant: str
    role: Role
    hint: str
    created_s: float
    revoked_s: float | None = None


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """One settled piece of work; unique by (request_id, step, member, attempt), so settling twice counts once."""

    request_id: str
    step: str
    member: int
    attempt: int
    at_s: float
    tenant: str
    key_id: str
    aspect: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_usd_micros: int
    status: int


class StoreError(Exception):
    """The store cannot be read or written; says what and where."""


class Store(Protocol):
    """All methods may be awaited concurrently. Every write is durable when it returns. Raises StoreError."""

    async def add_key(self, record: KeyRecord) -> None:
        """Add a key; its id and digest must be new."""
        ...

    async def keys(self) -> list[KeyRecord]:
        """All keys, revoked ones included, oldest first."""
        ...

    async def revoke_key(self, key_id: str, at_s: float) -> bool:
        """False if there is no such key or it is revoked already."""
        ...

    async def version(self) -> int:
        """Changes whenever another process has written; cheap."""
        ...

    async def append_usage(self, rows: Sequence[UsageRow]) -> int:
        """Add what is not there yet; returns how many rows were new."""
        ...

    async def usage(self, since_s: float = 0.0) -> list[UsageRow]:
        """Rows settled at or after `since_s`, oldest first."""
        ...

    async def close(self) -> None:
        """Idempotent."""
        ...
