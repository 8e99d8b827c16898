"""Serve a Mixture-of-Experts model over HTTP with expert parallelism.

    torchrun launch/serve.py --ep 8                                        # 8 ranks on this host
    torchrun --nproc-per-node 4 launch/serve.py --ep 4 --model DIR         # the same, spelt out
    torchrun --nnodes 2 --nproc-per-node 8 ... launch/serve.py --ep 16     # two hosts

Each rank is one process: one GPU, or a share of the CPU cores where there is no GPU. The OpenAI-compatible front-end is
a process of its own, started by rank 0.
"""

from __future__ import annotations

import signal

# Ctrl-C while modules are imported just ends this process; Python's own way would show a traceback. One that came before
# this line has waited, if quiet_torchrun.py started this process.
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

import contextlib
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    # torchrun puts launch/ first; the package lies beside it.
    sys.path.insert(0, str(ROOT))

import msgspec

from moe_runtime import cli
from moe_runtime.config import EngineConfig, ServerConfig, replace, with_environment
from moe_runtime.engine.worker import leave, limit_kernel_caches, serve_rank, setup_logging
from moe_runtime.errors import ConfigError, LockstepError, MoeRuntimeError
from moe_runtime.server.sockets import listen
from moe_runtime.watchdog import Watchdog, die_with_parent
from moe_runtime.weights.demo_model import resolve_model

if TYPE_CHECKING:
    from types import FrameType

    from moe_runtime.topology import Topology

TORCHRUN_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PYTHON_EXEC",
)  # fmt: skip

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Names the file from which torchrun takes the reason for its report."""
FIRST_SPEAKS_S = 2.0

logger = logging.getLogger("moe_runtime.serve")


def main(argv: list[str]) -> int:
    """Parse, make sure that `ep` ranks run, and run this one."""
    parser = cli.build_parser("torchrun launch/serve.py", __doc__ or "", (EngineConfig, ServerConfig))
    try:
        arguments = parser.parse_arguments(argv)
    except ConfigError as error:
        raise ConfigError(f"{error} (all flags: launch/serve.py --help)") from None
    engine, server = arguments[EngineConfig], with_environment(arguments[ServerConfig])
    setup_logging(engine.log_level)
    # Whatever ends the parent (torchrun) ends this process, in order.
    die_with_parent(signal.SIGTERM)
    if "RANK" not in os.environ or (os.environ["WORLD_SIZE"] == "1" and engine.ep > 1):
        # Told here before anything starts; and the demo model is built with its progress on screen, or cleared away.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        resolve_model(engine.model)
        listen(server.host, server.port).close()
        become_torchrun(engine.ep, argv)
    check_rank_count(engine.ep)
    check_torchrun()
    return run_rank(engine, server)


def become_torchrun(ep: int, argv: list[str]) -> NoReturn:
    """Replace this process by torchrun with `ep` processes on this host."""
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in TORCHRUN_VARIABLES and (not k.startswith("TORCHELASTIC_") or k == ERROR_FILE)
    }
    # One thread each until the rank sets its own number; also silences torchrun's warning.
    env["OMP_NUM_THREADS"] = "1"
    command = [
        sys.executable,
        str(ROOT / "launch" / "quiet_torchrun.py"),
        "--standalone",
        "--nproc-per-node",
        str(ep),
        # Ranks notice each other's death themselves; ten looks a second, torchrun's default, are for nothing.
        "--monitor-interval",
        "1",
        __file__,
        *argv,
    ]
    os.execve(sys.executable, command, env)


def check_rank_count(ep: int) -> None:
    """Raises ConfigError that says what to type."""
    started = int(os.environ["WORLD_SIZE"])
    if started != ep:
        raise ConfigError(
            f"--ep {ep}, but torchrun started {started} ranks. Type: torchrun --nproc-per-node {ep} launch/serve.py --ep {ep}"
            f" ... (or let the script start them: torchrun launch/serve.py --ep {ep} ...)"
        )


def check_torchrun() -> None:
    """Raises LockstepError if torchrun ended before this process asked to end with it: nobody would ever end it.

    The kernel closes torchrun's store before it tells torchrun's children, so one of the two is always seen.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(where, timeout=5).close()
    except ConnectionRefusedError as error:
        raise LockstepError(
            f"torchrun ended before its ranks had started ({where[0]}:{where[1]}: {error})"
        ) from None
    except OSError as error:
        # Slow or filtered networks: joining the others has its own, longer, patience.
        logger.debug("torchrun's store was not reached at once: %s", error)


def run_rank(engine: EngineConfig, server: ServerConfig) -> int:
    """This process is one rank; rank 0 also starts the front-end."""
    from moe_runtime.engine.socket_folder import make_socket_folder

    if server.served_model_name is None:
        name = engine.model if engine.model == "demo" else Path(engine.model).resolve().name
        server = replace(server, served_model_name=name)
    engine = replace(engine, model=str(resolve_model(engine.model)))
    watchdog = Watchdog()
    limit_kernel_caches()
    folder, address, front_end = None, "", None
    if os.environ["RANK"] == "0":
        # Told here, before anything is started.
        listen(server.host, server.port).close()
        if os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"]:
            folder = make_socket_folder()
            watchdog.before_end(partial(shutil.rmtree, folder, ignore_errors=True))
            address = f"ipc://{folder}/link"
        else:
            address = free_tcp_address(os.environ["MASTER_ADDR"])
        # Before torch is imported here, so that both processes' imports go on at once.
        front_end = start_front_end(engine, server, address)
    try:
        topology, address = join(engine, address, front_end, watchdog)
        serve_rank(engine, topology, address, watchdog)
        return 0
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def join(
    engine: EngineConfig, address: str, front_end: subprocess.Popen[bytes] | None, watchdog: Watchdog
) -> tuple[Topology, str]:
    """Meet the other ranks and learn of the front-end, which is rank 0's. Returns its address beside the topology."""
    from moe_runtime.models.registry import load_spec
    from moe_runtime.topology import init_topology

    try:
        if front_end is not None:
            # Told at once and by one process, rather than when all ranks have come together.
            load_spec(Path(engine.model))
        topology = init_topology(engine.ep, engine.device, engine.step_timeout)
    except MoeRuntimeError:
        if front_end is not None:
            # It has not heard of any rank; of this one's end it would only say that it happened.
            front_end.kill()
        raise
    link = topology.broadcast_text(f"{address} {front_end.pid if front_end else 0}")
    address, pid = link.split(" ")
    if topology.peer_pids[0]:
        # On rank 0's host.
        watchdog.watch(int(pid), f"the HTTP front-end (process {pid})")
    handle_signals(int(pid) if topology.peer_pids[0] else None, topology.rank == 0, watchdog)
    return topology, address


def free_tcp_address(master: str) -> str:
    """Where ranks of other hosts can reach this one: its address on the way to torchrun's master, and a free port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing; chooses the interface
        host = probe.getsockname()[0]
    with socket.socket() as listener:
        listener.bind((host, 0))
        return f"tcp://{host}:{listener.getsockname()[1]}"


def start_front_end(engine: EngineConfig, server: ServerConfig, address: str) -> subprocess.Popen[bytes]:
    """The HTTP process. In a session of its own, so that Ctrl-C in the terminal reaches only the ranks."""
    command = [
        sys.executable,
        "-m",
        "moe_runtime.server.main",
        "--link",
        address,
        "--parent",
        str(os.getpid()),
    ]
    # Over stdin: the API key must not show in the list of processes.
    command += ["--engine-json", msgspec.json.encode(engine).decode(), "--server-json", "-"]
    env = {k: v for k, v in os.environ.items() if k not in TORCHRUN_VARIABLES}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    process = subprocess.Popen(command, env=env, start_new_session=True, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(server))
    process.stdin.close()
    return process


def handle_signals(front_end_pid: int | None, is_first: bool, watchdog: Watchdog) -> None:
    """SIGTERM and SIGHUP drain, Ctrl-C stops now: ranks on its host tell the front-end, which tells all ranks by a tick.

    Only rank 0's second SIGTERM means that draining is not to be waited for: the others may be late with their first.
    """
    drain = signal.SIGTERM if is_first else signal.SIGRTMIN

    def forward(signum: int, _frame: FrameType | None) -> None:
        watchdog.expect_deaths()
        if front_end_pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(front_end_pid, signal.SIGUSR1 if signum == signal.SIGINT else drain)

    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, forward)


def report_error(error: MoeRuntimeError) -> None:
    """One clear line, from one rank of this host, and again at the end of torchrun's report."""
    if logging.getLogger().isEnabledFor(logging.DEBUG):
        logger.debug("traceback:", exc_info=error)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # When one rank leaves, torchrun ends the others: not before the first has spoken.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(FIRST_SPEAKS_S)
        return
    print(f"error: {error}", file=sys.stderr, flush=True)
    if file := os.environ.get(ERROR_FILE):
        # The format of torch's own `record`; what it calls the call stack is the text that is shown.
        extra = {"py_callstack": f"error: {error}", "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": str(error), "extraInfo": extra}}))


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except MoeRuntimeError as error:
        report_error(error)
        code = 1
    except KeyboardInterrupt:
        code = 130
    leave(code)
