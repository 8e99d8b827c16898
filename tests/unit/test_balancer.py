"""Whether to move experts: the load as it is counted, what a move is expected to gain, and the reasons to leave it."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_runtime.core import ExpertPlacement
from moe_runtime.errors import ConfigError
from moe_runtime.placement.balancer import (
    Array,
    Costs,
    Policy,
    balancedness,
    decide,
    expected_gain,
    make_plan,
    most_arrivals,
    rank_rows,
)
from moe_runtime.placement.cost import Cluster
from moe_runtime.placement.layout import contiguous
from moe_runtime.placement.live_loads import NUM_WINDOWS, LiveLoads, join_windows
from moe_runtime.placement.recorder import LoadRecorder, PartTokens
from moe_runtime.placement.transition import check_reachable, with_empty_slots

POLICY = Policy(
    min_utilization=1.0, min_gain=0.05, hysteresis=2.0, max_bytes_per_step=1000, step_interval=100
)
COSTS = Costs(expert_bytes=1000, moe_share=0.5, slowdown=0.1)


def loads(*layers: list[int], windows: int = 8) -> Array:
    return np.array([layers] * windows, dtype=np.int64)


def test_rows_and_balancedness_by_hand() -> None:
    # Rank 0 has experts 0 and 1, rank 1 has 2 and 3 and a copy of 0.
    placement = ExpertPlacement((((0, 1, -1), (2, 3, 0)),), 4)
    rows = rank_rows(loads([10, 1, 2, 3], windows=1), placement)
    assert rows.tolist() == [[[5 + 1, 5 + 2 + 3]]]
    assert balancedness(rows) == pytest.approx(8 / 10)
    uniform = with_empty_slots(contiguous(3, 8, 4), 1)
    assert balancedness(rank_rows(loads(*[[7] * 8] * 3), uniform)) == 1
    one_hot = rank_rows(loads(*[[0, 0, 5, 0, 0, 0, 0, 0]] * 3), uniform)
    assert balancedness(one_hot) == pytest.approx(1 / 4)
    assert balancedness(rank_rows(loads([0] * 8, [0] * 8, [0] * 8), uniform)) == 1


def test_gain_by_hand() -> None:
    old = ExpertPlacement((((0, 1, -1), (2, 3, -1)),), 4)
    new = ExpertPlacement((((0, 3, -1), (2, 1, -1)),), 4)
    seen = loads([30, 30, 10, 10])
    assert expected_gain(seen, old, new) == pytest.approx(1 - 40 / 60)
    assert expected_gain(seen, new, old) == pytest.approx(1 - 60 / 40)
    assert most_arrivals(old, new) == 1


def skewed() -> tuple[Array, ExpertPlacement]:
    return loads([30, 30, 10, 10]), with_empty_slots(contiguous(1, 4, 2), 1)


def swap(_: Array, current: ExpertPlacement) -> ExpertPlacement:
    """A planner that knows the answer: experts 0 and 2 change places."""
    return replace(current, slots=(((2, 1, -1), (0, 3, -1)),))


def test_a_move_that_pays() -> None:
    seen, current = skewed()
    decision = decide(seen, current, swap, POLICY, COSTS)
    assert decision.target is not None
    assert decision.balancedness == pytest.approx(40 / 60)
    assert decision.gain == pytest.approx(1 / 3)
    assert decision.num_copies == 2
    # One expert of 1000 bytes arrives on each rank: 1 step, a tenth longer; 1/3 * 0.5 * 100 steps are saved.
    assert "worth 16.7 steps" in decision.reason
    assert "takes 1 steps, each 10% longer" in decision.reason


@pytest.mark.parametrize(
    ("policy", "costs", "part"),
    [
        ({"min_utilization": 0.6}, {}, "balancedness 0.667 is at least min_utilization=0.6"),
        ({"min_gain": 0.34}, {}, "below min_gain=34%"),
        ({"hysteresis": 170.0}, {}, "below 170 times its cost"),
        ({"step_interval": 1}, {}, "below 2 times its cost"),
        ({}, {"slowdown": 9.0}, "below 2 times its cost"),
        ({}, {"moe_share": 0.001}, "below 2 times its cost"),
        ({}, {"expert_bytes": 100_000}, "below 2 times its cost"),
    ],
)
def test_reasons_to_leave_it(policy: dict[str, float], costs: dict[str, float], part: str) -> None:
    seen, current = skewed()
    chosen = replace(POLICY, **policy), replace(COSTS, **costs)  # type: ignore[arg-type]
    decision = decide(seen, current, swap, *chosen)
    assert decision.target is None
    assert part in decision.reason
    assert decide(seen, current, swap, *chosen, force=True).target is not None


def test_a_plan_is_judged_on_windows_it_has_not_seen() -> None:
    _, current = skewed()
    past, newest = [30, 30, 10, 10], [0, 31, 29, 0]
    seen = np.array([[past]] * 6 + [[newest]] * 2)
    decision = decide(seen, current, swap, POLICY, COSTS)
    assert decision.target is None
    assert decision.gain == pytest.approx(1 - 60 / 31)


@pytest.mark.parametrize("seen", [loads([1, 2, 3, 4], windows=1), loads([0, 0, 0, 0])])
def test_too_little_evidence(seen: Array) -> None:
    _, current = skewed()
    decision = decide(seen, current, swap, POLICY, COSTS, force=True)
    assert decision.target is None
    assert "not enough evidence" in decision.reason


def test_the_planner_is_asked_for_what_can_be_reached(seed: int) -> None:
    """As many replicas as there are, never in the slots that stay empty; deterministic."""
    draw = random.Random(seed)
    for _ in range(30):
        num_ranks, num_layers = draw.randint(2, 5), draw.randint(1, 3)
        num_experts = draw.randint(num_ranks, 20)
        redundant = draw.randint(0, num_experts)
        current = with_empty_slots(contiguous(num_layers, num_experts, num_ranks, redundant), 1)
        width = len(current.slots[0][0])
        plan = make_plan(
            Cluster.single(num_ranks), num_experts + redundant, width - 1, draw.choice([0.0, 0.05, 0.3, 1.0])
        )
        seen = np.array(
            [[[int(draw.lognormvariate(4, 1)) for _ in range(num_experts)] for _ in range(num_layers)]] * 4
        )
        target = plan(seen, current)
        check_reachable(current, target)
        assert plan(seen, current) == target
        decision = decide(seen, current, plan, POLICY, COSTS, force=True)
        assert decision.target in (plan(seen[:-1], current), None)


def test_two_experts_may_change_places_whatever_the_share() -> None:
    seen, current = skewed()
    plan = make_plan(Cluster.single(2), 4, 2, max_moved=0.0)
    decision = decide(seen, current, plan, POLICY, COSTS)
    assert decision.target is not None
    assert decision.gain == pytest.approx(1 / 3)
    assert decision.num_copies == 2


def test_a_plan_that_cannot_be_reached_is_an_error() -> None:
    seen, current = skewed()
    full = ExpertPlacement((((0, 1, 2), (2, 3, 1)),), 4)
    with pytest.raises(ConfigError, match="at most 2 are allowed"):
        decide(seen, current, lambda loads, now: full, POLICY, COSTS)


@pytest.mark.parametrize("recording", [True, False])
def test_the_load_is_counted_by_windows(recording: bool, seed: int) -> None:
    """Through the recorder, of steps in one part and in two, whether it records or was told to stop."""
    layers, experts, window = 2, 5, 3
    live = LiveLoads(layers, experts, window * NUM_WINDOWS, torch.device("cpu"))
    recorder = LoadRecorder(layers, experts, 3, 1 << 20, torch.device("cpu"), [])
    recorder.live = live
    if not recording:
        recorder.stop()
    assert live.window_steps == window
    generator = torch.Generator().manual_seed(seed)
    expected: list[Array] = []
    for step in range(window * (NUM_WINDOWS + 3) + 2):
        if step % window == 0:
            expected.append(np.zeros((layers, experts), dtype=np.int64))
        # Also no tokens.
        sizes = torch.randint(0, 4, (1 + step % 2,), generator=generator).tolist()
        recorder.begin_step([PartTokens(n, torch.randint(0, 2, (n,), generator=generator)) for n in sizes])
        for layer in range(layers):
            for tokens in sizes:
                ids = torch.randint(0, experts, (tokens, 3), generator=generator)
                recorder.count(ids)
                for e in ids.flatten().tolist():
                    expected[-1][layer, e] += 1
        recorder.end_step(1, 1, False, sum(sizes))
        live.step_done()
    seen = live.snapshot()
    assert list(seen) == list(range(4, NUM_WINDOWS + 4)), "the last that are whole"
    for number, counts in seen.items():
        assert np.array_equal(counts, expected[number - 1])
    recorded = int(recorder.arrays()["counts_WPLE"].sum())
    assert recorded == (sum(int(counts.sum()) for counts in expected) if recording else 0)


def test_only_windows_that_all_ranks_have_count() -> None:
    def window(value: int) -> Array:
        return np.full((1, 2), value, dtype=np.int64)

    joined = join_windows(
        [{1: window(1), 2: window(2), 3: window(3)}, {2: window(20), 3: window(30), 4: window(40)}]
    )
    assert joined.tolist() == [[[22, 22]], [[33, 33]]]
    assert join_windows([{1: window(1)}, {}]).shape == (0, 1, 2)
    assert join_windows([{}, {}]).shape[0] == 0
