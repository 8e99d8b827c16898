"""The simulator's rows per slot, from a record on disk, are those that eight real ranks computed."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from moe_runtime.core import ExpertPlacement, Routing
from moe_runtime.dispatch.base import plan_dispatch
from moe_runtime.dispatch.collective import CollectiveDispatcher
from moe_runtime.placement.cost import Cluster, Cost, Hardware, ModelCost
from moe_runtime.placement.layout import layer_placement
from moe_runtime.placement.record import load_record, write_meta, write_rank
from moe_runtime.placement.simulate import replay, traffic_of
from tests.helpers.placements import random_placement
from tests.helpers.records import write_random_record
from tests.helpers.spawn import run_ranks

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
