"""Waiting for the ranks to be ready, and telling the user how it goes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from moe_runtime import errors
from moe_runtime.engine.frontend_link import FrontendLink
from moe_runtime.engine.messages import Failed, Progress, RankMessage, Ready
from moe_runtime.errors import EngineDeadError, LockstepError, MoeRuntimeError

_SILENCE_S = 600.0
"""A rank that loads reports every few seconds; one that says nothing for so long is stuck."""
_LAST_WORDS_S = 1.0


async def wait_until_ready(link: FrontendLink, display: StartupDisplay) -> list[Ready]:
    """The Ready of every rank, in rank order.

    Raises the error a rank failed with, or EngineDeadError if one died or has said nothing for minutes.
    """
    ready: dict[int, Ready] = {}
    while len(ready) < link.num_ranks:
        message = await _next_message(link)
        if message is None:
            failed = await last_words(link)
            raise link.dead.result() if failed is None else error_of(failed)
        if isinstance(message, Failed):
            raise error_of(await _cause(link, message))
        if isinstance(message, Progress):
            display.update(message)
        elif isinstance(message, Ready):
            ready[message.rank] = message
    return [ready[rank] for rank in range(link.num_ranks)]


async def last_words(link: FrontendLink) -> Failed | None:
    """What a rank that has just died still managed to say about the reason."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_WORDS_S):
            while True:
                message = await link.recv()
                if isinstance(message, Failed):
                    return message
    return None


def error_of(failed: Failed) -> MoeRuntimeError:
    """A rank's failure as the exception it was there; EngineDeadError for anything not raised on purpose."""
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, MoeRuntimeError):
        error: MoeRuntimeError = kind(failed.message)
        # Ranks agree on such an error and rank 0 tells the user. One that has lost its peers may have lost rank 0.
        error.told = kind is not LockstepError
        return error
    return EngineDeadError(f"rank {failed.rank} failed: {failed.kind}: {failed.message}")


async def _next_message(link: FrontendLink) -> RankMessage | None:
    """The next message; None if a rank died first."""
    receive = asyncio.ensure_future(link.recv())
    try:
        waited: set[asyncio.Future[Any]] = {receive, link.dead}
        await asyncio.wait(waited, timeout=_SILENCE_S, return_when=asyncio.FIRST_COMPLETED)
        if receive.done():
            return receive.result()
        if link.dead.done():
            return None
        raise EngineDeadError(f"the ranks have said nothing for {_SILENCE_S:.0f} s while starting")
    finally:
        receive.cancel()


async def _cause(link: FrontendLink, failed: Failed) -> Failed:
    """A rank that lost a peer only reports a consequence; the peer may still say what it was."""
    if failed.kind != LockstepError.__name__:
        return failed
    return await last_words(link) or failed


class StartupDisplay:
    """The slowest rank's stage: a bar on a terminal, otherwise a line for each stage. On stderr."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._console = Console(stderr=True)
        # Behind every rank that has said anything.
        self._progress = {rank: Progress(rank, 0, "starting", -1.0) for rank in range(num_ranks)}
        self._last_line = ""
        self._bar: Bar | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
            )
            self._bar = Bar(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("starting", total=1.0)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, progress: Progress) -> None:
        """Show a rank's news if the slowest rank's stage has changed."""
        self._progress[progress.rank] = progress
        slowest = min(self._progress.values(), key=lambda p: p.fraction)
        line = f"{self._num_ranks} {'rank' if self._num_ranks == 1 else 'ranks'}: {slowest.stage}"
        if self._bar is not None:
            self._bar.update(self._task, description=line, completed=max(0.0, slowest.fraction))
        elif line != self._last_line:
            self._console.print(line, highlight=False)
        self._last_line = line
