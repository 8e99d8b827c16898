"""The one place where names become objects. `auto` takes the first that can, and logs why the others lost."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import psutil
import torch

from moe_runtime.attention.base import AttentionNeed
from moe_runtime.attention.cpu import CpuPagedAttention
from moe_runtime.attention.deterministic import DeterministicAttention
from moe_runtime.attention.kv_cache import cache_dtype
from moe_runtime.attention.reference import ReferenceAttention
from moe_runtime.attention.triton_paged import TritonPagedAttention
from moe_runtime.dispatch import (
    collective,
    grouping,
    heap_nvshmem,
    heap_shm,
    local,
    one_sided,
    triton_grouping,
    triton_one_sided,
)
from moe_runtime.dispatch.base import plan_dispatch
from moe_runtime.dispatch.collective import CollectiveDispatcher
from moe_runtime.dispatch.counts import GatherCounts, keep_counts
from moe_runtime.dispatch.fp8_payload import Fp8Payload
from moe_runtime.dispatch.local import LocalDispatcher
from moe_runtime.dispatch.one_sided import OneSidedDispatcher
from moe_runtime.dispatch.triton_one_sided import TritonOneSidedDispatcher
from moe_runtime.dispatch.triton_one_sided_network import NvshmemNetwork
from moe_runtime.errors import BackendUnavailable, ConfigError
from moe_runtime.experts import deterministic, router, triton_router
from moe_runtime.experts.base import ExpertNeed
from moe_runtime.experts.cpu import CpuExperts
from moe_runtime.experts.deterministic import DeterministicExperts
from moe_runtime.experts.reference import ReferenceExperts
from moe_runtime.experts.triton_grouped import TritonExperts
from moe_runtime.layers.deterministic_ops import DeterministicOps
from moe_runtime.layers.invariant import Workers
from moe_runtime.layers.ops import TORCH_OPS
from moe_runtime.layers.triton_ops import TritonOps
from moe_runtime.replicas import WORTH_ASKING, ChooseByCounts, choose_randomly
from moe_runtime.triton_support.availability import triton_problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moe_runtime.attention.base import AttentionBackend
    from moe_runtime.attention.kv_cache import KVCache
    from moe_runtime.config import EngineConfig
    from moe_runtime.dispatch.base import ChooseReplicas, Dispatcher
    from moe_runtime.dispatch.counts import ShareCounts
    from moe_runtime.dispatch.heap import SymmetricHeap
    from moe_runtime.experts.base import ExpertKernel
    from moe_runtime.experts.router import Router
    from moe_runtime.layers.ops import LayerOps
    from moe_runtime.models.spec import ModelSpec
    from moe_runtime.topology import Topology

DEVICE_TOKENS = 128
"""On GPUs, steps of at most so many tokens a rank are dispatched in messages of equal size, without the host."""

logger = logging.getLogger(__name__)

_NO_DELAY = "cannot hold messages back (dispatch_delay_ms)"


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
    """How tokens travel. Collective; the same choice on all ranks, since it depends on what all know alike.

    Raises ConfigError if --combine per_rank is to be deterministic: its sums depend on which experts share a rank.
    """
    if config.deterministic and config.combine != "exact":
        raise ConfigError(
            f"combine={config.combine!r} depends on the number of ranks; --deterministic needs 'exact'"
        )
    device = topology.device.type
    # The tightest host or container decides for all.
    free_shm = min(int(n) for n in topology.all_gather_text(str(heap_shm.free_shm_bytes())))
    alone = "joins several ranks, and there is only one" if topology.world_size == 1 else None
    undelayed = _NO_DELAY if config.dispatch_delay_ms else None
    reasons = {
        "local": local.unsupported(topology.world_size) or undelayed,
        "one_sided": alone or _one_sided_problem(config, spec, dtype, topology, free_shm),
        "collective": alone or undelayed or collective.unsupported(device, topology.data_backend),
    }
    choice = choose("dispatcher", config.dispatcher, reasons, topology.rank == 0)
    if choice.name == "one_sided":
        how = "Triton kernels" if one_sided_kernels(config, device) else "torch's copies into shared memory"
        logger.log(logging.INFO if topology.rank == 0 else logging.DEBUG, "one_sided: %s", how)
    dispatcher = _dispatcher(choice.name, config, spec, dtype, topology)
    return Fp8Payload(dispatcher) if config.dispatch_dtype == "fp8" else dispatcher, choice


def _dispatcher(
    name: str, config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, topology: Topology
) -> Dispatcher:
    device = topology.device.type
    if name == "local":
        on_triton = choose_routing(config, device, log=False).name == "triton"
        return LocalDispatcher(triton_grouping.group_pairs if on_triton else grouping.group_pairs)
    if name == "collective":
        device_tokens = 0 if device == "cpu" else DEVICE_TOKENS
        return CollectiveDispatcher(topology.data_group, config.step_timeout, config.combine, device_tokens)
    if one_sided_kernels(config, device):
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
        in_flight=_calls_in_flight(config),
        delay_s=config.dispatch_delay_ms / 1000,
    )


def choose_overlap(config: EngineConfig, topology: Topology) -> Choice:
    """The setting of `engine.overlap.OverlapModel`: `auto`, or always the same way."""
    name, why = config.overlap, "asked for"
    if config.overlap == "auto":
        name, why = "auto", "measured step times decide"
        if topology.world_size == 1:
            name, why = "off", "auto; nothing travels with one rank"
        elif topology.device.type != "cpu":
            name, why = "off", "auto; step times are measured on the host, which does not wait for the device"
    choice = Choice("overlap", name, why)
    logger.log(logging.INFO if topology.rank == 0 else logging.DEBUG, "%s: %s (%s)", *choice)
    return choice


def _calls_in_flight(config: EngineConfig) -> int:
    """Transfers under way at a time: with overlap two, each of which needs mailboxes of its own."""
    return 1 if config.overlap == "off" else 2


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
    if one_sided_kernels(config, device) and config.dispatch_delay_ms:
        problem = f"its Triton kernels: {_NO_DELAY}"
    elif one_sided_kernels(config, device):
        problem = triton_one_sided.unsupported(
            ranks, device, buffer_bytes, row_bytes, spec.top_k, config.combine
        )
    if device != "cpu":
        return problem or heap_nvshmem.unsupported(device)
    return problem or one_sided.unsupported(
        ranks,
        topology.single_host,
        device,
        buffer_bytes,
        free_shm,
        row_bytes,
        spec.top_k,
        config.combine,
        1 if one_sided_kernels(config, device) else _calls_in_flight(config),
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


def make_replica_choice(
    config: EngineConfig, dispatcher: Dispatcher, topology: Topology
) -> tuple[ChooseReplicas, Choice]:
    """How a copy of an expert is chosen where it has several."""
    on_host = topology.device.type == "cpu"
    problem = None if on_host else "the host reads the counts of every layer, for which a GPU would wait"
    if isinstance(dispatcher, Fp8Payload):
        dispatcher = dispatcher.inner
    share: ShareCounts = GatherCounts(topology.data_group, config.step_timeout)
    if topology.world_size == 1:
        share = keep_counts
        problem = "one rank has one copy of each expert"
    elif isinstance(dispatcher, OneSidedDispatcher):
        share = dispatcher.share
    reasons = {"dynamic": problem, "static": None, "random": None}
    log = topology.rank == 0
    choice = choose("ep_dispatch_algorithm", config.ep_dispatch_algorithm, reasons, log)
    least = WORTH_ASKING if config.ep_dispatch_algorithm == "auto" else 0
    choices: dict[str, ChooseReplicas] = {
        "dynamic": ChooseByCounts(share, least),
        "static": plan_dispatch,
        "random": choose_randomly,
    }
    return choices[choice.name], choice


def process_runs(pid: int) -> bool:
    """Whether a local process is there and not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def choose_routing(config: EngineConfig, device_type: str, *, log: bool) -> Choice:
    """Router and grouping of pairs: kernels on every GPU, and in the interpreter where the experts are asked to be there."""
    wanted = device_type != "cpu" or config.moe_backend == "triton"
    problem = triton_problem(device_type) if wanted else "Triton kernels are for GPUs"
    return choose("routing", "auto", {"triton": problem, "torch": None}, log)


def make_router(config: EngineConfig, topology: Topology) -> tuple[Router, Choice]:
    """How experts are chosen from the router's logits."""
    choice = choose_routing(config, topology.device.type, log=topology.rank == 0)
    if choice.name == "triton":
        return triton_router.route, choice
    return (deterministic.route if config.deterministic else router.route), choice


def invariant_only(
    reasons: Mapping[str, str | None], config: EngineConfig, *allowed: str
) -> dict[str, str | None]:
    """Under --deterministic, the `allowed` ones come first, in that order; the reasons of the others say that they are not for it."""
    if not config.deterministic:
        return dict(reasons)
    why = f"its bits depend on the batch; with --deterministic allowed are auto, {', '.join(allowed)}"
    return {name: reasons[name] for name in allowed} | {name: why for name in reasons if name not in allowed}


def make_experts(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, topology: Topology
) -> tuple[ExpertKernel, Choice]:
    """How the local experts are computed."""
    need = ExpertNeed(topology.device.type, dtype, spec.activation, spec.expert_scheme)
    kernels: dict[str, ExpertKernel] = {
        "cpu": CpuExperts(),
        "deterministic": DeterministicExperts(DeterministicOps(Workers(torch.get_num_threads()))),
        "triton": TritonExperts(topology.device, deterministic=config.deterministic),
        "reference": ReferenceExperts(),
    }
    reasons = {name: kernel.supports(need) for name, kernel in kernels.items()}
    reasons = invariant_only(reasons, config, "deterministic", "triton")
    choice = choose("moe_backend", config.moe_backend, reasons, topology.rank == 0)
    return kernels[choice.name], choice


def make_layer_ops(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, topology: Topology
) -> tuple[LayerOps, Choice]:
    """How norms and activations are computed."""
    device = topology.device.type
    triton = TritonOps.supports(device, dtype, spec.activation)
    reasons = {"torch": None, "triton": triton} if device == "cpu" else {"triton": triton, "torch": None}
    reasons["deterministic"] = DeterministicOps.supports(device, dtype)
    reasons = invariant_only(reasons, config, "deterministic")
    choice = choose("layer_backend", config.layer_backend, reasons, topology.rank == 0)
    if choice.name == "deterministic":
        return DeterministicOps(Workers(torch.get_num_threads())), choice
    return TritonOps() if choice.name == "triton" else TORCH_OPS, choice


def choose_attention(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, topology: Topology) -> Choice:
    """What computes attention over the paged cache; known before there is a cache."""
    need = AttentionNeed(
        topology.device.type,
        dtype,
        spec.attention_specs(),
        cache_dtype=cache_dtype(config.kv_cache_dtype, dtype),
    )
    reasons = {
        "cpu": CpuPagedAttention.supports(need),
        "deterministic": DeterministicAttention.supports(need),
        "triton": TritonPagedAttention.supports(need),
        "reference": ReferenceAttention.supports(need),
    }
    reasons = invariant_only(reasons, config, "deterministic", "triton")
    return choose("attention_backend", config.attention_backend, reasons, topology.rank == 0)


def make_attention(name: str, config: EngineConfig, spec: ModelSpec, cache: KVCache) -> AttentionBackend:
    """The attention of that name over the cache."""
    layers = spec.attention_specs()
    if name == "cpu":
        return CpuPagedAttention(cache, layers)
    if name == "deterministic":
        return DeterministicAttention(cache, layers)
    if name == "triton":
        return TritonPagedAttention(cache, layers, config.deterministic)
    return ReferenceAttention(cache, layers)
