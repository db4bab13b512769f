"""A load generator with little overhead of its own: prepared bytes, one callback a read, httptools as the parser.

`facet bench gateway` uses it. A closed loop: each connection sends its next request when the answer to the last one
is complete; a latency runs from the write of the request to the last byte of its answer. Knows nothing of what the
gateway does.

Read next: `gateway/cli/bench.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

OK = 200
END_OF_STREAM = b"data: [DONE]\n\n"
ERROR_CHARS = 300
Clock = Callable[[], float]


class LoadError(Exception):
    """The gateway is not there, or answered with something other than a complete success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to send, how often and how many at once. `url` is http only: TLS would measure TLS."""

    url: str
    key: str
    model: str
    requests: int
    concurrency: int
    stream: bool
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds, unordered. `first_s`: from the request to the first bytes of the answer's body."""

    elapsed_s: float
    latencies_s: list[float]
    first_s: list[float]


def request_bytes(load: Load) -> bytes:
    """One prepared chat request."""
    body = json.dumps(
        {
            "model": load.model,
            "messages": [{"role": "user", "content": "Name three primary colours."}],
            "max_tokens": load.max_tokens,
            "stream": load.stream,
            "temperature": 0,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {urlsplit(load.url).netloc}\r\n"
        f"authorization: Bearer {load.key}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass(slots=True)
class Tally:
    """What all connections of one run share."""

    requests: Iterator[int]
    clock: Clock
    latencies_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)


class Connection(asyncio.Protocol):
    """One keep-alive connection. `done` is set when no request is left, or to LoadError."""

    def __init__(self, data: bytes, stream: bool, tally: Tally) -> None:
        self._data = data
        self._stream = stream
        self._tally = tally
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._sent_s = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        """The parser calls back below."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(LoadError(f"the gateway's answer cannot be read: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        """Harmless after the last answer, an error before."""
        self._end(LoadError(f"the gateway closed the connection: {error or 'no reason given'}"))

    def on_body(self, piece: bytes) -> None:
        """httptools: a part of the body."""
        if not self._body:
            self._tally.first_s.append(self._tally.clock() - self._sent_s)
        self._body.append(piece)

    def on_message_complete(self) -> None:
        """httptools: the answer is complete."""
        self._tally.latencies_s.append(self._tally.clock() - self._sent_s)
        status = self._parser.get_status_code()
        body = b"".join(self._body)
        if status != OK:
            self._end(LoadError(f"the gateway answered {status}: {body[:ERROR_CHARS].decode(errors='replace')}"))
        elif self._stream and not body.endswith(END_OF_STREAM):
            self._end(LoadError(f"a stream ended early: {body[-ERROR_CHARS:].decode(errors='replace')}"))
        else:
            self._send()

    def abandon(self) -> None:
        """Close, whatever is going on; the outcome has been seen or does not matter any more."""
        self._end(None)
        if not self.done.cancelled():
            self.done.exception()

    def _send(self) -> None:
        if next(self._tally.requests, None) is None:
            self._end(None)
            return
        assert self._transport is not None
        self._body.clear()
        self._sent_s = self._tally.clock()
        self._transport.write(self._data)

    def _end(self, error: LoadError | None) -> None:
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)
        if self._transport is not None:
            self._transport.close()


async def run_load(load: Load, clock: Clock) -> Measured:
    """Send `load.requests` over `load.concurrency` connections. Raises LoadError."""
    parts = urlsplit(load.url)
    if parts.scheme != "http" or not parts.hostname:
        raise LoadError(f"{load.url!r} cannot be measured; write http://HOST:PORT.")
    tally = Tally(iter(range(load.requests)), clock)
    data = request_bytes(load)
    loop = asyncio.get_running_loop()
    connections: list[Connection] = []
    began_s = clock()
    try:
        for _ in range(load.concurrency):
            _, connection = await loop.create_connection(
                lambda: Connection(data, load.stream, tally), parts.hostname, parts.port or 80
            )
            connections.append(connection)
        await asyncio.gather(*(connection.done for connection in connections))
    except OSError as error:
        raise LoadError(f"no gateway answers at {load.url}: {error}. Start one with `facet up`.") from error
    finally:
        for connection in connections:
            connection.abandon()
    return Measured(clock() - began_s, tally.latencies_s, tally.first_s)


def percentile_ms(values_s: list[float], percent: int) -> float:
    """Nearest rank, in milliseconds."""
    ordered = sorted(values_s)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] * 1e3
