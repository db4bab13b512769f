"""An engine on a thread sleeps while a tier works for it, and wakes when the tier has answered."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path

from engines.api import GenerateRequest, SamplingParams
from engines.config import CacheConfig, EngineConfig, ModelConfig
from engines.core.build import build_core
from engines.local import LocalEngine
from engines.models.tiny import write_tiny_llama


def request_of(name: str) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=4, temperature=0.0, logprobs=0)
    return GenerateRequest(request_id=name, prompt_token_ids=[16 + i % 200 for i in range(300)], sampling=sampling)


async def test_a_prefix_is_loaded_without_spinning_and_survives_the_worker(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "m", seed=1)
    config = EngineConfig(
        model=ModelConfig(name="tiny", path=str(path), dtype="float32"),
        cache=CacheConfig(num_blocks=40, disk_path=str(tmp_path / "kv"), disk_bytes=64 << 20),
    )

    async def ask(slow_s: float) -> tuple[list[object], int]:
        engine = await LocalEngine.start(partial(build_core, config, clock=time.monotonic))
        tier = engine._core.offload._tiers[0]
        get = tier.get

        def slow_get(name: object, into: object) -> bool:
            time.sleep(slow_s / 18)
            return get(name, into)

        steps = 0
        step = engine._core.step

        def counted_step() -> object:
            nonlocal steps
            steps += 1
            return step()

        tier.get, engine._core.step = slow_get, counted_step
        try:
            chunks = [chunk async for chunk in engine.generate(request_of("a"))]
            assert steps <= 4 + 1 + 18 + 1, "a token, the chunk before, a block stored, a load ended"
            events = engine.kv_events()
            media = {event.medium async for event in first_batches(events) for event in event.events}
            assert "disk" in media
            return [(c.token_ids, c.logprobs) for c in chunks], chunks[-1].usage.cached_tokens
        finally:
            await engine.close()

    async def first_batches(events: object) -> object:
        """Until a batch tells of the disk; the copies end after the last step."""
        async with asyncio.timeout(10):
            async for batch in events:
                yield batch
                if any(event.medium == "disk" for event in batch.events):
                    return

    cold = await ask(0.0)
    warm = await ask(0.3)
    assert (cold[1], warm[1]) == (0, 288)
    assert cold[0] == warm[0]
