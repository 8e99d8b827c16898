"""The private folder of the socket between front-end and ranks, on one host. Imports nothing slow."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from moe_runtime.errors import CapacityError

# The kernel allows 107 bytes for the path of a socket.
_LONGEST_TEMPDIR = 70
_IPC = "ipc://"
RENDEZVOUS = "rendezvous"
"""Name of the file, beside the socket, through which the ranks that `LLM` starts find each other."""


def make_socket_folder() -> Path:
    """A new folder (0700) whose path is short enough for a socket in it. Raises CapacityError if there can be none."""
    try:
        long = len(tempfile.gettempdir()) > _LONGEST_TEMPDIR
        return Path(tempfile.mkdtemp(prefix="moe-runtime-", dir="/tmp" if long else None))
    except OSError as error:
        raise CapacityError(f"no temporary folder can be made: {error}; set TMPDIR to another") from error


def remove_socket_folder(address: str) -> None:
    """Remove what `address` has in the file system, if anything. Those connected stay so. Repeated calls do no harm."""
    if not address.startswith(_IPC):
        return
    path = Path(address.removeprefix(_IPC))
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        path.with_name(RENDEZVOUS).unlink(missing_ok=True)
        path.parent.rmdir()
