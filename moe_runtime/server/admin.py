"""Health, metrics and information: what operators and load balancers ask."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

import moe_runtime
from moe_runtime.core import SamplingParams
from moe_runtime.errors import EngineDeadError, MoeRuntimeError
from moe_runtime.server import placement
from moe_runtime.server.base import Engine
from moe_runtime.server.context import new_id
from moe_runtime.server.errors import unavailable
from moe_runtime.server.metrics import CONTENT_TYPE, kv_usage
from moe_runtime.server.state import Phase, ServerState
from moe_runtime.server.transport import error_response, json_response

GENERATE_TIMEOUT_S = 30.0
"""How long /health_generate waits for its tokens."""

logger = logging.getLogger(__name__)


def admin_router(state: ServerState) -> APIRouter:
    """Routes that need no request body."""
    router = APIRouter()

    @router.get("/health")
    @router.get("/ping", include_in_schema=False)
    async def health() -> Response:
        refused = state.refusal()
        if refused is not None:
            return error_response(refused)
        status, reason = placement.health(state.need().engine)
        return json_response({"status": status} | ({"reason": reason} if reason else {}))

    @router.get("/health_generate")
    async def health_generate() -> Response:
        await _generate_everywhere(state.need().engine)
        return json_response({"status": Phase.READY.value})

    @router.get("/metrics")
    async def metrics() -> Response:
        if state.serving is None:
            return error_response(unavailable("the model is still loading", "loading"))
        return Response(state.serving.metrics.render(), headers={"content-type": CONTENT_TYPE})

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": moe_runtime.__version__})

    @router.get("/load")
    @router.get("/get_load", include_in_schema=False)
    async def load() -> Response:
        return json_response(_load(state))

    @router.get("/server_info")
    @router.get("/get_server_info", include_in_schema=False)
    async def server_info() -> Response:
        return json_response(_server_info(state))

    @router.post("/reset_prefix_cache")
    @router.post("/flush_cache", include_in_schema=False)
    async def reset_prefix_cache() -> Response:
        await state.need().engine.reset_prefix_cache()
        return json_response({"success": True})

    return router


async def _generate_everywhere(engine: Engine) -> None:
    """One real token from every rank. Raises ApiError 503 if that fails or takes too long."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)

    async def one_token(rank: int) -> None:
        async for _ in engine.stream([0], params, new_id("health"), rank):
            pass

    checks = [asyncio.create_task(one_token(rank)) for rank in range(len(engine.ready))]
    try:
        async with asyncio.timeout(GENERATE_TIMEOUT_S):
            await asyncio.gather(*checks)
    except TimeoutError:
        raise unavailable(f"no token within {GENERATE_TIMEOUT_S:.0f} s", "unhealthy") from None
    except EngineDeadError:
        raise
    except MoeRuntimeError as exc:
        raise unavailable(f"a token could not be generated: {exc}", "unhealthy") from exc
    finally:
        for check in checks:
            check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)


def _load(state: ServerState) -> dict[str, Any]:
    """`server_load` is vLLM's name for the number of requests the server is working on."""
    ranks = [] if state.serving is None else state.serving.engine.stats
    return {
        "server_load": state.num_in_flight,
        "phase": state.phase.value,
        "ranks": [
            {
                "rank": rank,
                "num_requests_running": stats.num_running,
                "num_requests_waiting": stats.num_waiting,
                "kv_cache_usage_perc": kv_usage(stats),
                "num_steps": stats.steps,
            }
            for rank, stats in enumerate(ranks)
        ],
    }


def _server_info(state: ServerState) -> dict[str, Any]:
    serving = state.need()
    server = dataclasses.asdict(state.config)
    server["api_key"] = "set" if state.config.api_key else None
    return {
        "version": moe_runtime.__version__,
        "phase": state.phase.value,
        "model": serving.context.name,
        "max_model_len": serving.engine.max_model_len,
        "vocab_size": serving.engine.vocab_size,
        "default_sampling": dict(serving.context.sampling_defaults),
        "engine": dataclasses.asdict(serving.engine.config),
        "server": server,
        "eplb": placement.eplb_info(serving.engine),
        "ranks": [
            {
                "rank": ready.rank,
                "pid": ready.pid,
                "num_kv_blocks": ready.num_kv_blocks,
                "block_size": ready.block_size,
                "chosen": ready.info,
            }
            for ready in serving.engine.ready
        ],
    }
