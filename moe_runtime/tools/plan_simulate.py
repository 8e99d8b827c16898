"""`launch/plan.py simulate`: recorded traffic under other numbers of ranks, redundant experts and algorithms."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_runtime.errors import ConfigError
from moe_runtime.placement.cost import Cluster, Hardware
from moe_runtime.placement.intervals import CONFIDENCE, Estimate
from moe_runtime.placement.planner import ALGORITHMS
from moe_runtime.placement.record import PHASES, split_of_record
from moe_runtime.placement.run_time_split import ALL_SPLITS
from moe_runtime.placement.simulate import Outcome, Setting, pareto, simulate
from moe_runtime.tools.pareto_svg import pareto_svg
from moe_runtime.tools.plan_inputs import counts, read_record

HELP = "replay recorded traffic under other settings: time, throughput, bytes, balance"
EPILOG = """\
what it does
  For each number of ranks, of redundant experts, algorithm and split, a placement is planned from the first half of the
  recorded windows and judged by the second half (--in-sample: both from all). Times come from a cost model of the hardware
  and count the MoE layers only, so compare settings with one another. The traffic is the recorded one, whatever the number of
  ranks: its tokens are dealt to them anew. Intervals hold 90 % of what windows drawn anew would give.

columns
  step      MoE time of a step; ktok/s: tokens per second of all ranks, and of each; *: no other setting has both a shorter
            step and more tokens per rank
  fullest   expert rows per step of the rank that has most, all layers together
  balanced  rows of the mean rank / rows of the fullest rank, summed over layers: 1 is perfect
  MB/step   bytes between ranks, in the node and (far) between nodes: from the routes of single tokens if the record has some,
            else expected from counts; the first line says which. GiB: experts' weights on a rank

examples
  launch/plan.py simulate record
  launch/plan.py simulate record --ep 8,16,32 --redundant 0,16,32 --topology nodes=4x8 --hardware h200 --svg pareto.svg
  launch/plan.py simulate record --algorithm ours,deepseek --split waterfill,static --phase decode --json out.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own."""
    parser.add_argument("record", metavar="RECORD", type=Path, help="a record's folder")
    parser.add_argument(
        "--ep", type=counts, metavar="LIST", help="numbers of ranks, as 8,16,32 (default: as recorded)"
    )
    parser.add_argument(
        "--redundant",
        type=counts,
        default=(0,),
        metavar="LIST",
        help="numbers of redundant experts (default: 0)",
    )
    parser.add_argument(
        "--topology", metavar="nodes=AxB",
        help="at most A nodes of B ranks; fewer ranks take the first nodes (default: one node holds all)",
    )  # fmt: skip
    parser.add_argument(
        "--hardware", default="h200", metavar="NAME", help="h200, b200, cpu or FILE.yaml (default: h200)"
    )
    parser.add_argument(
        "--algorithm",
        type=names,
        default=("contiguous", "ours"),
        metavar="LIST",
        help=f"of {', '.join(ALGORITHMS)} (default: contiguous,ours)",
    )
    parser.add_argument(
        "--split",
        type=names,
        metavar="LIST",
        help=f"of {', '.join(ALL_SPLITS)} (default: as recorded; waterfill if the record does not say)",
    )
    parser.add_argument(
        "--phase", choices=(*PHASES, "all"), default="all", help="which tokens count (default: all)"
    )
    parser.add_argument(
        "--in-sample", action="store_true", help="judge by the windows that were planned from"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there too")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a Pareto plot there")


def names(text: str) -> tuple[str, ...]:
    """An argument as `ours,deepseek`."""
    return tuple(part.strip() for part in text.split(","))


def run(args: argparse.Namespace) -> str:
    """Simulate all settings; the table. Raises ConfigError."""
    record = read_record(args.record)
    splits = args.split or (split_of_record(record.meta),)
    for what, given, allowed in (("algorithm", args.algorithm, ALGORITHMS), ("split", splits, ALL_SPLITS)):
        if wrong := [name for name in given if name not in allowed]:
            raise ConfigError(f"--{what} {wrong[0]}: choose from {', '.join(allowed)}")
    settings = [
        Setting(cluster_for(args.topology, ep), redundant, algorithm, split)
        for ep in args.ep or (record.meta.num_ranks,)
        for redundant in args.redundant
        for algorithm in args.algorithm
        for split in splits
    ]
    hardware = Hardware.named(args.hardware)
    outcomes = simulate(record, settings, hardware, args.phase, not args.in_sample)
    judged = outcomes[0].replay
    title = (
        f"{record.meta.model}, {args.phase} tokens, on {hardware.name}: {len(judged.step_us_W)} windows judged;"
        f" bytes from {judged.bytes_from}"
    )
    text = table(outcomes, title)
    if args.json is not None:
        _write(
            args.json,
            json.dumps({"title": title, "outcomes": [as_json(o) for o in outcomes]}, indent=1) + "\n",
        )
    if args.svg is not None:
        _write(args.svg, pareto_svg(outcomes, title))
    return text


def cluster_for(topology: str | None, num_ranks: int) -> Cluster:
    """The first nodes of a topology that hold `num_ranks`. Raises ConfigError if they do not fill whole nodes, or are too many."""
    if num_ranks < 1:
        raise ConfigError("--ep 0: there must be at least one rank")
    if topology is None:
        return Cluster.single(num_ranks)
    whole = Cluster.parse(topology)
    if num_ranks <= whole.ranks_per_node:
        return Cluster.single(num_ranks)
    nodes, rest = divmod(num_ranks, whole.ranks_per_node)
    if rest or nodes > whole.num_nodes:
        raise ConfigError(
            f"--ep {num_ranks} does not fit --topology {topology}: allowed are up to {whole.ranks_per_node} ranks, or multiples"
            f" of that up to {whole.num_ranks}"
        )
    return Cluster(nodes, whole.ranks_per_node)


def table(outcomes: Sequence[Outcome], title: str) -> str:
    """For a terminal of 130 columns."""
    head = (
        f"  {'ep':>4} {'spare':>5} {'algorithm':10} {'split':11} {'step us':>9} {'90 % interval':>19} {'ktok/s':>9}"
        f" {'per rank':>8} {'fullest':>8} {'balanced':>8} {'MB/step':>8} {'far':>8} {'GiB':>6}"
    )
    lines = [title, head]
    for outcome, best in zip(outcomes, pareto(outcomes), strict=True):
        setting, replayed = outcome.setting, outcome.replay
        lines.append(
            f"{'*' if best else ' '} {setting.cluster.num_ranks:4} {setting.redundant:5} {setting.algorithm:10} {setting.split:11}"
            f" {outcome.step_us.mean:9.1f} {_interval(outcome.step_us):>19} {outcome.tokens_per_s.mean / 1e3:9.1f}"
            f" {outcome.tokens_per_s_per_rank / 1e3:8.2f} {replayed.fullest_rows:8.0f} {replayed.balancedness:8.3f} {replayed.sent_bytes_W.mean() / 1e6:8.2f}"
            f" {replayed.internode_bytes_W.mean() / 1e6:8.2f} {outcome.expert_bytes_per_rank / 2**30:6.2f}"
        )
    return "\n".join(lines)


def _interval(estimate: Estimate) -> str:
    return f"{estimate.low:.1f} - {estimate.high:.1f}" if estimate.low == estimate.low else "one window"


def as_json(outcome: Outcome) -> dict[str, Any]:
    """All numbers of an outcome, intervals as [low, high] or null."""

    def estimate(value: Estimate) -> dict[str, Any]:
        bounds = [value.low, value.high] if value.low == value.low else None
        return {"mean": value.mean, "interval": bounds, "confidence": CONFIDENCE}

    setting, replayed = outcome.setting, outcome.replay
    return {
        "ep": setting.cluster.num_ranks,
        "nodes": setting.cluster.num_nodes,
        "redundant": setting.redundant,
        "algorithm": setting.algorithm,
        "split": setting.split,
        "step_us": estimate(outcome.step_us),
        "tokens_per_s": estimate(outcome.tokens_per_s),
        "balancedness": replayed.balancedness,
        "steps": replayed.steps_W.tolist(),
        "rank_rows": replayed.rank_rows.tolist(),
        "bytes_from": replayed.bytes_from,
        "node_bytes_per_step": replayed.sent_bytes_W.tolist(),
        "internode_bytes_per_step": replayed.internode_bytes_W.tolist(),
        "step_us_by_window": replayed.step_us_W.tolist(),
        "tokens_per_step": replayed.tokens_W.tolist(),
        "expert_bytes_per_rank": outcome.expert_bytes_per_rank,
    }


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
