"""Named arrays in one file that a later start maps: nothing is read twice, and processes share its pages.

A file begins with a magic number and a JSON header (key, SHA-256 of the data, name, dtype, shape and place of each
array, the caller's facts), padded to a page; arrays follow on 64-byte borders. It is written beside its final name and
renamed, so that a reader sees a whole file or none, and it is used only if key and hash are what was written. Knows
nothing of what the arrays mean.

Read next: `engines/models/llama_native.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

MAGIC = b"FACETPK1"
PAGE = 4096
ALIGNMENT = 64
MAX_HEADER_BYTES = 64 << 20
DTYPES = ("|u1", "<f4")
Arrays = dict[str, npt.NDArray[Any]]


class PackedFileError(Exception):
    """The file is not what was written under this key; the message says in what."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One array: numpy's dtype string, its shape, and the byte where it begins after the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`facts` is the caller's own."""

    key: str
    sha256: str
    arrays: dict[str, Entry]
    facts: dict[str, Any]


def write_packed(path: Path, key: str, arrays: Mapping[str, npt.NDArray[Any]], facts: Mapping[str, Any]) -> None:
    """Write `arrays` (uint8 or float32) and `facts` (JSON values) under `key`. Raises OSError."""
    entries, end = {}, 0
    for name, array in arrays.items():
        assert array.dtype.str in DTYPES, array.dtype
        entries[name] = Entry(dtype=array.dtype.str, shape=array.shape, start=end)
        end += _padded(array.nbytes, ALIGNMENT)
    digest = hashlib.sha256()
    for array in arrays.values():
        digest.update(_bytes(array))
    header = msgspec.json.encode(Header(key=key, sha256=digest.hexdigest(), arrays=entries, facts=dict(facts)))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}-", delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(MAGIC + len(header).to_bytes(8, "little") + header)
            base = _padded(file.tell(), PAGE)
            for name, array in arrays.items():
                file.seek(base + entries[name].start)
                file.write(_bytes(array))
            file.truncate(base + end)
            file.flush()
            os.fsync(file.fileno())
            # Out of the page cache in small pages, so that the mapping reads it in again in large ones.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def read_packed(path: Path, key: str) -> tuple[Arrays, dict[str, Any]]:
    """Map the file: (arrays, read-only views that keep the mapping alive; facts). Raises PackedFileError or OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(len(MAGIC) + 8)
        header_bytes = int.from_bytes(start[len(MAGIC) :], "little")
        if start[: len(MAGIC)] != MAGIC or header_bytes > min(size, MAX_HEADER_BYTES):
            raise PackedFileError(f"{path.name} is not a file of packed arrays")
        try:
            header = msgspec.json.decode(file.read(header_bytes), type=Header)
        except msgspec.DecodeError as error:
            raise PackedFileError(f"{path.name}: broken header: {error}") from error
        if header.key != key:
            raise PackedFileError(f"{path.name} was written for {header.key}, not {key}")
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        advise_huge_pages(mapped)
    data = np.frombuffer(mapped, dtype=np.uint8)
    base = _padded(len(start) + header_bytes, PAGE)
    arrays = {name: _view(path, data, base, name, entry) for name, entry in header.arrays.items()}
    digest = hashlib.sha256()
    for array in arrays.values():
        digest.update(_bytes(array))
    if digest.hexdigest() != header.sha256:
        raise PackedFileError(f"{path.name} is damaged")
    return arrays, header.facts


def advise_huge_pages(mapped: mmap.mmap) -> None:
    """Ask for large pages: a pass reads every weight, and a tenth of that time goes into finding small pages.

    File systems that hold no large pages, and systems that know no such advice, map small ones as ever.
    """
    with contextlib.suppress(OSError, AttributeError):
        mapped.madvise(mmap.MADV_HUGEPAGE)


def _view(path: Path, data: npt.NDArray[np.uint8], base: int, name: str, entry: Entry) -> npt.NDArray[Any]:
    count = int(np.prod(entry.shape, dtype=np.int64))
    if entry.dtype not in DTYPES or entry.start < 0 or min(entry.shape, default=1) < 0:
        raise PackedFileError(f"{path.name}: array {name} has dtype {entry.dtype}, shape {entry.shape}")
    begin = base + entry.start
    end = begin + count * np.dtype(entry.dtype).itemsize
    if end > data.nbytes or begin % ALIGNMENT:
        raise PackedFileError(f"{path.name}: array {name} ends at byte {end} of {data.nbytes}")
    view: npt.NDArray[Any] = data[begin:end].view(entry.dtype).reshape(entry.shape)
    return view


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _padded(size: int, to: int) -> int:
    return -(-size // to) * to
