"""An engine in another process, behind the `Engine` seam: one socket, many streams.

Knows nothing of how the process was started (`engines/process.py`). When the socket closes, every waiting caller gets
EngineDeadError at once.

Read next: `engines/frames.py`, `engines/worker.py`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

import msgspec

from engines import frames
from engines.api import (
    Capabilities,
    Chunk,
    EmbedRequest,
    EmbedResult,
    EngineDeadError,
    EngineFaultError,
    GenerateRequest,
    KVEventBatch,
    ReplicaStats,
    ScoreRequest,
    ScoreResult,
)
from engines.mailbox import Mailbox


class RemoteEngine:
    """Make it with `await RemoteEngine.connect(socket_path)`. `on_lost` is called once when the connection ends."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        capabilities: Capabilities,
        on_lost: Callable[[], None] | None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._capabilities = capabilities
        self._on_lost = on_lost
        self._numbers = itertools.count(1)
        self._streams: dict[int, Mailbox[Any]] = {}
        self._dead: EngineDeadError | None = None
        self._task = asyncio.create_task(self._read(), name="facet-remote-engine")

    @classmethod
    async def connect(cls, socket_path: str, *, on_lost: Callable[[], None] | None = None) -> RemoteEngine:
        """Connect and shake hands. Raises EngineDeadError when nobody answers or the protocol differs."""
        try:
            reader, writer = await asyncio.open_unix_connection(socket_path)
        except OSError as error:
            raise EngineDeadError(f"no engine answers at {socket_path}: {error}") from error
        try:
            writer.write(frames.encode(frames.Hello()))
            welcome = frames.server_decoder.decode(await frames.read_body(reader))
        except (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError) as error:
            writer.close()
            raise EngineDeadError(f"the engine at {socket_path} did not shake hands: {error}") from error
        if not isinstance(welcome, frames.Welcome) or welcome.version != frames.PROTOCOL_VERSION:
            writer.close()
            raise EngineDeadError(f"the engine at {socket_path} speaks another protocol version: {welcome}")
        return cls(reader, writer, welcome.capabilities, on_lost)

    @property
    def capabilities(self) -> Capabilities:
        """As the worker said when it welcomed us."""
        return self._capabilities

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Yield chunks; leaving early tells the worker to abort."""
        stream, mailbox = self._open()
        unfinished = request.n
        try:
            self._send(frames.Generate(stream=stream, request=request))
            while unfinished:
                for chunk in await mailbox.get():
                    if chunk.finish_reason == "error":
                        raise EngineFaultError(f"request {request.request_id} met a fault in the engine")
                    unfinished -= chunk.finish_reason is not None
                    yield chunk
        finally:
            self._close(stream, abort=unfinished > 0)

    async def embed(self, request: EmbedRequest) -> EmbedResult:
        """Vectors of the inputs."""
        result = await self._ask(lambda stream: frames.Embed(stream=stream, request=request))
        assert result.embed is not None
        return result.embed

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Log-probs of the labels."""
        result = await self._ask(lambda stream: frames.Score(stream=stream, request=request))
        assert result.score is not None
        return result.score

    async def stats(self) -> ReplicaStats:
        """A fresh snapshot."""
        result = await self._ask(lambda stream: frames.Stats(stream=stream))
        assert result.stats is not None
        return result.stats

    async def kv_events(self, start_seq: int = 0) -> AsyncGenerator[KVEventBatch, None]:
        """Replay, then follow."""
        stream, mailbox = self._open()
        try:
            self._send(frames.Follow(stream=stream, start_seq=start_seq))
            while True:
                for batch in await mailbox.get():
                    yield batch
        finally:
            self._close(stream, abort=True)

    async def drain(self) -> None:
        """Return when nothing runs."""
        await self._ask(lambda stream: frames.Drain(stream=stream))

    async def close(self) -> None:
        """Close the socket; the worker aborts what was ours."""
        self._lose(EngineDeadError("the engine was closed"))
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    def _open(self) -> tuple[int, Mailbox[Any]]:
        if self._dead is not None:
            raise self._dead
        stream = next(self._numbers)
        mailbox: Mailbox[Any] = Mailbox()
        self._streams[stream] = mailbox
        return stream, mailbox

    def _close(self, stream: int, *, abort: bool) -> None:
        if self._streams.pop(stream, None) is not None and abort and self._dead is None:
            self._send(frames.Abort(stream=stream))

    async def _ask(self, question: Callable[[int], frames.Frame]) -> frames.Result:
        stream, mailbox = self._open()
        answered = False
        try:
            self._send(question(stream))
            result: frames.Result = (await mailbox.get())[0]
            answered = True
            return result
        finally:
            self._close(stream, abort=not answered)

    def _send(self, frame: frames.Frame) -> None:
        self._writer.write(frames.encode(frame))

    async def _read(self) -> None:
        try:
            while True:
                self._receive(frames.server_decoder.decode(await frames.read_body(self._reader)))
        except (OSError, asyncio.IncompleteReadError):
            self._lose(EngineDeadError("the engine process is gone"))
        except (msgspec.MsgspecError, EngineFaultError) as error:
            self._lose(EngineDeadError(f"the engine sent a frame that cannot be read: {error}"))
            self._writer.close()

    def _receive(self, frame: frames.ServerFrame) -> None:
        streams = self._streams
        if isinstance(frame, frames.StepFrame):
            for stream, chunk in frame.chunks:
                mailbox = streams.get(stream)
                if mailbox is not None:
                    mailbox.put(chunk)
        elif isinstance(frame, frames.Failure):
            if frame.stream in streams:
                streams.pop(frame.stream).close(frames.exception(frame))
        elif isinstance(frame, frames.Events):
            if frame.stream in streams:
                streams[frame.stream].put(frame.batch)
        elif isinstance(frame, frames.Result) and frame.stream in streams:
            streams[frame.stream].put(frame)

    def _lose(self, error: EngineDeadError) -> None:
        if self._dead is not None:
            return
        self._dead = error
        for mailbox in list(self._streams.values()):
            mailbox.close(error)
        self._streams.clear()
        if self._on_lost is not None:
            self._on_lost()
