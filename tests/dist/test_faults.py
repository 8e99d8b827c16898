"""The whole server when processes are killed, stopped and told to end: clients learn of it, and nothing is left."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.real_server import RealServer
from tests.helpers.started import Started
from tests.helpers.tiny_models import make_tiny
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

EP = 2
# The cache is small, so that the machine's memory does not matter.
FLAGS = ("--num-kv-blocks", "256", "--max-num-seqs", "4")
PLAIN = (sys.executable,)
END_S = 10.0
DRAIN_S = 30.0
LONG = {"prompt": [40, 50, 60], "max_tokens": 500, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    # Deep enough that 500 tokens take a while.
    make_tiny("mixtral", folder, 7, vocab_size=VOCAB_SIZE, num_hidden_layers=8)
    save_tokenizer(folder)
    return folder


class Stream:
    """A streamed completion, read in a thread."""

    def __init__(self, server: RealServer, pool: ThreadPoolExecutor, **fields: Any) -> None:
        self._body = LONG | {"stream": True} | fields
        self._url = server.base_url + "/v1/completions"
        self._started = threading.Event()
        self._result = pool.submit(self._read)

    def _read(self) -> list[str]:
        data = []
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60) as answer:
                assert answer.status_code == 200
                for line in answer.iter_lines():
                    if line:
                        data.append(line.removeprefix("data: "))
                        self._started.set()
        except httpx.TransportError as error:
            data.append(repr(error))
        return data

    def wait_started(self) -> None:
        assert self._started.wait(60)

    def events(self) -> list[str]:
        """The data of all events; the last one is an exception's if the connection broke."""
        return self._result.result(60)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def answers_until_refused(server: RealServer, timeout_s: float = END_S) -> list[tuple[int, str]]:
    """Status and code of the answers to new requests, until no connection is made any more."""
    answers = []
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            answer = httpx.post(server.base_url + "/v1/completions", json={"prompt": [9]}, timeout=10)
        except httpx.ConnectError:
            return answers
        except httpx.TransportError:
            # The listening socket is closed with this connection in its queue.
            continue
        answers.append((answer.status_code, (answer.json().get("error") or {}).get("code")))
        time.sleep(0.05)
    pytest.fail(f"still listening: {answers[-1]}")


def check_cut_off(events: list[str]) -> None:
    """Some tokens, then an error event and the end of the stream."""
    assert events[-1] == "[DONE]", events[-2:]
    assert json.loads(events[-2])["error"]["code"] == "engine_dead"
    assert "choices" in json.loads(events[0])


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_all_and_clients_are_told(
    checkpoint: Path, tmp_path: Path, pool: ThreadPoolExecutor, victim: int
) -> None:
    with RealServer(checkpoint, EP, tmp_path / "log", *FLAGS) as server:
        streams = [Stream(server, pool, routed_dp_rank=rank) for rank in range(EP)]
        for stream in streams:
            stream.wait_started()
        # Waits for one of the seats, so it has not been answered at all when the rank dies.
        unstarted = pool.submit(httpx.post, server.base_url + "/v1/completions", json=LONG | {"n": 8}, timeout=60)
        time.sleep(0.1)
        pid = server.rank(victim).pid
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        answers = answers_until_refused(server)
        refused_s = time.monotonic() - killed
        assert server.wait_gone(END_S - refused_s) != 0
        for stream in streams:
            check_cut_off(stream.events())
        assert unstarted.result(10).status_code == 503
        late = [answer for answer in answers if answer != (200, None)]
        assert late
        assert set(late) == {(503, "engine_dead")}
        assert refused_s > 1.5, "no time to tell new requests"
        # Who notices first - the front-end, or the other rank in a collective - words it.
        assert re.search(rf"rank {victim} (\(process {pid}\) has )?died", server.log())


def test_a_killed_front_end_ends_all(checkpoint: Path, tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with RealServer(checkpoint, EP, tmp_path / "log", *FLAGS) as server:
        stream = Stream(server, pool)
        stream.wait_started()
        server.front_end().kill()
        assert server.wait_gone(END_S) != 0
        assert "Error" in stream.events()[-1]
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.base_url + "/health")


@pytest.mark.parametrize("how", ["SIGTERM", pytest.param("torchrun killed", marks=pytest.mark.slow)])
def test_draining_finishes_what_runs(
    checkpoint: Path, tmp_path: Path, pool: ThreadPoolExecutor, how: str
) -> None:
    with RealServer(checkpoint, EP, tmp_path / "log", *FLAGS) as server:
        stream = Stream(server, pool, max_tokens=200)
        stream.wait_started()
        server.signal(signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL)
        answers = answers_until_refused(server, DRAIN_S)
        assert {answer for answer in answers if answer != (200, None)} == {(503, "shutting_down")}
        *_, last, done = stream.events()
        assert done == "[DONE]"
        assert json.loads(last)["choices"][0]["finish_reason"] == "length"
        server.wait_gone(END_S)
        assert "[http] ERROR" not in server.log()


def test_ctrl_c_stops_at_once(checkpoint: Path, tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with RealServer(checkpoint, EP, tmp_path / "log", *FLAGS) as server:
        streams = [Stream(server, pool, n=4) for _ in range(2)]
        for stream in streams:
            stream.wait_started()
        server.signal(signal.SIGINT)
        server.wait_gone(END_S)
        for stream in streams:
            check_cut_off(stream.events())
        assert "ERROR" not in server.log()


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_is_silent_too_long_ends_all(
    checkpoint: Path, tmp_path: Path, pool: ThreadPoolExecutor, victim: int
) -> None:
    with RealServer(checkpoint, EP, tmp_path / "log", *FLAGS, "--step-timeout", "2") as server:
        stream = Stream(server, pool)
        stream.wait_started()
        server.rank(victim).suspend()
        check_cut_off(stream.events())
        # The one that is suspended cannot leave by itself.
        assert server.wait_gone(END_S) != 0
        assert f"rank {1 - victim} failed: LockstepError" in server.log()


LOADING = [("rank 0", signal.SIGKILL), ("front-end", signal.SIGKILL)]
LOADING_TOO = [
    *((who, signum) for who in ("rank 0", "rank 1", "front-end") for signum in (signal.SIGKILL, signal.SIGTERM)),
    *(("command", signum) for signum in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)),
]


@pytest.mark.parametrize(
    ("who", "signum"),
    [*LOADING, *(pytest.param(*case, marks=pytest.mark.slow) for case in LOADING_TOO if case not in LOADING)],
)
def test_an_end_while_starting_leaves_nothing(
    checkpoint: Path, tmp_path: Path, who: str, signum: signal.Signals, seed: int
) -> None:
    # Anywhere from the first line of a process to the end of loading.
    delay_s = random.Random(seed).choice([0.0, 0.3, 1.0, 2.0, 4.0])
    with RealServer(checkpoint, EP, tmp_path / "log", *FLAGS, launcher=PLAIN, wait=False) as server:
        if who == "command":
            pid = server.first.pid
            server.rank(0)
        else:
            pid = (server.front_end() if who == "front-end" else server.rank(int(who[-1]))).pid
        time.sleep(delay_s)
        os.kill(pid, signum)
        server.wait_gone(END_S)
        assert "Traceback" not in server.log()


@pytest.mark.slow
def test_a_rank_killed_while_nothing_happens(checkpoint: Path, tmp_path: Path) -> None:
    with RealServer(checkpoint, EP, tmp_path / "log", *FLAGS) as server:
        time.sleep(3)
        server.rank(1).kill()
        assert {answer for answer in answers_until_refused(server) if answer[0] != 200} == {(503, "engine_dead")}
        assert server.wait_gone(END_S) != 0


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_program_that_ends_while_its_llm_starts_leaves_nothing(
    checkpoint: Path, tmp_path: Path, signum: signal.Signals, seed: int
) -> None:
    script = f"from moe_runtime import LLM; LLM(model={str(checkpoint)!r}, ep=2, num_kv_blocks=64); input()"
    with Started([sys.executable, "-c", script], tmp_path / "log") as program:
        while len(program.alive()) < 3:
            assert program.first.poll() is None, program.log()
        time.sleep(random.Random(seed).uniform(0.0, 3.0))
        program.first.send_signal(signum)
        assert program.wait_gone(END_S) == -signum
