"""What processes take from the machine, as the kernel counts it."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def cpu_ns(pid: int) -> dict[int, int]:
    """Nanoseconds on a CPU of each thread; exact, where utime and stime are rounded to ticks."""
    return {
        int(task.name): int((task / "schedstat").read_text().split()[0])
        for task in Path(f"/proc/{pid}/task").iterdir()
    }


def cpu_seconds_between(before: dict[int, int], after: dict[int, int]) -> float:
    return sum(ns - before.get(thread, 0) for thread, ns in after.items()) / 1e9


def private_bytes(pid: int) -> int:
    """Resident memory that no other process shares: what this one alone takes. Shared memory and files are not in it."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    fields = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return 1024 * (fields["Private_Clean"] + fields["Private_Dirty"])


def peak_anonymous_bytes(pid: int) -> int:
    """The highest resident memory so far, without the files and the shared memory that are mapped now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
    return 1024 * (fields["VmHWM"] - fields["RssFile"] - fields["RssShmem"])


class PeakPrivate:
    """A context manager that samples processes as often as it can; `bytes` has each one's highest reading so far."""

    def __init__(self, find: Callable[[], Iterable[int]]) -> None:
        """`find` names the processes; it is asked again and again, since they may start later."""
        self.bytes: dict[int, int] = {}
        self._find = find
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        rounds = 0
        while not self._stop.wait(0.005):
            if rounds % 50 == 0:
                self.bytes |= {pid: 0 for pid in self._find() if pid not in self.bytes}
            rounds += 1
            for pid in list(self.bytes):
                # A process that has ended, or is about to.
                with contextlib.suppress(OSError, KeyError):
                    self.bytes[pid] = max(self.bytes[pid], private_bytes(pid))
