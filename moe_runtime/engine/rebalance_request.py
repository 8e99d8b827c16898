"""The front-end's side of moving experts: ask rank 0, and wait for what comes of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from moe_runtime.engine.messages import EplbStats, Rebalance
from moe_runtime.errors import RequestError

if TYPE_CHECKING:
    from moe_runtime.engine.messages import RankStats

POLL_S = 0.02
Slots = list[list[list[int]]]


class Rebalanced(msgspec.Struct):
    """What came of a request to move experts."""

    result: str
    """`applied`; `skipped`: nothing was worth moving; `failed`: nothing could be; `rolled_back`: given up on the way; `pending`:
    not over yet."""
    reason: str
    version: int
    """Of the placement in force."""


def parse_placement(data: Any) -> Slots:
    """[layer][rank][slot], or an object that holds them as `slots`. Raises RequestError naming the first wrong place."""
    if isinstance(data, dict):
        if "slots" not in data:
            raise RequestError("placement: the object has no `slots`", "placement")
        data = data["slots"]
    try:
        return msgspec.convert(data, Slots, strict=True)
    except msgspec.ValidationError as error:
        raise RequestError(
            f"placement must be [MoE layer][rank][slot] -> expert, -1 for an empty slot: {error}", "placement"
        ) from error


def read_placement_file(path: Path) -> Slots:
    """A JSON file of what `parse_placement` understands. Raises RequestError."""
    try:
        return parse_placement(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise RequestError(f"placement file {path}: {error}", "placement") from error


async def request_rebalance(
    send: Callable[[Rebalance], None],
    stats: Callable[[], RankStats],
    command: Rebalance,
    timeout: float,
) -> Rebalanced:
    """Send the command to rank 0 and wait until it is over, `timeout` seconds at most.

    stats: rank 0's latest. It may have to wait for a look at the load, or a move, that is under way.
    """
    send(command)
    deadline = time.monotonic() + timeout
    while True:
        now = _eplb(stats())
        if now.answered >= command.request:
            return Rebalanced(now.answer, now.answer_reason, now.version)
        if time.monotonic() >= deadline:
            return Rebalanced("pending", now.decision, now.version)
        await asyncio.sleep(POLL_S)


def _eplb(stats: RankStats) -> EplbStats:
    return stats.eplb or EplbStats()
