"""Modelled time of live load: kinds of steps apart, and routing of all layers at once beside the plain way, layer by layer.

Legend: W windows, N source ranks, L layers, E experts, P phases or kinds, p slots per rank.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from moe_runtime.placement.balancer import ENOUGH_LAYERS, MAX_DRAWN, StepModel
from moe_runtime.placement.cost import Cluster, Cost, Hardware, ModelCost, sent_rows, slot_rows
from moe_runtime.placement.evaluate import predicted_us, whole_counts
from moe_runtime.placement.live_loads import LiveTraffic
from moe_runtime.placement.router import Router
from moe_runtime.placement.run_time_split import ALL_SPLITS, method_of
from moe_runtime.placement.split import SPLITS, Replicas, split_rows
from moe_runtime.placement.stored import Array
from tests.helpers.live_traffic import ROWS, rows_model
from tests.helpers.placements import random_placement

HARDWARE = Hardware("test", 3e6, 1e6, 1e6, 1e5, 7.0, 4)


def cost(draw: random.Random, num_ranks: int, top_k: int) -> Cost:
    model = ModelCost(10, 5, draw.choice([0, 100, 10_000]), 20, 40, top_k)
    nodes = draw.choice([n for n in range(1, num_ranks + 1) if num_ranks % n == 0])
    return Cost(model, HARDWARE, Cluster(nodes, num_ranks // nodes))


def plainly(replicas_L: list[Replicas], split: str, counts_NLE: Array, tokens_N: Array, cost: Cost) -> float:
    """Split, rows and time of one layer after the other."""
    total_us = 0.0
    for layer, replicas in enumerate(replicas_L):
        counts_NE = counts_NLE[:, layer]
        rows_NEC = split_rows(
            method_of(split, counts_NE, int(tokens_N.max())), counts_NE, replicas,
            ranks_per_node=cost.cluster.ranks_per_node, seed=layer,
        )  # fmt: skip
        rows_Np = slot_rows(rows_NEC, replicas.slot_EC, replicas.num_ranks, replicas.slots_per_rank)
        sent_NN = sent_rows(rows_NEC, replicas.slot_EC, replicas.slots_per_rank, tokens_N)
        total_us += cost.step_time_us(rows_Np[None], sent_NN[None])
    return total_us


@pytest.mark.parametrize("split", ALL_SPLITS)
def test_all_layers_at_once_are_what_each_is(split: str, seed: int) -> None:
    """Odd sizes, empty slots, layers with copies and without, ranks without tokens, one expert that has all."""
    draw = random.Random(seed)
    rng = np.random.default_rng(seed)
    for _ in range(12):
        num_ranks, num_experts, num_layers = draw.randint(1, 6), draw.randint(1, 17), draw.randint(1, 4)
        width = -(-num_experts // num_ranks) + draw.randint(0, 2)
        placement = random_placement(
            draw, num_layers, num_experts, num_ranks, width, draw.choice([0.3, 0.9, 1.0])
        )
        top_k = draw.randint(1, 3)
        model = cost(draw, num_ranks, top_k)
        tokens_N = rng.integers(0, draw.choice([1, 9, 200]), num_ranks)
        share_LE = rng.dirichlet(np.full(num_experts, draw.choice([0.05, 1.0, 50.0])), num_layers)
        if draw.random() < 0.2:
            share_LE = np.eye(num_experts)[rng.integers(0, num_experts, num_layers)]
        counts_NLE = rng.multinomial(tokens_N[:, None] * top_k, share_LE)
        router = Router.of(placement, split, model.cluster.ranks_per_node)
        got = router.step_us(counts_NLE, tokens_N, None, 0, model)
        want = plainly(router.replicas_L, split, counts_NLE, tokens_N, model)
        assert got == pytest.approx(want + router.asking_us(tokens_N, model), rel=1e-9)


@pytest.mark.parametrize("split", SPLITS)
def test_it_is_what_the_planner_predicts(split: str, seed: int) -> None:
    """Every rank with equally many tokens, which choose alike: `predicted_us`, which the planner prices plans with."""
    draw = random.Random(seed)
    num_ranks, num_experts, num_layers, tokens = (
        draw.randint(2, 5),
        draw.randint(5, 12),
        3,
        draw.randint(1, 50),
    )
    placement = random_placement(draw, num_layers, num_experts, num_ranks, num_experts // 2 + 2, 0.5)
    model = cost(draw, num_ranks, 2)
    load_LE = np.random.default_rng(seed).lognormal(0, 1, (num_layers, num_experts))
    counts_LE = np.stack([whole_counts(load_E, tokens * 2) for load_E in load_LE])
    router = Router.of(placement, split, model.cluster.ranks_per_node)
    got = router.route(np.stack([counts_LE] * num_ranks), np.full(num_ranks, tokens), 0)
    want = predicted_us(np.array(placement.slots), load_LE[None], model, tokens_per_rank=tokens, split=split)
    assert [model.step_time_us(*got)] == pytest.approx(want, rel=1e-9)


def test_steps_with_prompts_are_taken_apart(seed: int) -> None:
    """Nothing is lost; decoding tokens are in both kinds, as many in each step."""
    rng = np.random.default_rng(seed)
    counts_WNLPE = rng.integers(0, 1000, (5, 3, 2, 2, 7))
    steps_WP = np.array([[10, 30], [0, 40], [40, 0], [1, 39], [4, 36]])
    counts_WNLPE[1, :, :, 0] = 0  # no step with a prompt
    counts_WNLPE[4] = 0  # nothing at all
    kinds = LiveTraffic(counts_WNLPE, steps_WP).by_kind(4)
    assert kinds.steps_W.tolist() == [10, 40, 1, 30, 40, 39]
    window_X = [0, 2, 3, 0, 1, 3]
    for x, (window, steps) in enumerate(zip(window_X, kinds.steps_W.tolist(), strict=True)):
        prompts_NLE, decode_NLE = counts_WNLPE[window, :, :, 0], counts_WNLPE[window, :, :, 1]
        want_NLE = decode_NLE * steps / 40 + (prompts_NLE if x < 3 else 0)
        assert np.abs(kinds.counts_WNLE[x] - want_NLE).max() < 1
        assert np.array_equal(kinds.tokens_WN[x], -(-kinds.counts_WNLE[x, :, 0].sum(axis=1) // 4))
    assert kinds.counts_WNLE.sum() == counts_WNLPE.sum()


def test_a_step_s_time_is_the_mean_over_kinds() -> None:
    """By hand: 2 steps with prompts, 36 rows each in 2 layers, and 6 with 4 rows; a row takes a microsecond."""
    model = rows_model(2)
    placement = random_placement(random.Random(0), 2, 1, 2, 1, empty=1.0)
    counts_WNLPE = np.array([[[[[64], [32]]] * 2, [[[0], [0]]] * 2]])
    traffic = LiveTraffic(counts_WNLPE, np.array([[2, 6]]))
    # Which rows a drawn step gets is chance: 8 layer samples of binomials with a half and with a sixth.
    (us,) = model.step_us(traffic, [placement])
    assert us == pytest.approx(2 * (2 * 36 + 6 * 4) / 8, rel=0.25)
    # One step of either kind is not drawn.
    (us,) = model.step_us(LiveTraffic(counts_WNLPE, np.array([[1, 1]])), [placement])
    assert us == 2 * (64 + 32) / 2
    assert model.step_us(LiveTraffic(0 * counts_WNLPE, np.array([[1, 1]])), [placement] * 2) == [0.0, 0.0]


@pytest.mark.parametrize("split", ["auto", "static"])
def test_time_of_drawn_steps(split: str, seed: int) -> None:
    """As the plain way says of the same drawn steps; placements are judged by the same ones."""
    draw = random.Random(seed)
    rng = np.random.default_rng(seed)
    placement = random_placement(draw, 3, 7, 3, 4, 0.5)
    model = StepModel(cost(draw, 3, 2), split)
    traffic = LiveTraffic(rng.poisson(90, (2, 3, 3, 2, 7)), np.array([[2, 7], [9, 0]]))
    kinds = traffic.by_kind(2)
    router = Router.of(placement, split, model.cost.cluster.ranks_per_node)
    total = 0.0
    for w, steps in enumerate(kinds.steps_W.tolist()):
        drawn = [kinds.step(w, i, 0)[:2] for i in range(min(steps, MAX_DRAWN))]
        asked = sum(router.asking_us(tokens_N, model.cost) for _, tokens_N in drawn)
        us = sum(plainly(router.replicas_L, split, *step, model.cost) for step in drawn)
        total += (us + asked) / len(drawn) * steps
    assert model.step_us(traffic, [placement, placement]) == pytest.approx([total / 18] * 2)


def test_fewer_steps_are_drawn_of_many_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    plain = Router.step_us
    monkeypatch.setattr(Router, "step_us", lambda *args: counted.append(1) or plain(*args))
    for num_layers, want in ((1, MAX_DRAWN), (ENOUGH_LAYERS // 2, 2), (ENOUGH_LAYERS + 1, 1)):
        placement = random_placement(random.Random(0), num_layers, 2, 2, 1)
        counts_WNLPE = np.full((1, 2, num_layers, 2, 2), 50)
        counted.clear()
        rows_model(2, ROWS).step_us(LiveTraffic(counts_WNLPE, np.array([[0, 99]])), [placement])
        assert len(counted) == want
