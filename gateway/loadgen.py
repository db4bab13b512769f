"""A load generator with little overhead of its own: raw sockets, prepared bytes, no HTTP library.

`facet bench gateway` uses it. It measures from the last byte written to the last byte read. Knows nothing of what the
gateway does.

Read next: `gateway/cli/bench.py`.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

END_OF_CHUNKS = b"0\r\n\r\n"


class LoadError(Exception):
    """The gateway answered with something other than a success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to send, how often and how many at once."""

    url: str
    key: str
    model: str
    requests: int
    concurrency: int
    stream: bool
    max_tokens: int


def request_bytes(load: Load) -> bytes:
    """One prepared chat request."""
    parts = urlsplit(load.url)
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
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\nauthorization: Bearer {load.key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def run_load(load: Load, clock: Callable[[], float]) -> dict[str, Any]:
    """p50_ms, p99_ms, rps over all requests. Raises LoadError."""
    latencies_s: list[float] = []
    data = request_bytes(load)
    left = iter(range(load.requests))
    began_s = clock()
    async with asyncio.TaskGroup() as group:
        for _ in range(load.concurrency):
            group.create_task(client(load, data, left, latencies_s, clock))
    elapsed_s = clock() - began_s
    ordered = sorted(latencies_s)
    return {
        "concurrency": load.concurrency,
        "requests": len(ordered),
        "rps": len(ordered) / elapsed_s,
        "p50_ms": statistics.median(ordered) * 1e3,
        "p99_ms": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1e3,
        "tokens_s": len(ordered) * load.max_tokens / elapsed_s,
    }


async def client(load: Load, data: bytes, left: Any, latencies_s: list[float], clock: Callable[[], float]) -> None:
    """One connection, request after request."""
    parts = urlsplit(load.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    try:
        for _ in left:
            began_s = clock()
            writer.write(data)
            await read_answer(reader)
            latencies_s.append(clock() - began_s)
    finally:
        writer.close()
        await writer.wait_closed()


async def read_answer(reader: asyncio.StreamReader) -> None:
    """Consume one answer, whole or chunked."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = head.split(b" ", 2)[1]
    lowered = head.lower()
    if b"transfer-encoding: chunked" in lowered:
        body = await reader.readuntil(END_OF_CHUNKS)
    else:
        length = int(lowered.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        body = await reader.readexactly(length)
    if status != b"200":
        raise LoadError(f"the gateway answered {status.decode()}: {body[:300].decode(errors='replace')}")
