"""Where experts are, and moving them: what operators ask and order."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from moe_runtime.config_eplb import eplb_config
from moe_runtime.engine.rebalance_request import Slots, wanted_slots
from moe_runtime.server import parsing
from moe_runtime.server.base import Engine
from moe_runtime.server.errors import ApiError, invalid
from moe_runtime.server.state import ServerState
from moe_runtime.server.transport import decode_json, json_response, read_body

MAX_WAIT_S = 3600.0


FILE_TYPE = "application/octet-stream"
"""Content type of a body that is a placement file."""


class RebalanceRequest(parsing.Request):
    """Body of /rebalance; may be left out. If the body is a placement file, all but `placement` may be query parameters."""

    placement: Any = Field(
        None,
        description="[MoE layer][rank][slot] -> expert, -1 for none; or what a placement file of any JSON format holds",
    )
    force: bool = Field(False, description="Move even if it is not expected to pay")
    timeout: float = Field(60.0, ge=0.0, le=MAX_WAIT_S, description="Seconds to wait for the outcome")


def placement_router(state: ServerState) -> APIRouter:
    """Routes about where experts are."""
    router = APIRouter()
    # One at a time: a file may be large, and much larger unpacked.
    reading = asyncio.Lock()

    async def read_slots(given: Any, engine: Engine) -> Slots:
        shape = engine.ready[0].moe
        assert shape is not None, "a rank that can move experts says what of"
        async with reading:
            return await asyncio.to_thread(wanted_slots, given, shape, len(engine.ready))

    @router.post("/rebalance")
    async def rebalance(request: Request) -> Response:
        with state.receiving():
            body = await read_body(request)
        asked = _order(request, body)
        engine = state.need().engine
        if not engine.config.enable_eplb:
            raise ApiError(
                501, "experts cannot be moved: the server runs without --enable-eplb", code="eplb_is_off"
            )
        slots = None if asked.placement is None else await read_slots(asked.placement, engine)
        outcome = await engine.rebalance(slots, force=asked.force, timeout=asked.timeout)
        status = {"failed": 409, "rolled_back": 409, "pending": 202}.get(outcome.result, 200)
        return json_response(msgspec.to_builtins(outcome), status)

    @router.get("/placement")
    async def placement() -> Response:
        news = state.need().engine.placements[0]
        if news is None:
            raise ApiError(
                501, "experts do not move: the server runs without --enable-eplb", code="eplb_is_off"
            )
        return json_response({"version": news.version, "slots": news.slots})

    return router


def _order(request: Request, body: bytes) -> RebalanceRequest:
    """Raises ApiError."""
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != FILE_TYPE:
        if request.query_params:
            raise invalid(
                f"query parameters are read only if the body is a placement file, of type {FILE_TYPE}"
            )
        return parsing.parse(RebalanceRequest, decode_json(body) if body.strip() else {})
    if not body:
        raise invalid(f"a body of type {FILE_TYPE} is a placement file, and this one is empty", "placement")
    fields = {name: decode_json(value.encode()) for name, value in request.query_params.items()}
    if "placement" in fields:
        raise invalid("the body is the placement; leave it out of the query", "placement")
    return parsing.parse(RebalanceRequest, fields | {"placement": body})


def health(engine: Engine) -> tuple[Literal["ready", "degraded"], str]:
    """Whether all that was switched on works, and if not, why. Requests are served either way."""
    reasons = [
        stats.eplb.degraded for stats in engine.stats if stats.eplb is not None and stats.eplb.degraded
    ]
    return ("degraded", reasons[0]) if reasons else ("ready", "")


def eplb_info(engine: Engine) -> dict[str, Any] | None:
    """For /server_info; None without rebalancing."""
    if not engine.config.enable_eplb:
        return None
    return {
        "settings": msgspec.to_builtins(eplb_config(engine.config)),
        "dry_run": engine.config.eplb_dry_run,
        "ranks": [None if stats.eplb is None else msgspec.to_builtins(stats.eplb) for stats in engine.stats],
    }
