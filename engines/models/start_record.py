"""What a first start learned of a checkpoint, so that a later one need not open it: its facts and its packed weights.

Hashing the weights and reading a vocabulary that no engine needs take half a second. The record is filed under the
paths, sizes, inodes and times (of content and of inode) of the checkpoint's files: a file that was written again,
replaced or touched has another record. It holds nothing that is not computed again when it is missing. Knows nothing of
kernels.

Read next: `engines/models/registry.py`, `engines/models/llama_native.py`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

import msgspec

from engines.models.base import ModelSpec

log = logging.getLogger(__name__)


class StartRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`facts`: the checkpoint's; `dtype`: the number format that ran; `version`: of its arithmetic."""

    facts: ModelSpec
    dtype: str
    version: str


def read_record(cache_dir: str, path: str) -> StartRecord | None:
    """Of the checkpoint at `path` as it is now; None if there is none, or it cannot be read."""
    place = _place(cache_dir, path)
    if place is None:
        return None
    try:
        return msgspec.json.decode(place.read_bytes(), type=StartRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def write_record(cache_dir: str, path: str, record: StartRecord) -> None:
    """Keep it for the next start; a cache that cannot be written costs time, nothing else."""
    place = _place(cache_dir, path)
    if place is None:
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, prefix=f".{place.stem}-", delete=False) as file:
            temporary = Path(file.name)
            file.write(msgspec.json.encode(record))
        temporary.replace(place)
    except OSError as error:
        log.warning("what the start learned of %s is not kept: %s", path, error)


def _place(cache_dir: str, path: str) -> Path | None:
    """Where the record of the files at `path` lies; None without a cache or without files."""
    root = Path(path)
    try:
        files = sorted([*root.glob("*.json"), *root.glob("*.safetensors")]) if root.is_dir() else [root]
        stamps = [_stamp(file) for file in files]
    except OSError:
        return None
    if not cache_dir or not stamps:
        return None
    return Path(cache_dir) / f"{hashlib.sha256('|'.join(stamps).encode()).hexdigest()[:32]}.start"


def _stamp(file: Path) -> str:
    facts = os.stat(file)
    return f"{file.absolute()}:{facts.st_size}:{facts.st_ino}:{facts.st_mtime_ns}:{facts.st_ctime_ns}"
