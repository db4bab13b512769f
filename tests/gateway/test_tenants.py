"""Keys: shown once, stored as keyed hashes, revoked from another process; one credential, never two."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gateway.errors import ApiError
from gateway.stores.sqlite import SqliteStore
from gateway.tenants import KeyService, Tenants, extract_credential, load_secret


async def opened(tmp_path: Path) -> SqliteStore:
    return await SqliteStore.open(tmp_path / "data" / "facet.db")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_key_is_nowhere_in_the_database(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    _, plaintext = await KeyService(store, b"secret", wall_clock=lambda: 7.0).create("me", tenant="acme")
    await store.close()
    for file in (tmp_path / "data").iterdir():
        assert plaintext.encode() not in file.read_bytes()
        assert plaintext.rsplit("-", 1)[1].encode() not in file.read_bytes()


async def test_authenticate_and_revoke_from_another_process(tmp_path: Path) -> None:
    clock = Clock()
    store, other = await opened(tmp_path), await opened(tmp_path)
    tenants = Tenants(store, b"secret", clock=clock)
    record, plaintext = await KeyService(other, b"secret", wall_clock=lambda: 7.0).create("me", tenant="acme")
    caller = await tenants.authenticate({"authorization": f"Bearer {plaintext}"})
    assert (caller.key_id, caller.tenant, caller.role) == (record.id, "acme", "user")
    assert await KeyService(other, b"secret", wall_clock=lambda: 8.0).revoke(record.id)
    assert not await KeyService(other, b"secret", wall_clock=lambda: 8.0).revoke(record.id)
    clock.now_s = 1.5
    with pytest.raises(ApiError, match="not valid") as refused:
        await tenants.authenticate({"x-api-key": plaintext})
    assert refused.value.status == 401
    await store.close()
    await other.close()


async def test_keys_of_a_tenant_share_a_salt_and_tenants_do_not(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    keys = KeyService(store, b"secret", wall_clock=lambda: 7.0)
    made = [(await keys.create("k", tenant=tenant))[1] for tenant in ("a", "a", "b")]
    tenants = Tenants(store, b"secret", clock=lambda: 0.0)
    salts = [(await tenants.authenticate({"x-api-key": key})).cache_salt for key in made]
    assert salts[0] == salts[1] != salts[2]
    other = Tenants(store, b"another secret", clock=lambda: 0.0)
    with pytest.raises(ApiError):
        await other.authenticate({"x-api-key": made[0]})
    await store.close()


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "No API key"),
        ({"authorization": "Basic eDp5"}, "must be `Bearer"),
        ({"authorization": "Bearer a", "x-api-key": "b"}, "different keys"),
        ({"authorization": "Bearer " + "a" * 600}, "600 characters"),
        ({"authorization": "Bearer "}, "No API key"),
    ],
)
def test_unclear_credentials_are_refused(headers: dict[str, str], message: str) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        extract_credential(headers)
    assert refused.value.status == 401
    assert refused.value.headers["www-authenticate"] == "Bearer"


def test_the_same_key_twice_is_one_credential() -> None:
    assert extract_credential({"authorization": "Bearer k", "x-api-key": "k"}) == "k"


def test_the_secret_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "data" / "secret"
    first = load_secret(path)
    assert load_secret(path) == first
    assert len(first) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
