"""The HTTP application: routes to handlers, errors to answers."""

from __future__ import annotations

import asyncio
import difflib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

import moe_runtime
from moe_runtime.errors import MoeRuntimeError
from moe_runtime.server.admin import admin_router
from moe_runtime.server.chat import ChatJob
from moe_runtime.server.completions import CompletionJob
from moe_runtime.server.context import ModelContext
from moe_runtime.server.errors import ApiError, as_api_error, invalid
from moe_runtime.server.gate import Gate
from moe_runtime.server.load_records import load_router
from moe_runtime.server.parsing import parse
from moe_runtime.server.profile import profile_router
from moe_runtime.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from moe_runtime.server.responses import ModelList
from moe_runtime.server.run import Job, Run, events, whole_answer
from moe_runtime.server.state import ServerState
from moe_runtime.server.transport import (
    ClientGone,
    EventStream,
    decode_json,
    error_response,
    json_response,
    read_body,
    while_connected,
)

_INLINE_BYTES = 16 * 1024
"""Bodies up to this size are handled on the event loop: that takes less than a trip to another thread."""

_NOT_BUILT = {
    "/v1/responses": "the Responses API",
    "/v1/messages": "Anthropic's Messages API",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "reranking",
    "/v1/score": "scoring",
    "/v1/audio/transcriptions": "audio",
    "/v1/images/generations": "images",
    "/v1/batches": "the Batch API (use launch/generate.py)",
}

_BODIES = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
P = TypeVar("P")
logger = logging.getLogger(__name__)


def create_app(state: ServerState) -> ASGIApp:
    """The whole application around `state`."""
    app = FastAPI(
        title="moe-runtime",
        version=moe_runtime.__version__,
        summary="OpenAI-compatible API of a Mixture-of-Experts runtime",
        root_path=state.config.root_path,
    )
    routers = (_api_router(state), admin_router(state), load_router(state), profile_router(state))
    for router in routers:
        app.include_router(router)
    for path, what in _NOT_BUILT.items():
        app.add_api_route(path, _not_built(what), methods=["GET", "POST"], include_in_schema=False)
    paths = sorted(
        {route.path for router in routers for route in router.routes if isinstance(route, APIRoute)}
    )

    async def on_error(_: Request, exc: Exception) -> Response:
        return error_response(as_api_error(exc))

    async def on_http_error(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        return _http_error(request, exc, paths)

    for kind in (ApiError, MoeRuntimeError):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    _describe_bodies(app)
    return Gate(app, state)


def _not_built(what: str) -> Callable[[], Any]:
    async def refuse() -> Response:
        return error_response(ApiError(501, f"{what} is not supported", code="unsupported_endpoint"))

    return refuse


def _http_error(request: Request, exc: HTTPException, paths: list[str]) -> Response:
    """404 and 405 of the router."""
    where = f"{request.method} {request.url.path}"
    if exc.status_code == 404:
        near = difflib.get_close_matches(request.url.path, paths, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return error_response(ApiError(404, f"there is no {where}{hint}", code="unknown_url"))
    error = ApiError(exc.status_code, f"{where}: {exc.detail}")
    if exc.status_code == 405:
        allowed = Headers(exc.headers).get("allow", "another method")
        error = ApiError(405, f"{where} does not exist: use {allowed}", code="method_not_allowed")
    response = error_response(error)
    response.headers.update(exc.headers or {})
    return response


def _body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The request body for /docs; handlers read it themselves, to answer mistakes in OpenAI's shape."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}


def _describe_bodies(app: FastAPI) -> None:
    """Add the models that `_body_of` refers to to the OpenAPI description."""
    schema = app.openapi()
    _, definitions = models_json_schema(
        [(m, "validation") for m in _BODIES], ref_template="#/components/schemas/{model}"
    )
    schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])


def _api_router(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=_body_of(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        return await _generate(state, request, ChatJob.prepare)

    @router.post("/v1/completions", openapi_extra=_body_of(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await _generate(state, request, CompletionJob.prepare)

    @router.post("/tokenize", openapi_extra=_body_of(TokenizeRequest))
    @router.post("/v1/tokenize", include_in_schema=False)
    async def tokenize(request: Request) -> Response:
        def work(context: ModelContext, data: Any) -> Any:
            return context.tokenize(parse(TokenizeRequest, data))

        return json_response(await _prepared(state, request, work))

    @router.post("/detokenize", openapi_extra=_body_of(DetokenizeRequest))
    @router.post("/v1/detokenize", include_in_schema=False)
    async def detokenize(request: Request) -> Response:
        def work(context: ModelContext, data: Any) -> Any:
            return context.detokenize(parse(DetokenizeRequest, data))

        return json_response(await _prepared(state, request, work))

    @router.get("/v1/models")
    async def models() -> Response:
        return json_response(ModelList([state.need().context.card]))

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        context = state.need().context
        context.check_model(name)
        return json_response(context.card)

    return router


async def _prepared(state: ServerState, request: Request, prepare: Callable[[ModelContext, Any], P]) -> P:
    """`prepare` applied to the request's JSON; large ones in a thread, so that others do not wait."""
    with state.receiving():
        body = await read_body(request)
    context = state.need().context
    if len(body) <= _INLINE_BYTES:
        return prepare(context, decode_json(body))
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(state.pool, lambda: prepare(context, decode_json(body)))


async def _generate(
    state: ServerState, request: Request, prepare: Callable[[ModelContext, Any], Job]
) -> Response:
    """Chat and plain completions alike. Until the first token errors set the status; later they are events."""
    arrival = time.perf_counter()
    job = await _prepared(state, request, prepare)
    rank = _wanted_rank(state, request, job)
    serving = state.need()
    run = Run(serving.engine, serving.metrics, job, rank, arrival)
    try:
        if not job.request.stream:
            return json_response(await while_connected(request.receive, whole_answer(run)))
        stream = events(run)
        first = await while_connected(request.receive, _first(stream))
        return EventStream(first, stream)
    except ClientGone:
        logger.debug("the client of %s left before its answer", job.id)
        return Response(status_code=499)


async def _first(stream: AsyncGenerator[bytes, None]) -> bytes:
    async for body in stream:
        return body
    return b""


def _wanted_rank(state: ServerState, request: Request, job: Job) -> int | None:
    """The rank the client asks for, by field or header."""
    field, header = job.request.routed_dp_rank, request.headers.get("x-data-parallel-rank")
    if header is None:
        rank = field
    elif not header.isascii() or not header.isdigit():
        raise invalid(f"X-data-parallel-rank: {header!r} is not a rank", "X-data-parallel-rank")
    else:
        rank = int(header)
        if field is not None and field != rank:
            raise invalid(f"routed_dp_rank is {field}, X-data-parallel-rank is {rank}", "routed_dp_rank")
    num_ranks = len(state.need().engine.ready)
    if rank is not None and not 0 <= rank < num_ranks:
        raise invalid(f"rank {rank} does not exist: allowed are 0 to {num_ranks - 1}", "routed_dp_rank")
    return rank
