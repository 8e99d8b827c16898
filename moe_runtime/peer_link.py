"""Answers to questions of other ranks, beside the collectives: each rank serves from threads, each asks when it likes.

For what may be late, or fail, without harm to the lockstep: expert weights on their way to another rank, plans, load
counts. A collective would tie every rank to the slowest, and a process group that has timed out once cannot be used again;
here a lost answer costs one connection. Payload is bytes; nothing is pickled.

On the wire: the group's secret; then questions, each a length (8 bytes, little-endian) and as many bytes; each is answered by a
status byte (0: as asked, 1: a reason in UTF-8), a length, and the bytes.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from moe_runtime.errors import MoeRuntimeError

if TYPE_CHECKING:
    from moe_runtime.topology import Topology

SECRET_BYTES = 32
_LENGTH = struct.Struct("<Q")
_STATUS = struct.Struct("<BQ")
_LONGEST_QUESTION = 1 << 16
_LONGEST_ANSWER = 1 << 30
_PATIENCE_S = 30.0
"""How long a server waits for the rest of a question that has begun, or for its answer to be taken."""

Answer = Callable[[bytes], "bytes | memoryview"]

logger = logging.getLogger(__name__)


class PeerError(MoeRuntimeError):
    """A peer did not answer, or said why it cannot."""


class PeerServer:
    """Answers questions until `close`; at most one answer is computed at a time for each connection."""

    def __init__(self, host: str, secret: bytes, answer: Answer) -> None:
        """Listens on a free port of `host` (empty: all addresses). `answer` is called on several threads; may raise."""
        self._secret, self._answer = secret, answer
        both = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, dualstack_ipv6=both)
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, name="peer-server", daemon=True).start()

    def close(self) -> None:
        """Take no more connections; those there are end with the process."""
        with contextlib.suppress(OSError):
            # Wakes the thread that waits in accept().
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="peer-answer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(_PATIENCE_S)
                if not hmac.compare_digest(_receive(connection, SECRET_BYTES), self._secret):
                    logger.warning("a connection without this server's secret was refused")
                    return
                while True:
                    connection.settimeout(None)
                    first = connection.recv(1)
                    if not first:
                        return
                    connection.settimeout(_PATIENCE_S)
                    (length,) = _LENGTH.unpack(first + _receive(connection, _LENGTH.size - 1))
                    if length > _LONGEST_QUESTION:
                        return
                    self._reply(connection, _receive(connection, length))
            except OSError as error:
                logger.debug("a peer's connection ended: %s", error)

    def _reply(self, connection: socket.socket, question: bytes) -> None:
        status = 0
        try:
            body = memoryview(self._answer(question)).cast("B")
        except Exception as error:  # noqa: BLE001 - whoever asked is told, and decides
            status, body = 1, memoryview(f"{type(error).__name__}: {error}".encode())
        connection.sendall(_STATUS.pack(status, len(body)))
        connection.sendall(body)


class PeerClient:
    """Asks other ranks. One connection per peer, made when first needed and again after an error.

    For one thread at a time; only `cancel` may be called by another.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], secret: bytes) -> None:
        """`addresses`: host and port by rank."""
        self._addresses, self._secret = addresses, secret
        self._connections: dict[int, socket.socket] = {}
        self._cancelled = False

    def ask(self, rank: int, question: bytes, deadline: float) -> bytes:
        """The answer; raises PeerError at `deadline` (time.monotonic()) at the latest."""

        def read(connection: socket.socket, length: int) -> bytes:
            if length > _LONGEST_ANSWER:
                raise PeerError(f"rank {rank} answers with {length} bytes")
            return _receive(connection, length)

        return self._ask(rank, question, deadline, read)

    def ask_into(self, rank: int, question: bytes, target: memoryview, deadline: float) -> None:
        """As `ask`, into `target`, which the answer must fill exactly."""

        def read(connection: socket.socket, length: int) -> bytes:
            if length != len(target):
                raise PeerError(f"rank {rank} answers with {length} bytes instead of {len(target)}")
            _receive_into(connection, target)
            return b""

        self._ask(rank, question, deadline, read)

    def cancel(self) -> None:
        """Let whatever waits in another thread fail soon, and everything after it."""
        self._cancelled = True
        for connection in list(self._connections.values()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Leave the peers."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _ask(
        self, rank: int, question: bytes, deadline: float, read: Callable[[socket.socket, int], bytes]
    ) -> bytes:
        if self._cancelled:
            raise PeerError("cancelled")
        try:
            connection = self._connect(rank, deadline)
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            connection.sendall(_LENGTH.pack(len(question)) + question)
            status, length = _STATUS.unpack(_receive(connection, _STATUS.size))
            if not status:
                return read(connection, length)
            reason = _receive(connection, min(length, _LONGEST_QUESTION)).decode(errors="replace")
        except (OSError, PeerError) as error:
            # What is left of the answer must not be taken for the next one.
            if (broken := self._connections.pop(rank, None)) is not None:
                broken.close()
            raise PeerError(f"rank {rank} does not answer: {error}") from error
        raise PeerError(f"rank {rank} refuses: {reason}")

    def _connect(self, rank: int, deadline: float) -> socket.socket:
        if rank not in self._connections:
            left = max(0.001, deadline - time.monotonic())
            connection = socket.create_connection(self._addresses[rank], timeout=left)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(self._secret)
            self._connections[rank] = connection
        return self._connections[rank]


class PeerLink:
    """This rank's server, and how to ask the others'. Collective to make."""

    def __init__(self, topology: Topology, answer: Answer) -> None:
        own = secrets.token_bytes(SECRET_BYTES).hex() if topology.rank == 0 else ""
        self._secret = bytes.fromhex(topology.broadcast_text(own))
        host = "127.0.0.1" if topology.single_host else ""
        self._server = PeerServer(host, self._secret, answer)
        lines = topology.all_gather_text(f"{topology.own_address} {self._server.port}")
        pairs = [line.rsplit(" ", 1) for line in lines]
        self._addresses = [(address, int(port)) for address, port in pairs]

    def client(self) -> PeerClient:
        """One for each thread that asks."""
        return PeerClient(self._addresses, self._secret)

    def close(self) -> None:
        self._server.close()


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _receive_into(connection, memoryview(data))
    return bytes(data)


def _receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill `target`. Raises ConnectionError if the peer leaves before, TimeoutError if it is late."""
    done = 0
    while done < len(target):
        size = connection.recv_into(target[done:])
        if not size:
            raise ConnectionResetError("the connection was closed")
        done += size
