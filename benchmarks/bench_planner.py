"""The placement planner beside EPLB and bounds: how level, how much moved, how far tokens travel, how long it takes.

    python -m benchmarks.bench_planner --trace routing.npz --result result.json
    python -m benchmarks.bench_planner --kind zipf lognormal drifting clustered

--trace is an npz with `topk_ids` (tokens, layers, experts per token) of recorded routing; without it, traces are made. Plans are made
from the past and judged on batches of the window that follows. --eplb names EPLB's own eplb.py, to time it too; on its placements
nothing depends. Imbalance is the sum over layers and batches of the fullest rank's rows over that of the mean: 1 is level, and 1 is
also the bound after the run-time split.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.planner_judge import Imbalance, batches_of, even_bound, even_loads, judge, ranks_per_token
from benchmarks.planner_routing import KINDS, ORDERS, Trace, make_trace, read_trace, splits_of_time
from moe_runtime.placement import deepseek
from moe_runtime.placement.cost import Cluster
from moe_runtime.placement.planner import plan
from moe_runtime.placement.problem import scaled_loads
from moe_runtime.placement.split import Replicas, split_rows

Rows = list[dict[str, Any]]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="npz of recorded routes")
    parser.add_argument(
        "--order",
        choices=ORDERS,
        default="recorded",
        help="of the trace's tokens: what is past, what is judged",
    )
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS), help="traces to make")
    parser.add_argument("--ep", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--spare", type=int, nargs="+", default=[1, 2], help="spare slots a rank")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024], help="tokens a rank and step")
    parser.add_argument(
        "--batches", type=int, default=4, help="judged per window (half/half: six times as many)"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--eplb", type=Path, help="eplb.py of DeepSeek's repository")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, help="JSON file to write")
    return parser


def eplb_slots(loads_WLE: np.ndarray, num_slots: int, num_ranks: int) -> np.ndarray:
    """EPLB as it is, two replicas on one rank included. (L, N, p)."""
    slots_LS = deepseek.rebalance_experts(
        scaled_loads(loads_WLE).mean(axis=0), num_slots, 1, 1, num_ranks
    ).slot_to_expert_LS
    return slots_LS.reshape(len(slots_LS), num_ranks, -1)


def our_slots(loads_WLE: np.ndarray, num_slots: int, num_ranks: int, **options: Any) -> np.ndarray:
    return np.array(
        plan(loads_WLE, Cluster.single(num_ranks), num_slots=num_slots, **options).placement.slots
    )


def cells(trace: Trace, args: argparse.Namespace) -> list[tuple[int, int]]:
    return [(n, trace.num_experts + n * spare) for n in args.ep for spare in args.spare]


def held_out(trace: Trace, args: argparse.Namespace) -> Rows:
    """Plan on the past, judge the next window, before (even shares) and after the run-time split."""
    rows = []
    for num_ranks, num_slots in cells(trace, args):
        for mode in ("half", "rolling"):
            for tokens in args.tokens:
                sums = {f"{who}{when}": Imbalance() for who in ("eplb", "ours") for when in ("_even", "")}
                rng = np.random.default_rng(args.seed)
                for past, start, stop in splits_of_time(trace, mode):
                    loads = trace.loads(past, start)
                    num = args.batches * (6 if mode == "half" else 1)
                    batches = batches_of(trace, rng, start, stop, num_ranks, tokens, num)
                    for who, make in (("eplb", eplb_slots), ("ours", our_slots)):
                        slots = make(loads, num_slots, num_ranks)
                        judge(slots, batches, trace.num_experts, sums[who], sums[who + "_even"])
                row: dict[str, Any] = {"ep": num_ranks, "slots": num_slots, "windows": mode, "tokens": tokens}
                row.update({name: s.value for name, s in sums.items()})
                row["removed"] = 1 - (row["ours"] - 1) / (row["eplb"] - 1)
                rows.append(row)
    return rows


def in_sample(trace: Trace, args: argparse.Namespace) -> Rows:
    """Even shares on the loads planned for; 1 / imbalance, of the bound too."""
    rows = []
    load = scaled_loads(trace.loads(0, len(trace.topk_ids_tLK))).mean(axis=0)
    for num_ranks, num_slots in cells(trace, args):
        row: dict[str, Any] = {"ep": num_ranks, "slots": num_slots}
        mean = float(load.sum(axis=1).sum()) / num_ranks
        row["bound"] = mean / float(even_bound(load, num_slots, num_ranks).sum())
        for who, slots in (
            ("eplb", eplb_slots(load, num_slots, num_ranks)),
            ("ours", our_slots(load, num_slots, num_ranks, split="even")),
        ):
            row[who] = mean / float(even_loads(slots, load).max(axis=1).sum())
        row["of_bound"] = row["ours"] / row["bound"]
        rows.append(row)
    return rows


def replans(trace: Trace, args: argparse.Namespace) -> Rows:
    """A chain of re-plans that move at most 5 % of the slots, beside planning from scratch and beside the first plan, kept."""
    rows = []
    edge = np.linspace(0, len(trace.topk_ids_tLK), 13).astype(int)
    for num_ranks, num_slots in cells(trace, args):
        cluster, rng = Cluster.single(num_ranks), np.random.default_rng(args.seed)
        first = current = plan(trace.loads(0, int(edge[2])), cluster, num_slots=num_slots).placement
        sums = {name: Imbalance() for name in ("scratch", "replan", "kept")}
        moved, seconds = [], []
        for i in range(3, 12):
            loads = trace.loads(int(edge[i - 2]), int(edge[i]))
            scratch = plan(loads, cluster, num_slots=num_slots).placement
            begin = time.perf_counter()
            result = plan(loads, cluster, num_slots=num_slots, current=current, max_moved=0.05)
            seconds.append(time.perf_counter() - begin)
            current = result.placement
            moved.append(result.moved_slots / (trace.num_layers * num_slots))
            batches = batches_of(
                trace, rng, int(edge[i]), int(edge[i + 1]), num_ranks, args.tokens[0], args.batches
            )
            for name, placement in (("scratch", scratch), ("replan", current), ("kept", first)):
                judge(np.array(placement.slots), batches, trace.num_experts, sums[name], Imbalance())
        row: dict[str, Any] = {"ep": num_ranks, "slots": num_slots}
        row.update({name: s.value for name, s in sums.items()})
        row |= {
            "worse": row["replan"] / row["scratch"] - 1,
            "moved_most": max(moved),
            "ms": 1e3 * float(np.mean(seconds)),
        }
        rows.append(row)
    return rows


def travel(trace: Trace, args: argparse.Namespace) -> Rows:
    """Ranks per token of held-out tokens, co-activation weighed, half/half; no spare slots too."""
    rows = []
    half, end = len(trace.topk_ids_tLK) // 2, len(trace.topk_ids_tLK)
    loads, together = trace.loads(0, half), trace.coactivation(0, half)
    for num_ranks in args.ep:
        for spare in (0, *args.spare):
            num_slots = trace.num_experts + spare * num_ranks
            row: dict[str, Any] = {"ep": num_ranks, "slots": num_slots}
            for who, slots in (
                ("eplb", eplb_slots(loads, num_slots, num_ranks)),
                ("ours", our_slots(loads, num_slots, num_ranks)),
                ("gathered", our_slots(loads, num_slots, num_ranks, coactivation_LEE=together)),
            ):
                rng = np.random.default_rng(args.seed)
                row[who], row[who + "_imbalance"] = ranks_per_token(
                    trace, slots, rng, half, end, args.tokens[0]
                )
            row["fewer"] = 1 - row["gathered"] / row["eplb"]
            rows.append(row)
    return rows


def split_all(method: str, counts: list[np.ndarray], replicas: Replicas) -> None:
    for counts_NE in counts:
        split_rows(method, counts_NE, replicas)


def load_module(path: Path | None) -> Any:
    """The module in the file; None without one."""
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location("eplb", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def least_ms(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times)


def speed(trace: Trace, args: argparse.Namespace) -> Rows:
    """Milliseconds to plan 58 layers of 256 experts in 320 slots, whatever the trace; and microseconds of the run-time split."""
    rng = np.random.default_rng(args.seed)
    load = rng.lognormal(0.0, 0.7, (58, 256))
    windows = load * rng.lognormal(0.0, 0.2, (8, 58, 256))
    weight, public = torch.tensor(load, dtype=torch.float32), load_module(args.eplb)
    rows: Rows = []
    for num_ranks in (8, 16, 32, 64):
        row: dict[str, Any] = {"ep": num_ranks, "slots": 320}
        row["ours_ms"] = least_ms(partial(our_slots, load, 320, num_ranks), 7)
        row["ours_8_windows_ms"] = least_ms(partial(our_slots, windows, 320, num_ranks), 3)
        row["eplb_vectorised_ms"] = least_ms(partial(eplb_slots, load, 320, num_ranks), 3)
        if public is not None:
            row["eplb_public_ms"] = least_ms(
                partial(public.rebalance_experts, weight, 320, 1, 1, num_ranks), 2
            )
        rows.append(row)
    for num_ranks, num_experts, num_slots in ((8, 64, 72), (16, 128, 144), (32, 256, 288), (32, 256, 320)):
        load_E = rng.lognormal(0.0, 0.7, num_experts)
        replicas = Replicas.of(our_slots(load_E[None], num_slots, num_ranks)[0], num_experts)
        counts = [rng.multinomial(1024, rng.dirichlet(load_E * 20), size=num_ranks) for _ in range(20)]
        row = {"ep": num_ranks, "experts": num_experts, "slots": num_slots}
        for method in ("waterfill", "one_replica"):
            row[method + "_us"] = (
                1e3 / len(counts) * least_ms(partial(split_all, method, counts, replicas), 5)
            )
        rows.append(row)
    return rows


PARTS: dict[str, Callable[[Trace, argparse.Namespace], Rows]] = {
    "held_out": held_out,
    "in_sample": in_sample,
    "replans": replans,
    "travel": travel,
    "speed": speed,
}


def show(title: str, rows: Rows) -> None:
    print(f"\n{title}")
    header: list[str] = []
    for row in rows:
        if list(row) != header:
            header = list(row)
            print(" | ".join(header))
        print(" | ".join(f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()))


def main() -> None:
    args = build_parser().parse_args()
    torch.set_num_threads(1)
    traces = (
        {args.trace.name: read_trace(args.trace, args.order)}
        if args.trace
        else {
            kind: make_trace(kind, num_tokens=12000, num_layers=8, num_experts=64, top_k=6, seed=args.seed)
            for kind in args.kind
        }
    )
    result: dict[str, dict[str, Rows]] = {}
    for name, trace in traces.items():
        result[name] = {part: PARTS[part](trace, args) for part in args.parts if part != "speed"}
        for part, rows in result[name].items():
            show(f"{name}: {PARTS[part].__doc__}", rows)
    if "speed" in args.parts:
        result["speed"] = {"speed": speed(trace, args)}
        show(str(speed.__doc__), result["speed"]["speed"])
    if args.result:
        args.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
