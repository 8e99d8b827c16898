"""The one place where names become objects. `auto` takes the first that can, and logs why the others lost."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import psutil

from moe_runtime.attention.base import AttentionNeed
from moe_runtime.attention.cpu import CpuPagedAttention
from moe_runtime.attention.reference import ReferenceAttention
from moe_runtime.dispatch import collective, heap_shm, local, one_sided
from moe_runtime.dispatch.collective import CollectiveDispatcher
from moe_runtime.dispatch.fp8_payload import Fp8Payload
from moe_runtime.dispatch.local import LocalDispatcher
from moe_runtime.dispatch.one_sided import OneSidedDispatcher
from moe_runtime.errors import BackendUnavailable
from moe_runtime.experts.base import ExpertNeed
from moe_runtime.experts.cpu import CpuExperts
from moe_runtime.experts.reference import ReferenceExperts

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from moe_runtime.attention.base import AttentionBackend
    from moe_runtime.attention.kv_cache import KVCache
    from moe_runtime.config import EngineConfig
    from moe_runtime.dispatch.base import Dispatcher
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
    buffer_bytes = config.dispatch_buffer_mib << 20
    # The tightest host or container decides for all.
    free_shm = min(int(n) for n in topology.all_gather_text(str(heap_shm.free_shm_bytes())))
    alone = "joins several ranks, and there is only one" if topology.world_size == 1 else None
    reasons = {
        "local": local.unsupported(topology.world_size),
        "one_sided": alone
        or one_sided.unsupported(
            topology.world_size,
            topology.single_host,
            device,
            buffer_bytes,
            free_shm,
            spec.hidden_size * dtype.itemsize,
            spec.top_k,
            config.combine,
        ),
        "collective": alone or collective.unsupported(device, topology.data_backend),
    }
    choice = choose("dispatcher", config.dispatcher, reasons, topology.rank == 0)
    dispatcher = _dispatcher(choice.name, config, spec, dtype, topology)
    return Fp8Payload(dispatcher) if config.dispatch_dtype == "fp8" else dispatcher, choice


def _dispatcher(
    name: str, config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, topology: Topology
) -> Dispatcher:
    if name == "local":
        return LocalDispatcher()
    if name == "collective":
        device_tokens = 0 if topology.device.type == "cpu" else DEVICE_TOKENS
        return CollectiveDispatcher(topology.data_group, config.step_timeout, config.combine, device_tokens)
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
    need = ExpertNeed(device_type=topology.device.type, dtype=dtype, activation=spec.activation)
    kernels: dict[str, ExpertKernel] = {"cpu": CpuExperts(), "reference": ReferenceExperts()}
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
