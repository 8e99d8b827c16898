"""This engine and its peers on one CPU machine, in turns, with the same checkpoint: the ratios of their speeds.

    python benchmarks/bench_peers.py --model DIR --scripts BENCH --environments PEERS --rounds 5 --result result.json

BENCH holds the peers' scripts (bench_hf.py, bench_vllm.py, bench_llamacpp.py, bench_ov.py; each prints one line of JSON), PEERS a virtual
environment for each: PEERS/vllm/bin/python, PEERS/ov/bin/python, PEERS/lcb/bin/python with PEERS/llamacpp/bin. transformers runs in the
environment of this program. A peer that is not installed is left out by name.

Per cell and round each engine runs once, in a process of its own: ours, then the peers. All generate greedily from random tokens
of their own choice, without a prefix cache, and count alike: prefill is the time of one token, decode that of --output-len tokens less that of one.
A round's figure is the median of --repeats; a ratio is ours over the peer's of the same round, so that a machine whose speed drifts
bears on both; the table has their median, least and largest. Peers that watch for other processes wait for a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench_engine import Cell
from moe_runtime import __version__

BENCHMARKS = Path(__file__).parent


@dataclass(frozen=True)
class Peer:
    """How a peer is run; `variants` by the width of the weights, in its script's words."""

    name: str
    script: str
    python: str
    variants: dict[str, str]
    needs: tuple[str, ...] = ()

    def problem(self, args: argparse.Namespace) -> str | None:
        """Why it cannot run with weights of this width, or None."""
        if args.weights not in self.variants:
            return f"has no {args.weights} weights; allowed are {', '.join(self.variants)}"
        wanted = [
            args.scripts / self.script,
            Path(self.interpreter(args)),
            *(args.environments / n for n in self.needs),
        ]
        missing = [str(path) for path in wanted if not path.exists()]
        return f"not installed: no {', '.join(missing)}" if missing else None

    def interpreter(self, args: argparse.Namespace) -> str:
        """The Python that runs its script."""
        return str(args.environments / self.python) if self.python else sys.executable

    def run(self, cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
        """What its script printed. Raises RuntimeError if it failed."""
        command = [
            self.interpreter(args), str(args.scripts / self.script), "--model", str(args.model),
            "--variant", self.variants[args.weights], "--prompt-len", str(cell.prompt_len),
            "--gen-len", str(args.output_len if cell.decode else 1), "--batch", str(cell.num_prompts),
            "--repeat", str(args.repeats), "--threads", str(args.threads), "--quiet-wait", str(args.quiet_wait),
        ]  # fmt: skip
        folders = {
            "LLAMA_DIR": str(args.environments / "llamacpp"),
            "GGUF_DIR": str(args.environments / "models"),
        }
        done = finished(command, args.timeout, folders)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            raise RuntimeError(
                f"{self.name} on {cell.name} ended with {done.returncode}: {done.stderr[-800:]}"
            )
        said: dict[str, Any] = json.loads(lines[-1])
        return {
            "tok_s": said["decode_tok_s" if cell.decode else "prefill_tok_s"], "version": said["version"],
            "others_cpu": said["foreign_cpu_max"], "anonymous_mib": said["peak_anon_mib"],
        }  # fmt: skip


PEERS = (
    Peer("transformers", "bench_hf.py", "", {"bf16": "grouped_mm"}),
    Peer("vllm", "bench_vllm.py", "vllm/bin/python", {"bf16": ""}),
    Peer(
        "llama.cpp", "bench_llamacpp.py", "lcb/bin/python", {"bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}, ("llamacpp/bin",)
    ),
    Peer("openvino", "bench_ov.py", "ov/bin/python", {"bf16": "bf16", "int8": "int8", "int4": "int4"}),
)  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--scripts", required=True, type=Path, help="folder of the peers' scripts")
    parser.add_argument("--environments", required=True, type=Path, help="folder of the peers' environments")
    parser.add_argument(
        "--peers", nargs="+", choices=[p.name for p in PEERS], default=[p.name for p in PEERS]
    )
    parser.add_argument(
        "--cells", nargs="+", default=["decode1", "decode16", "decode64", "prefill1024", "prefill16x128"],
        help="decode<B>, prefill<length>, prefill<B>x<length>",
    )  # fmt: skip
    parser.add_argument("--weights", choices=("bf16", "int8", "int4"), default="bf16")
    parser.add_argument("--prompt-len", type=int, default=128, help="of decode cells")
    parser.add_argument("--output-len", type=int, default=64, help="tokens that a decode cell generates")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="in one process")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the peers")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one engine's one cell")
    parser.add_argument(
        "--quiet-wait", type=float, default=60.0, help="seconds that a peer waits for a quiet machine"
    )
    parser.add_argument("--result", type=Path, help="JSON file to write")
    return parser


def finished(
    command: list[str], timeout: float, more: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command's output. Raises RuntimeError if it takes too long."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, **(more or {})},
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{shlex.join(command)}: not over after {timeout:.0f} s") from error


def run_ours(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """As `Peer.run`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [
            sys.executable, str(BENCHMARKS / "bench_engine.py"), "--model", str(args.model), "--cells", cell.name,
            "--prompt-len", str(args.prompt_len), "--output-len", str(args.output_len), "--repeats", str(args.repeats),
            "--result", str(file),
        ]  # fmt: skip
        if args.weights != "bf16":
            command += ["--quantization", args.weights]
        done = finished(command, args.timeout)
        if done.returncode:
            raise RuntimeError(f"ours on {cell.name} ended with {done.returncode}: {done.stderr[-800:]}")
        said = json.loads(file.read_text())
    (row,) = said["rows"]
    return {"tok_s": row["tok_s"], "version": f"moe-runtime {said['version']}", "share": row["share"]}


def main() -> None:
    """Print the table, write the JSON file."""
    args = build_parser().parse_args()
    cells = [Cell.parse(text, args.prompt_len) for text in args.cells]
    peers = []
    for peer in (p for p in PEERS if p.name in args.peers):
        problem = peer.problem(args)
        if problem:
            print(f"{peer.name}: left out: {problem}")
        else:
            peers.append(peer)
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for cell in cells:
        of_cell = results[cell.name] = {"ours": [], **{peer.name: [] for peer in peers}}
        for number in range(args.rounds):
            of_cell["ours"].append(run_ours(cell, args))
            for peer in peers:
                of_cell[peer.name].append(peer.run(cell, args))
            speeds = ", ".join(f"{name} {runs[-1]['tok_s']:.1f}" for name, runs in of_cell.items())
            print(f"{cell.name}, round {number + 1} of {args.rounds}: {speeds} tok/s", flush=True)
    print(table(results))
    if args.result:
        about = {
            "command": shlex.join(["python", *sys.argv]), "cpus": os.cpu_count(), "platform": platform.platform(),
            "version": __version__,
        }  # fmt: skip
        args.result.write_text(json.dumps({**about, "results": results}, indent=2) + "\n")


def table(results: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """Markdown. Medians of tokens per second, and of the rounds' ratios with the least and the largest."""
    lines = ["| cell | engine | tok/s | ours over it (least to largest) |", "|---|---|---|---|"]
    for cell, engines in results.items():
        ours = [run["tok_s"] for run in engines["ours"]]
        for name, runs in engines.items():
            speeds = [run["tok_s"] for run in runs]
            ratios = [a / b for a, b in zip(ours, speeds, strict=True)]
            ratio = (
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                if name != "ours"
                else ""
            )
            lines.append(f"| {cell} | {name} | {statistics.median(speeds):.1f} | {ratio} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
