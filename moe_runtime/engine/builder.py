"""Building one rank's engine from the configuration, in stages after each of which all ranks compare notes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from moe_runtime import backends, backends_dispatch
from moe_runtime.config import replace
from moe_runtime.config_eplb import eplb_config
from moe_runtime.core import ExpertPlacement
from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.engine.control import Control
from moe_runtime.engine.engine import Engine
from moe_runtime.engine.graph_sizes import GraphSizes, Parts, choose_sizes
from moe_runtime.engine.graphs import MAX_LONGEST, CudaGraphs, Record, StepGraphs
from moe_runtime.engine.initial_placement import initial_placement
from moe_runtime.engine.load_records import LoadRecords, describe
from moe_runtime.engine.messages import MoeShape, Ready
from moe_runtime.engine.model_runner import ModelRunner, allocate_cache
from moe_runtime.engine.overlap import OverlapModel
from moe_runtime.engine.rebalancing import PlacementInForce, Rebalancer
from moe_runtime.engine.scheduler import Scheduler
from moe_runtime.errors import BackendUnavailable, CapacityError, ConfigError
from moe_runtime.experts.deterministic import DeterministicExperts
from moe_runtime.experts.migration import SlotStore
from moe_runtime.layers.invariant import row_dependence
from moe_runtime.models.quantized import with_weight_schemes
from moe_runtime.models.registry import load_adapter, load_spec
from moe_runtime.models.spec import ModelSpec
from moe_runtime.moe import ExpertParallelMoe
from moe_runtime.placement.balancer import StepModel, make_plan
from moe_runtime.placement.cost import Cluster, Cost, Hardware, ModelCost
from moe_runtime.placement.layout import layer_placement
from moe_runtime.placement.live_loads import LiveLoads
from moe_runtime.placement.recorder import LoadRecorder
from moe_runtime.placement.transition import with_empty_slots
from moe_runtime.profiling.timeline import Timeline
from moe_runtime.profiling.trace import StepTrace, trace_file
from moe_runtime.topology import free_memory_bytes
from moe_runtime.triton_support.availability import device_name
from moe_runtime.weights.loader import load_weights, weight_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from moe_runtime.attention.base import AttentionBackend
    from moe_runtime.attention.kv_cache import KVCache
    from moe_runtime.config import EngineConfig
    from moe_runtime.dispatch.base import ChooseReplicas, Dispatcher
    from moe_runtime.engine.rank_link import RankLink
    from moe_runtime.experts.base import ExpertKernel
    from moe_runtime.experts.router import Router
    from moe_runtime.layers.ops import LayerOps
    from moe_runtime.models.decoder import Decoder
    from moe_runtime.placement.balancer import Plan
    from moe_runtime.topology import Topology

SWITCH_INTERVAL_S = 2e-4
"""Python's default, 5 ms, would be felt: a step takes the interpreter back hundreds of times."""


class RankBuilder:
    """Call every one of `stages` in order on all ranks, then engine(). A stage may raise MoeRuntimeError."""

    decoder: Decoder
    dispatcher: Dispatcher
    replicas: ChooseReplicas
    kernel: ExpertKernel
    router: Router
    ops: LayerOps
    cache: KVCache
    attention: AttentionBackend
    graph_sizes: GraphSizes
    runner: ModelRunner
    records: LoadRecords
    make_record: Callable[[], Record] = CudaGraphs

    def __init__(
        self, config: EngineConfig, topology: Topology, report: Callable[[str, float], None]
    ) -> None:
        self.config, self.topology, self.report = config, topology, report
        self._spec_json = self._placement_json = self._hardware_json = ""
        # What needs no time comes before the weights, so that its mistakes are told at once.
        self.stages = (
            self.read_config,
            self.decide,
            self.connect,
            self.load,
            self.reserve,
            self.balance,
            self.assemble,
        )

    def read_config(self) -> None:
        """The model's shape and the placement, read by rank 0 alone: what reads them takes long to import."""
        if self.topology.rank == 0:
            spec, _ = load_spec(Path(self.config.model))
            self._spec_json = spec.to_json()
            eplb = eplb_config(self.config)
            hardware = Hardware.for_device(eplb.hardware, device_name(self.topology.device))
            self._hardware_json = msgspec.json.encode(hardware).decode()
            config = replace(self.config, num_redundant_experts=eplb.num_redundant_experts)
            placement = initial_placement(config, spec, self.topology.world_size)
            self._placement_json = msgspec.json.encode(placement).decode()

    def decide(self) -> None:
        """The same shape on all ranks, the data type, the context length, the placement."""
        config = self.config
        spec = ModelSpec.from_json(self.topology.broadcast_text(self._spec_json))
        self.spec = with_weight_schemes(spec, config.quantization, self.topology.device.type)
        self.adapter = load_adapter(self.spec.architecture)
        self.dtype: torch.dtype = getattr(torch, self.spec.dtype if config.dtype == "auto" else config.dtype)
        longest = self.spec.max_position_embeddings
        if config.max_model_len is not None and config.max_model_len > longest:
            raise ConfigError(
                f"max_model_len={config.max_model_len}: the model has positions for {longest} tokens at most"
            )
        self.max_model_len = config.max_model_len or longest
        self.eplb = eplb_config(config)
        text = self.topology.broadcast_text(self._placement_json)
        self.placement = msgspec.json.decode(text, type=ExpertPlacement)
        if config.enable_eplb:
            text = self.topology.broadcast_text(self._hardware_json)
            self.hardware = msgspec.json.decode(text, type=Hardware)
            self.placement = with_empty_slots(self.placement, self.eplb.num_staging_slots)

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
        self.kernel, kernel = backends.make_experts(*what)
        payload = backends_dispatch.choose_payload(self.config, self.spec, kernel.name, self.topology)
        self.config = replace(self.config, dispatch_dtype=payload.name)
        what = self.config, self.spec, self.dtype, self.topology
        self.dispatcher, dispatcher = backends_dispatch.make_dispatcher(*what)
        self.replicas, replicas = backends_dispatch.make_replica_choice(
            self.config, self.dispatcher, self.topology
        )
        asked = self.config.ep_dispatch_algorithm
        # What `auto` comes to on CPUs depends on the step, elsewhere it is what was chosen; one rank has no choice.
        kept = replicas.name == "dynamic" or self.topology.world_size == 1
        self.replica_split = asked if kept else replicas.name
        self.router, router = backends.make_router(self.config, self.topology)
        self.ops, ops = backends.make_layer_ops(*what)
        self.spec, dense = backends.choose_dense_weights(
            self.spec, self.ops, self.dtype, log=self.topology.rank == 0
        )
        overlap = backends_dispatch.choose_overlap(self.config, self.topology)
        self.overlap = OverlapModel(overlap.name, log=self.topology.rank == 0)
        self.attention_choice = backends.choose_attention(*what)
        self.graph_sizes = choose_sizes(
            self.config,
            Parts(
                device_type=self.topology.device.type,
                attention=self.attention_choice.name,
                experts=kernel.name,
                overlap=overlap.name,
                dispatch_tokens=backends_dispatch.dispatch_tokens_without_host(dispatcher.name),
            ),
        )
        log = self.topology.rank == 0
        graphs = backends.Choice("cuda_graphs", str(self.graph_sizes), self.graph_sizes.why)
        self.choices = [dispatcher, payload, replicas, kernel, router, ops, overlap]
        self.choices += [self.attention_choice, backends.tell(graphs, log)]
        self.choices += dense + backends.choose_activations(self.spec, self.dtype, log=log)

    def reserve(self) -> None:
        """The KV cache."""
        self.report("reserving the KV cache", 0.95)
        # Recorded steps need a block for their padding to write to.
        self.reserved_blocks = 1 if self.graph_sizes.sizes else 0
        self.cache = allocate_cache(
            self.config, self.spec, self.dtype, self.max_model_len, self.topology, self.reserved_blocks
        )
        self.attention = backends.make_attention(
            self.attention_choice.name, self.config, self.spec, self.cache
        )

    def balance(self) -> None:
        """The placement as this rank uses it, and what changes it."""
        topology, spec = self.topology, self.spec
        self.placements = [
            layer_placement(self.placement, layer, topology.rank, topology.device)
            for layer in range(spec.num_moe_layers)
        ]
        self.recorder, self.records = self._recording()
        self.rebalancer: Rebalancer | None = None
        if not self.config.enable_eplb:
            return
        self.recorder.live = LiveLoads(
            spec.num_moe_layers, spec.num_experts, self.eplb.window_size, topology.device
        )
        self.rebalancer = Rebalancer(
            topology,
            PlacementInForce(self.placement, self.placements),
            SlotStore.of([mlp.expert_weights() for mlp in self.decoder.moe_mlps()]),
            self.recorder,
            self.recorder.live,
            self._planner(),
            StepModel(
                Cost(ModelCost.of(self.records.what), self.hardware, self._cluster), self.replica_split
            ),
            self.eplb,
            self.config.eplb_dry_run,
        )
        # Threads beside the step's hold the interpreter for so long at most, when the step's wants it.
        sys.setswitchinterval(SWITCH_INTERVAL_S)

    def _planner(self) -> Plan:
        """For as many replicas as there are at the start; the slots to move experts into stay empty."""
        layer = self.placement.slots[0]
        num_slots = sum(expert >= 0 for rank in layer for expert in rank)
        room = len(layer[0]) - self.eplb.num_staging_slots
        return make_plan(self._cluster, num_slots, room, self.eplb.max_moved, self.eplb.algorithm)

    @property
    def _cluster(self) -> Cluster:
        """One node if hosts have unequal numbers of ranks."""
        topology = self.topology
        nodes, rest = divmod(topology.world_size, topology.local_world_size)
        return Cluster.single(topology.world_size) if rest else Cluster(nodes, topology.local_world_size)

    def assemble(self) -> None:
        """What runs the model, and decode steps as CUDA graphs."""
        config, topology = self.config, self.topology
        moe = ExpertParallelMoe(
            self.dispatcher,
            self.kernel,
            self.placements,
            topology.rank,
            self.timeline,
            choose=self.replicas,
            recorder=self.recorder,
            takes_packed=self.config.dispatch_dtype == "fp8",
        )
        graphs = None
        if self.graph_sizes.sizes:
            self.report("recording CUDA graphs", 0.96)
            graphs = StepGraphs(
                self.graph_sizes.sizes,
                min(self.max_model_len, self.num_kv_blocks * config.block_size, MAX_LONGEST),
                self.num_kv_blocks,
                config.block_size,
                self.spec.vocab_size,
                topology.device,
            )
            graphs.capture(self.decoder, self.attention, moe, self.make_record())
        self.runner = ModelRunner(
            decoder=self.decoder,
            cache=self.cache,
            attention=self.attention,
            moe=moe,
            block_size=config.block_size,
            device=topology.device,
            trace=self.trace,
            recorder=self.recorder,
            graphs=graphs,
        )

    def engine(self, link: RankLink) -> Engine:
        """The rank's engine. All stages must have succeeded on all ranks."""
        config, topology = self.config, self.topology
        scheduler = Scheduler(
            BlockManager(self.num_kv_blocks, config.block_size, config.enable_prefix_caching),
            config.max_num_seqs,
            config.max_num_batched_tokens,
            self.max_model_len,
        )
        control = Control(topology, config.step_timeout)
        return Engine(
            topology.rank,
            scheduler,
            self.runner,
            control,
            link,
            self.overlap,
            self.records,
            self.rebalancer,
        )

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
        what = describe(config, spec, self.dtype, topology, expert_bytes, self.replica_split)
        return recorder, LoadRecords(topology.rank, recorder, what)

    def _moe_shape(self) -> MoeShape:
        spec = self.spec
        return MoeShape(spec.num_experts, spec.moe_layers, spec.num_layers, self.records.what.checkpoint)

    @property
    def num_kv_blocks(self) -> int:
        """Those that sequences can have."""
        return self.cache.num_blocks - self.reserved_blocks

    def ready(self, pid: int) -> Ready:
        """What the front-end is told. `pid`: 0 if the front-end is on another host."""
        return Ready(
            rank=self.topology.rank,
            pid=pid,
            max_model_len=self.max_model_len,
            vocab_size=self.spec.vocab_size,
            num_kv_blocks=self.num_kv_blocks,
            block_size=self.config.block_size,
            placement=None if self.rebalancer is None else self.rebalancer.slots,
            moe=None if self.rebalancer is None else self._moe_shape(),
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
