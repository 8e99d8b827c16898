"""Paged KV accounting: sharing, copies, eviction and the integrity check."""

from __future__ import annotations

import random
from collections.abc import Sequence as TokenIds

import pytest

from moe_runtime.core import SamplingParams, Sequence
from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.errors import ConfigError


def make(prompt: TokenIds[int], request_id: str = "r") -> Sequence:
    return Sequence(request_id, list(prompt), SamplingParams())


def start(manager: BlockManager, seq: Sequence) -> tuple[tuple[int, int], ...]:
    """Admit a sequence and give it blocks for all its tokens; returns the copies."""
    manager.admit(seq, manager.match(seq))
    manager.grow(seq, seq.num_tokens)
    manager.check_integrity()
    return manager.take_copies()


def finish_step(manager: BlockManager, *seqs: Sequence) -> None:
    manager.end_step()
    for seq in seqs:
        seq.num_computed_tokens = seq.num_tokens
        manager.commit(seq)
        manager.check_integrity()


def store(manager: BlockManager, prompt: TokenIds[int]) -> list[int]:
    """Compute a prompt and let go of it. Returns the blocks it had."""
    seq = make(prompt)
    start(manager, seq)
    finish_step(manager, seq)
    blocks = list(seq.block_table)
    manager.free(seq)
    manager.check_integrity()
    return blocks


def test_counts_and_waste() -> None:
    manager = BlockManager(10, 4)
    seq = make(range(9))
    start(manager, seq)
    assert (len(seq.block_table), manager.num_free, manager.num_cached, manager.num_used) == (3, 7, 0, 3)
    finish_step(manager, seq)
    seq.output_token_ids += [70, 71, 72, 73]
    for length in range(10, 14):
        manager.grow(seq, length)
        assert len(seq.block_table) == -(-length // 4)
        seq.num_computed_tokens = length
        manager.commit(seq)
        manager.check_integrity()
    manager.free(seq)
    manager.check_integrity()
    assert (seq.block_table, seq.num_computed_tokens) == ([], 0)
    assert (manager.num_free, manager.num_cached, manager.num_used) == (6, 4, 0)
    assert manager.reset_prefix_cache() == 4
    assert (manager.num_free, manager.num_cached) == (10, 0)
    manager.check_integrity()


def test_a_prefix_is_reused_to_the_token() -> None:
    manager = BlockManager(12, 4)
    blocks = store(manager, range(11))
    seq = make([0, 1, 2, 3, 4, 5, 6, 99, 98, 97])
    copies = start(manager, seq)
    assert seq.num_computed_tokens == seq.num_cached_tokens == 7
    assert seq.block_table[0] == blocks[0]
    assert copies == ((blocks[1], seq.block_table[1]),)
    assert seq.block_table[1] not in blocks
    assert (manager.prefix_queries, manager.prefix_hits) == (21, 7)


@pytest.mark.parametrize("length", [1, 4, 5, 8])
def test_one_token_of_a_known_prompt_is_still_computed(length: int) -> None:
    manager = BlockManager(8, 4)
    store(manager, range(length))
    seq = make(range(length))
    start(manager, seq)
    assert seq.num_computed_tokens == length - 1
    finish_step(manager, seq)
    manager.free(seq)
    assert manager.num_cached == manager.blocks_for(length)


def test_the_tail_of_a_finished_sequence_is_reused() -> None:
    manager = BlockManager(8, 4)
    blocks = store(manager, [1, 2, 3, 4, 5, 6])
    seq = make([1, 2, 3, 4, 5, 6, 7, 8, 9])
    copies = start(manager, seq)
    assert seq.num_computed_tokens == 6
    assert copies == ((blocks[1], seq.block_table[1]),)
    finish_step(manager, seq)
    # The shorter tail is now the start of a whole block, and worth nothing any more.
    assert manager.num_cached == 0
    assert manager.num_free == 5


def test_the_source_of_a_copy_survives_until_the_step_is_done() -> None:
    manager = BlockManager(4, 4)
    (source,) = store(manager, [1, 2, 3, 4])
    seq = make([1, 2, 9])
    copies = start(manager, seq)
    assert copies == ((source, seq.block_table[0]),)
    other = make([50] * 8, "other")
    start(manager, other)
    assert source not in other.block_table
    assert manager.num_available == 0
    finish_step(manager, seq, other)
    assert manager.num_available == 1
    third = make([60, 61], "third")
    start(manager, third)
    assert third.block_table == [source]


def test_the_same_prompt_computed_twice_at_once_ends_in_shared_blocks() -> None:
    manager = BlockManager(10, 4)
    one, two = make(range(10), "one"), make(range(10), "two")
    start(manager, one)
    start(manager, two)
    assert manager.num_used == 6
    finish_step(manager, one, two)
    assert one.block_table[:2] == two.block_table[:2]
    assert one.block_table[2] != two.block_table[2]
    assert manager.num_used == 4
    for seq in (one, two):
        manager.free(seq)
        manager.check_integrity()
    assert (manager.num_cached, manager.num_free) == (3, 7)


def test_blocks_of_a_running_sequence_can_be_shared_at_once() -> None:
    manager = BlockManager(10, 4)
    one = make(range(10), "one")
    start(manager, one)
    finish_step(manager, one)
    two = make([*range(9), 77], "two")
    copies = start(manager, two)
    # The last, part block of a running sequence is still being filled, and not offered.
    assert (two.num_cached_tokens, copies) == (8, ())
    finish_step(manager, two)
    assert two.block_table[:2] == one.block_table[:2]
    assert manager.num_used == 4
    manager.free(one)
    manager.check_integrity()
    assert manager.num_used == 3


def test_cached_blocks_give_way_oldest_first_and_used_ones_never() -> None:
    manager = BlockManager(6, 2)
    oldest = store(manager, [1, 1])
    newest = store(manager, [2, 2, 2, 2])
    running = make([3, 3, 3], "running")
    start(manager, running)
    finish_step(manager, running)
    assert (manager.num_free, manager.num_cached) == (1, 3)
    greedy = make([4] * 8, "greedy")
    start(manager, greedy)
    assert manager.num_available == 0
    assert set(greedy.block_table) >= {*oldest, *newest}
    assert not set(greedy.block_table) & set(running.block_table)


def test_without_prefix_caching_nothing_is_kept() -> None:
    manager = BlockManager(4, 4, enable_prefix_caching=False)
    store(manager, range(9))
    assert (manager.num_free, manager.num_cached) == (4, 0)
    seq = make(range(9))
    assert start(manager, seq) == ()
    assert seq.num_cached_tokens == 0
    assert (manager.prefix_queries, manager.prefix_hits) == (0, 0)


def test_only_the_first_admission_counts_as_reuse() -> None:
    manager = BlockManager(8, 4)
    seq = make(range(10))
    start(manager, seq)
    finish_step(manager, seq)
    manager.free(seq)
    seq.num_preemptions = 1
    start(manager, seq)
    assert seq.num_computed_tokens == 9
    assert seq.num_cached_tokens == 0
    assert (manager.prefix_queries, manager.prefix_hits) == (10, 0)


def test_random_prompts_are_matched_as_far_as_any_earlier_one_goes(seed: int) -> None:
    """With room for everything, reuse is the longest common prefix with anything stored before."""
    rng = random.Random(seed)
    for block_size in (1, 3, 16):
        manager = BlockManager(4000, block_size)
        stored: list[list[int]] = []
        for _ in range(60):
            base = rng.choice(stored)[: rng.randrange(40)] if stored else []
            prompt = [*base, *(rng.randrange(3) for _ in range(rng.randrange(1, 20)))]
            expected = 0
            for other in stored:
                shared = 0
                while shared < min(len(other), len(prompt) - 1) and other[shared] == prompt[shared]:
                    shared += 1
                expected = max(expected, shared)
            assert manager.match(make(prompt)).num_tokens == expected
            store(manager, prompt)
            stored.append(prompt)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_sizes_must_be_positive(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"num_kv_blocks={num_blocks}, block_size={block_size}"):
        BlockManager(num_blocks, block_size)


def test_the_integrity_check_notices_damage() -> None:
    manager = BlockManager(8, 4)
    seq = make(range(6))
    start(manager, seq)
    finish_step(manager, seq)
    lost = manager._free.pop()
    with pytest.raises(AssertionError, match=rf"\{{{lost}: 0\}}"):
        manager.check_integrity()
    manager._free += [lost, seq.block_table[1]]
    with pytest.raises(AssertionError, match=rf"\{{{seq.block_table[1]}: 2\}}"):
        manager.check_integrity()
    manager._free.pop()
    manager.check_integrity()
    seq.prompt_token_ids[1] = 99
    with pytest.raises(AssertionError, match="other tokens"):
        manager.check_integrity()


def test_tokens_slices_prompt_and_output(seed: int) -> None:
    rng = random.Random(seed)
    seq = make(range(rng.randrange(1, 9)))
    seq.output_token_ids = list(range(100, 100 + rng.randrange(9)))
    for begin in range(seq.num_tokens + 2):
        for end in range(begin, seq.num_tokens + 2):
            assert seq.tokens(begin, end) == seq.token_ids[begin:end]
