"""The front-end process: `python -m moe_runtime.server.main`, started by rank 0 of launch/serve.py.

It listens before anything is loaded (and answers 503 until the ranks are ready), drains on SIGTERM, stops at once on
SIGUSR1, and ends with its parent. Exit code 0 after an orderly stop, 1 after any failure. Heavy imports wait until
the signals are handled.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING, TypeVar

from moe_runtime.config import EngineConfig, ServerConfig
from moe_runtime.engine.socket_folder import remove_socket_folder
from moe_runtime.errors import MoeRuntimeError
from moe_runtime.server.sockets import listen
from moe_runtime.watchdog import die_with_parent

if TYPE_CHECKING:
    from types import FrameType

C = TypeVar("C", EngineConfig, ServerConfig)
PARENT_DIED = signal.SIGUSR2
"""What the kernel sends when rank 0 ends. Can be caught, unlike SIGKILL: clients are still told."""
STOP_NOW = signal.SIGUSR1
DRAIN = signal.SIGTERM
DRAIN_ONCE = signal.SIGRTMIN
"""What ranks other than 0 pass on, so that no rank's SIGTERM goes unheard."""
_OPEN_FILES = 65536

logger = logging.getLogger(__name__)


def build_parser() -> argparse.ArgumentParser:
    """The flags of this process, which is not meant to be started by hand."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.server.main", description=__doc__)
    parser.add_argument("--link", required=True, help="ZeroMQ address to bind; the ranks connect to it")
    parser.add_argument("--engine-json", required=True, help="EngineConfig as JSON; `model` is a folder")
    parser.add_argument(
        "--server-json",
        required=True,
        help="ServerConfig as JSON; `-` reads it from stdin, which hides api_key",
    )
    parser.add_argument("--parent", type=int, help="process id of rank 0")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Serve until told to stop; returns the exit code."""
    args = build_parser().parse_args(argv)

    def leave(_signum: int, _frame: FrameType | None) -> None:
        # Rank 0 may be gone too, and with it whoever else would do this.
        remove_socket_folder(args.link)
        os._exit(1)

    # Before anything slow: a signal sent to a process without handlers kills it.
    for signum in (DRAIN, DRAIN_ONCE, STOP_NOW, PARENT_DIED):
        signal.signal(signum, leave)
    # Ctrl-C is rank 0's to handle: it sends STOP_NOW.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(PARENT_DIED, args.parent)
    allow_many_connections()
    server_json = sys.stdin.read() if args.server_json == "-" else args.server_json
    engine, server = _decode(args.engine_json, EngineConfig), _decode(server_json, ServerConfig)
    _setup_logging(engine.log_level)
    try:
        return asyncio.run(_serve(engine, server, args.link))
    except MoeRuntimeError as exc:
        if not exc.told:
            print(f"error: {exc}", file=sys.stderr, flush=True)  # noqa: T201 - for the user, in one line
        logger.debug("traceback:", exc_info=exc)
        return 1


def allow_many_connections() -> None:
    """Raise this process's own limit of open files, commonly 1024 and soon reached by clients that keep connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(engine: EngineConfig, server: ServerConfig, link: str) -> int:
    # First of all, so that a port in use is told before a model is loaded in vain.
    with listen(server.host, server.port) as sock:
        from moe_runtime.server.lifecycle import Lifecycle

        life = Lifecycle(engine, server, link, sock)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(DRAIN, life.drain)
        loop.add_signal_handler(DRAIN_ONCE, life.drain_once)
        loop.add_signal_handler(STOP_NOW, life.stop)
        loop.add_signal_handler(PARENT_DIED, life.fail, "rank 0 has died")
        return await life.run()


def _decode(text: str, kind: type[C]) -> C:
    values = json.loads(text)
    # Dataclasses decoded by msgspec skip __post_init__'s checks of unknown names, so the constructor is called.
    return kind(**values)


def _setup_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s [http] %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    for noisy in ("uvicorn", "uvicorn.error", "asyncio", "httpcore", "httpx"):
        logging.getLogger(noisy).setLevel(logging.DEBUG if level == "debug" else logging.WARNING)


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Not sys.exit: threads of libraries must not keep the process.
    os._exit(code)
