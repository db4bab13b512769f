"""Forked workers: equal to spawned ones, ready at once, ended and replaced like them; and idle without work."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from engines.api import EmbedRequest, EngineDeadError, GenerateRequest, SamplingParams
from engines.config import CacheConfig, EngineConfig, ModelConfig
from engines.models.tiny import TinyLlama, write_tiny_llama
from engines.nursery import Zygote
from engines.process import EngineProcess

FORK_LIMIT_S = 2.0  # what a busy test machine may take; `tests/bench/start.py` measures


def config(path: Path, dtype: str = "float32") -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(name="tiny", path=str(path), dtype=dtype, num_threads=2),
        cache=CacheConfig(num_blocks=64),
    )


async def answer(process: EngineProcess) -> list[object]:
    request = GenerateRequest(
        request_id="r",
        prompt_token_ids=[20, 30, 40, 50],
        sampling=SamplingParams(max_tokens=12, temperature=0.8, seed=11, logprobs=3),
    )
    return [(c.token_ids, c.logprobs, c.finish_reason) async for c in process.generate(request)]


async def until(process: EngineProcess, state: str) -> None:
    for _ in range(3000):
        if process.state == state:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"the worker is {process.state}, never {state}")


class Nursery:
    """Makes processes of one zygote; all are closed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.zygotes: list[Zygote] = []
        self.processes: list[EngineProcess] = []

    def zygote(self, asked: EngineConfig) -> Zygote:
        self.zygotes.append(Zygote(asked, self.folder / "zygote.log"))
        return self.zygotes[-1]

    async def start(self, asked: EngineConfig, zygote: Zygote | None) -> EngineProcess:
        name = f"w{len(self.processes)}"
        process = EngineProcess(
            asked, run_dir=self.folder / "run", name=name, log_path=self.folder / f"{name}.log", zygote=zygote
        )
        self.processes.append(process)
        await process.start()
        return process


@pytest.fixture
async def nursery(tmp_path: Path) -> AsyncIterator[Nursery]:
    made = Nursery(tmp_path)
    yield made
    for process in made.processes:
        await process.close()
    assert [zygote.pid for zygote in made.zygotes] == [None] * len(made.zygotes), "a zygote outlives its workers"


@pytest.fixture
def asked(tmp_path: Path) -> EngineConfig:
    """A model for the compiled kernels, where there are some; two threads, which a fork must start itself."""
    sizes = TinyLlama(num_heads=2, num_kv_heads=1, head_dim=32)
    return config(write_tiny_llama(tmp_path / "m", seed=3, sizes=sizes), "auto")


@pytest.mark.parametrize("dtype", ["auto", "float32", "int8"])
async def test_a_forked_worker_answers_like_a_spawned_one(nursery: Nursery, asked: EngineConfig, dtype: str) -> None:
    asked = config(Path(asked.model.path), dtype)
    zygote = nursery.zygote(asked)
    spawned = await nursery.start(asked, None)
    first, second = [await nursery.start(asked, zygote) for _ in range(2)]
    expected = await answer(spawned)
    assert await asyncio.gather(answer(first), answer(second)) == [expected, expected]
    assert first.capabilities == spawned.capabilities
    assert {psutil.Process(p.pid).ppid() for p in (first, second)} == {zygote.pid}


async def test_a_killed_worker_is_forked_again_at_once(nursery: Nursery, asked: EngineConfig) -> None:
    zygote = nursery.zygote(asked)
    process = await nursery.start(asked, zygote)
    before, pid = await answer(process), zygote.pid
    os.kill(process.pid, signal.SIGKILL)
    killed_s = time.monotonic()
    await until(process, "dead")
    await until(process, "ready")
    assert time.monotonic() - killed_s < FORK_LIMIT_S
    assert await answer(process) == before
    assert (zygote.pid, process.restarts_total) == (pid, 1)


async def test_a_killed_zygote_takes_its_workers_and_both_come_back(nursery: Nursery, tiny_llama_path: Path) -> None:
    asked = config(tiny_llama_path)
    zygote = nursery.zygote(asked)
    process = await nursery.start(asked, zygote)
    before, pid = await answer(process), process.pid
    os.kill(zygote.pid, signal.SIGKILL)
    await until(process, "dead")
    await until(process, "ready")
    assert process.pid != pid
    assert await answer(process) == before


async def test_a_worker_that_is_told_to_end_ends_well(nursery: Nursery, tiny_llama_path: Path, tmp_path: Path) -> None:
    asked = config(tiny_llama_path)
    zygote = nursery.zygote(asked)
    process = await nursery.start(asked, zygote)
    worker = process._worker
    assert (tmp_path / "run" / "w0.sock").exists()
    await process.close()
    assert worker.returncode == 0
    assert not (tmp_path / "run" / "w0.sock").exists()
    assert (tmp_path / "w0.log").read_text() == ""


async def test_a_zygote_that_cannot_load_says_why(nursery: Nursery, tmp_path: Path) -> None:
    asked = config(tmp_path / "nothing")
    with pytest.raises(EngineDeadError, match="nothing does not exist"):
        await nursery.start(asked, nursery.zygote(asked))


async def test_encoders_are_forked_too(nursery: Nursery, tiny_bert_path: Path) -> None:
    asked = config(tiny_bert_path)
    zygote = nursery.zygote(asked)
    forked, spawned = await nursery.start(asked, zygote), await nursery.start(asked, None)
    request = EmbedRequest(request_id="e", inputs=[[2, 10, 11, 3], [2, 12, 3]])
    assert await forked.embed(request) == await spawned.embed(request)


async def test_an_idle_worker_uses_no_cpu(nursery: Nursery, asked: EngineConfig) -> None:
    zygote = nursery.zygote(asked)
    process = await nursery.start(asked, zygote)
    await answer(process)
    await asyncio.sleep(0.2)  # threads of the pools watch for more work for a moment
    watched = [psutil.Process(pid) for pid in (process.pid, zygote.pid)]

    def used_s() -> float:
        return sum(sum(one.cpu_times()[:2]) for one in watched)

    before_s = used_s()
    await asyncio.sleep(1.0)
    assert used_s() - before_s < 0.02
