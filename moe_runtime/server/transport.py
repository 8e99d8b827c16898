"""HTTP's side of a request: its body, its end when the client goes away, and server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moe_runtime.server.errors import ApiError, as_api_error, invalid

MAX_BODY_BYTES = 16 * 1024 * 1024
_DISCARD_FACTOR = 8
"""A larger body is read to this many times the limit before the answer: clients that are still writing do not read."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


class ClientGone(Exception):  # noqa: N818 - it is an event, not an error
    """The client closed the connection before it had its answer."""


async def read_body(request: Request) -> bytes:
    """The whole body. Raises ApiError if it is larger than MAX_BODY_BYTES."""
    body = bytearray()
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size <= MAX_BODY_BYTES:
            body += piece
        elif size > MAX_BODY_BYTES * _DISCARD_FACTOR:
            break
    if size > MAX_BODY_BYTES:
        raise invalid(f"the request body is larger than {MAX_BODY_BYTES} bytes", code="request_too_large")
    return bytes(body)


def decode_json(body: bytes) -> Any:
    """Raises ApiError if the body is not JSON."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise invalid(f"the request body is not valid JSON: {exc}", code="invalid_json") from None


def json_response(content: Any, status: int = 200) -> Response:
    """Any msgspec or plain object as JSON."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """The error as the client reads it, with its status and headers."""
    return Response(
        msgspec.json.encode(error.body), error.status, headers=error.headers, media_type="application/json"
    )


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client goes away; then raises ClientGone."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for running in (task, watcher):
            running.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends what `events` yields, as it comes. An error on the way becomes an event, and then the stream ends.

    `first` was already taken from `events`, so that errors before it could still set the status. A client that goes away
    closes `events`; one that reads slowly suspends it.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._pump(send))
        except ClientGone:
            logger.debug("client left a stream")
        finally:
            await self._events.aclose()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for body in self._events:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except Exception as exc:  # noqa: BLE001 - whatever it is, the client must learn that the answer is incomplete
            body = error_event(exc)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


def error_event(exc: Exception) -> bytes:
    """The event that ends a started stream after an error; what was not raised on purpose is logged."""
    error = as_api_error(exc)
    if error.status == 500:
        logger.error("error within a stream", exc_info=exc)
    return event(error.body)
