"""Keys and values of new tokens into the blocks of one layer, quantized per token and head where the cache is narrow.

Letters: T tokens, H query heads, G key/value heads, D head dimension, N blocks, B block size.

Contract: `kv_write(k [T, G, D], v [T, G, D], kv, slot_mapping [T])` writes row t at slot_mapping[t] = block * B +
offset; a negative slot (padding of a captured batch) writes nothing. Into float caches values are rounded to the
cache's dtype. Into int8 and float8_e4m3fn each (token, head) is divided by scale = max|x| / levels (127 or 448), then
rounded to nearest even, within +-levels; the scale goes into `k_scale`, `v_scale`.
`rope_kv_write(q, k, v, cos, sin, kv, slot_mapping)` rotates q [T, H, D] in place and writes rotated k, and v: exactly
what `rope` (`engines/ops/rope.py`, rounded to k's dtype) and `kv_write` give one after the other.

Read next: `engines/ops/paged_attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engines.ops.rope import reference_rope

LEVELS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Keeps a row of zeros finite; far below any key or value that matters.
SMALLEST_MAGNITUDE = 1e-30


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Blocks of one layer: `k`, `v` [N, G, B, D] of one dtype; scales [N, G, B] float32 iff that dtype is in LEVELS."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


def reference_quantize_heads(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] -> (values [..., D] of `dtype`, scales [...] float32)."""
    levels, wide = LEVELS[dtype], x.float()
    scales = wide.abs().amax(dim=-1).clamp(min=SMALLEST_MAGNITUDE) / levels
    scaled = (wide / scales[..., None]).clamp(-levels, levels)
    return (torch.round(scaled) if dtype == torch.int8 else scaled).to(dtype), scales


def reference_kv_write(k: torch.Tensor, v: torch.Tensor, kv: LayerKV, slot_mapping: torch.Tensor) -> None:
    """See the contract."""
    real = slot_mapping >= 0
    slots, size = slot_mapping[real].long(), kv.k.shape[2]
    where = (slots // size, slice(None), slots % size)
    for x, cache, scale in ((k, kv.k, kv.k_scale), (v, kv.v, kv.v_scale)):
        if scale is None:
            cache[where] = x[real].to(cache.dtype)
        else:
            values, scales = reference_quantize_heads(x[real], cache.dtype)
            # Indexed assignment does not know float8: write its bytes.
            cache.view(torch.uint8)[where] = values.view(torch.uint8)
            scale[where] = scales


def reference_rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: LayerKV,
    slot_mapping: torch.Tensor,
) -> None:
    """See the contract; rows with a negative slot are left alone."""
    real = slot_mapping >= 0
    q[real] = reference_rope(q[real].float(), cos[real], sin[real]).to(q.dtype)
    rotated = reference_rope(k[real].float(), cos[real], sin[real]).to(k.dtype)
    reference_kv_write(rotated, v[real], kv, slot_mapping[real])
