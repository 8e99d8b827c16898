"""Routes to plan with and to judge by: recorded ones from a file, or made here. Used by bench_planner and the planner's tests.

Legend: t tokens in order of time, L layers, K experts per token, E experts, W windows, B batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
KINDS = ("zipf", "lognormal", "drifting", "clustered")
ORDERS = ("recorded", "halves_swapped", "prompts_in_turn")
TOKENS_PER_PROMPT = 96


@dataclass(frozen=True)
class Trace:
    """Experts chosen by tokens in order."""

    topk_ids_tLK: Array
    num_experts: int

    @property
    def num_layers(self) -> int:
        return int(self.topk_ids_tLK.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.topk_ids_tLK.shape[2])

    def loads(self, start: int, stop: int, num_windows: int = 8) -> Array:
        """int64 (W, L, E) of tokens start to stop."""
        edges = np.linspace(start, stop, num_windows + 1).astype(int)
        return np.stack([count(self.topk_ids_tLK[a:b], self.num_experts) for a, b in pairwise(edges)])

    def coactivation(self, start: int, stop: int) -> Array:
        """float32 (L, E, E): tokens that chose both experts."""
        together = np.zeros((self.num_layers, self.num_experts, self.num_experts), dtype=np.float32)
        for layer in range(self.num_layers):
            chosen = np.zeros((stop - start, self.num_experts), dtype=np.float32)
            np.put_along_axis(chosen, self.topk_ids_tLK[start:stop, layer].astype(np.int64), 1.0, axis=1)
            together[layer] = chosen.T @ chosen
        return together

    def batch(self, rng: np.random.Generator, start: int, stop: int, num_ranks: int, tokens: int) -> Array:
        """int64 (N, t): which tokens each rank computes: a stretch from a random place of start to stop, going round at the end."""
        first = rng.integers(0, stop - start, size=num_ranks)
        return start + (first[:, None] + np.arange(tokens)) % (stop - start)


def count(topk_ids_tLK: Array, num_experts: int) -> Array:
    """int64 (L, E): (token, k) pairs."""
    num_layers = topk_ids_tLK.shape[1]
    offset = np.arange(num_layers)[:, None] * num_experts
    flat = (topk_ids_tLK.astype(np.int64) + offset).ravel()
    return np.bincount(flat, minlength=num_layers * num_experts).reshape(num_layers, num_experts)


def read_trace(path: Path, order: str = "recorded") -> Trace:
    """An npz with `topk_ids` (tokens, layers, experts per token), for `prompts_in_turn` also `prompt_id` (tokens,).

    Other orders make other pasts and futures: the second half before the first; prompts with even numbers before those with odd.
    """
    with np.load(path, allow_pickle=False) as file:
        ids = file["topk_ids"]
        if order == "halves_swapped":
            ids = np.roll(ids, len(ids) // 2, axis=0)
        elif order == "prompts_in_turn":
            ids = ids[np.argsort(file["prompt_id"] % 2, kind="stable")]
    return Trace(ids, int(ids.max()) + 1)


def make_trace(
    kind: str, *, num_tokens: int, num_layers: int, num_experts: int, top_k: int, seed: int
) -> Trace:
    """Tokens draw their experts without replacement, by popularity times what their prompt's topic likes.

    Popularity follows a power law (`zipf`) or is log-normal; `drifting` changes it over time as a random walk; `clustered` has
    eight groups of experts, and every token prefers one of them.
    """
    rng = np.random.default_rng(seed)
    shape = (num_layers, num_experts)
    if kind == "zipf":
        popular_LE = rng.permuted(
            np.tile(-0.7 * np.log(np.arange(1, num_experts + 1)), (num_layers, 1)), axis=1
        )
    else:
        popular_LE = rng.normal(0.0, 0.5, shape)
    topics = rng.normal(0.0, 0.4, (12, *shape))
    group_LE = rng.permuted(np.tile(np.arange(num_experts) % 8, (num_layers, 1)), axis=1)
    ids_tLK = np.empty((num_tokens, num_layers, top_k), dtype=np.int16)
    for start in range(0, num_tokens, TOKENS_PER_PROMPT):
        stop = min(start + TOKENS_PER_PROMPT, num_tokens)
        if kind == "drifting":
            popular_LE = popular_LE + rng.normal(0.0, 0.06, shape)
        logits_LE = popular_LE + rng.dirichlet(np.full(12, 0.2)) @ topics.transpose(1, 0, 2)
        if kind == "clustered":
            group_t11 = rng.integers(8, size=(stop - start, 1, 1))
            logits_LE = logits_LE + 3.0 * (group_LE == group_t11)
        noisy_tLE = logits_LE + rng.gumbel(size=(stop - start, *shape))
        ids_tLK[start:stop] = np.argpartition(-noisy_tLE, top_k - 1, axis=2)[:, :, :top_k]
    return Trace(ids_tLK, num_experts)


def splits_of_time(trace: Trace, mode: str) -> list[tuple[int, int, int]]:
    """(start of the past, start, end of the judged window): one for `half`, six for `rolling` with two windows of past."""
    num = len(trace.topk_ids_tLK)
    if mode == "half":
        return [(0, num // 2, num)]
    edge = np.linspace(0, num, 9).astype(int)
    return [(int(edge[i - 2]), int(edge[i]), int(edge[i + 1])) for i in range(2, 8)]
