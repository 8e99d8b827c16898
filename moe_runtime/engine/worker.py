"""One rank from start to end: join the others, load, serve, leave.

Started by torchrun through launch/serve.py, or by `LLM` as `python -m moe_runtime.engine.worker`. Heavy imports wait
until the watchdog is up.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from moe_runtime import errors
from moe_runtime.config import EngineConfig
from moe_runtime.engine.socket_folder import remove_socket_folder
from moe_runtime.watchdog import Watchdog, die_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable

    from moe_runtime.engine.engine import Engine
    from moe_runtime.engine.messages import Failed
    from moe_runtime.engine.rank_link import RankLink
    from moe_runtime.topology import Topology

KERNEL_CACHE_ENTRIES = 128
"""Compiled CPU kernels that oneDNN and torch's layer over it keep each; see `limit_kernel_caches`."""

logger = logging.getLogger(__name__)


def setup_logging(level: str) -> None:
    """One format for all processes; the rank is in each line."""
    rank = os.environ.get("RANK", "-")
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s [rank {rank}] %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )


def limit_kernel_caches() -> None:
    """Bound what oneDNN keeps. Call it before torch is imported; a user's own setting stays.

    It compiles a kernel for every shape of a bfloat16 or float16 product, and a served batch has another number of rows
    each time. Half a MiB each, 1024 of them, the libraries' default, would take more memory than all activations.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(KERNEL_CACHE_ENTRIES))


def serve_rank(config: EngineConfig, topology: Topology, address: str, watchdog: Watchdog) -> None:
    """Load this rank and run it until the front-end says stop. Returns after an agreed stop.

    `config.model` is a folder. Raises MoeRuntimeError on all ranks alike if any of them cannot start.
    """
    from moe_runtime.engine.rank_link import RankLink

    for rank, pid in enumerate(topology.peer_pids):
        if pid and rank != topology.rank:
            watchdog.watch(pid, f"rank {rank} (process {pid})")
    link = RankLink(address, topology.rank)
    try:
        engine = _start(config, topology, link)
        engine.run()
        # Nobody leaves before all expect it, else the others would take it for a death.
        watchdog.disarm()
        topology.barrier()
        engine.close()
    except errors.MoeRuntimeError as error:
        watchdog.disarm()
        link.send(_failed(topology.rank, error))
        raise
    except Exception as error:
        # A defect, or the machine's (out of memory, say). The others cannot go on without this rank.
        logger.exception("rank %d failed", topology.rank)
        link.send(_failed(topology.rank, error))
        raise errors.MoeRuntimeError(f"rank {topology.rank} failed: {error!r}") from error
    finally:
        link.close()


def _failed(rank: int, error: Exception) -> Failed:
    from moe_runtime.engine.messages import Failed

    return Failed(rank=rank, kind=type(error).__name__, message=str(error))


def agree(topology: Topology, what: Callable[[], object]) -> None:
    """Do `what` on every rank; if it fails on any, raise that error on all. Collective."""
    failure: errors.MoeRuntimeError | None = None
    try:
        what()
    except errors.MoeRuntimeError as error:
        failure = error
    texts = topology.all_gather_text("" if failure is None else f"{type(failure).__name__}\n{failure}")
    for rank, text in enumerate(texts):
        if text:
            kind, message = text.split("\n", 1)
            where = "" if all(t == text for t in texts) else f"rank {rank}: "
            raise getattr(errors, kind, errors.MoeRuntimeError)(where + message) from failure


def _start(config: EngineConfig, topology: Topology, link: RankLink) -> Engine:
    """Build the engine. Collective; a failure of one rank is raised on all."""
    from moe_runtime.engine.builder import RankBuilder
    from moe_runtime.engine.messages import Progress

    pid = topology.peer_pids[topology.rank] if topology.peer_pids[0] else 0

    def report(stage: str, fraction: float) -> None:
        link.send(Progress(rank=topology.rank, pid=pid, stage=stage, fraction=fraction))

    report("starting", 0.0)
    builder = RankBuilder(config, topology, report)
    for stage in builder.stages:
        agree(topology, stage)
    engine = builder.engine(link)
    report("ready", 1.0)
    link.send(builder.ready(pid))
    return engine


def main(argv: list[str] | None = None) -> int:
    """Entry of ranks started by `LLM`. They end with the program that started them."""
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.engine.worker")
    parser.add_argument("--link", required=True, help="ZeroMQ address of the front-end")
    parser.add_argument("--config-json", required=True, help="EngineConfig as JSON")
    parser.add_argument("--rendezvous", help="file:// address where the ranks meet")
    parser.add_argument("--parent", required=True, type=int, help="process id of the program")
    args = parser.parse_args(argv)
    watchdog = Watchdog()
    if os.environ["RANK"] == "0":
        # Whoever would do it otherwise is gone then; so this rank must not be killed by the kernel.
        watchdog.before_end(partial(remove_socket_folder, args.link))
    else:
        # Until the watchdog watches.
        die_with_parent(signal.SIGKILL, args.parent)
    watchdog.watch(args.parent, "the program that started this rank")
    config = msgspec.json.decode(args.config_json, type=EngineConfig)
    setup_logging(config.log_level)
    limit_kernel_caches()
    # Ctrl-C in a terminal reaches the whole process group; the program decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from moe_runtime.topology import init_topology

    try:
        topology = init_topology(config.ep, config.device, config.step_timeout, args.rendezvous)
    except errors.MoeRuntimeError as error:
        # There is no link yet through which the program could learn of it.
        logger.error("%s", error)
        logger.debug("traceback:", exc_info=True)
        return 1
    try:
        serve_rank(config, topology, args.link, watchdog)
    except errors.MoeRuntimeError:
        # The program raises it.
        logger.debug("traceback:", exc_info=True)
        return 1
    return 0


def leave(code: int) -> None:
    """End the process without waiting for threads of libraries (a gloo thread may hang on a lost peer)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
