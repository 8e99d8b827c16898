"""Whether to move experts now, and where to: decided from the live load, without side effects.

A plan is made from the older windows and judged on the newest ones, which it has not seen. It is carried out if it is
expected to save more than it costs until the next look. With

    T(P) = what the MoE layers of a step take under placement P by the cost model (`cost`), mean over steps drawn from the newest windows
    gain = 1 - T(new placement) / T(current placement)

a step of which the measured share s is spent in experts and in waiting for rows is expected to get shorter by the share s * gain,
and a move of B bytes at the fullest receiver takes B / max_bytes_per_step steps, each longer by the share `slowdown`. So the model only
compares two placements; how long steps are is measured.

Whether there is anything to plan is judged by rows: balancedness is the sum over layers of the mean rank's rows over that of the fullest's.

Legend: W windows, L MoE layers, E experts, N ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moe_runtime.core import ExpertPlacement
from moe_runtime.errors import ConfigError
from moe_runtime.placement import planner
from moe_runtime.placement.router import Router
from moe_runtime.placement.transition import check_reachable, num_copies

if TYPE_CHECKING:
    from moe_runtime.config import EplbConfig
    from moe_runtime.placement.cost import Cluster, Cost
    from moe_runtime.placement.live_loads import LiveTraffic

Array = npt.NDArray[Any]
MAX_DRAWN = 4
"""Steps of each kind drawn from a window."""
ENOUGH_LAYERS = 64
"""Fewer are drawn if they have so many layers between them: each layer is a sample."""
Plan = Callable[[Array, ExpertPlacement], ExpertPlacement]
"""(int64 (W, L, E) loads, the current placement) -> a placement that leaves an empty slot on every rank."""


@dataclass(frozen=True)
class Policy:
    """When moving is worth it; see config.EplbConfig for each."""

    min_utilization: float
    min_gain: float
    hysteresis: float
    max_bytes_per_step: int
    step_interval: int

    @staticmethod
    def of(settings: EplbConfig) -> Policy:
        return Policy(
            settings.min_utilization,
            settings.min_gain,
            settings.hysteresis,
            settings.max_bytes_per_step,
            settings.step_interval,
        )


@dataclass(frozen=True)
class Costs:
    """What is known of steps and of moving."""

    expert_bytes: int
    """Of one expert of one layer."""
    moe_share: float
    """Of a step's time that experts and waiting for rows take, 0 to 1."""
    slowdown: float
    """Share by which a step is longer while weights travel."""


@dataclass(frozen=True)
class StepModel:
    """What the MoE layers of a step are modelled with, as in a report."""

    cost: Cost
    split: str
    """How ranks choose among an expert's copies: one of run_time_split.ALL_SPLITS."""

    def step_us(self, traffic: LiveTraffic, placements: Sequence[ExpertPlacement]) -> list[float]:
        """Microseconds of the MoE layers of the mean step under each placement, all on the same drawn steps; 0 without tokens."""
        kinds = traffic.by_kind(self.cost.model.top_k)
        routers = [Router.of(p, self.split, self.cost.cluster.ranks_per_node) for p in placements]
        most = max(1, min(MAX_DRAWN, ENOUGH_LAYERS // len(placements[0].slots)))
        total_us = np.zeros(len(placements))
        for window, num_steps in enumerate(kinds.steps_W.tolist()):
            for i in range(drawn := min(num_steps, most)):
                step = kinds.step(window, i, 0)
                us = [router.step_us(*step, window, self.cost) for router in routers]
                total_us += np.array(us) * (num_steps / drawn)
        mean_us: list[float] = (total_us / max(int(traffic.steps_WP.sum()), 1)).tolist()
        return mean_us


@dataclass(frozen=True)
class Decision:
    """What to do, and why."""

    target: ExpertPlacement | None
    """None: nothing."""
    reason: str
    balancedness: float | None = None
    """Of the current placement, in the newest windows."""
    gain: float | None = None
    """Expected share of the MoE layers' time that is saved."""
    num_copies: int = 0


def make_plan(
    cluster: Cluster, num_slots: int, max_slots_per_rank: int, max_moved: float, algorithm: str = "ours"
) -> Plan:
    """The project's planner, from where experts are now. `num_slots`: replicas in each layer, over all ranks.

    `max_moved`: share of them that may move, but two in any case, so that two experts can change places. algorithm: `ours`, or
    `deepseek`, which may move all. Raises ConfigError if it cannot deal with so many slots.
    """
    if algorithm == "deepseek" and num_slots % cluster.num_ranks:
        raise ConfigError(
            f"eplb algorithm deepseek: {num_slots} slots of each layer cannot be shared evenly by {cluster.num_ranks} ranks;"
            " change num_redundant_experts, or use ours, which takes any number"
        )

    def plan(loads_WLE: Array, current: ExpertPlacement) -> ExpertPlacement:
        result = planner.plan(
            loads_WLE,
            cluster,
            num_slots=num_slots,
            current=current,
            max_moved=min(1.0, max(max_moved, 2 / (len(current.slots) * num_slots))),
            max_slots_per_rank=max_slots_per_rank,
            algorithm=algorithm,
        )
        return result.placement

    return plan


def rank_rows(loads_WLE: Array, placement: ExpertPlacement) -> Array:
    """float64 (W, L, N): rows that each rank computes if an expert's tokens spread evenly over its replicas."""
    num_windows, num_layers, num_experts = loads_WLE.shape
    rows_WLN = np.zeros((num_windows, num_layers, len(placement.slots[0])))
    for layer, ranks in enumerate(placement.slots):
        held_NE = np.zeros((len(ranks), num_experts))
        for rank, slots in enumerate(ranks):
            held_NE[rank, [expert for expert in slots if expert >= 0]] = 1
        rows_WLN[:, layer] = loads_WLE[:, layer] @ (held_NE / held_NE.sum(axis=0)).T
    return rows_WLN


def balancedness(rows_WLN: Array) -> float:
    """1: uniform; 1 / N: all on one rank. 1 also without any rows."""
    fullest = float(rows_WLN.max(axis=2).sum())
    return float(rows_WLN.mean(axis=2).sum()) / fullest if fullest else 1.0


def expected_gain(before_us: float, after_us: float) -> float:
    """Share of the MoE layers' time that is saved; negative if it gets longer."""
    return 1.0 - after_us / before_us if before_us else 0.0


def most_arrivals(current: ExpertPlacement, target: ExpertPlacement) -> int:
    """Experts that the rank with the most of them has to fetch."""
    num_ranks = len(current.slots[0])
    layers = list(zip(current.slots, target.slots, strict=True))
    return max(sum(len(set(new[r]) - set(old[r]) - {-1}) for old, new in layers) for r in range(num_ranks))


def judged_windows(num_windows: int) -> int:
    """How many of the newest windows plans are judged by: a quarter."""
    return max(1, num_windows // 4)


def decide(
    traffic: LiveTraffic,
    current: ExpertPlacement,
    plan: Plan,
    policy: Policy,
    costs: Costs,
    model: StepModel,
    *,
    force: bool = False,
) -> Decision:
    """`force`: move whatever the gain is, as long as there is a plan. Raises ConfigError if the plan cannot be reached."""
    loads_WLE = traffic.loads
    if len(loads_WLE) < 2 or not loads_WLE.sum():
        return Decision(None, f"not enough evidence: {len(loads_WLE)} windows of load, at least 2 are needed")
    judged = judged_windows(len(loads_WLE))
    past, newest = loads_WLE[:-judged], loads_WLE[-judged:]
    balance = balancedness(rank_rows(newest, current))
    if balance >= policy.min_utilization and not force:
        return Decision(
            None, f"balancedness {balance:.3f} is at least min_utilization={policy.min_utilization}", balance
        )
    target = plan(past, current)
    check_reachable(current, target)
    copies = num_copies(current, target)
    if not copies:
        return Decision(None, "the plan moves nothing", balance, 0.0)
    now_us, then_us = model.step_us(traffic.newest(judged), [current, target])
    gain = expected_gain(now_us, then_us)
    saved = gain * costs.moe_share * policy.step_interval
    steps = -(-most_arrivals(current, target) * costs.expert_bytes // policy.max_bytes_per_step)
    spent = steps * costs.slowdown
    told = (
        f"saves {gain:.1%} of the MoE layers' time in the newest windows (modelled: {now_us:.0f} us a step now, {then_us:.0f} then),"
        f" worth {saved:.1f} steps until the next look; moving {copies} experts takes {steps} steps, each {costs.slowdown:.0%} longer"
    )
    if force:
        return Decision(target, f"asked for: {told}", balance, gain, copies)
    if gain < policy.min_gain:
        return Decision(None, f"below min_gain={policy.min_gain:.0%}: {told}", balance, gain, copies)
    if saved < policy.hysteresis * spent:
        return Decision(None, f"below {policy.hysteresis:g} times its cost: {told}", balance, gain, copies)
    return Decision(target, told, balance, gain, copies)
