"""The KV manager: exact block ids, reference counts, eviction order, events; then random lives against contents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engines.api import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from engines.config import CacheConfig
from engines.kv.manager import KVManager
from engines.kv.radix import RadixNode
from engines.text.block_hash import block_hashes, root_hash

SIZE = 4
ROOT = root_hash(b"acme", "d")
Namer = Callable[[list[int], int, bytes], list[bytes]]


@dataclass(eq=False)
class Holder:
    """A request as the manager sees one."""

    tokens: list[int]
    root: bytes = ROOT
    names: Namer = block_hashes
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_published_blocks: int = 0
    tail_node: RadixNode | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def full_block(self, number: int) -> tuple[bytes, bytes]:
        part = self.tokens[number * SIZE : (number + 1) * SIZE]
        return self.names(self.tokens, SIZE, self.root)[number], b"".join(t.to_bytes(4, "little") for t in part)


class RecordingManager(KVManager):
    """Keeps the ids of freed blocks, in order."""

    def __init__(self, config: CacheConfig, num_blocks: int) -> None:
        self.freed: list[int] = []
        super().__init__(config, num_blocks, on_free=self.freed.append)


def make_manager(num_blocks: int, *, prefix_cache: bool = True) -> RecordingManager:
    return RecordingManager(CacheConfig(block_size=SIZE, prefix_cache=prefix_cache), num_blocks)


def compute(manager: KVManager, holder: Holder, num_tokens: int | None = None) -> None:
    """Allocate for, compute and publish the next tokens (all that are left by default)."""
    count = holder.num_tokens - holder.num_computed_tokens if num_tokens is None else num_tokens
    assert manager.allocate(holder, count)
    holder.num_computed_tokens += count
    manager.publish(holder)
    manager.check_invariants()


def events(manager: KVManager) -> list[KVEvent]:
    batch = manager.flush_events(0.0)
    return batch.events if batch else []


def test_a_prompt_takes_blocks_in_order_and_publishes_the_full_ones() -> None:
    manager = make_manager(8)
    holder = Holder(list(range(10)))
    manager.match(holder)
    assert (holder.block_ids, holder.num_computed_tokens) == ([], 0)
    compute(manager, holder)
    assert holder.block_ids == [0, 1, 2]
    assert holder.num_published_blocks == 2
    assert manager.pool.ref_counts == [1, 1, 1, 0, 0, 0, 0, 0]
    names = block_hashes(holder.tokens, SIZE, ROOT)
    assert events(manager) == [BlockStored(names, None, [], SIZE)]


def test_chunks_publish_as_blocks_fill() -> None:
    manager = make_manager(8)
    holder = Holder(list(range(10)))
    names = block_hashes(holder.tokens, SIZE, ROOT)
    compute(manager, holder, 5)
    assert (holder.block_ids, holder.num_published_blocks) == ([0, 1], 1)
    assert events(manager) == [BlockStored(names[:1], None, [], SIZE)]
    compute(manager, holder, 2)
    assert (holder.block_ids, holder.num_published_blocks) == ([0, 1], 1)
    assert events(manager) == []
    compute(manager, holder, 3)
    assert (holder.block_ids, holder.num_published_blocks) == ([0, 1, 2], 2)
    assert events(manager) == [BlockStored(names[1:], names[0], [], SIZE)]


def test_a_second_request_shares_the_full_blocks_of_its_prefix() -> None:
    manager = make_manager(8)
    first, second = Holder(list(range(10))), Holder([*range(8), 99, 98, 97])
    compute(manager, first)
    manager.match(second)
    assert (second.block_ids, second.num_computed_tokens) == ([0, 1], 8)
    compute(manager, second)
    assert second.block_ids == [0, 1, 3]
    assert manager.pool.ref_counts == [2, 2, 1, 1, 0, 0, 0, 0]
    manager.release(first)
    assert manager.pool.ref_counts == [1, 1, 0, 1, 0, 0, 0, 0]
    assert manager.pool.num_cached == 0


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_at_least_the_last_token_is_computed(length: int, cached: int) -> None:
    manager = make_manager(8)
    compute(manager, Holder(list(range(length))))
    again = Holder(list(range(length)))
    manager.match(again)
    assert again.num_computed_tokens == cached


def test_a_wholly_cached_prompt_computes_its_last_block_and_then_shares_the_old_one() -> None:
    manager = make_manager(8)
    first, again = Holder(list(range(8))), Holder(list(range(8)))
    compute(manager, first)
    manager.match(again)
    compute(manager, again, 3)
    assert again.block_ids == [0, 2]
    compute(manager, again)
    assert again.block_ids == [0, 1]
    assert manager.pool.ref_counts[:3] == [2, 2, 0]
    assert manager.freed == [2]


def test_two_that_computed_the_same_at_once_end_with_one_copy() -> None:
    manager = make_manager(8)
    left, right = Holder(list(range(9))), Holder(list(range(9)))
    for holder in (left, right):
        assert manager.allocate(holder, 9)
        holder.num_computed_tokens = 9
    assert (left.block_ids, right.block_ids) == ([0, 1, 2], [3, 4, 5])
    manager.publish(left)
    manager.publish(right)
    manager.check_invariants()
    assert right.block_ids == [0, 1, 5]
    assert manager.pool.ref_counts == [2, 2, 1, 0, 0, 1, 0, 0]
    assert manager.freed == [3, 4]
    assert len(events(manager)) == 1


def test_eviction_takes_the_tail_of_the_longest_unused_prompt_first() -> None:
    manager = make_manager(6)
    old, young = Holder([1] * 12), Holder([2] * 12)
    compute(manager, old)
    compute(manager, young)
    manager.release(old)
    manager.release(young)
    assert manager.pool.cached_in_eviction_order() == [2, 1, 0, 5, 4, 3]
    events(manager)
    newcomer = Holder([3] * 8)
    compute(manager, newcomer)
    assert newcomer.block_ids == [2, 1]
    names = block_hashes(old.tokens, SIZE, ROOT)
    assert events(manager)[0] == BlockRemoved([names[2], names[1]])
    again = Holder([1] * 12)
    manager.match(again)
    assert again.block_ids == [0]


def test_a_hit_protects_a_prefix_from_eviction() -> None:
    manager = make_manager(4)
    old, young = Holder([1] * 8), Holder([2] * 8)
    for holder in (old, young):
        compute(manager, holder)
        manager.release(holder)
    reader = Holder([1] * 9)
    manager.match(reader)
    manager.release(reader)
    assert manager.pool.cached_in_eviction_order() == [3, 2, 1, 0]


def test_allocation_is_all_or_nothing() -> None:
    manager = make_manager(3)
    holder = Holder(list(range(20)))
    assert manager.num_missing(holder, 20) == 5
    assert not manager.allocate(holder, 20)
    assert holder.block_ids == []
    assert manager.pool.num_free == 3
    assert manager.allocate(holder, 12)
    assert manager.num_missing(holder, 12) == 0


def test_other_salts_share_nothing() -> None:
    manager = make_manager(8)
    compute(manager, Holder(list(range(9))))
    stranger = Holder(list(range(9)), root=root_hash(b"umbrella", "d"))
    manager.match(stranger)
    assert stranger.block_ids == []
    compute(manager, stranger)
    assert stranger.block_ids == [3, 4, 5]


def weak_names(tokens: list[int], block_size: int, root: bytes) -> list[bytes]:
    """Every block of the same number collides."""
    return [b"name-%d" % number for number in range(len(tokens) // block_size)]


def test_a_hash_collision_is_a_miss_and_the_chain_stays_private() -> None:
    manager = make_manager(8)
    first = Holder([1] * 9, names=weak_names)
    second = Holder([2] * 9, names=weak_names)
    compute(manager, first)
    manager.match(second)
    assert second.block_ids == []
    compute(manager, second)
    assert (second.block_ids, second.num_published_blocks) == ([3, 4, 5], 0)
    manager.release(second)
    assert sorted(manager.freed) == [3, 4, 5]
    third = Holder([1] * 9, names=weak_names)
    manager.match(third)
    assert third.block_ids == [0, 1]


def test_without_prefix_cache_each_request_is_a_group_of_its_own() -> None:
    manager = make_manager(8, prefix_cache=False)
    assert manager.root(b"s", "d", 1) != manager.root(b"s", "d", 2)
    first = Holder(list(range(9)), root=manager.root(b"s", "d", 1))
    compute(manager, first)
    second = Holder(list(range(9)), root=manager.root(b"s", "d", 2))
    manager.match(second)
    assert second.block_ids == []
    assert events(manager) == []
    on = make_manager(8)
    assert on.root(b"s", "d", 1) == on.root(b"s", "d", 2) == root_hash(b"s", "d")


def test_clear_forgets_what_is_unused_and_says_so() -> None:
    manager = make_manager(8)
    used, idle = Holder([1] * 4), Holder([2] * 8)
    compute(manager, used)
    compute(manager, idle)
    manager.release(idle)
    events(manager)
    manager.clear()
    manager.check_invariants()
    names = block_hashes(idle.tokens, SIZE, ROOT)
    assert events(manager) == [BlockRemoved([names[1], names[0]])]
    manager.release(used)
    manager.clear()
    manager.check_invariants()
    assert events(manager) == [AllBlocksCleared()]
    assert (manager.pool.num_free, len(manager.index)) == (8, 0)


def test_every_block_is_reported_when_nobody_may_read_it_again() -> None:
    """The hook that tests poison with: released and unindexed, or evicted; not before."""
    manager = make_manager(3)
    holder = Holder(list(range(9)))
    compute(manager, holder)
    manager.release(holder)
    assert manager.freed == [2]  # the partial block
    compute(manager, Holder([7] * 8))
    assert manager.freed == [2, 1]


class ManagerMachine(RuleBasedStateMachine):
    """Random requests live and die; `slots` is what the tensors would hold; a match must find its own tokens there."""

    NUM_BLOCKS = 7

    def __init__(self) -> None:
        super().__init__()
        self.slots: dict[tuple[int, int], tuple[bytes, int, int]] = {}  # (block, offset) -> (root, position, token)
        self.manager = KVManager(
            CacheConfig(block_size=SIZE, event_buffer=100_000), self.NUM_BLOCKS, on_free=self.poison
        )
        self.alive: list[Holder] = []
        self.told: set[bytes] = set()

    def poison(self, block_id: int) -> None:
        for offset in range(SIZE):
            self.slots.pop((block_id, offset), None)

    def check_contents(self, holder: Holder) -> None:
        for position in range(holder.num_computed_tokens):
            slot = (holder.block_ids[position // SIZE], position % SIZE)
            assert self.slots[slot] == (holder.root, position, holder.tokens[position])

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), salt=st.sampled_from([b"a", b"b"]))
    def arrive(self, tokens: list[int], salt: bytes) -> None:
        holder = Holder(tokens, root=root_hash(salt, "d"))
        self.manager.match(holder)
        assert holder.num_computed_tokens < len(tokens)
        self.check_contents(holder)
        self.alive.append(holder)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.alive))
        left = holder.num_tokens - holder.num_computed_tokens
        if not left:
            holder.tokens.append(data.draw(st.integers(0, 1)))
            left = 1
        count = data.draw(st.integers(1, left))
        if not self.manager.allocate(holder, count):
            return
        for position in range(holder.num_computed_tokens, holder.num_computed_tokens + count):
            slot = (holder.block_ids[position // SIZE], position % SIZE)
            self.slots[slot] = (holder.root, position, holder.tokens[position])
        holder.num_computed_tokens += count
        self.manager.publish(holder)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.alive))
        self.alive.remove(holder)
        self.manager.release(holder)

    @rule()
    def clear(self) -> None:
        self.manager.clear()

    @invariant()
    def contents_counts_and_events_agree(self) -> None:
        self.manager.check_invariants()
        refs = [0] * self.NUM_BLOCKS
        for holder in self.alive:
            self.check_contents(holder)
            for block_id in holder.block_ids:
                refs[block_id] += 1
        assert refs == self.manager.pool.ref_counts
        for event in events(self.manager):
            if isinstance(event, BlockStored):
                assert self.told.isdisjoint(event.block_hashes)
                assert event.parent_block_hash is None or event.parent_block_hash in self.told
                self.told.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                assert self.told.issuperset(event.block_hashes)
                self.told.difference_update(event.block_hashes)
            else:
                self.told.clear()
        assert all(self.manager.index.has_name(name) for name in self.told)
        assert len(self.told) == len(self.manager.index)


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
