"""AWQ, GPTQ and compressed-tensors checkpoints load and compute what their dequantized weights do; our own formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.config import DType, ModelConfig
from engines.models.base import CheckpointError, DecoderModel
from engines.models.evaluate import all_logits, window_cache
from engines.models.loader import open_checkpoint
from engines.models.registry import load_model
from engines.models.requantize import REQUANTIZED, Weights, weights_for
from engines.models.smooth import SmoothedWeights
from engines.models.tiny import TinyLlama, write_tiny_llama
from engines.ops import native

SIZES = TinyLlama(hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=256)
GROUP = 128
PROJECTION = "_proj.weight"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
COMPRESSED = {"quant_method": "compressed-tensors", "format": "int-quantized"}


def packed(values: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """values [rows, C] below 16 -> int32 [rows, C / 8], column order[i] of each eight in nibble i."""
    wide = values.reshape(values.shape[0], -1, 8)[:, :, list(order)].numpy().astype(np.uint32)
    words = (wide << np.arange(0, 32, 4, dtype=np.uint32)).sum(axis=2).astype(np.uint32)
    return torch.from_numpy(words.view(np.int32))


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Asymmetric 4 bits: codes [N, K], zeros [N, G] of at least 1, scales [N, G] float16."""
    grouped = weight.reshape(weight.shape[0], -1, GROUP)
    low, high = grouped.amin(-1).clamp(max=-1e-3), grouped.amax(-1).clamp(min=1e-3)
    scales = ((high - low) / 14).half()
    zeros = torch.round(-low / scales.float()).clamp(1, 15)
    codes = torch.round(grouped / scales.float()[..., None] + zeros[..., None]).clamp(0, 15)
    return codes.reshape(weight.shape).long(), zeros.long(), scales


def awq(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    codes, zeros, scales = quantized(weight)
    parts = {
        "qweight": packed(codes.t(), AWQ_ORDER),
        "qzeros": packed(zeros.t(), AWQ_ORDER),
        "scales": scales.t().contiguous(),
    }
    spread = (t.float().repeat_interleave(GROUP, dim=1) for t in (scales, zeros))
    scale, zero = spread
    return parts, scale * (codes.float() - zero)


def gptq(weight: torch.Tensor, order: torch.Tensor | None = None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """`order` [K]: whose scale an input has (act-order); the groups are made for it."""
    inputs = weight.shape[1]
    index = torch.arange(inputs) // GROUP if order is None else order
    by_group = torch.argsort(index, stable=True)
    codes, zeros, scales = quantized(weight[:, by_group])
    codes = codes[:, torch.argsort(by_group)]
    parts = {
        "qweight": packed(codes).t().contiguous(),
        "qzeros": packed((zeros - 1).t()),
        "scales": scales.t().contiguous(),
        "g_idx": index.to(torch.int32),
    }
    return parts, scales.float()[:, index] * (codes.float() - zeros.float()[:, index])


def channels(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    codes = torch.round(weight / scales).to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def rewrite(folder: Path, config: dict[str, Any], convert: Any) -> Path:
    """The tiny model with its projections converted; beside it, in `folder`/plain, with what they dequantize to."""
    for name in ("quantized", "plain"):
        write_tiny_llama(folder / name, seed=3, sizes=SIZES)
    tensors = load_file(str(folder / "plain" / "model.safetensors"))
    stored, plain = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if name.endswith(PROJECTION):
            parts, plain[name] = convert(weight.float())
            del stored[name]
            stored |= {f"{name.removesuffix('weight')}{part}": value.contiguous() for part, value in parts.items()}
    save_file(stored, str(folder / "quantized" / "model.safetensors"))
    save_file({name: value.contiguous() for name, value in plain.items()}, str(folder / "plain" / "model.safetensors"))
    edit(folder / "quantized", quantization_config=config)
    return folder


def edit(folder: Path, **fields: Any) -> None:
    place = folder / "config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), **fields}))


def logits(path: Path, dtype: DType) -> tuple[torch.Tensor, str]:
    model = load_model(ModelConfig(name="tiny", path=str(path), dtype=dtype, num_threads=1))
    assert isinstance(model, DecoderModel)
    return all_logits(model, torch.arange(40), window_cache(model, 40, "float32")), model.spec.dtype


def int8_config(strategy: str, **weights: Any) -> dict[str, Any]:
    described = {"num_bits": 8, "type": "int", "strategy": strategy, "symmetric": True, **weights}
    return {**COMPRESSED, "config_groups": {"group_0": {"weights": described, "targets": ["Linear"]}}}


FORMATS = {
    "awq-w4-g128": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, awq),
    "gptq-w4-g128": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, gptq),
    "compressed-tensors-w8-channel": (int8_config("channel"), channels),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_checkpoint_is_its_dequantized_weights(tmp_path: Path, name: str) -> None:
    folder = rewrite(tmp_path, *FORMATS[name])
    checkpoint, plain = open_checkpoint(folder / "quantized"), open_checkpoint(folder / "plain")
    assert sorted(checkpoint.names()) == sorted(plain.names())
    for tensor in plain.names():
        assert checkpoint.shape(tensor) == plain.shape(tensor)
        assert torch.equal(checkpoint.float32(tensor), plain.float32(tensor)), tensor
        own = checkpoint.groups(tensor)
        assert (own is not None) == tensor.endswith(PROJECTION)
        if own is not None:
            assert torch.equal(torch.from_numpy(own.dequantize()), plain.float32(tensor)), tensor
    exact, _ = logits(folder / "plain", "float32")
    assert torch.equal(logits(folder / "quantized", "float32")[0], exact)
    if native.available():
        out, dtype = logits(folder / "quantized", "native")
        assert dtype == f"native-{name}"
        # What eight-bit activations cost a random model; weights read wrongly would give an error near 1.
        assert float((out - exact).norm() / exact.norm()) < 0.05


def test_act_order_runs_in_float32_and_is_refused_in_groups(tmp_path: Path) -> None:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1)) // GROUP

    def convert(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return gptq(weight, order if weight.shape[1] == 256 else None)

    folder = rewrite(tmp_path, FORMATS["gptq-w4-g128"][0], convert)
    assert torch.equal(logits(folder / "quantized", "float32")[0], logits(folder / "plain", "float32")[0])
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(CheckpointError, match=rf"{name}: gptq .*group of 128.* with act-order .*float32 or int8"):
        open_checkpoint(folder / "quantized").groups(name)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes"}, r"quantization method 'bitsandbytes' is not supported \(awq, gptq,"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"layout 'gemv' is not supported \(gemm\)"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "3 bits are not supported"),
        ({**COMPRESSED, "format": "float-quantized", "config_groups": {}}, "format 'float-quantized' is not supported"),
        (int8_config("channel", num_bits=4), "int-quantized weights of type int with 4 bits are not supported"),
        (int8_config("token"), "strategy 'token' is not supported"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    folder = write_tiny_llama(tmp_path / "model", seed=3, sizes=SIZES)
    edit(folder, quantization_config=config)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(folder)


def test_a_tensor_that_contradicts_the_configuration_is_named(tmp_path: Path) -> None:
    config = {**FORMATS["awq-w4-g128"][0], "group_size": 64}
    folder = rewrite(tmp_path, config, awq)
    with pytest.raises(CheckpointError, match=r"self_attn.q_proj.weight: awq \(gemm, 4 bits, group of 64\): 1 groups"):
        open_checkpoint(folder / "quantized").groups("model.layers.0.self_attn.q_proj.weight")


def test_smoothing_is_the_same_function_with_smaller_activations(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", seed=3, sizes=SIZES)
    tensors = load_file(str(folder / "model.safetensors"))
    for layer in range(2):
        tensors[f"model.layers.{layer}.input_layernorm.weight"][5] *= 40  # an outlier column
    save_file(tensors, str(folder / "model.safetensors"))
    checkpoint = open_checkpoint(folder)
    smoothed = SmoothedWeights(checkpoint, str(folder))
    norm = smoothed.float32("model.layers.0.input_layernorm.weight").abs()
    assert norm[5] / norm.median() < 0.4 * 40
    save_file({name: smoothed.float32(name) for name in checkpoint.names()}, str(folder / "model.safetensors"))
    smooth, _ = logits(folder, "float32")
    save_file(tensors, str(folder / "model.safetensors"))
    exact, _ = logits(folder, "float32")
    torch.testing.assert_close(smooth, exact, rtol=1e-4, atol=1e-4)


def dequantized(weights: Weights, name: str) -> np.ndarray:
    """What runs: projections in the format's codes; the table's eight bits are near enough to floats here."""
    return weights.matrix(name).dequantize() if name.endswith(PROJECTION) else weights.vector(name)


@pytest.mark.skipif(not native.available(), reason="the compiled kernels cannot run here")
def test_our_own_formats_run_and_have_digests_of_their_own(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", seed=3, sizes=SIZES)
    checkpoint = open_checkpoint(folder)
    digests = set()
    for dtype in REQUANTIZED:
        weights = weights_for(dtype, checkpoint, str(folder))
        plain = {name: torch.from_numpy(dequantized(weights, name)) for name in checkpoint.names()}
        save_file(plain, str(write_tiny_llama(tmp_path / dtype, seed=3, sizes=SIZES) / "model.safetensors"))
        exact, _ = logits(tmp_path / dtype, "float32")
        config = ModelConfig(name="t", path=str(folder), dtype=dtype, num_threads=1, cache_dir=str(tmp_path / "cache"))
        for _ in range(2):  # packed, then mapped
            model = load_model(config)
            assert isinstance(model, DecoderModel)
            out = all_logits(model, torch.arange(40), window_cache(model, 40, "float32"))
            assert float((out - exact).norm() / exact.norm()) < 0.05, dtype
        digests.add(model.spec.digest)
    kv = load_model(ModelConfig(name="t", path=str(folder), dtype="q8", kv_dtype="int8", num_threads=1))
    digests.add(kv.spec.digest)
    assert kv.spec.kv_dtype == "int8"
    assert len(digests) == 4
