"""Tiers by themselves: names, bounds, order of giving up, and files that are not what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engines.kv.tier_disk import DiskTier
from engines.kv.tiers import BlockName, DramTier, LeafLru
from engines.text.block_hash import child_hash, root_hash

BLOCK_BYTES = 40
FILE_BYTES = 8 + 32 + 40 + 16 + BLOCK_BYTES  # magic, checksum, facts, tokens, block
ROOT = root_hash(b"salt", "digest")
Make = Callable[[int], DramTier | DiskTier]
OpenDisk = Callable[..., DiskTier]


def chain(length: int, first_token: int = 0) -> list[BlockName]:
    names: list[BlockName] = []
    parent = ROOT
    for number in range(length):
        tokens = np.arange(4, dtype="<u4").tobytes()[:-1] + bytes([first_token + number])
        names.append(BlockName(child_hash(parent, tokens), parent, tokens, number == 0))
        parent = names[-1].hash
    return names


def block(number: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(number)).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


def read(tier: DramTier | DiskTier, name: BlockName) -> bytes | None:
    into = np.zeros(BLOCK_BYTES, dtype=np.uint8)
    return into.tobytes() if tier.get(name, into) else None


@pytest.fixture
def disk() -> Iterator[OpenDisk]:
    """Opens tiers of `blocks` blocks, and closes them."""
    opened: list[DiskTier] = []

    def open_disk(folder: Path, blocks: int = 8, layout: str = "layout") -> DiskTier:
        opened.append(DiskTier(folder, blocks * FILE_BYTES, BLOCK_BYTES, layout))
        return opened[-1]

    yield open_disk
    for tier in opened:
        tier.close()


@pytest.fixture(params=["dram", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path, disk: OpenDisk) -> Make:
    """A tier of `n` blocks."""
    if request.param == "dram":
        return lambda n: DramTier(n * BLOCK_BYTES + 1, BLOCK_BYTES)
    return lambda n: disk(tmp_path, n)


def test_what_is_put_is_got_and_nothing_else(make: Make) -> None:
    tier, names = make(4), chain(3)
    for number, name in enumerate(names[:2]):
        assert tier.put(name, block(number)) == []
    assert [tier.holds(name.hash) for name in names] == [True, True, False]
    assert [read(tier, name) for name in names] == [block(0).tobytes(), block(1).tobytes(), None]
    assert tier.contents() == [(names[0].hash, None), (names[1].hash, names[0].hash)]
    tier.check_invariants()


def test_other_tokens_under_the_same_hash_are_a_miss(make: Make) -> None:
    tier, (name, *_) = make(4), chain(1)
    tier.put(name, block(0))
    for other in (
        BlockName(name.hash, name.parent, name.tokens[::-1], True),
        BlockName(name.hash, b"\0" * 16, name.tokens, True),
    ):
        assert read(tier, other) is None


def test_the_end_of_the_longest_unused_prefix_goes_first(make: Make) -> None:
    tier, old, new = make(4), chain(2, 0), chain(3, 100)
    for name in (*old, *new[:2]):
        tier.put(name, block(1))
    assert tier.put(new[2], block(2)) == [old[1].hash]
    assert read(tier, old[0]) == block(1).tobytes()
    more = chain(1, 200)[0]
    assert tier.put(more, block(3)) == [new[2].hash], "the beginning of `old` was used later than the end of `new`"
    assert tier.put(name, block(9)) == []
    tier.check_invariants()


def test_a_tier_too_small_for_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kv_dram_bytes is 39; one block takes 40"):
        DramTier(BLOCK_BYTES - 1, BLOCK_BYTES)
    with pytest.raises(ValueError, match="kv_disk_bytes is 40"):
        DiskTier(tmp_path, BLOCK_BYTES, BLOCK_BYTES, "layout")


def filled(folder: Path, names: list[BlockName]) -> Path:
    """Files of a worker that has ended; the slot's folder."""
    tier = DiskTier(folder, 8 * FILE_BYTES, BLOCK_BYTES, "layout")
    for number, name in enumerate(names):
        tier.put(name, block(number))
    tier.close()
    (slot,) = folder.glob("*/slot-0")
    return slot


def test_a_restarted_worker_finds_its_blocks_and_their_order(tmp_path: Path, disk: OpenDisk) -> None:
    names = chain(3)
    slot = filled(tmp_path, names)
    (slot / "half-written.new").write_bytes(b"x")
    (slot / "somebody-elses.txt").write_bytes(b"x")
    tier = disk(tmp_path)
    assert tier.contents() == [(names[0].hash, None), (names[1].hash, names[0].hash), (names[2].hash, names[1].hash)]
    assert [read(tier, name) for name in names] == [block(n).tobytes() for n in range(3)]
    assert sorted(path.name for path in slot.iterdir() if path.suffix != ".kv") == ["lock", "somebody-elses.txt"]
    assert tier.used_bytes == 3 * FILE_BYTES
    tier.close()
    smaller = disk(tmp_path, blocks=2)
    assert [smaller.holds(name.hash) for name in names] == [True, True, False]


def test_workers_that_live_at_once_have_slots_of_their_own(tmp_path: Path, disk: OpenDisk) -> None:
    (name,) = chain(1)
    first, second = disk(tmp_path), disk(tmp_path)
    first.put(name, block(0))
    assert not second.holds(name.hash)
    first.close()
    assert read(disk(tmp_path), name) == block(0).tobytes()


def test_another_layout_finds_nothing(tmp_path: Path, disk: OpenDisk) -> None:
    filled(tmp_path, chain(2))
    assert disk(tmp_path, layout="other").contents() == []


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, FILE_BYTES - 1), flip=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_or_torn_file_is_a_miss(
    tmp_path_factory: pytest.TempPathFactory, at: int, flip: int, cut: bool
) -> None:
    folder, names = tmp_path_factory.mktemp("disk"), chain(2)
    slot = filled(folder, names)
    (path,) = slot.glob(f"{names[0].hash.hex()}-root.kv")
    content = bytearray(path.read_bytes())
    assert len(content) == FILE_BYTES
    content[at] ^= flip
    path.write_bytes(content[:at] if cut else content)
    tier = DiskTier(folder, 8 * FILE_BYTES, BLOCK_BYTES, "layout")
    assert read(tier, names[0]) is None
    assert not tier.holds(names[0].hash)
    assert not path.exists()
    assert read(tier, names[1]) == block(1).tobytes()
    tier.check_invariants()
    tier.close()


def test_a_file_that_grew_or_went_is_a_miss(tmp_path: Path, disk: OpenDisk) -> None:
    names = chain(2)
    slot = filled(tmp_path, names)
    for path in slot.glob(f"{names[0].hash.hex()}*"):
        path.write_bytes(path.read_bytes() + b"x")
    tier = disk(tmp_path)
    for path in slot.glob(f"{names[1].hash.hex()}*"):
        path.unlink()
    assert [read(tier, name) for name in names] == [None, None]
    assert tier.used_bytes == 0


def test_a_disk_that_cannot_be_written_costs_only_the_copy(
    tmp_path: Path, disk: OpenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    names = chain(1)
    tier = disk(tmp_path)
    (slot,) = tmp_path.glob("*/slot-0")
    # A folder where the new file should be: even root cannot write it.
    (slot / f"{names[0].hash.hex()}-root.new").mkdir()
    assert tier.put(names[0], block(0)) == []
    assert not tier.holds(names[0].hash)
    assert "not kept on disk" in caplog.text


class LruMachine(RuleBasedStateMachine):
    """Names form a forest; the oracle is a list in order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.lru = LeafLru()
        self.order: list[int] = []
        self.parents: dict[int, int | None] = {}

    @staticmethod
    def name(number: int) -> bytes:
        return number.to_bytes(2, "big")

    @rule(number=st.integers(0, 15))
    def add_or_touch(self, number: int) -> None:
        if number in self.order:
            self.lru.touch(self.name(number))
            self.order.remove(number)
        else:
            parent = (number - 1) // 2 if number else None  # a binary tree, in any order
            self.lru.add(self.name(number), None if parent is None else self.name(parent))
            self.parents[number] = parent
        self.order.append(number)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.order))
        self.lru.remove(self.name(number))
        self.order.remove(number)

    @precondition(lambda self: self.order)
    @rule()
    def pop(self) -> None:
        inner = {self.parents[number] for number in self.order}
        oldest = next(number for number in self.order if number not in inner)
        assert self.lru.pop_oldest() == self.name(oldest)
        self.order.remove(oldest)

    @invariant()
    def agrees(self) -> None:
        self.lru.check_invariants()
        assert len(self.lru) == len(self.order)
        listed = [name for name, _ in self.lru.in_chain_order()]
        assert sorted(listed) == sorted(map(self.name, self.order))
        for name, parent in self.lru.in_chain_order():
            assert parent not in listed or listed.index(parent) < listed.index(name)


TestLru = LruMachine.TestCase
TestLru.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
