"""From start to end of the front-end: attach to the ranks, serve, and leave in order or after a failure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from moe_runtime.config import EngineConfig, ServerConfig
from moe_runtime.engine.async_llm import AsyncLLM
from moe_runtime.engine.frontend_link import FrontendLink
from moe_runtime.engine.socket_folder import remove_socket_folder
from moe_runtime.server.app import create_app
from moe_runtime.server.context import ModelContext
from moe_runtime.server.metrics import ServerMetrics
from moe_runtime.server.state import Phase, ServerState, Serving
from moe_runtime.server.stats_log import log_stats

DEAD_ANSWER_S = 2.0
"""How long requests are still answered, with 503, after the ranks have gone."""
_FLUSH_S = 1.0
"""How long clients get to read the last of their answers."""
_ECHO_S = 1.0
"""A signal soon after the first is the same one: from torchrun and from the kernel, which sends it for each thread of a
parent that was killed."""
_LAST_WORDS_S = 0.5
"""How long the reason is waited for when the ranks go while loading."""

logger = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, and waking once a second instead of ten times."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Close the listening socket and the connections, then return from `serve`."""
        self.should_exit = True
        self._stop.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled by main.py."""
        yield

    async def main_loop(self) -> None:
        """Refreshes the date header until stopped."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), 1.0)


class Lifecycle:
    """One run of the front-end. `drain`, `stop` and `fail` are called by signal handlers on the event loop."""

    def __init__(self, engine: EngineConfig, server: ServerConfig, link: str, sock: socket.socket) -> None:
        self._engine_config = engine
        self._server_config = server
        self._link_address = link
        self._sock = sock
        self.state = ServerState(server)
        self._end = asyncio.Event()
        """Set when it is time to leave, for whatever reason."""
        self._now = asyncio.Event()
        """Set when what still runs is not waited for."""
        self._drained_at = -math.inf
        self._ranks_may_go = False
        """Once they are told to stop, their end is no failure."""

    def drain(self) -> None:
        """Take no new requests, finish those that run, then leave. A second call, if not just an echo, does not wait."""
        if self.state.phase is not Phase.READY:
            if time.monotonic() - self._drained_at > _ECHO_S:
                self.stop()
            return
        self._drained_at = time.monotonic()
        logger.info("draining; requests running: %d", self.state.num_in_flight)
        self.state.phase = Phase.DRAINING
        self._end.set()

    def drain_once(self) -> None:
        """As `drain`, but never a reason not to wait: every rank may ask for it, at its own time."""
        if self.state.phase is not Phase.DRAINING:
            self.drain()

    def stop(self) -> None:
        """Leave now; running requests get an error."""
        if self.state.phase is not Phase.DEAD:
            self.state.phase = Phase.DRAINING
        self._end.set()
        self._now.set()

    def fail(self, reason: str) -> None:
        """The ranks have gone: answer 503 for a moment, then leave with exit code 1."""
        if self._ranks_may_go or self.state.phase is Phase.DEAD:
            return
        self.state.phase, self.state.reason = Phase.DEAD, reason
        self._end.set()
        self._now.set()

    async def run(self) -> int:
        """Serve until one of the methods above ends it. Returns the exit code; raises what loading raises."""
        config = uvicorn.Config(
            create_app(self.state),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        http = HttpServer(config)
        serving = asyncio.create_task(http.serve(sockets=[self._sock]))
        try:
            return await self._until_end()
        finally:
            http.stop()
            await serving

    async def _until_end(self) -> int:
        llm = await self._load()
        if llm is not None:
            beside = [asyncio.create_task(self._watch(llm))]
            interval = self._engine_config.log_stats_interval
            if interval:
                beside.append(asyncio.create_task(log_stats(lambda: llm.stats, interval)))
            await self._end.wait()
            if self.state.phase is Phase.DRAINING:
                await self._finish_requests()
            for task in beside:
                task.cancel()
            if llm.dead is not None:
                self.fail(str(llm.dead))
        if self.state.phase is Phase.DEAD:
            await self._answer_dead(llm)
            return 1
        if llm is not None:
            self._ranks_may_go = True
            await llm.close()
            await self.state.wait_idle(_FLUSH_S)
        return 0

    async def _answer_dead(self, llm: AsyncLLM | None) -> None:
        """Tell clients for a while; meanwhile the ranks end by themselves, and one that is stuck is killed."""
        answering = asyncio.create_task(asyncio.sleep(DEAD_ANSWER_S))
        if llm is not None:
            # Rank 0, whose end is noticed first, may only have followed another.
            with contextlib.suppress(TimeoutError):
                self.state.reason = str(await asyncio.wait_for(llm.wait_dead(), _LAST_WORDS_S))
        logger.error("%s; the server ends", self.state.reason)
        if llm is not None:
            await llm.close()
        await answering

    async def _load(self) -> AsyncLLM | None:
        """The engine once all ranks are ready; None if the server is told to end before. Raises what a rank raised."""
        link = FrontendLink(self._engine_config.ep, self._link_address)
        template = self._server_config.chat_template
        loading = asyncio.create_task(AsyncLLM.start(self._engine_config, link, chat_template=template))
        ending = asyncio.create_task(self._end.wait())
        try:
            await asyncio.wait({loading, ending}, return_when=asyncio.FIRST_COMPLETED)
            if self.state.phase is Phase.DEAD:
                # A rank may have said why.
                await asyncio.wait({loading}, timeout=_LAST_WORDS_S)
            if not loading.done():
                link.close()
                return None
            llm = loading.result()
        except BaseException:
            link.close()
            raise
        finally:
            for task in (loading, ending):
                task.cancel()
            await asyncio.gather(loading, ending, return_exceptions=True)
            # All ranks are connected, or never will be. Rank 0 may be killed before it can remove this itself.
            remove_socket_folder(self._link_address)
        self._open(llm)
        return llm

    def _open(self, llm: AsyncLLM) -> None:
        name = self._server_config.served_model_name or Path(self._engine_config.model).resolve().name
        use_defaults = self._server_config.generation_config == "auto"
        context = ModelContext(
            name=name,
            root=self._engine_config.model,
            tokenizer=llm.tokenizer,
            max_model_len=llm.max_model_len,
            vocab_size=llm.vocab_size,
            sampling_defaults=llm.default_sampling if use_defaults else {},
        )
        metrics = ServerMetrics(name, llm.max_model_len, lambda: llm.stats, llm.balance)
        self.state.serving = Serving(llm, context, metrics)
        self.state.phase = Phase.READY
        line = curl_line(self._sock.getsockname(), context)
        sys.stderr.write(f"Ready. Talk to it with any OpenAI client, or:\n{line}\n")
        sys.stderr.flush()

    async def _watch(self, llm: AsyncLLM) -> None:
        self.fail(str(await llm.wait_dead()))

    async def _finish_requests(self) -> None:
        """Wait for running requests: until `stop` or `fail`, and shutdown_timeout at most."""
        idle = asyncio.create_task(self.state.wait_idle(self._server_config.shutdown_timeout))
        hurry = asyncio.create_task(self._now.wait())
        await asyncio.wait({idle, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (idle, hurry):
            task.cancel()
        if self.state.num_in_flight:
            logger.warning("requests cut off: %d", self.state.num_in_flight)


def curl_line(address: tuple[object, ...], context: ModelContext) -> str:
    """A command that talks to the server, to copy and paste."""
    host, port = str(address[0]), address[1]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    body: dict[str, object] = {"model": context.name}
    chat = context.tokenizer is not None and (
        context.tokenizer.hf.chat_template or context.tokenizer.chat_template
    )
    if chat:
        path, body = (
            "chat/completions",
            {**body, "messages": [{"role": "user", "content": "What is an expert?"}]},
        )
    else:
        path, body = "completions", {**body, "prompt": [0] if context.tokenizer is None else "An expert is"}
    quoted = json.dumps(body).replace("'", "'\\''")
    return f"  curl http://{host}:{port}/v1/{path} -H 'Content-Type: application/json' -d '{quoted}'"
