"""From a step plan to logits: builds the batch's tensors, runs the decoder, owns weights and KV cache of one rank."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from moe_runtime.attention.kv_cache import KVCache, cache_dtype
from moe_runtime.core import ForwardBatch
from moe_runtime.engine.control import StepTimes
from moe_runtime.engine.overlap import Way, half, split
from moe_runtime.errors import CapacityError
from moe_runtime.experts.cpu import DEQUANT_TILE
from moe_runtime.placement.recorder import PartTokens
from moe_runtime.profiling.timeline import EXPERTS, WAIT
from moe_runtime.quantization import GROUP
from moe_runtime.topology import free_memory_bytes

if TYPE_CHECKING:
    from moe_runtime.attention.base import AttentionBackend
    from moe_runtime.config import EngineConfig
    from moe_runtime.core import StepPlan
    from moe_runtime.engine.control import Agreement
    from moe_runtime.engine.graphs import StepGraphs
    from moe_runtime.models.decoder import Decoder
    from moe_runtime.models.spec import ModelSpec
    from moe_runtime.moe import ExpertParallelMoe
    from moe_runtime.placement.recorder import LoadRecorder
    from moe_runtime.placement.route_ring import RouteRing
    from moe_runtime.profiling.trace import StepTrace
    from moe_runtime.topology import Topology

logger = logging.getLogger(__name__)


def build_batch(plan: StepPlan, block_size: int, max_num_tokens: int, device: torch.device) -> ForwardBatch:
    """The plan's tokens, sequence after sequence. Blocks for them must already be in the block tables."""
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_starts = [0]
    seq_lens: list[int] = []
    logit_rows: list[int] = []
    for item in plan.scheduled:
        seq, start, stop = item.sequence, item.start, item.start + item.num_new_tokens
        input_ids += seq.tokens(start, stop)
        positions += range(start, stop)
        table = seq.block_table
        slots += [table[i // block_size] * block_size + i % block_size for i in range(start, stop)]
        query_starts.append(len(input_ids))
        seq_lens.append(stop)
        if item.samples:
            logit_rows.append(len(input_ids) - 1)
    tables = [item.sequence.block_table for item in plan.scheduled]
    width = max((len(t) for t in tables), default=0)
    return ForwardBatch(
        input_ids_T=torch.tensor(input_ids, dtype=torch.int64, device=device),
        positions_T=torch.tensor(positions, dtype=torch.int64, device=device),
        slot_mapping_T=torch.tensor(slots, dtype=torch.int64, device=device),
        block_tables_BM=torch.tensor(
            [t + [0] * (width - len(t)) for t in tables], dtype=torch.int32, device=device
        ).view(len(tables), width),
        query_starts_B1=torch.tensor(query_starts, dtype=torch.int32, device=device),
        seq_lens_B=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        query_lens=[item.num_new_tokens for item in plan.scheduled],
        seq_lens=seq_lens,
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        max_num_tokens=max_num_tokens,
    )


def part_tokens(plan: StepPlan, routes: RouteRing, prefill: bool) -> PartTokens:
    """What the recorder must know of the tokens of `plan`, in the order of `build_batch`.

    prefill: whether some token, perhaps another rank's, is one of a prompt.
    """
    decode: list[int] = []
    sampled: list[tuple[int, int, int]] = []
    if prefill:
        for item in plan.scheduled:
            decode += [int(item.is_decode)] * item.num_new_tokens
    if routes.keeps_any:
        first = 0
        for item in plan.scheduled:
            number = routes.request_number(item.sequence.request_id)
            if number is not None:
                sampled.append((first, item.num_new_tokens, number))
            first += item.num_new_tokens
    decode_T = torch.tensor(decode, dtype=torch.int64) if prefill else None
    return PartTokens(plan.num_tokens, decode_T, tuple(sampled))


@dataclass(frozen=True)
class ModelRunner:
    """One rank's model, cache and kernels."""

    decoder: Decoder
    cache: KVCache
    attention: AttentionBackend
    moe: ExpertParallelMoe
    block_size: int
    device: torch.device
    trace: StepTrace
    recorder: LoadRecorder
    graphs: StepGraphs | None = None
    """Recorded decode steps, if any."""

    @torch.inference_mode()
    def execute(self, plan: StepPlan, agreed: Agreement, way: Way) -> tuple[torch.Tensor, StepTimes]:
        """One forward pass, collective over the ranks.

        Returns float32 logits (sequences that sample, V), in plan order, and what the pass took on this rank.
        """
        timeline = self.moe.timeline
        timeline.begin_step()
        if plan.block_copies:
            self.cache.copy_blocks(plan.block_copies)
        if agreed.graph_ok:
            assert self.graphs is not None
            batch = build_batch(plan, self.block_size, agreed.max_num_tokens, torch.device("cpu"))
            self.recorder.begin_step([part_tokens(plan, self.recorder.routes, agreed.prefill)])
            logits = self.graphs.replay(batch, self.recorder)
        else:
            logits = self._launch(plan, agreed, way)
        timeline.lap("replay" if agreed.graph_ok else "head")
        forward_ns = timeline.end_step(tokens=plan.num_tokens, halves=2 if way is Way.TWO_BATCHES else 1)
        self.trace.step_done()
        times = StepTimes(
            # A forward pass without MoE layers does not wait; 0 would say that there are no times.
            forward_us=max(1, forward_ns // 1000),
            wait_us=timeline.totals_ns[WAIT] // 1000,
            experts_us=timeline.totals_ns[EXPERTS] // 1000,
        )
        self.recorder.end_step(times.forward_us, times.wait_us, agreed.prefill, agreed.max_num_tokens)
        return logits, times

    def check(self) -> None:
        """Raises LockstepError if the device noted that a peer was lost. Waits for nothing; see Dispatcher."""
        self.moe.dispatcher.check()

    def _launch(self, plan: StepPlan, agreed: Agreement, way: Way) -> torch.Tensor:
        pieces = [(plan, agreed.max_num_tokens)]
        if way is Way.TWO_BATCHES:
            pieces = list(zip(split(plan, half(plan)), agreed.max_halves, strict=True))
        parts = [self._prepare(part, limit) for part, limit in pieces]
        routes = self.recorder.routes
        self.recorder.begin_step([part_tokens(part, routes, agreed.prefill) for part, _ in pieces])
        moe = replace(self.moe, chunks=2) if way is Way.CHUNKS else self.moe
        return self.decoder(parts, self.attention, moe)

    def _prepare(self, plan: StepPlan, max_num_tokens: int) -> tuple[ForwardBatch, Any]:
        batch = build_batch(plan, self.block_size, max_num_tokens, self.device)
        return batch, self.attention.plan(batch)

    def close(self) -> None:
        """Write what has been traced, and close the dispatcher."""
        self.trace.end()
        self.moe.dispatcher.close()


def allocate_cache(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    max_model_len: int,
    topology: Topology,
    reserved: int = 0,
) -> KVCache:
    """The KV cache: `num_kv_blocks`, or what fits the rank's free memory after keeping room for a step; and `reserved` blocks more.

    Collective. The rank with the least memory decides for all. Raises CapacityError, with the numbers, if one sequence of
    max_model_len tokens would not fit a cache sized from memory.
    """
    specs, block_size = spec.attention_specs(), config.block_size
    kept_dtype = cache_dtype(config.kv_cache_dtype, dtype)
    block_bytes = KVCache.bytes_per_block(specs, block_size, kept_dtype)
    blocks_per_sequence = -(-max_model_len // block_size)
    free = min(int(n) for n in topology.all_gather_text(str(free_memory_bytes(topology))))
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
        if (num_blocks + reserved) * block_bytes > free:
            raise CapacityError(
                f"num_kv_blocks={num_blocks} needs {_size(num_blocks * block_bytes)} per rank, but {_size(free)} is free"
            )
    else:
        step = step_bytes(config, spec, dtype, topology.world_size)
        fitting = max(0, max(0, int(free * config.memory_utilization) - step) // block_bytes - reserved)
        if fitting < blocks_per_sequence:
            raise CapacityError(
                f"the KV cache has room for {fitting * block_size} tokens per rank ({_size(free)} free,"
                f" memory_utilization={config.memory_utilization}, {_size(step)} kept for computing a step), but one sequence"
                f" may have max_model_len={max_model_len}; lower max_model_len or max_num_batched_tokens, free memory, or set"
                " num_kv_blocks"
            )
        # More than every running sequence at full length is of no use.
        num_blocks = min(fitting, config.max_num_seqs * blocks_per_sequence)
    logger.info(
        "KV cache: %d blocks of %d tokens (%s) per rank; %.1f sequences of %d tokens at once",
        num_blocks, block_size, _size(num_blocks * block_bytes), num_blocks / blocks_per_sequence, max_model_len,
    )  # fmt: skip
    return KVCache.allocate(specs, num_blocks + reserved, block_size, kept_dtype, topology.device)


def step_bytes(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, world_size: int) -> int:
    """Working memory of the largest step, roughly: activations of all tokens that can meet on one rank, and logits."""
    tokens = config.max_num_batched_tokens
    # Hidden state, residual, normed copy, q/k/v and attention output, in flight at once.
    attention = tokens * 8 * max(spec.hidden_size, spec.num_heads * spec.head_dim) * dtype.itemsize
    rows = tokens * world_size * max(1, spec.top_k)
    experts = rows * (2 * spec.hidden_size + 3 * max(spec.moe_intermediate_size, 1)) * dtype.itemsize
    # Logits in float32, and what sampling makes of them.
    logits = config.max_num_seqs * spec.vocab_size * 4 * 4
    return attention + experts + logits + _dequantized_bytes(spec, dtype)


def _dequantized_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """The tile of FP8 weights that the CPU kernel holds in float32 and in the model's dtype."""
    if spec.expert_scheme is None:
        return 0
    lowest = GROUP * max(spec.hidden_size, spec.moe_intermediate_size)
    return max(DEQUANT_TILE, lowest) * (4 + dtype.itemsize)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
