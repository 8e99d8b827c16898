"""Traces of a running server over HTTP: what every rank does in its next steps, under the peers' names."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from moe_runtime.engine.async_llm import MAX_PROFILE_STEPS
from moe_runtime.errors import CapacityError
from moe_runtime.server.errors import unavailable
from moe_runtime.server.parsing import Request as Body
from moe_runtime.server.parsing import parse
from moe_runtime.server.state import ServerState
from moe_runtime.server.transport import decode_json, json_response, read_body


class ProfileRequest(Body):
    """POST /start_profile. The body may be left out."""

    num_steps: Annotated[int, Field(ge=1, le=MAX_PROFILE_STEPS)] = 20
    """Steps after which the trace ends by itself."""


def profile_router(state: ServerState) -> APIRouter:
    """Routes that start and end a trace. It is written where the operator said at the start (`--trace-dir`)."""
    router = APIRouter()

    @router.post("/start_profile")
    async def start(request: Request) -> Response:
        body = await read_body(request)
        wanted = parse(ProfileRequest, decode_json(body) if body.strip() else {})
        await state.need().engine.start_profile(wanted.num_steps)
        return json_response({"success": True, "num_steps": wanted.num_steps})

    @router.post("/stop_profile")
    async def stop() -> Response:
        try:
            result = await state.need().engine.stop_profile()
        except CapacityError as error:
            raise unavailable(str(error), "profile_failed") from error
        return json_response({"success": True, "file": str(result.file), "summary": result.summary})

    return router
