"""Whether to move experts: the load as it is counted, what a move is expected to gain, and the reasons to leave it."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_runtime.core import ExpertPlacement
from moe_runtime.errors import ConfigError
from moe_runtime.placement import planner
from moe_runtime.placement.balancer import (
    Array,
    Costs,
    Policy,
    balancedness,
    decide,
    make_plan,
    most_arrivals,
    rank_rows,
)
from moe_runtime.placement.cost import Cluster, Hardware
from moe_runtime.placement.layout import contiguous
from moe_runtime.placement.live_loads import NUM_WINDOWS, LiveLoads, LiveWindow, join_windows
from moe_runtime.placement.recorder import LoadRecorder, PartTokens
from moe_runtime.placement.transition import check_reachable, with_empty_slots
from tests.helpers.live_traffic import ROWS, decoded, rows_model

POLICY = Policy(
    min_utilization=1.0, min_gain=0.05, hysteresis=2.0, max_bytes_per_step=1000, step_interval=100
)
COSTS = Costs(expert_bytes=1000, moe_share=0.5, slowdown=0.1)
MODEL = rows_model(2)


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


def test_arrivals_by_hand() -> None:
    old = ExpertPlacement((((0, 1, -1), (2, 3, -1)),), 4)
    new = ExpertPlacement((((0, 3, -1), (2, 1, -1)),), 4)
    assert most_arrivals(old, new) == 1


def skewed() -> tuple[Array, ExpertPlacement]:
    return loads([30, 30, 10, 10]), with_empty_slots(contiguous(1, 4, 2), 1)


def swap(_: Array, current: ExpertPlacement) -> ExpertPlacement:
    """A planner that knows the answer: experts 0 and 2 change places."""
    return replace(current, slots=(((2, 1, -1), (0, 3, -1)),))


def test_a_move_that_pays() -> None:
    seen, current = skewed()
    decision = decide(decoded(seen), current, swap, POLICY, COSTS, MODEL)
    assert decision.target is not None
    assert decision.balancedness == pytest.approx(40 / 60)
    assert decision.gain == pytest.approx(1 / 3)
    assert decision.num_copies == 2
    # One expert of 1000 bytes arrives on each rank: 1 step, a tenth longer; 1/3 * 0.5 * 100 steps are saved.
    assert "worth 16.7 steps" in decision.reason
    assert "takes 1 steps, each 10% longer" in decision.reason


@pytest.mark.parametrize(
    ("hardware", "gain"),
    [
        # 30 + 30 rows against 40, a microsecond each.
        (ROWS, 1 / 3),
        # Products take no time; two experts' weights of 1000 bytes are read on either rank, before and after, and rows are 2 bytes.
        (replace(ROWS, matmul_flops=1e30, memory_bytes_s=1e6), 1 - 2080 / 2120),
        # Every expert's rows fill one tile of 64.
        (replace(ROWS, tile_rows=64), 0.0),
        # Tiles of 16: two for 30 rows and one for 10, so four on the fullest rank and then three.
        (replace(ROWS, tile_rows=16), 1 / 4),
        # All 80 tokens are rank 0's. 1/8 of them choose either expert on rank 1; then 3/8 and 1/8 do, and more have to travel.
        (replace(ROWS, matmul_flops=1e30, link_bytes_s=1e6), 1 - (1 - 5 / 8 * 7 / 8) / (1 - 7 / 8 * 7 / 8)),
    ],
    ids=["rows", "weights", "whole-tile", "tiles", "dispatch"],
)
def test_time_is_what_decides(hardware: Hardware, gain: float) -> None:
    """The same swap, which saves a third of the fullest rank's rows, under different hardware."""
    seen, current = skewed()
    decision = decide(decoded(seen), current, swap, POLICY, COSTS, rows_model(2, hardware))
    assert decision.balancedness == pytest.approx(40 / 60)
    assert decision.gain == pytest.approx(gain)
    assert (decision.target is not None) == (gain >= POLICY.min_gain)
    if decision.target is None:
        assert "below min_gain=5%" in decision.reason


def test_a_move_that_pays_though_rows_say_no() -> None:
    """Four experts with tokens on rank 0 and one on rank 1: one that goes over makes rank 1 fuller, but saves rank 0 a quarter of its reads."""
    seen = loads([3, 3, 3, 3, 11, 0, 0, 0])
    current = with_empty_slots(contiguous(1, 8, 2), 1)
    target = replace(current, slots=(((0, 1, 2, 5, -1), (4, 3, 6, 7, -1)),))
    assert rank_rows(seen, target).max() > rank_rows(seen, current).max()
    reading = replace(ROWS, matmul_flops=1e30, memory_bytes_s=1e6)
    for hardware, moves in ((ROWS, False), (reading, True)):
        decision = decide(
            decoded(seen), current, lambda loads, now: target, POLICY, COSTS, rows_model(2, hardware)
        )
        assert (decision.target is not None) == moves, decision.reason
    assert decision.gain == pytest.approx(1 - (3000 + 2 * 9) / (4000 + 2 * 12))


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
    decision = decide(decoded(seen), current, swap, *chosen, MODEL)
    assert decision.target is None
    assert part in decision.reason
    assert decide(decoded(seen), current, swap, *chosen, MODEL, force=True).target is not None


def test_a_plan_is_judged_on_windows_it_has_not_seen() -> None:
    _, current = skewed()
    past, newest = [30, 30, 10, 10], [0, 31, 29, 0]
    seen = np.array([[past]] * 6 + [[newest]] * 2)
    decision = decide(decoded(seen), current, swap, POLICY, COSTS, MODEL)
    assert decision.target is None
    assert decision.gain == pytest.approx(1 - 60 / 31)


@pytest.mark.parametrize("seen", [loads([1, 2, 3, 4], windows=1), loads([0, 0, 0, 0])])
def test_too_little_evidence(seen: Array) -> None:
    _, current = skewed()
    decision = decide(decoded(seen), current, swap, POLICY, COSTS, MODEL, force=True)
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
        traffic, model = decoded(seen, num_ranks), rows_model(num_ranks)
        decision = decide(traffic, current, plan, POLICY, COSTS, model, force=True)
        assert decision.target in (plan(seen[:-1], current), None)


def test_two_experts_may_change_places_whatever_the_share() -> None:
    seen, current = skewed()
    plan = make_plan(Cluster.single(2), 4, 2, max_moved=0.0)
    decision = decide(decoded(seen), current, plan, POLICY, COSTS, MODEL)
    assert decision.target is not None
    assert decision.gain == pytest.approx(1 / 3)
    assert decision.num_copies == 2


def test_a_plan_that_cannot_be_reached_is_an_error() -> None:
    seen, current = skewed()
    full = ExpertPlacement((((0, 1, 2), (2, 3, 1)),), 4)
    with pytest.raises(ConfigError, match="at most 2 are allowed"):
        decide(decoded(seen), current, lambda loads, now: full, POLICY, COSTS, MODEL)


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
    prefills: list[int] = []
    for step in range(window * (NUM_WINDOWS + 3) + 2):
        if step % window == 0:
            expected.append(np.zeros((layers, 2, experts), dtype=np.int64))
            prefills.append(0)
        # Also no tokens.
        sizes = torch.randint(0, 4, (1 + step % 2,), generator=generator).tolist()
        parts = [PartTokens(n, torch.randint(0, 2, (n,), generator=generator)) for n in sizes]
        recorder.begin_step(parts)
        for layer in range(layers):
            for part in parts:
                assert part.decode_T is not None
                ids = torch.randint(0, experts, (part.num_tokens, 3), generator=generator)
                recorder.count(ids)
                for phase, chosen in zip(part.decode_T.tolist(), ids.tolist(), strict=True):
                    for e in chosen:
                        expected[-1][layer, phase, e] += 1
        recorder.end_step(1, 1, False, sum(sizes))
        prefills[-1] += step % 3 == 1 or step % 7 == 0
        live.step_done(step % 3 == 1 or step % 7 == 0)
    seen = live.snapshot()
    assert list(seen) == list(range(4, NUM_WINDOWS + 4)), "the last that are whole"
    for number, got in seen.items():
        assert np.array_equal(got.counts_LPE, expected[number - 1])
        assert got.steps_P == (prefills[number - 1], window - prefills[number - 1])
    recorded = int(recorder.arrays()["counts_WPLE"].sum())
    assert recorded == (sum(int(counts.sum()) for counts in expected) if recording else 0)


def test_only_windows_that_all_ranks_have_count() -> None:
    def window(value: int) -> LiveWindow:
        return LiveWindow(np.full((1, 2, 2), value, dtype=np.int64), (value % 10, 1))

    joined = join_windows(
        [{1: window(1), 2: window(2), 3: window(3)}, {2: window(20), 3: window(30), 4: window(40)}]
    )
    assert joined.counts_WNLPE[:, :, 0, 0, 0].tolist() == [[2, 20], [3, 30]]
    assert joined.steps_WP.tolist() == [[2, 1], [3, 1]], "all ranks have the same"
    assert joined.loads.tolist() == [[[44, 44]], [[66, 66]]], "both phases"
    assert joined.newest(1).loads.tolist() == [[[66, 66]]]
    assert join_windows([{1: window(1)}, {}]).loads.shape == (0, 1, 2)
    assert join_windows([{}, {}]).loads.shape[0] == 0


def test_deepseek_s_algorithm_plans_whatever_it_moves(seed: int) -> None:
    """EPLB's packing, in the slots that the current placement leaves where it can."""
    draw = np.random.default_rng(seed)
    seen = draw.integers(1, 1000, (8, 3, 8))
    current = with_empty_slots(contiguous(3, 8, 2, 2), 1)
    got = make_plan(Cluster.single(2), 10, 5, 0.01, "deepseek")(seen, current)
    check_reachable(current, got)
    wanted = planner.plan(seen, Cluster.single(2), num_slots=10, algorithm="deepseek").placement
    for slots_N, wanted_N in zip(got.slots, wanted.slots, strict=True):
        assert {frozenset(r) - {-1} for r in slots_N} == {frozenset(r) - {-1} for r in wanted_N}
    with pytest.raises(ConfigError, match="11 slots of each layer cannot be shared evenly by 2 ranks"):
        make_plan(Cluster.single(2), 11, 6, 0.01, "deepseek")
