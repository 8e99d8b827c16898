"""What the gate of rebalancing expects a plan to save, beside what it saves in every single step, and how long it takes to say so.

    python -m benchmarks.bench_gate

The traffic is made: experts' shares are drawn from a Dirichlet distribution, and each step's tokens from them, half to one and a half
times as many as on average, on each rank. The gate sees what live windows keep of it: sums. `rows` is the share of the fullest ranks' rows
that the plan saves; `gate` what is expected of the MoE layers' modelled time; `one kind` the same if steps with prompts and without were
taken for alike; `every step` the modelled time of the very steps, which only this bench knows. No model runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from moe_runtime.core import ExpertPlacement
from moe_runtime.placement.balancer import StepModel, make_plan, rank_rows
from moe_runtime.placement.cost import Cluster, Cost, Hardware, ModelCost
from moe_runtime.placement.layout import contiguous
from moe_runtime.placement.live_loads import LiveTraffic
from moe_runtime.placement.router import Router
from moe_runtime.placement.stored import Array
from moe_runtime.placement.transition import with_empty_slots

TOP_K, STEPS, WINDOWS = 8, 40, 2
PAST = 1e4
"""Pairs per expert and window that plans are made from: they know the shares well."""
SMALL, LARGE = (
    ModelCost(2048, 768, 9 << 20, 4096, 4096, TOP_K),
    ModelCost(7168, 2048, 42 << 20, 7168, 14336, TOP_K),
)


def planned(
    cluster: Cluster, share_LE: Array, redundant: int, seed: int
) -> tuple[ExpertPlacement, ExpertPlacement]:
    """Contiguous, and re-planned from six windows; one slot of each rank stays empty."""
    current = with_empty_slots(contiguous(*share_LE.shape, cluster.num_ranks, redundant), 1)
    past_WLE = np.random.default_rng(seed).poisson(
        share_LE * PAST * share_LE.shape[1] / 8, (6, *share_LE.shape)
    )
    width = len(current.slots[0][0]) - 1
    return current, make_plan(cluster, share_LE.shape[1] + redundant, width, 0.05)(past_WLE, current)


def drawn_steps(
    share_LE: Array, num_ranks: int, decode: int, prompts: int, with_prompts: int, seed: int
) -> Iterator[tuple[Array, Array]]:
    """int64 pairs (N, L, P, E) and tokens (N,) of each step; the first `with_prompts` of a window have tokens of prompts."""
    draw = np.random.default_rng(seed)
    for step in range(STEPS):
        mean = (prompts if step < with_prompts else 0, decode)
        tokens_PN = np.stack([draw.integers(m // 2, m * 3 // 2 + 1, num_ranks) for m in mean])
        counts = [draw.multinomial(tokens_N[:, None] * TOP_K, share_LE) for tokens_N in tokens_PN]
        yield np.stack(counts, axis=2), tokens_PN.sum(axis=0)


def compare(hardware: str, split: str, redundant: int, decode: int, prompts: int, with_prompts: int) -> str:
    """One row of the table."""
    cluster = Cluster.single(8)
    share_LE = np.random.default_rng(1).dirichlet(np.full(128, 1.0), 12)
    placements = planned(cluster, share_LE, redundant, 2)
    windows = [list(drawn_steps(share_LE, 8, decode, prompts, with_prompts, 3 + w)) for w in range(WINDOWS)]
    counts_WNLPE = np.stack([sum(counts for counts, _ in steps) for steps in windows])
    traffic = LiveTraffic(counts_WNLPE, np.array([[with_prompts, STEPS - with_prompts]] * WINDOWS))
    alike = np.stack([np.zeros_like(counts_WNLPE[:, :, :, 0]), counts_WNLPE.sum(axis=3)], axis=3)
    model = StepModel(Cost(SMALL, Hardware.named(hardware), cluster), split)
    routers = [Router.of(p, split, cluster.ranks_per_node) for p in placements]
    times = {
        "rows": [float(rank_rows(traffic.loads, p).max(axis=2).sum()) for p in placements],
        "gate": model.step_us(traffic, placements),
        "one kind": model.step_us(LiveTraffic(alike, np.array([[0, STEPS]] * WINDOWS)), placements),
        "every step": [
            sum(
                router.step_us(counts_NLPE.sum(axis=2), tokens_N, None, i, model.cost)
                for steps in windows
                for i, (counts_NLPE, tokens_N) in enumerate(steps)
            )
            for router in routers
        ],
    }
    gains = " | ".join(f"{1 - after / before:.1%}" for before, after in times.values())
    what = f"{decode} + {prompts} in {with_prompts} of {STEPS} steps" if prompts else f"{decode}"
    return f"| {hardware}, {split}, {redundant} copies | {what} | {gains} |"


def gate_ms(num_ranks: int, redundant: int, split: str) -> float:
    """To judge two windows of 58 layers of 256 experts, with steps of both kinds; the best of three."""
    cluster = Cluster(max(1, num_ranks // 8), min(num_ranks, 8))
    draw = np.random.default_rng(1)
    share_LE = draw.dirichlet(np.full(256, 3.0), 58)
    placements = planned(cluster, share_LE, redundant, 2)
    pairs_P = np.array([10 * 2000, 125 * 32])[:, None] * TOP_K
    counts_WNLPE = draw.poisson(share_LE[:, None] * pairs_P, (WINDOWS, num_ranks, 58, 2, 256))
    model = StepModel(Cost(LARGE, Hardware.named("h200" if split == "static" else "cpu"), cluster), split)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        model.step_us(LiveTraffic(counts_WNLPE, np.array([[10, 115]] * WINDOWS)), placements)
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def main() -> None:
    print("| | tokens a rank and step | rows | gate | one kind | every step |\n|---|---|---|---|---|---|")
    for hardware, split in (("h200", "static"), ("cpu", "auto")):
        for redundant in (0, 16):
            for sizes in ((8, 0, 0), (64, 0, 0), (8, 1000, 4), (512, 0, 0), (0, 2000, STEPS)):
                print(compare(hardware, split, redundant, *sizes), flush=True)
    print("\n| ranks | copies | split | gate, ms |\n|---|---|---|---|")
    for num_ranks in (8, 32, 64):
        for redundant, split in ((0, "dynamic"), (64, "static"), (64, "dynamic")):
            print(
                f"| {num_ranks} | {redundant} | {split} | {gate_ms(num_ranks, redundant, split):.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
