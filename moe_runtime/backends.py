"""The one place where names become objects. `auto` takes the first that can, and logs why the others lost."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import psutil

from moe_runtime.attention.base import AttentionNeed
from moe_runtime.attention.cpu import CpuPagedAttention
from moe_runtime.attention.reference import ReferenceAttention
from moe_runtime.dispatch import collective, heap_nvshmem, heap_shm, local, one_sided, triton_one_sided
from moe_runtime.dispatch.collective import CollectiveDispatcher
from moe_runtime.dispatch.fp8_payload import Fp8Payload
from moe_runtime.dispatch.local import LocalDispatcher
from moe_runtime.dispatch.one_sided import OneSidedDispatcher
from moe_runtime.dispatch.triton_one_sided import TritonOneSidedDispatcher
from moe_runtime.dispatch.triton_one_sided_network import NvshmemNetwork
from moe_runtime.errors import BackendUnavailable
from moe_runtime.experts.base import ExpertNeed
from moe_runtime.experts.cpu import CpuExperts
from moe_runtime.experts.reference import ReferenceExperts
from moe_runtime.experts.triton_grouped import TritonExperts

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from moe_runtime.attention.base import AttentionBackend
    from moe_runtime.attention.kv_cache import KVCache
    from moe_runtime.config import EngineConfig
    from moe_runtime.dispatch.base import Dispatcher
    from moe_runtime.dispatch.heap import SymmetricHeap
    from moe_runtime.experts.base import ExpertKernel
    from moe_runtime.models.spec import ModelSpec
    from moe_runtime.topology import Topology

DEVICE_TOKENS = 128
"""On GPUs, steps of at most so many tokens a rank are dispatched in messages of equal size, without the host."""

logger = logging.getLogger(__name__)


class Choice(NamedTuple):
    """What was taken for one setting, and why."""

    what: str
    """The setting's name."""
    name: str
    why: str


def choose(what: str, asked: str, reasons: Mapping[str, str | None], log: bool) -> Choice:
    """`asked` itself, or for `auto` the first name whose reason is None.

    `reasons` maps each name, best first, to why it cannot be used. Logs one line. Raises BackendUnavailable.
    """
    if asked != "auto" and reasons[asked] is not None:
        raise BackendUnavailable(f"{what} {asked!r} cannot be used: {reasons[asked]}")
    usable = [name for name, reason in reasons.items() if reason is None]
    if not usable:
        raise BackendUnavailable(
            f"no {what} can be used: " + "; ".join(f"{n}: {r}" for n, r in reasons.items())
        )
    chosen = usable[0] if asked == "auto" else asked
    lost = [
        f"not {n}: {r if r is not None else f'slower than {chosen}'}"
        for n, r in reasons.items()
        if n != chosen
    ]
    choice = Choice(what, chosen, "asked for" if asked != "auto" else "; ".join(["auto", *lost]))
    logger.log(logging.INFO if log else logging.DEBUG, "%s: %s (%s)", *choice)
    return choice


def make_dispatcher(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, topology: Topology
) -> tuple[Dispatcher, Choice]:
    """How tokens travel. Collective; the same choice on all ranks, since it depends on what all know alike."""
    device = topology.device.type
    # The tightest host or container decides for all.
    free_shm = min(int(n) for n in topology.all_gather_text(str(heap_shm.free_shm_bytes())))
    alone = "joins several ranks, and there is only one" if topology.world_size == 1 else None
    reasons = {
        "local": local.unsupported(topology.world_size),
        "one_sided": alone or _one_sided_problem(config, spec, dtype, topology, free_shm),
        "collective": alone or collective.unsupported(device, topology.data_backend),
    }
    choice = choose("dispatcher", config.dispatcher, reasons, topology.rank == 0)
    dispatcher = _make_chosen(choice.name, config, spec, dtype, topology)
    return Fp8Payload(dispatcher) if config.dispatch_dtype == "fp8" else dispatcher, choice


def _make_chosen(
    name: str, config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, topology: Topology
) -> Dispatcher:
    device = topology.device.type
    if name == "local":
        return LocalDispatcher()
    if name == "collective":
        device_tokens = 0 if device == "cpu" else DEVICE_TOKENS
        return CollectiveDispatcher(topology.data_group, config.step_timeout, config.combine, device_tokens)
    kernels = one_sided_kernels(config, device)
    how = "Triton kernels" if kernels else "torch's copies into shared memory"
    logger.log(logging.INFO if topology.rank == 0 else logging.DEBUG, "one_sided: %s", how)
    if kernels:
        return _make_one_sided_kernels(config, spec, dtype, topology)
    return OneSidedDispatcher(
        topology.rank,
        topology.world_size,
        topology.all_gather_text,
        hidden_size=spec.hidden_size,
        topk=spec.top_k,
        dtype=dtype,
        buffer_bytes=config.dispatch_buffer_mib << 20,
        step_timeout=config.step_timeout,
        is_alive=lambda rank: process_runs(topology.peer_pids[rank]),
        combine=config.combine,
    )


def one_sided_kernels(config: EngineConfig, device_type: str) -> bool:
    """Whether the one-sided dispatcher stores with Triton kernels rather than torch's copies.

    Always on GPUs; between CPU ranks with the Triton experts, since only they take batches of fixed capacity.
    """
    return device_type != "cpu" or config.moe_backend == "triton"


def _one_sided_problem(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, topology: Topology, free_shm: int
) -> str | None:
    device, buffer_bytes = topology.device.type, config.dispatch_buffer_mib << 20
    row_bytes, ranks = spec.hidden_size * dtype.itemsize, topology.world_size
    problem = None
    if one_sided_kernels(config, device):
        problem = triton_one_sided.unsupported(
            ranks, device, buffer_bytes, row_bytes, spec.top_k, config.combine
        )
    if device != "cpu":
        return problem or heap_nvshmem.unsupported(device)
    return problem or one_sided.unsupported(
        ranks, topology.single_host, device, buffer_bytes, free_shm, row_bytes, spec.top_k, config.combine
    )


def _make_one_sided_kernels(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, topology: Topology
) -> TritonOneSidedDispatcher:
    """Over shared memory between CPU ranks, over NVSHMEM between GPUs. Collective."""
    buffer_bytes = config.dispatch_buffer_mib << 20
    heap: SymmetricHeap
    if topology.device.type == "cpu":
        heap = heap_shm.SharedHeap(topology.rank, topology.all_gather_text, buffer_bytes)
    else:
        heap = heap_nvshmem.NvshmemHeap(
            topology.rank, topology.all_gather_text, buffer_bytes, topology.device
        )
    return TritonOneSidedDispatcher(
        heap,
        hidden_size=spec.hidden_size,
        topk=spec.top_k,
        dtype=dtype,
        step_timeout=config.step_timeout,
        is_alive=lambda rank: process_runs(topology.peer_pids[rank]),
        combine=config.combine,
        make_network=lambda layout: NvshmemNetwork(heap, layout, heap_nvshmem.device_library()),
    )


def process_runs(pid: int) -> bool:
    """Whether a local process is there and not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def make_experts(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, topology: Topology
) -> tuple[ExpertKernel, Choice]:
    """How the local experts are computed."""
    need = ExpertNeed(topology.device.type, dtype, spec.activation, spec.expert_scheme)
    kernels: dict[str, ExpertKernel] = {
        "cpu": CpuExperts(),
        "triton": TritonExperts(topology.device),
        "reference": ReferenceExperts(),
    }
    reasons = {name: kernel.supports(need) for name, kernel in kernels.items()}
    choice = choose("moe_backend", config.moe_backend, reasons, topology.rank == 0)
    return kernels[choice.name], choice


def make_attention(
    config: EngineConfig, spec: ModelSpec, cache: KVCache, topology: Topology
) -> tuple[AttentionBackend, Choice]:
    """How attention over the paged cache is computed."""
    layers = spec.attention_specs()
    need = AttentionNeed(device_type=topology.device.type, dtype=cache.keys[0].dtype, layers=layers)
    reasons = {"cpu": CpuPagedAttention.supports(need), "reference": ReferenceAttention.supports(need)}
    choice = choose("attention_backend", config.attention_backend, reasons, topology.rank == 0)
    if choice.name == "cpu":
        return CpuPagedAttention(cache, layers), choice
    return ReferenceAttention(cache, layers), choice
