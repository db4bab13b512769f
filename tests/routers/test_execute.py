"""A plan on its way: exact events, exact decisions, and nothing left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import pytest

from engines.api import EngineDeadError, EngineFaultError, EngineOverloadedError
from engines.fake import Script
from routers.execute import merge
from routers.types import (
    BadRequestError,
    CanonicalRequest,
    Finished,
    Message,
    RequestUsage,
    Started,
    TextDelta,
    UnavailableError,
)


def text_of(events: list[object], index: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta) and event.index == index)


def ends(events: list[object]) -> dict[int, Finished]:
    return {event.index: event for event in events if isinstance(event, Finished)}


async def test_one_choice_event_by_event(bench, ask) -> None:
    bench.add("a", Script(tokens=bench.ids("abc"), chunk_tokens=2))
    started, first, second, end, usage = await bench.run(ask("xy", max_tokens=8))
    assert isinstance(started, Started)
    assert started.params.seed == 42
    assert started.params.max_tokens == 8
    a, b, c = bench.ids("abc")
    assert first == TextDelta(index=0, text="ab", token_ids=(a, b))
    assert second == TextDelta(index=0, text="c", token_ids=(c,))
    assert end == Finished(index=0, finish_reason="stop", stop_reason=None)
    assert isinstance(usage, RequestUsage)
    assert (usage.prompt_tokens, usage.completion_tokens) == (2, 3)
    assert [(aspect.aspect, aspect.model, aspect.replica) for aspect in usage.aspects] == [("answer", "small", "a")]


async def test_the_decision_keeps_every_cost_term(bench, ask) -> None:
    bench.add("a")
    bench.add("b")
    busy, _ = bench.fleet.replicas("small")
    busy.running, busy.queued_tokens = 3, 10
    started = (await bench.run(ask("xyz", max_tokens=1)))[0]
    (decision,) = started.decisions
    assert (decision.replica, decision.policy) == ("b", "least_loaded")
    terms = {cost.replica: {term.name: term.value for term in cost.terms} for cost in decision.costs}
    assert terms["a"] == {"rtt_ms": 0.0, "queue_ms": 10.0, "prefill_ms": 3.0, "batch_factor": 1.06}
    assert terms["b"] == {"rtt_ms": 0.0, "queue_ms": 0.0, "prefill_ms": 3.0, "batch_factor": 1.0}
    assert [cost.total_ms for cost in decision.costs] == [pytest.approx(13.78), 3.0]


async def test_a_stop_string_over_two_chunks_ends_the_engine_stream(bench, ask) -> None:
    engine = bench.add("a", Script(tokens=bench.ids("one END two"), chunk_tokens=1))
    execution = bench.start(ask("x", max_tokens=11, stop=("END",)))
    events = [event async for event in execution.events()]
    assert text_of(events) == "one "
    assert ends(events) == {0: Finished(index=0, finish_reason="stop", stop_reason="END")}
    assert execution.usage().completion_tokens == 7
    assert (await engine.stats()).aborts_total == 1
    assert (await engine.stats()).running == 0


async def test_several_prompts_and_choices(bench, ask) -> None:
    bench.add("a")
    events = await bench.run(ask("ab", "cd", n=2, max_tokens=3))
    assert [text_of(events, index) for index in range(4)] == ["aba", "aba", "cdc", "cdc"]
    assert sorted(ends(events)) == [0, 1, 2, 3]
    usage = events[-1]
    assert (usage.prompt_tokens, usage.completion_tokens) == (4, 12)


async def test_closing_the_events_aborts_every_stream(bench, ask) -> None:
    engine = bench.add("a")
    for prompts in (("ab",), ("ab", "cd", "ef")):
        async with aclosing(bench.start(ask(*prompts, max_tokens=100)).events()) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    break
        stats = await engine.stats()
        assert stats.running == 0
    assert stats.aborts_total == 4
    (replica,) = bench.fleet.replicas("small")
    assert (replica.running, replica.queued_tokens) == (0, 0)


async def test_a_replica_that_dies_before_its_first_token_is_replaced(bench, ask) -> None:
    bench.add("a", Script(fail_after=0))
    bench.add("b")
    events = await bench.run(ask("ab", max_tokens=2))
    assert [decision.replica for decision in events[0].decisions] == ["a", "b"]
    assert text_of(events) == "ab"


async def test_death_in_the_middle_is_an_error(bench, ask) -> None:
    bench.add("a", Script(fail_after=2))
    execution = bench.start(ask("ab", max_tokens=5))
    seen: list[object] = []

    async def read() -> None:
        async for event in execution.events():
            seen[:] = [*seen, event]  # kept one by one: what came before the error counts

    with pytest.raises(UnavailableError, match="ended while it served"):
        await read()
    assert text_of(seen) == "ab"
    assert execution.usage().completion_tokens == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineDeadError("x"), "engine_unavailable"),
        (EngineOverloadedError("x", retry_after_s=3.0), "engine_overloaded"),
        (EngineFaultError("x"), "engine_fault"),
    ],
)
async def test_engine_errors_become_unavailable(bench, ask, error, code) -> None:
    bench.add("a", Script(fail_after=0, error=error))
    with pytest.raises(UnavailableError) as refused:
        await bench.run(ask("ab", max_tokens=2))
    assert refused.value.code == code


async def test_no_living_replica(bench, ask) -> None:
    bench.add("a")
    bench.down.add("a")
    with pytest.raises(UnavailableError, match="No replica of 'small' is ready"):
        await bench.run(ask("ab"))
    assert bench.fleet.missing() == ["small"]


@pytest.mark.parametrize(
    ("params", "prompt", "code", "message"),
    [
        ({}, "x" * 128, "context_length_exceeded", "maximum context length is 128 tokens; prompt has 128 tokens"),
        ({"max_tokens": 100}, "x" * 100, "context_length_exceeded", "has 100 tokens and max_tokens is 100"),
        ({}, "", "empty_prompt", "prompt is empty"),
        ({"logit_bias": {9999: 1.0}}, "x", "invalid_token_id", "logit_bias names the token id 9999"),
        ({"stop_token_ids": (9999,)}, "x", "invalid_token_id", "stop_token_ids names the token id 9999"),
    ],
)
async def test_bad_prompts_name_field_value_and_limit(bench, ask, params, prompt, code, message) -> None:
    engine = bench.add("a")
    with pytest.raises(BadRequestError, match=message) as refused:
        await bench.run(ask(prompt, **params))
    assert refused.value.code == code
    assert engine.seen == []


async def test_what_the_engine_is_asked(bench) -> None:
    engine = bench.add("a")
    request = CanonicalRequest(
        request_id="r",
        surface="chat",
        model="gpt",
        messages=(Message(role="user", content="Hi"),),
        tenant="t",
        cache_salt=b"s",
        priority=3,
        trace_parent="00-x",
    )
    await bench.run(request)
    (seen,) = engine.seen
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert seen.prompt_token_ids == bench.ids(prompt)
    assert (seen.tenant, seen.cache_salt, seen.priority, seen.trace_parent) == ("t", b"s", 3, "00-x")
    assert seen.sampling.max_tokens == 128 - len(seen.prompt_token_ids)
    assert set(seen.sampling.stop_token_ids) == set(bench.text.eos_token_ids)


async def test_logprobs_are_named(bench, ask) -> None:
    bench.add("a", Script(tokens=bench.ids("é")))
    events = await bench.run(ask("x", max_tokens=4, logprobs=1))
    entries = [entry for event in events if isinstance(event, TextDelta) for entry in event.logprobs]
    assert [(entry.chosen.token, entry.chosen.bytes_) for entry in entries] == [
        ("\ufffd", b"\xc3"),
        ("\ufffd", b"\xa9"),
    ]
    assert text_of(events) == "é"


async def test_merge_ends_when_it_is_closed_over_eager_sources() -> None:
    """Writers woken by the reader's last item may fill the queue again before their cancellation reaches them."""
    closed: list[str] = []

    async def source(name: str) -> AsyncGenerator[str, None]:
        try:
            while True:
                yield name
        finally:
            closed.append(name)

    for taken in range(1, 8):
        closed.clear()
        async with asyncio.timeout(5), aclosing(merge([partial(source, name) for name in "abc"])) as items:
            for _ in range(taken):
                await anext(items)
        assert sorted(closed) == ["a", "b", "c"]
