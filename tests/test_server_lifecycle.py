"""Loading, draining, stopping and dying of the front-end, in a thread of the test, with scripted ranks."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from moe_runtime.engine.messages import Failed
from moe_runtime.errors import CapacityError
from moe_runtime.server.state import Phase
from tests.helpers.live_server import LiveServer, make_folder

LONG = {"prompt": "who runs", "max_tokens": 100}


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Not tmp_path: it has the test's name in it, and the path of a socket may have 107 bytes only.
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def check_503(answer: httpx.Response, code: str) -> None:
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"]["code"] == code
    assert int(answer.headers["retry-after"]) >= 1


def post(live: LiveServer, **fields: Any) -> httpx.Response:
    return httpx.post(live.base_url + "/v1/completions", json=LONG | fields, timeout=30)


class StartedStream:
    """A stream of which one event has been read, while the ranks go on slowly or not at all."""

    def __init__(self, live: LiveServer, pool: ThreadPoolExecutor, after_first: Callable[[], None]) -> None:
        for rank in live.ranks:
            rank.step_s = 0.02
        self._live = live
        self._after_first = after_first
        self._started: Future[None] = Future()
        self._rest = pool.submit(self._read)
        self._started.result(30)

    def _read(self) -> list[str]:
        with httpx.stream(
            "POST", self._live.base_url + "/v1/completions", json=LONG | {"stream": True}
        ) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            next(lines)
            self._after_first()
            self._started.set_result(None)
            return [line.removeprefix("data: ") for line in lines if line]

    def rest(self) -> list[str]:
        """The data of the events after the first, to the end."""
        return self._rest.result(30)


def test_while_loading_everything_but_probes_gets_503(folder: Path) -> None:
    with LiveServer(folder, ready=False) as live, httpx.Client(base_url=live.base_url) as http:
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/server_info")):
            check_503(http.request(method, path), "loading")
        check_503(http.get("/health"), "loading")
        check_503(http.get("/metrics"), "loading")
        assert http.get("/load").json()["phase"] == "loading"
        assert http.get("/version").status_code == 200
        live.connect_ranks()
        assert http.get("/health").status_code == 200
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_draining_finishes_what_runs_and_refuses_what_comes(folder: Path, pool: ThreadPoolExecutor) -> None:
    with LiveServer(folder) as live:
        stream = StartedStream(live, pool, lambda: None)
        live.hold()
        live.call(live.life.drain)
        check_503(post(live), "shutting_down")
        check_503(httpx.get(live.base_url + "/health"), "shutting_down")
        assert "moe_runtime:num_requests_running" in httpx.get(live.base_url + "/metrics").text
        live.release()
        *events, done = stream.rest()
        assert done == "[DONE]"
        assert json.loads(events[-1])["choices"][0]["finish_reason"] == "length"
        assert live.join() == 0
        assert all(rank.stopped for rank in live.ranks)


@pytest.mark.parametrize("how", ["timeout", "stop", "second signal"])
def test_what_is_cut_off_gets_an_error(folder: Path, pool: ThreadPoolExecutor, how: str) -> None:
    with LiveServer(folder, shutdown_timeout=0.2 if how == "timeout" else 25.0) as live:
        stream = StartedStream(live, pool, live.hold)
        waiting = pool.submit(post, live)
        live.wait_for(lambda: live.num_active() == 2)
        if how == "stop":
            live.call(live.life.stop)
        else:
            live.call(live.life.drain)
            if how == "second signal":
                live.call(live.life.drain)
                assert not waiting.done(), "an echo"
                time.sleep(1.1)
                live.call(live.life.drain)
        assert waiting.result(20).status_code == 503
        *_, error, done = stream.rest()
        assert json.loads(error)["error"]["message"]
        assert done == "[DONE]"
        assert live.join() == 0
        assert all(rank.stopped for rank in live.ranks)


def test_a_dead_rank_ends_everything_with_an_error(folder: Path, pool: ThreadPoolExecutor) -> None:
    with LiveServer(folder) as live:
        stream = StartedStream(live, pool, live.hold)
        waiting = pool.submit(post, live)
        live.wait_for(lambda: live.num_active() == 2)
        live.call(lambda: live.ranks[1].fail("out of memory"))
        check_503(waiting.result(20), "engine_dead")
        *_, error, done = stream.rest()
        assert "out of memory" in json.loads(error)["error"]["message"]
        assert done == "[DONE]"
        for path in ("/health", "/v1/models", "/health_generate"):
            check_503(httpx.get(live.base_url + path), "engine_dead")
        assert "moe_runtime:" in httpx.get(live.base_url + "/metrics").text
        assert live.join() == 1


def test_a_request_that_has_not_arrived_does_not_hold_up_the_end(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LiveServer(folder) as live:
        port = int(live.base_url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
            time.sleep(0.2)
            began = time.monotonic()
            live.call(live.life.drain)
            assert live.join() == 0
            assert time.monotonic() - began < 15, "shutdown_timeout is 25 s"
            assert b" 503 " in sock.recv(4096)
    assert not [record for record in caplog.records if record.exc_info]


def test_death_counts_for_more_than_draining(folder: Path, pool: ThreadPoolExecutor) -> None:
    with LiveServer(folder) as live:
        stream = StartedStream(live, pool, live.hold)
        live.call(live.life.drain)
        live.call(lambda: live.ranks[0].fail("gone"))
        assert "gone" in stream.rest()[-2]
        assert live.join() == 1


def test_the_parents_death_while_loading(folder: Path) -> None:
    with LiveServer(folder, ready=False) as live:
        live.call(lambda: live.life.fail("rank 0 has died"))
        check_503(httpx.get(live.base_url + "/v1/models"), "engine_dead")
        assert live.join() == 1


def test_what_a_rank_fails_with_while_loading_is_raised(folder: Path) -> None:
    with LiveServer(folder, ready=False) as live, zmq.Context() as context, contextlib.ExitStack() as stack:
        socket = stack.enter_context(context.socket(zmq.DEALER))
        socket.set(zmq.IDENTITY, b"rank-1")
        socket.connect(f"ipc://{folder}/link")
        socket.send(msgspec.msgpack.encode(Failed(1, "CapacityError", "needs 3 GiB, 1 GiB is free")))
        with pytest.raises(CapacityError, match="needs 3 GiB"):
            live.join()


def test_a_stop_while_loading_ends_at_once(folder: Path) -> None:
    with LiveServer(folder, ready=False) as live:
        live.call(live.life.drain)
        assert live.join() == 0
        assert live.life.state.phase is Phase.DRAINING
