"""Attention whose result for a token follows from it and the tokens it sees alone, bit for bit; CPUs only.

Keys are cut into splits of SPLIT tokens at multiples of SPLIT of the position in the sequence, whatever the blocks and
chunks are; queries into tiles. Every (tile, split) pair, an *item*, is a product of one shape in float32. A row's largest
score is exact in any order; its weighted values are summed split after split, and a split it does not see adds zeros.

Legend: T tokens, H query heads, G KV heads, r query heads per KV head, d head size, B sequences, n tiles, q queries of a
tile, i items, m their rows (q * r), S tokens of a split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moe_runtime.attention.base import heads_problem
from moe_runtime.layers.invariant import elementwise, one_thread
from moe_runtime.layers.rope import rotate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moe_runtime.attention.base import AttentionNeed, AttentionSpec
    from moe_runtime.attention.kv_cache import KVCache
    from moe_runtime.core import ForwardBatch
    from moe_runtime.layers.rope import Rotation

SPLIT = 64
TILE_ROWS = 16
"""Fewest rows of a product."""
PASS_ITEMS = 512
"""Items gathered at once, unless one tile has more."""


@dataclass(frozen=True)
class Pass:
    """Some tiles and all their items, in order of tile and split."""

    rows_nq: torch.Tensor
    """int64 rows of T; the last valid one stands in for what a tile lacks."""
    position_nq: torch.Tensor
    valid_nq: torch.Tensor
    tile_i: torch.Tensor
    """int64: tile of each item."""
    slots_iS: torch.Tensor
    """int64 cache slots; beyond the sequence its last token stands in, so nothing unwritten is read."""
    position_iS: torch.Tensor


@dataclass(frozen=True)
class DeterministicPlan:
    """Of one step, for all layers."""

    slot_mapping_T: torch.Tensor
    passes: dict[tuple[int | None, int], tuple[Pass, ...]]
    """By (sliding window, r)."""


class DeterministicAttention:
    """See the module."""

    name = "deterministic"

    def __init__(self, cache: KVCache, specs: Sequence[AttentionSpec]) -> None:
        self.cache = cache
        self.specs = tuple(specs)

    @staticmethod
    def supports(need: AttentionNeed) -> str | None:
        """None if it can serve this model, else why not."""
        if need.device_type != "cpu":
            return f"runs on cpu, not on {need.device_type}"
        if need.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{need.dtype} is not one of float32, bfloat16, float16"
        if need.cache_dtype != need.dtype:
            return f"a KV cache of {need.cache_dtype} is not supported; kv_cache_dtype must be auto"
        for spec in need.layers:
            if spec.logit_soft_cap is not None:
                return "logit soft caps are not supported"
        return heads_problem(need.layers)

    def plan(self, batch: ForwardBatch) -> DeterministicPlan:
        """Tiles and items of this step, for every kind of layer."""
        assert sum(batch.query_lens) == batch.num_tokens, f"{batch.query_lens} for {batch.num_tokens} tokens"
        kinds = {_kind(spec) for spec in self.specs}
        return DeterministicPlan(
            batch.slot_mapping_T, {kind: _plan_passes(batch, *kind, self.cache.block_size) for kind in kinds}
        )

    def run(
        self,
        q_THd: torch.Tensor,
        k_TGd: torch.Tensor,
        v_TGd: torch.Tensor,
        rotation: Rotation,
        layer: int,
        plan: DeterministicPlan,
    ) -> torch.Tensor:
        """Rotate, write k and v, attend; returns (T, H, d) in q's dtype."""
        spec = self.specs[layer]
        with one_thread():
            q_THd, k_TGd = rotate(q_THd, *rotation), rotate(k_TGd, *rotation)
            self.cache.write(layer, plan.slot_mapping_T, k_TGd, v_TGd)
            keys, values = self.cache.keys[layer].flatten(0, 1), self.cache.values[layer].flatten(0, 1)
            out_THd = torch.empty(q_THd.shape, dtype=q_THd.dtype)
            for work in plan.passes[_kind(spec)]:
                out_nqHd = _attend(q_THd, keys, values, work, spec)
                out_THd[work.rows_nq[work.valid_nq]] = out_nqHd[work.valid_nq].to(q_THd.dtype)
        return out_THd


def _kind(spec: AttentionSpec) -> tuple[int | None, int]:
    return spec.sliding_window, spec.num_heads // spec.num_kv_heads


def _plan_passes(
    batch: ForwardBatch, window: int | None, heads_per_kv: int, block_size: int
) -> tuple[Pass, ...]:
    """Whole tiles, as many to a pass as PASS_ITEMS allows."""
    width = -(-TILE_ROWS // heads_per_kv)
    passes: list[Pass] = []
    tiles: list[tuple[int, int, int, int, range]] = []
    first_row = num_items = 0
    for index, (new, total) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        for first in range(total - new, total, width):
            last = min(first + width, total) - 1
            seen_from = 0 if window is None else max(0, first + 1 - window)
            splits = range(seen_from // SPLIT, last // SPLIT + 1)
            if tiles and num_items + len(splits) > PASS_ITEMS:
                passes.append(_make_pass(batch, tiles, width, block_size))
                tiles, num_items = [], 0
            tiles.append((index, first_row + first - (total - new), first, last, splits))
            num_items += len(splits)
        first_row += new
    if tiles:
        passes.append(_make_pass(batch, tiles, width, block_size))
    return tuple(passes)


def _make_pass(
    batch: ForwardBatch, tiles: list[tuple[int, int, int, int, range]], width: int, block_size: int
) -> Pass:
    """Tiles as (sequence, first row, first and last position, splits)."""
    row_n, first_n, last_n = torch.tensor([tile[1:4] for tile in tiles]).unbind(1)
    wanted_nq = first_n[:, None] + torch.arange(width)
    position_nq = torch.minimum(wanted_nq, last_n[:, None])
    tile_i, sequence_i, split_i = torch.tensor(
        [(number, tile[0], split) for number, tile in enumerate(tiles) for split in tile[4]]
    ).unbind(1)
    position_iS = split_i[:, None] * SPLIT + torch.arange(SPLIT)
    end_i = torch.tensor(batch.seq_lens)[sequence_i]
    there_iS = torch.minimum(position_iS, end_i[:, None] - 1)
    block_iS = batch.block_tables_BM[sequence_i[:, None], there_iS // block_size].long()
    return Pass(
        rows_nq=row_n[:, None] + position_nq - first_n[:, None],
        position_nq=position_nq,
        valid_nq=wanted_nq <= last_n[:, None],
        tile_i=tile_i,
        slots_iS=block_iS * block_size + there_iS % block_size,
        position_iS=position_iS,
    )


def _attend(
    q_THd: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, work: Pass, spec: AttentionSpec
) -> torch.Tensor:
    """float32 (n, q, H, d). keys, values: (slots, G, d)."""
    (num_tiles, width), G, d = work.rows_nq.shape, spec.num_kv_heads, spec.head_dim
    rows = width * (spec.num_heads // G)
    q_nGmd = q_THd[work.rows_nq].float().mul_(spec.scale).view(num_tiles, width, G, -1, d)
    q_nGmd = q_nGmd.permute(0, 2, 1, 3, 4).reshape(num_tiles, G, rows, d)
    k_iGdS = _gather(keys, work.slots_iS).permute(0, 2, 3, 1)
    num_items = work.tile_i.shape[0]
    scores = torch.bmm(q_nGmd[work.tile_i].flatten(0, 1), k_iGdS.reshape(num_items * G, d, SPLIT))
    distance_iqS = work.position_nq[work.tile_i][:, :, None] - work.position_iS[:, None, :]
    hidden_iqS = distance_iqS < 0
    if spec.sliding_window is not None:
        hidden_iqS |= distance_iqS >= spec.sliding_window
    scores = scores.view(num_items, G, width, -1, SPLIT).masked_fill_(
        hidden_iqS[:, None, :, None, :], -torch.inf
    )
    scores = scores.view(num_items, G, rows, SPLIT)
    best_nGm = scores.new_full((num_tiles, G, rows), torch.finfo(torch.float32).min)
    best_iGm = scores.amax(-1)
    best_nGm.scatter_reduce_(0, work.tile_i[:, None, None].expand_as(best_iGm), best_iGm, "amax")
    weights = elementwise(torch.exp, scores - best_nGm[work.tile_i][..., None])
    v_iGSd = _gather(values, work.slots_iS).transpose(1, 2)
    weighted = torch.bmm(weights.flatten(0, 1), v_iGSd.reshape(num_items * G, SPLIT, d))
    # index_add_ adds item after item, so split after split.
    total_nGmd = torch.zeros_like(q_nGmd).index_add_(0, work.tile_i, weighted.view(num_items, G, rows, d))
    mass_nGm = torch.zeros_like(best_nGm).index_add_(0, work.tile_i, weights.sum(-1))
    out = (total_nGmd / mass_nGm[..., None]).view(num_tiles, G, width, -1, d)
    return out.permute(0, 2, 1, 3, 4).reshape(num_tiles, width, spec.num_heads, d)


def _gather(cached: torch.Tensor, slots_iS: torch.Tensor) -> torch.Tensor:
    """float32 (i, S, G, d)."""
    return cached.index_select(0, slots_iS.flatten()).view(*slots_iS.shape, *cached.shape[1:]).float()
