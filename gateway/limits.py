"""Limits on raw bytes, before anything decodes them: an ASGI layer around the whole application, so that no route
escapes it.

Headers are summed, the body is counted as it arrives, and JSON's nesting is scanned without building anything: a
decoder that recurses must never see a million brackets. Knows nothing of routes or fields.

Read next: `gateway/errors.py`, `gateway/wire/openai.py` (limits on fields).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import msgspec
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import ApiError
from gateway.settings import Limits

# A client's own request id is taken over when it is harmless in headers and logs.
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# Strings are skipped whole, so brackets inside them do not count; an unfinished string ends the scan harmlessly.
TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)


def json_depth(body: bytes, limit: int) -> int:
    """Deepest nesting of brackets outside strings, counted up to `limit + 1`."""
    depth = deepest = 0
    if body.count(b"[") + body.count(b"{") <= limit:
        return 0  # cannot be deeper than it has brackets
    for token in TOKENS.finditer(body):
        first = body[token.start()]
        if first in b"[{":
            depth += 1
            deepest = max(deepest, depth)
            if deepest > limit:
                return deepest
        elif first in b"]}":
            depth -= 1
    return deepest


class LimitsMiddleware:
    """Refuses before the application sees the request; afterwards the body is replayed as one message."""

    def __init__(self, app: ASGIApp, limits: Limits, new_id: Callable[[], str]) -> None:
        self._app = app
        self._limits = limits
        self._new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        try:
            self._check_headers(scope)
            body = await self._read_body(scope, receive)
            depth = json_depth(body, self._limits.json_depth)
            if depth > self._limits.json_depth:
                raise ApiError(
                    400,
                    f"The JSON body is nested {depth} levels deep or more; at most {self._limits.json_depth} are read.",
                    code="json_too_deep",
                )
        except ApiError as error:
            await refuse(error, self._request_id(scope), send)
            return
        await self._app(scope, Replay(body, receive), send)

    def _check_headers(self, scope: Any) -> None:
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > self._limits.header_bytes:
            raise ApiError(431, f"The headers have {size} bytes; at most {self._limits.header_bytes} are read.")
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._limits.body_bytes:
                raise self._too_large(int(value))

    def _request_id(self, scope: Any) -> str:
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        return given if REQUEST_ID.fullmatch(given) else self._new_id()

    def _too_large(self, size: int) -> ApiError:
        return ApiError(413, f"The body has {size} bytes or more; at most {self._limits.body_bytes} are read.")

    async def _read_body(self, scope: Any, receive: Receive) -> bytes:
        if scope["method"] in ("GET", "HEAD", "DELETE", "OPTIONS"):
            return b""
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                more = True
                while more:
                    message: Any = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "The client left before the body was complete.")
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    if size > self._limits.body_bytes:
                        raise self._too_large(size)
                    chunks.append(chunk)
                    more = message.get("more_body", False)
        except TimeoutError:
            raise ApiError(408, f"The body did not arrive within {self._limits.body_timeout_s:g} s.") from None
        return b"".join(chunks)


class Replay:
    """`receive` for the application: the body once, then whatever the server says (a disconnect)."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Any:
        """ASGI receive."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await self._receive()


async def refuse(error: ApiError, request_id: str, send: Send) -> None:
    """Answer without the application."""
    body = msgspec.json.encode(error.document)
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    headers["x-request-id"] = request_id
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    start: Message = {"type": "http.response.start", "status": error.status, "headers": raw}
    await send(start)
    await send({"type": "http.response.body", "body": body, "more_body": False})
