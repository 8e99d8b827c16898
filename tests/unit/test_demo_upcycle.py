"""The parts of the demo model's making, on small random data."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from moe_runtime.weights import demo_model, demo_source, demo_upcycle
from moe_runtime.weights.demo_upcycle import SAMPLING, UpcycleConfig
from moe_runtime.weights.writing import write_shards


def rotate(x: torch.Tensor, angles: torch.Tensor, neighbours: bool) -> torch.Tensor:
    """Rope on (heads, head_dim), on the pairs (2i, 2i + 1) or (i, i + head_dim / 2)."""
    a, b = (x[:, 0::2], x[:, 1::2]) if neighbours else x.chunk(2, dim=1)
    first, second = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
    return torch.stack([first, second], 2).flatten(1) if neighbours else torch.cat([first, second], 1)


def test_rope_rows_come_back_in_transformers_order(seed: int) -> None:
    """Attention scores are llama.cpp's with its rows and its rope, transformers' with its own."""
    heads, head_dim, hidden = 3, 10, 7
    q, k = torch.randn(2, heads * head_dim, hidden)
    x, y = torch.randn(2, hidden)
    at_x, at_y = torch.randn(2, head_dim // 2)

    def scores(wq: torch.Tensor, wk: torch.Tensor, neighbours: bool) -> torch.Tensor:
        left = rotate((wq @ x).view(heads, -1), at_x, neighbours)
        right = rotate((wk @ y).view(heads, -1), at_y, neighbours)
        return (left * right).sum(1)

    back = [demo_source.unpermute_rope_rows(w, heads) for w in (q, k)]
    torch.testing.assert_close(scores(*back, neighbours=False), scores(q, k, neighbours=True))
    assert (scores(q, k, neighbours=False) - scores(q, k, neighbours=True)).abs().max() > 1e-3


def test_kmeans_finds_separate_directions(seed: int) -> None:
    centres = torch.linalg.qr(torch.randn(20, 5)).Q.T
    labels = torch.arange(5).repeat_interleave(torch.tensor([40, 20, 10, 5, 5]))
    points = torch.nn.functional.normalize(centres[labels] + 0.005 * torch.randn(80, 20), dim=1)
    found = demo_upcycle.spherical_kmeans(points, 5, torch.Generator().manual_seed(seed))
    nearest = (points @ found.T).argmax(1)
    means = torch.stack([points[nearest == i].mean(0) for i in nearest.unique().tolist()])
    torch.testing.assert_close(found[nearest.unique()], torch.nn.functional.normalize(means, dim=1))
    # Seeding may put two centres into one cluster, which leaves one centre for two others.
    assert ((centres @ found.T).amax(1) > 0.99).sum() >= 3


def test_router_rows_are_decisive_and_centred(seed: int) -> None:
    states = {"a": torch.randn(200, 16) + 3, "b": torch.randn(100, 16) * 0.5 + 3}
    config = UpcycleConfig(num_experts=5, top1_weight=0.8, seed=seed % 1000)
    rows = demo_upcycle.router_rows(states, config, layer=2)
    x = torch.cat(list(states.values()))
    top = (x @ rows.T).softmax(1).topk(2, dim=1).values
    assert float((top[:, 0] / top.sum(1)).mean()) == pytest.approx(0.8, abs=1e-3)
    assert (rows @ x.mean(0)).abs().max() < 1e-3 * rows.norm(dim=1).min() * x.norm(dim=1).mean()
    load = demo_upcycle.expert_load(states, rows, 2)
    assert all(sum(shares) == pytest.approx(1, abs=1e-3) for shares in load.values())
    assert min(load["all"]) > 0


def test_experts_differ_by_a_tenth_and_do_not_depend_on_order(seed: int) -> None:
    dense = torch.randn(64, 48) * 0.3 + 0.1
    config = UpcycleConfig(seed=seed % 1000)
    made = {e: demo_upcycle.expert_weight(dense, config, 3, e, "w2") for e in (5, 0)}
    assert torch.equal(made[0], demo_upcycle.expert_weight(dense, config, 3, 0, "w2"))
    others = [(4, 0, "w2"), (3, 0, "w1"), (3, 1, "w2")]
    assert not any(torch.equal(made[0], demo_upcycle.expert_weight(dense, config, *o)) for o in others)
    for weight in made.values():
        assert float((weight.float() - dense).std()) == pytest.approx(0.1 * float(dense.std()), rel=0.1)


def test_shards_hold_every_tensor_once(seed: int, tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(i + 1, 50) for i in range(12)}
    total = sum(t.nbytes for t in tensors.values())
    done = list(write_shards(tmp_path, iter(tensors.items()), shard_bytes=3000))
    assert done[-1] == total
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total
    assert index["weight_map"].keys() == tensors.keys()
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    held: list[str] = []
    for name in files:
        assert (tmp_path / name).stat().st_mode & 0o444 == 0o444, "readable by all, as the folder is"
        with safe_open(tmp_path / name, "pt") as file:
            keys = list(file.keys())
            assert all(torch.equal(file.get_tensor(k), tensors[k]) for k in keys)
            assert len(keys) == 1 or sum(tensors[k].nbytes for k in keys) <= 3000
            held += keys
    assert sorted(held) == sorted(tensors)


def test_settings_of_the_upcycling_are_part_of_its_version() -> None:
    """Changing how the model is made without a new name would leave users with an old one in their cache."""
    assert demo_model.NAME.endswith("-v2")
    assert SAMPLING == {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
    assert dataclasses.astuple(UpcycleConfig()) == (8, 2, 0.1, 0.7, 2024, 500 * 10**6)
