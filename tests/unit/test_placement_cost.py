"""The cost model against numbers worked out by hand. Legend: L layers, N ranks, p slots per rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_runtime.errors import ConfigError
from moe_runtime.placement.cost import Cluster, Cost, Hardware, ModelCost, sent_rows, slot_rows
from moe_runtime.placement.evaluate import moved_bytes, whole_counts
from moe_runtime.placement.split import Replicas, split_rows

# 6 D F = 6000 operations a row; 1 us a tile of 4 rows; an expert's weights take 3 us; a row of 100 bytes 1 us inside, 10 us outside.
HARDWARE = Hardware("toy", 24e9, 1e9, 1e8, 1e7, 5.0, 4)
MODEL = ModelCost(hidden=100, intermediate=10, expert_bytes=3000, row_bytes=100, return_bytes=200, top_k=2)


def test_computing_is_the_larger_of_products_and_memory() -> None:
    cost = Cost(MODEL, HARDWARE, Cluster.single(2))
    # 5 rows pad to 8: 2 us of products; memory 3 us + 5 * 0.3 us. 400 rows: 100 us; 3 + 120 us. Two experts with a row: 6 + 0.6 us.
    us = cost.compute_us(np.array([[[5, 0], [0, 0]], [[400, 0], [1, 1]]]))
    assert us == pytest.approx(np.array([[4.5, 0.0], [123.0, 6.6]]))
    # Without overlap the sum: 2 + 3 + 1.5; 100 + 123; 2 + 6.6.
    in_turn = Cost(MODEL, replace(HARDWARE, overlap=False), Cluster.single(2))
    us = in_turn.compute_us(np.array([[[5, 0], [0, 0]], [[400, 0], [1, 1]]]))
    assert us == pytest.approx(np.array([[6.5, 0.0], [223.0, 8.6]]))
    flops_bound = Cost(ModelCost(100, 10, 3, 1, 1, 2), HARDWARE, Cluster.single(2))
    assert flops_bound.compute_us(np.array([[5, 0], [8, 8]])) == pytest.approx([2.0, 4.0])


def test_travel_ends_with_the_fullest_receiver_or_sender() -> None:
    cost = Cost(MODEL, HARDWARE, Cluster(2, 2))
    sent = np.zeros((4, 4))
    sent[0, 0] = 1000  # to itself: free
    sent[0, 1] = 7
    assert cost.travel_us(sent, 100) == pytest.approx(5 + 7)
    sent[2, 1] = sent[3, 1] = 2  # incast from the other node: 4 rows at 10 us
    assert cost.travel_us(sent, 100) == pytest.approx(5 + 40)
    # On the way back rank 1 sends what it received, in rows of 200 bytes.
    step = cost.step(np.zeros((1, 4, 1)), sent[None])
    assert step.combine_us_L[0] == pytest.approx(5 + 80)
    assert step.total_us == pytest.approx(45 + 85)
    assert Cost(MODEL, HARDWARE, Cluster.single(1)).travel_us(np.full((1, 1), 9.0), 100) == 0.0


def test_an_exchange_of_counts_is_charged() -> None:
    cost = Cost(MODEL, HARDWARE, Cluster(2, 2))
    rows, sent = np.zeros((3, 4, 1)), np.zeros((3, 4, 4))
    without, with_counts = cost.step_time_us(rows, sent), cost.step_time_us(rows, sent, counts_of=64)
    # Per layer 5 us latency and 2 x 256 bytes to the other node at 0.1 us a byte.
    assert with_counts - without == pytest.approx(3 * (5 + 51.2))


def test_expected_rows_are_those_of_independent_choices(seed: int) -> None:
    rng = np.random.default_rng(seed)
    # One expert per token: no two choices can meet, so the estimate is exact.
    replicas = Replicas.of(np.array([[0, 1], [2, 3]]), 4)
    counts = rng.integers(1, 9, (2, 4))
    tokens = counts.sum(axis=1)
    rows = split_rows("static", counts, replicas)
    assert (slot_rows(rows, replicas.slot_EC, 2, 2) == counts.sum(axis=0).reshape(2, 2)).all()
    sent = sent_rows(np.minimum(rows, tokens[:, None, None]), replicas.slot_EC, 2, tokens)
    share = counts / tokens[:, None]
    wanted = 1 - (1 - share[:, [0, 2]]) * (1 - share[:, [1, 3]])
    assert sent == pytest.approx(wanted * tokens[:, None])
    # An expert that all tokens choose sends all of them, and an idle rank sends none.
    counts = np.array([[6, 6, 0, 0], [0, 0, 0, 0]])
    sent = sent_rows(split_rows("static", counts, replicas), replicas.slot_EC, 2, np.array([6, 0]))
    assert sent.tolist() == [[6.0, 0.0], [0.0, 0.0]]


def test_moves_come_from_the_same_node_if_they_can() -> None:
    before = np.zeros((1, 4, 2), dtype=bool)
    before[0, 0, 0] = before[0, 2, 0] = before[0, 3, 1] = True
    after = before.copy()
    after[0, 1, 0] = after[0, 0, 1] = True
    moved = moved_bytes(before, after, Cost(MODEL, HARDWARE, Cluster(2, 2)))
    assert moved[0, 1] == moved[3, 0] == 3000
    assert moved.sum() == 6000


def test_whole_counts_keep_the_total(seed: int) -> None:
    load = np.random.default_rng(seed).lognormal(0, 1, 13)
    count = whole_counts(load, 100)
    assert count.sum() == 100
    assert (np.abs(count - load / load.sum() * 100) < 1).all()
    assert whole_counts(np.zeros(3), 4).sum() == 4


def test_hardware_by_the_device() -> None:
    for name, want in (
        (None, "cpu"), ("NVIDIA H200", "h200"), ("NVIDIA B200", "b200"), ("NVIDIA GB200", "b200"), ("AMD Instinct MI300X", "h200"),
    ):  # fmt: skip
        assert Hardware.for_device("auto", name) is Hardware.named(want)
    assert Hardware.for_device("b200", None) is Hardware.named("b200")
    with pytest.raises(ConfigError, match="h200, b200, cpu"):
        Hardware.for_device("h100x", None)


def test_clusters_and_hardware_are_read(tmp_path: Path) -> None:
    assert Cluster.parse("nodes=4x8") == Cluster(4, 8)
    for bad in ("4x8", "nodes=4", "nodes=ax8", "nodes=-1x8"):
        with pytest.raises(ConfigError, match="nodes=4x8"):
            Cluster.parse(bad)
    with pytest.raises(ConfigError, match="at least 1"):
        Cluster.parse("nodes=0x8")
    assert Hardware.named("h200").memory_bytes_s > Hardware.named("cpu").memory_bytes_s
    with pytest.raises(ConfigError, match="h200, b200, cpu"):
        Hardware.named("h100x")
    file = tmp_path / "mine.yaml"
    text = "matmul_flops: 1e14\nmemory_bytes_s: 2.0e12\nlink_bytes_s: 1e11\ninternode_bytes_s: 1e10\nlatency_us: 8\ntile_rows: 16\n"
    file.write_text(text)
    assert Hardware.named(str(file)) == Hardware("mine", 1e14, 2e12, 1e11, 1e10, 8.0, 16)
    file.write_text(text + "overlap: false\n")
    assert not Hardware.named(str(file)).overlap
    for broken, message in (
        (text + "overlap: 1\n", "overlap=1 must be true or false"),
        (text.replace("8", "0"), "latency_us=0 must be a number above 0"),
        (text.replace("latency_us", "latency"), "exactly the fields"),
        ("[1", "cannot be read"),
    ):
        file.write_text(broken)
        with pytest.raises(ConfigError, match=message):
            Hardware.named(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        Hardware.named(str(tmp_path / "none.yaml"))
