"""Converts a checkpoint of DeepSpeed-MoE layers to a model folder in the hub's layout.

python -m moe_runtime.tools.import_deepspeed IN OUT --config HUB_FOLDER
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from tqdm import tqdm

from moe_runtime.errors import MoeRuntimeError
from moe_runtime.weights.deepspeed_import import ImportOptions, import_deepspeed

PROG = "python -m moe_runtime.tools.import_deepspeed"
EPILOG = f"""\
what is read
  IN/latest names the tag; in its folder mp_rank_00_model_states.pt holds all but the experts, and each
  layer_L_expert_E_mp_rank_00_model_states.pt one expert. They are read as tensors and plain values only, so a
  checkpoint cannot run code. Other files, such as optimizer states, are not converted, and that is said.
  Not supported: tensor or pipeline parallelism, ZeRO stage 3, AutoEP, residual MoE, experts with biases.

names
  OUT has the names of the architecture in config.json. Routers and experts are found by DeepSpeed's own names;
  their decoder layer is the number in front of `.deepspeed_moe.`. All other tensors keep their names, so a model
  built from transformers' classes with its MLPs replaced needs no option. For others:

    {PROG} ckpt out --config Mixtral-8x7B \\
        --rename '^backbone\\.h\\.=model.layers.' --rename '\\.attn\\.=.self_attn.' --experts ffn.gate,ffn.up,ffn.down

outputs
  They are those of DeepSpeed's layer with drop_tokens=False and top2_2nd_expert_sampling=False: serving here drops no
  token and samples no expert. num_experts_per_tok in config.json must be the k that the layers were trained with.

exit status: 0 done, 1 the checkpoint cannot be converted (OUT is then not there), 2 wrong usage
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=PROG,
        description=(__doc__ or "").partition("\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source", metavar="IN", type=Path, help="what engine.save_checkpoint wrote: its folder, or one tag's"
    )
    parser.add_argument("target", metavar="OUT", type=Path, help="the folder to make; it must not exist yet")
    parser.add_argument(
        "--config", type=Path, metavar="PATH",
        help="config.json of the model, or its folder on the hub, whose tokenizer files are then copied too (default: IN's)",
    )  # fmt: skip
    parser.add_argument(
        "--experts", type=_expert_names, metavar="GATE,UP,DOWN",
        help="what the expert module calls its three matrices (default: gate_proj,up_proj,down_proj or w1,w3,w2)",
    )  # fmt: skip
    parser.add_argument(
        "--rename", type=_rename, action="append", default=[], metavar="REGEX=TEXT",
        help="replace in tensor names, before anything else; may be given several times, applied in order",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def _expert_names(text: str) -> tuple[str, str, str]:
    names = text.split(",")
    if len(names) != 3 or len(set(names)) != 3 or not all(names):
        raise argparse.ArgumentTypeError(
            f"{text!r}: three different names with commas between them are needed"
        )
    gate, up, down = names
    return gate, up, down


def _rename(text: str) -> tuple[str, str]:
    pattern, equals, replacement = text.partition("=")
    if not pattern or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: REGEX=TEXT is needed")
    try:
        re.compile(pattern)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    return pattern, replacement


def main(argv: list[str] | None = None) -> int:
    """Convert and say what was done. Returns the exit status."""
    args = build_parser().parse_args(argv)
    options = ImportOptions(args.source, args.target, args.config, args.experts, tuple(args.rename))
    try:
        with tqdm(unit="B", unit_scale=True, desc="Writing", delay=0.3, disable=args.quiet) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            report = import_deepspeed(options, progress)
    except MoeRuntimeError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    if report.left_out:
        count, first = len(report.left_out), report.left_out[0]
        sys.stdout.write(f"not converted: {first}{f' and {count - 1} more' if count > 1 else ''}\n")
    sys.stdout.write(
        f"{args.target}: {report.num_tensors} tensors, {report.num_bytes / 1e6:.1f} MB; {', '.join(report.copied)}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
