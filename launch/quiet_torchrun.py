"""torchrun, without its traceback: what went wrong has been told by the ranks, and torchrun still says which one failed.

launch/serve.py replaces itself by this when it has to start the ranks. Takes torchrun's arguments. Exit code 1 if a rank
failed, 128 + the signal's number after a signal.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable

# Ctrl-C while torch is imported just ends it; then torchrun handles it, once there are ranks to end.
signal.signal(signal.SIGINT, signal.SIG_DFL)

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, error_handler


def start_without_ctrl_c(ranks: PContext, start: Callable[[PContext], None] = PContext.start) -> None:
    """PContext.start, with Ctrl-C held back here and, until they let it in, in the ranks: Python can lose one that comes
    while it starts, and torchrun would wait half a minute for that rank.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        start(ranks)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def main() -> int:
    """torchrun's own main, which reads sys.argv."""
    PContext.start = start_without_ctrl_c  # type: ignore[assignment, method-assign]
    # It would complain that nobody above wants the ranks' report of an error.
    logging.getLogger(error_handler.__name__).setLevel(logging.CRITICAL)
    try:
        run.main()
    except ChildFailedError:
        return 1
    except SignalException as stop:
        return 128 + int(stop.sigval)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A second signal must not interrupt the interpreter's own end, which takes a second.
    os._exit(code)
