"""Does a plan pay? The same skewed traffic without and with it, on real ranks: tokens a second, predicted and achieved gain.

    python benchmarks/bench_placement.py --model demo --ep 2 --redundant 2 --rounds 3

The first run records the load of all prompts. A placement is planned from it by `launch/plan.py report`, whose predicted gain of the MoE
layers' time is shown. Then runs alternate between the contiguous placement and the plan, each engine started anew, with one
warm-up batch. The tokens must be the same. The predicted share concerns MoE layers only, so the gain of the whole step is smaller; the
experts' part of the time is taken from a trace (`LLM.start_profile`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from moe_runtime import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
TOPICS = ("the sum of two integers", "binary search", "a prime sieve", "reading a file", "counting words")

PLANNED_FOR = {"dynamic": "waterfill", "static": "static", "random": "random"}
"""What launch/plan.py calls the ways of --ep-dispatch-algorithm."""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--redundant", type=int, default=2, help="extra copies of experts in each layer")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8, help="generated for each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--split", default="dynamic", choices=list(PLANNED_FOR), help="of --ep-dispatch-algorithm"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    return parser


def run(args: argparse.Namespace, placement: Path | None, record: Path | None) -> dict[str, Any]:
    """Start an engine, warm it up, and answer all prompts once."""
    prompts = [
        [{"role": "user", "content": f"Write a Python function for {TOPICS[i % len(TOPICS)]}, variant {i}."}]
        for i in range(args.prompts)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    settings: dict[str, Any] = {"model": args.model, "ep": args.ep, "ep_dispatch_algorithm": args.split}
    if placement is not None:
        settings["init_expert_location"] = str(placement)
    with LLM(**settings, enable_prefix_caching=False, log_level="warning") as llm:
        llm.chat(prompts[: 2 * args.ep], params, use_tqdm=False)
        llm.start_expert_distribution_record()
        llm.start_profile(1000)
        begin = time.perf_counter()
        outputs = llm.chat(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        kinds = llm.stop_profile(record.parent / "trace.json" if record else None).summary["ranks"]
        if record is not None:
            llm.dump_expert_distribution_record(record)
    tokens = sum(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs)
    experts_ms = max(rank["ms_by_kind"]["experts"] for rank in kinds)
    return {
        "tokens_per_s": tokens / seconds,
        "experts_ms": experts_ms,
        "experts_share": experts_ms / max(rank["step_ms"] for rank in kinds),
        "tokens": [o.outputs[0].token_ids for o in outputs],
    }


def main(argv: list[str]) -> int:
    """Record, plan, compare."""
    args = build_parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        record, report = Path(folder) / "record", Path(folder) / "report"
        first = run(args, None, record)
        command = [sys.executable, str(ROOT / "launch/plan.py"), "report", str(record), "-o", str(report)]
        command += [
            "--hardware",
            "cpu",
            "--split",
            PLANNED_FOR[args.split],
            "--redundant",
            str(args.redundant),
        ]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        predicted = json.loads((report / "report.json").read_text())["verdict"]
        results: dict[str, list[dict[str, Any]]] = {"contiguous": [], "planned": []}
        for number in range(args.rounds):
            for name, placement in (("contiguous", None), ("planned", report / "placement.json")):
                result = run(args, placement, None)
                same = sum(a == b for a, b in zip(result["tokens"], first["tokens"], strict=True))
                results[name].append(result)
                print(
                    f"round {number} {name:10}: {result['tokens_per_s']:7.1f} tokens/s, fullest rank's experts"
                    f" {result['experts_ms']:7.0f} ms ({100 * result['experts_share']:.0f} % of the steps),"
                    f" {same} of {args.prompts} answers as before",
                    flush=True,
                )
    medians = {
        name: {key: statistics.median(r[key] for r in runs) for key in ("tokens_per_s", "experts_ms")}
        for name, runs in results.items()
    }
    achieved = 1 - medians["planned"]["experts_ms"] / medians["contiguous"]["experts_ms"]
    faster = medians["planned"]["tokens_per_s"] / medians["contiguous"]["tokens_per_s"]
    print(f"predicted: {predicted}")
    print(
        f"achieved : {100 * achieved:.1f} % less time in the fullest rank's experts; throughput x {faster:.3f}"
    )
    if args.output:
        summary = {"arguments": vars(args) | {"output": None}, "predicted": predicted, "medians": medians}
        args.output.write_text(
            json.dumps(summary | {"achieved": achieved, "faster": faster}, indent=1, default=str)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
