"""A radix tree over token ids whose nodes own KV blocks: what the prefix cache knows.

A node stands for the tokens of one block: `block_size` of them, or fewer in a leaf that a finished sequence left
behind. Two ideas keep every operation cheap, whatever the traffic:

* The children of a node are sorted by their tokens. In a sorted list the longest common prefix with any child is
  found beside the place where the query would be inserted, so a lookup costs O(log children), also when thousands
  of siblings share their first tokens.
* Whoever uses a node uses all its ancestors, and releases them from the tail up. So the list of idle nodes, in the
  order of their release, is at once least recently used first and descendants before ancestors: its head is always
  a leaf, and eviction needs no search.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

NO_BLOCK = -1


class Node:
    """The KV of `tokens`, which follow the tokens of all ancestors, in `block`."""

    __slots__ = ("block", "children", "depth", "keys", "num_users", "parent", "tokens")

    def __init__(self, tokens: tuple[int, ...], block: int, parent: Node | None) -> None:
        self.tokens = tokens
        self.block = block
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent is not None else 0
        """Blocks from the start of the sequence to the end of this node."""
        self.num_users = 0
        """Block tables that hold the block, and copies that still have to read it."""
        self.keys: list[tuple[int, ...]] = []
        """The children's tokens, sorted; none is a prefix of another."""
        self.children: list[Node] = []
        """In the order of `keys`."""


@dataclass(frozen=True)
class PrefixMatch:
    """The longest known prefix of some tokens."""

    node: Node
    """End of the part made of whole blocks, which can be shared; the root if there is none."""
    num_tokens: int
    """Tokens matched, those in `source` included."""
    num_idle: int
    """Nodes from the root to `node` that nobody uses now: sharing them makes them unavailable for eviction."""
    source: Node | None = None
    """Its block begins with the rest of the matched tokens, and must be copied to be continued."""


class RadixTree:
    """The tree, its use counts, and the order of eviction. Blocks are numbers owned by the caller."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.root = Node((), NO_BLOCK, None)
        self._idle: OrderedDict[Node, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Nodes without users. All of them can be evicted, one after the other."""
        return len(self._idle)

    def match(self, tokens: Sequence[int], limit: int) -> PrefixMatch:
        """The longest prefix of `tokens[:limit]` in the tree. Changes nothing.

        The length is exact to the token: whole blocks as far as they go, then the child that shares most.
        """
        size = self.block_size
        node, position, num_idle = self.root, 0, 0
        while position + size <= limit:
            key = tuple(tokens[position : position + size])
            at = bisect_left(node.keys, key)
            if at == len(node.keys) or node.keys[at] != key:
                break
            node = node.children[at]
            position += size
            num_idle += node.num_users == 0
        source, shared = _closest_child(node, tuple(tokens[position : min(position + size, limit)]))
        return PrefixMatch(node, position + shared, num_idle, source)

    def insert(self, parent: Node, tokens: tuple[int, ...], block: int) -> tuple[Node, int | None]:
        """Add the KV of `tokens`, in `block`, below `parent`, which must be in use or the root.

        Returns the node that stands for the tokens, and a block that the tree has no use for and the caller must
        free: `block` itself if the tokens were known already (alone or as the start of longer ones), or the block
        of a shorter leaf that the new node makes superfluous. A new node is idle, and the last to be evicted.
        """
        assert 0 < len(tokens) <= self.block_size
        assert parent is self.root or parent.num_users > 0
        at = bisect_left(parent.keys, tokens)
        if at < len(parent.keys) and parent.keys[at][: len(tokens)] == tokens:
            known = parent.children[at]
            if known.num_users == 0:
                self._idle.move_to_end(known)
            return known, block
        superfluous = None
        if at > 0 and tokens[: len(parent.keys[at - 1])] == parent.keys[at - 1]:
            at -= 1
            shorter = parent.children[at]
            # Only whole blocks are ever shared, and a pending copy ends before anything is inserted.
            assert shorter.num_users == 0
            del self._idle[shorter], parent.keys[at], parent.children[at]
            superfluous = shorter.block
        node = Node(tokens, block, parent)
        parent.keys.insert(at, tokens)
        parent.children.insert(at, node)
        self._idle[node] = None
        return node, superfluous

    def acquire(self, node: Node) -> None:
        """Count one more user of a node whose ancestors the same user holds; it cannot be evicted meanwhile."""
        if node.num_users == 0:
            del self._idle[node]
        node.num_users += 1

    def release(self, node: Node) -> None:
        """Undo one `acquire`."""
        assert node.num_users > 0, f"block {node.block} released more often than acquired"
        node.num_users -= 1
        if node.num_users == 0:
            self._idle[node] = None

    def acquire_path(self, node: Node) -> list[int]:
        """Acquire a node and all its ancestors. Returns their blocks, in sequence order."""
        blocks = []
        for step in self.path(node):
            self.acquire(step)
            blocks.append(step.block)
        blocks.reverse()
        return blocks

    def release_path(self, node: Node) -> None:
        """Release a node, then its ancestors, so that the tail of a sequence is evicted before its head."""
        for step in self.path(node):
            self.release(step)

    def path(self, node: Node) -> Iterator[Node]:
        """The node and its ancestors without the root, tail first."""
        step = node
        while step.parent is not None:
            yield step
            step = step.parent

    def evict(self) -> int:
        """Forget the least recently used idle node, always a leaf, and return its block. Needs `num_idle` > 0."""
        node, _ = self._idle.popitem(last=False)
        parent = node.parent
        assert parent is not None
        assert not node.children, f"block {node.block} is idle longer than its continuation"
        at = bisect_left(parent.keys, node.tokens)
        del parent.keys[at], parent.children[at]
        return node.block

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents before children."""
        stack = list(self.root.children)
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)

    def check(self) -> None:
        """Raise AssertionError, with the place, if the structure is unsound."""
        order = {node: at for at, node in enumerate(self._idle)}
        idle = {node for node in self.nodes() if node.num_users == 0}
        assert idle == set(order), "the idle list differs from the nodes without users"
        for node in (self.root, *self.nodes()):
            where = f"node of block {node.block} at depth {node.depth}"
            assert node.keys == [child.tokens for child in node.children], (
                f"{where}: keys differ from children"
            )
            for low, high in zip(node.keys, node.keys[1:], strict=False):
                assert low < high, f"{where}: children out of order: {low}, {high}"
                assert high[: len(low)] != low, f"{where}: child {low} is the start of its sibling {high}"
            for child in node.children:
                assert child.parent is node, f"{where}: a child has another parent"
                assert child.depth == node.depth + 1, f"{where}: a child has depth {child.depth}"
            if node is self.root:
                continue
            assert 0 < len(node.tokens) <= self.block_size, f"{where}: {len(node.tokens)} tokens"
            assert not node.children or len(node.tokens) == self.block_size, (
                f"{where}: a part block has children"
            )
            if node.num_users == 0:
                for child in node.children:
                    assert child.num_users == 0, f"{where}: idle, but its child {child.block} is in use"
                    assert order[child] < order[node], (
                        f"{where}: would be evicted before its child {child.block}"
                    )


def _closest_child(node: Node, tokens: tuple[int, ...]) -> tuple[Node | None, int]:
    """The child that shares the most leading tokens with `tokens`, and how many; (None, 0) if none shares any."""
    at = bisect_left(node.keys, tokens)
    best: Node | None = None
    most = 0
    for index in (at, at - 1):
        if 0 <= index < len(node.keys):
            shared = _common_length(node.keys[index], tokens)
            if shared > most:
                best, most = node.children[index], shared
    return best, most


def _common_length(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    shared = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        shared += 1
    return shared
