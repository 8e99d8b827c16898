"""Decode steps recorded once for each batch size and replayed, so that no kernel is launched from Python: CUDA graphs.

A recording has fixed addresses and shapes. So a step in which every sequence has one new token is copied into buffers that
stay, and padded up to the next recorded size. A row of padding is token 0 at position 0 of a sequence of one token in a
block of the cache that belongs to nobody; its router ids become -1, so it costs no traffic and no expert; its logits are
dropped. Attention is planned for the longest sequence that a recording serves (`longest`), and reads the real lengths on the device.

    recorded sizes      1   2   4   8   16  ...
    rank 0, 5 tokens    t t t t t . . .          all ranks replay size 8: the largest rank's, as the lockstep header has it;
    rank 1, 0 tokens    . . . . . . . .          an idle rank takes part with padding alone
    rank 2, 8 tokens    t t t t t t t t

A step is replayed only if every rank can (`fits`). All others are launched as ever.

Legend: T tokens, B sequences (as many), M blocks of `longest` tokens, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from moe_runtime.core import ForwardBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moe_runtime.attention.base import AttentionBackend
    from moe_runtime.core import StepPlan
    from moe_runtime.models.decoder import Decoder
    from moe_runtime.moe import ExpertParallelMoe, ExpertWatch

MAX_LONGEST = 32768
"""Sequences longer than this are not replayed: attention's intermediate results take memory for the longest."""

Run = Callable[[], None]
Record = Callable[[Run], Run]
"""Takes a function of fixed tensors; returns what does the same work again."""


@dataclass(frozen=True)
class StepBuffers:
    """The inputs of recorded steps, for the largest size; smaller ones use the first rows."""

    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slot_mapping_T: torch.Tensor
    block_tables_BM: torch.Tensor
    seq_lens_B: torch.Tensor
    query_starts_B1: torch.Tensor
    """0, 1, 2, ...: it never changes, no more than logit_rows."""
    logit_rows: torch.Tensor
    padding_T: torch.Tensor
    longest: int
    scratch_slot: int
    """Where rows of padding write, the first of a block."""
    scratch_block: int

    @classmethod
    def allocate(
        cls, size: int, longest: int, scratch_block: int, block_size: int, device: torch.device
    ) -> StepBuffers:
        """All rows are padding. longest: tokens; scratch_block: a block of the cache that no sequence ever has."""

        def rows(dtype: torch.dtype, *more: int) -> torch.Tensor:
            return torch.zeros((size, *more), dtype=dtype, device=device)

        buffers = cls(
            input_ids_T=rows(torch.int64),
            positions_T=rows(torch.int64),
            slot_mapping_T=rows(torch.int64),
            block_tables_BM=rows(torch.int32, -(-longest // block_size)),
            seq_lens_B=rows(torch.int32),
            query_starts_B1=torch.arange(size + 1, dtype=torch.int32, device=device),
            logit_rows=torch.arange(size, device=device),
            padding_T=rows(torch.bool),
            longest=longest,
            scratch_slot=scratch_block * block_size,
            scratch_block=scratch_block,
        )
        buffers.slot_mapping_T.fill_(buffers.scratch_slot)
        buffers.block_tables_BM[:, 0] = scratch_block
        buffers.seq_lens_B.fill_(1)
        buffers.padding_T.fill_(True)
        return buffers

    def batch(self, size: int) -> ForwardBatch:
        """The first `size` rows as a batch; its lists, on the host, are capacities."""
        return ForwardBatch(
            input_ids_T=self.input_ids_T[:size],
            positions_T=self.positions_T[:size],
            slot_mapping_T=self.slot_mapping_T[:size],
            block_tables_BM=self.block_tables_BM[:size],
            query_starts_B1=self.query_starts_B1[: size + 1],
            seq_lens_B=self.seq_lens_B[:size],
            query_lens=[1] * size,
            seq_lens=[self.longest] * size,
            logit_rows=self.logit_rows[:size],
            max_num_tokens=size,
            padding_T=self.padding_T[:size],
        )

    def fill(self, batch: ForwardBatch, size: int) -> None:
        """Copy a batch of at most `size` sequences with one new token each; what is left of `size` rows becomes padding."""
        used = batch.num_tokens
        assert batch.query_lens == [1] * used, f"not one new token each: {batch.query_lens}"
        assert used <= size <= len(self.padding_T), f"{used} tokens in {size} rows of {len(self.padding_T)}"
        assert max(batch.seq_lens, default=0) <= self.longest, (
            f"{max(batch.seq_lens)} tokens > {self.longest}"
        )
        empty = size - used
        for kept, new, value in (
            (self.input_ids_T, batch.input_ids_T, 0),
            (self.positions_T, batch.positions_T, 0),
            (self.slot_mapping_T, batch.slot_mapping_T, self.scratch_slot),
            (self.seq_lens_B, batch.seq_lens_B, 1),
        ):
            kept[:size].copy_(pad(new, (0, empty), value=value))
        width = batch.block_tables_BM.shape[1]
        self.block_tables_BM[:used, :width].copy_(batch.block_tables_BM)
        self.block_tables_BM[used:size, 0] = self.scratch_block
        self.padding_T[:used] = False
        self.padding_T[used:size] = True


@dataclass
class KeptCounts:
    """What the experts did in the last replay: tensors that a recorded step writes anew each time. An ExpertWatch."""

    ids: list[torch.Tensor] = field(default_factory=list)
    rows: list[int | torch.Tensor] = field(default_factory=list)

    def clear(self) -> None:
        """Before the step's function runs."""
        self.ids.clear()
        self.rows.clear()

    def count(self, topk_ids_TK: torch.Tensor) -> None:
        """See ExpertWatch."""
        self.ids.append(topk_ids_TK)

    def computed(self, num_rows: int | torch.Tensor) -> None:
        """See ExpertWatch."""
        self.rows.append(num_rows)

    def tell(self, watch: ExpertWatch, num_tokens: int) -> None:
        """Without padding, which is all that comes after the first num_tokens."""
        for topk_ids_TK in self.ids:
            watch.count(topk_ids_TK[:num_tokens])
        for num_rows in self.rows:
            watch.computed(num_rows)


class StepGraph:
    """A decode step of one size. What a replay reads is in the buffers, what it gives in `logits_BV`."""

    def __init__(self, buffers: StepBuffers, size: int, logits_BV: torch.Tensor) -> None:
        """logits_BV: float32, at least `size` rows."""
        self.size = size
        self._batch = buffers.batch(size)
        self._buffers, self._logits_BV = buffers, logits_BV[:size]
        self._counts = KeptCounts()
        self._again: Run | None = None

    def capture(
        self, decoder: Decoder, attention: AttentionBackend, moe: ExpertParallelMoe, record: Record
    ) -> None:
        """Collective: all ranks record the same sizes in the same order."""
        parts = [(self._batch, attention.plan(self._batch))]
        moe = replace(moe, recorder=self._counts)

        def forward() -> None:
            self._counts.clear()
            self._logits_BV.copy_(decoder(parts, attention, moe))

        self._again = record(forward)

    def replay(self, batch: ForwardBatch, watch: ExpertWatch) -> torch.Tensor:
        """Collective. The batch's logits (B, V), which the next replay overwrites. batch: see StepBuffers.fill."""
        assert self._again is not None, "nothing was captured"
        self._buffers.fill(batch, self.size)
        self._again()
        self._counts.tell(watch, batch.num_tokens)
        return self._logits_BV[: batch.num_tokens]


class StepGraphs:
    """One StepGraph for each size; they share buffers and memory."""

    def __init__(
        self,
        sizes: Sequence[int],
        longest: int,
        scratch_block: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """sizes: ascending. longest: tokens of the longest sequence to be replayed. scratch_block: see StepBuffers."""
        self.sizes = tuple(sizes)
        self.longest = longest
        buffers = StepBuffers.allocate(self.sizes[-1], longest, scratch_block, block_size, device)
        logits_BV = torch.zeros(self.sizes[-1], vocab_size, dtype=torch.float32, device=device)
        self._graphs = {size: StepGraph(buffers, size, logits_BV) for size in self.sizes}

    @torch.inference_mode()
    def capture(
        self, decoder: Decoder, attention: AttentionBackend, moe: ExpertParallelMoe, record: Record
    ) -> None:
        """Collective. The largest comes first, so that the others fit into its memory."""
        for size in reversed(self.sizes):
            self._graphs[size].capture(decoder, attention, moe, record)

    def fits(self, plan: StepPlan) -> bool:
        """Whether this rank could replay the step: nothing but decoding, neither too much nor too long. An empty plan fits."""
        return plan.num_tokens <= self.sizes[-1] and all(
            item.num_new_tokens == 1 and item.samples and item.start < self.longest for item in plan.scheduled
        )

    def replay(self, batch: ForwardBatch, watch: ExpertWatch) -> torch.Tensor:
        """Collective, for a batch that fits on every rank. batch: on the host, max_num_tokens the largest rank's. Returns (B, V).

        `watch` is told what the experts did; it must have read that before the next replay is launched.
        """
        size = self.sizes[bisect_left(self.sizes, batch.max_num_tokens)]
        return self._graphs[size].replay(batch, watch)


class CudaGraphs:
    """Records functions of tensors on the current CUDA device; all recordings share one pool of memory. See `Record`."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Run) -> Run:
        """Runs it once before: kernels cannot be compiled or loaded while a graph is recorded."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Threads of NCCL may ask CUDA for the state of earlier work meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        self._pool = graph.pool()
        return graph.replay
