"""Load records with known behaviour: stationary, drifting, one hot expert."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moe_runtime.core import ExpertPlacement
from moe_runtime.placement.layout import contiguous
from moe_runtime.placement.record import LoadRecord, RecordMeta, Routes, write_meta, write_rank
from moe_runtime.placement.stored import Array


def make_record(
    popularity_WLE: Array,
    seed: int,
    *,
    num_ranks: int = 3,
    top_k: int = 2,
    steps: int = 3,
    tokens: int = 200,
    num_routes: int = 0,
    placements: tuple[ExpertPlacement, ...] = (),
    placement_W: Array | None = None,
) -> LoadRecord:
    """Tokens choose experts by the window's popularity (each row adds up to 1). A window is 2 seconds; ranks differ in tokens."""
    draw = np.random.default_rng(seed)
    num_windows, num_layers, num_experts = popularity_WLE.shape
    placements = placements or (contiguous(num_layers, num_experts, num_ranks),)
    tokens_WPN = draw.integers(tokens // 2, tokens + 1, (num_windows, 2, num_ranks))
    counts_WPNLE = draw.multinomial(tokens_WPN[..., None] * top_k, popularity_WLE[:, None, None])
    # A token chooses an expert once.
    counts_WPNLE = np.minimum(counts_WPNLE, tokens_WPN[..., None, None])
    ids_tLK = np.zeros((num_routes, num_layers, top_k), dtype=np.int16)
    for t, layer in np.ndindex(num_routes, num_layers):
        ids_tLK[t, layer] = draw.choice(num_experts, top_k, replace=False, p=popularity_WLE[0, layer])
    meta = RecordMeta(
        model="<b>made</b> & up", checkpoint="c" * 64, architecture="MixtralForCausalLM", num_layers=num_layers,
        num_experts=num_experts, top_k=top_k, num_ranks=num_ranks, hidden_size=1024, intermediate_size=512,
        expert_bytes=3 * 1024 * 512 * 2, row_bytes=2048, return_bytes=4096, dtype="bfloat16", hardware="cpu, 3 ranks per host",
        started_at="2026-01-01T00:00:00Z", placements=[[[list(rank) for rank in layer] for layer in p.slots] for p in placements],
    )  # fmt: skip
    return LoadRecord(
        meta=meta,
        first_step_W=np.arange(num_windows) * steps,
        num_steps_W=np.full(num_windows, steps),
        end_time_W=1e9 + 2.0 * np.arange(num_windows),
        placement_W=np.zeros(num_windows, dtype=np.int32) if placement_W is None else placement_W,
        counts_WPNLE=counts_WPNLE,
        tokens_WPN=tokens_WPN,
        wait_us_WN=draw.integers(0, 500, (num_windows, num_ranks)),
        forward_us_WN=draw.integers(1000, 2000, (num_windows, num_ranks)),
        routes=Routes(
            step_t=draw.integers(0, num_windows * steps, num_routes),
            rank_t=np.sort(draw.integers(0, num_ranks, num_routes)).astype(np.int32),
            phase_t=draw.integers(0, 2, num_routes).astype(np.int8),
            request_t=np.zeros(num_routes, dtype=np.int32),
            topk_ids_tLK=ids_tLK,
        ),
    )


def write_record(record: LoadRecord, folder: Path) -> Path:
    """With the project's own writer."""
    folder.mkdir(parents=True, exist_ok=True)
    write_meta(folder, record.meta)
    for rank in range(record.meta.num_ranks):
        of_rank = record.routes.rank_t == rank
        write_rank(
            folder,
            rank,
            {
                "first_step_W": record.first_step_W,
                "num_steps_W": record.num_steps_W,
                "end_time_W": record.end_time_W,
                "placement_W": record.placement_W,
                "counts_WPLE": record.counts_WPNLE[:, :, rank],
                "tokens_WP": record.tokens_WPN[:, :, rank],
                "wait_us_W": record.wait_us_WN[:, rank],
                "forward_us_W": record.forward_us_WN[:, rank],
                "routes_step_t": record.routes.step_t[of_rank],
                "routes_phase_t": record.routes.phase_t[of_rank],
                "routes_request_t": record.routes.request_t[of_rank],
                "routes_topk_ids_tLK": record.routes.topk_ids_tLK[of_rank],
            },
        )
    return folder


def stationary(num_windows: int, num_layers: int, num_experts: int, skew: float, seed: int) -> Array:
    """(W, L, E): the same in all windows. skew: of a Dirichlet distribution, small is uneven."""
    one_LE = np.random.default_rng(seed).dirichlet(np.full(num_experts, skew), num_layers)
    return np.tile(one_LE, (num_windows, 1, 1))


def drifting(num_windows: int, num_layers: int, num_experts: int, per_window: float, seed: int) -> Array:
    """(W, L, E): a pattern that turns into another by so large a share in each window (autoregressive of order 1)."""
    draw = np.random.default_rng(seed)
    pattern_LE = draw.normal(size=(num_layers, num_experts))
    windows = []
    for _ in range(num_windows):
        windows.append(np.maximum(1 + 0.3 * pattern_LE, 0.01))
        new_LE = draw.normal(size=pattern_LE.shape)
        pattern_LE = (1 - per_window) * pattern_LE + np.sqrt(1 - (1 - per_window) ** 2) * new_LE
    popularity = np.stack(windows)
    return popularity / popularity.sum(axis=2, keepdims=True)
