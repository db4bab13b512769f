"""From a checkpoint's tensors to the packed tensors of a Llama-family model: merged, and in the chosen number format.

Packed names: `embed`, `layers.i.{attention_norm,qkv,o,mlp_norm,gate_up,down}`, `norm`, `head`, each followed by its
format's parts (`engines/layers/linear.py`, `engines/layers/embedding.py`). Knows nothing of kernels or caches.

Read next: `engines/models/packed_cache.py`, `engines/models/llama.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from engines.models.base import Checkpoint, CheckpointError, ModelSpec
from engines.ops.embedding import quantize_groups
from engines.ops.linear_int8 import quantize_rows

Named = tuple[str, torch.Tensor]
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
PROJECTIONS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def pack_llama(checkpoint: Checkpoint, dtype: str) -> dict[str, torch.Tensor]:
    """All packed tensors of a dense decoder for `dtype` "float32" or "int8". Raises CheckpointError."""
    check_llama(checkpoint)
    pack_matrix = _int8_matrix if dtype == "int8" else _float32_matrix
    pack_table = _int8_table if dtype == "int8" else _float32_table
    spec = checkpoint.spec
    packed = dict(pack_table("embed", checkpoint.float32("model.embed_tokens.weight")))
    for layer in range(spec.num_layers):
        packed.update(_pack_layer(checkpoint, layer, pack_matrix))
    packed["norm.weight"] = checkpoint.float32("model.norm.weight")
    head = "model.embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight"
    packed.update(pack_matrix("head", checkpoint.float32(head)))
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


def _pack_layer(
    checkpoint: Checkpoint, layer: int, pack_matrix: Callable[[str, torch.Tensor], Iterator[Named]]
) -> Iterator[Named]:
    source, target = f"model.layers.{layer}", f"layers.{layer}"
    for norm, name in NORMS.items():
        yield f"{target}.{norm}.weight", checkpoint.float32(f"{source}.{name}.weight")
    for merged, parts in PROJECTIONS.items():
        weight = torch.cat([checkpoint.float32(f"{source}.{part}.weight") for part in parts])
        yield from pack_matrix(f"{target}.{merged}", weight)
        yield from _pack_bias(checkpoint, source, parts, f"{target}.{merged}")


def _pack_bias(checkpoint: Checkpoint, source: str, parts: tuple[str, ...], target: str) -> Iterator[Named]:
    """A merged projection has a bias if any part has one; a part without has zeros."""
    present = set(checkpoint.names())
    if any(f"{source}.{part}.bias" in present for part in parts):
        yield (
            f"{target}.bias",
            torch.cat(
                [
                    checkpoint.float32(f"{source}.{part}.bias")
                    if f"{source}.{part}.bias" in present
                    else torch.zeros(checkpoint.shape(f"{source}.{part}.weight")[0])
                    for part in parts
                ]
            ),
        )


def _float32_matrix(name: str, weight: torch.Tensor) -> Iterator[Named]:
    yield f"{name}.weight", weight


def _int8_matrix(name: str, weight: torch.Tensor) -> Iterator[Named]:
    rows, scales = quantize_rows(weight)
    yield f"{name}.rows", rows
    yield f"{name}.scales", scales


def _float32_table(name: str, table: torch.Tensor) -> Iterator[Named]:
    yield f"{name}.weight", table


def _int8_table(name: str, table: torch.Tensor) -> Iterator[Named]:
    groups, scales = quantize_groups(table)
    yield f"{name}.groups", groups
    yield f"{name}.scales", scales
