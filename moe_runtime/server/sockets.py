"""The socket where clients connect. Imports nothing slow."""

from __future__ import annotations

import socket

from moe_runtime.errors import ConfigError

_BACKLOG = 2048


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
