"""A running engine whose experts move while requests with known answers run."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_runtime import SamplingParams
from moe_runtime.config import EngineConfig
from moe_runtime.engine.async_llm import AsyncLLM
from moe_runtime.engine.rebalance_request import Rebalanced

WORKER = "tests.helpers.faulty_rank"
NUM_TOKENS = 12
Slots = list[list[list[int]]]
Floats = list[tuple[int, list[tuple[int, int, float]]]]


@dataclass
class Bed:
    """A running engine and prompts whose answers are known."""

    llm: AsyncLLM
    prompts: list[list[int]]
    want: list[Floats]
    draw: random.Random

    async def one(self, index: int) -> Floats:
        params = SamplingParams(
            temperature=0.7 * (index % 2), seed=index, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2
        )
        output = await self.llm.complete(self.prompts[index], params)
        (completion,) = output.outputs
        assert completion.logprobs is not None
        return [
            (token, sorted((t, p.rank, p.logprob) for t, p in logprobs.items()))
            for token, logprobs in zip(completion.token_ids, completion.logprobs, strict=True)
        ]

    async def all(self) -> list[Floats]:
        return list(await asyncio.gather(*(self.one(i) for i in range(len(self.prompts)))))

    async def storm(self, until: asyncio.Event) -> int:
        """Requests without a pause, a few at a time; each must give the known floats. How many there were."""
        count = 0
        while not until.is_set():
            some = [self.draw.randrange(len(self.prompts)) for _ in range(4)]
            for index, got in zip(some, await asyncio.gather(*(self.one(i) for i in some)), strict=True):
                assert got == self.want[index], f"prompt {index} changed"
                count += 1
        return count

    async def during(self, work: Coroutine[Any, Any, Rebalanced]) -> tuple[Rebalanced, int]:
        """The outcome of a move, and how many requests ended meanwhile."""
        over = asyncio.Event()
        storm = asyncio.create_task(self.storm(over))
        try:
            outcome = await work
        finally:
            over.set()
            count = await storm
        return outcome, count

    def placement(self) -> Slots:
        """What all ranks say."""
        placements = [news.slots for news in self.llm.placements if news is not None]
        assert len(placements) == len(self.llm.ready)
        assert all(p == placements[0] for p in placements)
        return placements[0]

    def another(self) -> Slots:
        """A random placement that is not the one in force, with as many experts on each rank as there are now."""
        while True:
            layers = [self._random_layer(layer) for layer in self.placement()]
            if held(layers) != held(self.placement()):
                return layers

    def _random_layer(self, layer: list[list[int]]) -> list[list[int]]:
        sizes = [sum(e >= 0 for e in rank) for rank in layer]
        everyone = set().union(*layer) - {-1}
        while True:
            ranks = [self.draw.sample(sorted(everyone), size) for size in sizes]
            if set().union(*ranks) == everyone:
                return ranks


def held(slots: Slots) -> list[list[set[int]]]:
    """Which experts each rank has; the slot does not matter."""
    return [[set(rank) - {-1} for rank in layer] for layer in slots]


@asynccontextmanager
async def bed(folder: Path, seed: int, ep: int, vocab: int, **settings: Any) -> AsyncIterator[Bed]:
    draw = random.Random(seed)
    eplb = {"max_bytes_per_step": 8192, "step_interval": 10**6} | settings.pop("eplb", {})
    flags: dict[str, Any] = {
        "deterministic": True, "max_model_len": 64, "num_kv_blocks": 300, "block_size": 4, "max_num_batched_tokens": 32,
        "skip_tokenizer_init": True, "enable_eplb": True, "eplb_config": json.dumps(eplb),
    }  # fmt: skip
    config = EngineConfig(model=str(folder), ep=ep, **(flags | settings))
    llm = await AsyncLLM.from_config(config, limit_queue=False, worker=WORKER)
    try:
        prompts = [[draw.randrange(vocab) for _ in range(draw.randint(1, 30))] for _ in range(12)]
        made = Bed(llm, prompts, [], draw)
        made.want = await made.all()
        yield made
    finally:
        await llm.close()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 240))
