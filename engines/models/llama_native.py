"""Llama-family dense decoder through the compiled kernels: the checkpoint's own bits, a whole pass in one call.

Group formats of GGUF and of safetensors keep their bits, or floats are quantized anew
(`engines/models/requantize.py`). The packed form is written once to the cache and mapped afterwards, so that a start
reads it once and forks and replicas share its pages. Where the kernels cannot run (`why_not`)
`engines/models/registry.py` takes the torch path. Knows nothing of requests, sampling or scheduling.

Read next: `engines/ops/decoder.py`, `engines/ops/group_linear.py`, `engines/models/base.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy.typing as npt
import torch

from engines.config import ModelConfig
from engines.layers.forward_batch import ForwardBatch
from engines.models.base import Checkpoint, CheckpointError, ModelSpec
from engines.models.packing import check_llama
from engines.models.positions import placed_spec, running_spec, weights_key
from engines.models.requantize import REQUANTIZED, OwnWeights, Weights, format_name, weights_for
from engines.models.start_record import StartRecord, read_record, write_record
from engines.ops import decoder, native
from engines.ops.attention import Heads
from engines.ops.group_linear import PackedMatrix, pack_panels
from engines.ops.kv_cache import KVCache
from engines.quant.packed_file import PackedFileError, read_packed, write_packed

# Part of every digest: a change of what is packed, or of the arithmetic that runs it, is another number format.
NATIVE_VERSION = 2
Arrays = dict[str, npt.NDArray[Any]]
PROJECTIONS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
log = logging.getLogger(__name__)


class Facts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of a PackedMatrix is not its bytes."""

    num_outputs: int
    num_inputs: int
    bits: int
    group: int
    scale_bytes: int
    has_minima: bool
    zero: float


def why_not(config: ModelConfig, spec: ModelSpec) -> str:
    """Why the compiled kernels cannot run this checkpoint's `spec` here; empty if they can. Raises CheckpointError."""
    if spec.task != "generate":
        return f"{spec.name} is not a decoder"
    if placed_spec(config, spec).windows:
        return "it has layers with a sliding window, shorter than the context"
    return native.why_not() or decoder.why_unsupported(_shape(spec, spec.max_model_len))


def load(config: ModelConfig, checkpoint: Checkpoint) -> NativeLlama:
    """Map the packed weights, or pack them first. Raises CheckpointError, saying why the kernels cannot run it."""
    reason = why_not(config, checkpoint.spec)
    if reason:
        raise CheckpointError(f"{config.name}: dtype {config.dtype} cannot run: {reason}")
    check_llama(checkpoint)
    dtype = f"native-{format_name(config.dtype, checkpoint)}"
    if config.dtype in REQUANTIZED:
        dtype = f"native-re-{format_name(config.dtype, checkpoint)}"
    record = StartRecord(facts=checkpoint.spec, dtype=dtype, version=str(NATIVE_VERSION))
    arrays, facts = _load_or_pack(config, _packed_key(record), checkpoint)
    if config.dtype not in REQUANTIZED:
        write_record(config.cache_dir, config.path, record)
    return _built(config, record, arrays, facts)


def load_recorded(config: ModelConfig) -> NativeLlama | None:
    """Map the packed weights of a checkpoint that an earlier start has opened; None if it must be opened again."""
    record = read_record(config.cache_dir, config.path)
    if record is None or record.version != str(NATIVE_VERSION) or why_not(config, record.facts):
        return None
    key = _packed_key(record)
    try:
        arrays, facts = read_packed(Path(config.cache_dir) / f"{key}.packed", key)
    except (PackedFileError, OSError):
        return None
    return _built(config, record, arrays, facts)


class NativeLlama:
    """A `DecoderModel`. Threads start at the first `forward`, in the process that calls it."""

    def __init__(self, spec: ModelSpec, weights: decoder.DecoderWeights, num_threads: int) -> None:
        """Keeps `weights`, copies none."""
        self._spec = spec
        self._weights = weights
        self._decoder = decoder.NativeDecoder(
            native.open_library(), _shape(spec, spec.max_model_len), weights, num_threads
        )

    @property
    def spec(self) -> ModelSpec:
        """Constant."""
        return self._spec

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed matrices."""
        return self._weights.num_bytes

    def forward(self, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        """See `DecoderModel.forward`: [R, V] float32."""
        return self._decoder.forward(batch, kv)


def _packed_key(record: StartRecord) -> str:
    return f"{weights_key(record.facts, record.dtype, record.version)}-{record.dtype}"


def _built(config: ModelConfig, record: StartRecord, arrays: Arrays, facts: dict[str, Any]) -> NativeLlama:
    spec = running_spec(config, record.facts, record.dtype, record.version)
    weights = _weights(spec, arrays, msgspec.convert(facts, dict[str, Facts]))
    return NativeLlama(spec, weights, config.num_threads or torch.get_num_threads())


def _shape(spec: ModelSpec, max_positions: int) -> decoder.DecoderShape:
    return decoder.DecoderShape(
        heads=Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        vocab_size=spec.vocab_size,
        max_positions=max_positions,
        rms_norm_eps=spec.rms_norm_eps,
        rope_theta=spec.rope_theta,
        rope_scaling=spec.rope_scaling,
    )


def _load_or_pack(config: ModelConfig, key: str, checkpoint: Checkpoint) -> tuple[Arrays, dict[str, Any]]:
    """Arrays and facts of all weights, mapped from the cache if there is one."""
    if not config.cache_dir:
        return _pack(config, checkpoint)
    path = Path(config.cache_dir) / f"{key}.packed"
    if path.is_file():
        try:
            return read_packed(path, key)
        except (PackedFileError, OSError) as error:
            log.warning("packed weights will be packed again: %s", error)
    arrays, facts = _pack(config, checkpoint)
    try:
        write_packed(path, key, arrays, facts)
        return read_packed(path, key)
    except (PackedFileError, OSError) as error:
        log.warning("packed weights are not cached: %s", error)
        return arrays, facts


def _pack(config: ModelConfig, checkpoint: Checkpoint) -> tuple[Arrays, dict[str, Any]]:
    weights, tables = weights_for(config.dtype, checkpoint, config.path), OwnWeights(checkpoint)
    arrays: Arrays = {}
    facts: dict[str, Any] = {}

    def put(target: str, source: str, of: Weights) -> None:
        try:
            packed = pack_panels(of.matrix(source))
        except ValueError as error:
            raise CheckpointError(
                f"{config.name}: tensor {source} does not fit the compiled kernels: {error};"
                " it runs with dtype float32 or int8"
            ) from error
        arrays[target] = packed.data
        facts[target] = msgspec.to_builtins(
            Facts(
                num_outputs=packed.num_outputs,
                num_inputs=packed.num_inputs,
                bits=packed.bits,
                group=packed.group,
                scale_bytes=packed.scale_bytes,
                has_minima=packed.has_minima,
                zero=packed.zero,
            )
        )

    present = frozenset(checkpoint.names())
    for layer in range(checkpoint.spec.num_layers):
        source, target = f"model.layers.{layer}", f"layers.{layer}"
        for name, projection in PROJECTIONS.items():
            put(f"{target}.{name}", f"{source}.{projection}.weight", weights)
            bias = f"{source}.{projection}.bias"
            if bias in present:
                arrays[f"{target}.{name}.bias"] = weights.vector(bias)
        for name, norm in NORMS.items():
            arrays[f"{target}.{name}"] = weights.vector(f"{source}.{norm}.weight")
    put("embedding", EMBEDDING, tables)
    if not checkpoint.spec.tie_embeddings:
        put("head", HEAD, tables)
    arrays["norm"] = weights.vector(NORM)
    return arrays, facts


def _weights(spec: ModelSpec, arrays: Arrays, facts: Mapping[str, Facts]) -> decoder.DecoderWeights:
    def matrix(name: str) -> PackedMatrix:
        return PackedMatrix(data=arrays[name], **msgspec.structs.asdict(facts[name]))

    layers = tuple(
        decoder.LayerWeights(
            matrices={name: matrix(f"layers.{layer}.{name}") for name in PROJECTIONS},
            biases={
                name: arrays[f"layers.{layer}.{name}.bias"]
                for name in PROJECTIONS
                if f"layers.{layer}.{name}.bias" in arrays
            },
            attention_norm=arrays[f"layers.{layer}.attention_norm"],
            mlp_norm=arrays[f"layers.{layer}.mlp_norm"],
        )
        for layer in range(spec.num_layers)
    )
    embedding = matrix("embedding")
    head = matrix("head") if "head" in facts else embedding
    return decoder.DecoderWeights(layers, embedding, head, arrays["norm"])
