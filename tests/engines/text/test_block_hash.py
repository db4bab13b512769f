"""Block names: the exact bytes are a contract between engines and routers, so they are pinned here."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.text.block_hash import HASH_BYTES, block_hashes, child_hash, root_hash


def prefixed(*parts: bytes) -> bytes:
    return sha256(b"".join(len(p).to_bytes(4, "little") + p for p in parts)).digest()[:16]


def test_the_chain_is_what_the_documentation_says() -> None:
    root = prefixed(b"salt", b"digest", b"")
    first = prefixed(root, b"\x01\0\0\0\x02\0\0\0")
    second = prefixed(first, b"\x03\0\0\0\xff\xff\xff\xff")
    assert root_hash(b"salt", "digest") == root
    assert block_hashes([1, 2, 3, 2**32 - 1, 5], 2, root) == [first, second]
    assert child_hash(first, b"\x03\0\0\0\xff\xff\xff\xff") == second


def test_the_bytes_never_change() -> None:
    """A golden value: routers and workers of two versions must agree."""
    root = root_hash(b"\x01" * 32, "0123456789abcdef")
    assert root.hex() == "4795f7efe1920561ec106ff49b1ff248"
    names = [name.hex() for name in block_hashes(list(range(32)), 16, root)]
    assert names == ["3700db16f473265ab215faad0c7ac29b", "69f07e514aaeb0abb381ffab00ed336d"]


def test_parts_of_a_root_cannot_be_shifted_into_each_other() -> None:
    roots = {root_hash(b"ab", "c"), root_hash(b"a", "bc"), root_hash(b"", "abc"), root_hash(b"ab", "", extra=b"c")}
    assert len(roots) == 4
    assert {len(root) for root in roots} == {HASH_BYTES}


def test_a_partial_block_has_no_name() -> None:
    root = root_hash(b"", "d")
    assert block_hashes([], 4, root) == []
    assert block_hashes([1, 2, 3], 4, root) == []
    assert len(block_hashes([1, 2, 3, 4], 4, root)) == 1
    assert len(block_hashes(list(range(11)), 4, root)) == 2


@pytest.mark.parametrize("stray", [-1, 2**32])
def test_an_id_outside_u32_is_an_error_not_another_name(stray: int) -> None:
    with pytest.raises(OverflowError):
        block_hashes([0, stray], 2, root_hash(b"", "d"))


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40),
    other=st.lists(st.integers(0, 2**32 - 1), max_size=40),
    block_size=st.integers(1, 8),
)
def test_names_are_equal_exactly_as_far_as_the_prefixes_are(
    tokens: list[int], other: list[int], block_size: int
) -> None:
    root = root_hash(b"s", "d")
    left, right = block_hashes(tokens, block_size, root), block_hashes(other, block_size, root)
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        end = (i + 1) * block_size
        assert (a == b) == (tokens[:end] == other[:end])
    assert set(block_hashes(tokens, block_size, root_hash(b"t", "d"))).isdisjoint(left)
