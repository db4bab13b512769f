"""The Engine contract, over every implementation: what the gateway relies on, whatever computes."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from contextlib import aclosing

import pytest

from engines.api import (
    Chunk,
    Engine,
    EngineDeadError,
    EngineOverloadedError,
    GenerateRequest,
    InvalidRequestError,
    ReplicaStats,
    SamplingParams,
    ScoreRequest,
)

PROMPT = [20, 40, 60, 80, 100]


def ask(request_id: str = "r", prompt: list[int] | None = None, n: int = 1, **sampling: object) -> GenerateRequest:
    params = {"max_tokens": 8, "temperature": 0.0, **sampling}
    return GenerateRequest(
        request_id=request_id, prompt_token_ids=prompt or PROMPT, n=n, sampling=SamplingParams(**params)
    )


async def collect(engine: Engine, request: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request)]


def tokens(chunks: list[Chunk], index: int = 0) -> list[int]:
    return [token for chunk in chunks if chunk.index == index for token in chunk.token_ids]


async def settled(engine: Engine) -> ReplicaStats:
    """Stats once nothing runs; an abort takes effect within a step."""
    for _ in range(200):
        stats = await engine.stats()
        if not stats.running and not stats.waiting:
            return stats
        await asyncio.sleep(0.01)
    raise AssertionError(f"still running: {stats}")


def uses_kv(engine: Engine) -> bool:
    return engine.capabilities.num_blocks > 0


async def test_capabilities_are_known(engine: Engine) -> None:
    facts = engine.capabilities
    assert (facts.model, facts.task, facts.vocab_size, facts.max_model_len) == ("tiny", "generate", 272, 512)


async def test_one_choice(engine: Engine) -> None:
    chunks = await collect(engine, ask())
    assert len(tokens(chunks)) == 8
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    last = chunks[-1]
    assert last.finish_reason == "length"
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 8)
    assert last.timings is not None
    assert {chunk.request_id for chunk in chunks} == {"r"}


async def test_the_same_request_gives_the_same_tokens(engine: Engine) -> None:
    first = tokens(await collect(engine, ask("a", temperature=1.0, seed=3)))
    second = tokens(await collect(engine, ask("b", temperature=1.0, seed=3)))
    assert first == second


async def test_choices_are_complete_and_end_once(engine: Engine) -> None:
    chunks = await collect(engine, ask(n=4, temperature=1.0, seed=5))
    ends = defaultdict(list)
    for chunk in chunks:
        if chunk.finish_reason is not None:
            ends[chunk.index].append(chunk.finish_reason)
    assert ends == {index: ["length"] for index in range(4)}
    assert all(len(tokens(chunks, index)) == 8 for index in range(4))


async def test_a_stop_token_ends_and_is_not_emitted(engine: Engine) -> None:
    free = tokens(await collect(engine, ask("a")))
    stop = free[3]
    chunks = await collect(engine, ask("b", stop_token_ids=(stop,)))
    assert tokens(chunks) == free[: free.index(stop)]
    assert (chunks[-1].finish_reason, chunks[-1].stop_token_id) == ("stop", stop)


async def test_logprobs_come_one_a_token(engine: Engine) -> None:
    chunks = await collect(engine, ask(logprobs=1))
    entries = [entry for chunk in chunks for entry in chunk.logprobs or []]
    assert [entry.token_id for entry in entries] == tokens(chunks)
    assert all(entry.logprob <= 0 for entry in entries)
    assert all(len(entry.top) == 1 for entry in entries)


async def test_leaving_early_aborts(engine: Engine) -> None:
    async with aclosing(engine.generate(ask(max_tokens=400))) as chunks:
        async for _ in chunks:
            break
    stats = await settled(engine)
    assert stats.aborts_total == 1
    assert stats.used_blocks == 0
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks


async def test_cancelling_the_reader_aborts_in_any_state(engine: Engine) -> None:
    """Queued, in the middle of a prompt, decoding: the task is cancelled after each of many delays."""

    async def read(number: int) -> None:
        prompt = [(7 * number + i) % 250 + 16 for i in range(100)]
        async for _ in engine.generate(ask(f"c{number}", prompt, max_tokens=300)):
            pass

    readers = [asyncio.create_task(read(number)) for number in range(24)]
    for number, reader in enumerate(readers):
        await asyncio.sleep(0.002 * (number % 3))
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    stats = await settled(engine)
    assert stats.used_blocks == 0


async def test_64_streams_at_once_are_complete_and_as_if_alone(engine: Engine) -> None:
    prompts = {f"s{n}": [(31 * n + i) % 250 + 16 for i in range(5 + n)] for n in range(64)}
    alone = tokens(await collect(engine, ask("alone", prompts["s17"], max_tokens=12)))
    results = await asyncio.gather(*(collect(engine, ask(name, p, max_tokens=12)) for name, p in prompts.items()))
    for name, chunks in zip(prompts, results, strict=True):
        assert {chunk.request_id for chunk in chunks} == {name}
        assert len(tokens(chunks)) == 12
        assert sum(chunk.finish_reason is not None for chunk in chunks) == 1
    assert tokens(results[17]) == alone
    stats = await settled(engine)
    assert stats.requests_total == 65
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (ask(prompt=[20] * 512), "prompt_token_ids"),
        (ask(prompt=[20] * 9999), "prompt_token_ids"),
    ],
)
async def test_what_does_not_fit_is_refused_by_name(engine: Engine, request_: GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await collect(engine, request_)
    assert refused.value.field == field
    assert refused.value.limit
    assert len(tokens(await collect(engine, ask("after")))) == 8


async def test_scores_of_labels(engine: Engine) -> None:
    request = ScoreRequest(request_id="s", prompts=[PROMPT, [30, 31]], label_token_ids=(20, 21, 22))
    result = await engine.score(request)
    assert result.request_id == "s"
    assert [len(row) for row in result.logprobs] == [3, 3]
    assert all(-math.inf < value <= 0 for row in result.logprobs for value in row)
    assert result.usage.prompt_tokens == 7


async def test_drain_finishes_what_runs_and_refuses_the_rest(engine: Engine) -> None:
    running = asyncio.create_task(collect(engine, ask("first", max_tokens=60)))
    await asyncio.sleep(0.02)
    draining = asyncio.create_task(engine.drain())
    await asyncio.sleep(0.01)
    if not draining.done():
        with pytest.raises(EngineOverloadedError):
            await collect(engine, ask("late"))
    await draining
    assert len(tokens(await running)) == 60


async def test_after_close_everything_is_dead(engine: Engine) -> None:
    running = asyncio.create_task(collect(engine, ask("first", max_tokens=500, prompt=[20, 21])))
    await asyncio.sleep(0.02)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineDeadError):
        await running
    with pytest.raises(EngineDeadError):
        await collect(engine, ask("late"))
    with pytest.raises(EngineDeadError):
        await engine.stats()


async def test_kv_events_replay_and_follow(engine: Engine) -> None:
    if not uses_kv(engine):
        pytest.skip("the fake engine has no KV")
    prompt = list(range(20, 84))  # four full blocks of 16
    await collect(engine, ask("first", prompt, max_tokens=1))
    seen = []
    async with aclosing(engine.kv_events(0)) as batches:
        async for batch in batches:
            seen.append(batch)
            if len(seen) == 1:
                await collect(engine, ask("second", list(range(100, 132)), max_tokens=1))
            if len(seen) == 2:
                break
    assert [batch.seq for batch in seen] == [0, 1]
    assert [len(event.block_hashes) for batch in seen for event in batch.events] == [4, 2]
    assert all(event.token_ids == [] for batch in seen for event in batch.events)


async def test_a_shared_prefix_is_found_only_under_the_same_salt(engine: Engine) -> None:
    if not uses_kv(engine):
        pytest.skip("the fake engine has no KV")
    prompt = list(range(20, 70))

    async def cached(request_id: str, salt: bytes) -> int:
        request = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=1, temperature=0),
            cache_salt=salt,
        )
        usage = (await collect(engine, request))[-1].usage
        assert usage is not None
        return usage.cached_tokens

    assert await cached("a", b"tenant-1") == 0
    assert await cached("b", b"tenant-1") == 48
    assert await cached("c", b"tenant-2") == 0
