"""Does a plan pay? The same skewed traffic without and with it, on real ranks: predicted gain against achieved, and throughput.

    python benchmarks/bench_placement.py --model demo --ep 2 --redundant 2 --rounds 2 --result result.json

Each rank is pinned to a core of its own. A first run records the load; `launch/plan.py report` plans a placement from the first half of
the record, and predicts by the second how much less time MoE layers will take. Then other prompts of the same kind are answered, in
turn under the contiguous placement and under the plan, each time by an engine started anew and warmed up. The MoE layers' time is taken
from traces (`placement_trace.py`). Of two numbers the throughput is expected to follow: the predicted gain, and the share of the recorded steps'
time that MoE layers took. Answers must be the same; the count of those that are is told.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from placement_trace import MoeTimes, read_times

from moe_runtime import LLM, SamplingParams, __version__
from moe_runtime.placement.split import SPLITS

ROOT = Path(__file__).resolve().parents[1]
TOPICS = ("the sum of two integers", "binary search", "a prime sieve", "reading a file", "counting words")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--redundant", type=int, default=2, help="extra copies of experts in each layer")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=24, help="most tokens that are generated for a prompt")
    parser.add_argument("--sequences", type=int, default=12, help="running at once, per rank")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--split", default="dynamic", choices=("dynamic", "static", "random"), help="how replicas are used"
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


def answer(args: argparse.Namespace, first: int, placement: Path | None, folder: Path) -> dict[str, Any]:
    """Start an engine, warm it up, answer prompts number `first` and up, and write trace and record into `folder`."""
    draw = random.Random(first)
    prompts = [
        [{"role": "user", "content": f"Write a Python function for {TOPICS[i % len(TOPICS)]}, variant {i}."}]
        for i in range(first, first + args.prompts)
    ]
    lengths = [draw.randint(max(1, args.tokens // 4), args.tokens) for _ in prompts]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    with LLM(
        model=args.model, ep=args.ep, ep_dispatch_algorithm=args.split, max_num_seqs=args.sequences, overlap="off",
        init_expert_location=None if placement is None else str(placement), enable_prefix_caching=False,
        log_level="warning",
    ) as llm:  # fmt: skip
        cores = pin_ranks()
        assert len(cores) == args.ep
        llm.chat(prompts[: 2 * args.ep], params[: 2 * args.ep], use_tqdm=False)
        llm.start_expert_distribution_record()
        llm.start_profile(1000)
        begin = time.perf_counter()
        outputs = llm.chat(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        llm.stop_profile(folder / "trace.json")
        llm.dump_expert_distribution_record(folder / "record")
    times = read_times(folder / "trace.json")
    tokens = sum(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs)
    return {
        "tokens_per_s": tokens / seconds,
        "moe_ms": times.moe_ms,
        "fullest_ms": times.fullest_ms,
        "moe_share": times.moe_ms / times.step_ms,
        "balancedness": times.balancedness,
        "times": times,
        "tokens": [o.outputs[0].token_ids for o in outputs],
    }


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


def compare(args: argparse.Namespace, plan: Path, scratch: Path) -> list[dict[str, Any]]:
    """Rounds of the same prompts under both placements, none of which the plan has seen."""
    rounds, answers = [], None
    for number in range(args.rounds):
        runs = {}
        for name, placement in (("contiguous", None), ("planned", plan)):
            folder = scratch / f"{number}{name}"
            folder.mkdir()
            runs[name] = answer(args, args.prompts, placement, folder)
            answers = answers or runs[name]["tokens"]
            same = sum(a == b for a, b in zip(runs[name]["tokens"], answers, strict=True))
            told = {key: runs[name][key] for key in ("tokens_per_s", "moe_ms", "fullest_ms", "balancedness")}
            print(
                f"round {number} {name:10}: {', '.join(f'{k} {v:.3f}' for k, v in told.items())},"
                f" {same} of {args.prompts} answers the same",
                flush=True,
            )
            runs[name] |= {"same_answers": same}
        before, after = runs["contiguous"], runs["planned"]
        rounds.append(
            {
                "gain": 1 - after["moe_ms"] / before["moe_ms"],
                "experts_gain": 1 - after["fullest_ms"] / before["fullest_ms"],
                "faster": after["tokens_per_s"] / before["tokens_per_s"],
                **{n: {k: v for k, v in r.items() if k not in ("tokens", "times")} for n, r in runs.items()},
            }
        )
    return rounds


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
        "achieved_gain": statistics.mean(r["gain"] for r in rounds),
        "achieved_gains": [r["gain"] for r in rounds],
        "achieved_faster": statistics.mean(r["faster"] for r in rounds),
    }


def main(argv: list[str]) -> int:
    """Record, plan, compare."""
    args = build_parser().parse_args(argv)
    assert args.split in SPLITS
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        first = answer(args, 0, None, scratch)
        verdict = predict(args, scratch / "record", scratch / "report")
        rounds = compare(args, scratch / "report/placement.json", scratch)
    result = predicted_against(first["times"], verdict, rounds)
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
