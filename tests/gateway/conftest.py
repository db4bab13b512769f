"""A gateway around scripted engines: a real store, keys and policy, a fixed clock,
counted ids; requests come without sockets.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from engines.fake import FakeEngine
from gateway.app import create_app, running
from gateway.handlers.common import Surface
from gateway.settings import Limits, Settings
from gateway.stores.base import KeyRecord
from gateway.stores.sqlite import SqliteStore
from gateway.tenants import keyed_hash, load_secret
from policies.load import parse_policy

KEY = "sk-facet-golden-key"
POLICY = """
version: facet/v1
models:
  small: {source: x, price: {input_usd_per_mtok: 1, output_usd_per_mtok: 2}}
  vectors: {source: y, task: embed, price: {input_usd_per_mtok: 1}}
aliases: {gpt-4o-mini: small, text-embedding-3-small: vectors}
"""
BODY_BYTES = 10_000
CLOCK_S = 1_700_000_000.0


def client_of(surface: Surface, **headers: str) -> httpx.AsyncClient:
    """A client of the application itself, with a valid key."""
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=create_app(surface)),
        base_url="http://facet",
        headers={"authorization": f"Bearer {KEY}", **headers},
    )


@pytest.fixture
async def surface(tmp_path: Path, tiny_llama_path: Path) -> AsyncIterator[Surface]:
    settings = Settings(
        data_dir=str(tmp_path), cache_dir=str(tmp_path), run_dir=str(tmp_path), limits=Limits(body_bytes=BODY_BYTES)
    )
    store = await SqliteStore.open(settings.database_path)
    digest = keyed_hash(load_secret(settings.secret_path), "key", KEY).hex()
    await store.add_key(KeyRecord(id="k", digest=digest, name="k", tenant="t", role="user", hint="", created_s=0.0))
    await store.close()
    paths = {"small": tiny_llama_path, "vectors": tiny_llama_path}
    async with running(settings, parse_policy(POLICY), paths, "fake", report=lambda line: None) as made:
        numbers = itertools.count(1)
        yield dataclasses.replace(made, new_id=lambda: f"{next(numbers):024x}", wall_clock=lambda: CLOCK_S)


@pytest.fixture
def engine(surface: Surface) -> FakeEngine:
    """The one that answers as `small`; its `script` may be replaced."""
    (replica,) = surface.pipeline.executor.fleet.replicas("small")
    assert isinstance(replica.engine, FakeEngine)
    return replica.engine
