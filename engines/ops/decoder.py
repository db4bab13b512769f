"""A whole forward pass of a dense decoder in one call: embedding, every layer, norm and head.

Contract: `forward(inputs, kv)` writes K and V of the batch's T tokens at their slots and returns logits of its R rows,
[R, V] float32. Per layer: x += attention(rope(norm(x) Wqkv)) Wo; x += (silu(norm(x) Wgate) * (norm(x) Wup)) Wdown,
every product by the law of `engines/ops/group_linear.py`. A row's logits are bitwise a function of its own sequence:
chunking, neighbours and the number of threads do not show. Slots past a context are never read.

The compiled kernel (`engines/ops/csrc`) runs the pass without the GIL in its own threads, prompts by blocks of rows and
few rows by blocks of columns (`schedule.c`). The reference composes the reference ops; it rounds elsewhere (norms and
attention in another order), so the two agree to a tolerance, not to the bit.

Letters: T tokens, S sequences, R rows that want logits, V vocabulary, K hidden size, H heads, G key/value heads, D head
dimension, P positions. Knows nothing of files or requests. Read next: `engines/models/llama_native.py`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engines.config import RopeScaling
from engines.ops.attention import AttentionInputs, Heads, ReferenceAttention
from engines.ops.group_linear import PackedMatrix, reference_group_linear, unpack_panels
from engines.ops.kv_cache import KVCache
from engines.ops.native import STATUS, Batch, Layer, Matrix, Model, NativeUnavailableError
from engines.ops.rmsnorm import reference_rms_norm
from engines.ops.rope import reference_rope, rotary_tables
from engines.ops.silu_mul import reference_silu_mul

Floats = npt.NDArray[np.float32]
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
MAX_HEAD_DIM = 256


class PassInputs(Protocol):
    """What of a `ForwardBatch` a pass reads; see there for shapes."""

    @property
    def token_ids(self) -> torch.Tensor: ...
    @property
    def positions(self) -> torch.Tensor: ...
    @property
    def slot_mapping(self) -> torch.Tensor: ...
    @property
    def query_start(self) -> torch.Tensor: ...
    @property
    def context_lens(self) -> torch.Tensor: ...
    @property
    def block_tables(self) -> torch.Tensor: ...
    @property
    def logits_rows(self) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Numbers of a dense decoder that its matrices do not say."""

    heads: Heads
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """`matrices` and `biases` (of some) by the names in PROJECTIONS; norms [K] float32."""

    matrices: Mapping[str, PackedMatrix]
    biases: Mapping[str, Floats]
    attention_norm: Floats
    mlp_norm: Floats


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights, never written. A tied head is the same object as `embedding`."""

    layers: tuple[LayerWeights, ...]
    embedding: PackedMatrix
    head: PackedMatrix
    norm: Floats

    @property
    def num_bytes(self) -> int:
        """Bytes of all matrices; a tied head counts once."""
        matrices = [matrix for layer in self.layers for matrix in layer.matrices.values()]
        heads = [self.embedding] if self.head is self.embedding else [self.embedding, self.head]
        return sum(matrix.data.nbytes for matrix in (*matrices, *heads))


def why_unsupported(shape: DecoderShape) -> str:
    """Why the compiled decoder cannot run such a model; empty if it can."""
    head_dim = shape.heads.head_dim
    if head_dim % 32 or not 32 <= head_dim <= MAX_HEAD_DIM:
        return f"head dimension {head_dim} is not a multiple of 32 up to {MAX_HEAD_DIM}"
    for name, size in (("hidden size", shape.hidden_size), ("intermediate size", shape.intermediate_size)):
        if size % 32:
            return f"{name} {size} is not a multiple of 32"
    return ""


class NativeDecoder:
    """The compiled kernel with its threads and scratch arena. One caller at a time; a fork may use its copy."""

    def __init__(self, library: ctypes.CDLL, shape: DecoderShape, weights: DecoderWeights, num_threads: int) -> None:
        """Keeps `weights`, copies none. Raises NativeUnavailableError for a model the kernels do not take."""
        reason = why_unsupported(shape)
        if reason:
            raise NativeUnavailableError(reason)
        self._library, self._shape, self._weights = library, shape, weights
        half = shape.heads.head_dim // 2
        cos, sin = rotary_tables(shape.max_positions, shape.heads.head_dim, shape.rope_theta, shape.rope_scaling)
        self._cos, self._sin = cos[:, :half].contiguous(), sin[:, half:].contiguous()  # [P, D / 2]
        self._layers = (Layer * len(weights.layers))(*(_native_layer(layer) for layer in weights.layers))
        self._handle = library.facet_decoder_new(ctypes.byref(self._model()), num_threads)
        if not self._handle:
            raise NativeUnavailableError(STATUS[2])

    def __del__(self) -> None:
        """Ends the threads and frees the arena."""
        if getattr(self, "_handle", None):
            self._library.facet_decoder_free(self._handle)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the arena now."""
        return int(self._library.facet_decoder_scratch_bytes(self._handle))

    def forward(self, inputs: PassInputs, kv: KVCache) -> torch.Tensor:
        """See the contract: [R, V] float32, new memory."""
        keep = [
            _contiguous(tensor, dtype)
            for tensor, dtype in (
                (inputs.token_ids, torch.int64),
                (inputs.positions, torch.int32),
                (inputs.slot_mapping, torch.int32),
                (inputs.query_start, torch.int32),
                (inputs.context_lens, torch.int32),
                (inputs.block_tables, torch.int32),
                (inputs.logits_rows, torch.int64),
            )
        ]
        self._check_cache(kv)
        logits = torch.empty(keep[6].shape[0], self._shape.vocab_size)
        batch = Batch(
            *(tensor.data_ptr() for tensor in keep),
            kv.k.data_ptr(),
            kv.v.data_ptr(),
            None if kv.k_scale is None else kv.k_scale.data_ptr(),
            None if kv.v_scale is None else kv.v_scale.data_ptr(),
            logits.data_ptr(),
            kv.num_blocks,
            keep[0].shape[0],
            keep[4].shape[0],
            keep[5].shape[1],
            logits.shape[0],
            kv.block_size,
            kv.format.code,
        )
        status = self._library.facet_decoder_forward(self._handle, ctypes.byref(batch))
        if status == 1:
            raise MemoryError("no memory for the scratch arena of a forward pass")
        assert status == 0, STATUS[status]
        return logits

    def _check_cache(self, kv: KVCache) -> None:
        heads = self._shape.heads
        slots = (len(self._weights.layers), kv.num_blocks, heads.num_kv_heads, kv.block_size)
        rows = (*slots, kv.format.columns(heads.head_dim))
        for tensor, shape, dtype in (
            (kv.k, rows, kv.format.storage),
            (kv.v, rows, kv.format.storage),
            *((scale, slots, torch.float32) for scale in (kv.k_scale, kv.v_scale) if scale is not None),
        ):
            assert tensor.shape == shape, (tuple(tensor.shape), shape)
            assert tensor.dtype == dtype, tensor.dtype
            assert tensor.is_contiguous()

    def _model(self) -> Model:
        shape, weights = self._shape, self._weights
        heads = shape.heads
        return Model(
            layers=self._layers,
            embedding=weights.embedding.native(),
            head=weights.head.native(),
            norm=weights.norm.ctypes.data,
            cos=self._cos.data_ptr(),
            sin=self._sin.data_ptr(),
            num_layers=len(weights.layers),
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            vocab_size=shape.vocab_size,
            max_positions=shape.max_positions,
            rms_norm_eps=shape.rms_norm_eps,
            attention_scale=1.0 / math.sqrt(heads.head_dim),
        )


def _native_layer(layer: LayerWeights) -> Layer:
    matrices: list[Matrix] = [layer.matrices[name].native(layer.biases.get(name)) for name in PROJECTIONS]
    return Layer(*matrices, layer.attention_norm.ctypes.data, layer.mlp_norm.ctypes.data)


def _contiguous(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    assert tensor.dtype == dtype, (tensor.dtype, dtype)
    return tensor.contiguous()


class ReferenceDecoder:
    """The definition from the reference ops: slow, for tests."""

    def __init__(self, shape: DecoderShape, weights: DecoderWeights) -> None:
        """Unpacks every matrix."""
        self._shape, self._weights = shape, weights
        self._layers = [{name: unpack_panels(layer.matrices[name]) for name in PROJECTIONS} for layer in weights.layers]
        self._embedding, self._head = unpack_panels(weights.embedding), unpack_panels(weights.head)
        self._tables = rotary_tables(shape.max_positions, shape.heads.head_dim, shape.rope_theta, shape.rope_scaling)

    def forward(self, inputs: PassInputs, kv: KVCache) -> torch.Tensor:
        """See the contract."""
        attention = AttentionInputs(inputs.query_start, inputs.context_lens, inputs.block_tables, inputs.slot_mapping)
        step = ReferenceAttention(self._shape.heads).begin(attention, kv)
        cos, sin = (table[inputs.positions.long()] for table in self._tables)
        x = torch.from_numpy(self._embedding.dequantize())[inputs.token_ids]  # [T, K]
        for number, layer in enumerate(self._weights.layers):
            y = reference_rms_norm(x, torch.from_numpy(layer.attention_norm), self._shape.rms_norm_eps)
            q, k, v = (self._linear(number, name, y) for name in ("q", "k", "v"))
            q, k, v = (t.reshape(t.shape[0], -1, self._shape.heads.head_dim) for t in (q, k, v))
            mixed = step.attend(number, reference_rope(q, cos, sin), reference_rope(k, cos, sin), v)
            x = x + self._linear(number, "o", mixed)
            y = reference_rms_norm(x, torch.from_numpy(layer.mlp_norm), self._shape.rms_norm_eps)
            gate_up = torch.cat((self._linear(number, "gate", y), self._linear(number, "up", y)), dim=1)
            x = x + self._linear(number, "down", reference_silu_mul(gate_up))
        rows = reference_rms_norm(x[inputs.logits_rows], torch.from_numpy(self._weights.norm), self._shape.rms_norm_eps)
        return reference_group_linear(rows, self._head)

    def _linear(self, layer: int, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = self._weights.layers[layer].biases.get(name)
        return reference_group_linear(x, self._layers[layer][name], None if bias is None else torch.from_numpy(bias))
