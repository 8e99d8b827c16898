"""`launch/plan.py plan`: a placement from recorded load.

Legend: W windows, L MoE layers, E experts, N ranks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from moe_runtime.core import ExpertPlacement
from moe_runtime.errors import ConfigError
from moe_runtime.placement.formats import FORMATS, read_placement, write_placement
from moe_runtime.placement.layout import check_redundant, contiguous
from moe_runtime.placement.planner import ALGORITHMS, plan
from moe_runtime.placement.stored import Array, Model
from moe_runtime.tools.plan_inputs import add_model_arguments, cluster_of, count, model_of, number, read_loads

HELP = "plan a placement from recorded load and write it with its reasons"
EPILOG = """\
what it does
  RECORD is a folder written by launch/generate.py --record or by a server's /dump_expert_distribution_record; or a file of
  SGLang's (logical_count, .pt or .json) or EPLB's (weight, .npz) statistics. The result is for
  `launch/serve.py --init-expert-location FILE`, or for a peer (--to). The load of a rank that is printed is its share if every
  replica of an expert gets equally many tokens, relative to the mean: 1 is perfect.

examples
  launch/plan.py plan record -o placement.json                       # for as many ranks as recorded, no spare slots
  launch/plan.py plan record -o placement.json --ep 16 --redundant 32 --topology nodes=2x8
  launch/plan.py plan record -o placement.yaml --algorithm deepseek  # EPLB's algorithm, for TensorRT-LLM
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own."""
    parser.add_argument(
        "record", metavar="RECORD", type=Path, help="a record's folder, or a file of statistics"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, required=True, help="the placement file to write"
    )
    parser.add_argument(
        "--to",
        dest="format",
        choices=FORMATS,
        help="its format (default: told by its suffix; see convert --help)",
    )
    parser.add_argument("--ep", type=number, metavar="N", help="number of ranks (default: as recorded)")
    parser.add_argument(
        "--redundant",
        type=count,
        default=0,
        metavar="R",
        help="extra copies of experts in each layer, any number (default: 0)",
    )
    parser.add_argument("--topology", metavar="nodes=AxB", help="A nodes of B ranks (default: one node)")
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="ours", help="how to plan (default: ours)")
    parser.add_argument(
        "--groups",
        type=number,
        default=1,
        metavar="G",
        help="expert groups of the model, for deepseek's hierarchical form",
    )
    parser.add_argument(
        "--current",
        metavar="FILE",
        type=Path,
        help="placement in force, from which to move little (default: none)",
    )
    parser.add_argument(
        "--cover-loss", action="store_true", help="every expert survives the loss of any one rank"
    )
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> str:
    """Plan, write, and tell what was gained. Raises ConfigError."""
    given = read_loads(args.record)
    ep = args.ep or (given.record.meta.num_ranks if given.record else None)
    if ep is None:
        raise ConfigError(f"{args.record}: does not say how many ranks there are: give --ep N")
    cluster = cluster_of(args.topology, ep)
    num_experts = given.loads_WLE.shape[2]
    layers = tuple(range(given.loads_WLE.shape[1]))
    model = model_of(args, ep, layers, num_experts, given.checkpoint)
    if given.checkpoint and model.checkpoint != given.checkpoint:
        raise ConfigError(f"{args.record}: was recorded with another checkpoint than {args.model}")
    if model.num_experts != num_experts:
        raise ConfigError(f"{args.record}: has {num_experts} experts, the model {model.num_experts}")
    check_redundant(args.redundant, num_experts, ep)
    loads_WLE = given.loads_WLE[:, model.pick_layers(len(layers), None, str(args.record))]
    current = read_placement(args.current, model) if args.current else None
    result = plan(
        loads_WLE, cluster, num_slots=num_experts + args.redundant, algorithm=args.algorithm, current=current,
        max_moved=1.0, cover_loss=args.cover_loss, num_groups=args.groups,
    )  # fmt: skip
    load_LE = loads_WLE.sum(axis=0)
    why = [*result.notes, *replica_reasons(result.placement, load_LE, model)]
    name = write_placement(args.output, result.placement, model, args.format, why)
    before = current or contiguous(len(model.moe_layers), num_experts, ep)
    lines = [f"{'fullest rank / mean rank':28}{'mean layer':>12}{'worst layer':>13}"]
    for label, placement in (("before" if current else "in order", before), ("planned", result.placement)):
        ratio_L = fullest_ratio(placement, load_LE)
        lines.append(f"  {label:26}{ratio_L.mean():12.3f}{ratio_L.max():13.3f}")
    lines += [f"note: {note}" for note in result.notes]
    width = len(result.placement.slots[0][0])
    return "\n".join([*lines, f"{args.output}: written as {name}; {width} slots on each of {ep} ranks"])


def fullest_ratio(placement: ExpertPlacement, load_LE: Array) -> Array:
    """float64 (L,): load of the fullest rank over that of the mean rank, replicas of an expert sharing equally."""
    ratio = []
    for ranks, load_E in zip(placement.slots, load_LE, strict=True):
        slots_Np = np.array(ranks)
        count_E = np.bincount(slots_Np[slots_Np >= 0], minlength=len(load_E))
        share_E = load_E / count_E
        rank_N = np.where(slots_Np >= 0, share_E[slots_Np], 0.0).sum(axis=1)
        ratio.append(rank_N.max() / rank_N.mean() if rank_N.any() else 1.0)
    return np.array(ratio)


def replica_reasons(placement: ExpertPlacement, load_LE: Array, model: Model) -> list[str]:
    """A sentence for each expert with more than one replica."""
    sentences = []
    for index, ranks in enumerate(placement.slots):
        mean = load_LE[index].mean() or 1.0
        for expert in range(placement.num_experts):
            where = [rank for rank, experts in enumerate(ranks) if expert in experts]
            if len(where) > 1:
                sentences.append(
                    f"{model.layer_name(index)}: expert {expert} has {len(where)} replicas (ranks {', '.join(map(str, where))})"
                    f" because its load is {load_LE[index, expert] / mean:.2f} times the mean"
                )
    return sentences
