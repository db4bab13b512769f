"""Llama-family dense decoder (Llama, Mistral, SmolLM, Qwen2): RMSNorm, rotary GQA attention, gated MLP.

Works on packed tensors (`engines/models/packing.py`) in float32 or int8; the layers pick their kernels from what the
tensors are. Letters: T tokens, K hidden size, R rows that want logits, V vocabulary. Knows nothing of requests,
sampling or files.

Read next: `engines/layers/attention.py`, `engines/models/packing.py`, `engines/models/llama_native.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engines.layers.attention import SelfAttention, StepContext
from engines.layers.embedding import build_embedding
from engines.layers.forward_batch import ForwardBatch
from engines.layers.linear import build_linear
from engines.layers.mlp import GatedMLP
from engines.layers.rotary import Rotary
from engines.models.base import ModelSpec
from engines.ops.attention import AttentionInputs, Heads
from engines.ops.dispatch import CPU, Ops
from engines.ops.kv_cache import KVCache


class LlamaModel:
    """A `DecoderModel`. `weight_bytes`: of the packed tensors; a tied head counts once."""

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, torch.Tensor], ops: Ops = CPU) -> None:
        """`tensors` as `pack_llama` gives them; matrices are copied into the kernels' layouts, the rest is kept."""
        self._spec = spec
        self.weight_bytes = sum({one.data_ptr(): one.nbytes for one in tensors.values()}.values())
        self._rms_norm = ops.rms_norm
        heads = Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        windows = spec.windows or (0,) * spec.num_layers
        self._attention = {window: ops.attention(heads, window) for window in dict.fromkeys(windows)}
        self._embedding = build_embedding(tensors, "embed")
        self._rotary = Rotary(spec.max_model_len, spec.head_dim, spec.rope_theta, spec.rope_scaling)
        self._layers = [LlamaLayer(spec, windows[layer], tensors, layer, ops) for layer in range(spec.num_layers)]
        self._norm = tensors["norm.weight"]
        self._head = build_linear(tensors, "head")

    @property
    def spec(self) -> ModelSpec:
        """Constant."""
        return self._spec

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        """See `DecoderModel.forward`: [R, V] float32."""
        inputs = AttentionInputs(batch.query_start, batch.context_lens, batch.block_tables, batch.slot_mapping)
        attention = {window: backend.begin(inputs, kv) for window, backend in self._attention.items()}
        context = StepContext(*self._rotary.rows(batch.positions), attention)
        x = self._embedding(batch.token_ids)  # [T, K]
        for layer in self._layers:
            layer(x, context)
        rows = x.index_select(0, batch.logits_rows)  # [R, K]
        return self._head(self._rms_norm(rows, self._norm, self._spec.rms_norm_eps))


class LlamaLayer:
    """One block: x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, spec: ModelSpec, window: int, tensors: Mapping[str, torch.Tensor], layer: int, ops: Ops) -> None:
        """Takes the tensors named `layers.{layer}.*`; sees `window` tokens, 0 for all."""
        at = f"layers.{layer}"
        heads = Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._layer = layer
        self._eps = spec.rms_norm_eps
        self._rms_norm = ops.rms_norm
        self._attention_norm = tensors[f"{at}.attention_norm.weight"]
        self._mlp_norm = tensors[f"{at}.mlp_norm.weight"]
        self._attention = SelfAttention(
            build_linear(tensors, f"{at}.qkv"), build_linear(tensors, f"{at}.o"), heads, ops, window
        )
        self._mlp = GatedMLP(build_linear(tensors, f"{at}.gate_up"), build_linear(tensors, f"{at}.down"), ops)

    def __call__(self, x: torch.Tensor, context: StepContext) -> None:
        """x [T, K], changed in place."""
        x.add_(self._attention(self._rms_norm(x, self._attention_norm, self._eps), self._layer, context))
        x.add_(self._mlp(self._rms_norm(x, self._mlp_norm, self._eps)))
