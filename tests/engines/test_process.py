"""The worker process: equal to the engine in this process, and what happens when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest

from engines.api import EmbedRequest, EngineDeadError, GenerateRequest, InvalidRequestError, SamplingParams
from engines.config import CacheConfig, EngineConfig, ModelConfig
from engines.core.build import build_core
from engines.local import LocalEngine
from engines.process import EngineProcess
from engines.remote import RemoteEngine


def config(path: Path) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(name="tiny", path=str(path), dtype="float32", num_threads=1),
        cache=CacheConfig(num_blocks=256),
    )


def request(request_id: str, max_tokens: int = 24, **sampling: object) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=[20, 30, 40, 50],
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=11, logprobs=3, **sampling),
        n=2,
    )


async def chunks_of(engine: LocalEngine | EngineProcess | RemoteEngine, asked: GenerateRequest) -> list[object]:
    """(index, tokens, log-probs, end) of each chunk, in order a choice."""
    found = [(c.index, c.token_ids, c.logprobs, c.finish_reason) async for c in engine.generate(asked)]
    return sorted(found, key=lambda chunk: chunk[0])


async def started(path: Path, tmp_path: Path, **options: object) -> EngineProcess:
    process = EngineProcess(
        config(path), run_dir=tmp_path / "run", name="t", log_path=tmp_path / "worker.log", **options
    )
    await process.start()
    return process


async def until_running(process: EngineProcess, *, wanted: bool) -> None:
    for _ in range(5000):
        if bool((await process.stats()).running) == wanted:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"the engine's running never became {wanted}")


async def until_ready(process: EngineProcess) -> None:
    for _ in range(1500):
        if process.state == "ready":
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"the worker did not come back: {process.state}")


async def test_local_equals_remote_token_for_token(tiny_llama_path: Path, tmp_path: Path) -> None:
    local = await LocalEngine.start(partial(build_core, config(tiny_llama_path), clock=time.monotonic))
    process = await started(tiny_llama_path, tmp_path)
    try:
        assert await chunks_of(local, request("r")) == await chunks_of(process, request("r"))
        here = msgspec.structs.replace(local.capabilities, num_threads=process.capabilities.num_threads)
        assert here == process.capabilities
    finally:
        await asyncio.gather(local.close(), process.close())


async def test_socket_is_private(tiny_llama_path: Path, tmp_path: Path) -> None:
    process = await started(tiny_llama_path, tmp_path)
    try:
        assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "run" / "t.sock").stat().st_mode) == 0o600
    finally:
        await process.close()
    assert not (tmp_path / "run" / "t.sock").exists()


async def test_two_gateways_may_use_the_same_request_id(tiny_llama_path: Path, tmp_path: Path) -> None:
    process = await started(tiny_llama_path, tmp_path)
    other = await RemoteEngine.connect(str(tmp_path / "run" / "t.sock"))
    try:
        first, second = await asyncio.gather(chunks_of(process, request("r")), chunks_of(other, request("r")))
        assert first == second
    finally:
        await other.close()
        await process.close()


async def test_a_connection_that_closes_takes_its_requests_with_it(tiny_llama_path: Path, tmp_path: Path) -> None:
    process = await started(tiny_llama_path, tmp_path)
    other = await RemoteEngine.connect(str(tmp_path / "run" / "t.sock"))
    reading = asyncio.create_task(chunks_of(other, request("r", max_tokens=480)))
    try:
        await until_running(process, wanted=True)
        await other.close()
        with pytest.raises(EngineDeadError):
            await reading
        await until_running(process, wanted=False)
        stats = await process.stats()
        assert stats.used_blocks == 0
        assert stats.aborts_total == 1
    finally:
        await process.close()


async def test_kill_9_is_seen_at_once_and_the_worker_comes_back(tiny_llama_path: Path, tmp_path: Path) -> None:
    states: list[str] = []
    process = await started(tiny_llama_path, tmp_path, on_state=states.append)
    try:
        before = await chunks_of(process, request("before"))
        reading = asyncio.create_task(chunks_of(process, request("r", max_tokens=480)))
        await until_running(process, wanted=True)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        killed_s = time.monotonic()
        with pytest.raises(EngineDeadError):
            await reading
        assert time.monotonic() - killed_s < 1.0
        with pytest.raises(EngineDeadError):
            await process.stats()
        await until_ready(process)
        assert await chunks_of(process, request("after")) == before
        assert process.restarts_total == 1
        assert states == ["ready", "dead", "starting", "ready"]
    finally:
        await process.close()


async def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    process = EngineProcess(
        config(tmp_path / "nothing"), run_dir=tmp_path / "run", name="t", log_path=tmp_path / "worker.log"
    )
    with pytest.raises(EngineDeadError, match="nothing"):
        await process.start()
    assert process.state == "dead"
    await process.close()


async def test_the_wrong_question_is_refused_not_fatal(
    tiny_llama_path: Path, tiny_bert_path: Path, tmp_path: Path
) -> None:
    process = await started(tiny_llama_path, tmp_path)
    try:
        with pytest.raises(InvalidRequestError, match="does not embed"):
            await process.embed(EmbedRequest(request_id="e", inputs=[[1, 2]]))
        asked = GenerateRequest(
            request_id="x", prompt_token_ids=[20], sampling=SamplingParams(max_tokens=1, temperature=-1)
        )
        with pytest.raises(InvalidRequestError, match="temperature is -1"):
            await chunks_of(process, asked)
        assert len(await chunks_of(process, request("after"))) == 48
    finally:
        await process.close()


async def test_an_encoder_embeds_through_the_process(tiny_bert_path: Path, tmp_path: Path) -> None:
    process = await started(tiny_bert_path, tmp_path)
    local = await LocalEngine.start(partial(build_core, config(tiny_bert_path), clock=time.monotonic))
    try:
        asked = EmbedRequest(request_id="e", inputs=[[2, 10, 11, 3], [2, 12, 3]])
        over, here = await process.embed(asked), await local.embed(asked)
        assert over == here
        assert (len(over.vectors), over.dimensions, over.prompt_tokens) == (2, 64, 7)
        with pytest.raises(InvalidRequestError, match="does not generate"):
            await chunks_of(process, request("r"))
    finally:
        await asyncio.gather(local.close(), process.close())
