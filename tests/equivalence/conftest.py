"""A tiny random llama in every number format, and ways to ask an engine over it.

The comparisons in this folder are bitwise: token ids and log-probs as they come, no tolerance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from engines.api import GenerateRequest, SamplingParams, TokenLogprobs
from engines.config import CacheConfig, ModelConfig, SchedulerConfig
from engines.core.build import build_decoder
from engines.core.engine import EngineCore
from engines.models.base import DecoderModel
from engines.models.registry import load_model
from engines.models.tiny import TinyLlama, write_tiny_llama

SIZES = TinyLlama(head_dim=32, max_model_len=1200)  # what the compiled kernels can run too


@pytest.fixture(scope="session")
def tiny_llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"), seed=7, sizes=SIZES)


@pytest.fixture(scope="session", params=["float32", "int8", "native", "native/int4"])
def model(request: pytest.FixtureRequest, tiny_llama_path: Path) -> DecoderModel:
    torch.set_num_threads(1)  # a tiny product is over before a second thread has heard of it
    dtype, _, kv_dtype = request.param.partition("/")
    kv = {"kv_dtype": kv_dtype} if kv_dtype else {}
    loaded = load_model(ModelConfig(name="tiny", path=str(tiny_llama_path), dtype=dtype, num_threads=1, **kv))
    assert isinstance(loaded, DecoderModel)
    return loaded


@dataclass
class Answer:
    """Everything a client sees of one choice."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = 0
    num_preemptions: int = 0

    def bits(self) -> tuple[list[int], list[TokenLogprobs]]:
        """What must be the same to the last bit."""
        return self.token_ids, self.logprobs


class Lab:
    """Builds engines over the model and asks them; freed blocks are poisoned with NaN."""

    def __init__(self, model: DecoderModel) -> None:
        self.model = model

    def engine(self, *, num_blocks: int = 200, scheduler: SchedulerConfig | None = None) -> EngineCore:
        cache = CacheConfig(block_size=16, num_blocks=num_blocks)

        def poison(block_id: int) -> None:
            kv = engine._runner._kv
            for tensor in (kv.k, kv.v, kv.k_scale, kv.v_scale):
                if tensor is not None:
                    tensor.view(torch.uint8)[:, block_id] = 0xFF  # a NaN, or codes whose scale is one

        engine = build_decoder(
            self.model, cache, scheduler or SchedulerConfig(), clock=time.monotonic, on_free_block=poison
        )
        for block_id in range(num_blocks):
            poison(block_id)
        return engine

    @staticmethod
    def prompt(number: int, length: int) -> list[int]:
        """Token ids that are all over the vocabulary and different from prompt to prompt."""
        return [16 + (number * 8191 + i * (131 + number) + i * i * 7) % 256 for i in range(length)]

    @staticmethod
    def request(request_id: str, prompt: Sequence[int], **options: object) -> GenerateRequest:
        """Greedy with three log-probs by default."""
        own = {name: options.pop(name) for name in set(GenerateRequest.__struct_fields__) & set(options)}
        sampling = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "logprobs": 3, **options})
        return GenerateRequest(request_id=request_id, prompt_token_ids=list(prompt), sampling=sampling, **own)

    @staticmethod
    def ask(
        engine: EngineCore,
        requests: Sequence[GenerateRequest],
        *,
        each_step: Callable[[int], None] = lambda step: None,
    ) -> dict[tuple[str, int], Answer]:
        """Add all, step until nothing is left, checking the invariants after each step."""
        answers: dict[tuple[str, int], Answer] = {}
        for request in requests:
            engine.add_request(request)
        step = 0
        while engine.has_work():
            each_step(step)
            for chunk in engine.step():
                answer = answers.setdefault((chunk.request_id, chunk.index), Answer())
                answer.token_ids += chunk.token_ids
                answer.logprobs += chunk.logprobs or []
                assert chunk.finish_reason != "error"
                if chunk.usage is not None:
                    answer.cached_tokens = chunk.usage.cached_tokens
                if chunk.timings is not None:
                    answer.num_preemptions = chunk.timings.num_preemptions
            engine.check_invariants()
            step += 1
        assert engine.kv.pool.num_used == 0
        return answers

    def alone(self, prompt: Sequence[int], **options: object) -> Answer:
        """The answer of a fresh engine that has nothing else to do and takes the prompt in one step."""
        return self.ask(self.engine(), [self.request("me", prompt, **options)])["me", 0]


@pytest.fixture
def lab(model: DecoderModel) -> Lab:
    return Lab(model)
