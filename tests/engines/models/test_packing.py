"""Rotation, packing and the cache of packed weights."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.models.base import CheckpointError
from engines.models.loader import open_checkpoint
from engines.models.packed_cache import load_or_pack
from engines.models.packing import pack_llama
from engines.models.rotation import Rotation
from engines.models.tiny import TinyLlama, write_tiny_llama

Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize("width", [1, 2, 9, 64, 96, 576, 896, 1024])
def test_a_rotation_is_orthogonal(width: int) -> None:
    rotation = Rotation(width)
    matrix = rotation.columns(torch.eye(width)).double()
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(width, dtype=torch.float64), rtol=0, atol=2e-6)
    weight = torch.randn(width, 3, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(rotation.rows(weight).double(), matrix.t() @ weight.double(), rtol=0, atol=2e-5)
    assert torch.equal(Rotation(width).columns(torch.eye(width)).double(), matrix)


def test_a_rotation_spreads_an_outlier_over_all_columns() -> None:
    row = torch.zeros(576)
    row[100] = 24.0
    spread = Rotation(576).columns(row)
    assert float(spread.norm()) == pytest.approx(24.0, rel=1e-5)
    assert float(spread.abs().amax()) < 2.0  # 24 / sqrt(576) is 1; the DCT's largest entry is sqrt(2) of the mean


def test_float32_packing_only_merges(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m", seed=1, sizes=TinyLlama(biases=True, tie_embeddings=False))
    stored, packed = load_file(folder / "model.safetensors"), pack_llama(open_checkpoint(folder), "float32")
    at = "model.layers.1.self_attn"
    names = ("q_proj", "k_proj", "v_proj")
    assert torch.equal(packed["layers.1.qkv.weight"], torch.cat([stored[f"{at}.{name}.weight"] for name in names]))
    assert torch.equal(packed["layers.1.qkv.bias"], torch.cat([stored[f"{at}.{name}.bias"] for name in names]))
    gate_up = [stored[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(packed["layers.0.gate_up.weight"], torch.cat(gate_up))
    assert torch.equal(packed["head.weight"], stored["lm_head.weight"])
    assert torch.equal(packed["embed.weight"], stored["model.embed_tokens.weight"])
    assert torch.equal(packed["layers.1.mlp_norm.weight"], stored["model.layers.1.post_attention_layernorm.weight"])
    assert "layers.0.o.bias" not in packed


def test_a_part_without_a_bias_has_zeros(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m", sizes=TinyLlama(biases=True))
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.0.self_attn.k_proj.bias"]
    save_file(stored, str(folder / "model.safetensors"))
    bias = pack_llama(open_checkpoint(folder), "float32")["layers.0.qkv.bias"]
    assert bias.shape == (64 + 32 + 32,)
    assert bool((bias[64:96] == 0).all())
    assert bool((bias[96:] != 0).all())


def test_int8_packing_stays_near_the_rotated_weights(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m", seed=1)
    stored, packed = load_file(folder / "model.safetensors"), pack_llama(open_checkpoint(folder), "int8")
    rotation = Rotation(64)
    at = "model.layers.0"
    up_norm = stored[f"{at}.post_attention_layernorm.weight"]
    gate_up = torch.cat([stored[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up")]) * up_norm
    expected = {
        "layers.0.gate_up": ("rows", rotation.columns(gate_up)),
        "layers.0.o": ("rows", rotation.rows(stored[f"{at}.self_attn.o_proj.weight"])),
        "layers.0.down": ("fine_rows", rotation.rows(stored[f"{at}.mlp.down_proj.weight"])),
    }
    for name, (part, weight) in expected.items():
        rows, scales = packed[f"{name}.{part}"], packed[f"{name}.scales"]
        assert rows.dtype == torch.int8
        error = (rows.float() * scales[:, None] - weight).abs()
        assert bool((error <= 0.501 * scales[:, None]).all()), name
    assert torch.equal(packed["layers.0.mlp_norm.weight"], torch.ones(64))


def test_missing_and_unknown_tensors_and_wrong_shapes_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    stored = load_file(folder / "model.safetensors")

    def packed_with(changed: Tensors) -> None:
        save_file(changed, str(folder / "model.safetensors"))
        pack_llama(open_checkpoint(folder), "float32")

    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=rf"missing tensors \['{name}'\]"):
        packed_with({key: value for key, value in stored.items() if key != name})
    with pytest.raises(CheckpointError, match=r"unknown tensors \['model\.layers\.0\.self_attn\.q_norm\.weight'\]"):
        packed_with(stored | {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)})
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[128, 60\], not \[128, 64\]"):
        packed_with(stored | {name: torch.zeros(128, 60)})
    packed_with(stored | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})


class Packer:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Tensors:
        self.calls += 1
        generator = torch.Generator().manual_seed(4)
        return {
            "a": torch.randn(5, 7, generator=generator),
            "b": torch.randint(-9, 9, (3, 2, 4), dtype=torch.int8, generator=generator),
            "strided": torch.randn(6, 4, generator=generator).t(),
        }


def assert_same(left: Tensors, right: Tensors) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name])


def test_a_second_start_packs_nothing(tmp_path: Path) -> None:
    packer, cache = Packer(), str(tmp_path / "deep" / "cache")
    first = load_or_pack(cache, "key-1", packer)
    second = load_or_pack(cache, "key-1", packer)
    assert packer.calls == 1
    assert_same(first, Packer()())
    assert_same(second, first)
    assert [path.name for path in Path(cache).iterdir()] == ["key-1.safetensors"]
    load_or_pack(cache, "key-2", packer)
    assert packer.calls == 2


def test_without_a_cache_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    packer = Packer()
    load_or_pack("", "key", packer)
    load_or_pack("", "key", packer)
    assert packer.calls == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["flipped bit", "cut", "header", "empty", "another key"])
def test_a_damaged_file_is_packed_again(tmp_path: Path, damage: str) -> None:
    packer, path = Packer(), tmp_path / "key.safetensors"
    load_or_pack(str(tmp_path), "key", packer)
    content = bytearray(path.read_bytes())
    if damage == "flipped bit":
        content[-3] ^= 1
    elif damage == "cut":
        del content[-10:]
    elif damage == "header":
        content[0] ^= 0xFF
    elif damage == "empty":
        content.clear()
    else:
        load_or_pack(str(tmp_path), "other", packer)
        content[:] = (tmp_path / "other.safetensors").read_bytes()
        packer.calls = 1
    path.unlink()  # a mapped file must not change under its readers
    path.write_bytes(content)
    assert_same(load_or_pack(str(tmp_path), "key", packer), Packer()())
    assert packer.calls == 2
    assert_same(load_or_pack(str(tmp_path), "key", packer), Packer()())
    assert packer.calls == 2


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    packer = Packer()
    assert_same(load_or_pack(str(tmp_path / "file"), "key", packer), Packer()())
    assert packer.calls == 1


def test_nothing_is_left_of_a_write_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engines.models.packed_cache.save_file", full)
    assert_same(load_or_pack(str(tmp_path), "key", Packer()), Packer()())
    assert list(tmp_path.iterdir()) == []


def test_packed_files_are_for_their_owner(tmp_path: Path) -> None:
    load_or_pack(str(tmp_path), "key", Packer())
    assert stat.S_IMODE(os.stat(tmp_path / "key.safetensors").st_mode) & 0o077 == 0
