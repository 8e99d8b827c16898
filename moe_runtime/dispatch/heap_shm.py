"""A symmetric heap in POSIX shared memory: every CPU rank of one host owns a segment, and all map all.

The files live in /dev/shm only from the start of construction until every rank has mapped them; then the names
are removed, and the memory goes with its last process, however that ends.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import platform
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import torch

from moe_runtime.errors import BackendUnavailable, CapacityError, MoeRuntimeError

SHM_FOLDER = Path("/dev/shm")
AllGatherText = Callable[[str], list[str]]
"""Gives everyone's text by rank; collective (`Topology.all_gather_text`). Raises LockstepError if a peer is gone."""

V = TypeVar("V")


def unsupported(same_host: bool, device_type: str) -> str | None:
    """Why ranks cannot share memory, or None."""
    if device_type != "cpu":
        return f"shared memory joins cpu ranks, not {device_type}"
    if not same_host:
        return "the ranks are on several hosts"
    # The flags of the protocol are plain stores; only x86 makes them visible in program order.
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"its flags rely on the store order of x86-64, this is {platform.machine()}"
    if not SHM_FOLDER.is_dir():
        return f"no {SHM_FOLDER} on this system"
    return None


def free_shm_bytes(folder: Path = SHM_FOLDER) -> int:
    """Bytes of shared memory that can still be reserved; 0 where there is no such folder."""
    try:
        status = os.statvfs(folder)
    except FileNotFoundError:
        return 0
    return status.f_bavail * status.f_frsize


class SharedHeap:
    """One segment of shared memory per rank, all of the same size, zero at first. A SymmetricHeap.

    segments[r]: rank r's segment as uint8 tensor; words[r]: the same memory as int64 words, for flags.
    """

    def __init__(
        self, rank: int, all_gather_text: AllGatherText, bytes_per_rank: int, folder: Path = SHM_FOLDER
    ) -> None:
        """All ranks call this together.

        Raises on every rank alike CapacityError if /dev/shm has too little room on any, and BackendUnavailable
        if a rank cannot open another's file. `bytes_per_rank`: a multiple of 8. `folder`: where shared memory
        has its names.
        """
        self.rank = rank
        name = f"moe-runtime-{os.getpid()}-{secrets.token_hex(8)}"
        own_path = folder / name
        try:
            _agree(all_gather_text, lambda: _reserve(own_path, bytes_per_rank), CapacityError)
            names = all_gather_text(name)
            self.num_ranks = len(names)
            self._maps = _agree(
                all_gather_text,
                lambda: _map_all([folder / n for n in names], bytes_per_rank),
                BackendUnavailable,
            )
        finally:
            with contextlib.suppress(FileNotFoundError):
                own_path.unlink()
        # Tensors made inside inference mode could not be written outside it.
        with torch.inference_mode(False):
            self.segments = [torch.frombuffer(m, dtype=torch.uint8) for m in self._maps]
            self.segment = self.segments[rank]
            self.addresses_N = torch.tensor([segment.data_ptr() for segment in self.segments])
        self.words = [memoryview(m).cast("q") for m in self._maps]

    def close(self) -> None:
        """Drop the mappings; memory still referenced by a tensor lives until that goes. Idempotent."""
        self.segment = torch.empty(0, dtype=torch.uint8)
        self.segments, self.words, self._maps = [], [], []


def _reserve(path: Path, size: int) -> None:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # Pages are taken now: a write past the room of /dev/shm would be a SIGBUS, not an error.
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        raise CapacityError(
            f"{path.parent} cannot hold {size / 2**20:.1f} MiB of dispatch buffer for a rank; {free_shm_bytes(path.parent) / 2**20:.1f} MiB"
            " are free. Lower dispatch_buffer_mib, enlarge it (docker run --shm-size), or use dispatcher=collective"
        ) from error
    finally:
        os.close(fd)


def _map_all(paths: list[Path], size: int) -> list[mmap.mmap]:
    maps = []
    for rank, path in enumerate(paths):
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError as error:
            raise BackendUnavailable(
                f"the shared memory of rank {rank} cannot be opened ({error.strerror}): are all ranks on one host"
                " and in one container?"
            ) from error
        try:
            maps.append(mmap.mmap(fd, size))
        finally:
            os.close(fd)
    return maps


def _agree(all_gather_text: AllGatherText, step: Callable[[], V], kind: type[MoeRuntimeError]) -> V:
    """Run a step on all ranks; if it fails on one, raise `kind` on every rank with that rank's reason."""
    result: V | None = None
    cause: Exception | None = None
    try:
        result = step()
    except (OSError, MoeRuntimeError) as error:
        cause = error
    notes = all_gather_text(str(cause) if cause else "")
    for rank, note in enumerate(notes):
        if note:
            raise kind(f"rank {rank}: {note}") from cause
    return cast("V", result)
