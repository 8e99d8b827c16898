"""A rank's end of the wire to the front-end: ticks come in, rank messages go out (ZeroMQ, msgpack)."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from moe_runtime.engine.messages import RankMessage, Tick
from moe_runtime.errors import LockstepError

_HEARTBEAT_MS, _HEARTBEAT_PATIENCE_MS = 5_000, 20_000


def set_heartbeat(socket: zmq.Socket[Any]) -> None:
    """A host that vanishes without a word counts as disconnected after a while. ZeroMQ's own threads answer."""
    socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_PATIENCE_MS)


class RankLink:
    """Connects a DEALER with identity `rank-<r>` to the front-end's ROUTER. Sending never blocks."""

    def __init__(self, address: str, rank: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.IDENTITY, f"rank-{rank}".encode())
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        # On close, what was sent last (an error message) still gets this many ms to leave.
        self._socket.set(zmq.LINGER, 2000)
        self._monitor: zmq.Socket[bytes] | None = None
        if not address.startswith("ipc:"):
            # Processes of this host watch one another; the end of one on another host shows here.
            set_heartbeat(self._socket)
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        self._decoder = msgspec.msgpack.Decoder(Tick)
        self._encoder = msgspec.msgpack.Encoder()
        self.last_tick = 0

    def send(self, message: RankMessage) -> None:
        """Send a message to the front-end; does not wait."""
        self._socket.send(self._encoder.encode(message))

    def drain(self) -> list[Tick]:
        """All ticks that have arrived; does not wait."""
        ticks: list[Tick] = []
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return ticks
            ticks.append(self._decode(frame))

    def wait(self) -> list[Tick]:
        """At least one tick; blocks without using the CPU. Raises LockstepError if the front-end is no longer there."""
        if self._monitor is not None:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._monitor, zmq.POLLIN)
            if self._socket not in dict(poller.poll()):
                raise LockstepError("the front-end is no longer connected")
        return [self._decode(self._socket.recv()), *self.drain()]

    def wait_until(self, number: int) -> list[Tick]:
        """All ticks up to `number` at least. It was sent to every rank, so it will come."""
        ticks: list[Tick] = []
        while self.last_tick < number:
            ticks += self.wait()
        return ticks

    def close(self) -> None:
        """Leave; what was sent last gets two seconds to go out."""
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close()
        self._socket.close()
        self._context.term()

    def _decode(self, frame: bytes) -> Tick:
        tick = self._decoder.decode(frame)
        if tick.number != self.last_tick + 1:
            raise LockstepError(f"front-end message {tick.number} came after {self.last_tick}")
        self.last_tick = tick.number
        return tick
