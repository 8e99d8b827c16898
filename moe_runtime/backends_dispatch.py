"""How tokens travel: the dispatcher's name becomes an object, and whether computing overlaps with it is settled."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import psutil

from moe_runtime.backends import Choice, choose, choose_routing
from moe_runtime.config import AUTO
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
from moe_runtime.errors import ConfigError
from moe_runtime.native.build import load_native
from moe_runtime.placement.run_time_split import WORTH_ASKING
from moe_runtime.quantization import FP8_BLOCK
from moe_runtime.replicas import ChooseByCounts, choose_randomly
from moe_runtime.triton_support.availability import has_fp8, target_arch

if TYPE_CHECKING:
    import torch

    from moe_runtime.config import EngineConfig
    from moe_runtime.dispatch.base import ChooseReplicas, Dispatcher
    from moe_runtime.dispatch.counts import ShareCounts
    from moe_runtime.dispatch.heap import SymmetricHeap
    from moe_runtime.models.spec import ModelSpec
    from moe_runtime.topology import Topology

DEVICE_TOKENS = 128
"""On GPUs, steps of at most so many tokens a rank are dispatched in messages of equal size, without the host."""

logger = logging.getLogger(__name__)

_NO_DELAY = "cannot hold messages back (dispatch_delay_ms)"


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
    if config.dispatch_dtype != "fp8":
        return dispatcher, choice
    return Fp8Payload(dispatcher, (spec.hidden_size, dtype)), choice


def choose_payload(config: EngineConfig, spec: ModelSpec, experts: str, topology: Topology) -> Choice:
    """The dispatch_dtype: `auto` is fp8 where that changes no bit, since the `experts` of that name round rows so anyway."""
    problem = None
    if config.dispatch_dtype == AUTO:
        problem = _payload_problem(spec, experts, topology)
    reasons = {"fp8": problem, "model": None}
    return choose("dispatch_dtype", config.dispatch_dtype, reasons, topology.rank == 0)


def _payload_problem(spec: ModelSpec, experts: str, topology: Topology) -> str | None:
    if spec.expert_scheme != FP8_BLOCK or not spec.quantize_activations:
        return "the experts do not round their input to FP8 in groups of 128"
    if experts != "triton":
        return f"{experts} experts take no FP8 rows"
    return None if has_fp8(target_arch(topology.device)) else "the GPU has no FP8"


def _dispatcher(
    name: str, config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, topology: Topology
) -> Dispatcher:
    device = topology.device.type
    if name == "local":
        on_triton = choose_routing(config, device, log=False).name == "triton"
        return LocalDispatcher(triton_grouping.group_pairs if on_triton else grouping.group_pairs)
    if name == "collective":
        device_tokens = 0 if device == "cpu" else DEVICE_TOKENS
        distant = [rank for rank, pid in enumerate(topology.peer_pids) if not pid]
        return CollectiveDispatcher(
            topology.data_group, config.step_timeout, config.combine, device_tokens, distant=distant
        )
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
        native=load_native(config.cpu_kernels),
    )


def dispatch_tokens_without_host(name: str) -> int:
    """Most tokens a rank that the dispatcher of this name sends on a GPU without reading anything on the host."""
    return DEVICE_TOKENS if name == "collective" else 1 << 16


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
    """Transfers under way at a time: with overlap two, each of which needs a part of the buffer of its own."""
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
            ranks, device, buffer_bytes, row_bytes, spec.top_k, config.combine, _calls_in_flight(config)
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
        _calls_in_flight(config),
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
        in_flight=_calls_in_flight(config),
        make_network=lambda part, layout: NvshmemNetwork(part, layout, heap_nvshmem.device_library()),
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
