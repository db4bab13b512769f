"""The composition root: the one place where concrete parts meet.

    settings + policy -> store, keys, fleet, pipeline -> Litestar

Nothing here loads torch: engines are processes, and an engine on a thread of this process (for development) is
imported only when asked for. Read next: `gateway/server.py` (the process's life), `gateway/pipeline.py`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from litestar import Litestar, Request, Response
from litestar.datastructures import State

from engines.api import Capabilities, Engine
from engines.config import CacheConfig, EngineConfig, ModelConfig, RopeScaling, SchedulerConfig
from engines.fake import FakeEngine, Script
from engines.nursery import Zygote
from engines.process import EngineProcess
from engines.text.model import TextModel, load_text
from gateway.admission import Admission
from gateway.errors import from_exception
from gateway.handlers import chat, completions, embeddings, ops
from gateway.handlers.common import Surface, encode, request_id_of, surface_of
from gateway.ledger import Ledger
from gateway.limits import LimitsMiddleware
from gateway.metrics import Metrics
from gateway.pipeline import Pipeline
from gateway.settings import Settings
from gateway.sse import ClientGoneError
from gateway.stores.base import Store
from gateway.stores.sqlite import SqliteStore
from gateway.telemetry import Telemetry, make_exporter
from gateway.tenants import Tenants, load_secret
from policies.schema import Model, Policy
from routers.execute import Executor
from routers.fleet import Fleet, Replica
from routers.select import LeastLoaded

logger = logging.getLogger("facet.gateway")
EngineKind = Literal["process", "local", "fake"]
Report = Callable[[str], None]
SEED_BITS = 63
CLIENT_GONE = 499
FAKE_CONTEXT_TOKENS = 8192
FAKE_DIMENSIONS = 8


def create_app(surface: Surface) -> LimitsMiddleware:
    """Routes and error mapping around a pipeline, and the limits on raw bytes around both."""
    routes = Litestar(
        route_handlers=[
            chat.chat_completions,
            completions.completions,
            embeddings.embeddings,
            ops.live,
            ops.ready,
            ops.models,
            ops.model,
            ops.metrics,
        ],
        exception_handlers={Exception: answer_error},
        state=State({"surface": surface}),
        openapi_config=None,
        logging_config=None,
    )
    return LimitsMiddleware(routes, surface.limits, surface.new_id)


def answer_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Every exception of every route as an OpenAI error object."""
    if isinstance(error, ClientGoneError):
        return Response(b"", status_code=CLIENT_GONE)
    answer = from_exception(error)
    request_id = request_id_of(request.headers, surface_of(request))
    if answer.status == 500:
        logger.error("%s: %s %s failed", request_id, request.method, request.url.path, exc_info=error)
    elif answer.status > 500:
        logger.warning("%s: %s %s: %s", request_id, request.method, request.url.path, error)
    headers = {**answer.headers, "x-request-id": request_id}
    return Response(encode(answer.document), status_code=answer.status, headers=headers, media_type="application/json")


@asynccontextmanager
async def running(
    settings: Settings, policy: Policy, paths: dict[str, Path], kind: EngineKind, report: Report
) -> AsyncGenerator[Surface, None]:
    """Everything opened in order and closed in reverse. `paths`: files of each model of the policy."""
    secret = load_secret(settings.secret_path)
    store: Store = await SqliteStore.open(settings.database_path)
    ledger = Ledger(store, wall_clock=time.time)
    ledger.start()
    telemetry = Telemetry(make_exporter(settings.telemetry), wall_clock_ns=time.time_ns)
    fleet = Fleet()
    try:
        await start_fleet(fleet, settings, policy, paths, kind, report)
        pipeline = Pipeline(
            tenants=Tenants(store, secret, clock=time.monotonic),
            admission=Admission(),
            ledger=ledger,
            executor=Executor(
                fleet, LeastLoaded(), draw_seed=partial(secrets.randbits, SEED_BITS), clock=time.monotonic
            ),
            policy=lambda: policy,
            metrics=Metrics(fleet),
            telemetry=telemetry,
            clock=time.monotonic,
        )
        yield Surface(
            pipeline=pipeline, limits=settings.limits, new_id=partial(secrets.token_hex, 12), wall_clock=time.time
        )
    finally:
        await asyncio.gather(*(replica.engine.close() for replica in fleet))
        telemetry.close()
        await ledger.close()
        await store.close()


async def start_fleet(
    fleet: Fleet, settings: Settings, policy: Policy, paths: dict[str, Path], kind: EngineKind, report: Report
) -> None:
    """One engine a replica, all starting at once. Raises EngineError or TextError with what to mend."""
    make = {"process": start_process, "local": start_local, "fake": start_fake}[kind]
    texts = {name: await asyncio.to_thread(load_text, path) for name, path in paths.items()}
    nursery = Nursery(settings)

    async def start(name: str, model: Model, number: int) -> None:
        replica_name = f"{name}-{number}"
        began_s = time.monotonic()
        config = engine_config(name, model, paths[name], settings)
        engine, is_alive = await make(replica_name, config, model, texts[name], nursery)
        fleet.add(Replica(replica_name, name, engine, texts[name], is_alive=is_alive))
        facts = engine.capabilities
        report(f"{replica_name}: {facts.dtype}, {facts.num_threads} threads, {time.monotonic() - began_s:.1f} s")

    try:
        async with asyncio.TaskGroup() as group:
            for name, model in policy.models.items():
                for number in range(model.replicas):
                    group.create_task(start(name, model, number))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


Started = tuple[Engine, Callable[[], bool]]


class Nursery:
    """The zygotes of a fleet, one a model: its replicas are forked from it, and the last one that closes ends it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._zygotes: dict[str, Zygote] = {}

    def zygote(self, config: EngineConfig) -> Zygote | None:
        """Of a model's configuration; None where workers start by themselves."""
        if not self.settings.zygotes or sys.platform != "linux":
            return None
        name = config.model.name
        if name not in self._zygotes:
            self._zygotes[name] = Zygote(config, self.settings.log_dir / f"{file_name(name)}-zygote.log")
        return self._zygotes[name]


async def start_process(name: str, config: EngineConfig, model: Model, text: TextModel, nursery: Nursery) -> Started:
    """A worker process, restarted when it dies."""
    settings = nursery.settings
    settings.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    process = EngineProcess(
        config,
        run_dir=Path(settings.run_dir),
        name=name,
        log_path=settings.log_dir / f"{name}.log",
        zygote=nursery.zygote(config),
    )
    try:
        await process.start()
    except BaseException:
        await process.close()
        raise
    return process, lambda: process.state == "ready"


async def start_local(name: str, config: EngineConfig, model: Model, text: TextModel, nursery: Nursery) -> Started:
    """A thread of this process; loads torch here."""
    from engines.local import load_engine

    engine = await load_engine(config, clock=time.monotonic)
    return engine, lambda: True


async def start_fake(name: str, config: EngineConfig, model: Model, text: TextModel, nursery: Nursery) -> Started:
    """No model at all: echoes the prompt. For measuring the gateway."""
    capabilities = Capabilities(
        model=config.model.name,
        task=model.task,
        digest="fake",
        dtype="fake",
        vocab_size=text.vocab_size,
        max_model_len=FAKE_CONTEXT_TOKENS,
        embedding_dimensions=FAKE_DIMENSIONS if model.task == "embed" else 0,
    )
    return FakeEngine(capabilities, Script()), lambda: True


def engine_config(name: str, model: Model, path: Path, settings: Settings) -> EngineConfig:
    """The policy's words and the settings' as the engine's own."""
    return EngineConfig(
        model=ModelConfig(
            name=name,
            path=str(path),
            cache_dir=str(Path(settings.cache_dir) / "packed"),
            dtype=model.dtype,
            kv_dtype=model.kv_dtype,
            max_model_len=model.max_model_len,
            rope_scaling=rope_scaling(model),
            num_threads=model.threads or settings.engine_threads,
        ),
        cache=CacheConfig(
            memory_bytes=model.kv_memory_mib << 20,
            dram_bytes=model.kv_dram_mib << 20,
            disk_bytes=model.kv_disk_mib << 20,
            disk_path=str(settings.kv_path / file_name(name)) if model.kv_disk_mib else "",
        ),
        scheduler=SchedulerConfig(max_running=model.max_running),
    )


def rope_scaling(model: Model) -> RopeScaling | None:
    """The policy's words as the engine's."""
    asked = model.rope_scaling
    return None if asked is None else RopeScaling(kind=asked.kind, factor=asked.factor)


def file_name(model_name: str) -> str:
    """A folder's name for a model's name, which may have slashes; different for different names."""
    return quote(model_name, safe="")
