"""The front-end's two sockets: where clients connect, and where the ranks do. Imports nothing slow."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from moe_runtime.errors import ConfigError

_BACKLOG = 2048
_IPC = "ipc://"


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises ConfigError if the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as exc:
        raise ConfigError(f"host={host!r}: {exc.strerror or exc}") from exc
    try:
        # Lets a restart reuse the port at once; a listener that is still there makes bind fail all the same.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as exc:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {exc.strerror}; choose another with --port or --host"
        ) from exc
    sock.setblocking(False)
    sock.set_inheritable(False)
    return sock


def remove_link(address: str) -> None:
    """Remove the file of the ranks' socket and its folder, if it has one. Those connected stay so."""
    if address.startswith(_IPC):
        path = Path(address.removeprefix(_IPC))
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            path.parent.rmdir()
