"""Frames: round trips, caps, and errors that keep their meaning over the wire."""

from __future__ import annotations

import asyncio

import pytest

from engines import frames
from engines.api import (
    BlockRemoved,
    BlockStored,
    Chunk,
    EngineDeadError,
    EngineError,
    EngineFaultError,
    EngineOverloadedError,
    GenerateRequest,
    InvalidRequestError,
    KVEventBatch,
    SamplingParams,
    TokenLogprobs,
)


async def passed(data: bytes) -> bytes:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await frames.read_body(reader)


async def test_client_frames_survive() -> None:
    sampling = SamplingParams(max_tokens=3, logit_bias={5: -1.5}, stop_token_ids=(1, 2))
    request = GenerateRequest(request_id="r", prompt_token_ids=[1, 2], sampling=sampling, cache_salt=b"\0\xff")
    for frame in (frames.Hello(), frames.Generate(stream=3, request=request), frames.Abort(stream=3)):
        assert frames.client_decoder.decode(await passed(frames.encode(frame))) == frame


async def test_server_frames_survive() -> None:
    chunk = Chunk(request_id="r", token_ids=[7], logprobs=[TokenLogprobs(token_id=7, logprob=-0.5, top=[(7, -0.5)])])
    batch = KVEventBatch(1.5, [BlockStored([b"a"], None, [], 16), BlockRemoved([b"b"])], 4)
    for frame in (frames.StepFrame(chunks=[(1, chunk)]), frames.Events(stream=2, batch=batch)):
        assert frames.server_decoder.decode(await passed(frames.encode(frame))) == frame


async def test_a_length_over_the_cap_is_refused_before_it_is_read() -> None:
    with pytest.raises(EngineFaultError, match="exceeds"):
        await passed((frames.MAX_FRAME_BYTES + 1).to_bytes(4, "big"))


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("n is 0", field="n", value="0", limit=">= 1"),
        EngineOverloadedError("full", retry_after_s=2.5),
        EngineDeadError("gone"),
        EngineFaultError("bad"),
    ],
)
def test_errors_keep_their_type_and_fields(error: EngineError) -> None:
    again = frames.exception(frames.failure(1, error))
    assert type(again) is type(error)
    assert vars(again) == vars(error)
    assert str(again) == str(error)


def test_a_bug_of_ours_is_a_fault_to_the_other_side() -> None:
    again = frames.exception(frames.failure(1, ZeroDivisionError("oops")))
    assert type(again) is EngineFaultError
