"""What a model is to the rest of the engine: its facts, its one method, and the weights it is made from.

A model knows nothing of requests, blocks' owners, sampling or scheduling. A checkpoint knows nothing of models: it
gives tensors under canonical (Hugging Face) names whatever file they come from.

Read next: `engines/models/loader.py` (checkpoints), `engines/models/llama.py`, `engines/models/registry.py`.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from engines.api import EngineError, Task
from engines.config import KVDType, RopeScaling
from engines.layers.forward_batch import ForwardBatch
from engines.ops.kv_cache import KVCache
from engines.quant.group import GroupQuant


class CheckpointError(EngineError):
    """The files are broken, contradict themselves, or describe a model that this engine cannot run."""

    code = "bad_checkpoint"


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one model in one number format; constant.

    `architecture` is the checkpoint's name in our form: "llama", "qwen2", "bert". `rms_norm_eps` is the epsilon of the
    model's norms, LayerNorm included. `dtype` is the number format that runs: "checkpoint" until the registry has
    chosen one, then "float32", "int8" or "native-..."; `kv_dtype` that of keys and values. `digest` is 16 hex digits of
    a SHA-256 over the weights' bytes and both number formats: equal digests give equal tokens, and block hashes begin
    with it. `embedding_dimensions` is 0 for a decoder.
    `max_positions` is the longest context that the positions reach, `max_model_len` the one that is served (in a
    checkpoint's facts: the one it names). `windows`: how many tokens each layer sees, 0 for all; empty if all see all.
    `bos_token_id` and `eos_token_ids` are what the checkpoint says (None and empty when it says nothing).
    """

    name: str
    architecture: str
    task: Task
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_positions: int = 0
    windows: tuple[int, ...] = ()
    tie_embeddings: bool = False
    dtype: str = "checkpoint"
    kv_dtype: KVDType = "float32"
    digest: str = ""
    embedding_dimensions: int = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def query_size(self) -> int:
        """Columns of the query projection: heads x head dimension."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of the key (or value) projection: key/value heads x head dimension."""
        return self.num_kv_heads * self.head_dim


MAX_LAYERS = 1024
MAX_SIZE = 1 << 24


def checked_spec(spec: ModelSpec, source: str) -> ModelSpec:
    """Return `spec` if its numbers can belong to one model. Raises CheckpointError naming `source`, field and value."""
    sizes = {
        "num_layers": MAX_LAYERS,
        "num_heads": MAX_SIZE,
        "num_kv_heads": MAX_SIZE,
        "head_dim": MAX_SIZE,
        "hidden_size": MAX_SIZE,
        "intermediate_size": MAX_SIZE,
        "vocab_size": MAX_SIZE,
        "max_model_len": MAX_SIZE,
    }
    for field, limit in sizes.items():
        value = getattr(spec, field)
        if not 1 <= value <= limit:
            raise CheckpointError(f"{source}: {field} is {value}, not within 1..{limit}")
    if spec.num_heads % spec.num_kv_heads:
        raise CheckpointError(
            f"{source}: {spec.num_heads} heads do not share {spec.num_kv_heads} key/value heads evenly"
        )
    if spec.task == "generate" and (spec.head_dim % 2 or not spec.rope_theta > 0):
        raise CheckpointError(f"{source}: rotary positions need an even head_dim ({spec.head_dim}) and rope_theta > 0")
    return spec


@runtime_checkable
class DecoderModel(Protocol):
    """A model that generates. One thread calls it; the result is valid until the next call of `forward`."""

    @property
    def spec(self) -> ModelSpec:
        """Constant."""
        ...

    def forward(self, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        """Write K and V of the batch's T tokens into `kv` and return logits of its R rows: [R, V] float32.

        A row's logits depend on its own sequence alone: not on its neighbours, nor on how its prompt was cut.
        """
        ...


@runtime_checkable
class EncoderModel(Protocol):
    """A model that embeds. One thread calls it."""

    @property
    def spec(self) -> ModelSpec:
        """Constant."""
        ...

    def encode(self, inputs: list[list[int]], normalize: bool) -> torch.Tensor:
        """One vector an input: [n, D] float32, of length 1 if `normalize`. No input may be empty or too long."""
        ...


class Checkpoint(Protocol):
    """Weights on disk under canonical names (`model.layers.0.self_attn.q_proj.weight`, ...), mapped, read-only.

    Every weight matrix is [N outputs, K inputs]. Query and key rows are in Hugging Face's order (rotary halves), even
    when the file stores llama.cpp's interleaved order. Nothing of the checkpoint is ever executed.
    """

    @property
    def spec(self) -> ModelSpec:
        """Facts, with `dtype` "checkpoint" and the digest of the weights alone."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """The file's own metadata: config.json, or GGUF's keys without the vocabulary."""
        ...

    def names(self) -> tuple[str, ...]:
        """Canonical names of all tensors, in file order."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Row-major shape. Raises CheckpointError if there is no such tensor."""
        ...

    def float32(self, name: str) -> torch.Tensor:
        """The tensor, dequantized: float32, contiguous, the caller's own copy."""
        ...

    def number_format(self, name: str) -> str:
        """What digests call the tensor's format: "q4_1", "awq-w4-g128", ...; "float" for a float."""
        ...

    def groups(self, name: str) -> GroupQuant | None:
        """The matrix's own codes and scales; None if it is stored in floats. Raises CheckpointError if it has none
        that groups can hold."""
        ...

    def raw(self, name: str) -> tuple[str, npt.NDArray[np.uint8]]:
        """(ggml type name such as "Q4_1" or "BF16", rows [N, bytes a row]); a vector is one row. Do not write."""
        ...
