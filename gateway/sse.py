"""Answers as ASGI callables: a JSON body, or a stream of server-sent events that notices when its client leaves.

A stream is given its first frame before it is made, so an error before the first token still has a status. Frames are
`data: <json>\\n\\n`, the last one is `data: [DONE]`. Knows nothing of what the frames hold.

Read next: `gateway/handlers/chat.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from litestar.types import Receive, Scope, Send

T = TypeVar("T")
ENCODER = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """The client closed the connection before its answer was ready; there is nobody to answer."""


def frame(document: msgspec.Struct) -> bytes:
    """One event."""
    return b"data: " + ENCODER.encode(document) + b"\n\n"


class JsonAnswer:
    """A whole body."""

    def __init__(self, body: bytes, *, status: int = 200, headers: Mapping[str, str], kind: str = "application/json"):
        self._body = body
        self._status = status
        self._headers = {"content-type": kind, "content-length": str(len(body)), **headers}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        await start(send, self._status, self._headers)
        await send({"type": "http.response.body", "body": self._body, "more_body": False})


class EventStream:
    """Server-sent events from a generator, which is closed when the client leaves or the stream ends."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], *, headers: Mapping[str, str]) -> None:
        self._first = first
        self._rest = rest
        self._headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **headers,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        with contextlib.suppress(ClientGoneError):
            await unless_gone(receive, self._pump(send))

    async def _pump(self, send: Send) -> None:
        try:
            await start(send, 200, self._headers)
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for data in self._rest:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._rest.aclose()


async def start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    """Status and headers."""
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; if the client leaves first, `work` is cancelled and ClientGoneError raised.

    `work` runs in the caller's own task: a second one a request, and waiting for either, would cost more than routing.
    """
    task = asyncio.current_task()
    assert task is not None, "outside a task"
    gone = False

    async def watch() -> None:
        nonlocal gone
        await disconnected(receive)
        gone = True
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientGoneError from None
        raise  # the server itself ends this task
    finally:
        watcher.cancel()


async def disconnected(receive: Receive) -> None:
    """Returns when the server says that the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
