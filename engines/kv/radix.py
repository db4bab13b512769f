"""The prefix index: a radix tree over token blocks that finds the longest resident prefix of a prompt.

One node a block. A node is named by its chained hash (`engines/text/block_hash.py`), which is what routers are told; a
lookup walks down from the root of its trust group and compares the tokens of every node it enters, so that a hash
collision is a miss, never another prompt's KV. Trust groups have different roots, hence never meet.

    root(salt, digest) ── [t0..t15] ── [t16..t31] ── ...
                              └─────── [t16'..t31'] ── ...

Runs of single children are not merged into one node: blocks are published, shared and evicted one by one, so a merged
node would be split as often as it is made.

Knows nothing of reference counts and eviction order (the pool's) or of tensors.

Read next: `engines/kv/pool.py`, `engines/kv/manager.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

NO_BLOCK = -1


class RadixNode:
    """One resident block, or the root of a trust group (`block_id` NO_BLOCK). `tokens`: u32 LE each."""

    __slots__ = ("block_id", "children", "hash", "parent", "tokens")

    def __init__(self, block_hash: bytes, tokens: bytes, block_id: int, parent: RadixNode | None) -> None:
        self.hash = block_hash
        self.tokens = tokens
        self.block_id = block_id
        self.parent = parent
        self.children: dict[bytes, RadixNode] = {}


class RadixIndex:
    """Resident blocks by prefix. Mutated by `insert` and `remove` only; a node is valid until it is removed."""

    def __init__(self) -> None:
        self._roots: dict[bytes, RadixNode] = {}
        self._by_hash: dict[bytes, RadixNode] = {}
        self._by_block: dict[int, RadixNode] = {}

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._by_block)

    def match(self, root: bytes, blocks: Iterable[tuple[bytes, bytes]]) -> list[RadixNode]:
        """Nodes of the longest resident prefix, first block first.

        `blocks`: (hash, tokens) in order; consumed only as far as it matches.
        """
        path: list[RadixNode] = []
        node = self._roots.get(root)
        for block_hash, tokens in blocks:
            node = self.child(node, block_hash, tokens)
            if node is None:
                break
            path.append(node)
        return path

    def child(self, parent: RadixNode | None, block_hash: bytes, tokens: bytes) -> RadixNode | None:
        """The block of this name and these tokens below `parent`."""
        node = parent.children.get(block_hash) if parent is not None else None
        return node if node is not None and node.tokens == tokens else None

    def insert(self, root: bytes, parent: RadixNode | None, block: tuple[bytes, bytes], block_id: int) -> RadixNode:
        """Add (hash, tokens) below `parent` (None: first block of trust group `root`). Its name must be free."""
        block_hash, tokens = block
        assert block_hash not in self._by_hash, "this name is in use: ask child() and has_name() first"
        assert block_id not in self._by_block, f"block {block_id} is indexed already"
        if parent is None:
            parent = self._roots.setdefault(root, RadixNode(root, b"", NO_BLOCK, None))
        node = RadixNode(block_hash, tokens, block_id, parent)
        parent.children[block_hash] = node
        self._by_hash[block_hash] = node
        self._by_block[block_id] = node
        return node

    def remove(self, block_id: int) -> RadixNode:
        """Forget a leaf and return it. Eviction reaches leaves first: a sequence releases its tail before its head."""
        node = self._by_block[block_id]
        assert not node.children, f"block {block_id} still has {len(node.children)} children"
        parent = node.parent
        assert parent is not None, "a root backs no block"
        del parent.children[node.hash], self._by_hash[node.hash], self._by_block[block_id]
        if parent.block_id == NO_BLOCK and not parent.children:
            del self._roots[parent.hash]
        return node

    def root(self, root: bytes) -> RadixNode | None:
        """Where a trust group's blocks hang, if it has any."""
        return self._roots.get(root)

    def has_name(self, block_hash: bytes) -> bool:
        """True if some block goes by this name, be it by other tokens."""
        return block_hash in self._by_hash

    def has_block(self, block_id: int) -> bool:
        """True if this block can be found."""
        return block_id in self._by_block

    def check_invariants(self) -> None:
        """Names, blocks and links agree; nothing hangs in the air. Raises AssertionError."""
        reached: set[int] = set()
        stack = list(self._roots.values())
        for root_name, root in self._roots.items():
            assert (root.hash, root.block_id, root.parent) == (root_name, NO_BLOCK, None)
            assert root.children, "a trust group without blocks was kept"
        while stack:
            node = stack.pop()
            for name, child in node.children.items():
                assert child.parent is node
                assert child.hash == name
                assert self._by_hash[name] is child
                assert self._by_block[child.block_id] is child
                assert child.block_id not in reached, f"block {child.block_id} is reached twice"
                reached.add(child.block_id)
                stack.append(child)
        assert reached == set(self._by_block), "an orphan: its parent was evicted first"
        assert len(self._by_hash) == len(self._by_block)
