"""The load generator counts what a server sees, and never takes a failure for an answer."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from gateway.loadgen import Load, LoadError, percentile_ms, request_bytes, run_load

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
Answer = Callable[[int], list[bytes]]


class Server:
    """Answers by script; notes every request and how many were under way at once."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.bodies: list[dict[str, object]] = []
        self.heads: list[bytes] = []
        self.connections = 0
        self.running = self.most = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                self.heads.append(head)
                self.bodies.append(json.loads(await reader.readexactly(length)))
                self.running += 1
                self.most = max(self.most, self.running)
                for piece in self._answer(len(self.bodies)):
                    await asyncio.sleep(0.002)
                    writer.write(piece)
                self.running -= 1
                if not self._answer(len(self.bodies)):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[tuple[str, Server]]:
    script = Server(answer)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", script


def load(url: str, requests: int = 20, concurrency: int = 4, stream: bool = False) -> Load:
    return Load(url=url, key="k", model="m", requests=requests, concurrency=concurrency, stream=stream, max_tokens=7)


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def test_every_request_is_sent_once_over_so_many_connections() -> None:
    async with serving(lambda number: [WHOLE]) as (url, server):
        measured = await run_load(load(url), time.perf_counter)
        assert (len(server.bodies), server.connections, server.most) == (20, 4, 4)
        assert len(measured.latencies_s) == len(measured.first_s) == 20
        assert min(measured.latencies_s) >= 0.002
        assert 5 * 0.002 <= measured.elapsed_s < sum(measured.latencies_s)
        assert server.bodies[0] == {
            "model": "m",
            "messages": [{"role": "user", "content": "Name three primary colours."}],
            "max_tokens": 7,
            "stream": False,
            "temperature": 0,
        }
        assert b"\r\nauthorization: Bearer k\r\n" in server.heads[0]


async def test_a_stream_counts_from_its_first_bytes_to_its_last() -> None:
    pieces = [STREAM, chunk(b"data: 1\n\n"), chunk(b"da"), chunk(b"ta: [DONE]\n\n") + b"0\r\n\r\n"]
    async with serving(lambda number: pieces) as (url, server):
        measured = await run_load(load(url, requests=3, concurrency=1, stream=True), time.perf_counter)
        assert server.bodies[0]["stream"] is True
        for first_s, whole_s in zip(measured.first_s, measured.latencies_s, strict=True):
            assert 0.004 <= first_s <= whole_s - 0.004


async def test_a_split_answer_is_one_answer() -> None:
    """Byte by byte: nothing depends on how the network cuts."""
    async with serving(lambda number: [WHOLE[at : at + 1] for at in range(len(WHOLE))]) as (url, _):
        measured = await run_load(load(url, requests=2, concurrency=1), time.perf_counter)
        assert len(measured.latencies_s) == 2


@pytest.mark.parametrize(
    ("answer", "stream", "message"),
    [
        ([b"HTTP/1.1 401 No\r\ncontent-length: 5\r\n\r\nwrong"], False, "the gateway answered 401: wrong"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{"], False, None),
        ([], False, "the gateway closed the connection: no reason given"),
        ([b"SMTP ready\r\n"], False, "the gateway's answer cannot be read"),
        ([STREAM, chunk(b"data: 1\n\n") + b"0\r\n\r\n"], True, "a stream ended early: data: 1"),
    ],
)
async def test_anything_but_a_complete_success_is_an_error(
    answer: list[bytes], stream: bool, message: str | None
) -> None:
    """The third answer is the bad one; a connection that hangs is no answer either."""
    good = [STREAM, chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"] if stream else [WHOLE]
    async with serving(lambda number: answer if number >= 3 else good) as (url, _):
        running = run_load(load(url, concurrency=2, stream=stream), time.perf_counter)
        if message is None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(running, 0.2)
        else:
            with pytest.raises(LoadError, match=message):
                await running


async def test_no_gateway_and_no_url_say_what_to_do() -> None:
    with pytest.raises(LoadError, match=r"no gateway answers at http://127\.0\.0\.1:9: .* Start one with `facet up`"):
        await run_load(load("http://127.0.0.1:9"), time.perf_counter)
    with pytest.raises(LoadError, match="write http://HOST:PORT"):
        await run_load(load("https://127.0.0.1"), time.perf_counter)


async def test_figures_are_of_the_clock_that_is_passed() -> None:
    ticks = itertools.count()
    async with serving(lambda number: [WHOLE]) as (url, _):
        measured = await run_load(load(url, requests=3, concurrency=1), lambda: float(next(ticks)))
    # Each request: sent, first bytes, last bytes; two more calls around the whole.
    assert (measured.latencies_s, measured.first_s, measured.elapsed_s) == ([2.0] * 3, [1.0] * 3, 10.0)


def test_percentiles_are_of_the_sorted_values() -> None:
    values = [number / 1e3 for number in range(100, 0, -1)]
    assert (percentile_ms(values, 50), percentile_ms(values, 99)) == (51.0, 100.0)
    assert percentile_ms([0.003], 99) == 3.0


def test_the_prepared_bytes_are_one_request() -> None:
    data = request_bytes(load("http://host:1234"))
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\nhost: host:1234\r\n")
    assert head.endswith(f"content-length: {len(body)}".encode())
