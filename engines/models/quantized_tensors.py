"""Quantized matrices of a safetensors checkpoint: which there are, what config.json says of them, and their values.

`quantization_config` names the method: "awq" and "gptq" (4 or 8 bits in groups), "compressed-tensors" (int8, or packed
4 and 8 bits, symmetric). Whatever else is refused by name, with the tensor. Activations are not configured: the kernels
quantize them in 8 bits a token and 32 inputs, finer than any of these methods, so stored input scales are not needed.
Knows nothing of models or kernels.

Read next: `engines/quant/packed_int.py`, `engines/models/safetensors_checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engines.models.base import CheckpointError
from engines.quant.granularity import Granularity
from engines.quant.group import GroupQuant
from engines.quant.packed_int import from_awq, from_gptq, from_int8, from_packed_rows, kernel_scales

Read = Callable[[str], torch.Tensor]
METHODS = ("awq", "gptq", "compressed-tensors")
# What a quantized matrix `x.weight` is stored as besides itself, by method; and the part that shows it is there.
PARTS = (
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "weight_packed",
    "weight_shape",
    "weight_scale",
    "weight_zero_point",
    "weight_g_idx",
    "input_scale",
    "input_zero_point",
)
LAYOUTS = {"awq": ("gemm",), "gptq": ("gptq", "gptq_v2")}
MAIN = {"awq": ("qweight",), "gptq": ("qweight",), "compressed-tensors": ("weight_packed", "weight_scale")}


@dataclass(frozen=True, slots=True)
class Scheme:
    """What config.json says: `method`, its layout's name, bits, granularity of the scales."""

    method: str
    layout: str
    bits: int
    granularity: Granularity

    def __str__(self) -> str:
        """As errors name it."""
        return f"{self.method} ({self.layout}, {self.bits} bits, {self.granularity})"


class QuantizedTensors:
    """The quantized matrices among a checkpoint's tensors."""

    def __init__(self, scheme: Scheme | None, stored: Iterable[str], read: Read) -> None:
        """`read` gives a stored tensor as it is. `scheme` None: there are none."""
        self._scheme, self._read, self._stored = scheme, read, dict.fromkeys(stored)
        main = MAIN[scheme.method] if scheme is not None else ()
        self._matrices = {
            f"{name.removesuffix(part)}weight": name.removesuffix(part)
            for name in self._stored
            for part in main
            if name.endswith(f".{part}")
        }

    def canonical(self) -> tuple[str, ...]:
        """Names of all tensors, quantized ones by the one name `x.weight`."""
        hidden = {f"{prefix}{part}" for prefix in self._matrices.values() for part in PARTS}
        return tuple(sorted(self._matrices)) + tuple(
            name for name in self._stored if name not in hidden and name not in self._matrices
        )

    @property
    def number_format(self) -> str:
        """Of all: "awq-w4-g128", "compressed-tensors-w8-channel"."""
        scheme = self._known()
        grain = scheme.granularity
        return f"{scheme.method}-w{scheme.bits}-{f'g{grain.columns}' if grain.kind == 'group' else grain.kind}"

    def __contains__(self, name: str) -> bool:
        """Whether tensor `name` is quantized."""
        return name in self._matrices

    def groups(self, name: str) -> GroupQuant:
        """Raises CheckpointError naming format and tensor."""
        parts = self._parts(name)
        order = self._order(name, parts)
        if order is not None:
            raise CheckpointError(
                f"tensor {name}: {self._scheme} with act-order (g_idx) has no groups of neighbouring inputs;"
                " it runs with dtype float32 or int8"
            )
        return self._quant(name, parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """[N, K]."""
        prefix, scheme = self._matrices[name], self._known()
        pack = 32 // scheme.bits
        if scheme.method != "compressed-tensors":
            rows, columns = self._read(f"{prefix}qweight").shape
            return (columns * pack, rows) if scheme.method == "awq" else (columns, rows * pack)
        if f"{prefix}weight_packed" in self._stored:
            rows, columns = self._read(f"{prefix}weight_packed").shape
            return rows, columns * pack
        return tuple(self._read(name).shape)

    def float32(self, name: str) -> torch.Tensor:
        """Dequantized [N, K], act-order included. Raises CheckpointError naming format and tensor."""
        parts = self._parts(name)
        quant, order = self._quant(name, parts), self._order(name, parts)
        if order is None:
            return torch.from_numpy(quant.dequantize())
        # Codes lie in order of K; input k has the scale of group order[k].
        d = quant.scales.astype(np.float32)[:, order]
        codes = quant.codes.astype(np.float32)
        if quant.minima is None:
            return torch.from_numpy(d * (codes - np.float32(quant.zero)))
        return torch.from_numpy(d * codes + quant.minima.astype(np.float32)[:, order])

    def _known(self) -> Scheme:
        assert self._scheme is not None
        return self._scheme

    def _parts(self, name: str) -> Mapping[str, torch.Tensor]:
        prefix = self._matrices[name]
        return {part: self._read(f"{prefix}{part}") for part in ("weight", *PARTS) if f"{prefix}{part}" in self._stored}

    def _order(self, name: str, parts: Mapping[str, torch.Tensor]) -> Any:
        """Group of each input [K] where that is not k // group, else None."""
        index = parts.get("g_idx", parts.get("weight_g_idx"))
        if index is None:
            return None
        inputs = self.shape(name)[1]
        group = self._known().granularity.columns or inputs
        order = index.numpy().astype(np.int64)
        if order.shape != (inputs,) or order.min() < 0 or order.max() >= -(-inputs // group):
            raise CheckpointError(f"tensor {name}: g_idx does not give each of {inputs} inputs one of its groups")
        return None if np.array_equal(order, np.arange(inputs) // group) else order

    def _quant(self, name: str, parts: Mapping[str, torch.Tensor]) -> GroupQuant:
        try:
            quant = self._convert(parts)
            quant.check()
            wanted = self._known().granularity.scales_shape(*quant.shape)[1]
            if quant.scales.shape[1] != wanted:
                raise ValueError(f"{quant.scales.shape[1]} groups a row, not {wanted}")
        except (ValueError, KeyError, IndexError) as error:
            problem = f"part {error} is missing" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(f"tensor {name}: {self._scheme}: {problem}") from error
        return quant

    def _convert(self, parts: Mapping[str, torch.Tensor]) -> GroupQuant:
        scheme = self._known()
        if scheme.method == "awq":
            return from_awq(_words(parts["qweight"]), _words(parts["qzeros"]), _scales(parts["scales"]))
        if scheme.method == "gptq":
            words = _words(parts["qweight"]), _words(parts["qzeros"])
            first_zero = 0 if scheme.layout == "gptq_v2" else 1
            return from_gptq(*words, _scales(parts["scales"]), scheme.bits, first_zero=first_zero)
        zeros = parts.get("weight_zero_point")
        if "weight_packed" in parts:
            if zeros is not None and bool(zeros.any()):
                raise ValueError("packed zero points are not supported (symmetric weights are)")
            return from_packed_rows(_words(parts["weight_packed"]), _scales(parts["weight_scale"]), scheme.bits)
        if parts["weight"].dtype != torch.int8:
            raise ValueError(f"weights of {parts['weight'].dtype} with a scale are not supported (int8 is)")
        points = None if zeros is None or not bool(zeros.any()) else zeros.to(torch.int8).numpy()
        return from_int8(parts["weight"].numpy(), _scales(parts["weight_scale"]), scheme.granularity, points)


def scheme_of_config(config: Mapping[str, Any], source: str) -> Scheme | None:
    """Of `quantization_config`; None if the checkpoint is not quantized. Raises CheckpointError naming the method."""
    said = config.get("quantization_config") or config.get("compression_config")
    if not said:
        return None
    method = said.get("quant_method") if isinstance(said, dict) else None
    if method not in METHODS:
        raise CheckpointError(f"{source}: quantization method {method!r} is not supported ({', '.join(METHODS)} are)")
    try:
        return _compressed(said) if method == "compressed-tensors" else _grouped(method, said)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{source}: quantization_config of {method}: {error}") from error


def _grouped(method: str, said: Mapping[str, Any]) -> Scheme:
    bits = int(said.get("bits", said.get("w_bit", 4)))
    group = int(said.get("group_size", said.get("q_group_size", 128)))
    if method == "awq":
        layout = str(said.get("version", "gemm")).lower()
    else:
        layout = str(said.get("checkpoint_format") or "gptq")
    known = LAYOUTS[method]
    if layout not in known:
        raise ValueError(f"layout {layout!r} is not supported ({', '.join(known)})")
    if bits not in ((4,) if method == "awq" else (4, 8)):
        raise ValueError(f"{bits} bits are not supported")
    return Scheme(method, layout, bits, _granularity("group" if group > 0 else "channel", group))


def _compressed(said: Mapping[str, Any]) -> Scheme:
    layout, groups = str(said.get("format")), said["config_groups"]
    if layout not in ("int-quantized", "pack-quantized"):
        raise ValueError(f"format {layout!r} is not supported (int-quantized and pack-quantized are)")
    if len(groups) != 1:
        raise ValueError(f"{len(groups)} config_groups; one is supported")
    weights = next(iter(groups.values()))["weights"]
    bits, kind = int(weights["num_bits"]), str(weights.get("type", "int"))
    if kind != "int" or bits not in ((8,) if layout == "int-quantized" else (4, 8)):
        raise ValueError(f"{layout} weights of type {kind} with {bits} bits are not supported")
    return Scheme(
        "compressed-tensors",
        layout,
        bits,
        _granularity(str(weights.get("strategy")), int(weights.get("group_size") or 0), weights.get("block_structure")),
    )


def _granularity(strategy: str, group: int, block: Any = None) -> Granularity:
    if strategy == "tensor":
        return Granularity(kind="tensor")
    if strategy == "channel":
        return Granularity(kind="channel")
    if strategy == "group":
        return Granularity(kind="group", columns=group)
    if strategy == "block" and isinstance(block, list) and len(block) == 2:
        return Granularity(kind="block", rows=int(block[0]), columns=int(block[1]))
    raise ValueError(f"strategy {strategy!r} is not supported (tensor, channel, group and block are)")


def _words(tensor: torch.Tensor) -> Any:
    if tensor.dtype != torch.int32 or tensor.dim() != 2:
        raise ValueError(f"packed words are {tensor.dtype} {list(tensor.shape)}, not int32 with two dimensions")
    return tensor.numpy()


def _scales(tensor: torch.Tensor) -> Any:
    return kernel_scales((tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy())
