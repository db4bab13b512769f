"""From a configuration to an engine, over tiny real checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from engines.api import EmbedRequest, EngineError, GenerateRequest, SamplingParams
from engines.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engines.core.build import build_core, set_threads
from engines.core.encoder import EncoderCore
from engines.core.engine import EngineCore
from engines.core.queues import QUEUE_POLICIES
from engines.models.tiny import write_tiny_bert, write_tiny_llama


def test_a_decoder_checkpoint_becomes_an_engine_that_answers(tmp_path: Path, toy) -> None:
    path = write_tiny_llama(tmp_path, seed=1)
    config = EngineConfig(
        model=ModelConfig(name="tiny", path=str(path), dtype="float32", max_model_len=100),
        cache=CacheConfig(num_blocks=20, prefix_cache=False),
    )
    core = build_core(config, clock=lambda: 0.0)
    assert isinstance(core, EngineCore)
    facts = core.capabilities
    assert (facts.model, facts.task, facts.dtype, facts.max_model_len) == ("tiny", "generate", "float32", 100)
    assert (facts.block_size, facts.num_blocks, facts.features) == (16, 20, ("logprobs", "score"))
    core.add_request(
        GenerateRequest(request_id="a", prompt_token_ids=[20, 30, 40], sampling=SamplingParams(max_tokens=3))
    )
    tokens = [token for _ in range(3) for chunk in core.step() for token in chunk.token_ids]
    assert len(tokens) == 3
    assert all(0 <= token < facts.vocab_size for token in tokens)
    assert not core.has_work()


def test_an_encoder_checkpoint_becomes_an_embedding_engine(tmp_path: Path) -> None:
    path = write_tiny_bert(tmp_path, seed=1)
    core = build_core(EngineConfig(model=ModelConfig(name="tiny", path=str(path))), clock=lambda: 0.0)
    assert isinstance(core, EncoderCore)
    assert core.capabilities.features == ("embed",)
    result = core.embed(EmbedRequest(request_id="e", inputs=[[2, 10, 3]]))
    assert len(result.vectors[0]) == 4 * core.capabilities.embedding_dimensions


def test_a_pool_smaller_than_the_context_bounds_what_is_accepted(tmp_path: Path) -> None:
    model = ModelConfig(name="tiny", path=str(write_tiny_llama(tmp_path, seed=1)), dtype="float32")
    small = build_core(EngineConfig(model=model, cache=CacheConfig(num_blocks=3)), clock=lambda: 0.0)
    assert small.capabilities.max_model_len == 48
    with pytest.raises(EngineError, match="at least 2 are needed"):
        build_core(EngineConfig(model=model, cache=CacheConfig(memory_bytes=1)), clock=lambda: 0.0)


@pytest.mark.parametrize("field", ["max_batch_tokens", "chunk_tokens", "max_running", "max_waiting"])
def test_a_scheduler_that_could_never_run_is_refused(toy, field: str) -> None:
    with pytest.raises(EngineError, match=f"{field} is 0; it must be at least 1"):
        toy.engine(scheduler=SchedulerConfig(**{field: 0}))


def test_every_queue_that_can_be_configured_exists() -> None:
    assert get_args(get_type_hints(SchedulerConfig)["queue"]) == tuple(QUEUE_POLICIES)


def test_threads_leave_a_core_to_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    for cores in (1, 2, 8):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        set_threads(0)
    set_threads(5)
    assert asked == [1, 1, 7, 5]
