"""The simulator's rows per slot, from a record on disk, are those that eight real ranks computed."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

from moe_runtime.core import ExpertPlacement, Routing
from moe_runtime.dispatch.base import plan_dispatch
from moe_runtime.dispatch.collective import CollectiveDispatcher
from moe_runtime.placement.cost import Cluster, Cost, Hardware, ModelCost
from moe_runtime.engine.load_records import NEWS_INTERVAL_S
from moe_runtime.models.registry import load_spec
from moe_runtime.placement.formats import write_placement
from moe_runtime.placement.layout import layer_placement
from moe_runtime.placement.record import load_record, split_of_record, write_meta, write_rank
from moe_runtime.placement.simulate import replay
from moe_runtime.placement.stored import Model
from moe_runtime.placement.traffic import traffic_of
from tests.helpers.placements import random_placement
from tests.helpers.records import write_random_record
from tests.helpers.real_server import RealServer
from tests.helpers.spawn import run_ranks
from tests.helpers.tiny_models import make_tiny
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

RANKS, LAYERS, EXPERTS, TOP_K, WINDOWS, STEPS = 8, 2, 13, 3, 3, 2


def dispatch_steps(rank: int, num_ranks: int, placement: ExpertPlacement, seed: int) -> tuple[np.ndarray, ...]:
    """Route random tokens step by step. Counts (W, L, E), tokens (W,), and the rows that this rank computed, (W, L, p)."""
    draw = torch.Generator().manual_seed(seed * num_ranks + rank)
    dispatcher = CollectiveDispatcher(dist.group.WORLD, 30.0)
    counts = np.zeros((WINDOWS, LAYERS, EXPERTS), dtype=np.int64)
    tokens = np.zeros(WINDOWS, dtype=np.int64)
    rows = np.zeros((WINDOWS, LAYERS, len(placement.slots[0][0])), dtype=np.int64)
    skew_E = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(seed)) ** 3 + 0.01
    for window in range(WINDOWS):
        for _ in range(STEPS):
            num_tokens = int(torch.randint(0, 30, (), generator=draw))
            tokens[window] += num_tokens
            for layer in range(LAYERS):
                ids = torch.multinomial(skew_E.expand(max(num_tokens, 1), -1), TOP_K, generator=draw)[:num_tokens]
                counts[window, layer] += torch.bincount(ids.flatten(), minlength=EXPERTS).numpy()
                routing = Routing(ids, torch.ones(num_tokens, TOP_K))
                plan = plan_dispatch(routing, layer_placement(placement, layer, rank), rank, 30)
                batch = dispatcher.dispatch(torch.zeros(num_tokens, 4), plan).wait()
                rows[window, layer] += batch.num_rows_p.numpy()
                dispatcher.combine(torch.zeros(len(batch.row_index_S), 4), batch, plan).wait()
    dispatcher.close()
    return counts, tokens, rows


def test_replay_at_the_recorded_size_is_exact(tmp_path: Path, seed: int) -> None:
    placement = random_placement(random.Random(seed), LAYERS, EXPERTS, RANKS, 4)
    results = run_ranks(dispatch_steps, RANKS, placement, seed)
    meta = write_random_record(
        tmp_path, seed, num_ranks=RANKS, num_layers=LAYERS, num_experts=EXPERTS, num_windows=WINDOWS, top_k=TOP_K, steps=STEPS
    )
    write_meta(tmp_path, msgspec.structs.replace(meta, placements=[[[list(r) for r in layer] for layer in placement.slots]]))
    for rank, (counts_WLE, tokens_W, _) in enumerate(results):
        with np.load(tmp_path / f"rank{rank}.npz") as file:
            arrays = dict(file)
        arrays["counts_WPLE"] = np.stack([counts_WLE, np.zeros_like(counts_WLE)], axis=1)
        arrays["tokens_WP"] = np.stack([tokens_W, np.zeros_like(tokens_W)], axis=1)
        write_rank(tmp_path, rank, arrays)
    record = load_record(tmp_path)
    cost = Cost(ModelCost.of(record.meta), Hardware.named("cpu"), Cluster.single(RANKS))
    got = replay(traffic_of(record), placement, cost, "static")
    want_WLNp = np.stack([rows_WLp for _, _, rows_WLp in results], axis=2)
    assert want_WLNp.sum() > 0
    assert np.array_equal(got.rows_WLNp, want_WLNp)


@pytest.mark.slow
def test_replay_of_a_server_is_what_its_ranks_computed(tmp_path: Path, seed: int) -> None:
    """Rows that eight ranks of a real server counted as they computed them (its metrics), against its record replayed."""
    draw = random.Random(seed)
    make_tiny("qwen3_moe", tmp_path / "model", seed, vocab_size=VOCAB_SIZE, num_experts=9)
    save_tokenizer(tmp_path / "model")
    spec, _ = load_spec(tmp_path / "model")
    placement = random_placement(draw, spec.num_moe_layers, 9, RANKS, 3)
    model = Model(9, RANKS, spec.moe_layers, spec.num_layers)
    write_placement(tmp_path / "placement.json", placement, model)
    flags = ("--num-kv-blocks", "64", "--dtype", "float32", "--init-expert-location", str(tmp_path / "placement.json"),
             "--expert-distribution-dir", str(tmp_path))  # fmt: skip
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(3, 25))] for _ in range(12)]
    body = {"model": "model", "prompt": prompts, "max_tokens": 7, "ignore_eos": True}
    with (
        RealServer(tmp_path / "model", RANKS, tmp_path / "server.log", *flags) as server,
        httpx.Client(base_url=server.base_url, timeout=120) as client,
    ):
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        # Ranks report with a step, if their last report is old enough: with this one.
        time.sleep(NEWS_INTERVAL_S + 0.5)
        assert client.post("/v1/completions", json=body | {"prompt": [5], "max_tokens": 1}).status_code == 200
        record = load_record(Path(client.post("/dump_expert_distribution_record").json()["folder"]))
        cost = Cost(ModelCost.of(record.meta), Hardware.named("cpu"), Cluster.single(RANKS))
        recorded = ExpertPlacement(
            tuple(tuple(tuple(rank) for rank in layer) for layer in record.meta.placements[-1]), record.meta.num_experts
        )
        assert recorded == placement
        assert record.meta.split == "auto"
        # Few tokens in each step: so `auto` is static throughout, and exact whatever the windows.
        want = replay(traffic_of(record), recorded, cost, split_of_record(record.meta)).rank_rows.sum(axis=0).tolist()
        deadline = time.monotonic() + 30
        while (counted := rows_by_rank(client.get("/metrics").text)) != want and time.monotonic() < deadline:
            time.sleep(0.5)
    assert counted == want
    assert sum(want) == record.counts_WPNLE.sum() > 0


def rows_by_rank(metrics: str) -> list[int]:
    """moe_rank_tokens_total of each rank, both phases together."""
    rows = [0] * RANKS
    for labels, value in re.findall(r"^moe_runtime:moe_rank_tokens_total\{(.*)\} (\S+)$", metrics, re.MULTILINE):
        rank = re.search(r'ep_rank="(\d+)"', labels)
        assert rank is not None
        rows[int(rank[1])] += int(float(value))
    return rows
