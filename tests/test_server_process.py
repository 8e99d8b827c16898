"""The front-end as the process that rank 0 starts: signals, the parent's death, a port in use."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from moe_runtime.server.main import allow_many_connections
from tests.helpers.live_server import MODEL, make_folder
from tests.helpers.rank_tasks import RankTask
from tests.helpers.real_server import free_port
from tests.helpers.tiny_tokenizer import VOCAB_SIZE

_PARENT = """
import subprocess, sys, time
print(subprocess.Popen(sys.argv[1:], stdin=sys.stdin).pid, flush=True)
time.sleep(600)
"""


class RankThread:
    """Scripted ranks on a loop of their own, for a front-end in another process."""

    def __init__(self, address: str, pid: int) -> None:
        """`pid`: the process whose death is rank 0's."""
        self._address, self._pid = address, pid
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self.ranks: list[RankTask] = []

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._connect(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _connect(self) -> None:
        self.ranks = [RankTask(self._address, rank, VOCAB_SIZE, 256, self._pid) for rank in (0, 1)]
        for rank in self.ranks:
            rank.step_s = 0.05

    async def _close(self) -> None:
        for rank in self.ranks:
            await rank.close()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


class FrontEnd:
    """`python -m moe_runtime.server.main` below a parent that can be killed."""

    def __init__(self, folder: Path, port: int) -> None:
        self.link = folder / "socket" / "link"
        self.link.parent.mkdir()
        self.base_url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "moe_runtime.server.main", "--link", f"ipc://{self.link}"]
        command += ["--engine-json", json.dumps({"model": str(folder), "ep": 2}), "--server-json", "-"]
        server = {"port": port, "served_model_name": MODEL}
        self._stderr = (folder / "stderr").open("w+")
        self.parent = subprocess.Popen(
            [sys.executable, "-c", _PARENT, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        assert self.parent.stdin is not None
        assert self.parent.stdout is not None
        self.parent.stdin.write(json.dumps(server))
        self.parent.stdin.close()
        self.pid = int(self.parent.stdout.readline())
        self.pidfd = os.pidfd_open(self.pid)

    def wait_listening(self) -> None:
        self.wait_for(lambda: httpx.get(self.base_url + "/version").status_code == 200)

    def wait_ready(self) -> None:
        self.wait_for(lambda: httpx.get(self.base_url + "/health").status_code == 200)

    def wait_for(self, condition: Any) -> None:
        for _ in range(1000):
            try:
                if condition():
                    return
            except httpx.TransportError:
                assert not self.has_ended(0), self.stderr()
            time.sleep(0.02)
        pytest.fail("timed out: " + self.stderr())

    def has_ended(self, timeout_s: float) -> bool:
        return bool(select.select([self.pidfd], [], [], timeout_s)[0])

    def stderr(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()

    def end(self) -> None:
        if not self.has_ended(0):
            os.kill(self.pid, signal.SIGKILL)
        self.parent.kill()
        self.parent.wait()
        assert self.parent.stdout is not None
        self.parent.stdout.close()
        os.close(self.pidfd)
        self._stderr.close()


@pytest.fixture
def front_end(folder: Path) -> Iterator[FrontEnd]:
    process = FrontEnd(folder, free_port())
    yield process
    process.end()


def test_ready_line_sigint_and_drain(front_end: FrontEnd) -> None:
    front_end.wait_listening()
    with RankThread(f"ipc://{front_end.link}", 0):
        front_end.wait_ready()
        assert not front_end.link.parent.exists(), "the socket is removed once all ranks are connected"
        line = re.search(r"curl .*", front_end.stderr())
        assert line is not None
        _, url, _, _, _, body = shlex.split(line[0])
        os.kill(front_end.pid, signal.SIGINT)
        answer = httpx.post(url, content=body, timeout=30)
        assert answer.json()["choices"][0]["message"]["content"]
        os.kill(front_end.pid, signal.SIGTERM)
        assert front_end.has_ended(20), front_end.stderr()
        assert "Traceback" not in front_end.stderr()


def test_the_parents_death_is_told_to_clients(front_end: FrontEnd) -> None:
    front_end.wait_listening()
    with RankThread(f"ipc://{front_end.link}", front_end.parent.pid):
        front_end.wait_ready()
        body = {"prompt": "who", "max_tokens": 200, "stream": True}
        with httpx.stream("POST", front_end.base_url + "/v1/completions", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            assert "choices" in next(lines)
            front_end.parent.kill()
            front_end.parent.wait()
            *_, error, _, done, _ = list(lines)
            assert "error" in json.loads(error.removeprefix("data: "))
            assert done == "data: [DONE]"
        refused = httpx.post(front_end.base_url + "/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
        assert front_end.has_ended(10), front_end.stderr()
        assert "Traceback" not in front_end.stderr()


def test_the_parents_death_while_loading(front_end: FrontEnd) -> None:
    front_end.wait_listening()
    front_end.parent.kill()
    assert front_end.has_ended(10), front_end.stderr()
    assert not front_end.link.parent.exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_while_loading(front_end: FrontEnd, signum: signal.Signals) -> None:
    front_end.wait_listening()
    os.kill(front_end.pid, signum)
    assert front_end.has_ended(10), front_end.stderr()
    assert "Traceback" not in front_end.stderr()


@pytest.mark.parametrize("host", ["127.0.0.1", "no.such.host.invalid"])
def test_an_address_that_cannot_be_had_is_one_clear_line(folder: Path, host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "moe_runtime.server.main", "--link", f"ipc://{folder}/link"]
        command += ["--engine-json", json.dumps({"model": str(folder)})]
        command += ["--server-json", json.dumps({"host": host, "port": port})]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert host in line
    if host == "127.0.0.1":
        assert str(port) in line
        assert "--port" in line


def test_the_limit_of_open_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        allow_many_connections()
        raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert raised == (65536 if hard == resource.RLIM_INFINITY else min(65536, hard))
        allow_many_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (raised, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
