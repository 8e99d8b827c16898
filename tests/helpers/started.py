"""A command and whatever it starts, in other sessions too: found again by a mark in the environment, and never left."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from typing import Self

import psutil

ROOT = Path(__file__).resolve().parents[2]
_MARK = "MOE_RUNTIME_TEST_RUN"
_TORCHRUN = ("torch.distributed.run", "quiet_torchrun.py")


class Started:
    """A context manager: the command runs from entry on, and all of it that is left on exit is killed."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._command = command
        self._log_path = log
        self._mark = uuid.uuid4().hex

    def __enter__(self) -> Self:
        # A folder for its temporary files; not pytest's, since the path of a socket may have 107 bytes only.
        self._folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
        self._shared_memory = set(os.listdir("/dev/shm"))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self._folder), _MARK: self._mark}
        with self._log_path.open("w") as log:
            self.first = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
                cwd=ROOT,
            )
        return self

    def __exit__(self, *_: object) -> None:
        # One may start another while the list is made.
        while left := self.alive():
            for process in left:
                process.kill()
            psutil.wait_procs(left, 1)
        self.first.communicate()
        shutil.rmtree(self._folder)

    def alive(self, **env: str) -> list[psutil.Process]:
        """Processes that are left, zombies excepted; those with these values in their environment."""
        env[_MARK] = self._mark
        found = []
        for process in psutil.process_iter():
            try:
                if env.items() <= process.environ().items() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def ours(self) -> list[psutil.Process]:
        """Those of `alive` that are not torchrun's own: ranks and the front-end."""
        return [
            p for p in self.alive() if not any(word in line for line in command_line(p) for word in _TORCHRUN)
        ]

    def left_files(self) -> list[str]:
        """Sockets and their folders, and shared memory."""
        new = set(os.listdir("/dev/shm")) - self._shared_memory
        shared = [f"/dev/shm/{name}" for name in new if name.startswith("moe-runtime")]
        return [str(path) for path in self._folder.rglob("*moe-runtime*")] + shared

    def wait_gone(self, timeout_s: float) -> int:
        """The command's exit code. Fails unless all has gone within `timeout_s`, and left no file.

        Except torchrun: its interpreter takes seconds to end on a busy machine, so it gets a minute more.
        """
        deadline = time.monotonic() + timeout_s
        while left := self.ours():
            assert time.monotonic() < deadline, f"still there: {left}\n{self.log()}"
            time.sleep(0.02)
        code = self.first.wait(60)
        _, left = psutil.wait_procs(self.alive(), 60)
        assert not left, f"still there: {left}\n{self.log()}"
        # Another server of this machine may have shared memory with a name, for a moment.
        grace = time.monotonic() + 3
        while self.left_files() and time.monotonic() < grace:
            time.sleep(0.1)
        assert not self.left_files(), self.log()
        return code

    def log(self) -> str:
        return self._log_path.read_text()


def command_line(process: psutil.Process) -> list[str]:
    """Empty if it has just ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
