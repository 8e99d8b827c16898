"""What processes take from the machine, as the kernel counts it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable


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
    fields = {line.split(":")[0]: line.split()[1] for line in lines}
    return 1024 * (int(fields["Private_Clean"]) + int(fields["Private_Dirty"]))


class PeakPrivate:
    """A context manager that samples processes as often as it can; `bytes` has each one's highest reading so far."""

    def __init__(self, pids: Iterable[int]) -> None:
        self.bytes = dict.fromkeys(pids, 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.002):
            for pid in self.bytes:
                self.bytes[pid] = max(self.bytes[pid], private_bytes(pid))
