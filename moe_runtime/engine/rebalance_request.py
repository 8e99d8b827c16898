"""The front-end's side of moving experts: understand what is wanted, ask rank 0, and wait for what comes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from moe_runtime.engine.messages import EplbStats, MoeShape, Rebalance
from moe_runtime.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from moe_runtime.engine.messages import PlacementNews, RankStats
    from moe_runtime.placement.stored import StoredLoads, StoredPlacement

POLL_S = 0.02
MAX_FILE_BYTES = 16 * 1024 * 1024
"""Of a placement that is moved to while serving: as much as a request's body may have."""
Slots = list[list[list[int]]]


class Rebalanced(msgspec.Struct):
    """What came of a request to move experts."""

    result: str
    """`applied`; `skipped`: nothing was worth moving; `failed`: nothing could be; `rolled_back`: given up on the way; `pending`:
    not over yet."""
    reason: str
    version: int
    """Of the placement in force."""


def wanted_slots(given: Any, shape: MoeShape, num_ranks: int) -> Slots:
    """[layer][rank][slot], from the content of a placement file of any format (bytes) or the value of one that is JSON.

    [layer][rank][slot] itself, or an object that holds it as `slots`, will do too; ranks need not have equally many slots there.
    Raises RequestError that names layer and slot where something is wrong. May take seconds, and imports numpy, and torch for a .pt file.
    """
    # Not before somebody asks: they take long to import.
    from moe_runtime.placement.stored import Model, StoredLoads
    from moe_runtime.placement.validate import to_placement

    model = Model(shape.num_experts, num_ranks, shape.moe_layers, shape.num_layers, shape.checkpoint)
    try:
        stored = _stored(given)
        if isinstance(stored, StoredLoads):
            raise ConfigError(
                "placement: holds loads of experts; `launch/plan.py plan` makes a placement from them"
            )
        placement = to_placement(stored, model, "placement")
    except ConfigError as error:
        raise RequestError(str(error), "placement") from error
    return [[list(rank) for rank in layer] for layer in placement.slots]


def _stored(given: Any) -> StoredPlacement | StoredLoads:
    from moe_runtime.placement.formats import parse, parse_value

    if isinstance(given, bytes) and len(given) > MAX_FILE_BYTES:
        raise ConfigError(f"placement: has {len(given)} bytes; at most {MAX_FILE_BYTES} are read")
    if isinstance(given, dict) and "slots" in given and "format" not in given:
        given = given["slots"]
    if (
        isinstance(given, list)
        and given
        and isinstance(given[0], list)
        and given[0]
        and isinstance(given[0][0], list)
    ):
        return _plain(given)
    try:
        return parse(given) if isinstance(given, bytes) else parse_value(given)
    except ConfigError as error:
        raise ConfigError(f"placement: {error}") from error


def _plain(given: list[Any]) -> StoredPlacement:
    """[layer][rank][slot], ranks filled up with empty slots."""
    from moe_runtime.placement.stored import StoredPlacement

    try:
        slots = msgspec.convert(given, Slots, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"placement must be [MoE layer][rank][slot] -> expert, -1 for an empty slot: {error}"
        ) from error
    width = max((len(rank) for layer in slots for rank in layer), default=0)
    rows = tuple(tuple((*rank, *[-1] * (width - len(rank))) for rank in layer) for layer in slots)
    return StoredPlacement("slots", rows, ranks_known=True)


async def request_rebalance(
    send: Callable[[Rebalance], None],
    stats: Callable[[], RankStats],
    placements: Callable[[], list[PlacementNews | None]],
    command: Rebalance,
    timeout: float,
) -> Rebalanced:
    """Send the command to rank 0 and wait until it is over and every rank has told its placement, `timeout` seconds at most.

    stats: rank 0's latest. placements: each rank's latest. It may have to wait for a look at the load, or a move, that is under way.
    """
    send(command)
    deadline = time.monotonic() + timeout
    while True:
        now = _eplb(stats())
        told = all(news is None or news.version >= now.version for news in placements())
        if now.answered >= command.request and told:
            return Rebalanced(now.answer, now.answer_reason, now.version)
        if time.monotonic() >= deadline:
            return Rebalanced("pending", now.decision, now.version)
        await asyncio.sleep(POLL_S)


def _eplb(stats: RankStats) -> EplbStats:
    return stats.eplb or EplbStats()
