"""The throughput line: its arithmetic, and when the front-end writes it."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from typing import TYPE_CHECKING

import httpx
import pytest

from moe_runtime.engine.messages import RankStats
from moe_runtime.server.stats_log import log_stats, throughput_line
from tests.helpers.live_server import LiveServer, make_folder

if TYPE_CHECKING:
    from pathlib import Path

LINE = re.compile(
    r"Avg prompt throughput: ([\d.]+) tokens/s, Avg generation throughput: ([\d.]+) tokens/s, Running: (\d+) reqs,"
    r" Waiting: (\d+) reqs, KV cache usage: ([\d.]+)%, Prefix cache hit rate: ([\d.]+)%"
)


def test_rates_are_sums_over_ranks(seed: int) -> None:
    draw = random.Random(seed)
    before = [
        RankStats(prompt_tokens=draw.randrange(99), generation_tokens=draw.randrange(99)) for _ in range(3)
    ]
    prompt, generated, seconds = draw.randint(1, 999), draw.randint(1, 999), draw.uniform(0.5, 20)
    now = [
        RankStats(
            num_running=1,
            num_waiting=rank,
            num_blocks=10,
            num_free_blocks=rank,
            num_cached_blocks=3,
            prompt_tokens=before[rank].prompt_tokens + (prompt if rank == 1 else 0),
            generation_tokens=before[rank].generation_tokens + (generated if rank == 2 else 0),
            prefix_queries=40,
            prefix_hits=10 * rank,
        )
        for rank in range(3)
    ]
    match = LINE.fullmatch(throughput_line(before, now, seconds) or "")
    assert match
    rates = [float(group) for group in match.groups()]
    assert rates[:2] == [round(prompt / seconds, 1), round(generated / seconds, 1)]
    # 30 blocks, of which 0 + 1 + 2 are free and 9 can be evicted; 30 of 120 prompt tokens were known.
    assert rates[2:] == [3, 3, 60.0, 25.0]


def test_no_line_without_work() -> None:
    idle = [RankStats(num_blocks=10, num_free_blocks=10, prompt_tokens=5, generation_tokens=7)] * 2
    assert throughput_line(idle, idle, 1.0) is None
    assert throughput_line([RankStats()], [RankStats(num_waiting=1)], 1.0) is not None
    # What ran and ended within one interval is told too.
    assert throughput_line([RankStats()], [RankStats(generation_tokens=1)], 1.0) is not None


def test_each_line_covers_its_own_interval(caplog: pytest.LogCaptureFixture) -> None:
    stats = [RankStats()]

    async def run() -> None:
        task = asyncio.create_task(log_stats(lambda: stats, 0.05))
        await asyncio.sleep(0)
        stats[0] = RankStats(generation_tokens=1000)
        while not caplog.records:
            await asyncio.sleep(0.01)
        # Nothing more happens, so nothing more is said.
        await asyncio.sleep(0.3)
        task.cancel()

    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    assert len(caplog.records) == 1
    assert LINE.fullmatch(caplog.records[0].getMessage())


@pytest.mark.parametrize("interval", [0.05, 0.0])
def test_server_writes_it_while_busy(
    interval: float, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    folder: Path = make_folder(tmp_path_factory.mktemp("model"))
    with (
        caplog.at_level(logging.INFO),
        LiveServer(folder, engine={"log_stats_interval": interval}) as live,
    ):
        for rank in live.ranks:
            rank.step_s = 0.01
        body = {"prompt": "who runs", "max_tokens": 30, "ignore_eos": True}
        for _ in range(2):
            httpx.post(live.base_url + "/v1/completions", json=body, timeout=30).raise_for_status()
    lines = [record for record in caplog.records if LINE.fullmatch(record.getMessage())]
    assert bool(lines) == bool(interval)
