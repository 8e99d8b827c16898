"""Does a plan pay? The same skewed traffic without and with it, on real ranks: predicted gain against achieved, and throughput.

    python benchmarks/bench_placement.py --model demo --ep 2 --rounds 6 --result result.json

Each rank is pinned to a core of its own. A first engine records the load; `launch/plan.py report` plans a placement from the first half
of the record, and predicts by the second how much less time MoE layers will take. A second engine then answers other prompts of the same kind
under the contiguous placement and under the plan, in turn: experts move between the batches, so that what else the machine does
slows both. The MoE layers' time is taken from traces (`placement_trace.py`). The throughput is expected to follow from two numbers:
the predicted gain, and the share of the recorded steps' time that MoE layers took.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from placement_trace import MoeTimes, read_times

from moe_runtime import LLM, SamplingParams, __version__
from moe_runtime.placement.record import load_record

ROOT = Path(__file__).resolve().parents[1]
Slots = list[list[list[int]]]
TOPICS = ("the sum of two integers", "binary search", "a prime sieve", "reading a file", "counting words")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--redundant", type=int, default=0, help="extra copies of experts in each layer")
    parser.add_argument("--prompts", type=int, default=32, help="of a batch")
    parser.add_argument("--tokens", type=int, default=24, help="most tokens that are generated for a prompt")
    parser.add_argument("--sequences", type=int, default=12, help="running at once, per rank")
    parser.add_argument("--recorded", type=int, default=2, help="batches of prompts that are recorded")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--split", default="static", choices=("dynamic", "static", "random"), help="how replicas are used"
    )
    parser.add_argument("--hardware", default="cpu", help="preset or YAML file for the prediction")
    parser.add_argument("--result", type=Path, help="JSON file to write")
    return parser


def pin_ranks() -> list[int]:
    """Give each of this program's ranks, all of its threads, a core of its own, in turn. Returns the cores by rank."""
    cores = sorted(os.sched_getaffinity(0))
    pinned = {}
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            rank = next((int(p.removeprefix("RANK=")) for p in pairs if p.startswith("RANK=")), None)
            if rank is None:
                continue
            if rank >= len(cores):
                raise SystemExit(f"rank {rank} has no core of its own: there are {len(cores)}")
            pinned[rank] = cores[rank]
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), {cores[rank]})
    return [core for _, core in sorted(pinned.items())]


def start(args: argparse.Namespace, **settings: Any) -> LLM:
    """An engine whose ranks are pinned, warmed up."""
    llm = LLM(
        model=args.model, ep=args.ep, ep_dispatch_algorithm=args.split, max_num_seqs=args.sequences, overlap="off",
        enable_prefix_caching=False, log_level="warning", **settings,
    )  # fmt: skip
    assert len(pin_ranks()) == args.ep
    answer(llm, args, 10**6)
    return llm


def answer(llm: LLM, args: argparse.Namespace, first: int) -> tuple[float, list[list[int]]]:
    """Answer prompts number `first` and up: tokens a second, prompts' included, and the answers."""
    draw = random.Random(first)
    numbers = range(first, first + args.prompts)
    topics = [TOPICS[i % len(TOPICS)] for i in numbers]
    prompts = [
        [{"role": "user", "content": f"Write a Python function for {topic}, variant {i}."}]
        for i, topic in zip(numbers, topics, strict=True)
    ]
    lengths = [draw.randint(max(1, args.tokens // 4), args.tokens) for _ in prompts]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    begin = time.perf_counter()
    outputs = llm.chat(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    tokens = sum(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs)
    return tokens / seconds, [o.outputs[0].token_ids for o in outputs]


def record(args: argparse.Namespace, folder: Path) -> MoeTimes:
    """Record the load under the contiguous placement, several batches long, into `folder`/record; what a trace of it says."""
    with start(args) as llm:
        llm.start_expert_distribution_record()
        llm.start_profile(1000)
        for batch in range(args.recorded):
            answer(llm, args, batch * args.prompts)
        llm.stop_profile(folder / "trace.json")
        llm.dump_expert_distribution_record(folder / "record")
    return read_times(folder / "trace.json")


def predict(args: argparse.Namespace, record: Path, report: Path) -> dict[str, Any]:
    """The report's verdict; `report` then has the plan."""
    command = [sys.executable, str(ROOT / "launch/plan.py"), "report", str(record), "-o", str(report)]
    command += ["--hardware", args.hardware, "--split", args.split, "--redundant", str(args.redundant)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    print(
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout,
        flush=True,
    )
    verdict: dict[str, Any] = json.loads((report / "report.json").read_text())["verdict"]
    return verdict


def compare(args: argparse.Namespace, plan: Path, contiguous: Slots, scratch: Path) -> list[dict[str, Any]]:
    """Rounds of prompts that the plan has not seen, each under both placements, in one engine whose experts move in between."""
    eplb = {"max_bytes_per_step": 1 << 30, "step_interval": 10**9}
    rounds = []
    with start(args, init_expert_location=str(plan), enable_eplb=True, eplb_config=json.dumps(eplb)) as llm:
        slots = {"planned": llm.placement, "contiguous": contiguous}
        in_force = "planned"
        for number in range(args.rounds):
            runs: dict[str, dict[str, Any]] = {}
            # In turn the one and the other first.
            for name in sorted(slots, reverse=number % 2 == 0):
                if name != in_force:
                    moved = llm.rebalance(slots[name])
                    assert moved.result == "applied", moved
                    in_force = name
                llm.start_profile(1000)
                speed, tokens = answer(llm, args, (args.recorded + number) * args.prompts)
                llm.stop_profile(scratch / "trace.json")
                times = read_times(scratch / "trace.json")
                runs[name] = {"tokens_per_s": speed, **times.summary(), "answers": tokens}
            before, after = runs["contiguous"], runs["planned"]
            pairs = zip(before.pop("answers"), after.pop("answers"), strict=True)
            same = sum(a == b for a, b in pairs)
            gain, faster = (
                1 - after["moe_ms"] / before["moe_ms"],
                after["tokens_per_s"] / before["tokens_per_s"],
            )
            rounds.append({"gain": gain, "faster": faster, "same_answers": same, **runs})
            print(
                f"round {number}: MoE layers {before['moe_ms']:.0f} -> {after['moe_ms']:.0f} ms, gain {gain:.3f};"
                f" {before['tokens_per_s']:.0f} -> {after['tokens_per_s']:.0f} tokens/s, x {faster:.3f};"
                f" balancedness {before['balancedness']:.3f} -> {after['balancedness']:.3f}; {same} of {args.prompts} answers the same",
                flush=True,
            )
    return rounds


def mean_and_bounds(values: list[float]) -> dict[str, float]:
    """Mean, and the bounds between which it lies with 90 % confidence (bootstrap over rounds)."""
    draw = np.random.default_rng(0)
    means = draw.choice(values, size=(10_000, len(values))).mean(axis=1)
    low, high = np.quantile(means, [0.05, 0.95])
    return {"mean": float(np.mean(values)), "low": float(low), "high": float(high)}


def predicted_against(
    first: MoeTimes, verdict: dict[str, Any], rounds: list[dict[str, Any]]
) -> dict[str, Any]:
    """What is held against what."""
    share = first.moe_ms / first.step_ms
    gain = verdict["gain"]
    return {
        "predicted_gain": gain,
        "predicted_faster": {k: None if g is None else 1 / (1 - share * g) for k, g in gain.items()},
        "modelled_moe_ms_per_step": [verdict["before_us"]["mean"] / 1e3, verdict["after_us"]["mean"] / 1e3],
        "recorded_moe_ms_per_step": first.moe_ms / first.num_steps,
        "recorded_moe_share": share,
        "achieved_gain": mean_and_bounds([r["gain"] for r in rounds]),
        "achieved_faster": mean_and_bounds([r["faster"] for r in rounds]),
    }


def main(argv: list[str]) -> int:
    """Record, plan, compare."""
    args = build_parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        recorded = record(args, scratch)
        verdict = predict(args, scratch / "record", scratch / "report")
        (contiguous,) = load_record(scratch / "record").meta.placements
        rounds = compare(args, scratch / "report/placement.json", contiguous, scratch)
    result = predicted_against(recorded, verdict, rounds)
    print(json.dumps(result, indent=1))
    if args.result:
        result |= {
            "verdict": verdict,
            "rounds": rounds,
            "command": shlex.join(["python", "benchmarks/bench_placement.py", *argv]),
            "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, one for each rank",
            "versions": {"moe_runtime": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }  # fmt: skip
        args.result.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
