"""Checkpoints from safetensors folders and GGUF files: canonical names, exact values, honest refusals."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from engines.models.base import CheckpointError
from engines.models.loader import open_checkpoint
from engines.models.tiny import TinyLlama, write_tiny_llama

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 64, 4, 2, 16, 96, 40


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key rows (`LlamaModel.permute`)."""
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def llama_weights() -> dict[str, np.ndarray]:
    """Canonical names -> float32 values that Q4_1 holds exactly (they come from it)."""
    random = np.random.Generator(np.random.PCG64(5))
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    weights = {
        f"model.layers.0.{name}.weight": random.standard_normal(shape, dtype=np.float32)
        for name, shape in shapes.items()
    }
    weights["model.embed_tokens.weight"] = random.standard_normal((VOCAB, HIDDEN), dtype=np.float32)
    q4_1 = gguf.GGMLQuantizationType.Q4_1
    weights = {name: dequantize(quantize(weight, q4_1), q4_1) for name, weight in weights.items()}
    for norm in ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm"):
        weights[f"{norm}.weight"] = random.standard_normal(HIDDEN, dtype=np.float32)
    return weights


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.0.input_layernorm": "blk.0.attn_norm",
    "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
    "model.layers.0.self_attn.q_proj": "blk.0.attn_q",
    "model.layers.0.self_attn.k_proj": "blk.0.attn_k",
    "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
    "model.layers.0.self_attn.o_proj": "blk.0.attn_output",
    "model.layers.0.mlp.gate_proj": "blk.0.ffn_gate",
    "model.layers.0.mlp.up_proj": "blk.0.ffn_up",
    "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
}


def write_gguf(
    path: Path,
    weights: dict[str, np.ndarray],
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q4_1,
    **changes: Any,
) -> Path:
    writer = gguf.GGUFWriter(str(path), architecture)
    numbers: dict[str, Any] = {
        "block_count": 1,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": HEAD_DIM,
    } | changes
    for key, value in numbers.items():
        if isinstance(value, str):
            writer.add_string(f"{architecture}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{architecture}.rope.freq_base", 5000.0)
    writer.add_eos_token_id(2)
    for name, weight in weights.items():
        stem, _, part = name.rpartition(".")
        if architecture == "llama" and ".q_proj" in name:
            weight = interleaved(weight, HEADS)
        if architecture == "llama" and ".k_proj" in name:
            weight = interleaved(weight, KV_HEADS)
        stored = f"{GGUF_NAMES.get(stem, stem)}.{part}"
        if weight.ndim == 2:
            writer.add_tensor(stored, quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, weight.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_gives_canonical_names_facts_and_exact_values(tmp_path: Path) -> None:
    weights = llama_weights()
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", weights))
    spec = checkpoint.spec
    assert set(checkpoint.names()) == set(weights)
    for name, weight in weights.items():
        assert checkpoint.shape(name) == weight.shape
        assert torch.equal(checkpoint.float32(name), torch.from_numpy(weight)), name
    assert (spec.architecture, spec.task, spec.num_layers, spec.vocab_size) == ("llama", "generate", 1, VOCAB)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (spec.hidden_size, spec.intermediate_size, spec.max_model_len) == (HIDDEN, INNER, 128)
    assert (spec.rope_theta, spec.rms_norm_eps) == (5000.0, pytest.approx(1e-5))
    assert spec.tie_embeddings
    assert spec.eos_token_ids == (2,)
    assert len(spec.digest) == 16


def test_raw_rows_are_the_quantized_rows_in_halves(tmp_path: Path) -> None:
    """Un-permuting moves whole rows of bytes: dequantized they are the canonical weight."""
    weights = llama_weights()
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", weights))
    for name, weight in weights.items():
        kind, rows = checkpoint.raw(name)
        assert kind == ("Q4_1" if weight.ndim == 2 else "F32")
        assert rows.dtype == np.uint8
        assert rows.shape[0] == (weight.shape[0] if weight.ndim == 2 else 1)
        values = dequantize(rows, gguf.GGMLQuantizationType[kind])
        assert np.array_equal(values.reshape(weight.shape), weight), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q5_0", "Q5_1", "Q8_0"])
def test_other_number_formats_are_dequantized_as_the_gguf_package_does(tmp_path: Path, kind: str) -> None:
    weights, form = llama_weights(), gguf.GGMLQuantizationType[kind]
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", weights, kind=form))
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"):
        assert checkpoint.raw(name)[0] == kind
        expected = dequantize(quantize(weights[name], form), form)
        assert torch.equal(checkpoint.float32(name), torch.from_numpy(expected))


def test_llama_biases_are_put_in_halves_and_qwen2_rows_are_not_touched(tmp_path: Path) -> None:
    weights = llama_weights()
    bias = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    weights["model.layers.0.self_attn.q_proj.bias"] = bias
    for architecture in ("llama", "qwen2"):
        checkpoint = open_checkpoint(write_gguf(tmp_path / f"{architecture}.gguf", weights, architecture))
        assert checkpoint.spec.architecture == architecture
        assert torch.equal(checkpoint.float32("model.layers.0.self_attn.q_proj.bias"), torch.from_numpy(bias))
        name = "model.layers.0.self_attn.q_proj.weight"
        assert torch.equal(checkpoint.float32(name), torch.from_numpy(weights[name]))


def test_the_digest_follows_every_byte(tmp_path: Path) -> None:
    weights = llama_weights()
    first = open_checkpoint(write_gguf(tmp_path / "a.gguf", weights)).spec.digest
    assert open_checkpoint(write_gguf(tmp_path / "b.gguf", weights)).spec.digest == first
    weights["model.norm.weight"][3] += 1e-3
    assert open_checkpoint(write_gguf(tmp_path / "c.gguf", weights)).spec.digest != first


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention.head_count_kv": 3}, "4 heads do not share 3"),
        ({"attention.head_count": 0}, "attention.head_count is 0"),
        ({"attention.head_count": None}, "attention.head_count is None"),
        ({"block_count": 2**31}, "num_layers is 2147483648"),
        ({"rope.dimension_count": 8}, "over 8 of 16 dimensions"),
        ({"rope.scaling.type": "longrope"}, "rotary scaling 'longrope'"),
    ],
)
def test_facts_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_weights(), **changes)
    with pytest.raises(CheckpointError, match=words):
        _ = open_checkpoint(path).spec


@pytest.mark.parametrize("missing", [1, 4096])
def test_a_tensor_that_ends_past_the_file_is_refused_before_it_is_mapped(tmp_path: Path, missing: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_weights())
    content = path.read_bytes()
    path.write_bytes(content.rstrip(b"\0")[:-missing])
    with pytest.raises(CheckpointError, match=r"ends at byte \d+, but the file has \d+|past the end"):
        open_checkpoint(path)


def test_a_tensor_of_absurd_size_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_weights())
    content = bytearray(path.read_bytes())
    at = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4
    content[at : at + 16] = struct.pack("<QQ", 2**40, 2**20)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="ends at byte"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "words"),
    [("rope_freqs.weight", "factors is "), ("blk.0.attn_q_norm.weight", "no place"), ("vision.weight", "no place")],
)
def test_tensors_that_would_be_ignored_are_refused(tmp_path: Path, name: str, words: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", {**llama_weights(), name: np.ones(HEAD_DIM, dtype=np.float32)})
    with pytest.raises(CheckpointError, match=words):
        _ = open_checkpoint(path).spec


def test_unknown_architectures_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_weights(), "mamba")
    with pytest.raises(CheckpointError, match="'mamba' is not one of"):
        open_checkpoint(path)


def test_safetensors_folder(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny", seed=3)
    stored = load_file(folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.names()) == set(stored)
    for name, tensor in stored.items():
        assert torch.equal(checkpoint.float32(name), tensor)
        kind, rows = checkpoint.raw(name)
        assert kind == "F32"
        assert rows.tobytes() == tensor.numpy().tobytes()
    assert checkpoint.spec.eos_token_ids == (2,)
    assert checkpoint.spec.bos_token_id == 1


def test_safetensors_in_half_precision_and_in_parts(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny", seed=3)
    stored = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    names = sorted(stored)
    parts = {"part-1.safetensors": names[:4], "part-2.safetensors": names[4:]}
    for part, members in parts.items():
        save_file({name: stored[name] for name in members}, str(folder / part))
    index = {"weight_map": {name: part for part, members in parts.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.names()) == set(names)
    assert checkpoint.raw(names[0])[0] == "BF16"
    assert torch.equal(checkpoint.float32(names[0]), stored[names[0]].float())


@pytest.mark.parametrize("part", ["../evil.safetensors", "/etc/passwd", "weights.bin", "missing.safetensors"])
def test_an_index_names_only_safetensors_files_of_its_folder(tmp_path: Path, part: str) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    (tmp_path / "evil.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": part}}))
    with pytest.raises(CheckpointError, match="not a safetensors file of this folder"):
        open_checkpoint(folder)


@pytest.mark.parametrize("length", [2**63, 2**40, 10_000_000, 3])
def test_a_lying_safetensors_header_is_an_error(tmp_path: Path, length: int) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
        open_checkpoint(folder)


def test_a_cut_safetensors_file_is_an_error(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not one of"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"sliding_window": -64}, "sliding_window is -64"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rotary scaling 'longrope'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope_scaling 'llama3' has no factor"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"head_dim": 15}, "even head_dim"),
        ({"vocab_size": 0}, "vocab_size is 0"),
    ],
)
def test_configurations_that_cannot_run_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=words):
        _ = open_checkpoint(folder).spec


def test_rope_theta_in_the_newer_place(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny", sizes=TinyLlama(rope_theta=7000.0))
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    (folder / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(folder).spec.rope_theta == 7000.0


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_never_opened(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(CheckpointError, match="never opened"):
        open_checkpoint(path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        open_checkpoint(tmp_path)
    checkpoint = open_checkpoint(write_tiny_llama(tmp_path / "tiny"))
    with pytest.raises(CheckpointError, match=r"has no tensor model\.layers\.9"):
        checkpoint.float32("model.layers.9.mlp.up_proj.weight")
