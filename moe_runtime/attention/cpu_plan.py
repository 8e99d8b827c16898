"""What CPU attention does in a step: which sequences are gathered together, which slots they read, and masks.

Legend: T tokens, B sequences of a group, L gathered tokens, M blocks of a sequence, Q query rows of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moe_runtime.quantization import FP8

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moe_runtime.attention.base import AttentionSpec
    from moe_runtime.attention.kv_cache import KVCache
    from moe_runtime.core import ForwardBatch

MAX_PADDED_RATIO = 1.5
"""A decode group is split when padding would make it gather more than this times what it needs."""
GATHER_BYTES = 64 * 2**20
"""A decode group's gathered keys and values stay below this, unless one sequence alone needs more."""
QUERY_TILE = 256
"""Query rows per masked call; bounds the mask, and keys that none of the rows may see are left out."""


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one new token each, of similar length."""

    rows_B: torch.Tensor
    """int64: their rows of T."""
    slots_BL: torch.Tensor
    """int64. Padding repeats a slot of the same sequence: masked weights are 0, and 0 times NaN is NaN, so
    a slot that was never written must not be gathered."""
    mask_B11L: torch.Tensor | None
    """Added to the scores, 0 or -inf; None without padding."""


@dataclass(frozen=True)
class Tile:
    """Query rows of a chunk and the keys they may see, both relative to the chunk's own."""

    queries: slice
    keys: slice
    mask_QL: torch.Tensor | None
    """Added to the scores; None: causal, with as many keys as queries."""


@dataclass(frozen=True)
class Chunk:
    """One sequence with several new tokens, or with nothing cached before them."""

    rows: slice
    """Its rows of T."""
    slots_L: torch.Tensor | None
    """int64: the slots it may see; None: its new tokens alone, as they are, so nothing is gathered."""
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class WindowPlan:
    """The work of a layer, shared by all layers with the same sliding window."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class CpuAttentionPlan:
    """Of one step, for all layers."""

    slot_mapping_T: torch.Tensor
    """int64: where the cache takes the new tokens."""
    by_window: dict[int | None, WindowPlan]


def plan_step(batch: ForwardBatch, specs: Sequence[AttentionSpec], cache: KVCache) -> CpuAttentionPlan:
    """Indices and masks of this step, once for all layers (`specs`) with the same window."""
    assert sum(batch.query_lens) == batch.num_tokens, f"{batch.query_lens} for {batch.num_tokens} tokens"
    windows = {spec.sliding_window for spec in specs}
    return CpuAttentionPlan(
        slot_mapping_T=batch.slot_mapping_T,
        by_window={
            window: _plan_window(batch, window, [s for s in specs if s.sliding_window == window], cache)
            for window in windows
        },
    )


def _plan_window(
    batch: ForwardBatch, window: int | None, specs: list[AttentionSpec], cache: KVCache
) -> WindowPlan:
    # FP8 is widened when it is gathered, to whatever the queries have.
    dtype, size = torch.float32 if cache.dtype == FP8 else cache.dtype, cache.block_size
    token_bytes = max(2 * s.num_kv_heads * s.head_dim for s in specs) * dtype.itemsize
    decodes, chunks = [], []
    first = 0
    for index, (new, total) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        span = _Span(index, first, new, total, 0 if window is None else max(0, total - new + 1 - window))
        if new == 1 and total > 1:
            decodes.append(span)
        elif new:
            chunks.append(span)
        first += new
    tables_BM = batch.block_tables_BM
    groups = _group_by_length(decodes, max_tokens=GATHER_BYTES // token_bytes)
    return WindowPlan(
        groups=tuple(_decode_group(group, tables_BM, size, dtype) for group in groups),
        chunks=tuple(_plan_chunks(chunks, window, tables_BM, size, dtype, gather_all=cache.dtype == FP8)),
    )


@dataclass(frozen=True)
class _Span:
    """One sequence's part in a step."""

    index: int
    """In the batch."""
    first_row: int
    num_new: int
    end: int
    """Its tokens after this step."""
    first_key: int
    """First position that any of its new tokens may see."""

    @property
    def start(self) -> int:
        """Position of its first new token."""
        return self.end - self.num_new

    @property
    def num_keys(self) -> int:
        return self.end - self.first_key


def _group_by_length(spans: list[_Span], max_tokens: int) -> Iterator[list[_Span]]:
    """Split into groups within MAX_PADDED_RATIO and `max_tokens` gathered tokens; each has at least one."""
    group: list[_Span] = []
    useful = 0
    for span in sorted(spans, key=lambda s: -s.num_keys):
        if group:
            padded = (len(group) + 1) * group[0].num_keys
            if padded > max_tokens or padded > MAX_PADDED_RATIO * (useful + span.num_keys):
                yield group
                group, useful = [], 0
        group.append(span)
        useful += span.num_keys
    if group:
        yield group


def _decode_group(
    spans: list[_Span], tables_BM: torch.Tensor, block_size: int, dtype: torch.dtype
) -> DecodeGroup:
    longest = max(span.num_keys for span in spans)
    index_B, rows_B, first_B, end_B = torch.tensor(
        [(s.index, s.first_row, s.first_key, s.end) for s in spans], dtype=torch.int64
    ).unbind(1)
    position_BL = first_B[:, None] + torch.arange(longest)
    padding_BL = position_BL >= end_B[:, None]
    position_BL = torch.minimum(position_BL, end_B[:, None] - 1)
    block_BL = tables_BM[index_B[:, None], position_BL // block_size].long()
    mask_B11L = None
    if any(span.num_keys < longest for span in spans):
        mask_BL = torch.zeros(padding_BL.shape, dtype=dtype).masked_fill_(padding_BL, -torch.inf)
        mask_B11L = mask_BL[:, None, None, :]
    return DecodeGroup(rows_B, block_BL * block_size + position_BL % block_size, mask_B11L)


def _plan_chunks(
    spans: list[_Span],
    window: int | None,
    tables_BM: torch.Tensor,
    block_size: int,
    dtype: torch.dtype,
    gather_all: bool,
) -> list[Chunk]:
    """Cut each sequence's new tokens into tiles, which all share one mask.

    gather_all: new tokens are read back too, since the cache has rounded them and a later chunk will see that.
    """
    cuts = [_cut(span, window) for span in spans]
    masked = [cut for cuts_of_span in cuts for cut in cuts_of_span if not cut.plainly_causal(window)]
    mask_QL = _band_mask(
        num_queries=max((cut.num_queries for cut in masked), default=0),
        num_keys=max((cut.num_keys for cut in masked), default=0),
        window=window,
        dtype=dtype,
    )
    return [
        Chunk(
            rows=slice(span.first_row, span.first_row + span.num_new),
            slots_L=_slots(span, tables_BM, block_size) if gather_all or span.num_new < span.end else None,
            tiles=tuple(
                Tile(
                    queries=slice(cut.first - span.start, cut.end - span.start),
                    keys=slice(cut.first_key - span.first_key, cut.end - span.first_key),
                    mask_QL=None if cut.plainly_causal(window) else cut.corner(mask_QL),
                )
                for cut in cuts_of_span
            ),
        )
        for span, cuts_of_span in zip(spans, cuts, strict=True)
    ]


def _slots(span: _Span, tables_BM: torch.Tensor, block_size: int) -> torch.Tensor:
    position_L = torch.arange(span.first_key, span.end)
    block_L = tables_BM[span.index, position_L // block_size].long()
    return block_L * block_size + position_L % block_size


@dataclass(frozen=True)
class _Cut:
    """Queries first..end-1 over keys first_key..end-1, as positions in the sequence."""

    first: int
    end: int
    first_key: int

    @property
    def num_queries(self) -> int:
        return self.end - self.first

    @property
    def num_keys(self) -> int:
        return self.end - self.first_key

    def plainly_causal(self, window: int | None) -> bool:
        """Whether no mask is needed but the square causal one."""
        return self.first == self.first_key and (window is None or self.num_queries <= window)

    def corner(self, mask_QL: torch.Tensor) -> torch.Tensor:
        """This cut's part of a mask for at least as many queries and keys."""
        return mask_QL[mask_QL.shape[0] - self.num_queries :, mask_QL.shape[1] - self.num_keys :]


def _cut(span: _Span, window: int | None) -> list[_Cut]:
    whole = _Cut(span.start, span.end, first_key=span.first_key)
    if whole.plainly_causal(window):
        return [whole]
    return [
        _Cut(
            first=first,
            end=min(first + QUERY_TILE, span.end),
            first_key=0 if window is None else max(0, first + 1 - window),
        )
        for first in range(span.start, span.end, QUERY_TILE)
    ]


def _band_mask(num_queries: int, num_keys: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """0 where a query sees a key, else -inf; the last query is the last key.

    What is seen depends on the distance only, so a tile of fewer queries and keys uses the lower right corner.
    """
    distance_QL = torch.arange(num_queries)[:, None] - torch.arange(num_keys) + (num_keys - num_queries)
    hidden_QL = distance_QL < 0
    if window is not None:
        hidden_QL |= distance_QL >= window
    return torch.zeros(num_queries, num_keys, dtype=dtype).masked_fill_(hidden_QL, -torch.inf)
