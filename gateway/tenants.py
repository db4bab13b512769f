"""Who is asking: one credential out of the headers, looked up by keyed hash.

Keys look like `sk-facet-<id>-<secret>`. The store holds HMAC-SHA256(server secret, key) only. A tenant's prefix-cache
salt is another HMAC of the same secret, so tenants never share KV and nobody outside can compute a block's name.

Knows nothing of budgets (`gateway/admission.py`). Read next: `gateway/stores/base.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from gateway.errors import ApiError
from gateway.stores.base import KeyRecord, Role, Store

KEY_PREFIX = "sk-facet-"
SECRET_BYTES = 32
REFRESH_S = 1.0
MAX_KEY_CHARS = 512


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """An authenticated client. `cache_salt` is the same for all keys of a tenant."""

    key_id: str
    tenant: str
    role: Role
    cache_salt: bytes


def load_secret(path: Path) -> bytes:
    """The server's secret; made on first use, readable by its owner only. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return path.read_bytes()
    with os.fdopen(handle, "wb") as file:
        file.write(secrets.token_bytes(SECRET_BYTES))
    return path.read_bytes()


def keyed_hash(secret: bytes, purpose: str, text: str) -> bytes:
    """HMAC-SHA256, separated by purpose."""
    return hmac.new(secret, f"{purpose}\0{text}".encode(), hashlib.sha256).digest()


class KeyService:
    """Make, list and revoke keys; used by the CLI and by `facet up`."""

    def __init__(self, store: Store, secret: bytes, *, wall_clock: Callable[[], float]) -> None:
        self._store = store
        self._secret = secret
        self._wall_clock = wall_clock

    async def create(self, name: str, *, tenant: str = "default", role: Role = "user") -> tuple[KeyRecord, str]:
        """The record and the key itself, which is shown once and stored nowhere."""
        key_id = secrets.token_hex(4)
        plaintext = f"{KEY_PREFIX}{key_id}-{secrets.token_urlsafe(24)}"
        record = KeyRecord(
            id=key_id,
            digest=keyed_hash(self._secret, "key", plaintext).hex(),
            name=name,
            tenant=tenant,
            role=role,
            hint=f"{KEY_PREFIX}{key_id}-...",
            created_s=self._wall_clock(),
        )
        await self._store.add_key(record)
        return record, plaintext

    async def list(self) -> list[KeyRecord]:
        """Oldest first, revoked ones included."""
        return await self._store.keys()

    async def revoke(self, key_id: str) -> bool:
        """Takes effect in running gateways within `REFRESH_S`. False if there is nothing to revoke."""
        return await self._store.revoke_key(key_id, self._wall_clock())


class Tenants:
    """Authenticates requests from a copy of the key table that is checked for changes each `REFRESH_S`."""

    def __init__(self, store: Store, secret: bytes, *, clock: Callable[[], float]) -> None:
        self._store = store
        self._secret = secret
        self._clock = clock
        self._by_digest: dict[bytes, Caller] = {}
        self._version: int | None = None
        self._checked_s = float("-inf")
        self._refreshing = asyncio.Lock()

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """The caller behind the one credential. Raises ApiError 401."""
        credential = extract_credential(headers)
        await self._refresh()
        digest = keyed_hash(self._secret, "key", credential)
        caller = self._by_digest.get(digest)
        if caller is None:
            raise ApiError(401, "The API key is not valid. Make one with `facet keys create NAME`.")
        return caller

    async def _refresh(self) -> None:
        if self._clock() - self._checked_s < REFRESH_S:
            return
        async with self._refreshing:  # whoever comes while the table is read waits for it
            if self._clock() - self._checked_s >= REFRESH_S:
                await self._read()
                self._checked_s = self._clock()

    async def _read(self) -> None:
        version = await self._store.version()
        if version == self._version:
            return
        records = await self._store.keys()
        self._by_digest = {
            bytes.fromhex(record.digest): Caller(
                key_id=record.id,
                tenant=record.tenant,
                role=record.role,
                cache_salt=keyed_hash(self._secret, "cache", record.tenant)[:16],
            )
            for record in records
            if record.revoked_s is None
        }
        self._version = version


def extract_credential(headers: Mapping[str, str]) -> str:
    """From `Authorization: Bearer` or `x-api-key`. Two that differ are refused: neither can be trusted."""
    authorization = headers.get("authorization", "")
    scheme, _, bearer = authorization.partition(" ")
    if authorization and scheme.lower() != "bearer":
        raise ApiError(401, "The Authorization header must be `Bearer <API key>`.")
    bearer, api_key = bearer.strip(), headers.get("x-api-key", "").strip()
    if bearer and api_key and not hmac.compare_digest(bearer.encode(), api_key.encode()):
        raise ApiError(401, "Authorization and x-api-key hold different keys; send one.")
    credential = bearer or api_key
    if not credential:
        raise ApiError(401, "No API key. Send `Authorization: Bearer <API key>`.")
    if len(credential) > MAX_KEY_CHARS:
        raise ApiError(401, f"The API key has {len(credential)} characters; at most {MAX_KEY_CHARS} are read.")
    return credential
