"""Where names become objects. `auto` takes the first that can, and logs why the others lost.

How tokens travel is chosen in backends_dispatch.py.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, NamedTuple

import torch

from moe_runtime.attention.base import AttentionNeed
from moe_runtime.attention.cpu import CpuPagedAttention
from moe_runtime.attention.cpu_native import NativePagedAttention
from moe_runtime.attention.deterministic import DeterministicAttention
from moe_runtime.attention.kv_cache import cache_dtype
from moe_runtime.attention.reference import ReferenceAttention
from moe_runtime.attention.triton_paged import TritonPagedAttention
from moe_runtime.config import AUTO
from moe_runtime.errors import BackendUnavailable
from moe_runtime.experts import deterministic, router, triton_router
from moe_runtime.experts.base import ExpertNeed
from moe_runtime.experts.cpu import CpuExperts
from moe_runtime.experts.cpu_native import NativeExperts
from moe_runtime.experts.deterministic import DeterministicExperts
from moe_runtime.experts.reference import ReferenceExperts
from moe_runtime.experts.triton_grouped import TritonExperts
from moe_runtime.layers.cpu_native import NativeOps
from moe_runtime.layers.deterministic_ops import DeterministicOps
from moe_runtime.layers.invariant import Workers
from moe_runtime.layers.ops import TORCH_OPS
from moe_runtime.layers.triton_ops import TritonOps
from moe_runtime.native.build import Native, load_native
from moe_runtime.triton_support.availability import triton_problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moe_runtime.attention.base import AttentionBackend
    from moe_runtime.attention.kv_cache import KVCache
    from moe_runtime.config import EngineConfig
    from moe_runtime.experts.base import ExpertKernel
    from moe_runtime.experts.router import Router
    from moe_runtime.layers.ops import LayerOps
    from moe_runtime.models.spec import ModelSpec
    from moe_runtime.topology import Topology

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
    return tell(Choice(what, chosen, "asked for" if asked != "auto" else "; ".join(["auto", *lost])), log)


def tell(choice: Choice, log: bool) -> Choice:
    """Logs one line, seen by default if `log`, and returns the choice."""
    logger.log(logging.INFO if log else logging.DEBUG, "%s: %s (%s)", *choice)
    return choice


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


def _native(config: EngineConfig, asked: str, device: torch.device) -> Native:
    """The C++ kernels of CPUs, built only where `asked`, the name of a backend or auto, could mean them."""
    wanted = device.type == "cpu" and asked in (AUTO, "cpu_native") and not config.deterministic
    return load_native(config.cpu_kernels) if wanted else Native(None, "", "was not asked for")


def make_experts(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, topology: Topology
) -> tuple[ExpertKernel, Choice]:
    """How the local experts are computed."""
    need = ExpertNeed(topology.device.type, dtype, spec.activation, spec.expert_scheme)
    native = _native(config, config.moe_backend, topology.device)
    kernels: dict[str, ExpertKernel] = {
        "cpu_native": NativeExperts(native),
        "cpu": CpuExperts(),
        "deterministic": DeterministicExperts(DeterministicOps(Workers(torch.get_num_threads()))),
        "triton": TritonExperts(topology.device, config.deterministic, log=topology.rank == 0),
        "reference": ReferenceExperts(),
    }
    reasons = {name: kernel.supports(need) for name, kernel in kernels.items()}
    reasons = invariant_only(reasons, config, "deterministic", "triton")
    choice = choose("moe_backend", config.moe_backend, reasons, topology.rank == 0)
    return kernels[choice.name], choice


def choose_activations(spec: ModelSpec, dtype: torch.dtype, *, log: bool) -> list[Choice]:
    """What becomes of the experts' input where the checkpoint asks to quantise it too (W8A8); of other checkpoints nothing is said."""
    stored = spec.stored
    if stored is None or not stored.experts or stored.weights_only:
        return []
    asked = f"the checkpoint asks for {stored.scheme.payload_name}, W8A8"
    unused = "; its static scales are not used" if stored.static_activations else ""
    if spec.quantize_activations:
        return [tell(Choice("expert_activations", "fp8", asked + unused), log)]
    kept = asked + "; here activations stay as they are" + (", W8A16" if spec.expert_scheme else "") + unused
    return [tell(Choice("expert_activations", str(dtype).removeprefix("torch."), kept), log)]


def make_layer_ops(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, topology: Topology
) -> tuple[LayerOps, Choice]:
    """How norms, activations and dense products are computed."""
    device = topology.device.type
    triton = TritonOps.supports(device, dtype, spec.activation)
    native = _native(config, config.layer_backend, topology.device)
    reasons = (
        {"cpu_native": NativeOps.supports(device, dtype, native), "torch": None, "triton": triton}
        if device == "cpu"
        else {"triton": triton, "torch": None}
    )
    reasons["deterministic"] = DeterministicOps.supports(device, dtype)
    reasons = invariant_only(reasons, config, "deterministic", "triton")
    choice = choose("layer_backend", config.layer_backend, reasons, topology.rank == 0)
    if choice.name == "deterministic":
        return DeterministicOps(Workers(torch.get_num_threads())), choice
    if choice.name == "cpu_native":
        return NativeOps(native), choice
    return TritonOps(config.deterministic) if choice.name == "triton" else TORCH_OPS, choice


def choose_dense_weights(
    spec: ModelSpec, ops: LayerOps, dtype: torch.dtype, *, log: bool
) -> tuple[ModelSpec, list[Choice]]:
    """The spec with dense layers as `ops` can have them, and where they might be quantised, what was chosen."""
    if spec.dense_scheme is None:
        return spec, []
    if ops.takes_int8:
        kept = " but for the head, which is the embedding" if spec.tie_word_embeddings else ""
        return spec, [tell(Choice("dense_weights", spec.dense_scheme.name, "asked for" + kept), log)]
    why = f"layer_backend {ops.name} has no {spec.dense_scheme.payload_name} products"
    name = str(dtype).removeprefix("torch.")
    return dataclasses.replace(spec, dense_scheme=None), [tell(Choice("dense_weights", name, why), log)]


def choose_attention(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, topology: Topology) -> Choice:
    """What computes attention over the paged cache; known before there is a cache."""
    need = AttentionNeed(
        topology.device.type,
        dtype,
        spec.attention_specs(),
        cache_dtype=cache_dtype(config.kv_cache_dtype, dtype),
    )
    native = _native(config, config.attention_backend, topology.device)
    reasons = {
        "cpu_native": NativePagedAttention.supports(need, native),
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
    if name == "cpu_native":
        return NativePagedAttention(cache, layers, load_native(config.cpu_kernels))
    if name == "cpu":
        return CpuPagedAttention(cache, layers)
    if name == "deterministic":
        return DeterministicAttention(cache, layers)
    if name == "triton":
        return TritonPagedAttention(cache, layers, config.deterministic)
    return ReferenceAttention(cache, layers)
