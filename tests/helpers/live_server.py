"""The real HTTP front-end on a real port, in a thread of the test, with scripted ranks behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

from moe_runtime.config import EngineConfig, ServerConfig
from moe_runtime.server.lifecycle import Lifecycle
from moe_runtime.server.sockets import listen
from tests.helpers.rank_tasks import RankTask
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

T = TypeVar("T")
MODEL = "tiny-moe"


def make_folder(folder: Path, generation: dict[str, Any] | None = None) -> Path:
    """What the front-end reads of a checkpoint: tokenizer, config, generation config."""
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (folder / "generation_config.json").write_text(json.dumps(generation or {"eos_token_id": [2, 4]}))
    return folder


class LiveServer:
    """A context manager; `base_url` is ready on entry unless `ready=False` leaves the ranks out."""

    def __init__(
        self,
        folder: Path,
        num_ranks: int = 2,
        max_model_len: int = 256,
        *,
        ready: bool = True,
        engine: dict[str, Any] | None = None,
        **server: Any,
    ) -> None:
        self.engine_config = EngineConfig(model=str(folder), ep=num_ranks, **(engine or {}))
        self.server_config = ServerConfig(served_model_name=MODEL, **server)
        self.ranks: list[RankTask] = []
        self.exit_code: int | None = None
        self.error: Exception | None = None
        """What the server ended with instead of an exit code."""
        self._max_model_len = max_model_len
        self._wants_ranks = ready
        self._address = f"ipc://{folder}/link"
        self._loop = asyncio.new_event_loop()
        self._sock = listen("127.0.0.1", 0)
        self.base_url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        self._running = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server")

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._running.wait(30)
        if self._wants_ranks:
            self.connect_ranks()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.life.stop)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def connect_ranks(self) -> None:
        """Bring the ranks up and wait until the server is ready."""
        self.run(self._connect())
        self.wait_for(lambda: self.life.state.serving is not None)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the server's loop."""

        async def run() -> T:
            return function()

        return self.run(run())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Wait until a condition holds, looking from the server's loop."""
        deadline = time.monotonic() + timeout_s
        while not self.call(condition):
            assert time.monotonic() < deadline, "timed out"
            time.sleep(0.005)

    def hold(self) -> None:
        """No rank makes a step until `release`."""
        for rank in self.ranks:
            self.call(rank.hold.clear)

    def release(self) -> None:
        for rank in self.ranks:
            self.call(rank.hold.set)

    def submitted(self) -> list[Any]:
        """Every Submit so far, of all ranks, in order of arrival."""
        arrived = self.call(lambda: [pair for rank in self.ranks for pair in rank.submitted])
        return [submit for _, submit in sorted(arrived, key=lambda pair: pair[0])]

    def num_active(self) -> int:
        return sum(rank.num_active for rank in self.ranks)

    def join(self) -> int:
        """Wait for the server to end by itself; its exit code."""
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        assert self.exit_code is not None
        return self.exit_code

    async def _connect(self) -> None:
        for rank in range(self.engine_config.ep):
            self.ranks.append(RankTask(self._address, rank, VOCAB_SIZE, self._max_model_len))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self.exit_code = self._loop.run_until_complete(self._serve())
        except Exception as exc:  # noqa: BLE001 - raised again by join
            self.error = exc
        self._loop.close()

    async def _serve(self) -> int:
        self.life = Lifecycle(self.engine_config, self.server_config, self._address, self._sock)
        self._running.set()
        try:
            return await self.life.run()
        finally:
            for rank in self.ranks:
                await rank.close()
