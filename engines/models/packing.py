"""From a checkpoint's tensors to the packed tensors of a Llama-family model: merged, and in the chosen number format.

Packed names: `embed`, `layers.i.{attention_norm,qkv,o,mlp_norm,gate_up,down}`, `norm`, `head`, each followed by its
format's parts (`engines/layers/linear.py`, `engines/layers/embedding.py`). Knows nothing of kernels or caches.

Read next: `engines/models/rotation.py`, `engines/models/packed_cache.py`, `engines/models/llama.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from engines.models.base import Checkpoint, CheckpointError, ModelSpec
from engines.models.rotation import Rotation
from engines.ops.embedding import quantize_groups
from engines.ops.linear_int8 import quantize_rows

# Part of every digest: a change of what is packed, or of the arithmetic that runs it, is another number format.
PACKING_VERSION = 1
Named = tuple[str, torch.Tensor]
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
PROJECTIONS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
# Which norm's output a projection reads, and which projections write the residual stream.
READS = {"qkv": "attention_norm", "gate_up": "mlp_norm"}
WRITES = frozenset({"o", "down"})
# Inputs with outliers that no rotation takes away (after the gated activation), and the head, whose rows are few.
FINE = frozenset({"down", "head"})


class Format(Protocol):
    """How one number format packs the parts of a model; each method yields (packed name, tensor)."""

    def table(self, name: str, table: torch.Tensor) -> Iterator[Named]:
        """The embedding table [V, K]."""
        ...

    def norm(self, name: str, weight: torch.Tensor) -> Iterator[Named]:
        """The weight [K] of a norm."""
        ...

    def matrix(
        self, name: str, weight: torch.Tensor, bias: torch.Tensor | None, norm: torch.Tensor | None
    ) -> Iterator[Named]:
        """A projection [N, K]. `norm` [K] is the weight of the norm it reads, None if it reads no norm."""
        ...


class Float32Format:
    """The checkpoint's values as they are."""

    def table(self, name: str, table: torch.Tensor) -> Iterator[Named]:
        """See `Format.table`."""
        yield f"{name}.weight", table

    def norm(self, name: str, weight: torch.Tensor) -> Iterator[Named]:
        """See `Format.norm`."""
        yield f"{name}.weight", weight

    def matrix(
        self, name: str, weight: torch.Tensor, bias: torch.Tensor | None, norm: torch.Tensor | None
    ) -> Iterator[Named]:
        """See `Format.matrix`."""
        yield f"{name}.weight", weight
        if bias is not None:
            yield f"{name}.bias", bias


class Int8Format:
    """The residual stream rotated, norms folded into what reads them, rows in int8 (`engines/models/rotation.py`)."""

    def __init__(self, hidden_size: int) -> None:
        """`hidden_size`: width of the residual stream."""
        self._rotation = Rotation(hidden_size)

    def table(self, name: str, table: torch.Tensor) -> Iterator[Named]:
        """See `Format.table`."""
        groups, scales = quantize_groups(self._rotation.columns(table))
        yield f"{name}.groups", groups
        yield f"{name}.scales", scales

    def norm(self, name: str, weight: torch.Tensor) -> Iterator[Named]:
        """See `Format.norm`: folded away, ones remain."""
        yield f"{name}.weight", torch.ones_like(weight)

    def matrix(
        self, name: str, weight: torch.Tensor, bias: torch.Tensor | None, norm: torch.Tensor | None
    ) -> Iterator[Named]:
        """See `Format.matrix`."""
        part = name.rsplit(".", 1)[-1]
        if norm is not None:
            weight = self._rotation.columns(weight * norm)
        if part in WRITES:
            weight = self._rotation.rows(weight)
            bias = None if bias is None else self._rotation.columns(bias)
        rows, scales = quantize_rows(weight)
        yield f"{name}.{'fine_rows' if part in FINE else 'rows'}", rows
        yield f"{name}.scales", scales
        if bias is not None:
            yield f"{name}.bias", bias


def pack_llama(checkpoint: Checkpoint, dtype: str) -> dict[str, torch.Tensor]:
    """All packed tensors of a dense decoder for `dtype` "float32" or "int8". Raises CheckpointError."""
    check_llama(checkpoint)
    spec = checkpoint.spec
    form: Format = Int8Format(spec.hidden_size) if dtype == "int8" else Float32Format()
    table = checkpoint.float32("model.embed_tokens.weight")
    packed = dict(form.table("embed", table))
    for layer in range(spec.num_layers):
        packed.update(_pack_layer(checkpoint, layer, form))
    norm = checkpoint.float32("model.norm.weight")
    packed.update(form.norm("norm", norm))
    head = table if spec.tie_embeddings else checkpoint.float32("lm_head.weight")
    packed.update(form.matrix("head", head, None, norm))
    return packed


def check_llama(checkpoint: Checkpoint) -> None:
    """Every tensor is there, in the shape the facts promise, and no unknown one. Raises CheckpointError."""
    spec = checkpoint.spec
    expected, optional = _shapes(spec)
    present = set(checkpoint.names())
    missing = [name for name in expected if name not in present]
    unknown = sorted(present - set(expected) - set(optional))
    if missing or unknown:
        raise CheckpointError(f"{spec.name}: missing tensors {missing[:3]}, unknown tensors {unknown[:3]}")
    for name, shape in {**expected, **optional}.items():
        if name in present and checkpoint.shape(name) != shape:
            raise CheckpointError(f"{spec.name}: {name} has shape {list(checkpoint.shape(name))}, not {list(shape)}")


def _shapes(spec: ModelSpec) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Required and optional tensors of a dense decoder with their shapes."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    outputs = {
        "self_attn.q_proj": (spec.query_size, hidden),
        "self_attn.k_proj": (spec.kv_size, hidden),
        "self_attn.v_proj": (spec.kv_size, hidden),
        "self_attn.o_proj": (hidden, spec.query_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    required: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    optional: dict[str, tuple[int, ...]] = {}
    for layer in range(spec.num_layers):
        at = f"model.layers.{layer}"
        required |= {f"{at}.{norm}.weight": (hidden,) for norm in NORMS.values()}
        required |= {f"{at}.{name}.weight": shape for name, shape in outputs.items()}
        optional |= {f"{at}.{name}.bias": shape[:1] for name, shape in outputs.items()}
    required["model.norm.weight"] = (hidden,)
    (optional if spec.tie_embeddings else required)["lm_head.weight"] = (spec.vocab_size, hidden)
    return required, optional


def _pack_layer(checkpoint: Checkpoint, layer: int, form: Format) -> Iterator[Named]:
    source, target = f"model.layers.{layer}", f"layers.{layer}"
    norms = {norm: checkpoint.float32(f"{source}.{name}.weight") for norm, name in NORMS.items()}
    for norm, values in norms.items():
        yield from form.norm(f"{target}.{norm}", values)
    for merged, parts in PROJECTIONS.items():
        weight = torch.cat([checkpoint.float32(f"{source}.{part}.weight") for part in parts])
        bias = _merged_bias(checkpoint, [f"{source}.{part}" for part in parts])
        read = norms[READS[merged]] if merged in READS else None
        yield from form.matrix(f"{target}.{merged}", weight, bias, read)


def _merged_bias(checkpoint: Checkpoint, parts: list[str]) -> torch.Tensor | None:
    """A merged projection has a bias if any part has one; a part without has zeros."""
    present = set(checkpoint.names())
    if not any(f"{part}.bias" in present for part in parts):
        return None
    return torch.cat(
        [
            checkpoint.float32(f"{part}.bias")
            if f"{part}.bias" in present
            else torch.zeros(checkpoint.shape(f"{part}.weight")[0])
            for part in parts
        ]
    )
