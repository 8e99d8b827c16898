"""Plan where experts go: loads in, placement out. Pure and deterministic, on the CPU.

Legend: W windows, L layers, N ranks, E experts, p slots per rank. `held` is bool (L, N, E): whether a rank has a replica of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_runtime.core import ExpertPlacement
from moe_runtime.errors import ConfigError
from moe_runtime.placement import deepseek, layout
from moe_runtime.placement.cost import Cluster, Cost
from moe_runtime.placement.evaluate import moved_bytes, predicted_us
from moe_runtime.placement.gathered import gathered
from moe_runtime.placement.packing import pack, pack_level, replica_counts
from moe_runtime.placement.problem import Problem, check_current, make_problem
from moe_runtime.placement.refine import level, relabel, with_mean
from moe_runtime.placement.replan import fill_by_room, replan
from moe_runtime.placement.slots import arrange, held_of, of_slots

Array = npt.NDArray[Any]
ALGORITHMS = ("ours", "deepseek", "contiguous")
SPLITS = ("waterfill", "even")
MAX_WINDOWS = 8
"""More windows are averaged in groups of neighbours: differences between windows matter, not each of them."""
LEVEL_ROUNDS = 12
RELABEL_ROUNDS = 12
EVEN_ROUNDS = 60


@dataclass(frozen=True)
class PlanResult:
    """A plan and what it takes."""

    placement: ExpertPlacement
    moved_slots: int
    """Replicas that a rank gets and did not have; all of them without a current placement."""
    notes: tuple[str, ...]
    """What a person should know, in sentences."""


@dataclass(frozen=True)
class Price:
    """When a plan pays: its gain per step, times the steps it will serve, against the time to move weights."""

    cost: Cost
    tokens_per_rank: int
    """Of a typical step."""
    horizon_steps: int
    """How many steps the plan is expected to serve."""


def plan(
    loads_WLE: Array,
    cluster: Cluster,
    price: Price | None = None,
    *,
    num_slots: int,
    algorithm: str = "ours",
    split: str = "waterfill",
    current: ExpertPlacement | None = None,
    max_moved: float = 0.05,
    coactivation_LEE: Array | None = None,
    max_slots_per_rank: int | Sequence[int] | None = None,
    failed_ranks: Sequence[int] = (),
    pinned: Sequence[tuple[int, int]] = (),
    cover_loss: bool = False,
    num_groups: int = 1,
) -> PlanResult:
    """Where to put `num_slots` replicas of each layer's experts (of all ranks together; any number from the number of experts).

    loads_WLE: (token, k) pairs per window, MoE layer and expert, oldest first, in any unit; one window may come as (L, E).
    price: with it, a current placement is only left for a plan whose modelled gain pays for the move.
    algorithm: `ours`; `deepseek` (EPLB: hierarchical if num_groups is a multiple of the nodes); `contiguous` (loads are ignored).
    split: how the runtime divides a batch among replicas: `waterfill` by its exact counts, or `even` whatever it is. On
    strongly skewed loads EPLB's even shares were up to 1.5 % more level than these (docs/placement.md).
    current: start from this placement and move at most the share `max_moved` of the slots (1: plan from scratch).
    coactivation_LEE: how often one token chooses both experts; then a token's experts come together on few ranks and nodes.
    max_slots_per_rank: memory limit, one for all ranks or one each. failed_ranks get nothing. pinned: (expert, rank) pairs that
    every layer must have. cover_loss: every expert survives the loss of any one rank.

    A rank never holds an expert twice. Raises ConfigError that says which argument cannot be met, and what could.
    """
    _check_choice("placement algorithm", algorithm, ALGORITHMS)
    _check_choice("split", split, SPLITS)
    if not 0 <= max_moved <= 1:
        raise ConfigError(f"max_moved={max_moved} must be a share of the slots, from 0 to 1")
    problem = make_problem(
        loads_WLE,
        cluster,
        num_slots=num_slots,
        max_slots_per_rank=max_slots_per_rank,
        failed_ranks=failed_ranks,
        pinned=pinned,
        cover_loss=cover_loss,
    )
    current_LNp = None if current is None else check_current(current, problem)
    together_LEE = None if coactivation_LEE is None else _check_coactivation(coactivation_LEE, problem)
    notes: list[str] = []
    if problem.num_slots < num_slots:
        notes.append(
            f"{num_slots - problem.num_slots} of {num_slots} slots stay empty: no rank may or can use them"
        )
    if algorithm == "deepseek":
        slots_LNp = _deepseek(problem, num_groups, notes)
    else:
        if algorithm == "contiguous":
            slots_LNp, _ = arrange(_contiguous(problem))
        elif current_LNp is not None and max_moved < 1:
            slots_LNp, _ = arrange(_replan(problem, current_LNp, max_moved, notes))
        else:
            slots_LNp = _fresh(problem, split, together_LEE)
    moved = int((slots_LNp >= 0).sum())
    if current_LNp is not None:
        slots_LNp, moved = arrange(held_of(slots_LNp, problem.num_experts), current_LNp)
    if price is not None:
        static = "waterfill" if split == "waterfill" else "static"
        keep = _gate(problem, slots_LNp, current_LNp, price, static, notes)
        if keep and current is not None:
            return PlanResult(current, 0, tuple(notes))
    placement = ExpertPlacement(
        slots=tuple(tuple(tuple(rank) for rank in layer) for layer in slots_LNp.tolist()),
        num_experts=problem.num_experts,
        version=0 if current is None else current.version + 1,
    )
    return PlanResult(placement, moved, tuple(notes))


def _check_choice(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"unknown {what} {value!r}; choose from {', '.join(allowed)}")


def _check_coactivation(coactivation_LEE: Array, problem: Problem) -> Array:
    together = np.asarray(coactivation_LEE, dtype=np.float64)
    wanted = (problem.num_layers, problem.num_experts, problem.num_experts)
    if together.shape != wanted:
        raise ConfigError(f"coactivation has shape {together.shape}; the loads want {wanted}")
    if (
        not np.isfinite(together).all()
        or (together < 0).any()
        or not np.allclose(together, together.swapaxes(1, 2))
    ):
        raise ConfigError("coactivation must be finite, not negative and symmetric")
    return together


def _fresh(problem: Problem, split: str, together_LEE: Array | None) -> Array:
    """A plan from scratch, as slots (L, N, p)."""
    windows_WLE = few_windows(problem.loads_WLE)
    if together_LEE is not None:
        return gathered(problem, windows_WLE, together_LEE)
    load_LE = problem.load_LE
    count_LE = replica_counts(problem, load_LE)
    try:
        packer = pack_level if split == "even" else pack
        held_LNE = packer(problem, load_LE, count_LE)
    except ConfigError:  # limits so uneven that these counts fit nowhere
        held_LNE = fill_by_room(problem)
        count_LE = held_LNE.sum(axis=1)
    movable_LE = np.tile(~problem.pinned_NE.any(axis=0), (problem.num_layers, 1))
    if split == "even":
        slots_LNp, _ = arrange(held_LNE)
        share_VLE: Array = (load_LE / count_LE)[None].astype(np.float32)
        level(slots_LNp, share_VLE, of_slots(movable_LE, slots_LNp, False), rounds=EVEN_ROUNDS)
        return slots_LNp
    share_VLE = with_mean(windows_WLE) / count_LE.astype(np.float32)
    # Experts with several replicas change places as a whole and only single ones move alone: the rings stay.
    relabel(held_LNE, share_VLE, count_LE, movable_LE & (count_LE > 1), rounds=RELABEL_ROUNDS)
    slots_LNp, _ = arrange(held_LNE)
    level(slots_LNp, share_VLE, of_slots(movable_LE & (count_LE == 1), slots_LNp, False), rounds=LEVEL_ROUNDS)
    return slots_LNp


def few_windows(loads_WLE: Array) -> Array:
    """At most MAX_WINDOWS windows: neighbours averaged."""
    num = len(loads_WLE)
    if num <= MAX_WINDOWS:
        return loads_WLE
    edges = np.linspace(0, num, MAX_WINDOWS + 1).astype(int)
    return np.stack([loads_WLE[a:b].mean(axis=0) for a, b in pairwise(edges)])


def _replan(problem: Problem, current_LNp: Array, max_moved: float, notes: list[str]) -> Array:
    max_moves = int(max_moved * problem.num_layers * problem.num_slots)
    before_LNE = held_of(current_LNp, problem.num_experts)
    held_LNE, forced = replan(problem, before_LNE, few_windows(problem.loads_WLE), max_moves)
    if forced:
        notes.append(
            f"{forced} replicas had to move or be added whatever their gain (failed ranks, limits, pins, free slots)"
        )
    return held_LNE


def _plain(problem: Problem, algorithm: str) -> None:
    same_room = problem.room_N.min() == problem.room_N.max()
    if not same_room or problem.pinned_NE.any() or problem.min_replicas > 1:
        raise ConfigError(
            f"algorithm {algorithm!r} knows no failed ranks, pinned experts, coverage, or ranks with different numbers of slots"
            f" ({problem.num_slots} slots on {problem.num_ranks} ranks: give a multiple of {problem.num_ranks}); choose 'ours',"
            " which takes any number"
        )


def _deepseek(problem: Problem, num_groups: int, notes: list[str]) -> Array:
    _plain(problem, "deepseek")
    arrays = deepseek.rebalance_experts(
        problem.load_LE, problem.num_slots, num_groups, problem.cluster.num_nodes, problem.num_ranks
    )
    slots_LNp = arrays.slot_to_expert_LS.reshape(problem.num_layers, problem.num_ranks, -1).copy()
    twins = 0
    for slot in range(1, slots_LNp.shape[2]):
        twin_LN = (slots_LNp[:, :, :slot] == slots_LNp[:, :, slot : slot + 1]).any(axis=2)
        slots_LNp[:, :, slot][twin_LN] = -1
        twins += int(twin_LN.sum())
    if twins:
        notes.append(f"EPLB put an expert twice on one rank {twins} times; the second slot stays empty")
    return slots_LNp


def _contiguous(problem: Problem) -> Array:
    if problem.num_slots < problem.num_ranks:
        raise ConfigError(
            f"algorithm 'contiguous' gives every rank a slot, but there are {problem.num_slots} slots for {problem.num_ranks} ranks; choose"
            " 'ours', or more redundant experts"
        )
    if (problem.room_N == 0).any() or problem.pinned_NE.any() or problem.min_replicas > 1:
        raise ConfigError(
            "algorithm 'contiguous' knows no failed ranks, pinned experts or coverage; choose 'ours'"
        )
    placement = layout.contiguous(
        problem.num_layers, problem.num_experts, problem.num_ranks, problem.num_slots - problem.num_experts
    )
    return held_of(np.asarray(placement.slots, dtype=np.int64), problem.num_experts)


def _gate(
    problem: Problem, slots_LNp: Array, current_LNp: Array | None, price: Price, split: str, notes: list[str]
) -> bool:
    """Note what the plan is expected to gain; whether the current placement is better kept."""
    windows_WLE = few_windows(problem.loads_WLE)
    us = predicted_us(slots_LNp, windows_WLE, price.cost, tokens_per_rank=price.tokens_per_rank, split=split)
    notes.append(f"MoE layers are expected to take {us.mean():.0f} us a step with the plan")
    if current_LNp is None:
        return False
    before_LNE, after_LNE = held_of(current_LNp, problem.num_experts), held_of(slots_LNp, problem.num_experts)
    alive = problem.room_N > 0
    served = before_LNE[:, alive].any(axis=1).all() and before_LNE.sum(axis=2).max() <= problem.room_N.max()
    if not served or before_LNE[:, ~alive].any() or (problem.pinned_NE & ~before_LNE).any():
        return False
    now_us = predicted_us(
        current_LNp, windows_WLE, price.cost, tokens_per_rank=price.tokens_per_rank, split=split
    )
    bytes_NN = moved_bytes(before_LNE, after_LNE, price.cost)
    move_us = price.cost.move_us(bytes_NN) if bytes_NN.any() else 0.0
    gain_us = float((now_us - us).mean())
    notes.append(
        f"the current placement {now_us.mean():.0f} us; moving {bytes_NN.sum() / 2**20:.1f} MiB takes {move_us / 1e3:.1f} ms"
    )
    if gain_us * price.horizon_steps > move_us:
        return False
    notes.append(
        f"the gain does not pay for the move within {price.horizon_steps} steps: the current placement stays"
    )
    return True
