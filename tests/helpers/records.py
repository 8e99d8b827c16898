"""Load records made of random numbers, written with the project's own writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from moe_runtime.placement.layout import contiguous
from moe_runtime.placement.record import RecordMeta, write_meta, write_rank


def write_random_record(
    folder: Path,
    seed: int,
    *,
    num_ranks: int = 2,
    num_layers: int = 3,
    num_experts: int = 8,
    num_windows: int = 4,
    top_k: int = 2,
    steps: int = 3,
    checkpoint: str = "",
    **changes: Any,
) -> RecordMeta:
    """A skewed load; the first windows are prompts, the last ones decode."""
    draw = np.random.default_rng(seed)
    meta = RecordMeta(
        model="random", checkpoint=checkpoint, architecture="MixtralForCausalLM", num_layers=num_layers,
        num_experts=num_experts, top_k=top_k, num_ranks=num_ranks, hidden_size=64, intermediate_size=32,
        expert_bytes=3 * 64 * 32 * 2, row_bytes=128, return_bytes=128, dtype="bfloat16", hardware="cpu, 2 ranks per host",
        started_at="2026-01-01T00:00:00Z", placements=[_lists(contiguous(num_layers, num_experts, num_ranks).slots)],
        **changes,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    popularity_LE = draw.dirichlet(np.full(num_experts, 0.3), num_layers)
    for rank in range(num_ranks):
        tokens_WP = np.zeros((num_windows, 2), dtype=np.int64)
        tokens_WP[: num_windows // 2, 0] = draw.integers(50, 200, num_windows // 2)
        tokens_WP[num_windows // 2 :, 1] = draw.integers(0, 20, num_windows - num_windows // 2)
        # multinomial takes (W, P, 1) and (L, E).
        counts_WPLE = draw.multinomial(tokens_WP[:, :, None] * top_k, popularity_LE)
        write_rank(
            folder,
            rank,
            {
                "first_step_W": np.arange(num_windows, dtype=np.int64) * steps,
                "num_steps_W": np.full(num_windows, steps, dtype=np.int64),
                "end_time_W": np.arange(num_windows, dtype=np.float64) + 1e9,
                "placement_W": np.zeros(num_windows, dtype=np.int32),
                "counts_WPLE": counts_WPLE,
                "tokens_WP": tokens_WP,
                "wait_us_W": draw.integers(0, 1000, num_windows),
                "forward_us_W": draw.integers(1000, 2000, num_windows),
                "routes_step_t": np.zeros(0, dtype=np.int64),
                "routes_phase_t": np.zeros(0, dtype=np.int8),
                "routes_request_t": np.zeros(0, dtype=np.int32),
                "routes_topk_ids_tLK": np.zeros((0, num_layers, top_k), dtype=np.int16),
            },
        )
    write_meta(folder, meta)
    return meta


def _lists(slots: tuple[tuple[tuple[int, ...], ...], ...]) -> list[list[list[int]]]:
    return [[list(rank) for rank in layer] for layer in slots]
