"""The life of the server: loading, ready, draining, dead; and how many requests run."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from moe_runtime.config import ServerConfig
from moe_runtime.server.base import Engine
from moe_runtime.server.context import ModelContext
from moe_runtime.server.errors import RETRY_DEAD_S, RETRY_LOADING_S, ApiError, unavailable
from moe_runtime.server.metrics import ServerMetrics


class Phase(enum.Enum):
    """Where the server is in its life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True)
class Serving:
    """What exists once the ranks are ready."""

    engine: Engine
    context: ModelContext
    metrics: ServerMetrics


@dataclass
class ServerState:
    """Shared by all handlers; changed only on the event loop."""

    config: ServerConfig
    phase: Phase = Phase.LOADING
    serving: Serving | None = None
    reason: str = ""
    """Why the server is dead."""
    num_in_flight: int = 0
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "tokenize"))
    """Renders and tokenizes long prompts off the event loop."""
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def refusal(self) -> ApiError | None:
        """Why a new request cannot be served now, or None."""
        # First, since the engine is closed on the way; if it dies by itself, the phase says so.
        if self.phase is Phase.DRAINING:
            return unavailable("the server is shutting down", "shutting_down", RETRY_LOADING_S)
        dead = self.serving.engine.dead if self.serving is not None else None
        if self.phase is Phase.DEAD or dead is not None:
            why = str(dead or self.reason)
            return unavailable(f"the server has failed and is ending: {why}", "engine_dead", RETRY_DEAD_S)
        if self.phase is Phase.LOADING:
            return unavailable("the model is still loading", "loading", RETRY_LOADING_S)
        return None

    def need(self) -> Serving:
        """The engine and what belongs to it. Raises ApiError 503 unless the server is ready."""
        refused = self.refusal()
        if refused is not None:
            raise refused
        assert self.serving is not None
        return self.serving

    @contextlib.contextmanager
    def in_flight(self) -> Iterator[None]:
        """Counts a request that draining has to wait for."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    @contextlib.contextmanager
    def receiving(self) -> Iterator[None]:
        """Within `in_flight`, while the body arrives: draining does not wait for that, since it would be refused."""
        self._count(-1)
        try:
            yield
        finally:
            self._count(1)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request runs. False if some still do after `timeout_s`."""
        if not self.num_in_flight:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), max(timeout_s, 0.0))
        return not self.num_in_flight

    def _count(self, change: int) -> None:
        self.num_in_flight += change
        if self.num_in_flight:
            self._idle.clear()
        else:
            self._idle.set()
