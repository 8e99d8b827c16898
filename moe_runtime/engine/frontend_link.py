"""The front-end's end of the wire: one ROUTER socket to all ranks, numbered ticks, and an eye on their processes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from moe_runtime.engine.messages import Command, Progress, RankMessage, Ready, Tick
from moe_runtime.engine.rank_link import set_heartbeat
from moe_runtime.engine.socket_folder import make_socket_folder
from moe_runtime.errors import ConfigError, EngineDeadError

_LOCAL_FIRST_S = 0.2


class FrontendLink:
    """Binds a socket; ranks connect as `rank-<r>`. Must be made inside a running event loop.

    Every tick goes to every rank, in order and without gaps, so that ranks can compare how far each has read.
    """

    def __init__(self, num_ranks: int, address: str | None = None) -> None:
        """`address` is one that somebody else chose and cleans up after; by default a private one is made."""
        self.num_ranks = num_ranks
        self._loop = asyncio.get_running_loop()
        self.dead: asyncio.Future[EngineDeadError] = self._loop.create_future()
        """Done, with the error to report, once a rank's process has gone."""
        self.dead_rank: int | None = None
        """The rank that `dead` is about, if it is known."""
        self.folder: Path | None = None
        """Private (0700); holds the socket and whatever else start-up needs. See `remove_folder`."""
        if address is None:
            self.folder = make_socket_folder()
            address = f"ipc://{self.folder}/socket"
        self.address = address
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(0)
        self._connections: asyncio.Task[None] | None = None
        if not address.startswith("ipc:"):
            set_heartbeat(self._socket)
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._connections = self._loop.create_task(self._watch_connections())
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"the ranks' socket cannot be opened: {error}") from error
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(RankMessage)
        self._num_ticks = 0
        self._pending: dict[int, list[Command]] = {}
        self._flush_handle: asyncio.Handle | None = None
        self._pidfds: dict[int, int] = {}
        """Rank -> pidfd of its process, while it lives."""
        self._watched: set[int] = set()
        """Ranks whose process is or was watched."""
        self._all_gone = asyncio.Event()
        """Set while none of the watched processes lives."""
        self._all_gone.set()
        self._closed = False

    async def recv(self) -> RankMessage:
        """The next message of any rank. Starts to watch a rank's process with the first that tells its pid."""
        _, payload = await self._socket.recv_multipart()
        message: RankMessage = self._decoder.decode(payload)
        if not 0 <= message.rank < self.num_ranks:
            raise EngineDeadError(f"a message from rank {message.rank}, but there are {self.num_ranks} ranks")
        if isinstance(message, Progress | Ready) and message.pid:
            self.watch(message.rank, message.pid)
        return message

    def send_tick(self, commands: Mapping[int, Sequence[Command]]) -> None:
        """Send commands to ranks. Those of one turn of the event loop travel in one tick, sent at its end."""
        for rank, new in commands.items():
            self._pending.setdefault(rank, []).extend(new)
        if self._flush_handle is None and not self._closed:
            self._flush_handle = self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send the commands collected so far, if any, as the next tick."""
        if self._flush_handle is None or self._closed:
            return
        self._flush_handle.cancel()
        self._flush_handle = None
        pending, self._pending = self._pending, {}
        self._num_ticks += 1
        for rank in range(self.num_ranks):
            payload = self._encoder.encode(Tick(self._num_ticks, pending.get(rank, [])))
            # Without a high-water mark this never waits; the future is done unless the rank has gone.
            sent = asyncio.ensure_future(self._socket.send_multipart([b"rank-%d" % rank, payload]))
            sent.add_done_callback(functools.partial(self._on_sent, rank))

    def watch(self, rank: int, pid: int) -> None:
        """Report `dead` when process `pid` ends. Calling it again for the same rank has no effect."""
        if rank in self._watched or self._closed:
            return
        self._watched.add(rank)
        error = EngineDeadError(f"rank {rank} (process {pid}) has died")
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._report(rank, error)
            return
        self._pidfds[rank] = pidfd
        self._all_gone.clear()
        self._loop.add_reader(pidfd, self._on_exit, rank, error)

    async def wait_exits(self, timeout: float) -> bool:
        """Wait until all watched processes have ended, at most `timeout` seconds; whether they have."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._all_gone.wait()
        return not self._pidfds

    def kill(self) -> None:
        """End the watched processes that are still there."""
        for pidfd in self._pidfds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def remove_folder(self) -> None:
        """Remove the private folder, if one was made. Safe once all ranks are connected: the connections stay."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Close the socket; repeated calls have no effect. Messages already handed to the system still arrive."""
        if self._closed:
            return
        self._closed = True
        if self._connections is not None:
            self._connections.cancel()
            self._socket.disable_monitor()
            self._monitor.close()
        for rank in list(self._pidfds):
            self._forget(rank)
        self._socket.close()
        self._context.term()
        self.remove_folder()

    def _on_exit(self, rank: int, error: EngineDeadError) -> None:
        self._forget(rank)
        self._report(rank, error)

    async def _watch_connections(self) -> None:
        """Report `dead` when a rank of another host is disconnected: its process cannot be watched."""
        await self._monitor.recv_multipart()
        # Of a rank on this host the watched process tells more.
        await asyncio.sleep(_LOCAL_FIRST_S)
        if not self.dead.done():
            self.dead.set_result(EngineDeadError("a rank on another host is no longer connected"))

    def _forget(self, rank: int) -> None:
        pidfd = self._pidfds.pop(rank)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        if not self._pidfds:
            self._all_gone.set()

    def _on_sent(self, rank: int, future: asyncio.Future[object]) -> None:
        if future.cancelled() or future.exception() is None:
            return
        # A local rank's process is watched, which tells more; this is how a remote rank's end shows.
        if rank not in self._watched:
            self._report(rank, EngineDeadError(f"rank {rank} is no longer connected: {future.exception()}"))

    def _report(self, rank: int, error: EngineDeadError) -> None:
        if not self.dead.done():
            self.dead_rank = rank
            self.dead.set_result(error)
