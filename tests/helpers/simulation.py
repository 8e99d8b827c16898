"""The scheduler with a simulated model that knows, for every place in the KV cache, which prefix it stands for.

Each token's prefix (the token and all before it) has a number of its own. The simulated cache stores that number per
(block, offset), so a step can check that whatever attention would read is exactly the sequence's own past: any
mix-up by sharing, copying, eviction or preemption shows at the token where it happens.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from moe_runtime.core import SamplingParams, Sequence, SequenceStatus, StepPlan
from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.engine.scheduler import Scheduler

VOCABULARY = 6
EOS = 0


class Prefixes:
    """Numbers prefixes: equal numbers mean equal tokens from the start on."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def extend(self, prefix: int, token: int) -> int:
        return self._numbers.setdefault((prefix, token), len(self._numbers) + 1)


def next_token(tokens: list[int]) -> int:
    """What the simulated model says after `tokens`: arbitrary, but a function of all of them."""
    value = len(tokens)
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % 2_147_483_647
    return value // 7 % VOCABULARY


def lone_run(seq: Sequence, max_model_len: int) -> tuple[list[int], str, int | None]:
    """Output, finish reason and stop reason of a request that has the model to itself."""
    sampling, output = seq.sampling, []
    while True:
        token = next_token(seq.prompt_token_ids + output)
        output.append(token)
        if len(output) >= sampling.min_tokens:
            if token in seq.eos_token_ids and not sampling.ignore_eos:
                return output, "stop", None
            if token in (sampling.stop_token_ids or []):
                return output, "stop", token
        if len(output) == sampling.max_tokens or len(seq.prompt_token_ids) + len(output) == max_model_len:
            return output, "length", None


class Simulation:
    """A scheduler, its block manager, and a model that checks what it would read."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int = 8,
        budget: int = 16,
        max_model_len: int = 64,
        caching: bool = True,
        seed: int = 0,
    ) -> None:
        self.manager = BlockManager(num_blocks, block_size, caching)
        self.scheduler = Scheduler(self.manager, max_num_seqs, budget, max_model_len)
        self.rng = random.Random(seed)
        self.prefixes = Prefixes()
        self.kv: dict[tuple[int, int], int] = {}
        self.finished: dict[str, Sequence] = {}
        self.num_added = 0
        self.num_copied = 0
        self.copy_blocks: Callable[[int, int], None] = self._copy_block

    def add(self, prompt: list[int], max_tokens: int | None = 4, **sampling: object) -> Sequence:
        params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
        seq = Sequence(f"r{self.num_added}", prompt, params, eos_token_ids=(EOS,))
        self.num_added += 1
        self.scheduler.add(seq)
        return seq

    def step(self) -> StepPlan:
        """Schedule, run and commit one step, checking everything on the way."""
        had_work = self.scheduler.has_work
        plan = self.scheduler.schedule()
        self.manager.check_integrity()
        assert bool(plan.scheduled) == had_work
        assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
        assert self.scheduler.num_running <= self.scheduler.max_num_seqs
        # At most the latest of those running, short of blocks, sits out a step.
        assert self.scheduler.num_running - len(plan.scheduled) in (0, 1)
        assert all(entry.samples for entry in plan.scheduled[:-1]), (
            "somebody waits behind an unfinished prompt"
        )
        sampled = self.run_model(plan)
        for seq in self.scheduler.commit(plan, sampled):
            assert seq.status is SequenceStatus.FINISHED
            self.finished[seq.request_id] = seq
        self.manager.check_integrity()
        self.forget_free_blocks()
        return plan

    def run_model(self, plan: StepPlan) -> list[int]:
        self.num_copied += len(plan.block_copies)
        # In any order, as a kernel might do it: no copy may read what another one writes.
        for source, destination in self.rng.sample(plan.block_copies, len(plan.block_copies)):
            self.copy_blocks(source, destination)
        written: set[tuple[int, int]] = set()
        for entry in plan.scheduled:
            seq, stop = entry.sequence, entry.start + entry.num_new_tokens
            assert entry.num_new_tokens > 0
            assert len(seq.block_table) == self.manager.blocks_for(stop), "a block is wasted"
            for position, prefix in enumerate(self.prefix_numbers(seq, stop)):
                place = self.place(seq, position)
                if position >= entry.start:
                    assert place not in written, f"{seq.request_id}: position {position} is written twice"
                    written.add(place)
                    self.kv[place] = prefix
        for entry in plan.scheduled:
            seq, stop = entry.sequence, entry.start + entry.num_new_tokens
            for position, prefix in enumerate(self.prefix_numbers(seq, stop)):
                found = self.kv.get(self.place(seq, position))
                assert found == prefix, f"{seq.request_id}: position {position} holds something else"
        return [next_token(entry.sequence.token_ids) for entry in plan.scheduled if entry.samples]

    def prefix_numbers(self, seq: Sequence, stop: int) -> list[int]:
        numbers, prefix = [], 0
        for token in seq.tokens(0, stop):
            prefix = self.prefixes.extend(prefix, token)
            numbers.append(prefix)
        return numbers

    def place(self, seq: Sequence, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self.manager.block_size)
        return seq.block_table[block], offset

    def _copy_block(self, source: int, destination: int) -> None:
        for offset in range(self.manager.block_size):
            self.kv[destination, offset] = self.kv.get((source, offset), -1)

    def forget_free_blocks(self) -> None:
        for block in self.manager._free:
            for offset in range(self.manager.block_size):
                self.kv.pop((block, offset), None)

    def run(self) -> list[StepPlan]:
        """Steps until there is no work."""
        plans = []
        while self.scheduler.has_work:
            plans.append(self.step())
            assert len(plans) < 5000
        return plans

    def assert_as_alone(self, seq: Sequence) -> None:
        expected = lone_run(seq, self.scheduler.max_model_len)
        assert (seq.output_token_ids, seq.finish_reason, seq.stop_reason) == expected

    def assert_nothing_leaked(self) -> None:
        assert self.manager.num_used == 0
        self.manager.reset_prefix_cache()
        assert self.manager.num_free == self.manager.num_blocks
        self.manager.check_integrity()


def random_prompt(rng: random.Random, earlier: list[Sequence], longest: int) -> list[int]:
    """Often the start of an earlier request, perhaps with its answer, cut anywhere, with something new behind it."""
    base: list[int] = []
    if earlier and rng.random() < 0.75:
        base = rng.choice(earlier).token_ids
        base = base[: rng.randrange(len(base) + 1)]
    fresh = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, longest))]
    return (base + fresh)[:longest]
