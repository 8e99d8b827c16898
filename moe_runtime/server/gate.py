"""The outermost layer: request ids, the API key, the phases in which nothing is served, and the log."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_runtime.server.errors import ApiError, as_api_error, invalid
from moe_runtime.server.state import ServerState
from moe_runtime.server.transport import error_response

_MAX_ID_LENGTH = 256
_ALWAYS_ANSWERED = frozenset({"/health", "/ping", "/metrics", "/version", "/load", "/get_load"})
"""Served in every phase; what they say depends on it."""
_OPEN = frozenset({"/health", "/ping", "/metrics", "/version"})
"""Served without the API key, for probes and scrapers."""

logger = logging.getLogger(__name__)


class Gate:
    """Wraps the application. Every answer carries X-Request-Id; every error has OpenAI's shape."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        answer = _Answer(send, headers.get("x-request-id") or uuid.uuid4().hex)
        path = scope["path"].removeprefix(self._state.config.root_path)
        began = time.perf_counter()
        try:
            refused = self._refusal(path, headers)
            if refused is not None:
                await error_response(refused)(scope, receive, answer.send)
            elif path in _ALWAYS_ANSWERED:
                await self._app(scope, receive, answer.send)
            else:
                with self._state.in_flight():
                    await self._app(scope, receive, answer.send)
        except asyncio.CancelledError:
            # The server ends, and this request's body has not arrived, say.
            if answer.status or (refused := self._state.refusal()) is None:
                raise
            await error_response(refused)(scope, receive, answer.send)
        except ClientDisconnect:
            logger.debug("the client left within its request for %s", scope["path"])
        except Exception as exc:
            logger.exception("error while answering %s %s", scope["method"], scope["path"])
            if answer.status:
                raise
            await error_response(as_api_error(exc))(scope, receive, answer.send)
        finally:
            if self._state.config.log_requests:
                wall_ms = (time.perf_counter() - began) * 1e3
                logger.info(
                    "%s %s -> %s in %.1f ms, request id %s",
                    *(scope["method"], scope["path"], answer.status or "no answer", wall_ms),
                    answer.request_id,
                )

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        wanted_id = headers.get("x-request-id", "")
        if len(wanted_id) > _MAX_ID_LENGTH or not wanted_id.isprintable():
            return invalid(
                f"X-Request-Id must be at most {_MAX_ID_LENGTH} printable characters", "X-Request-Id"
            )
        key = self._state.config.api_key
        if key is not None and path not in _OPEN and not _same_key(headers.get("authorization", ""), key):
            return ApiError(
                401, "wrong or missing API key: send `Authorization: Bearer KEY`", code="invalid_api_key"
            )
        return None if path in _ALWAYS_ANSWERED else self._state.refusal()


def _same_key(header: str, key: str) -> bool:
    scheme, _, given = header.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode())


class _Answer:
    """Passes messages on, remembering the status and adding the request id."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self.status = 0
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            # An id that was refused cannot go into a header.
            if len(self.request_id) <= _MAX_ID_LENGTH and self.request_id.isprintable():
                MutableHeaders(scope=message)["x-request-id"] = self.request_id
        await self._send(message)
