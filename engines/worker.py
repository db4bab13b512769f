"""The engine worker: one process, one model, a Unix socket. `python -m engines.start --config JSON --socket PATH`.

Serves several gateways at once. A connection that closes takes its requests with it. SIGTERM drains; the process ends
when its parent does. Knows nothing of text, HTTP or policies.

Read next: `engines/frames.py`, `engines/local.py`, `engines/core/build.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import itertools
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec

from engines import frames
from engines.api import Chunk, EngineError, KVEventBatch
from engines.config import EngineConfig
from engines.core.build import build_core, set_threads
from engines.local import Core, LocalEngine, with_request_id
from engines.nursery import READY

logger = logging.getLogger("facet.worker")
PR_SET_PDEATHSIG = 1


class StreamSink:
    """Chunks of one stream, collected until the step is delivered."""

    def __init__(self, connection: Connection, stream: int, request_id: str, unfinished: int) -> None:
        self._connection = connection
        self._stream = stream
        self._request_id = request_id
        self._unfinished = unfinished

    def put(self, item: Chunk) -> None:
        """Into this step's frame; the last chunk closes the stream."""
        self._connection.collect(self._stream, with_request_id(item, self._request_id))
        self._unfinished -= item.finish_reason is not None
        if not self._unfinished:
            self._connection.end(self._stream)

    def close(self, error: Exception) -> None:
        """The engine failed."""
        self._connection.send(frames.failure(self._stream, error))


class Connection:
    """One gateway. Request ids are made unique by connection and stream, whatever the gateway calls them."""

    def __init__(self, engine: LocalEngine, number: int, writer: asyncio.StreamWriter) -> None:
        self._engine = engine
        self._number = number
        self._writer = writer
        self._pending: list[tuple[int, Chunk]] = []
        self._open: set[int] = set()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Until the other side closes."""
        try:
            while True:
                self._receive(frames.client_decoder.decode(await frames.read_body(reader)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except (msgspec.MsgspecError, EngineError) as error:
            logger.error("a gateway sent a frame that cannot be read: %s", error)
        finally:
            await self._leave()

    def collect(self, stream: int, chunk: Chunk) -> None:
        """Add to the frame of this step."""
        self._pending.append((stream, chunk))

    def flush(self) -> None:
        """One frame for everything the step brought."""
        if self._pending:
            chunks, self._pending = self._pending, []
            self.send(frames.StepFrame(chunks=chunks))

    def send(self, frame: frames.Frame) -> None:
        """Write without waiting: what is in flight is bounded by what the clients asked for."""
        if not self._writer.is_closing():
            self._writer.write(frames.encode(frame))

    def end(self, stream: int, *, abort: bool = False) -> None:
        """The stream is over, or its client has left."""
        self._open.discard(stream)
        self._engine.close_stream(self._engine_id(stream), abort=abort)
        task = self._tasks.pop(stream, None)
        if task is not None and abort:
            task.cancel()

    def _receive(self, frame: frames.ClientFrame) -> None:
        if isinstance(frame, frames.Generate):
            self._spawn(frame.stream, self._generate(frame))
        elif isinstance(frame, frames.Abort):
            self.end(frame.stream, abort=True)
        elif isinstance(frame, frames.Hello):
            self.send(frames.Welcome(version=frames.PROTOCOL_VERSION, capabilities=self._engine.capabilities))
        elif isinstance(frame, frames.Follow):
            self._spawn(frame.stream, self._follow(frame))
        else:
            self._spawn(frame.stream, self._answer(frame))

    async def _generate(self, frame: frames.Generate) -> None:
        request = msgspec.structs.replace(frame.request, request_id=self._engine_id(frame.stream))
        self._open.add(frame.stream)
        sink = StreamSink(self, frame.stream, frame.request.request_id, request.n)
        await self._engine.open_stream(request, sink)

    async def _follow(self, frame: frames.Follow) -> None:
        batch: KVEventBatch
        async for batch in self._engine.kv_events(frame.start_seq):
            self.send(frames.Events(stream=frame.stream, batch=batch))

    async def _answer(self, frame: frames.Embed | frames.Score | frames.Stats | frames.Drain) -> None:
        stream = frame.stream
        if isinstance(frame, frames.Embed):
            self.send(frames.Result(stream=stream, embed=await self._engine.embed(frame.request)))
        elif isinstance(frame, frames.Score):
            unique = msgspec.structs.replace(frame.request, request_id=self._engine_id(stream))
            result = await self._engine.score(unique)
            result = msgspec.structs.replace(result, request_id=frame.request.request_id)
            self.send(frames.Result(stream=stream, score=result))
        elif isinstance(frame, frames.Stats):
            self.send(frames.Result(stream=stream, stats=await self._engine.stats()))
        else:
            await self._engine.drain()
            self.send(frames.Result(stream=stream))

    def _spawn(self, stream: int, work: Awaitable[None]) -> None:
        self._tasks[stream] = asyncio.create_task(self._guard(stream, work))

    async def _guard(self, stream: int, work: Awaitable[None]) -> None:
        try:
            await work
        except EngineError as error:
            self.send(frames.failure(stream, error))
        except Exception as error:
            logger.exception("a request failed")
            self.send(frames.failure(stream, error))
        finally:
            self._tasks.pop(stream, None)

    async def _leave(self) -> None:
        for stream in list(self._open):
            self.end(stream, abort=True)
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._writer.close()

    def _engine_id(self, stream: int) -> str:
        return f"{self._number}.{stream}"


class Server:
    """Accepts gateways on a socket that only this user may open."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count(1)
        self._connections: set[Connection] = set()
        engine.call_after_step(self._flush)

    async def listen(self, socket_path: Path) -> asyncio.Server:
        """Bind and start accepting."""
        return await asyncio.start_unix_server(self._accept, sock=bound_socket(socket_path))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(self._engine, next(self._numbers), writer)
        self._connections.add(connection)
        try:
            await connection.serve(reader)
        finally:
            self._connections.discard(connection)

    def _flush(self) -> None:
        for connection in self._connections:
            connection.flush()


async def run(make_core: Callable[[], Core], socket_path: Path, announce: Callable[[], None]) -> None:
    """Load, listen, announce readiness, serve until SIGTERM, drain."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    # The terminal sends Ctrl-C to the whole group; when to end is the gateway's decision.
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    engine = await LocalEngine.start(make_core)
    server = await Server(engine).listen(socket_path)
    announce()
    await stop.wait()
    await engine.drain()
    server.close()
    await engine.close()


def bound_socket(path: Path) -> socket.socket:
    """A Unix socket that only this user may open, in a folder that only this user may enter."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    previous = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(previous)
    return listener


def die_with_parent() -> None:
    """Linux: SIGKILL when the parent ends. Elsewhere the closed socket is the only sign."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Entry point of the process; errors that the user can mend go to stderr as one line."""
    parser = argparse.ArgumentParser(prog="engines.worker", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--socket", required=True, type=Path, help="path of the Unix socket to listen on")
    parser.add_argument("--parent", type=int, default=0, help="end when this process id is no longer the parent")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    die_with_parent()
    if arguments.parent and os.getppid() != arguments.parent:
        return 1
    try:
        config = msgspec.json.decode(arguments.config, type=EngineConfig)
        set_threads(config.model.num_threads)
        make_core = partial(build_core, config, clock=time.monotonic)
        asyncio.run(run(make_core, arguments.socket, lambda: print(READY, flush=True)))
    except (EngineError, msgspec.MsgspecError, OSError) as error:
        print(f"facet worker: {error}", file=sys.stderr)
        return 1
    finally:
        arguments.socket.unlink(missing_ok=True)
    return 0
