"""Recorded traffic: windows of what ranks sent to experts, and the routes of single tokens as far as they were kept.

Legend: W windows, P phases, N source ranks, L MoE layers, E experts, K experts per token, t tokens whose routes were kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_runtime.errors import ConfigError
from moe_runtime.placement.record import PHASES, LoadRecord
from moe_runtime.placement.stored import Array

MAX_ROUTE_WORK = 2e7
"""Tokens x layers x experts per token x ranks that are looked at in a window; of more tokens, some are taken, evenly spread."""
MIN_ROUTES = 32
"""A source's traffic in a window is taken from routes if so many of its tokens have them, or all of them; fewer say too little."""


@dataclass(frozen=True)
class StepRoutes:
    """Tokens that stand for those of a step."""

    source_t: Array
    """int64: source rank."""
    ids_tLK: Array
    """int64: experts, -1 for none."""
    weight_t: Array
    """float64: tokens of the step that it stands for."""


@dataclass(frozen=True)
class KeptRoutes:
    """A window's tokens whose experts are known one by one."""

    source_t: Array
    """int64."""
    ids_tLK: Array
    """int64, -1 for none."""

    def whole(self, tokens_N: Array) -> StepRoutes:
        """Every token weighs the same, so that each source has so many tokens in all."""
        kept_N = np.bincount(self.source_t, minlength=len(tokens_N))
        return StepRoutes(
            self.source_t, self.ids_tLK, (tokens_N / np.maximum(kept_N, 1))[self.source_t].astype(float)
        )

    def drawn(self, tokens_N: Array, num_steps: int, seed: Sequence[int]) -> StepRoutes:
        """One of the window's `num_steps` steps, with tokens drawn from each source's (with replacement)."""
        if num_steps == 1:
            return self.whole(tokens_N)
        draw = np.random.default_rng(seed)
        weight_t = np.zeros(len(self.source_t))
        for source, num_tokens in enumerate(tokens_N.tolist()):
            place = np.flatnonzero(self.source_t == source)
            if len(place):
                weight_t[place] = draw.multinomial(num_tokens, np.full(len(place), 1 / len(place)))
        return StepRoutes(self.source_t, self.ids_tLK, weight_t)


@dataclass(frozen=True)
class Traffic:
    """Windows of what ranks sent to experts."""

    counts_WNLE: Array
    """int64: (token, k) pairs."""
    tokens_WN: Array
    """int64."""
    steps_W: Array
    """int64, at least 1."""
    routes_W: tuple[KeptRoutes, ...] = ()
    """One for each window, or none at all."""

    @property
    def num_ranks(self) -> int:
        return int(self.tokens_WN.shape[1])

    def windows(self, chosen: slice) -> Traffic:
        """Some of its windows."""
        return Traffic(
            self.counts_WNLE[chosen], self.tokens_WN[chosen], self.steps_W[chosen], self.routes_W[chosen]
        )

    def pick(self, windows: Sequence[int]) -> Traffic:
        """These of its windows."""
        index = np.array(windows)
        routes_W = tuple(self.routes_W[w] for w in windows) if self.routes_W else ()
        return Traffic(self.counts_WNLE[index], self.tokens_WN[index], self.steps_W[index], routes_W)

    def step(self, window: int, i: int, seed: int) -> tuple[Array, Array, StepRoutes | None]:
        """The i-th step drawn from a window: counts (N, L, E), tokens (N,), and tokens with routes."""
        num_steps, key = int(self.steps_W[window]), (seed, window, i)
        counts_NLE, tokens_N = draw_step(self.counts_WNLE[window], self.tokens_WN[window], num_steps, key)
        routes = self.routes_W[window].drawn(tokens_N, num_steps, (*key, 1)) if self.routes_W else None
        return counts_NLE, tokens_N, routes

    @property
    def known_from(self) -> str:
        """What traffic between ranks is computed from: `routes` if every source has enough in every window in which it has tokens,
        `counts` if none has, else `routes and counts`."""
        some_WN = self.tokens_WN > 0
        known_WN = np.zeros(some_WN.shape, dtype=bool)
        for w, routes in enumerate(self.routes_W):
            known_WN[w] = np.bincount(routes.source_t, minlength=self.num_ranks) > 0
        if not (known_WN & some_WN).any():
            return "counts"
        return "routes" if known_WN[some_WN].all() else "routes and counts"


def traffic_of(record: LoadRecord, phase: str = "all") -> Traffic:
    """The windows with tokens of a phase (of PHASES, or all). Raises ConfigError if there are none."""
    if phase not in (*PHASES, "all"):
        raise ConfigError(f"phase {phase!r}: choose from {', '.join(PHASES)}, all")
    chosen = slice(None) if phase == "all" else slice(PHASES.index(phase), PHASES.index(phase) + 1)
    counts_WNLE, tokens_WN = (
        record.counts_WPNLE[:, chosen].sum(axis=1),
        record.tokens_WPN[:, chosen].sum(axis=1),
    )
    some = (tokens_WN.sum(axis=1) > 0) & (record.num_steps_W > 0)
    if not some.any():
        raise ConfigError(f"the record has no tokens{'' if phase == 'all' else ' of phase ' + phase}")
    routes_W = _routes(record, phase, np.flatnonzero(some).tolist(), tokens_WN)
    return Traffic(counts_WNLE[some], tokens_WN[some], record.num_steps_W[some], routes_W)


def _routes(record: LoadRecord, phase: str, windows: list[int], tokens_WN: Array) -> tuple[KeptRoutes, ...]:
    """Of these windows."""
    routes, window_t = record.routes, record.route_window_t
    if not len(window_t):
        return ()
    of_phase_t = (
        np.ones(len(window_t), dtype=bool) if phase == "all" else routes.phase_t == PHASES.index(phase)
    )
    work = record.meta.num_layers * record.meta.top_k * record.meta.num_ranks
    most = max(64, int(MAX_ROUTE_WORK / work))
    result = []
    for w in windows:
        place = np.flatnonzero((window_t == w) & of_phase_t)
        kept_N = np.bincount(routes.rank_t[place], minlength=tokens_WN.shape[1])
        place = place[(kept_N >= np.minimum(tokens_WN[w], MIN_ROUTES))[routes.rank_t[place]]]
        place = place[:: max(1, -(-len(place) // most))]
        result.append(
            KeptRoutes(routes.rank_t[place].astype(np.int64), routes.topk_ids_tLK[place].astype(np.int64))
        )
    return tuple(result)


def deal(traffic: Traffic, num_ranks: int) -> Traffic:
    """The same tokens on another number of ranks; on the same number, as they were.

    Each rank's tokens are cut into equal parts if there are a multiple of the ranks, put together if a fraction, and else
    all are dealt out evenly; odd ones go to a rank that depends on layer and expert. Tokens with known routes are dealt in turn.
    """
    before = traffic.num_ranks
    if num_ranks == before:
        return traffic
    groups = before if num_ranks % before == 0 else num_ranks if before % num_ranks == 0 else 1
    counts_WGLE = traffic.counts_WNLE.reshape(
        len(traffic.steps_W), groups, -1, *traffic.counts_WNLE.shape[2:]
    ).sum(axis=2)
    tokens_WG = traffic.tokens_WN.reshape(len(traffic.steps_W), groups, -1).sum(axis=2)
    parts = num_ranks // groups
    layer_L1, expert_E = np.arange(counts_WGLE.shape[2])[:, None], np.arange(counts_WGLE.shape[3])
    counts = [(counts_WGLE + (part + layer_L1 + expert_E) % parts) // parts for part in range(parts)]
    tokens = [(tokens_WG + part) // parts for part in range(parts)]
    return Traffic(
        np.stack(counts, axis=2).reshape(len(traffic.steps_W), num_ranks, *traffic.counts_WNLE.shape[2:]),
        np.stack(tokens, axis=2).reshape(len(traffic.steps_W), num_ranks),
        traffic.steps_W,
        tuple(
            KeptRoutes(
                r.source_t // (before // groups) * parts + np.arange(len(r.source_t)) % parts, r.ids_tLK
            )
            for r in traffic.routes_W
        ),
    )


def draw_step(counts_NLE: Array, tokens_N: Array, num_steps: int, seed: Sequence[int]) -> tuple[Array, Array]:
    """One of a window's `num_steps` steps, int64 as given: each pair and token falls into it with the same probability."""
    if num_steps == 1:
        return counts_NLE, tokens_N
    draw = np.random.default_rng(seed)
    return draw.binomial(counts_NLE, 1 / num_steps), draw.binomial(tokens_N, 1 / num_steps)
