"""Packed weights on disk: what a first start computed, a later start maps.

One safetensors file a key (weights' digest, number format, version of the packing), written beside its final name and
renamed, so that a reader sees a whole file or none. A file is used only if its names, its key and the SHA-256 of its
tensors' bytes are what was written; otherwise it is packed anew. A cache that cannot be written costs time, nothing
else. Knows nothing of what the tensors mean.

Read next: `engines/models/packing.py`, `engines/models/registry.py`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
KEY_FIELD, HASH_FIELD = "facet.key", "facet.sha256"
log = logging.getLogger(__name__)


def load_or_pack(cache_dir: str, key: str, pack: Callable[[], Tensors]) -> Tensors:
    """The tensors of `key`, mapped read-only from `cache_dir`, or what `pack` returns if there is no cache.

    `key` names everything the tensors follow from and is a plain file name. After packing, the result is mapped too, so
    that the packed copy leaves memory.
    """
    if not cache_dir:
        return pack()
    path = Path(cache_dir) / f"{key}.safetensors"
    tensors = _read(path, key)
    if tensors is not None:
        return tensors
    packed = pack()
    try:
        _write(path, key, packed)
    except (OSError, SafetensorError) as error:
        log.warning("packed weights are not cached: %s", error)
        return packed
    tensors = _read(path, key)
    return packed if tensors is None else tensors


def _read(path: Path, key: str) -> Tensors | None:
    """None if the file is absent or is not what was written."""
    if not path.is_file():
        return None
    try:
        file: Any = safe_open(str(path), framework="pt", device="cpu")
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    except (OSError, SafetensorError) as error:
        log.warning("packed weights %s are unreadable and will be packed again: %s", path.name, error)
        return None
    if metadata.get(KEY_FIELD) != key or metadata.get(HASH_FIELD) != _digest(tensors):
        log.warning("packed weights %s are damaged and will be packed again", path.name)
        return None
    return tensors


def _write(path: Path, key: str, tensors: Tensors) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}-", delete=False) as file:
        temporary = Path(file.name)
    try:
        save_file(whole, str(temporary), metadata={KEY_FIELD: key, HASH_FIELD: _digest(whole)})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Over names, formats, shapes and bytes, in order of names."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name}|{tensor.dtype}|{list(tensor.shape)}|".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
