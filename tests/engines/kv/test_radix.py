"""The prefix index: exact paths, collisions, trust groups, then a state machine against a plain-dict oracle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engines.kv.radix import NO_BLOCK, RadixIndex
from engines.text.block_hash import block_hashes, root_hash

SIZE = 2
ROOT = root_hash(b"acme", "d")
OTHER_ROOT = root_hash(b"umbrella", "d")


def keys(tokens: Sequence[int], root: bytes = ROOT) -> list[tuple[bytes, bytes]]:
    """(hash, tokens) of each full block."""
    data = b"".join(token.to_bytes(4, "little") for token in tokens)
    parts = [data[at : at + 4 * SIZE] for at in range(0, len(tokens) // SIZE * SIZE * 4, 4 * SIZE)]
    return list(zip(block_hashes(tokens, SIZE, root), parts, strict=True))


def insert(index: RadixIndex, tokens: Sequence[int], block_ids: Sequence[int], root: bytes = ROOT) -> None:
    """Index the last `len(block_ids)` blocks of `tokens`; those before them are there already."""
    blocks = keys(tokens, root)
    path = index.match(root, blocks[: len(blocks) - len(block_ids)])
    parent = path[-1] if path else None
    for block, block_id in zip(blocks[-len(block_ids) :], block_ids, strict=True):
        parent = index.insert(root, parent, block, block_id)


def matched(index: RadixIndex, tokens: Sequence[int], root: bytes = ROOT) -> list[int]:
    return [node.block_id for node in index.match(root, keys(tokens, root))]


def test_the_longest_resident_prefix_is_found() -> None:
    index = RadixIndex()
    insert(index, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    insert(index, [1, 2, 7, 8], [13])
    assert matched(index, [1, 2, 3, 4, 5, 6, 7, 8]) == [10, 11, 12]
    assert matched(index, [1, 2, 7, 8, 5, 6]) == [10, 13]
    assert matched(index, [1, 2, 3]) == [10]
    assert matched(index, [3, 4, 5, 6]) == []
    assert len(index) == 4
    index.check_invariants()


def test_trust_groups_never_meet() -> None:
    index = RadixIndex()
    insert(index, [1, 2, 3, 4], [0, 1])
    assert matched(index, [1, 2, 3, 4], OTHER_ROOT) == []
    insert(index, [1, 2], [2], OTHER_ROOT)
    assert matched(index, [1, 2, 3, 4], OTHER_ROOT) == [2]
    assert matched(index, [1, 2, 3, 4]) == [0, 1]


def test_names_of_another_group_are_not_found_below_this_root() -> None:
    """Even a caller who knew the hashes of another group's blocks would not reach them."""
    index = RadixIndex()
    insert(index, [1, 2, 3, 4], [0, 1])
    insert(index, [9, 9], [2], OTHER_ROOT)
    assert index.match(OTHER_ROOT, keys([1, 2, 3, 4])) == []


def test_a_hash_collision_is_a_miss() -> None:
    index = RadixIndex()
    index.insert(ROOT, None, (b"same", b"tokens-a"), 0)
    assert index.match(ROOT, [(b"same", b"tokens-b")]) == []
    assert index.child(index.root(ROOT), b"same", b"tokens-b") is None
    assert index.has_name(b"same")


def test_a_collision_further_up_is_a_miss_though_name_and_tokens_agree() -> None:
    """Two prompts whose first blocks differ and whose second blocks have one name and equal tokens."""
    index = RadixIndex()
    first = index.insert(ROOT, None, (b"h1", b"aa"), 0)
    index.insert(ROOT, first, (b"h2", b"cc"), 1)
    index.insert(ROOT, None, (b"h1'", b"bb"), 2)
    assert [node.block_id for node in index.match(ROOT, [(b"h1'", b"bb"), (b"h2", b"cc")])] == [2]


def test_removal_forgets_leaf_by_leaf_and_then_the_group() -> None:
    index = RadixIndex()
    insert(index, [1, 2, 3, 4], [7, 5])
    with pytest.raises(AssertionError, match="block 7 still has 1 children"):
        index.remove(7)
    assert index.remove(5).hash == keys([1, 2, 3, 4])[1][0]
    assert matched(index, [1, 2, 3, 4]) == [7]
    index.remove(7)
    assert len(index) == 0
    assert index.root(ROOT) is None
    index.check_invariants()


def test_matching_computes_no_name_past_the_first_miss() -> None:
    index = RadixIndex()
    insert(index, [1, 2], [0])
    asked: list[int] = []

    def lazily() -> Iterator[tuple[bytes, bytes]]:
        for number, key in enumerate(keys([1, 2, 3, 4, 5, 6])):
            asked.append(number)
            yield key

    index.match(ROOT, lazily())
    assert asked == [0, 1]


@pytest.mark.parametrize("damage", ["orphan", "name", "block", "link"])
def test_check_invariants_notices_damage(damage: str) -> None:
    index = RadixIndex()
    insert(index, [1, 2, 3, 4], [0, 1])
    node = index.match(ROOT, keys([1, 2, 3, 4]))[1]
    assert node.parent is not None
    if damage == "orphan":
        node.parent.children.clear()
    elif damage == "name":
        node.hash = b"another"
    elif damage == "block":
        node.block_id = 5
    else:
        node.parent = None
    with pytest.raises((AssertionError, KeyError)):
        index.check_invariants()


class RadixMachine(RuleBasedStateMachine):
    """Oracle: a dict from (root, whole token prefix) to block id."""

    def __init__(self) -> None:
        super().__init__()
        self.index = RadixIndex()
        self.resident: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self.unused = list(range(30))

    prompts = st.lists(st.integers(0, 2), max_size=9)
    roots = st.sampled_from([ROOT, OTHER_ROOT])

    @rule(tokens=prompts, root=roots)
    def publish(self, tokens: list[int], root: bytes) -> None:
        blocks = keys(tokens, root)
        parent = None
        for number, block in enumerate(blocks):
            prefix = (root, tuple(tokens[: (number + 1) * SIZE]))
            node = self.index.child(parent or self.index.root(root), *block)
            assert (node.block_id if node else None) == self.resident.get(prefix)
            if node is None:
                if not self.unused:
                    return
                self.resident[prefix] = self.unused.pop()
                node = self.index.insert(root, parent, block, self.resident[prefix])
            parent = node

    @rule(tokens=prompts, root=roots)
    def match(self, tokens: list[int], root: bytes) -> None:
        expected = []
        for end in range(SIZE, len(tokens) + 1, SIZE):
            block_id = self.resident.get((root, tuple(tokens[:end])))
            if block_id is None:
                break
            expected.append(block_id)
        assert matched(self.index, tokens, root) == expected

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def evict_a_leaf(self, data: st.DataObject) -> None:
        leaves = [
            key
            for key in self.resident
            if not any(
                root == key[0] and len(t) > len(key[1]) and t[: len(key[1])] == key[1] for root, t in self.resident
            )
        ]
        key = data.draw(st.sampled_from(sorted(leaves)))
        block_id = self.resident.pop(key)
        assert self.index.remove(block_id).block_id == block_id
        self.unused.append(block_id)

    @invariant()
    def agrees_with_the_oracle(self) -> None:
        self.index.check_invariants()
        assert len(self.index) == len(self.resident)
        assert all(self.index.has_block(block_id) for block_id in self.resident.values())
        assert not any(self.index.has_block(block_id) for block_id in [*self.unused, NO_BLOCK])
        assert {root for root in (ROOT, OTHER_ROOT) if self.index.root(root)} == {root for root, _ in self.resident}


TestRadixMachine = RadixMachine.TestCase
TestRadixMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
