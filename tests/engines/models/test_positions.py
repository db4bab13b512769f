"""Rotary scaling and windows: against transformers, from every kind of file, and within their lengths."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from engines.config import ModelConfig, RopeScaling
from engines.models import llama_native
from engines.models.base import CheckpointError, DecoderModel, ModelSpec
from engines.models.evaluate import all_logits
from engines.models.loader import open_checkpoint
from engines.models.positions import scaling_of_gguf, windows_of_config
from engines.models.registry import load_model
from engines.models.tiny import TinyLlama, write_tiny_llama
from engines.ops import native
from engines.ops.kv_cache import allocate_kv_cache
from engines.ops.rope_scaling import rotary_frequencies

TRAINED, LENGTH = 64, 256
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED},
    "yarn, every option": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": TRAINED,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
        "mscale": 0.9,
        "mscale_all_dim": 0.6,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
}
WINDOWS: dict[str, tuple[bool, dict[str, Any]]] = {
    "mistral": (False, {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 37}),
    "qwen2": (True, {"use_sliding_window": True, "sliding_window": 150, "max_window_layers": 1}),
}


def write(folder: Path, **config: Any) -> Path:
    """Heads wide enough for the compiled kernels."""
    biases = bool(config.pop("biases", False))
    sizes = TinyLlama(
        num_heads=2, num_kv_heads=1, head_dim=32, max_model_len=TRAINED, rope_theta=500.0, biases=biases, config=config
    )
    return write_tiny_llama(folder, seed=4, sizes=sizes)


def load(path: Path, **options: Any) -> DecoderModel:
    options = {"dtype": "float32", "max_model_len": LENGTH, **options}
    model = load_model(ModelConfig(name="tiny", path=str(path), **options))
    assert isinstance(model, DecoderModel)
    return model


def logprobs(model: DecoderModel, ids: torch.Tensor) -> torch.Tensor:
    spec = model.spec
    kv = allocate_kv_cache(spec.num_layers, -(-len(ids) // 16), spec.num_kv_heads, 16, spec.head_dim)
    kv.k.fill_(float("nan"))
    kv.v.fill_(float("nan"))
    return torch.log_softmax(all_logits(model, ids, kv), dim=-1)


@torch.inference_mode()
def transformers_logprobs(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        return torch.log_softmax(model(ids[None]).logits[0], dim=-1)


def ids_of(count: int) -> torch.Tensor:
    return torch.randint(0, 272, (count,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_each_scaling_agrees_with_transformers(tmp_path: Path, scaling: dict[str, Any]) -> None:
    named = {"max_position_embeddings": LENGTH} if scaling.get("rope_type") == "llama3" else {}
    folder = write(tmp_path / "m", rope_scaling=scaling, **named)
    ids = ids_of(LENGTH)
    ours, plain = (
        logprobs(load(folder), ids),
        logprobs(load(write(tmp_path / "p", max_position_embeddings=LENGTH)), ids),
    )
    torch.testing.assert_close(ours, transformers_logprobs(folder, ids), rtol=0, atol=1e-3)
    assert float((ours - plain).abs().max()) > 0.05, "the scaling did nothing"


@pytest.mark.skipif(bool(native.why_not()), reason="no compiled kernels here")
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_the_compiled_kernels_turn_alike(tmp_path: Path, scaling: dict[str, Any]) -> None:
    """Eight-bit weights move the log-probs a little; plain positions would move them ten times as far."""
    named = {"max_position_embeddings": LENGTH} if scaling.get("rope_type") == "llama3" else {}
    folder = write(tmp_path / "m", rope_scaling=scaling, **named)
    ids = ids_of(LENGTH)
    compiled = load(folder, dtype="native")
    assert compiled.spec.dtype == "native-q8"
    exact, rough = logprobs(load(folder), ids).double(), logprobs(compiled, ids).double()
    plain = logprobs(load(write(tmp_path / "p", max_position_embeddings=LENGTH)), ids).double()

    def divergence(other: torch.Tensor) -> float:
        return float((exact.exp() * (exact - other)).sum(dim=-1)[TRAINED:].mean())

    assert divergence(rough) < 2e-3
    assert divergence(plain) > 10 * divergence(rough)


def test_a_short_dynamic_context_is_the_plain_model(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", rope_scaling=SCALINGS["dynamic"])
    ids = ids_of(TRAINED)
    model = load(folder, max_model_len=0)
    assert model.spec.max_model_len == TRAINED
    assert torch.equal(logprobs(model, ids), logprobs(load(write(tmp_path / "p"), max_model_len=0), ids))


@pytest.mark.parametrize("case", WINDOWS.values(), ids=WINDOWS.keys())
def test_windows_agree_with_transformers(tmp_path: Path, case: tuple[bool, dict[str, Any]]) -> None:
    biases, config = case
    folder = write(tmp_path / "m", biases=biases, max_position_embeddings=1200, **config)
    ids = ids_of(1200)
    model = load(folder, max_model_len=1200)
    window = config["sliding_window"]
    assert model.spec.windows == ((window, window) if not biases else (0, window))
    ours = logprobs(model, ids)
    torch.testing.assert_close(ours, transformers_logprobs(folder, ids), rtol=0, atol=1e-3)
    everything = logprobs(load(folder, max_model_len=window), ids[:window])
    torch.testing.assert_close(ours[:window], everything, rtol=0, atol=1e-5)


def test_a_window_that_no_context_outgrows_is_none(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", max_position_embeddings=LENGTH, **WINDOWS["mistral"][1])
    assert load(folder, max_model_len=37).spec.windows == ()
    assert load(folder, max_model_len=38).spec.windows == (37, 37)
    narrow, wide = (ModelConfig(name="m", path="", max_model_len=n) for n in (38, 37))
    spec = open_checkpoint(folder).spec
    assert "sliding window" in llama_native.why_not(narrow, spec)
    assert "sliding window" not in llama_native.why_not(wide, spec)
    assert load(folder, dtype="auto", max_model_len=38).spec.dtype == "int8"


def test_an_override_reaches_as_far_as_its_factor(tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    yarn = RopeScaling(kind="yarn", factor=4.0)
    model = load(folder, rope_scaling=yarn, max_model_len=0)
    assert model.spec.max_model_len == LENGTH
    assert model.spec.rope_scaling == RopeScaling(kind="yarn", factor=4.0, original_max_positions=TRAINED)
    said = write(tmp_path / "said", rope_scaling=SCALINGS["yarn"])
    ids = ids_of(LENGTH)
    assert torch.equal(logprobs(model, ids), logprobs(load(said), ids))
    plain, other = (
        load(folder, max_model_len=0),
        load(folder, rope_scaling=RopeScaling(kind="yarn", factor=2.0), max_model_len=0),
    )
    assert len({m.spec.digest for m in (model, plain, other)}) == 3, "KV of other positions would be taken for ours"
    with pytest.raises(CheckpointError, match="max_model_len 257 is beyond the model's own 256"):
        load(folder, rope_scaling=yarn, max_model_len=LENGTH + 1)
    with pytest.raises(CheckpointError, match=r"rope_scaling yarn: factor is 0\.5, which cannot be"):
        load(folder, rope_scaling=RopeScaling(kind="yarn", factor=0.5))


def test_a_scaled_model_packs_its_weights_once(tmp_path: Path) -> None:
    folder, cache = write(tmp_path / "m"), tmp_path / "cache"
    load(folder, dtype="int8", max_model_len=0, cache_dir=str(cache))
    load(folder, dtype="int8", rope_scaling=RopeScaling(kind="linear", factor=4.0), cache_dir=str(cache))
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rotary scaling 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "big"}}, "rope_scaling: Expected `float`"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1.0}}, "linear: factor is -1.0"),
        ({"rope_scaling": {**SCALINGS["llama3"], "low_freq_factor": 5.0}}, "llama3: low_freq_factor is 5.0"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window": 8, "layer_types": ["sliding_attention"]}, "layer_types has 1 entries"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        load(write(tmp_path / "m", **change), max_model_len=0)


def test_layer_types_name_the_layers_with_a_window() -> None:
    config = {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
    assert windows_of_config(config, 2, "m") == (0, 8)
    assert windows_of_config({"sliding_window": 8, "use_sliding_window": False}, 2, "m") == ()


def test_gguf_keys_say_the_same() -> None:
    at = "llama.rope.scaling"
    keys = {f"{at}.type": "yarn", f"{at}.factor": 4.0, f"{at}.original_context_length": TRAINED}
    assert scaling_of_gguf(keys, "llama", "m") == RopeScaling(kind="yarn", factor=4.0, original_max_positions=TRAINED)
    sharper = scaling_of_gguf({**keys, f"{at}.attn_factor": 0.5}, "llama", "m")
    assert sharper is not None
    assert sharper.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4) + 1))
    assert scaling_of_gguf({"llama.rope.scale_linear": 2.0}, "llama", "m") == RopeScaling(kind="linear", factor=2.0)
    assert scaling_of_gguf({f"{at}.type": "none"}, "llama", "m") is None
    with pytest.raises(CheckpointError, match="rotary scaling 'longrope' is not supported"):
        scaling_of_gguf({f"{at}.type": "longrope"}, "llama", "m")


def write_gguf(path: Path, folder: Path, factors: torch.Tensor) -> Path:
    """The tiny model as llama.cpp's converter writes a Llama 3: rotary factors as a tensor, rows interleaved."""
    checkpoint = open_checkpoint(folder)
    spec: ModelSpec = checkpoint.spec
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(LENGTH)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_tensor("rope_freqs.weight", factors.numpy())
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    places = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name in checkpoint.names():
        tensor = checkpoint.float32(name).numpy()
        for part, heads in (("q_proj", spec.num_heads), ("k_proj", spec.num_kv_heads)):
            if part in name:
                halves = tensor.reshape(heads, 2, spec.head_dim // 2, -1)
                tensor = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
        if name not in places:
            layer, rest = name.removeprefix("model.layers.").split(".", 1)
            place = f"blk.{layer}.{names[rest.removesuffix('.weight')]}.weight"
        writer.add_tensor(places.get(name) or place, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_rotary_factors_of_a_gguf_file_are_those_of_llama3(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", rope_scaling=SCALINGS["llama3"], max_position_embeddings=LENGTH)
    spec = open_checkpoint(folder).spec
    plain, _ = rotary_frequencies(spec.head_dim, spec.rope_theta, None, LENGTH)
    scaled, _ = rotary_frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling, LENGTH)
    path = write_gguf(tmp_path / "m.gguf", folder, plain / scaled)
    model = load(path)
    assert model.spec.rope_scaling is not None
    assert model.spec.rope_scaling.kind == "factors"
    assert "rope_freqs.weight" not in open_checkpoint(path).names()
    ids = ids_of(LENGTH)
    torch.testing.assert_close(logprobs(model, ids), logprobs(load(folder), ids), rtol=0, atol=1e-3)
