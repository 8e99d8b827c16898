"""`launch/plan.py convert`: a placement file from one format to another, checked on the way."""

from __future__ import annotations

import argparse
from pathlib import Path

from moe_runtime.errors import ConfigError
from moe_runtime.placement.formats import FORMATS, read_file, write_placement
from moe_runtime.placement.stored import Model, StoredLoads, StoredPlacement
from moe_runtime.placement.validate import to_placement
from moe_runtime.tools.plan_inputs import add_model_arguments, model_of, number

HELP = "convert a placement file between this project's format and its peers', or just check it"
EPILOG = """\
formats
  moe_runtime            ours: JSON with the checkpoint's identity and the reasons; the only one with empty slots
  sglang_pt sglang_json  SGLang's --init-expert-location (physical_to_logical_map)
  trtllm                 TensorRT-LLM's moe_config.load_balancer, YAML
  vllm                   vLLM: JSON, one list of slots for all layers or one per layer
  vllm_ascend            vllm-ascend's expert_map_path, JSON
  eplb                   arrays of DeepSeek's EPLB, npz: phy2log, log2phy, logcnt
  Files are told apart by their content; the format to write by OUT's suffix: .json ours, .pt, .yaml, .npz.

layers
  SGLang counts all decoder layers, the others those with experts, TensorRT-LLM by their number in the decoder. For a
  model that also has layers without experts, say so by --model, or by --moe-layers 3-60 --decoder-layers 61.

examples
  launch/plan.py convert placement.pt --ep 8                          # only check and describe
  launch/plan.py convert placement.pt placement.json --ep 8 --model DIR
  launch/plan.py convert placement.json map.json --to vllm_ascend
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own."""
    parser.add_argument("source", metavar="IN", type=Path, help="a placement file of any format")
    parser.add_argument(
        "target", metavar="OUT", type=Path, nargs="?", help="the file to write; without it IN is only checked"
    )
    parser.add_argument(
        "--from", dest="source_format", choices=FORMATS, help="format of IN (default: told by its content)"
    )
    parser.add_argument(
        "--to", dest="target_format", choices=FORMATS, help="format of OUT (default: told by its suffix)"
    )
    parser.add_argument(
        "--ep", type=number, metavar="N", help="number of ranks; needed if the file does not say"
    )
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> str:
    """Convert, and say what was read and written. Raises ConfigError."""
    stored = read_file(args.source, args.source_format)
    if isinstance(stored, StoredLoads):
        raise ConfigError(
            f"{args.source}: holds loads of experts, not a placement; `launch/plan.py plan` makes one from them"
        )
    if args.target is None and args.target_format is not None:
        raise ConfigError("--to needs OUT, the file to write")
    model = _model(args, stored)
    placement = to_placement(stored, model, str(args.source))
    slots = len(placement.slots[0][0])
    copies = sum(expert >= 0 for layer in placement.slots for rank in layer for expert in rank) / len(
        placement.slots
    )
    text = (
        f"{args.source}: {stored.format}, {len(placement.slots)} layers, {placement.num_experts} experts,"
        f" {model.num_ranks} ranks with {slots} slots, {copies - placement.num_experts:g} redundant experts: valid"
    )
    if args.target is not None:
        name = write_placement(args.target, placement, model, args.target_format, stored.why)
        text += f"\n{args.target}: written as {name}"
    return text


def _model(args: argparse.Namespace, stored: StoredPlacement) -> Model:
    """What flags and checkpoint say, and else the file itself: its layers, and as many experts as its highest one implies."""
    num_ranks = args.ep or (len(stored.slots[0]) if stored.ranks_known else None)
    if num_ranks is None:
        raise ConfigError(
            f"{args.source}: format {stored.format} does not say how many ranks there are: give --ep N"
        )
    highest = max((expert for layer in stored.slots for rank in layer for expert in rank), default=0)
    num_layers = len(stored.slots)
    if stored.for_every_layer and args.model is None and args.moe_layers is None:
        raise ConfigError(
            f"{args.source}: has one list for all layers: say which they are by --model or --moe-layers"
        )
    # Where they have numbers, those tell which layers of the decoder they are.
    layers = tuple(range(num_layers)) if stored.layer_ids is None else tuple(sorted(set(stored.layer_ids)))
    return model_of(args, num_ranks, layers, stored.num_experts or max(highest + 1, 1), stored.checkpoint)
