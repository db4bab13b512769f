"""Weights from a folder with config.json and *.safetensors, in Hugging Face's layout.

The `safetensors` library checks a file's header against its length before a tensor is touched. Only these two kinds of
file are read: no Python of the folder runs, no pickle is opened, an index names only files inside the folder. Knows
nothing of packing or number formats of ours.

Read next: `engines/models/quantized_tensors.py`, `engines/models/loader.py`.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from engines.models.base import CheckpointError, ModelSpec, checked_spec
from engines.models.positions import scaling_of_config, windows_of_config, with_scaling
from engines.models.quantized_tensors import QuantizedTensors, scheme_of_config
from engines.quant.group import GroupQuant

DECODERS = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2"}
ENCODERS = {"bert": "bert"}
TYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
MAX_JSON_BYTES = 64 << 20
T = TypeVar("T")
# Buffers that old exporters saved beside the weights; models compute them.
BUFFER_SUFFIXES = (".rotary_emb.inv_freq", "embeddings.position_ids")


class SafetensorsCheckpoint:
    """A `Checkpoint` over one or several mapped safetensors files."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError."""
        self._folder = folder
        self._config = read_json(folder / "config.json", dict[str, Any])
        self._kind = str(self._config.get("model_type"))
        if self._kind not in DECODERS and self._kind not in ENCODERS:
            known = sorted({*DECODERS, *ENCODERS})
            raise CheckpointError(f"{folder.name}: model_type {self._kind!r} is not one of {known}")
        self._files = _weight_files(folder)
        self._owners: dict[str, Any] = {}
        self._stored_names: dict[str, str] = {}
        for path in self._files:
            self._map(path)
        scheme = scheme_of_config(self._config, folder.name)
        self._quantized = QuantizedTensors(scheme, self._owners, self._stored)

    @cached_property
    def spec(self) -> ModelSpec:
        """Facts; the digest is over the configuration and every weight file (about 1.5 GB/s, once)."""
        total = hashlib.sha256()
        for path in (self._folder / "config.json", *self._files):
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        facts = self._decoder_facts() if self._kind in DECODERS else self._encoder_facts()
        return checked_spec(msgspec.structs.replace(facts, digest=total.hexdigest()[:16]), self._folder.name)

    @property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return self._config

    def names(self) -> tuple[str, ...]:
        """Canonical names; a quantized matrix is one name."""
        return self._quantized.canonical()

    def shape(self, name: str) -> tuple[int, ...]:
        """Row-major shape."""
        if name in self._quantized:
            return self._quantized.shape(name)
        return tuple(self._owner(name).get_slice(self._stored_names[name]).get_shape())

    def float32(self, name: str) -> torch.Tensor:
        """The tensor in float32, in the caller's own memory."""
        if name in self._quantized:
            return self._quantized.float32(name).contiguous()
        return self._read(name).to(torch.float32, copy=True).contiguous()

    def number_format(self, name: str) -> str:
        """See `Checkpoint.number_format`."""
        return self._quantized.number_format if name in self._quantized else "float"

    def groups(self, name: str) -> GroupQuant | None:
        """See `Checkpoint.groups`."""
        return self._quantized.groups(name) if name in self._quantized else None

    def raw(self, name: str) -> tuple[str, npt.NDArray[np.uint8]]:
        """(type name, rows [N, bytes a row])."""
        tensor = self._read(name)
        rows = tensor.reshape(-1, tensor.shape[-1]).contiguous().view(torch.uint8)
        return TYPE_NAMES[tensor.dtype], rows.numpy()

    def _map(self, path: Path) -> None:
        try:
            file: Any = safe_open(str(path), framework="pt", device="cpu")
            stored = list(file.keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path.name}: {error}") from error
        for name in stored:
            if name.endswith(BUFFER_SUFFIXES):
                continue
            canonical = name.removeprefix("bert.") if self._kind in ENCODERS else name
            if canonical in self._owners:
                raise CheckpointError(f"{path.name}: tensor {name} occurs twice")
            self._owners[canonical] = file
            self._stored_names[canonical] = name

    def _owner(self, name: str) -> Any:
        if name not in self._owners:
            raise CheckpointError(f"{self._folder.name} has no tensor {name}")
        return self._owners[name]

    def _stored(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._owner(name).get_tensor(self._stored_names[name])
        except SafetensorError as error:
            raise CheckpointError(f"{self._folder.name}: tensor {name}: {error}") from error
        return tensor

    def _read(self, name: str) -> torch.Tensor:
        tensor = self._stored(name)
        if tensor.dtype not in TYPE_NAMES:
            raise CheckpointError(f"{self._folder.name}: tensor {name} has number format {tensor.dtype}")
        return tensor

    def _decoder_facts(self) -> ModelSpec:
        hidden, heads = self._number("hidden_size"), self._number("num_attention_heads")
        eos = self._config.get("eos_token_id")
        bos = self._config.get("bos_token_id")
        act = self._config.get("hidden_act", "silu")
        if act != "silu":
            raise CheckpointError(f"{self._folder.name}: hidden_act {act!r} is not supported (silu is)")
        rotary = self._config.get("rope_parameters") or self._config.get("rope_scaling") or {}
        facts = ModelSpec(
            name=str(self._config.get("_name_or_path") or self._folder.name),
            architecture=DECODERS[self._kind],
            task="generate",
            num_layers=self._number("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=self._number("num_key_value_heads", heads),
            head_dim=self._number("head_dim", hidden // max(heads, 1)),
            hidden_size=hidden,
            intermediate_size=self._number("intermediate_size"),
            vocab_size=self._number("vocab_size"),
            max_model_len=self._number("max_position_embeddings"),
            rms_norm_eps=self._real("rms_norm_eps", 1e-6),
            # Newer configurations keep it in `rope_parameters`, older ones beside `rope_scaling`.
            rope_theta=float(rotary.get("rope_theta", self._config.get("rope_theta", 10000.0))),
            windows=windows_of_config(self._config, self._number("num_hidden_layers"), self._folder.name),
            tie_embeddings="lm_head.weight" not in self._owners or self._config.get("tie_word_embeddings") is True,
            bos_token_id=bos if isinstance(bos, int) else None,
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,) if isinstance(eos, int) else (),
        )
        return with_scaling(facts, scaling_of_config(rotary, self._folder.name), self._folder.name)

    def _encoder_facts(self) -> ModelSpec:
        hidden, heads = self._number("hidden_size"), self._number("num_attention_heads")
        return ModelSpec(
            name=str(self._config.get("_name_or_path") or self._folder.name),
            architecture=ENCODERS[self._kind],
            task="embed",
            num_layers=self._number("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            hidden_size=hidden,
            intermediate_size=self._number("intermediate_size"),
            vocab_size=self._number("vocab_size"),
            max_model_len=self._number("max_position_embeddings"),
            rms_norm_eps=self._real("layer_norm_eps", 1e-12),
            tie_embeddings=True,
            embedding_dimensions=hidden,
        )

    def _number(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{self._folder.name}: config.json {key} is {value!r}, not a positive integer")
        return value

    def _real(self, key: str, default: float) -> float:
        value = self._config.get(key, default)
        if not isinstance(value, float | int) or isinstance(value, bool) or value < 0:
            raise CheckpointError(f"{self._folder.name}: config.json {key} is {value!r}, not a number of at least 0")
        return float(value)


def read_json(path: Path, form: type[T]) -> T:
    """A JSON value of type `form` from a file of bounded size. Raises CheckpointError."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path.name} is larger than {MAX_JSON_BYTES} bytes")
        return msgspec.json.decode(path.read_bytes(), type=form)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent.name} has no {path.name}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path.name}: {error}") from error


def _weight_files(folder: Path) -> tuple[Path, ...]:
    """`model.safetensors`, or the parts its index names, each inside the folder."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise CheckpointError(f"{folder.name} has neither model.safetensors nor model.safetensors.index.json")
        return (single,)
    weight_map = read_json(index, dict[str, Any]).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index.name} has no weight_map")
    parts = sorted({str(part) for part in weight_map.values()})
    for part in parts:
        if Path(part).name != part or not part.endswith(".safetensors") or not (folder / part).is_file():
            raise CheckpointError(f"{index.name} names {part!r}, which is not a safetensors file of this folder")
    return tuple(folder / part for part in parts)
