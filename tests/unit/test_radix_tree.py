"""The radix tree against a list of everything it should know, and its promises about cost and order."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest

from moe_runtime.engine.radix_tree import Node, RadixTree


def common_length(a: list[int], b: list[int]) -> int:
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    return shared


def path_tokens(tree: RadixTree, node: Node) -> list[int]:
    return [token for step in reversed(list(tree.path(node))) for token in step.tokens]


class Owner:
    """Inserts sequences, hands out block numbers, and knows which blocks the tree must own."""

    def __init__(self, block_size: int) -> None:
        self.tree = RadixTree(block_size)
        self.next_block = 0
        self.owned: set[int] = set()

    def insert(self, tokens: list[int]) -> Node:
        """Insert a sequence block by block; it holds the path to the last whole block, which is returned."""
        size, node = self.tree.block_size, self.tree.root
        for start in range(0, len(tokens), size):
            part = tuple(tokens[start : start + size])
            block, self.next_block = self.next_block, self.next_block + 1
            self.owned.add(block)
            found, superfluous = self.tree.insert(node, part, block)
            assert found.tokens[: len(part)] == part
            if superfluous is not None:
                self.owned.remove(superfluous)
            if len(part) == size:
                self.tree.acquire(found)
                node = found
        return node

    def store(self, tokens: list[int]) -> None:
        self.tree.release_path(self.insert(tokens))

    def evict(self) -> None:
        self.owned.remove(self.tree.evict())

    def check(self) -> None:
        self.tree.check()
        blocks = [node.block for node in self.tree.nodes()]
        assert len(blocks) == len(set(blocks))
        assert set(blocks) == self.owned


@pytest.mark.parametrize("block_size", [1, 2, 3, 5])
def test_random_operations_agree_with_brute_force(seed: int, block_size: int) -> None:
    rng = random.Random(seed)
    owner = Owner(block_size)
    tree = owner.tree
    held: list[Node] = []
    for _ in range(250):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
        action = rng.random()
        if action < 0.35:
            owner.store(tokens)
        elif action < 0.5:
            held.append(owner.insert(tokens))
        elif action < 0.65 and held:
            tree.release_path(held.pop(rng.randrange(len(held))))
        elif action < 0.8 and tree.num_idle:
            owner.evict()
        owner.check()

        known = [path_tokens(tree, node) for node in tree.nodes()]
        limit = rng.randrange(len(tokens) + 1)
        match = tree.match(tokens, limit)
        assert match.num_tokens == max((common_length(tokens[:limit], path) for path in known), default=0)
        whole = path_tokens(tree, match.node)
        assert whole == tokens[: len(whole)]
        assert len(whole) == match.node.depth * block_size
        assert match.num_idle == sum(node.num_users == 0 for node in tree.path(match.node))
        assert (match.source is None) == (match.num_tokens == len(whole))
        if match.source is not None:
            assert match.source.parent is match.node
            rest = tokens[len(whole) : match.num_tokens]
            assert list(match.source.tokens[: len(rest)]) == rest

    for node in held:
        tree.release_path(node)
    while tree.num_idle:
        owner.evict()
        owner.check()
    assert not owner.owned


def test_least_recently_used_goes_first_and_tails_before_heads() -> None:
    owner = Owner(2)
    for tokens in ([1, 1, 2, 2, 3, 3], [5, 5, 6], [1, 1, 7, 7]):  # blocks 0 1 2, 3 4, (5 = again 0) 6
        owner.store(tokens)
    tree = owner.tree
    # Using [1 1 2 2] makes it the youngest; [3 3] is the oldest, and [1 1] has to outlive all its continuations.
    node = tree.match([1, 1, 2, 2, 9], 5).node
    assert tree.acquire_path(node) == [0, 1]
    tree.release_path(node)
    assert [tree.evict() for _ in range(tree.num_idle)] == [2, 4, 3, 6, 1, 0]


def test_a_node_in_use_is_not_evicted() -> None:
    owner = Owner(2)
    owner.store([4, 4, 8])
    holder = owner.insert([1, 2, 3, 4])
    assert owner.tree.num_idle == 2
    owner.evict()
    owner.evict()
    assert owner.tree.num_idle == 0
    assert owner.tree.match([1, 2, 3, 4, 5], 5).num_tokens == 4
    owner.tree.release_path(holder)
    assert owner.tree.num_idle == 2
    owner.check()


def test_a_longer_leaf_replaces_a_shorter_one_and_covers_later_ones() -> None:
    tree = RadixTree(4)
    first, superfluous = tree.insert(tree.root, (1, 2), 10)
    assert superfluous is None
    longer, superfluous = tree.insert(tree.root, (1, 2, 3), 11)
    assert superfluous == 10
    assert longer is not first
    again, superfluous = tree.insert(tree.root, (1,), 12)
    assert (again, superfluous) == (longer, 12)
    tree.insert(tree.root, (1, 2, 9), 13)
    tree.check()
    assert sorted(node.block for node in tree.nodes()) == [11, 13]


def test_renewed_tokens_count_as_used_recently() -> None:
    for known in ([1, 1], [1]):
        owner = Owner(2)
        for tokens in (known, [2, 2], known):
            owner.store(tokens)
        assert owner.tree.evict() == 1


class CountedKey(tuple[int, ...]):
    """Counts how often keys are compared."""

    comparisons: ClassVar[int] = 0

    def __lt__(self, other: tuple[int, ...]) -> bool:
        CountedKey.comparisons += 1
        return tuple(self) < tuple(other)


def test_many_siblings_with_a_common_start_are_searched_in_logarithmic_steps(seed: int) -> None:
    rng = random.Random(seed)
    tree = RadixTree(8)
    suffixes = rng.sample(range(10**6), 5000)
    for block, suffix in enumerate(suffixes):
        tree.insert(tree.root, CountedKey((7, 7, 7, 7, 7, 7, suffix, 1)), block)
    wanted = rng.randrange(5000)
    CountedKey.comparisons = 0
    match = tree.match([7, 7, 7, 7, 7, 7, suffixes[wanted], 2, 0], 9)
    assert match.num_tokens == 7
    assert match.source is not None
    assert match.source.block == wanted
    assert 0 < CountedKey.comparisons < 40


def test_a_very_long_path_needs_no_recursion() -> None:
    length = 30_000
    owner = Owner(1)
    tokens = [index % 3 for index in range(length)]
    owner.store(tokens)
    owner.check()
    match = owner.tree.match(tokens, length - 1)
    assert match.num_tokens == match.node.depth == match.num_idle == length - 1
    assert [owner.tree.evict() for _ in range(3)] == [length - 1, length - 2, length - 3]


def test_check_notices_damage() -> None:
    owner = Owner(2)
    node = owner.insert([1, 2, 3, 4, 5])
    node.num_users = 0
    with pytest.raises(AssertionError, match="idle"):
        owner.tree.check()
    node.num_users = 1
    owner.tree.check()
    node.keys[0] = (9,)
    with pytest.raises(AssertionError, match="keys differ"):
        owner.tree.check()
