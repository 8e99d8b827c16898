"""Building one rank's engine from the configuration, in stages after each of which all ranks compare notes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moe_runtime import backends, backends_dispatch
from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.engine.control import Control
from moe_runtime.engine.engine import Engine
from moe_runtime.engine.load_records import LoadRecords, describe
from moe_runtime.engine.messages import Ready
from moe_runtime.engine.model_runner import ModelRunner, allocate_cache
from moe_runtime.engine.overlap import OverlapModel
from moe_runtime.engine.scheduler import Scheduler
from moe_runtime.errors import BackendUnavailable, CapacityError, ConfigError
from moe_runtime.experts.deterministic import DeterministicExperts
from moe_runtime.layers.invariant import row_dependence
from moe_runtime.models.quantized import with_expert_scheme
from moe_runtime.models.registry import load_adapter, load_spec
from moe_runtime.models.spec import ModelSpec
from moe_runtime.moe import ExpertParallelMoe
from moe_runtime.placement.layout import contiguous, layer_placement
from moe_runtime.placement.recorder import LoadRecorder
from moe_runtime.profiling.timeline import Timeline
from moe_runtime.profiling.trace import StepTrace, trace_file
from moe_runtime.topology import free_memory_bytes
from moe_runtime.weights.loader import load_weights, weight_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from moe_runtime.attention.base import AttentionBackend
    from moe_runtime.attention.kv_cache import KVCache
    from moe_runtime.config import EngineConfig
    from moe_runtime.dispatch.base import Dispatcher
    from moe_runtime.engine.rank_link import RankLink
    from moe_runtime.experts.base import ExpertKernel
    from moe_runtime.experts.router import Router
    from moe_runtime.layers.ops import LayerOps
    from moe_runtime.models.decoder import Decoder
    from moe_runtime.topology import Topology

logger = logging.getLogger(__name__)


class RankBuilder:
    """Call every one of `stages` in order on all ranks, then engine(). A stage may raise MoeRuntimeError."""

    decoder: Decoder
    dispatcher: Dispatcher
    kernel: ExpertKernel
    router: Router
    ops: LayerOps
    cache: KVCache
    attention: AttentionBackend

    def __init__(
        self, config: EngineConfig, topology: Topology, report: Callable[[str, float], None]
    ) -> None:
        self.config, self.topology, self.report = config, topology, report
        self._spec_json = ""
        # What needs no time comes before the weights, so that its mistakes are told at once.
        self.stages = (self.read_config, self.decide, self.connect, self.load, self.reserve)

    def read_config(self) -> None:
        """The model's shape, read by rank 0 alone: what reads it takes long to import."""
        if self.topology.rank == 0:
            self._spec_json = load_spec(Path(self.config.model))[0].to_json()

    def decide(self) -> None:
        """The same shape on all ranks, the data type, the context length, the placement."""
        config = self.config
        spec = ModelSpec.from_json(self.topology.broadcast_text(self._spec_json))
        self.spec = with_expert_scheme(spec, config.quantization, self.topology.device.type)
        self.adapter = load_adapter(self.spec.architecture)
        self.dtype: torch.dtype = getattr(torch, self.spec.dtype if config.dtype == "auto" else config.dtype)
        longest = self.spec.max_position_embeddings
        if config.max_model_len is not None and config.max_model_len > longest:
            raise ConfigError(
                f"max_model_len={config.max_model_len}: the model has positions for {longest} tokens at most"
            )
        self.max_model_len = config.max_model_len or longest
        self.placement = contiguous(
            self.spec.num_moe_layers,
            self.spec.num_experts,
            self.topology.world_size,
            config.num_redundant_experts,
        )

    def load(self) -> None:
        """The weights this rank keeps."""
        local = [layer[self.topology.rank] for layer in self.placement.slots]
        needed = weight_bytes(self.spec, [len(slots) for slots in local], self.dtype)
        free = free_memory_bytes(self.topology)
        if needed > free:
            raise CapacityError(
                f"the weights of a rank take {needed / 2**30:.2f} GiB, but {free / 2**30:.2f} GiB is free for it;"
                " free memory, use more ranks on more hosts, or a smaller dtype"
            )
        self.decoder = load_weights(
            Path(self.config.model),
            self.spec,
            self.adapter,
            local,
            self.dtype,
            self.topology.device,
            progress=lambda share: self.report("loading weights", 0.01 + 0.94 * share),
            router=self.router,
            ops=self.ops,
        )
        if self.config.deterministic:
            check_invariance(self.decoder, self.ops, self.kernel)

    def connect(self) -> None:
        """Dispatcher, what experts and layers are computed with, and what watches them."""
        self.timeline = Timeline()
        self.trace = StepTrace(self.timeline)
        if self.config.trace_steps:
            write = trace_file(Path(self.config.trace_dir), self.topology.rank)
            self.trace.begin(self.config.trace_steps, write)
        what = self.config, self.spec, self.dtype, self.topology
        self.dispatcher, dispatcher = backends_dispatch.make_dispatcher(*what)
        self.kernel, kernel = backends.make_experts(*what)
        self.router, router = backends.make_router(self.config, self.topology)
        self.ops, ops = backends.make_layer_ops(*what)
        overlap = backends_dispatch.choose_overlap(self.config, self.topology)
        self.overlap = OverlapModel(overlap.name, log=self.topology.rank == 0)
        self.attention_choice = backends.choose_attention(*what)
        self.choices = [dispatcher, kernel, router, ops, overlap, self.attention_choice]

    def reserve(self) -> None:
        """The KV cache."""
        self.report("reserving the KV cache", 0.95)
        self.cache = allocate_cache(self.config, self.spec, self.dtype, self.max_model_len, self.topology)
        self.attention = backends.make_attention(
            self.attention_choice.name, self.config, self.spec, self.cache
        )

    def engine(self, link: RankLink) -> Engine:
        """The rank's engine. All stages must have succeeded on all ranks."""
        config, topology = self.config, self.topology
        placements = [
            layer_placement(self.placement, layer, topology.rank, topology.device)
            for layer in range(self.spec.num_moe_layers)
        ]
        recorder, records = self._recording()
        runner = ModelRunner(
            decoder=self.decoder,
            cache=self.cache,
            attention=self.attention,
            moe=ExpertParallelMoe(
                self.dispatcher, self.kernel, placements, topology.rank, self.timeline, recorder=recorder
            ),
            block_size=config.block_size,
            device=topology.device,
            trace=self.trace,
            recorder=recorder,
        )
        scheduler = Scheduler(
            BlockManager(self.num_kv_blocks, config.block_size, config.enable_prefix_caching),
            config.max_num_seqs,
            config.max_num_batched_tokens,
            self.max_model_len,
        )
        control = Control(topology, config.step_timeout)
        return Engine(topology.rank, scheduler, runner, control, link, self.overlap, records)

    def _recording(self) -> tuple[LoadRecorder, LoadRecords]:
        """The record of expert loads, and what deals with it."""
        config, spec, topology = self.config, self.spec, self.topology
        recorder = LoadRecorder(
            spec.num_moe_layers,
            spec.num_experts,
            spec.top_k,
            config.expert_load_memory_mib << 20,
            topology.device,
            [[list(slots) for slots in layer] for layer in self.placement.slots],
            config.record_routes_share,
        )
        expert_bytes = 0
        for mlp in self.decoder.moe_mlps()[:1]:
            expert_bytes = mlp.expert_weights().num_bytes // len(self.placement.slots[0][0])
        what = describe(config, spec, self.dtype, topology, expert_bytes)
        return recorder, LoadRecords(topology.rank, recorder, what)

    @property
    def num_kv_blocks(self) -> int:
        """Blocks of the paged cache."""
        return int(self.cache.keys[0].shape[0])

    def ready(self, pid: int) -> Ready:
        """What the front-end is told. `pid`: 0 if the front-end is on another host."""
        return Ready(
            rank=self.topology.rank,
            pid=pid,
            max_model_len=self.max_model_len,
            vocab_size=self.spec.vocab_size,
            num_kv_blocks=self.num_kv_blocks,
            block_size=self.config.block_size,
            info={
                "architecture": self.spec.architecture,
                "device": str(self.topology.device),
                "dtype": str(self.dtype).removeprefix("torch."),
                "kv_cache_dtype": str(self.cache.dtype).removeprefix("torch."),
                "quantization": self.spec.expert_scheme.name if self.spec.expert_scheme else "none",
                "slots_per_rank": str(len(self.placement.slots[0][0])),
                **{choice.what: choice.name for choice in self.choices},
                **{f"{choice.what}_reason": choice.why for choice in self.choices},
            },
        )


def check_invariance(decoder: Decoder, ops: LayerOps, kernel: ExpertKernel) -> None:
    """Raises BackendUnavailable if matrix products on this machine cannot keep the promise of --deterministic."""
    products: list[tuple[LayerOps, torch.Tensor]] = [(ops, p) for p in decoder.parameters() if p.dim() == 2]
    if isinstance(kernel, DeterministicExperts):
        products += [(kernel.ops, p[0]) for p in decoder.parameters() if p.dim() == 3 and p.shape[0]]
    for by, weight in {(o.name, tuple(w.shape), w.dtype): (o, w) for o, w in products}.values():
        problem = row_dependence(by.linear, weight)
        if problem is not None:
            raise BackendUnavailable(f"--deterministic: {problem}")
