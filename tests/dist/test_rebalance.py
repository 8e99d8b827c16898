"""Experts that move while real ranks serve: the same floats before, during and after; and what becomes of every fault."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_runtime import SamplingParams
from moe_runtime.config import EngineConfig
from moe_runtime.engine.async_llm import AsyncLLM
from moe_runtime.engine.rebalance_request import Rebalanced
from moe_runtime.errors import EngineDeadError
from moe_runtime.placement.record import NO_PLACEMENT, load_record
from moe_runtime.placement.split import Replicas, rank_rows, split_rows
from tests.helpers.faulty_rank import FAULT_FILE, SLOW_S
from tests.helpers.rebalance_bed import NUM_TOKENS, WORKER, Bed, Floats, Slots, bed, held, run
from tests.helpers.tiny_models import make_tiny

WAYS = [
    pytest.param("qwen3_moe", 2, {}, id="ep2"),
    pytest.param(
        "mixtral",
        2,
        {"dispatcher": "collective", "num_redundant_experts": 2, "overlap": "on"},
        id="ep2-collective-overlap",
        marks=pytest.mark.slow,
    ),
    pytest.param("qwen2_moe", 4, {"num_redundant_experts": 3}, id="ep4", marks=pytest.mark.slow),
    pytest.param(
        "olmoe",
        4,
        {"overlap": "chunks", "eplb": {"num_staging_slots": 2}},
        id="ep4-chunks",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("family", "ep", "settings"), WAYS)
def test_requests_run_across_moves_and_nothing_changes(
    family: str, ep: int, settings: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    experts = {"num_local_experts" if family == "mixtral" else "num_experts": 7}
    vocab = make_tiny(family, tmp_path, seed, num_hidden_layers=2, **experts).config.vocab_size

    async def main() -> None:
        async with bed(tmp_path, seed, ep, vocab, **settings) as it:
            for number in range(1, 3):
                target = it.another()
                outcome, num_requests = await it.during(it.llm.rebalance(target, timeout=60))
                assert num_requests > 0
                assert outcome.result == "applied", (number, outcome)
                assert held(it.placement()) == held(target)
                assert await it.all() == it.want
            # Nobody generates: the ranks do not sleep over it.
            target = it.another()
            assert (await it.llm.rebalance(target, timeout=60)).result == "applied"
            assert held(it.placement()) == held(target)
            again = await it.llm.rebalance(target, timeout=60)
            assert (again.result, again.reason) == ("failed", "this placement is in force already")
            wrong = await it.llm.rebalance([[[0, 1]] * ep] * len(target), timeout=60)
            assert wrong.result == "failed"
            assert "MoE layer 0: expert 2 has no slot" in wrong.reason
            assert await it.all() == it.want
            stats = [rank.eplb for rank in it.llm.stats]
            assert len({(s.applied, s.version) for s in stats if s is not None}) == 1
            assert sum(s.moved_bytes for s in stats if s is not None) > 0
            # The record of the load knows which placement was in force.
            record = load_record((await it.llm.dump_expert_distribution_record(tmp_path / "record")).folder)
            assert stats[0] is not None
            assert len(record.meta.placements) == stats[0].version + 1
            assert record.meta.placements[-1] == it.placement()

    run(main())


def test_records_name_the_placement_that_each_step_had(tmp_path: Path, seed: int) -> None:
    """Rows that the recorded counts and placements give are those that the ranks computed, as a trace tells, step by step."""
    num_layers = 6
    vocab = make_tiny("qwen3_moe", tmp_path, seed, num_hidden_layers=num_layers, num_experts=7).config.vocab_size

    async def main() -> None:
        async with bed(tmp_path, seed, 2, vocab, overlap="off", ep_dispatch_algorithm="static") as it:
            await it.llm.start_expert_distribution_record()
            await it.llm.start_profile(1000)
            outcome, _ = await it.during(it.llm.rebalance(it.another(), timeout=60))
            assert outcome.result == "applied"
            await it.all()
            events = json.loads((await it.llm.stop_profile(tmp_path / "trace.json")).file.read_text())["traceEvents"]
            record = load_record((await it.llm.dump_expert_distribution_record(tmp_path / "record")).folder)
        computed_SLN = traced_rows(events, num_layers)
        assert len(computed_SLN) > 30
        assert set(record.num_steps_W[: len(computed_SLN)].tolist()) == {1}
        known = set()
        for window, computed_LN in enumerate(computed_SLN):
            index = int(record.placement_W[window])
            if index == NO_PLACEMENT:
                continue
            known.add(index)
            counts_NLE = record.counts_WPNLE[window].sum(axis=0)
            for layer, slots in enumerate(record.meta.placements[index]):
                replicas = Replicas.of(np.array(slots), 7)
                rows_NEC = split_rows("static", counts_NLE[:, layer], replicas)
                assert rank_rows(rows_NEC, replicas).tolist() == computed_LN[layer], (window, layer, index)
        assert known >= {0, len(record.meta.placements) - 1}, "before the move and after it"
        # Layers are copied one after the other, each in several steps: some steps have a map between two placements.
        assert NO_PLACEMENT in record.placement_W[: len(computed_SLN)]

    run(main())


def traced_rows(events: list[dict[str, Any]], num_layers: int) -> list[list[list[int]]]:
    """[step][layer][rank] -> rows that the rank's experts computed."""
    by_rank = []
    for rank in range(2):
        steps: list[list[int]] = []
        rows = [0] * num_layers
        for event in events:
            if event["pid"] != rank or event.get("tid") != 0 or event["ph"] != "X":
                continue
            if event["name"] == "experts":
                rows[event["args"]["moe_layer"]] += event["args"]["rows"]
            elif event["name"] == "step":
                steps.append(rows)
                rows = [0] * num_layers
        by_rank.append(steps)
    return [list(map(list, zip(*both, strict=True))) for both in zip(*by_rank, strict=True)]


@pytest.mark.slow
def test_fp8_experts_move_with_their_scales(tmp_path: Path, seed: int) -> None:
    """Not deterministic mode, which has no FP8: greedy tokens of one request at a time on one rank are the same."""
    vocab = make_tiny("qwen3_moe", tmp_path, seed, num_experts=6).config.vocab_size

    async def main() -> None:
        async with bed(tmp_path, seed, 2, vocab, deterministic=False, quantization="fp8") as it:
            params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)

            async def ask() -> Any:
                await it.llm.reset_prefix_cache()
                output = await it.llm.complete(it.prompts[0], params, routed_dp_rank=0)
                (completion,) = output.outputs
                assert completion.logprobs is not None
                chosen = zip(completion.token_ids, completion.logprobs, strict=True)
                return [(float(token), logprobs[token].logprob) for token, logprobs in chosen]

            want = await ask()
            target = [[[5, 4, 3], [2, 1, 0]]] * len(it.placement())
            assert (await it.llm.rebalance(target, timeout=60)).result == "applied"
            for got, known in zip(await ask(), want, strict=True):
                assert got == pytest.approx(known, abs=1e-4)

    run(main())


@pytest.mark.slow
def test_the_live_load_is_followed(tmp_path: Path, seed: int) -> None:
    """Without anybody asking: a placement that is bad for this traffic gives way to a better one."""
    vocab = make_tiny("qwen3_moe", tmp_path, seed, num_experts=8, num_experts_per_tok=2).config.vocab_size
    # On a real core so small a model would wait for messages nearly all the time, and nothing be worth moving.
    hardware = tmp_path / "rows.yaml"
    hardware.write_text(
        "matmul_flops: 1e6\nmemory_bytes_s: 1e15\nlink_bytes_s: 1e15\ninternode_bytes_s: 1e15\nlatency_us: 1e-9\ntile_rows: 1\n"
    )
    eplb = {"step_interval": 30, "window_size": 24, "min_gain": 0.01, "hysteresis": 0.0, "max_moved": 1.0}

    async def main() -> None:
        async with bed(tmp_path, seed, 2, vocab, eplb=eplb | {"hardware": str(hardware)}) as it:
            deadline = time.monotonic() + 60
            applied: Any = None
            while not applied:
                assert time.monotonic() < deadline, it.llm.stats[0].eplb
                assert await it.all() == it.want
                applied = it.llm.stats[0].eplb and it.llm.stats[0].eplb.applied
            stats = it.llm.stats[0].eplb
            assert stats is not None
            assert stats.gain is not None
            it.placement()

    run(main())


@pytest.mark.slow
def test_dry_run_only_tells(tmp_path: Path, seed: int) -> None:
    vocab = make_tiny("qwen3_moe", tmp_path, seed, num_experts=6).config.vocab_size

    async def main() -> None:
        async with bed(tmp_path, seed, 2, vocab, eplb_dry_run=True, eplb={"window_size": 8}) as it:
            before = it.placement()
            for slots in (None, it.another()):
                outcome = await it.llm.rebalance(slots, force=True, timeout=60)
                assert outcome.result in ("skipped", "failed"), outcome
                if outcome.result == "skipped":
                    assert "nothing is moved" in outcome.reason
            assert it.placement() == before
            stats = it.llm.stats[0].eplb
            assert stats is not None
            assert (stats.applied, stats.moved_bytes) == (0, 0)

    run(main())


async def fault(it: Bed, folder: Path, what: str, reason: str) -> None:
    """In the middle of a move, while requests run: their floats are the known ones, and the map is the old one. Then all is well."""
    target, before = it.another(), it.placement()
    # Somebody fetches an expert, of two tensors, before the end.
    receivers = [
        r
        for r in range(2)
        if any(new[r] - old[r] for old, new in zip(held(before), held(target), strict=True))
    ]
    rank = it.draw.choice(receivers)
    (folder / FAULT_FILE).write_text(json.dumps({"what": what, "rank": rank, "after": it.draw.randint(1, 2)}))
    outcome, _ = await it.during(it.llm.rebalance(target, timeout=100))
    assert not (folder / FAULT_FILE).exists(), "it did not happen"
    assert outcome.result == "rolled_back", outcome
    assert reason in outcome.reason
    # Who is late is told by whoever notices first.
    assert f"rank {rank}:" in outcome.reason or what == "slow"
    assert it.placement() == before
    assert await it.all() == it.want
    assert all(r.eplb is not None and r.eplb.degraded for r in it.llm.stats)
    if what == "slow":
        await asyncio.sleep(SLOW_S)
    outcome, _ = await it.during(it.llm.rebalance(target, timeout=100))
    assert outcome.result == "applied", outcome
    assert held(it.placement()) == held(target)
    assert await it.all() == it.want
    assert [r.eplb.degraded for r in it.llm.stats if r.eplb is not None] == ["", ""]


def test_a_corrupted_copy_and_a_killed_mover(tmp_path: Path, seed: int) -> None:
    vocab = make_tiny("qwen3_moe", tmp_path, seed, num_experts=6, num_hidden_layers=2).config.vocab_size

    async def main() -> None:
        async with bed(tmp_path, seed, 2, vocab) as it:
            await fault(it, tmp_path, "corrupt", "a copy differed from its source")
            await fault(it, tmp_path, "mover killed", "the thread that moves weights has died")

    run(main())


@pytest.mark.slow
def test_a_mover_that_fails_and_one_that_is_late(tmp_path: Path, seed: int) -> None:
    vocab = make_tiny("mixtral", tmp_path, seed, num_local_experts=6, num_hidden_layers=4).config.vocab_size

    async def main() -> None:
        eplb = {"deadline_seconds": SLOW_S / 2}
        async with bed(tmp_path, seed, 2, vocab, eplb=eplb) as it:
            await fault(it, tmp_path, "mover fails", "an error, see the log")
            await fault(it, tmp_path, "slow", "the deadline has passed")

    run(main())


@pytest.mark.slow
def test_a_slow_rank_is_waited_for(tmp_path: Path, seed: int) -> None:
    vocab = make_tiny("qwen3_moe", tmp_path, seed, num_experts=6).config.vocab_size

    async def main() -> None:
        async with bed(tmp_path, seed, 2, vocab) as it:
            target = [[[0, 1, 3], [2, 4, 5]]] * len(it.placement())
            (tmp_path / FAULT_FILE).write_text(json.dumps({"what": "slow", "rank": 1, "after": 1}))
            outcome, num_requests = await it.during(it.llm.rebalance(target, timeout=100))
            assert outcome.result == "applied", outcome
            assert held(it.placement()) == held(target)
            assert num_requests > 0
            assert await it.all() == it.want

    run(main())


@pytest.mark.slow
def test_a_planner_that_dies_is_told_and_replaced(tmp_path: Path, seed: int) -> None:
    vocab = make_tiny("qwen3_moe", tmp_path, seed, num_experts=6).config.vocab_size
    (tmp_path / FAULT_FILE).write_text(json.dumps({"what": "planner killed", "rank": 0}))

    async def main() -> None:
        async with bed(tmp_path, seed, 2, vocab, eplb={"window_size": 8}) as it:
            outcome = await it.llm.rebalance(timeout=60)
            assert (outcome.result, outcome.reason) == ("failed", "the thread that plans has died")
            stats = it.llm.stats[0].eplb
            assert stats is not None
            assert "the thread that plans has died" in stats.degraded
            assert (await it.llm.rebalance(timeout=60)).result in ("applied", "skipped")
            stats = it.llm.stats[0].eplb
            assert stats is not None
            assert stats.degraded == ""
            assert await it.all() == it.want

    run(main())


def test_a_rank_that_dies_during_a_move_ends_all(tmp_path: Path, seed: int) -> None:
    vocab = make_tiny("qwen3_moe", tmp_path, seed, num_experts=6).config.vocab_size
    (tmp_path / FAULT_FILE).write_text(json.dumps({"what": "rank killed", "rank": 1, "after": 2}))

    async def main() -> None:
        async with bed(tmp_path, seed, 2, vocab) as it:
            target = [[[0, 1, 3], [2, 4, 5]]] * len(it.placement())
            began = time.monotonic()
            with pytest.raises(EngineDeadError):
                await it.during(it.llm.rebalance(target, timeout=60))
            assert time.monotonic() - began < 10.0

    run(main())
