"""The whole server as users start it: torchrun, its ranks and the HTTP front-end, on a free port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class RealServer:
    """A context manager; the server is ready on entry, and whatever is left of it on exit is killed."""

    def __init__(self, model: Path, ep: int, log: Path, *flags: str) -> None:
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._log_path = log
        self._command = [sys.executable, "-m", "torch.distributed.run", str(ROOT / "launch" / "serve.py")]
        self._command += ["--ep", str(ep), "--model", str(model), "--port", str(self.port), *flags]

    def __enter__(self) -> Self:
        with self._log_path.open("w") as log:
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.torchrun = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=env, start_new_session=True
            )
        self.processes = [psutil.Process(self.torchrun.pid)]
        try:
            self._wait_ready()
        except BaseException:
            self._kill()
            raise
        self.info = httpx.get(self.base_url + "/server_info").json()
        self.processes = [psutil.Process(self.torchrun.pid), *self.processes[0].children(recursive=True)]
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def rank(self, index: int) -> psutil.Process:
        return psutil.Process(self.info["ranks"][index]["pid"])

    def front_end(self) -> psutil.Process:
        (found,) = [p for p in self.processes if "moe_runtime.server.main" in p.cmdline()]
        return found

    def wait_end(self, timeout_s: float) -> int:
        """torchrun's exit code. Fails unless all processes have gone within `timeout_s`."""
        _, alive = psutil.wait_procs(self.processes[1:], timeout_s)
        assert not alive, f"still there: {alive}\n{self.log()}"
        return self.torchrun.wait(timeout_s)

    def signal(self, signum: signal.Signals) -> None:
        """To torchrun, as a service manager does, or Ctrl-C."""
        self.torchrun.send_signal(signum)

    def log(self) -> str:
        return self._log_path.read_text()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            assert self.torchrun.poll() is None, self.log()
            try:
                if httpx.get(self.base_url + "/health", timeout=10).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError("not ready in time:\n" + self.log())

    def _kill(self) -> None:
        if self.torchrun.poll() is None:
            self.processes += self.processes[0].children(recursive=True)
        for process in self.processes:
            if process.is_running():
                process.kill()
        self.torchrun.wait()
