"""Run a function on several ranks, each a real process joined to the others by gloo."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Seconds that the other ranks get to report after one has failed.
GRACE = 8.0


class RankFailureError(AssertionError):
    """Some rank raised, died or did not finish; the message holds every rank's traceback."""


@dataclass
class Died:
    """The result of a rank that was expected to be able to die, and did."""

    exit_code: int | None


def run_ranks(
    fn: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 60.0, may_die: Collection[int] = ()
) -> list[Any]:
    """Call fn(rank, num_ranks, *args) in `num_ranks` processes and return the results in rank order.

    `fn` must be at module level. The default process group (gloo, found through a file, no port) is ready when it is
    called. Ranks in `may_die` yield Died(exit code) if their process ends without a result. Any other failure, or
    `timeout` seconds, kills all ranks and raises RankFailureError with their tracebacks (on a timeout: where each stood).
    """
    with tempfile.TemporaryDirectory(prefix="moe-runtime-ranks-") as folder:
        ranks = _Ranks(fn, num_ranks, args, timeout, Path(folder))
        try:
            return ranks.collect(time.monotonic() + timeout, frozenset(may_die))
        finally:
            ranks.end()


class _Ranks:
    def __init__(
        self, fn: Callable[..., Any], num_ranks: int, args: tuple[Any, ...], timeout: float, folder: Path
    ) -> None:
        # A server process that has imported torch once; each rank is a fork of it, so that it starts at once.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "pytest", __name__])
        self.folder = folder
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(fn, rank, num_ranks, args, timeout, str(folder), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def collect(self, deadline: float, may_die: frozenset[int]) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = dict(enumerate(self.pipes))
        while waiting:
            ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failures |= {rank: self._where(rank) for rank in waiting}
                break
            for rank in [r for r, pipe in waiting.items() if pipe in ready]:
                ok, value = self._receive(rank, waiting.pop(rank), may_die)
                if ok:
                    results[rank] = value
                elif not failures:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE)
                else:
                    failures[rank] = value
        if failures:
            text = "\n".join(f"--- rank {rank} ---\n{failures[rank]}" for rank in sorted(failures))
            raise RankFailureError(f"{len(failures)} of {len(self.pipes)} ranks failed\n{text}")
        return [results[rank] for rank in range(len(self.pipes))]

    def _receive(self, rank: int, pipe: Connection, may_die: frozenset[int]) -> tuple[bool, Any]:
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            process = self.processes[rank]
            process.join(5)
            if rank in may_die:
                return True, Died(process.exitcode)
            return False, f"the process ended with exit code {process.exitcode} and no result"

    def _where(self, rank: int) -> str:
        """The Python stacks of a rank that does not finish."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.3)
        stack = self.folder / f"stack{rank}"
        return "not finished in time; it stands at\n" + (stack.read_text() if stack.exists() else "?")

    def end(self) -> None:
        # Ranks leave when their pipe closes; one that is stopped or stuck in C is killed.
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    num_ranks: int,
    args: tuple[Any, ...],
    timeout: float,
    folder: str,
    pipe: Connection,
) -> None:
    import torch
    import torch.distributed as dist

    stack = open(f"{folder}/stack{rank}", "w")  # noqa: SIM115 - open as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    # A rank outlives its function until all have finished, so that no peer's last message is cut off.
    threading.Thread(target=_leave_when_closed, args=(pipe,), daemon=True).start()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    # Uninitialised memory is NaN, as in the tests' own process. The public function would import torch's compiler
    # first, which takes seconds.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout),
        )
        message = (True, fn(rank, num_ranks, *args))
    except BaseException:  # noqa: BLE001 - whatever it is, the parent shows it
        message = (False, traceback.format_exc())
    try:
        pipe.send(message)
    except Exception:  # noqa: BLE001 - a result that cannot be pickled
        pipe.send((False, traceback.format_exc()))
    while True:
        signal.pause()


def _leave_when_closed(pipe: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    # Not a normal exit: tearing down a process group whose peers are gone may hang or abort.
    os._exit(0)
