"""Placements of experts: convert them, plan them from recorded load, try them out, judge them.

    python launch/generate.py --record record ...                          # or record on a running server
    python launch/plan.py plan record -o placement.json --ep 8 --redundant 16
    python launch/plan.py simulate record --ep 8,16 --redundant 0,16,32
    python launch/plan.py report record -o report
    torchrun launch/serve.py --ep 8 --init-expert-location placement.json
    python launch/plan.py convert placement.json placement.pt --model DIR   # for SGLang

Each command explains itself: python launch/plan.py COMMAND --help
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    # Python puts launch/ first; the package lies beside it.
    sys.path.insert(0, str(ROOT))

from moe_runtime.errors import MoeRuntimeError
from moe_runtime.tools import plan_convert, plan_plan, plan_report, plan_simulate

COMMANDS = {"convert": plan_convert, "plan": plan_plan, "simulate": plan_simulate, "report": plan_report}
"""Each module has HELP, EPILOG, add_arguments(parser) and run(args), which returns the text to print."""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="launch/plan.py",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP[0].upper() + module.HELP[1:] + ".",
            epilog=module.EPILOG,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: list[str]) -> int:
    """0: done; 1: it cannot be done, and one line on standard error says why; 2: wrong usage."""
    args = build_parser().parse_args(argv)
    try:
        print(args.run(args))
    except MoeRuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
