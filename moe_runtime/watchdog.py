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
from collections.abc import Callable

logger = logging.getLogger(__name__)

PEER_DIED_EXIT_CODE = 70
_PR_SET_PDEATHSIG = 1


class Watchdog:
    """Ends this process with PEER_DIED_EXIT_CODE within milliseconds of a watched process's death.

    `disarm()` first where an end is expected and this process has still to do; `expect_deaths()` where it shall go too.
    A process that is already gone when `watch` is called counts as dead.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._names: dict[int, str] = {}
        self._armed = True
        self._level = logging.ERROR
        self._action: Callable[[], None] | None = None
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

    def before_end(self, action: Callable[[], None]) -> None:
        """Call `action`, which must be quick, before this process ends for a death."""
        self._action = action

    def expect_deaths(self) -> None:
        """All were told to end: that one has is no error, but still ends this process."""
        self._level = logging.DEBUG

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                self._die(self._names[fd])
                self._epoll.unregister(fd)

    def _die(self, name: str) -> None:
        if not self._armed:
            return
        logger.log(self._level, "%s has died; this process ends too", name)
        if self._action is not None:
            self._action()
        # Not sys.exit: the main thread may be blocked in a collective for ever.
        os._exit(PEER_DIED_EXIT_CODE)


def die_with_parent(signum: signal.Signals, parent: int | None = None) -> None:
    """Ask the kernel for `signum` when the parent (strictly: the thread that started this process) ends.

    Kept across exec. `parent` is its process id: if it has ended before this call, the signal is raised at once. Without
    it, only an end during the call is noticed.
    """
    parent = parent or os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        signal.raise_signal(signum)
