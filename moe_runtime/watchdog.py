"""Notices the death of other processes of this server, and ends this one when that happens.

A rank blocked in a collective cannot run Python signal handlers, so a thread watches the others' pidfds
(Linux: see pidfd_open(2)) and ends the process itself. No torch import: it starts before anything slow does.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import threading

logger = logging.getLogger(__name__)

PEER_DIED_EXIT_CODE = 70
_PR_SET_PDEATHSIG = 1


class Watchdog:
    """Ends this process with PEER_DIED_EXIT_CODE within milliseconds of a watched process's death.

    `disarm()` first where an end is expected. A process that is already gone when `watch` is called counts as dead.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._names: dict[int, str] = {}
        self._armed = True
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def watch(self, pid: int, name: str) -> None:
        """Watch the local process `pid`, called `name` in the message."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._die(name)
            return
        self._names[fd] = name
        self._epoll.register(fd, select.EPOLLIN)

    def disarm(self) -> None:
        """Deaths are expected from now on."""
        self._armed = False

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                self._die(self._names[fd])
                self._epoll.unregister(fd)

    def _die(self, name: str) -> None:
        if not self._armed:
            return
        logger.error("%s has died; this process ends too", name)
        # Not sys.exit: the main thread may be blocked in a collective for ever.
        os._exit(PEER_DIED_EXIT_CODE)


def die_with_parent(signum: signal.Signals) -> None:
    """Ask the kernel for `signum` when the parent (strictly: the thread that started this process) ends.

    Kept across exec. If the parent ends meanwhile, the signal is raised at once.
    """
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        signal.raise_signal(signum)
