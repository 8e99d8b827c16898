"""Ranks as processes of this program, for `LLM`: start them, and make sure that they go."""

from __future__ import annotations

import os
import signal
import site
import subprocess
import sys
from pathlib import Path

import msgspec

from moe_runtime.config import EngineConfig
from moe_runtime.engine.socket_folder import RENDEZVOUS
from moe_runtime.watchdog import PEER_DIED_EXIT_CODE

WORKER = "moe_runtime.engine.worker"
_PACKAGE_PARENT = Path(__file__).resolve().parents[2]


class LocalRanks:
    """One process per rank, in a session of its own so that Ctrl-C in a terminal stays with the program.

    Nothing is imported from the user's script, so it needs no `__main__` guard. The processes end with this one:
    the worker sees to that itself.
    """

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    @classmethod
    def spawn(cls, config: EngineConfig, address: str, folder: Path, worker: str = WORKER) -> LocalRanks:
        """Start `config.ep` ranks that connect to `address` and meet in `folder`.

        The calling thread must live as long as the ranks: Linux ties a child's life to the thread that made it.
        """
        command = [sys.executable, "-P", "-m", worker]
        command += ["--link", address, "--config-json", msgspec.json.encode(config).decode()]
        command += ["--rendezvous", f"file://{folder / RENDEZVOUS}", "--parent", str(os.getpid())]
        ranks = cls([])
        try:
            for rank in range(config.ep):
                # Their messages go to stderr: stdout belongs to the program.
                process = subprocess.Popen(
                    command,
                    env=_environment(rank, config.ep),
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    start_new_session=True,
                )
                ranks._processes.append(process)
        except BaseException:
            ranks.kill()
            raise
        return ranks

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self._processes]

    def kill(self) -> None:
        """End those that are left at once, and collect them."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()

    def describe_exit(self) -> str | None:
        """How a process that failed ended; None if none has. Rather one that did not just follow another."""
        failed = [(rank, p) for rank, p in enumerate(self._processes) if p.poll()]
        if not failed:
            return None
        rank, process = min(failed, key=lambda pair: pair[1].returncode == PEER_DIED_EXIT_CODE)
        code = process.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"rank {rank} (process {process.pid}) ended with {how}"


def _environment(rank: int, num_ranks: int) -> dict[str, str]:
    env = dict(os.environ)
    local = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks}
    env.update({name: str(value) for name, value in local.items()})
    # A program may have found the package through sys.path alone. Installed, it is found anyway.
    if str(_PACKAGE_PARENT) not in site.getsitepackages():
        paths = [str(_PACKAGE_PARENT), *filter(None, [env.get("PYTHONPATH")])]
        env["PYTHONPATH"] = os.pathsep.join(paths)
    return env
