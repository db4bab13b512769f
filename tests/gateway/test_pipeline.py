"""What a request leaves behind: ledger rows, spans, series. Exact, whatever ended it."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from contextlib import aclosing
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engines.fake import FakeEngine, Script
from gateway.handlers.common import Surface
from gateway.metrics import ENGINE_SERIES
from gateway.stores.sqlite import SqliteStore
from gateway.telemetry import Telemetry
from routers.types import CanonicalRequest, Message, Params, TextDelta, UnavailableError
from tests.gateway.conftest import KEY, client_of

BODY = {"model": "small", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
PROMPT_TOKENS = 21
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


async def rows_of(surface: Surface, tmp_path: Path) -> list[tuple[str, str, int, int, int, int]]:
    """(tenant, model, prompt, completion, micro-USD, status) of every usage row."""
    await surface.pipeline.ledger.flush()
    store = await SqliteStore.open(tmp_path / "facet.db")
    try:
        return [
            (row.tenant, row.model, row.prompt_tokens, row.completion_tokens, row.cost_usd_micros, row.status)
            for row in await store.usage()
        ]
    finally:
        await store.close()


def canonical(**changes: object) -> CanonicalRequest:
    return CanonicalRequest(
        request_id="r1",
        surface="chat",
        model="small",
        messages=(Message(role="user", content="Hi"),),
        params=Params(max_tokens=50),
        **changes,
    )


async def test_an_answer_is_settled_once_at_its_price(surface: Surface, tmp_path: Path) -> None:
    """21 tokens at 1 USD and 4 at 2 USD a million are 29 micro-USD."""
    async with client_of(surface) as client:
        assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200
        assert (await client.post("/v1/embeddings", json={"model": "vectors", "input": "abc"})).status_code == 200
    assert await rows_of(surface, tmp_path) == [
        ("t", "small", PROMPT_TOKENS, 4, 29, 200),
        ("t", "vectors", 3, 0, 3, 200),
    ]


async def test_a_refused_request_costs_nothing(surface: Surface, tmp_path: Path) -> None:
    async with client_of(surface) as client:
        for wrong in ({"n": 99}, {"model": "none"}, {"messages": [{"role": "user", "content": "b" * 9000}]}):
            assert (await client.post("/v1/chat/completions", json=BODY | wrong)).status_code in (400, 404)
    assert await rows_of(surface, tmp_path) == []


async def test_a_client_that_leaves_pays_for_what_was_computed(surface: Surface, tmp_path: Path) -> None:
    caller = await surface.pipeline.authenticate({"authorization": f"Bearer {KEY}"})
    seen = 0
    async with aclosing(surface.pipeline.run(caller, canonical(), {})) as events:
        async for event in events:
            seen += isinstance(event, TextDelta)
            if seen == 3:
                break
    assert surface.pipeline.admission.in_flight == 0
    ((tenant, model, prompt, completion, cost, status),) = await rows_of(surface, tmp_path)
    assert (tenant, model, prompt, status) == ("t", "small", PROMPT_TOKENS, 499)
    assert completion >= 3
    assert cost == PROMPT_TOKENS + 2 * completion


async def test_a_death_in_the_middle_is_settled_as_far_as_it_came(
    surface: Surface, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.script = Script(fail_after=2)
    caller = await surface.pipeline.authenticate({"authorization": f"Bearer {KEY}"})
    with pytest.raises(UnavailableError):
        _ = [event async for event in surface.pipeline.run(caller, canonical(), {})]
    assert await rows_of(surface, tmp_path) == [("t", "small", PROMPT_TOKENS, 2, PROMPT_TOKENS + 4, 500)]


async def test_spans_join_the_clients_trace_and_reach_the_engine(surface: Surface, engine: FakeEngine) -> None:
    exporter = InMemorySpanExporter()
    now = itertools.count(1_000_000_000, 1_000_000)
    telemetry = Telemetry(exporter, wall_clock_ns=lambda: next(now))
    traced = dataclasses.replace(surface, pipeline=dataclasses.replace(surface.pipeline, telemetry=telemetry))
    async with client_of(traced, traceparent=f"00-{TRACE}-{PARENT}-01") as client:
        assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200
    await asyncio.to_thread(telemetry.close)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert list(spans) == ["plan", "aspect answer", "queue", "prefill", "decode", "chat small"]
    root = spans["chat small"]
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == PARENT
    parents = {name: span.parent.span_id for name, span in spans.items()}
    aspect_id = spans["aspect answer"].context.span_id
    assert parents["plan"] == parents["aspect answer"] == root.context.span_id
    assert parents["queue"] == parents["prefill"] == parents["decode"] == aspect_id
    assert dict(spans["aspect answer"].attributes) == {
        "gen_ai.response.model": "small",
        "gen_ai.usage.input_tokens": PROMPT_TOKENS,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "facet.replica": "small-0",
    }
    assert engine.seen[-1].trace_parent == f"00-{TRACE}-{root.context.span_id:016x}-01"
    assert not any("Hi" in str(span.attributes) for span in spans.values()), "content is never recorded"


async def test_without_an_exporter_the_clients_trace_still_reaches_the_engine(
    surface: Surface, engine: FakeEngine
) -> None:
    async with client_of(surface, traceparent=f"00-{TRACE}-{PARENT}-01") as client:
        await client.post("/v1/chat/completions", json=BODY)
    assert engine.seen[-1].trace_parent == f"00-{TRACE}-{PARENT}-01"


async def test_series_count_what_happened_under_both_names(surface: Surface) -> None:
    async with client_of(surface) as client:
        for _ in range(3):
            await client.post("/v1/chat/completions", json=BODY)
        text = (await client.get("/metrics")).text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    labels, replica = '{model_name="small"}', '{engine="small-0",model_name="small"}'
    for ours, theirs in (
        ("facet_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
        ("facet_time_per_output_token_seconds", "vllm:request_time_per_output_token_seconds"),
        ("facet_e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds"),
        ("facet_request_queue_time_seconds", "vllm:request_queue_time_seconds"),
    ):
        assert lines[f"{ours}_count{labels}"] == lines[f"{theirs}_count{labels}"] == "3.0", ours
    assert lines["facet_inter_token_latency_seconds_count" + labels] == "6.0"  # a special token has no text of its own
    assert lines['vllm:request_success_total{finished_reason="length",model_name="small"}'] == "3.0"
    assert lines["facet_generation_tokens_total" + replica] == lines["vllm:generation_tokens_total" + replica] == "12.0"
    assert lines["facet_replica_up" + replica] == "1.0"
    for ours, theirs, kind, _, _ in ENGINE_SERIES:
        for name in filter(None, (ours, theirs)):
            assert name + ("_total" if kind == "counter" else "") + replica in lines
