"""The engines under contract: fake, a thread, a worker process. All serve the same tiny random model's sizes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from engines.api import Capabilities, Engine
from engines.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engines.core.build import build_core
from engines.fake import FakeEngine, Script
from engines.local import LocalEngine
from engines.process import EngineProcess

MakeEngine = Callable[[], Awaitable[Engine]]


def engine_config(path: Path, name: str = "tiny") -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(name=name, path=str(path), dtype="float32", num_threads=1),
        cache=CacheConfig(block_size=16, num_blocks=512),
        scheduler=SchedulerConfig(max_batch_tokens=256, chunk_tokens=128, max_running=32, max_waiting=256),
    )


async def make_fake(tiny_llama_path: Path, tmp_path: Path) -> Engine:
    capabilities = Capabilities(
        model="tiny", task="generate", digest="fake", dtype="fake", vocab_size=272, max_model_len=512
    )
    return FakeEngine(capabilities, Script(step_s=0.001))


async def make_local(tiny_llama_path: Path, tmp_path: Path) -> Engine:
    return await LocalEngine.start(partial(build_core, engine_config(tiny_llama_path), clock=time.monotonic))


async def make_process(tiny_llama_path: Path, tmp_path: Path) -> Engine:
    engine = EngineProcess(
        engine_config(tiny_llama_path), run_dir=tmp_path / "run", name="t", log_path=tmp_path / "worker.log"
    )
    await engine.start()
    return engine


MAKERS = {"fake": make_fake, "local": make_local, "process": make_process}


@pytest_asyncio.fixture(params=list(MAKERS))
async def engine(request: pytest.FixtureRequest, tiny_llama_path: Path, tmp_path: Path) -> AsyncGenerator[Engine, None]:
    """One engine of each kind; afterwards it must have left no task behind."""
    made = await MAKERS[request.param](tiny_llama_path, tmp_path)
    yield made
    await made.close()
    await asyncio.sleep(0)
    assert [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("facet")] == []
