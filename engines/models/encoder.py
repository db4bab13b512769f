"""BERT-class sentence encoder: tokens of each input -> one vector (mean or first-token pooling).

Inputs lie one after the other in one ragged row of T tokens, so linears see all of them at once and attention runs
input by input: no padding, and a vector does not depend on what is embedded beside it. Float32. Letters: T tokens,
K hidden size, H heads, D head dimension. Knows nothing of requests or text.

Source: Devlin et al., 2018, https://arxiv.org/abs/1810.04805; pooling as in sentence-transformers.
Read next: `engines/models/registry.py`, `engines/core/encoder.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from engines.layers.linear import Float32Linear
from engines.models.base import Checkpoint, CheckpointError, ModelSpec
from engines.models.safetensors_checkpoint import read_json

MAX_BATCH_TOKENS = 8192
PARTS = {
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attended": ("attention.output.dense",),
    "inner": ("intermediate.dense",),
    "outer": ("output.dense",),
}


class BertEncoder:
    """An `EncoderModel`."""

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, pooling: str) -> None:
        """`pooling`: "mean" or "cls". Raises CheckpointError if a tensor is missing or the model is of another kind."""
        check_bert(checkpoint)
        self._spec = spec
        self._pool_first = pooling == "cls"
        self._words = checkpoint.float32("embeddings.word_embeddings.weight")
        # Every input is one segment, so the first row of the segment table is part of each position.
        segment = checkpoint.float32("embeddings.token_type_embeddings.weight")[0]
        self._positions = checkpoint.float32("embeddings.position_embeddings.weight") + segment
        self._norm = _Norm(checkpoint, "embeddings.LayerNorm", spec.rms_norm_eps)
        self._layers = [_BertLayer(spec, checkpoint, f"encoder.layer.{i}") for i in range(spec.num_layers)]

    @property
    def spec(self) -> ModelSpec:
        """Constant."""
        return self._spec

    @torch.inference_mode()
    def encode(self, inputs: list[list[int]], normalize: bool) -> torch.Tensor:
        """See `EncoderModel.encode`: [n, K] float32."""
        pooled = torch.cat([self._pooled(group) for group in grouped(inputs, MAX_BATCH_TOKENS)])
        return functional.normalize(pooled, dim=1) if normalize else pooled

    def _pooled(self, inputs: list[list[int]]) -> torch.Tensor:
        """Vectors of a few inputs, [n, K]."""
        lengths = [len(ids) for ids in inputs]
        ids = torch.tensor([token_id for one in inputs for token_id in one])  # [T]
        positions = torch.cat([self._positions[:length] for length in lengths])  # [T, K]
        x = self._norm(functional.embedding(ids, self._words) + positions)
        for layer in self._layers:
            x = layer(x, lengths)
        rows = torch.split(x, lengths)
        return torch.stack([one[0] if self._pool_first else one.mean(dim=0) for one in rows])


class _Norm:
    """LayerNorm over the last dimension."""

    def __init__(self, checkpoint: Checkpoint, name: str, eps: float) -> None:
        self._weight = checkpoint.float32(f"{name}.weight")
        self._bias = checkpoint.float32(f"{name}.bias")
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


class _BertLayer:
    """x = norm(x + attention(x)); x = norm(x + mlp(x)); x [T, K]."""

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, at: str) -> None:
        linears = {name: _merged(checkpoint, [f"{at}.{part}" for part in parts]) for name, parts in PARTS.items()}
        self._qkv, self._attended = linears["qkv"], linears["attended"]
        self._inner, self._outer = linears["inner"], linears["outer"]
        self._attention_norm = _Norm(checkpoint, f"{at}.attention.output.LayerNorm", spec.rms_norm_eps)
        self._mlp_norm = _Norm(checkpoint, f"{at}.output.LayerNorm", spec.rms_norm_eps)
        self._num_heads, self._head_dim = spec.num_heads, spec.head_dim

    def __call__(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        x = self._attention_norm(x + self._attended(self._attention(x, lengths)))
        # Input by input: torch may cut a large tensor between threads where the bits of erf change.
        inner = torch.cat([functional.gelu(one) for one in torch.split(self._inner(x), lengths)])
        return self._mlp_norm(x + self._outer(inner))

    def _attention(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """Every token of an input sees all of that input: [T, K]."""
        qkv = self._qkv(x).view(x.shape[0], 3, self._num_heads, self._head_dim)  # [T, 3, H, D]
        out = []
        for one in torch.split(qkv, lengths):
            q, k, v = one.permute(1, 2, 0, 3)[:, None]  # each [1, H, length, D]
            attended = functional.scaled_dot_product_attention(q, k, v)
            out.append(attended[0].transpose(0, 1).reshape(one.shape[0], -1))
        return torch.cat(out)


def grouped(inputs: list[list[int]], max_tokens: int) -> Iterator[list[list[int]]]:
    """Consecutive inputs whose tokens together stay within `max_tokens`; a longer input is alone."""
    group: list[list[int]] = []
    num_tokens = 0
    for ids in inputs:
        if group and num_tokens + len(ids) > max_tokens:
            yield group
            group, num_tokens = [], 0
        group.append(ids)
        num_tokens += len(ids)
    if group:
        yield group


def read_pooling(folder: Path) -> str:
    """ "mean" or "cls", as modules.json of sentence-transformers says; "mean" without one. Raises CheckpointError."""
    if not (folder / "modules.json").exists():
        return "mean"
    modules = read_json(folder / "modules.json", list[dict[str, Any]])
    path = next((str(module.get("path")) for module in modules if str(module.get("type")).endswith("Pooling")), "")
    if not path or Path(path).name != path:
        raise CheckpointError(f"{folder.name}: modules.json names no pooling module inside the folder")
    config = read_json(folder / path / "config.json", dict[str, Any])
    modes = sorted(key for key, value in config.items() if key.startswith("pooling_mode_") and value is True)
    known = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    if len(modes) != 1 or modes[0] not in known:
        raise CheckpointError(f"{folder.name}: pooling {modes} is not supported (one of {sorted(known)} is)")
    return known[modes[0]]


def check_bert(checkpoint: Checkpoint) -> None:
    """The model is one that this file computes, and its tables have the promised shapes. Raises CheckpointError."""
    spec, config = checkpoint.spec, checkpoint.config
    wanted = {"hidden_act": "gelu", "position_embedding_type": "absolute"}
    for field, value in wanted.items():
        if config.get(field, value) != value:
            raise CheckpointError(f"{spec.name}: {field} is {config[field]!r}; only {value!r} is supported")
    shapes = {
        "embeddings.word_embeddings.weight": (spec.vocab_size, spec.hidden_size),
        "embeddings.position_embeddings.weight": (spec.max_model_len, spec.hidden_size),
    }
    inner, hidden = spec.intermediate_size, spec.hidden_size
    for layer in range(spec.num_layers):
        at = f"encoder.layer.{layer}"
        shapes |= {f"{at}.{part}.weight": (hidden, hidden) for part in (*PARTS["qkv"], *PARTS["attended"])}
        shapes |= {f"{at}.intermediate.dense.weight": (inner, hidden), f"{at}.output.dense.weight": (hidden, inner)}
    for name, shape in shapes.items():
        if checkpoint.shape(name) != shape:
            raise CheckpointError(f"{spec.name}: {name} has shape {list(checkpoint.shape(name))}, not {list(shape)}")


def _merged(checkpoint: Checkpoint, parts: list[str]) -> Float32Linear:
    weight = torch.cat([checkpoint.float32(f"{part}.weight") for part in parts])
    return Float32Linear(weight, torch.cat([checkpoint.float32(f"{part}.bias") for part in parts]))
