"""The embedding engine: bytes of the vectors, checks, counters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engines.api import EmbedRequest, InvalidRequestError
from engines.core.build import build_encoder
from engines.core.encoder import EncoderCore
from engines.models.base import ModelSpec


class CountingEncoder:
    """An `EncoderModel`: (sum of ids, number of ids, 1 if normalised)."""

    spec = ModelSpec(
        name="count",
        architecture="bert",
        task="embed",
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=3,
        hidden_size=3,
        intermediate_size=3,
        vocab_size=100,
        max_model_len=4,
        rms_norm_eps=1e-5,
        dtype="float32",
        digest="c",
        embedding_dimensions=3,
    )

    def encode(self, inputs: list[list[int]], normalize: bool) -> torch.Tensor:
        return torch.tensor([[sum(ids), len(ids), normalize] for ids in inputs], dtype=torch.float32)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.5
        return self.now_s


@pytest.fixture
def core() -> EncoderCore:
    return build_encoder(CountingEncoder(), clock=Clock())


def test_vectors_are_little_endian_float32_in_order(core: EncoderCore) -> None:
    result = core.embed(EmbedRequest(request_id="e", inputs=[[1, 2], [99]], normalize=False))
    assert (result.request_id, result.dimensions, result.prompt_tokens) == ("e", 3, 3)
    vectors = [np.frombuffer(vector, dtype="<f4").tolist() for vector in result.vectors]
    assert vectors == [[3.0, 2.0, 0.0], [99.0, 1.0, 0.0]]


@pytest.mark.parametrize(
    ("inputs", "field", "value"),
    [
        ([], "inputs", "empty"),
        ([[1], []], "inputs[1]", "0 tokens"),
        ([[1] * 5], "inputs[0]", "5 tokens"),
        ([[1], [2, 100]], "inputs[1]", "id 100"),
        ([[-1]], "inputs[0]", "id -1"),
    ],
)
def test_a_refusal_names_the_input(core: EncoderCore, inputs: list[list[int]], field: str, value: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        core.embed(EmbedRequest(request_id="e", inputs=inputs))
    assert (refused.value.field, refused.value.value) == (field, value)
    assert core.stats().requests_total == 0


def test_capabilities_and_counters(core: EncoderCore) -> None:
    core.embed(EmbedRequest(request_id="a", inputs=[[1, 2]]))
    core.embed(EmbedRequest(request_id="b", inputs=[[1], [2]]))
    stats = core.stats()
    assert (stats.requests_total, stats.prompt_tokens_total, stats.steps_total) == (2, 4, 2)
    assert (stats.step_p50_s, stats.step_p99_s) == (0.5, 0.5)
    assert (stats.total_blocks, stats.running, stats.waiting) == (0, 0, 0)
    capabilities = core.capabilities
    assert (capabilities.task, capabilities.embedding_dimensions, capabilities.features) == ("embed", 3, ("embed",))
