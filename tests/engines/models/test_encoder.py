"""The sentence encoder: against transformers, and an input's vector does not depend on what is beside it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.config import ModelConfig
from engines.models.base import CheckpointError, EncoderModel
from engines.models.encoder import grouped
from engines.models.registry import load_model
from engines.models.tiny import write_tiny_bert
from engines.text.model import load_text

INPUTS = [[2, 9, 30, 31, 3], [2, 3], [2, *range(5, 105), 3], [2, 40, 3], [2, 9, 30, 31, 3]]
TEXTS = ["A cat sits on the mat.", "Zürich", "The stock market fell sharply today. " * 30, "a"]


def encoder(path: Path) -> EncoderModel:
    model = load_model(ModelConfig(name="embed", path=str(path)))
    assert isinstance(model, EncoderModel)
    return model


@torch.inference_mode()
def reference_vectors(path: Path, inputs: list[list[int]]) -> torch.Tensor:
    """Mean pooling over transformers' hidden states, one input at a time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModel

        model = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    return torch.stack([model(torch.tensor([ids])).last_hidden_state[0].mean(dim=0) for ids in inputs])


def test_a_tiny_encoder_agrees_with_transformers(tiny_bert_path: Path) -> None:
    model, expected = encoder(tiny_bert_path), reference_vectors(tiny_bert_path, INPUTS)
    torch.testing.assert_close(model.encode(INPUTS, normalize=False), expected, rtol=0, atol=1e-5)
    unit = torch.nn.functional.normalize(expected, dim=1)
    torch.testing.assert_close(model.encode(INPUTS, normalize=True), unit, rtol=0, atol=1e-5)


@pytest.mark.model
def test_minilm_agrees_with_transformers(embed_model_path: Path) -> None:
    text = load_text(embed_model_path)
    inputs = [text.encode_for_embedding(one) for one in TEXTS]
    vectors = encoder(embed_model_path).encode(inputs, normalize=True)
    expected = torch.nn.functional.normalize(reference_vectors(embed_model_path, inputs), dim=1)
    assert vectors.shape == (4, 384)
    torch.testing.assert_close(vectors, expected, rtol=0, atol=1e-4)


def test_a_vector_is_bitwise_its_own_in_any_company(tiny_bert_path: Path) -> None:
    model = encoder(tiny_bert_path)
    together = model.encode(INPUTS, normalize=True)
    for number, ids in enumerate(INPUTS):
        assert torch.equal(model.encode([ids], normalize=True)[0], together[number])
    assert torch.equal(model.encode(INPUTS[::-1], normalize=True), together.flip(0))
    assert torch.equal(together[0], together[4])


def test_many_inputs_are_computed_in_groups_and_keep_their_order(
    tiny_bert_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = encoder(tiny_bert_path)
    together = model.encode(INPUTS, normalize=True)
    monkeypatch.setattr("engines.models.encoder.MAX_BATCH_TOKENS", 6)
    assert torch.equal(model.encode(INPUTS, normalize=True), together)


def test_groups_stay_within_the_limit() -> None:
    inputs = [[0] * n for n in (3, 3, 4, 9, 1, 5)]
    assert [[len(ids) for ids in group] for group in grouped(inputs, 7)] == [[3, 3], [4], [9], [1, 5]]
    assert list(grouped([], 7)) == []


def test_facts_of_an_encoder(tiny_bert_path: Path) -> None:
    spec = encoder(tiny_bert_path).spec
    assert (spec.task, spec.architecture, spec.dtype, spec.name) == ("embed", "bert", "float32", "embed")
    assert (spec.embedding_dimensions, spec.max_model_len) == (64, 128)


def test_pooling_is_what_the_model_says(tmp_path: Path) -> None:
    folder = write_tiny_bert(tmp_path / "m")
    mean = encoder(folder).encode(INPUTS, normalize=False)
    place = folder / "1_Pooling" / "config.json"
    config = json.loads(place.read_text())
    place.write_text(json.dumps(config | {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}))
    first = encoder(folder).encode(INPUTS, normalize=False)
    assert not torch.allclose(first, mean)
    place.write_text(json.dumps(config | {"pooling_mode_max_tokens": True}))
    with pytest.raises(CheckpointError, match="pooling"):
        encoder(folder)
    (folder / "modules.json").unlink()
    assert torch.equal(encoder(folder).encode(INPUTS, normalize=False), mean)


def test_the_pooling_module_lies_inside_the_folder(tmp_path: Path) -> None:
    folder = write_tiny_bert(tmp_path / "m")
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["path"] = "../elsewhere"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match="inside the folder"):
        encoder(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"max_position_embeddings": 99}, r"position_embeddings\.weight has shape \[128, 64\], not \[99, 64\]"),
    ],
)
def test_other_encoders_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = write_tiny_bert(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=words):
        encoder(folder)


def test_names_with_the_prefix_of_a_head_are_read(tmp_path: Path) -> None:
    folder = write_tiny_bert(tmp_path / "m")
    expected = encoder(folder).encode(INPUTS, normalize=True)
    stored = load_file(folder / "model.safetensors")
    save_file({f"bert.{name}": tensor for name, tensor in stored.items()}, str(folder / "model.safetensors"))
    assert torch.equal(encoder(folder).encode(INPUTS, normalize=True), expected)


def test_an_encoder_has_one_number_format(tiny_bert_path: Path) -> None:
    with pytest.raises(CheckpointError, match="dtype 'int8' is not for an encoder"):
        load_model(ModelConfig(name="embed", path=str(tiny_bert_path), dtype="int8"))
