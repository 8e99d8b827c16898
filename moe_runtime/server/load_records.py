"""The record of expert loads over HTTP, under SGLang's names."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from fastapi import APIRouter
from starlette.responses import Response

from moe_runtime.errors import CapacityError
from moe_runtime.server.errors import unavailable
from moe_runtime.server.state import ServerState
from moe_runtime.server.transport import json_response

T = TypeVar("T")


def load_router(state: ServerState) -> APIRouter:
    """Routes that start, stop and write the record. None takes a body: records go where the operator said at the start."""
    router = APIRouter()

    @router.post("/start_expert_distribution_record")
    async def start() -> Response:
        await _told(state.need().engine.start_expert_distribution_record())
        return json_response({"success": True, "recording": True})

    @router.post("/stop_expert_distribution_record")
    async def stop() -> Response:
        await _told(state.need().engine.stop_expert_distribution_record())
        return json_response({"success": True, "recording": False})

    @router.post("/dump_expert_distribution_record")
    async def dump() -> Response:
        engine = state.need().engine
        dumped = await _told(engine.dump_expert_distribution_record())
        return json_response(
            {
                "success": True,
                "folder": str(dumped.folder),
                "num_windows": dumped.num_windows,
                "num_steps": dumped.num_steps,
            }
        )

    return router


async def _told(answer: Awaitable[T]) -> T:
    try:
        return await answer
    except CapacityError as error:
        raise unavailable(str(error), "record_failed") from error
