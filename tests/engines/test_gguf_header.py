"""GGUF headers: what is read, and that a lying or cut header is an error that names the place, never a crash."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.gguf_header import GGUFHeaderError, is_gguf, read_gguf_header

Key = tuple[str, int, bytes]  # name, value type, encoded value


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def tensor(name: str, dimensions: list[int], ggml_type: int, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return string(name) + shape + struct.pack("<IQ", ggml_type, offset)


def gguf(keys: list[Key], tensors: list[bytes], data: bytes = b"", version: int = 3, **counts: int) -> bytes:
    head = b"GGUF" + struct.pack(
        "<IQQ", version, counts.get("num_tensors", len(tensors)), counts.get("num_keys", len(keys))
    )
    head += b"".join(string(name) + struct.pack("<I", kind) + value for name, kind, value in keys)
    head += b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


KEYS: list[Key] = [
    ("a.u8", 0, b"\x07"),
    ("a.i32", 5, struct.pack("<i", -5)),
    ("a.f32", 6, struct.pack("<f", 0.5)),
    ("a.bool", 7, b"\x01"),
    ("a.u64", 10, struct.pack("<Q", 2**40)),
    ("a.text", 8, string("grüß")),
    ("a.numbers", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
    ("a.texts", 9, struct.pack("<IQ", 8, 2) + string("x") + string("")),
    ("a.nested", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ2B", 0, 2, 4, 5)),
]
VALUES: dict[str, Any] = {
    "a.u8": 7,
    "a.i32": -5,
    "a.f32": 0.5,
    "a.bool": True,
    "a.u64": 2**40,
    "a.text": "grüß",
    "a.numbers": [1, -2, 3],
    "a.texts": ["x", ""],
    "a.nested": [[4, 5]],
}


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return path


def test_everything_is_read_back(tmp_path: Path) -> None:
    content = gguf(KEYS, [tensor("w", [4, 3], 0, 0), tensor("b", [4], 0, 64)], b"\0" * 80)
    header = read_gguf_header(written(tmp_path, content))
    assert header.metadata == VALUES
    assert header.version == 3
    start = len(content) - 80
    assert [(t.name, t.shape, t.ggml_type, t.offset_bytes) for t in header.tensors.values()] == [
        ("w", (3, 4), 0, start),
        ("b", (4,), 0, start + 64),
    ]


def test_the_magic_decides(tmp_path: Path) -> None:
    assert is_gguf(written(tmp_path, gguf([], [])))
    assert not is_gguf(written(tmp_path, b"PK\x03\x04"))
    assert not is_gguf(tmp_path)


HUGE = 2**63
LIES = {
    "magic": b"GGML" + gguf([], [])[4:],
    "version": gguf([], [], version=1),
    "big-endian version": gguf([], [], version=3 << 24),
    "tensor count": gguf([], [], num_tensors=HUGE),
    "key count": gguf([], [], num_keys=HUGE),
    "string length": gguf([("k", 8, struct.pack("<Q", HUGE))], []),
    "string in an array": gguf([("k", 9, struct.pack("<IQQ", 8, 1, HUGE))], []),
    "array length": gguf([("k", 9, struct.pack("<IQ", 4, HUGE))], []),
    "array of strings": gguf([("k", 9, struct.pack("<IQ", 8, HUGE))], []),
    "value type": gguf([("k", 13, b"")], []),
    "array too deep": gguf([("k", 9, struct.pack("<IQ", 9, 1) * 3 + struct.pack("<IQ", 0, 0))], []),
    "key twice": gguf([KEYS[0], KEYS[0]], []),
    "tensor twice": gguf([], [tensor("w", [1], 0, 0)] * 2, b"\0" * 32),
    "no dimensions": gguf([], [tensor("w", [], 0, 0)]),
    "five dimensions": gguf([], [tensor("w", [1] * 5, 0, 0)]),
    "tensor past the end": gguf([], [tensor("w", [1], 0, HUGE)]),
    "alignment zero": gguf([("general.alignment", 4, struct.pack("<I", 0))], []),
    "alignment no power of two": gguf([("general.alignment", 4, struct.pack("<I", 48))], []),
    "alignment as text": gguf([("general.alignment", 8, string("32"))], []),
    "empty file": b"",
}


@pytest.mark.parametrize("content", LIES.values(), ids=LIES.keys())
def test_a_lie_is_an_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(GGUFHeaderError, match=r"model\.gguf: "):
        read_gguf_header(written(tmp_path, content))


def test_a_file_cut_anywhere_in_its_header_is_an_error(tmp_path: Path) -> None:
    content = gguf(KEYS, [tensor("w", [4, 3], 0, 0)])
    meaningful = content.rstrip(b"\0")
    for length in range(len(meaningful) - 16):
        with pytest.raises(GGUFHeaderError):
            read_gguf_header(written(tmp_path, content[:length]))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 400), byte=st.integers(0, 255))
def test_a_changed_byte_is_read_or_refused_but_never_crashes(tmp_path: Path, place: int, byte: int) -> None:
    content = bytearray(gguf(KEYS, [tensor("w", [4, 3], 0, 0)], b"\0" * 48))
    content[place % len(content)] = byte
    try:
        header = read_gguf_header(written(tmp_path, bytes(content)))
    except GGUFHeaderError:
        return
    assert header.file_bytes == len(content)


def test_bytes_that_are_not_utf8_survive(tmp_path: Path) -> None:
    key: Key = ("k", 8, struct.pack("<Q", 2) + b"\xff\xfe")
    value = read_gguf_header(written(tmp_path, gguf([key], []))).metadata["k"]
    assert value.encode("utf-8", "surrogateescape") == b"\xff\xfe"
