"""The block pool: exact ids and order, then a state machine against a plain-dict oracle."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engines.kv.pool import BlockPool


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_cached, pool.num_used


def test_a_fresh_pool_hands_out_blocks_in_order() -> None:
    pool = BlockPool(3, on_evict=lambda block_id: None)
    assert [pool.allocate() for _ in range(3)] == [0, 1, 2]
    assert counts(pool) == (0, 0, 3)


def test_a_freed_block_is_used_again_first() -> None:
    pool = BlockPool(4, on_evict=lambda block_id: None)
    for _ in range(3):
        pool.allocate()
    assert pool.release(1, keep=False) is True
    assert [pool.allocate(), pool.allocate()] == [1, 3]


def test_cached_blocks_are_evicted_oldest_first_and_only_when_none_is_free() -> None:
    evicted: list[int] = []
    pool = BlockPool(4, on_evict=evicted.append)
    for _ in range(3):
        pool.allocate()
    for block_id in (2, 0, 1):
        assert pool.release(block_id, keep=True) is False
    assert pool.allocate() == 3
    assert evicted == []
    assert pool.cached_in_eviction_order() == [2, 0, 1]
    assert [pool.allocate(), pool.allocate()] == [2, 0]
    assert evicted == [2, 0]


def test_using_a_cached_block_makes_it_the_youngest() -> None:
    pool = BlockPool(3, on_evict=lambda block_id: None)
    for _ in range(3):
        pool.allocate()
    for block_id in (0, 1, 2):
        pool.release(block_id, keep=True)
    pool.acquire(0)
    assert pool.cached_in_eviction_order() == [1, 2]
    pool.release(0, keep=True)
    assert pool.cached_in_eviction_order() == [1, 2, 0]


def test_a_shared_block_is_freed_by_its_last_holder() -> None:
    pool = BlockPool(2, on_evict=lambda block_id: None)
    block_id = pool.allocate()
    pool.acquire(block_id)
    assert pool.release(block_id, keep=False) is False
    assert counts(pool) == (1, 0, 1)
    assert pool.release(block_id, keep=False) is True
    assert counts(pool) == (2, 0, 0)


def test_evict_all_frees_what_nobody_uses() -> None:
    evicted: list[int] = []
    pool = BlockPool(3, on_evict=evicted.append)
    for _ in range(3):
        pool.allocate()
    pool.release(2, keep=True)
    pool.release(0, keep=True)
    assert pool.evict_all() == [2, 0]
    assert evicted == [2, 0]
    assert counts(pool) == (2, 0, 1)


def test_our_own_mistakes_are_assertions() -> None:
    pool = BlockPool(1, on_evict=lambda block_id: None)
    pool.allocate()
    with pytest.raises(AssertionError, match="exhausted"):
        pool.allocate()
    pool.release(0, keep=False)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(0, keep=False)
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BlockPool(0, on_evict=lambda block_id: None)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._free.append(pool._free[0]),
        lambda pool: pool._free.pop(),
        lambda pool: pool._cached.update({pool._free[0]: None}),
        lambda pool: pool._free.append(0),
        lambda pool: pool.ref_counts.__setitem__(0, 0),
    ],
)
def test_check_invariants_notices_damage(damage: Callable[[BlockPool], object]) -> None:
    pool = BlockPool(3, on_evict=lambda block_id: None)
    pool.allocate()
    pool.check_invariants()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check_invariants()


class PoolMachine(RuleBasedStateMachine):
    """Oracle: a dict of reference counts and a plain list of cached blocks."""

    SIZE = 6

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = BlockPool(self.SIZE, on_evict=self.evicted.append)
        self.refs: dict[int, int] = {}
        self.cached: list[int] = []

    def free(self) -> set[int]:
        return set(range(self.SIZE)) - set(self.refs) - set(self.cached)

    @precondition(lambda self: len(self.refs) < self.SIZE)
    @rule()
    def allocate(self) -> None:
        free, before = self.free(), len(self.evicted)
        block_id = self.pool.allocate()
        if free:
            assert block_id in free
            assert len(self.evicted) == before
        else:
            assert block_id == self.cached.pop(0)
            assert self.evicted[before:] == [block_id]
        self.refs[block_id] = 1

    @precondition(lambda self: self.refs or self.cached)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.refs) + self.cached))
        self.pool.acquire(block_id)
        if block_id in self.cached:
            self.cached.remove(block_id)
        self.refs[block_id] = self.refs.get(block_id, 0) + 1

    @precondition(lambda self: self.refs)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.refs)))
        self.refs[block_id] -= 1
        last = self.refs[block_id] == 0
        assert self.pool.release(block_id, keep=keep) is (last and not keep)
        if last:
            del self.refs[block_id]
            if keep:
                self.cached.append(block_id)

    @rule()
    def evict_all(self) -> None:
        assert self.pool.evict_all() == self.cached
        self.cached = []

    @invariant()
    def agrees_with_the_oracle(self) -> None:
        self.pool.check_invariants()
        assert counts(self.pool) == (len(self.free()), len(self.cached), len(self.refs))
        assert self.pool.cached_in_eviction_order() == self.cached
        assert self.pool.ref_counts == [self.refs.get(block_id, 0) for block_id in range(self.SIZE)]
        assert self.pool.num_available == self.SIZE - len(self.refs)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
