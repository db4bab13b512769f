"""A whole gateway on this event loop: real sockets, real keys, a real store, engines as the test wants them.

The server runs in the test's own loop so that what it holds (tasks, connections, KV blocks) can be counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import openai
import pytest

from engines.api import ReplicaStats
from gateway.app import EngineKind, create_app, running
from gateway.handlers.common import Surface
from gateway.server import Server, bind, server_config
from gateway.settings import Settings
from gateway.stores.sqlite import SqliteStore
from gateway.tenants import KeyService, load_secret
from policies.load import parse_policy

PRICE = "price: {input_usd_per_mtok: 1, output_usd_per_mtok: 2}"


@dataclass(frozen=True, kw_only=True)
class House:
    """A running gateway and one valid key."""

    url: str
    key: str
    surface: Surface
    server: Server
    settings: Settings

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url, headers={"authorization": f"Bearer {self.key}"}, timeout=120, limits=httpx.Limits()
        )

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=120)

    async def stats(self, model: str = "m") -> ReplicaStats:
        (replica,) = self.surface.pipeline.executor.fleet.replicas(model)
        return await replica.engine.stats()

    async def until(self, wanted: Callable[[ReplicaStats], bool], model: str = "m") -> ReplicaStats:
        """The first snapshot that is as wanted; fails with the last one after 30 s."""
        end_s = time.monotonic() + 30
        while True:
            stats = await self.stats(model)
            if wanted(stats):
                return stats
            assert time.monotonic() < end_s, f"still {stats}"
            await asyncio.sleep(0.01)


Opener = Callable[..., AbstractAsyncContextManager[House]]


@pytest.fixture
def open_house(tmp_path: Path, facet_cache_dir: Path) -> Opener:
    """`async with open_house(path, kind="local", model="kv_memory_mib: 8") as house`; the model is called "m"."""

    @asynccontextmanager
    async def opened(path: Path, *, kind: EngineKind = "local", model: str = "") -> AsyncIterator[House]:
        extra = f", {model}" if model else ""
        policy = parse_policy(f"version: facet/v1\nmodels:\n  m: {{source: {path}, {PRICE}{extra}}}\n")
        with TemporaryDirectory(prefix="facet-") as run_dir:  # a socket's path must be short
            settings = Settings(
                data_dir=str(tmp_path / "data"),
                cache_dir=str(facet_cache_dir),
                run_dir=run_dir,
                engine_threads=1,
                shutdown_grace_s=5,
            )
            store = await SqliteStore.open(settings.database_path)
            keys = KeyService(store, load_secret(settings.secret_path), wall_clock=time.time)
            _, key = await keys.create("test", tenant="acme")
            await store.close()
            async with running(settings, policy, {"m": path}, kind, report=lambda line: None) as surface:
                listener = bind("127.0.0.1", 0)
                server = Server(server_config(create_app(surface), settings))
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                await server.up.wait()
                try:
                    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                    yield House(url=url, key=key, surface=surface, server=server, settings=settings)
                finally:
                    server.should_exit = True
                    with contextlib.suppress(asyncio.CancelledError):
                        await serving
                    listener.close()

    return opened
