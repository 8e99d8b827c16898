"""Which sequence holds which KV block of one rank, and what the prefix cache keeps. Numbers only, no tensors.

Every block is in exactly one of three states:

* free: its content means nothing;
* cached: in the radix tree, used by no sequence; can be evicted at any time;
* used: in the block table of one or more sequences (or about to be copied). Leading whole blocks are in the tree and
  can be shared; the blocks behind them belong to one sequence, which is still filling them.

A sequence's block table is [blocks of a path of the tree | its own blocks]. When an own block is full, `commit`
moves it into the tree. If the tree got the same tokens from another sequence meanwhile, the sequence takes over
that block and its own is freed: so a table may change in blocks already computed, and readers must read it anew in
each step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from moe_runtime.core import Sequence
from moe_runtime.engine.radix_tree import Node, PrefixMatch, RadixTree
from moe_runtime.errors import ConfigError


@dataclass(slots=True)
class _Holding:
    """What a sequence holds. The path to `node` makes up the first `node.depth` blocks of its table."""

    node: Node
    num_tokens: int
    """Tokens the table has room for: computed ones, and those of the step being planned."""


class BlockManager:
    """Paged KV accounting of one rank. All counts are in blocks unless they say tokens.

    Only blocks that `num_available` counts may be asked for; the scheduler looks before it asks.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(f"num_kv_blocks={num_blocks}, block_size={block_size}: both must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_queries = 0
        """Prompt tokens looked up in the prefix cache, first admissions only."""
        self.prefix_hits = 0
        """Those found there."""
        self._tree = RadixTree(block_size)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held: dict[Sequence, _Holding] = {}
        self._copies: list[tuple[int, int]] = []
        self._copy_sources: list[Node] = []

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that only the prefix cache keeps; they can be evicted."""
        return self._tree.num_idle

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold, and sources of copies until the step is done."""
        return self.num_blocks - self.num_available

    @property
    def num_available(self) -> int:
        """Blocks that can be had now: free ones, and cached ones by eviction."""
        return len(self._free) + self._tree.num_idle

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose KV fits in the whole cache."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def match(self, seq: Sequence) -> PrefixMatch:
        """The longest cached prefix of the sequence's tokens. Changes nothing.

        The last token is left out: it has to be computed to know what comes after it.
        """
        tokens = seq.token_ids if seq.output_token_ids else seq.prompt_token_ids
        return self._tree.match(tokens, len(tokens) - 1)

    def shareable_only(self, match: PrefixMatch) -> PrefixMatch:
        """The match without its part block, for when there is no room for source and copy at once."""
        return replace(match, num_tokens=match.node.depth * self.block_size, source=None)

    def admit(self, seq: Sequence, match: PrefixMatch) -> None:
        """Give a sequence its matched prefix: whole blocks shared, a part block copied into a fresh one.

        `match` must be of this moment. Sets block_table, num_computed_tokens and, the first time,
        num_cached_tokens. The source of a copy stays in use until `end_step`, so that in the same step nobody else
        gets it, neither to write to nor as the destination of another copy.
        """
        assert seq not in self._held
        seq.block_table = self._tree.acquire_path(match.node)
        seq.num_computed_tokens = match.num_tokens
        self._held[seq] = _Holding(match.node, match.num_tokens)
        if match.source is not None:
            self._tree.acquire(match.source)
            self._copy_sources.append(match.source)
            destination = self._take()
            seq.block_table.append(destination)
            self._copies.append((match.source.block, destination))
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = match.num_tokens
            if self.enable_prefix_caching:
                self.prefix_queries += len(seq.prompt_token_ids)
                self.prefix_hits += match.num_tokens

    def grow(self, seq: Sequence, num_tokens: int) -> None:
        """Extend the block table to hold `num_tokens` tokens, and no block more."""
        table = seq.block_table
        while len(table) * self.block_size < num_tokens:
            table.append(self._take())
        self._held[seq].num_tokens = num_tokens
        assert (len(table) - 1) * self.block_size < num_tokens, f"{seq.request_id} wastes a block"

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """(source, destination) of the copies to do before this step's forward pass, in any order."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def end_step(self) -> None:
        """The step has run: copies are done, so their sources may be evicted again."""
        for node in self._copy_sources:
            self._tree.release(node)
        self._copy_sources.clear()

    def commit(self, seq: Sequence) -> None:
        """Make the blocks that the sequence's computed tokens fill shareable. Call after `end_step`."""
        holding, size = self._held[seq], self.block_size
        assert seq.num_computed_tokens == holding.num_tokens
        if not self.enable_prefix_caching:
            return
        for index in range(holding.node.depth, seq.num_computed_tokens // size):
            tokens = tuple(seq.tokens(index * size, (index + 1) * size))
            node, superfluous = self._tree.insert(holding.node, tokens, seq.block_table[index])
            self._tree.acquire(node)
            seq.block_table[index] = node.block
            holding.node = node
            if superfluous is not None:
                self._free.append(superfluous)

    def free(self, seq: Sequence) -> None:
        """Take all blocks from a sequence; what it has computed stays cached until evicted.

        Not for a sequence admitted in a step that has not run yet.
        """
        holding, table, size = self._held.pop(seq), seq.block_table, self.block_size
        own = holding.node.depth
        start = own * size
        if self.enable_prefix_caching and seq.num_computed_tokens > start:
            # The blocks that are full went into the tree in `commit`, so this is part of one block.
            tokens = tuple(seq.tokens(start, seq.num_computed_tokens))
            _, superfluous = self._tree.insert(holding.node, tokens, table[own])
            own += 1
            if superfluous is not None:
                self._free.append(superfluous)
        self._free.extend(table[own:])
        self._tree.release_path(holding.node)
        seq.block_table = []
        seq.num_computed_tokens = 0

    def reset_prefix_cache(self) -> int:
        """Free every cached block that no sequence uses. Returns how many those were."""
        dropped = self._tree.num_idle
        self._free.extend(self._tree.evict() for _ in range(dropped))
        return dropped

    def _take(self) -> int:
        return self._free.pop() if self._free else self._tree.evict()

    def check_integrity(self) -> None:
        """Raise AssertionError, saying what is wrong, unless every block is accounted for exactly once.

        Costs time in proportion to all tokens in the cache; meant for tests and debugging.
        """
        self._tree.check()
        tables = Counter(block for seq in self._held for block in seq.block_table)
        copies = Counter(node.block for node in self._copy_sources)
        roles = Counter(self._free)
        for node in self._tree.nodes():
            roles[node.block] += 1
            users = tables[node.block] + copies[node.block]
            assert node.num_users == users, f"block {node.block}: {node.num_users} counted, {users} users"
        for seq, holding in self._held.items():
            roles.update(seq.block_table[holding.node.depth :])
            self._check_holding(seq, holding)
        wrong = {block: roles[block] for block in range(self.num_blocks) if roles[block] != 1}
        assert not wrong, f"blocks that are lost (0) or in several roles at once: {wrong}"
        assert len(roles) == self.num_blocks, f"unknown blocks: {set(roles) - set(range(self.num_blocks))}"
        used = len(tables.keys() | copies.keys())
        assert used == self.num_used, f"{used} blocks in use, {self.num_used} counted"

    def _check_holding(self, seq: Sequence, holding: _Holding) -> None:
        name, table, size = seq.request_id, seq.block_table, self.block_size
        path = list(self._tree.path(holding.node))[::-1]
        assert table[: len(path)] == [node.block for node in path], f"{name}: table differs from its path"
        known = [token for node in path for token in node.tokens]
        assert known == seq.tokens(0, len(path) * size), f"{name}: its shared blocks hold other tokens"
        room = self.blocks_for(holding.num_tokens)
        assert len(table) == room, (
            f"{name}: {len(table)} blocks for {holding.num_tokens} tokens, {room} needed"
        )
        assert seq.num_computed_tokens <= holding.num_tokens <= seq.num_tokens, (
            f"{name}: room for other tokens"
        )
