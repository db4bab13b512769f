"""Frames between gateway and worker: length-prefixed msgpack of tagged structs, never pickle.

    u32 big-endian length | msgpack

One `StepFrame` carries the new tokens of all requests of a connection in a step. A stream is a number the client
chooses, unique on its connection. Knows nothing of asyncio beyond a reader's `readexactly`.

Read next: `engines/worker.py` (server), `engines/remote.py` (client).
"""

from __future__ import annotations

import asyncio

import msgspec

from engines.api import (
    Capabilities,
    Chunk,
    EmbedRequest,
    EmbedResult,
    EngineDeadError,
    EngineError,
    EngineFaultError,
    EngineOverloadedError,
    GenerateRequest,
    InvalidRequestError,
    KVEventBatch,
    ReplicaStats,
    ScoreRequest,
    ScoreResult,
)

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 64 << 20
LENGTH_BYTES = 4


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Base of all frames."""


class Hello(Frame, frozen=True, kw_only=True, tag="hello"):
    """First frame of a client."""

    version: int = PROTOCOL_VERSION


class Generate(Frame, frozen=True, kw_only=True, tag="generate"):
    """Open a stream."""

    stream: int
    request: GenerateRequest


class Abort(Frame, frozen=True, kw_only=True, tag="abort"):
    """The client has left the stream."""

    stream: int


class Embed(Frame, frozen=True, kw_only=True, tag="embed"):
    """Answered by a Result."""

    stream: int
    request: EmbedRequest


class Score(Frame, frozen=True, kw_only=True, tag="score"):
    """Answered by a Result."""

    stream: int
    request: ScoreRequest


class Stats(Frame, frozen=True, kw_only=True, tag="stats"):
    """Answered by a Result."""

    stream: int


class Follow(Frame, frozen=True, kw_only=True, tag="follow"):
    """Send KV events from `start_seq` on; ends with Abort."""

    stream: int
    start_seq: int = 0


class Drain(Frame, frozen=True, kw_only=True, tag="drain"):
    """Refuse new requests; answered when none runs."""

    stream: int


class Welcome(Frame, frozen=True, kw_only=True, tag="welcome"):
    """Answer to Hello."""

    version: int
    capabilities: Capabilities


class StepFrame(Frame, frozen=True, kw_only=True, tag="step"):
    """(stream, chunk) of every stream of this connection that has news."""

    chunks: list[tuple[int, Chunk]]


class Result(Frame, frozen=True, kw_only=True, tag="result"):
    """Exactly one field is set, or none for Drain."""

    stream: int
    embed: EmbedResult | None = None
    score: ScoreResult | None = None
    stats: ReplicaStats | None = None


class Events(Frame, frozen=True, kw_only=True, tag="events"):
    """One batch of KV events."""

    stream: int
    batch: KVEventBatch


class Failure(Frame, frozen=True, kw_only=True, tag="failure"):
    """The stream ended with an EngineError."""

    stream: int
    code: str
    message: str
    field: str = ""
    value: str = ""
    limit: str = ""
    retry_after_s: float = 1.0


ClientFrame = Hello | Generate | Abort | Embed | Score | Stats | Follow | Drain
ServerFrame = Welcome | StepFrame | Result | Events | Failure

client_decoder = msgspec.msgpack.Decoder(ClientFrame)
server_decoder = msgspec.msgpack.Decoder(ServerFrame)


def encode(frame: Frame) -> bytes:
    """Length prefix and body. Raises EngineFaultError if the frame is too large to be read again."""
    body = msgspec.msgpack.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise EngineFaultError(f"a {type(frame).__name__} frame of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


async def read_body(reader: asyncio.StreamReader) -> bytes:
    """The next frame's body. Raises IncompleteReadError at the end, EngineFaultError for a length over the cap."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    if length > MAX_FRAME_BYTES:
        raise EngineFaultError(f"a frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
    return await reader.readexactly(length)


def failure(stream: int, error: Exception) -> Failure:
    """An exception as a frame; what is no EngineError is a fault of ours."""
    return Failure(
        stream=stream,
        code=error.code if isinstance(error, EngineError) else EngineFaultError.code,
        message=str(error),
        field=getattr(error, "field", ""),
        value=getattr(error, "value", ""),
        limit=getattr(error, "limit", ""),
        retry_after_s=getattr(error, "retry_after_s", 1.0),
    )


def exception(frame: Failure) -> EngineError:
    """The exception that a Failure stands for."""
    if frame.code == InvalidRequestError.code:
        return InvalidRequestError(frame.message, field=frame.field, value=frame.value, limit=frame.limit)
    if frame.code == EngineOverloadedError.code:
        return EngineOverloadedError(frame.message, retry_after_s=frame.retry_after_s)
    if frame.code == EngineDeadError.code:
        return EngineDeadError(frame.message)
    return EngineFaultError(frame.message)
