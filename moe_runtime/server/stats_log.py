"""The throughput line: what the ranks did since the last one, summed over them. Nothing is said while nothing runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from moe_runtime.engine.messages import RankStats

logger = logging.getLogger(__name__)


async def log_stats(stats: Callable[[], Sequence[RankStats]], interval_s: float) -> None:
    """Log a line every `interval_s` seconds in which there was work, until cancelled."""
    before, since = list(stats()), time.perf_counter()
    while True:
        await asyncio.sleep(interval_s)
        now, at = list(stats()), time.perf_counter()
        line = throughput_line(before, now, at - since)
        if line is not None:
            logger.info("%s", line)
        before, since = now, at


def throughput_line(before: Sequence[RankStats], now: Sequence[RankStats], seconds: float) -> str | None:
    """Rates between two readings of all ranks; None if nothing ran.

    A prompt counts when its first token is sampled. KV-cache usage is the share of all ranks' blocks that sequences hold,
    the hit rate that of prompt tokens since the start.
    """

    def total(name: str, of: Sequence[RankStats] = now) -> int:
        return sum(getattr(rank, name) for rank in of)

    prompt, generated = (total(n) - total(n, before) for n in ("prompt_tokens", "generation_tokens"))
    running, waiting = total("num_running"), total("num_waiting")
    if not (prompt or generated or running or waiting):
        return None
    free = total("num_free_blocks") + total("num_cached_blocks")
    usage = 1.0 - free / max(total("num_blocks"), 1)
    hit_rate = total("prefix_hits") / max(total("prefix_queries"), 1)
    return (
        f"Avg prompt throughput: {prompt / seconds:.1f} tokens/s,"
        f" Avg generation throughput: {generated / seconds:.1f} tokens/s,"
        f" Running: {running} reqs, Waiting: {waiting} reqs,"
        f" KV cache usage: {usage:.1%}, Prefix cache hit rate: {hit_rate:.1%}"
    )
