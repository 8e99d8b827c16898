"""What other settings would do with recorded traffic: the record's counts, replayed through planner, split and cost model.

A window of S steps is looked at in two ways. Its rows per slot are those of its exact counts, split as a whole: for the static
split, which is linear, and for windows of one step they are exactly what the ranks would compute. Its time is that of single
steps, `STEPS_PER_WINDOW` of them, whose tokens are drawn from the window's: so batch noise and experts without tokens count.
Traffic between ranks comes from the routes of single tokens where the record has some.

With another number of ranks than recorded, tokens are dealt to the ranks anew (`deal`). Times are those of the MoE layers alone.

Legend: W windows, P phases, N source ranks or ranks, L MoE layers, E experts, p slots per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_runtime.core import ExpertPlacement
from moe_runtime.placement.cost import Cluster, Cost, Hardware, ModelCost
from moe_runtime.placement.intervals import Estimate, ratio_estimate
from moe_runtime.placement.layout import check_redundant
from moe_runtime.placement.planner import plan
from moe_runtime.placement.record import LoadRecord
from moe_runtime.placement.router import Router
from moe_runtime.placement.stored import Array
from moe_runtime.placement.traffic import Traffic, deal, traffic_of

STEPS_PER_WINDOW = 4
"""Most steps drawn from a window; windows of fewer steps give as many as they have."""


@dataclass(frozen=True)
class Setting:
    """What to try."""

    cluster: Cluster
    redundant: int
    algorithm: str
    split: str

    @property
    def name(self) -> str:
        """For tables."""
        return f"ep {self.cluster.num_ranks}, {self.redundant} redundant, {self.algorithm}, {self.split}"


@dataclass(frozen=True)
class Replay:
    """What one placement does with some traffic."""

    rows_WLNp: Array
    """int64: expert rows that each slot computes in the window."""
    sent_bytes_W: Array
    """float64: to and from ranks of the same node, per step."""
    internode_bytes_W: Array
    """float64: to and from ranks of other nodes, per step."""
    step_us_W: Array
    """float64: mean time of the steps drawn from the window."""
    tokens_W: Array
    """float64: tokens per step, of all ranks."""
    steps_W: Array
    """int64: steps of the window."""
    bytes_from: str
    """`Traffic.known_from`: whether rows between ranks come from recorded routes, or are expected from counts (`cost.sent_rows`)."""

    @property
    def rank_rows(self) -> Array:
        """int64: expert rows of each rank, all layers together."""
        rows_WN: Array = self.rows_WLNp.sum(axis=(1, 3))
        return rows_WN

    @property
    def fullest_rows(self) -> float:
        """Expert rows per step of the rank that has most of them in the window, all layers together; mean over windows."""
        return float((self.rank_rows.max(axis=1) / self.steps_W).mean())

    @property
    def balancedness(self) -> float:
        """Sum over windows and layers of the mean rank's rows, over that of the fullest rank's."""
        rows_WLN = self.rows_WLNp.sum(axis=3)
        return float(rows_WLN.mean(axis=2).sum() / max(rows_WLN.max(axis=2).sum(), 1))


@dataclass(frozen=True)
class Outcome:
    """A setting, the placement planned for it, and what came of it on the windows it was judged by."""

    setting: Setting
    placement: ExpertPlacement
    replay: Replay
    step_us: Estimate
    tokens_per_s: Estimate
    """Of all ranks, if nothing but the MoE layers took time."""
    expert_bytes_per_rank: int

    @property
    def tokens_per_s_per_rank(self) -> float:
        return self.tokens_per_s.mean / self.setting.cluster.num_ranks


def replay(traffic: Traffic, placement: ExpertPlacement, cost: Cost, split: str, seed: int = 0) -> Replay:
    """Send the traffic to a placement on as many ranks. seed: for the steps drawn from windows."""
    router = Router.of(placement, split, cost.cluster.ranks_per_node)
    rows, bytes_inside, bytes_outside, step_us = [], [], [], []
    same_NN = cost.cluster.same_node_NN & ~np.eye(cost.cluster.num_ranks, dtype=bool)
    each_way = cost.model.row_bytes + cost.model.return_bytes
    for w, num_steps in enumerate(traffic.steps_W.tolist()):
        counts_NLE, tokens_N = traffic.counts_WNLE[w], traffic.tokens_WN[w]
        whole = traffic.routes_W[w].whole(tokens_N) if traffic.routes_W else None
        rows_LNp, sent_LNN = router.route(counts_NLE, tokens_N, w, whole, num_steps)
        rows.append(rows_LNp)
        bytes_inside.append(float((sent_LNN * same_NN).sum()) * each_way / num_steps)
        bytes_outside.append(float((sent_LNN * ~cost.cluster.same_node_NN).sum()) * each_way / num_steps)
        steps = range(min(num_steps, STEPS_PER_WINDOW))
        step_us.append(sum(router.step_us(*traffic.step(w, i, seed), w, cost) for i in steps) / len(steps))
    return Replay(
        rows_WLNp=np.stack(rows),
        sent_bytes_W=np.array(bytes_inside),
        internode_bytes_W=np.array(bytes_outside),
        step_us_W=np.array(step_us),
        tokens_W=traffic.tokens_WN.sum(axis=1) / traffic.steps_W,
        steps_W=traffic.steps_W,
        bytes_from=traffic.known_from,
    )


def simulate(
    record: LoadRecord,
    settings: Sequence[Setting],
    hardware: Hardware,
    phase: str = "all",
    held_out: bool = True,
) -> list[Outcome]:
    """Plan for each setting and judge it.

    held_out: plan from the first half of the windows and judge by the second; with one window, or if false, plan from and
    judge by all.
    """
    traffic = traffic_of(record, phase)
    half = len(traffic.steps_W) // 2 if held_out else 0
    past = traffic.windows(slice(0, half or None))
    future = traffic.windows(slice(half, None))
    outcomes = []
    for setting in settings:
        check_redundant(setting.redundant, record.meta.num_experts, setting.cluster.num_ranks)
        cost = Cost(ModelCost.of(record.meta), hardware, setting.cluster)
        planned = plan(
            past.counts_WNLE.sum(axis=1), setting.cluster,
            num_slots=record.meta.num_experts + setting.redundant, algorithm=setting.algorithm,
        )  # fmt: skip
        dealt = deal(future, setting.cluster.num_ranks)
        outcomes.append(
            judge(setting, planned.placement, replay(dealt, planned.placement, cost, setting.split), cost)
        )
    return outcomes


def judge(setting: Setting, placement: ExpertPlacement, replayed: Replay, cost: Cost) -> Outcome:
    """Means and intervals of a replay."""
    slots = len(placement.slots[0][0]) * len(placement.slots)
    return Outcome(
        setting=setting,
        placement=placement,
        replay=replayed,
        step_us=ratio_estimate(replayed.step_us_W, np.ones(len(replayed.step_us_W))),
        tokens_per_s=ratio_estimate(replayed.tokens_W * 1e6, replayed.step_us_W),
        expert_bytes_per_rank=slots * cost.model.expert_bytes,
    )


def pareto(outcomes: Sequence[Outcome]) -> list[bool]:
    """Whether no other outcome has both a shorter step and more tokens per second and rank."""
    points = [(o.step_us.mean, -o.tokens_per_s_per_rank) for o in outcomes]
    return [not any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points) for p in points]
