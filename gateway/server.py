"""The life of the gateway process: bind, open everything, serve, and end without losing anybody.

First SIGINT or SIGTERM: not ready any more, no new requests, what runs is finished, then engines and store are closed.
Second one: stop at once. Knows nothing of routes. Read next: `gateway/app.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from gateway.app import EngineKind, Report, create_app, running
from gateway.limits import LimitsMiddleware
from gateway.settings import Settings
from policies.schema import Policy

BACKLOG = 2048
KEEP_ALIVE_S = 75


class ServeError(Exception):
    """The gateway cannot start; says what to do."""


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: when to end is decided here. `up` is set once it accepts."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting."""
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ServeError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ServeError(
            f"{host}:{port} cannot be opened: {error.strerror or error}. "
            "Stop what listens there, or choose another port with --port."
        ) from error
    listener.setblocking(False)
    return listener


class Ending:
    """What the signals have said so far: `soon` after the first, `now` after the second."""

    def __init__(self) -> None:
        self.soon = asyncio.Event()
        self.now = asyncio.Event()

    def signalled(self) -> None:
        """Called by each signal."""
        (self.now if self.soon.is_set() else self.soon).set()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM while inside."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.signalled)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


async def serve(
    settings: Settings,
    policy: Policy,
    paths: dict[str, Path],
    *,
    kind: EngineKind = "process",
    report: Report = lambda line: None,
    on_ready: Callable[[str], None] = lambda url: None,
    on_ending: Callable[[int], None] = lambda running: None,
) -> None:
    """Serve until told to end. `on_ready` is given the base URL, `on_ending` the number of requests that still run.

    Raises ServeError, EngineError, StoreError, ...
    """
    ending = Ending()
    with contextlib.closing(bind(settings.host, settings.port)) as listener, ending.listening():
        host, port = listener.getsockname()[:2]
        async with contextlib.AsyncExitStack() as stack:
            opening = asyncio.ensure_future(stack.enter_async_context(running(settings, policy, paths, kind, report)))
            await first_of(ending.soon.wait(), opening)
            if not opening.done():
                opening.cancel()
                await asyncio.wait((opening,))
                return
            surface = opening.result()
            server = Server(server_config(create_app(surface), settings))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            await first_of(server.up.wait(), serving)
            on_ready(f"http://{host}:{port}")
            await first_of(ending.soon.wait(), serving)
            surface.pipeline.admission.closing = True
            on_ending(surface.pipeline.admission.in_flight)
            server.should_exit = True
            await first_of(ending.now.wait(), serving)
            server.force_exit = True
            await serving


def server_config(app: LimitsMiddleware, settings: Settings) -> uvicorn.Config:
    """uvloop and httptools, no access log: requests are measured by telemetry."""
    return uvicorn.Config(
        app,
        loop="none",
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        proxy_headers=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(settings.shutdown_grace_s),
    )


async def first_of(waiting: Coroutine[Any, Any, Any], task: asyncio.Future[Any]) -> None:
    """Return when either is done; `task` goes on."""
    other = asyncio.ensure_future(waiting)
    try:
        await asyncio.wait((other, task), return_when=asyncio.FIRST_COMPLETED)
    finally:
        other.cancel()
