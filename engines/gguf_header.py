"""The header of a GGUF file: metadata and the table of tensors, checked against the file's length, nothing mapped.

Both the tokenizer (`engines/text`) and the weights (`engines/models/gguf_checkpoint.py`) start here. It needs no torch
and no numpy, and reads the 100,000 strings of a vocabulary in a few tens of milliseconds. It knows nothing of what a
key means or of how many bytes a tensor's number format takes.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.

Read next: `engines/models/gguf_checkpoint.py`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from engines.api import EngineError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT_BYTES = 32
MAX_ALIGNMENT_BYTES = 1 << 20
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 2

# GGUF value type -> struct format of a scalar.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING = 8
ARRAY = 9
# The fewest bytes one element of a non-scalar takes: a string's length; an array's type and length.
SMALLEST_BYTES = {STRING: 8, ARRAY: 12}
SMALLEST_KEY_BYTES = 8 + 4 + 1
SMALLEST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


class GGUFHeaderError(EngineError):
    """The file is not GGUF, or its header contradicts itself or the file's length."""

    code = "bad_gguf"


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """`shape` in row-major order (GGUF stores it reversed); `offset_bytes` from the start of the file."""

    name: str
    ggml_type: int
    shape: tuple[int, ...]
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """`metadata` values are int, float, bool, str or lists of those. `tensors` keep the file's order."""

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    file_bytes: int


def is_gguf(path: Path) -> bool:
    """True if `path` is a file that begins with GGUF's magic."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def read_gguf_header(path: Path) -> GGUFHeader:
    """Parse and check. Raises GGUFHeaderError, naming the place, and OSError when the file cannot be read."""
    with path.open("rb") as file:
        return _Reader(file, path).header()


class _Reader:
    """A cursor over the file that never asks for more bytes than the file has left."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._size = path.stat().st_size
        self._at = 0

    def header(self) -> GGUFHeader:
        if self._take(4, "magic") != MAGIC:
            raise self._error("the magic bytes are not 'GGUF'")
        version = self._scalar("I", "version")
        if version not in (2, 3):
            raise self._error(f"version {version} is not supported (2 and 3 are, little-endian)")
        num_tensors = self._count("tensor_count", SMALLEST_TENSOR_BYTES)
        num_keys = self._count("metadata_kv_count", SMALLEST_KEY_BYTES)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a metadata key")
            if key in metadata:
                raise self._error(f"metadata key {key!r} occurs twice")
            metadata[key] = self._value(self._scalar("I", key), key, 0)
        raw = [self._tensor() for _ in range(num_tensors)]
        start = self._data_start(metadata)
        tensors: dict[str, GGUFTensor] = {}
        for name, ggml_type, shape, offset in raw:
            if name in tensors:
                raise self._error(f"tensor {name!r} occurs twice")
            if start + offset > self._size:
                raise self._error(f"tensor {name!r} begins at byte {start + offset}, past the end")
            tensors[name] = GGUFTensor(name, ggml_type, shape, start + offset)
        return GGUFHeader(version=version, metadata=metadata, tensors=tensors, file_bytes=self._size)

    def _data_start(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT_BYTES or alignment & (alignment - 1):
            raise self._error(f"general.alignment {alignment!r} is not a power of two up to {MAX_ALIGNMENT_BYTES}")
        return -(-self._at // alignment) * alignment

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string("a tensor name")
        num_dimensions = self._scalar("I", name)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(f"tensor {name!r} has {num_dimensions} dimensions (1 to {MAX_DIMENSIONS} are allowed)")
        dimensions = struct.unpack(f"<{num_dimensions}Q", self._take(8 * num_dimensions, name))
        ggml_type, offset = struct.unpack("<IQ", self._take(12, name))
        return name, ggml_type, tuple(reversed(dimensions)), offset

    def _value(self, kind: int, key: str, depth: int) -> Any:
        if kind in SCALARS:
            return self._scalar(SCALARS[kind], key)
        if kind == STRING:
            return self._string(key)
        if kind != ARRAY or depth >= MAX_ARRAY_DEPTH:
            raise self._error(f"metadata key {key!r} has value type {kind} at depth {depth}")
        item = self._scalar("I", key)
        form = SCALARS.get(item)
        if form is not None:
            length = self._count(key, struct.calcsize(f"<{form}"))
            packed = f"<{length}{form}"
            return list(struct.unpack(packed, self._take(struct.calcsize(packed), key)))
        length = self._count(key, SMALLEST_BYTES.get(item, 1))
        if item == STRING:
            return self._strings(length, key)
        return [self._value(item, key, depth + 1) for _ in range(length)]

    def _strings(self, count: int, what: str) -> list[str]:
        """`_string` many times: a vocabulary has 100,000 of them, so the loop is flat."""
        read, unpack = self._file.read, struct.Struct("<Q").unpack
        at, size = self._at, self._size
        strings: list[str] = []
        for _ in range(count):
            prefix = read(8)
            length = unpack(prefix)[0] if len(prefix) == 8 else size
            at += 8 + length
            if at > size:
                raise self._error(f"{what}: string {len(strings)} needs {length} bytes, more than the file has left")
            strings.append(read(length).decode("utf-8", "surrogateescape"))
        self._at = at
        return strings

    def _count(self, what: str, smallest_bytes: int) -> int:
        count = int(self._scalar("Q", what))
        left = self._size - self._at
        if count > left // smallest_bytes:
            raise self._error(f"{what} says {count} entries, but only {left} bytes are left")
        return count

    def _string(self, what: str) -> str:
        length = self._scalar("Q", what)
        # Not every writer keeps to UTF-8; surrogates keep the bytes instead of losing them.
        return self._take(length, what).decode("utf-8", "surrogateescape")

    def _scalar(self, form: str, what: str) -> Any:
        packed = f"<{form}"
        return struct.unpack(packed, self._take(struct.calcsize(packed), what))[0]

    def _take(self, length: int, what: str) -> bytes:
        if length > self._size - self._at:
            raise self._error(f"{what} needs {length} bytes at byte {self._at}, but the file has {self._size}")
        data = self._file.read(length)
        if len(data) != length:
            raise self._error(f"{what}: the file ended while it was read")
        self._at += length
        return data

    def _error(self, problem: str) -> GGUFHeaderError:
        return GGUFHeaderError(f"{self._path.name}: {problem}")
