"""Many clients, clients that leave, an engine that is killed: nothing is lost and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engines.process import EngineProcess

STREAMS = 64


def body(prompt: str, **changes: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": prompt}], "stream": True, **changes}


async def read_stream(client: httpx.AsyncClient, request: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Decoded frames before [DONE], and the last line."""
    frames: list[dict[str, Any]] = []
    last = ""
    async with client.stream("POST", "/v1/chat/completions", json=request) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line:
                last = line
                if line != "data: [DONE]":
                    frames.append(json.loads(line.removeprefix("data: ")))
    return frames, last


def text_of(frames: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for frame in frames for choice in frame["choices"])


async def drained(house: Any) -> None:
    """KV back, nobody admitted, no open connection, no task but those of an idle house."""
    stats = await house.until(lambda s: s.running == s.waiting == 0)
    assert (stats.free_blocks + stats.cached_blocks, stats.used_blocks) == (stats.total_blocks, 0)
    assert house.surface.pipeline.admission.in_flight == 0
    end_s = time.monotonic() + 10
    while house.server.server_state.connections or house.server.server_state.tasks:
        assert time.monotonic() < end_s, "connections or tasks stay"
        await asyncio.sleep(0.01)


def names(tasks: set[asyncio.Task[Any]]) -> list[str]:
    return sorted(task.get_coro().__qualname__ for task in tasks)


@pytest.mark.parametrize("kind", ["local", "process"])
async def test_64_streams_complete_and_leave_nothing(open_house, tiny_llama_path: Path, kind: str) -> None:
    async with open_house(tiny_llama_path, kind=kind) as house:
        async with house.http() as client:
            await read_stream(client, body("warm", max_tokens=1))
            idle = names(asyncio.all_tasks())
        async with house.http() as client:
            requests = [
                body(
                    f"{number} of many",
                    max_tokens=20,
                    ignore_eos=True,
                    seed=number,
                    stream_options={"include_usage": True},
                )
                for number in range(STREAMS)
            ]
            streams = await asyncio.gather(*(read_stream(client, request) for request in requests))
        for frames, last in streams:
            assert last == "data: [DONE]"
            assert frames[-1]["usage"]["completion_tokens"] == 20
            assert [c["finish_reason"] for f in frames for c in f["choices"] if c["finish_reason"]] == ["length"]
        await drained(house)
        left = names(asyncio.all_tasks())
        assert [name for name in left if name not in idle] == []
        assert (await house.stats()).requests_total == STREAMS + 1


async def test_a_stream_joins_to_the_whole_answer(open_house, tiny_llama_path: Path) -> None:
    async with open_house(tiny_llama_path) as house, house.http() as client:
        for changes in ({"temperature": 0}, {"temperature": 1.2, "top_p": 0.9, "seed": 5, "n": 3}):
            frames, _ = await read_stream(client, body("Tell me", max_tokens=30, **changes))
            whole = (
                await client.post(
                    "/v1/chat/completions", json=body("Tell me", max_tokens=30, **changes) | {"stream": False}
                )
            ).json()
            for choice in whole["choices"]:
                parts = [c for f in frames for c in f["choices"] if c["index"] == choice["index"]]
                assert "".join(p["delta"].get("content") or "" for p in parts) == choice["message"]["content"]
                assert [p["finish_reason"] for p in parts if p["finish_reason"]] == [choice["finish_reason"]]


async def test_a_killed_worker_is_a_clear_error_then_a_new_worker(open_house, tiny_llama_path: Path) -> None:
    async with open_house(tiny_llama_path, kind="process") as house, house.http() as client:
        (replica,) = house.surface.pipeline.executor.fleet.replicas("m")
        process = replica.engine
        assert isinstance(process, EngineProcess)
        first_pid = process.pid
        streaming = asyncio.create_task(read_stream(client, body("long", max_tokens=450, ignore_eos=True)))
        await house.until(lambda s: s.generation_tokens_total > 3)
        os.kill(process.pid, signal.SIGKILL)
        frames, _ = await streaming
        (error,) = [frame["error"] for frame in frames if "error" in frame]
        assert frames[-1] == {"error": error}
        assert (error["type"], error["code"]) == ("server_error", "engine_unavailable")
        refused = await client.post("/v1/chat/completions", json=body("while it is down", max_tokens=1))
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_unavailable"
        assert int(refused.headers["retry-after"]) >= 1
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/health/ready")).status_code == 503
        end_s = time.monotonic() + 60
        while (await client.get("/health/ready")).status_code != 200:
            assert time.monotonic() < end_s, "the worker was not restarted"
            await asyncio.sleep(0.05)
        assert process.pid != first_pid
        frames, last = await read_stream(client, body("again", max_tokens=3, ignore_eos=True))
        assert last == "data: [DONE]"
        await client.aclose()
        await drained(house)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("state", ["decoding", "queued"])
async def test_a_client_that_leaves_frees_its_kv(open_house, tiny_llama_path: Path, state: str, stream: bool) -> None:
    """`queued`: the replica computes one request at a time, so this one waits without any block."""
    async with open_house(tiny_llama_path, model="max_running: 1" if state == "queued" else "") as house:
        if state == "queued":
            async with house.http() as other, house.http() as client:
                first = asyncio.create_task(read_stream(other, body("first", max_tokens=480, ignore_eos=True)))
                await house.until(lambda s: s.running == 1)
                task = asyncio.create_task(client.post("/v1/chat/completions", json=body("b", stream=stream)))
                await house.until(lambda s: s.waiting == 1)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                stats = await house.until(lambda s: s.waiting == 0)
                assert stats.running == 1, "the other request runs on"
                await first
        else:
            client = house.http()
            task = asyncio.create_task(
                client.post("/v1/chat/completions", json=body("b", stream=stream, max_tokens=480, ignore_eos=True))
            )
            await house.until(lambda s: s.generation_tokens_total > 2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.aclose()
            stats = await house.until(lambda s: s.running == 0)
            assert stats.generation_tokens_total < 480, "the engine went on without its client"
        assert (await house.stats()).aborts_total == 1
        await drained(house)


@pytest.mark.model
async def test_64_streams_of_the_demo_model(open_house, demo_model_path: Path) -> None:
    async with open_house(demo_model_path, kind="process") as house:
        client = house.openai()

        async def ask(number: int) -> str:
            stream = await client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": f"What is {number} plus {number}?"}],
                max_tokens=8,
                temperature=0,
                stream=True,
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        texts = await asyncio.gather(*(ask(number) for number in range(STREAMS)))
        assert all(text.strip() for text in texts)
        alone = await ask(7)
        assert alone == texts[7], "an answer must not depend on its neighbours"
        sum_ = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "What is 2 plus 2?"}],
            max_tokens=24,
            temperature=0,
        )
        assert sum_.choices[0].message.content == "The answer to this classic math problem is 4."
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "word " * 9000}])
        await client.close()
        await drained(house)
