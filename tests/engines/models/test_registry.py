"""Loading by configuration: number formats, names, lengths, digests, the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engines.config import CacheConfig, DType, KVDType, ModelConfig
from engines.core.memory import kv_token_bytes, num_kv_blocks
from engines.models import llama_native
from engines.models.base import CheckpointError, DecoderModel
from engines.models.evaluate import all_logits
from engines.models.loader import open_checkpoint
from engines.models.registry import load_model
from engines.models.tiny import write_tiny_llama
from engines.ops.kv_cache import allocate_kv_cache


def load(path: Path, dtype: DType = "int8", **options: object) -> DecoderModel:
    model = load_model(ModelConfig(name="mine", path=str(path), dtype=dtype, **options))
    assert isinstance(model, DecoderModel)
    return model


def logits(model: DecoderModel) -> torch.Tensor:
    spec = model.spec
    kv = allocate_kv_cache(spec.num_layers, 3, spec.num_kv_heads, 16, spec.head_dim)
    return all_logits(model, torch.arange(40), kv)


def test_the_configuration_names_and_bounds_the_model(tiny_llama_path: Path) -> None:
    spec = load(tiny_llama_path, max_model_len=100).spec
    assert (spec.name, spec.dtype, spec.max_model_len) == ("mine", "int8", 100)
    assert load(tiny_llama_path).spec.max_model_len == 512
    with pytest.raises(CheckpointError, match="max_model_len 513 is beyond the model's own 512"):
        load(tiny_llama_path, max_model_len=513)


def test_digests_tell_weights_and_formats_apart_and_nothing_else(tmp_path: Path, tiny_llama_path: Path) -> None:
    digest = load(tiny_llama_path).spec.digest
    assert len(digest) == 16
    assert int(digest, 16) >= 0
    assert load(tiny_llama_path, max_model_len=64).spec.digest == digest
    assert load(write_tiny_llama(tmp_path / "copy", seed=7)).spec.digest == digest
    assert load(write_tiny_llama(tmp_path / "other", seed=8)).spec.digest != digest
    assert load(tiny_llama_path, "float32").spec.digest != digest


def test_a_second_start_maps_what_the_first_packed(
    tmp_path: Path, tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(tiny_llama_path, cache_dir=str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [f"{first.spec.digest}.safetensors"]

    def forbidden(*_: object) -> None:
        raise AssertionError("packed again")

    monkeypatch.setattr("engines.models.registry.pack_llama", forbidden)
    second = load(tiny_llama_path, cache_dir=str(tmp_path))
    assert torch.equal(logits(first), logits(second))


def test_exact_weights_are_not_cached(tmp_path: Path, tiny_llama_path: Path) -> None:
    load(tiny_llama_path, "float32", cache_dir=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_auto_is_native_where_that_can_run_and_int8_elsewhere(
    tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_native, "why_not", lambda config, spec: "")
    monkeypatch.setattr(llama_native, "load", lambda config, checkpoint: (config.name, checkpoint.spec.digest))
    native = load_model(ModelConfig(name="mine", path=str(tiny_llama_path)))
    assert native == ("mine", open_checkpoint(tiny_llama_path).spec.digest)
    monkeypatch.setattr(llama_native, "why_not", lambda config, spec: "no compiler")
    assert load(tiny_llama_path, "auto").spec.dtype == "int8"
    assert load(tiny_llama_path, "auto").spec.digest == load(tiny_llama_path, "int8").spec.digest


def test_native_that_cannot_run_says_why(tiny_llama_path: Path) -> None:
    """The tiny model's heads are too narrow for the compiled kernels, on every machine."""
    with pytest.raises(CheckpointError, match="native cannot run"):
        load(tiny_llama_path, "native")


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere\.gguf does not exist"):
        load(tmp_path / "nowhere.gguf")


@pytest.mark.model
def test_the_demo_model_loads_from_its_cache(demo_model_path: Path, facet_cache_dir: Path) -> None:
    spec = load(demo_model_path, cache_dir=str(facet_cache_dir / "packed")).spec
    assert (spec.architecture, spec.num_layers, spec.vocab_size, spec.max_model_len) == ("llama", 30, 49152, 8192)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (9, 3, 64)
    assert spec.tie_embeddings


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8", "int4"])
def test_the_format_of_keys_is_in_the_digest_and_in_the_pools_size(tiny_llama_path: Path, kv_dtype: KVDType) -> None:
    exact, narrow = load(tiny_llama_path), load(tiny_llama_path, kv_dtype=kv_dtype)
    assert narrow.spec.kv_dtype == kv_dtype
    assert narrow.spec.digest != exact.spec.digest
    assert load(tiny_llama_path, kv_dtype=kv_dtype).spec.digest == narrow.spec.digest
    # Two layers, two heads of 16, K and V.
    bytes_of = {"bfloat16": 32, "int8": 20, "float8": 20, "int4": 12}[kv_dtype]
    assert kv_token_bytes(narrow.spec) == 8 * bytes_of
    pool = CacheConfig(memory_bytes=1 << 20)
    assert num_kv_blocks(exact.spec, pool) == (1 << 20) // (16 * 8 * 64)
    assert num_kv_blocks(narrow.spec, pool) == (1 << 20) // (16 * 8 * bytes_of)


def test_an_encoder_has_no_keys_to_narrow(tiny_bert_path: Path) -> None:
    with pytest.raises(CheckpointError, match="kv_dtype is for a decoder"):
        load_model(ModelConfig(name="mine", path=str(tiny_bert_path), dtype="auto", kv_dtype="int8"))
