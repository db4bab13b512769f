"""The prefix index: a radix tree over token blocks that finds the longest resident prefix of a prompt.

One node a block; an edge is the block's tokens. A node's name is its chained hash (`engines/text/block_hash.py`), so a
lookup walks hashes, and a hit compares tokens too: a hash collision is a miss, never another prompt's KV. Trust groups
have different root hashes and so never meet.

    root(salt, digest) ── [t0..t15] ── [t16..t31] ── ...
                              └─────── [t16'..t31'] ── ...

Knows nothing of reference counts (the pool's) or of tensors.

Read next: `engines/kv/manager.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

TokenBlock = tuple[int, ...]


class RadixNode:
    """One resident block. `parent` is None for a first block; `children` are by hash."""

    __slots__ = ("block_id", "children", "hash", "parent", "root", "tokens")

    def __init__(
        self, block_hash: bytes, tokens: TokenBlock, block_id: int, parent: RadixNode | None, root: bytes
    ) -> None:
        self.hash = block_hash
        self.tokens = tokens
        self.block_id = block_id
        self.parent = parent
        self.root = root
        self.children: dict[bytes, RadixNode] = {}

    @property
    def parent_hash(self) -> bytes:
        """Hash of the block before it, or of the root."""
        return self.root if self.parent is None else self.parent.hash


class RadixIndex:
    """Resident blocks by prefix. Mutated by `insert` and `remove` only; lookups change nothing."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, RadixNode] = {}
        self._by_block: dict[int, RadixNode] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, hashes: Sequence[bytes], blocks: Sequence[TokenBlock]) -> list[RadixNode]:
        """Nodes of the longest prefix that is resident, first block first. O(blocks matched)."""
        path: list[RadixNode] = []
        for block_hash, tokens in zip(hashes, blocks, strict=False):
            node = self._nodes.get(block_hash)
            if node is None or node.tokens != tokens:
                break
            path.append(node)
        return path

    def find(self, block_hash: bytes, tokens: TokenBlock) -> RadixNode | None:
        """The node of this name and these tokens."""
        node = self._nodes.get(block_hash)
        return node if node is not None and node.tokens == tokens else None

    def taken(self, block_hash: bytes) -> bool:
        """True if the name is in use, be it by other tokens."""
        return block_hash in self._nodes

    def insert(
        self, block_hash: bytes, tokens: TokenBlock, block_id: int, parent: RadixNode | None, root: bytes
    ) -> RadixNode:
        """Add a block below `parent`. The name must not be taken and the block not be indexed."""
        assert block_hash not in self._nodes, "this prefix is indexed already: find() first"
        assert block_id not in self._by_block, f"block {block_id} is indexed already"
        node = RadixNode(block_hash, tokens, block_id, parent, root)
        if parent is not None:
            parent.children[block_hash] = node
        self._nodes[block_hash] = node
        self._by_block[block_id] = node
        return node

    def node_of(self, block_id: int) -> RadixNode | None:
        """The node that a block backs, if it is indexed."""
        return self._by_block.get(block_id)

    def remove(self, block_id: int) -> RadixNode:
        """Forget a leaf. The pool evicts leaves first, because a sequence releases its tail before its head."""
        node = self._by_block[block_id]
        assert not node.children, f"block {block_id} still has {len(node.children)} children"
        if node.parent is not None:
            del node.parent.children[node.hash]
        del self._by_block[block_id]
        del self._nodes[node.hash]
        return node

    def check_invariants(self) -> None:
        """Names, blocks and links agree. Raises AssertionError."""
        assert len(self._nodes) == len(self._by_block)
        for block_hash, node in self._nodes.items():
            assert node.hash == block_hash
            assert self._by_block[node.block_id] is node
            if node.parent is not None:
                assert self._nodes[node.parent.hash] is node.parent, "an orphan: its parent was evicted first"
                assert node.parent.children[block_hash] is node
                assert node.parent.root == node.root
            assert all(child.parent is node for child in node.children.values())
