"""A fleet of scripted engines around a real tokenizer, and the executor over it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engines.api import Capabilities
from engines.fake import FakeEngine, Script
from engines.text.model import TextModel, load_text
from policies.load import parse_policy
from policies.schema import Policy
from routers.decompose import decompose
from routers.execute import Execution, Executor
from routers.fleet import Fleet, Replica
from routers.plan import make_plan
from routers.select import LeastLoaded
from routers.types import CanonicalRequest, Event

POLICY = """
version: facet/v1
models:
  small: {source: x, price: {input_usd_per_mtok: 1, output_usd_per_mtok: 2}}
  vectors: {source: y, task: embed, price: {input_usd_per_mtok: 1}}
aliases: {gpt: small}
budget: {max_amplification: 4}
"""
CONTEXT = 128


def capabilities(task: str = "generate") -> Capabilities:
    return Capabilities(
        model="m",
        task="embed" if task == "embed" else "generate",
        digest="fake",
        dtype="fake",
        vocab_size=272,
        max_model_len=CONTEXT,
        embedding_dimensions=8 if task == "embed" else 0,
    )


class Bench:
    """Add replicas, run a request, look at what came."""

    def __init__(self, text: TextModel) -> None:
        self.text = text
        self.policy: Policy = parse_policy(POLICY)
        self.fleet = Fleet()
        self.executor = Executor(self.fleet, LeastLoaded(), draw_seed=lambda: 42, clock=lambda: 0.0)
        self.engines: dict[str, FakeEngine] = {}
        self.down: set[str] = set()

    def add(self, name: str, script: Script | None = None, model: str = "small", task: str = "generate") -> FakeEngine:
        engine = FakeEngine(capabilities(task), script)
        self.fleet.add(Replica(name, model, engine, self.text, is_alive=lambda: name not in self.down))
        self.engines[name] = engine
        return engine

    def start(self, request: CanonicalRequest) -> Execution:
        plan = make_plan(decompose(request), request, self.policy)
        return self.executor.start(plan, request)

    async def run(self, request: CanonicalRequest) -> list[Event]:
        return [event async for event in self.start(request).events()]

    def ids(self, text: str) -> list[int]:
        return self.text.encode(text)


@pytest.fixture
def bench(tiny_llama_path: Path) -> Bench:
    return Bench(load_text(tiny_llama_path))


@pytest.fixture
def ask() -> Callable[..., CanonicalRequest]:
    from routers.types import Params

    def made(*prompts: str, **params: object) -> CanonicalRequest:
        return CanonicalRequest(
            request_id="r", surface="completion", model="small", prompts=prompts, params=Params(**params)
        )

    return made
