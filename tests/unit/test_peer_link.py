"""Questions between ranks over real sockets: answers, refusals, and every way in which a peer can fail to answer."""

from __future__ import annotations

import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from moe_runtime.peer_link import SECRET_BYTES, PeerClient, PeerError, PeerServer

SECRET = secrets.token_bytes(SECRET_BYTES)
SOON = 20.0


def answer(question: bytes) -> bytes:
    if question.startswith(b"bad"):
        raise ValueError("no such thing")
    return question[::-1] * 3


@pytest.fixture
def server() -> Iterator[PeerServer]:
    made = PeerServer("127.0.0.1", SECRET, answer)
    yield made
    made.close()


def client(*ports: int, secret: bytes = SECRET) -> PeerClient:
    return PeerClient([("127.0.0.1", port) for port in ports], secret)


def later(seconds: float) -> float:
    return time.monotonic() + seconds


def test_answers_of_any_size(server: PeerServer, seed: int) -> None:
    draw = random.Random(seed)
    ours = client(server.port)
    for _ in range(20):
        question = draw.randbytes(draw.choice([1, 2, 100, 60_000]))
        assert ours.ask(0, b"q" + question, later(SOON)) == (b"q" + question)[::-1] * 3
        target = bytearray(3 * (len(question) + 1))
        ours.ask_into(0, b"q" + question, memoryview(target), later(SOON))
        assert bytes(target) == (b"q" + question)[::-1] * 3
    ours.close()


def test_many_clients_at_once(server: PeerServer) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            ours = client(server.port)
            for i in range(50):
                text = b"%d %d" % (number, i)
                assert ours.ask(0, text, later(SOON)) == text[::-1] * 3
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_refusal_has_its_reason_and_the_connection_goes_on(server: PeerServer) -> None:
    ours = client(server.port)
    with pytest.raises(PeerError, match="rank 0 refuses: ValueError: no such thing"):
        ours.ask(0, b"bad", later(SOON))
    assert ours.ask(0, b"ab", later(SOON)) == b"bababa"


def test_an_answer_of_another_size_is_an_error_and_not_taken_for_the_next(server: PeerServer) -> None:
    ours = client(server.port)
    with pytest.raises(PeerError, match="answers with 6 bytes instead of 5"):
        ours.ask_into(0, b"ab", memoryview(bytearray(5)), later(SOON))
    assert ours.ask(0, b"xy", later(SOON)) == b"yxyxyx"


def test_without_the_secret_there_is_no_answer(server: PeerServer) -> None:
    with pytest.raises(PeerError):
        client(server.port, secret=bytes(SECRET_BYTES)).ask(0, b"ab", later(SOON))
    with socket.create_connection(("127.0.0.1", server.port), timeout=SOON) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n" + b"\r\n" * 20)
        with pytest.raises((ConnectionError, AssertionError)):
            assert stranger.recv(1) != b""


def fails_soon(ask: Callable[[], object], within_s: float) -> str:
    began = time.monotonic()
    with pytest.raises(PeerError) as caught:
        ask()
    assert time.monotonic() - began < within_s
    return str(caught.value)


def test_a_silent_peer_is_given_up_at_the_deadline() -> None:
    release = threading.Event()
    silent = PeerServer("127.0.0.1", SECRET, lambda question: bytes(release.wait(30)))
    try:
        fails_soon(lambda: client(silent.port).ask(0, b"ab", later(0.3)), 5.0)
    finally:
        release.set()
        silent.close()


def test_cancel_wakes_who_waits() -> None:
    release = threading.Event()
    silent = PeerServer("127.0.0.1", SECRET, lambda question: bytes(release.wait(30)))
    ours = client(silent.port)
    timer = threading.Timer(0.3, ours.cancel)
    timer.start()
    try:
        fails_soon(lambda: ours.ask(0, b"ab", later(60.0)), 5.0)
        assert fails_soon(lambda: ours.ask(0, b"ab", later(60.0)), 1.0) == "cancelled"
    finally:
        timer.join()
        release.set()
        silent.close()


def test_a_peer_that_is_gone(server: PeerServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert "rank 1 does not answer" in fails_soon(
        lambda: client(server.port, port).ask(1, b"ab", later(SOON)), 5.0
    )


def test_a_peer_that_hangs_up_within_its_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def half() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                # Status, a length of 100, and 10 bytes.
                connection.sendall(b"\x00" + (100).to_bytes(8, "little") + b"x" * 10)

        thread = threading.Thread(target=half)
        thread.start()
        ours = client(listener.getsockname()[1])
        fails_soon(lambda: ours.ask_into(0, b"ab", memoryview(bytearray(100)), later(SOON)), 5.0)
        thread.join()


def test_all_addresses_of_the_host_are_served() -> None:
    made = PeerServer("", SECRET, answer)
    for host in ("127.0.0.1", socket.gethostname()):
        assert PeerClient([(host, made.port)], SECRET).ask(0, b"ab", later(SOON)) == b"bababa"
    made.close()
