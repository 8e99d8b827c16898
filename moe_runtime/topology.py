"""Process groups and devices: who the ranks are, which of them share a host, how much memory is theirs.

The only place that initialises torch.distributed.
"""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import os
import socket
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
import torch.distributed as dist

from moe_runtime.errors import ConfigError, LockstepError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

START_TIMEOUT_S = 600.0
_PR_SET_TIMERSLACK = 29
_IDLE_SLACK_NS = 1_000_000_000

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Topology:
    """This rank and its peers."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """Ranks on this host; they share its cores and memory."""
    device: torch.device
    control_group: dist.ProcessGroup
    """gloo over CPU tensors: lockstep headers and set-up."""
    data_group: dist.ProcessGroup
    """NCCL on CUDA, else the control group: token rows."""
    peer_pids: tuple[int, ...]
    """Process id of every rank, 0 for those on other hosts."""

    @property
    def single_host(self) -> bool:
        """Whether all ranks are on this host."""
        return all(self.peer_pids)

    @property
    def data_backend(self) -> str:
        """torch's name of what carries the data group: `gloo` or `nccl`."""
        return str(dist.get_backend(self.data_group))

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text, by rank. Collective."""
        with self._lockstep_errors():
            return all_gather_text(self.control_group, text)

    def barrier(self) -> None:
        """Wait for all ranks."""
        with self._lockstep_errors():
            dist.barrier(group=self.control_group)

    def broadcast_text(self, text: str | None) -> str:
        """Rank 0's text. Collective."""
        return self.all_gather_text(text or "")[0]

    @contextmanager
    def _lockstep_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise LockstepError(f"rank {self.rank}: a peer is gone or late ({error})") from error


def all_gather_text(group: dist.ProcessGroup, text: str) -> list[str]:
    """UTF-8 text of every rank, moved as bytes: nothing is pickled."""
    world_size = dist.get_world_size(group)
    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([data.numel()]), group=group)
    longest = max(int(s) for s in sizes)
    padded = torch.zeros(max(longest, 1), dtype=torch.uint8)
    padded[: data.numel()] = data
    rows = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(rows, padded, group=group)
    return [bytes(row[: int(n)].tolist()).decode() for row, n in zip(rows, sizes, strict=True)]


def init_topology(ep: int, device: str, step_timeout: float, rendezvous: str | None = None) -> Topology:
    """Join the process group. RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE come from torchrun or the launcher.

    While starting, ranks wait for one another for START_TIMEOUT_S at least, whatever `step_timeout` says: they read
    weights at different speeds. `rendezvous`: a `file://` address for ranks of one host; None takes torchrun's MASTER_ADDR and MASTER_PORT.
    """
    env = os.environ
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    local_rank, local_world_size = int(env["LOCAL_RANK"]), int(env["LOCAL_WORLD_SIZE"])
    if world_size != ep:
        raise ConfigError(f"--ep {ep} but {world_size} ranks were started; they must be equal")
    chosen = choose_device(device, local_rank)
    if world_size == local_world_size and Path("/sys/class/net/lo").exists():
        # All on one host: do not depend on what its name resolves to.
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    elif world_size != local_world_size and (interface := interface_to(env["MASTER_ADDR"])):
        # gloo would take the address of the host's name, which is often the loopback's.
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
    if chosen.type == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size))
    patience = timedelta(seconds=max(step_timeout, START_TIMEOUT_S))
    try:
        with _lazy_timers():
            dist.init_process_group(
                "gloo", init_method=rendezvous or "env://", rank=rank, world_size=world_size, timeout=patience
            )
    except (RuntimeError, dist.DistNetworkError) as error:
        raise LockstepError(f"rank {rank} could not join the others: {error}") from error
    control = dist.group.WORLD
    assert control is not None
    data = control
    if chosen.type == "cuda":
        data = dist.new_group(backend="nccl", timeout=timedelta(seconds=step_timeout))
    host = f"{socket.gethostname()} {_boot_id()}"
    seen = [line.rsplit(" ", 1) for line in all_gather_text(control, f"{host} {os.getpid()}")]
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        device=chosen,
        control_group=control,
        data_group=data,
        peer_pids=tuple(int(pid) if where == host else 0 for where, pid in seen),
    )


def interface_to(address: str) -> str | None:
    """The network interface on the way to a host, None if that is unknown or the loopback."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing; chooses the way
            own = probe.getsockname()[0]
    except OSError:
        return None
    if ipaddress.ip_address(own).is_loopback:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == own for entry in addresses):
            return name
    return None


@contextmanager
def _lazy_timers() -> Iterator[None]:
    """Threads started inside may be woken by their timers up to _IDLE_SLACK_NS late; by data, at once.

    gloo's network thread looks a hundred times a second whether it should end, which costs each rank 0.3 % of a core for
    ever. A thread inherits its timer slack from the one that starts it (Linux: prctl(2), PR_SET_TIMERSLACK).
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_IDLE_SLACK_NS), 0, 0, 0)
    try:
        yield
    finally:
        # 0: back to this thread's default.
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(0), 0, 0, 0)


def _boot_id() -> str:
    """Tells hosts of the same name apart; containers with pid namespaces of their own differ in theirs."""
    parts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid", "/proc/self/ns/net"):
        try:
            parts.append(os.readlink(path) if "/ns/" in path else Path(path).read_text().strip())
        except OSError:
            parts.append("?")
    return "/".join(parts)


def choose_device(device: str, local_rank: int) -> torch.device:
    """`auto` is the local CUDA device if there is one."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch sees no CUDA device here; use --device cpu or auto")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own: this host has {torch.cuda.device_count()}"
        )
    chosen = torch.device("cuda", local_rank)
    torch.cuda.set_device(chosen)
    return chosen


def free_memory_bytes(topology: Topology) -> int:
    """Bytes this rank may still take: the device's free memory, or its share of what is free on the host.

    Collective, so that no rank measures while another still loads.
    """
    topology.barrier()
    if topology.device.type == "cuda":
        return torch.cuda.mem_get_info(topology.device)[0]
    free = free_under_limits(psutil.virtual_memory().available, own_cgroups())
    topology.barrier()
    return free // topology.local_world_size


def free_under_limits(available: int, cgroups: Iterable[Path]) -> int:
    """`available` bytes, or what the tightest of these control groups (folders, cgroup v2) still allows."""
    for folder in cgroups:
        try:
            limit = (folder / "memory.max").read_text().strip()
            used = int((folder / "memory.current").read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit != "max":
            # The page cache is given back under pressure.
            available = min(available, int(limit) - used + int(stat.get("inactive_file", 0)))
    return max(0, available)


def own_cgroups(
    mount: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> list[Path]:
    """Folders of the control group (v2) this process is in and of those around it: each may set a limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return [mount]
    folders = {mount: None}
    for line in lines:
        if line.startswith("0::"):
            own = mount / line.removeprefix("0::").lstrip("/")
            folders |= dict.fromkeys([own, *(p for p in own.parents if p.is_relative_to(mount))])
    return list(folders)
