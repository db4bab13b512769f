"""Weights from a GGUF file under canonical names, dequantized by the `gguf` package or handed out raw.

llama.cpp stores the rows of Llama's query and key projections interleaved for its own rotary form; they are put back in
halves here, on quantized bytes too (a row's bytes move as one, because groups run along K), so that models know one
rotary form only. Knows nothing of packing or number formats of ours.

Read next: `engines/gguf_header.py`, `engines/models/loader.py`.
"""

from __future__ import annotations

import hashlib
import math
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from engines.config import RopeScaling
from engines.gguf_header import GGUFHeaderError, GGUFTensor, read_gguf_header
from engines.models.base import CheckpointError, ModelSpec, checked_spec
from engines.models.positions import scaling_of_gguf, with_scaling
from engines.quant.ggml import CONVERSIONS, from_ggml
from engines.quant.group import GroupQuant

VOCABULARY_KEYS = (
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.merges",
)
# Architectures whose query and key rows llama.cpp's converter interleaves.
INTERLEAVED = frozenset({"llama"})
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
SUPPORTED = frozenset({"llama", "qwen2"})

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GGUFCheckpoint:
    """A `Checkpoint` over one mapped GGUF file."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError."""
        self._path = path
        try:
            header = read_gguf_header(path)
        except GGUFHeaderError as error:
            raise CheckpointError(str(error)) from error
        self._metadata = header.metadata
        self._architecture = self._text("general.architecture")
        if self._architecture not in SUPPORTED:
            raise CheckpointError(f"{path.name}: architecture {self._architecture!r} is not one of {sorted(SUPPORTED)}")
        if int(self._metadata.get("split.count", 1)) > 1:
            raise CheckpointError(f"{path.name} is one part of several; merge them first (llama-gguf-split --merge)")
        self._tensors = {self._canonical(tensor.name): tensor for tensor in header.tensors.values()}
        for tensor in self._tensors.values():
            self._check_extent(tensor, header.file_bytes)
        # As a plain array: numpy's memmap class costs more than the dequantizing of small slices.
        self._data = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)

    @cached_property
    def spec(self) -> ModelSpec:
        """Facts; the digest is over the whole file (about 1.5 GB/s, once)."""
        with self._path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        facts = with_scaling(self._facts(), self._scaling(), self._path.name)
        return checked_spec(msgspec.structs.replace(facts, digest=digest), self._path.name)

    @property
    def config(self) -> dict[str, Any]:
        """GGUF's metadata without the vocabulary."""
        return {key: value for key, value in self._metadata.items() if key not in VOCABULARY_KEYS}

    def names(self) -> tuple[str, ...]:
        """Canonical names, in file order; rotary factors are a fact, not a weight."""
        return tuple(name for name in self._tensors if name != ROPE_FACTORS)

    def shape(self, name: str) -> tuple[int, ...]:
        """Row-major shape."""
        return self._tensor(name).shape

    def float32(self, name: str) -> torch.Tensor:
        """The tensor dequantized, in the caller's own memory."""
        tensor = self._tensor(name)
        kind, rows = self.raw(name)
        try:
            values = dequantize(rows, GGMLQuantizationType[kind])
        except NotImplementedError as error:
            raise CheckpointError(f"{self._path.name}: tensor {name} has number format {kind}: {error}") from error
        return torch.from_numpy(np.array(values, dtype=np.float32, order="C").reshape(tensor.shape))

    def number_format(self, name: str) -> str:
        """See `Checkpoint.number_format`."""
        kind = GGMLQuantizationType(self._tensor(name).ggml_type).name
        return "float" if kind in FLOATS else kind.lower()

    def groups(self, name: str) -> GroupQuant | None:
        """See `Checkpoint.groups`."""
        kind, rows = self.raw(name)
        if kind in CONVERSIONS:
            return from_ggml(kind, rows)
        if kind in FLOATS:
            return None
        raise CheckpointError(
            f"{self._path.name}: tensor {name} has number format {kind}, which is not in groups"
            f" ({', '.join(CONVERSIONS)} are); it runs with dtype float32 or int8"
        )

    def raw(self, name: str) -> tuple[str, npt.NDArray[np.uint8]]:
        """(ggml type name, rows [N, bytes a row]); query and key rows in rotary halves."""
        tensor = self._tensor(name)
        row_bytes = self._row_bytes(tensor)
        num_rows = math.prod(tensor.shape[:-1])
        start = tensor.offset_bytes
        rows: npt.NDArray[np.uint8] = self._data[start : start + num_rows * row_bytes].reshape(num_rows, row_bytes)
        if self._architecture in INTERLEAVED and ".self_attn.q_proj." in name:
            rows = self._in_halves(rows, tensor, self._number("attention.head_count"))
        elif self._architecture in INTERLEAVED and ".self_attn.k_proj." in name:
            rows = self._in_halves(rows, tensor, self._kv_heads())
        return GGMLQuantizationType(tensor.ggml_type).name, rows

    def _in_halves(self, rows: npt.NDArray[np.uint8], tensor: GGUFTensor, num_heads: int) -> npt.NDArray[np.uint8]:
        """Undo llama.cpp's interleaving. A bias is one row of float32: its elements are the rows."""
        elements = rows.reshape(tensor.shape[0], -1)
        if elements.shape[0] % (2 * num_heads):
            raise CheckpointError(
                f"{tensor.name} has {elements.shape[0]} rows, not a multiple of 2 x {num_heads} heads"
            )
        pairs = elements.reshape(num_heads, -1, 2, elements.shape[1])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)

    def _canonical(self, name: str) -> str:
        if name in GLOBAL_NAMES:
            return GLOBAL_NAMES[name]
        if name == ROPE_FACTORS:
            return name
        match = LAYER_NAME.fullmatch(name)
        if match is None or match[2] not in LAYER_NAMES:
            raise CheckpointError(f"{self._path.name}: tensor {name!r} has no place in a {self._architecture} model")
        return f"model.layers.{int(match[1])}.{LAYER_NAMES[match[2]]}.{match[3]}"

    def _check_extent(self, tensor: GGUFTensor, file_bytes: int) -> None:
        if tensor.ggml_type not in set(GGMLQuantizationType):
            raise CheckpointError(
                f"{self._path.name}: tensor {tensor.name} has unknown number format {tensor.ggml_type}"
            )
        end = tensor.offset_bytes + math.prod(tensor.shape[:-1]) * self._row_bytes(tensor)
        if min(tensor.shape) < 1 or end > file_bytes:
            raise CheckpointError(
                f"{self._path.name}: tensor {tensor.name} of shape {list(tensor.shape)} ends at byte {end},"
                f" but the file has {file_bytes}"
            )

    def _row_bytes(self, tensor: GGUFTensor) -> int:
        group, group_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.ggml_type)]
        if tensor.shape[-1] % group:
            raise CheckpointError(
                f"{self._path.name}: tensor {tensor.name} has rows of {tensor.shape[-1]}, not a multiple of {group}"
            )
        return int(tensor.shape[-1] // group * group_bytes)

    def _tensor(self, name: str) -> GGUFTensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self._path.name} has no tensor {name}")
        return self._tensors[name]

    def _facts(self) -> ModelSpec:
        heads = self._number("attention.head_count")
        hidden = self._number("embedding_length")
        head_dim = self._number("attention.key_length", hidden // max(heads, 1))
        rotary = self._number("rope.dimension_count", head_dim)
        window = self._metadata.get(f"{self._architecture}.attention.sliding_window", 0)
        if rotary != head_dim:
            raise CheckpointError(f"{self._path.name}: rotary positions over {rotary} of {head_dim} dimensions")
        if not isinstance(window, int) or window < 0:
            raise CheckpointError(f"{self._path.name}: attention.sliding_window is {window!r}, not a positive integer")
        eos = self._metadata.get("tokenizer.ggml.eos_token_id")
        bos = self._metadata.get("tokenizer.ggml.bos_token_id")
        return ModelSpec(
            name=str(self._metadata.get("general.name", self._path.stem)),
            architecture=self._architecture,
            task="generate",
            num_layers=self._number("block_count"),
            num_heads=heads,
            num_kv_heads=self._kv_heads(),
            head_dim=head_dim,
            hidden_size=hidden,
            intermediate_size=self._number("feed_forward_length"),
            vocab_size=self.shape("model.embed_tokens.weight")[0],
            max_model_len=self._number("context_length"),
            rms_norm_eps=self._real("attention.layer_norm_rms_epsilon"),
            rope_theta=self._real("rope.freq_base", 10000.0),
            windows=(window,) * self._number("block_count") if window else (),
            tie_embeddings="lm_head.weight" not in self._tensors,
            bos_token_id=bos if isinstance(bos, int) else None,
            eos_token_ids=(eos,) if isinstance(eos, int) else (),
        )

    def _scaling(self) -> RopeScaling | None:
        """Of the metadata, or the factors that llama.cpp's converter computes for Llama 3."""
        if ROPE_FACTORS in self._tensors:
            return RopeScaling(kind="factors", factors=tuple(self.float32(ROPE_FACTORS).flatten().tolist()))
        return scaling_of_gguf(self._metadata, self._architecture, self._path.name)

    def _kv_heads(self) -> int:
        return self._number("attention.head_count_kv", self._number("attention.head_count"))

    def _number(self, key: str, default: int | None = None) -> int:
        value = self._metadata.get(f"{self._architecture}.{key}", default)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self._path.name}: {self._architecture}.{key} is {value!r}, not a positive integer")
        return value

    def _real(self, key: str, default: float | None = None) -> float:
        value = self._metadata.get(f"{self._architecture}.{key}", default)
        if not isinstance(value, float):
            raise CheckpointError(f"{self._path.name}: {self._architecture}.{key} is {value!r}, not a float")
        return value

    def _text(self, key: str) -> str:
        value = self._metadata.get(key)
        if not isinstance(value, str):
            raise CheckpointError(f"{self._path.name}: metadata key {key} is {value!r}, not a string")
        return value
