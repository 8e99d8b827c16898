"""The whole server as users start it: torchrun, its ranks and the HTTP front-end, on a free port."""

from __future__ import annotations

import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Self

import httpx
import psutil

from tests.helpers.started import Started, command_line

SERVE = str(Path(__file__).resolve().parents[2] / "launch" / "serve.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def free_port() -> int:
    """A port below those that systems give out by themselves: one of those could be given to another process before it is used."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class RealServer(Started):
    """A context manager; the server is ready on entry unless `wait=False`."""

    def __init__(
        self,
        model: Path,
        ep: int,
        log: Path,
        *flags: str,
        launcher: tuple[str, ...] = TORCHRUN,
        wait: bool = True,
        port: int | None = None,
    ) -> None:
        """`launcher`: the command in front of launch/serve.py. `port`: a free one by default."""
        self.port = port or free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._ep, self._wait = ep, wait
        command = [*launcher, SERVE, "--ep", str(ep), "--model", str(model), "--port", str(self.port)]
        super().__init__([*command, *flags], log)

    def __enter__(self) -> Self:
        super().__enter__()
        if self._wait:
            try:
                self.wait_ready()
            except BaseException:
                self.__exit__()
                raise
        return self

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 180
        while not self._is_ready():
            assert self.first.poll() is None, self.log()
            assert time.monotonic() < deadline, "not ready in time:\n" + self.log()
            time.sleep(0.05)

    def rank(self, index: int) -> psutil.Process:
        """The process of a rank, as soon as there is one."""
        return self._find(SERVE, RANK=str(index), WORLD_SIZE=str(self._ep))

    def front_end(self) -> psutil.Process:
        """The HTTP process, as soon as there is one."""
        return self._find("moe_runtime.server.main")

    def signal(self, signum: signal.Signals) -> None:
        """To the command, as a service manager does, or Ctrl-C."""
        self.first.send_signal(signum)

    def _find(self, word: str, **env: str) -> psutil.Process:
        deadline = time.monotonic() + 60
        while True:
            for process in self.alive(**env):
                if word in command_line(process):
                    return process
            assert time.monotonic() < deadline, f"no {word} {env}\n{self.log()}"
            time.sleep(0.01)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(self.base_url + "/health", timeout=10).status_code == 200
        except httpx.TransportError:
            return False
