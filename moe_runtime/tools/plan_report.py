"""`launch/plan.py report`: a verdict on a placement, and what is behind it, as a page, as JSON and as Markdown."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec

from moe_runtime.core import ExpertPlacement
from moe_runtime.errors import ConfigError
from moe_runtime.placement.cost import Hardware
from moe_runtime.placement.format_text import write_ours
from moe_runtime.placement.formats import read_file, read_placement
from moe_runtime.placement.record import PHASES, LoadRecord
from moe_runtime.placement.report import Analysis, analyse, prediction
from moe_runtime.placement.report_data import Prediction, Report
from moe_runtime.placement.report_setup import Options
from moe_runtime.placement.run_time_split import ALL_SPLITS
from moe_runtime.placement.stored import Model, StoredLoads
from moe_runtime.tools.plan_inputs import cluster_of, count, read_record

HELP = "judge a placement by recorded load: a verdict, and all that is behind it, as a page"
EPILOG = """\
what it does
  Plans from the first half of the recorded windows (or takes --placement), judges by the second half against the placement that was
  in force, and says: apply, not worth it, or not enough evidence. Writes into the output folder:
    report.html     opens from disk, needs no network; report.md and report.json hold the same
    placement.json  what was judged, with its prediction; for launch/serve.py --init-expert-location
  After it has been applied, record again and give it as --applied: the report then holds the prediction against what came.

examples
  launch/plan.py report record -o report
  launch/plan.py report record -o report --redundant 16 --topology nodes=2x8 --hardware h200
  launch/plan.py report record -o report --placement placement.json --split static
  launch/plan.py report record2 -o report2 --applied report/placement.json
"""
PAGE = Path(__file__).parent / "report_page"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own."""
    parser.add_argument("record", metavar="RECORD", type=Path, help="a record's folder")
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="folder to write to")
    parser.add_argument(
        "--placement", metavar="FILE", type=Path, help="judge this one, of any format (default: plan one)"
    )
    parser.add_argument(
        "--redundant",
        type=count,
        metavar="R",
        help="extra copies in each layer, for the plan (default: as in force)",
    )
    parser.add_argument(
        "--applied",
        metavar="FILE",
        type=Path,
        help="placement.json of an earlier report, to be audited by this record",
    )
    parser.add_argument("--topology", metavar="nodes=AxB", help="A nodes of B ranks (default: one node)")
    parser.add_argument(
        "--hardware", default="h200", metavar="NAME", help="h200, b200, cpu or FILE.yaml (default: h200)"
    )
    parser.add_argument(
        "--split",
        choices=ALL_SPLITS,
        help="how tokens are split over replicas (default: as recorded; waterfill if the record does not say)",
    )
    parser.add_argument(
        "--phase", choices=(*PHASES, "all"), default="all", help="which tokens count (default: all)"
    )


def run(args: argparse.Namespace) -> str:
    """Analyse and write; the verdict in a few lines. Raises ConfigError."""
    record = read_record(args.record)
    model = model_of_record(record)
    if args.placement is not None and args.redundant is not None:
        raise ConfigError(
            "--redundant is for the plan made here; --placement gives one: leave one of them out"
        )
    options = Options(
        hardware=Hardware.named(args.hardware),
        cluster=cluster_of(args.topology, record.meta.num_ranks),
        split=args.split,
        phase=args.phase,
        redundant=args.redundant,
    )
    placement = read_placement(args.placement, model) if args.placement else None
    analysis = analyse(
        record, options, placement, read_applied(args.applied, model) if args.applied else None
    )
    write(analysis, model, args.output)
    verdict = analysis.report.verdict
    return "\n".join(
        [
            f"{verdict.word}: {verdict.why}",
            f"predicted gain {percent(verdict.gain.mean)} of the MoE time of a step"
            f" (90 %: {percent(verdict.gain.low)} to {percent(verdict.gain.high)}); {_bytes(verdict.migration_bytes)} to move",
            f"{args.output / 'report.html'}: written, with report.md, report.json and placement.json",
        ]
    )


def model_of_record(record: LoadRecord) -> Model:
    """As far as a record knows its model: layers are counted among those with experts."""
    meta = record.meta
    return Model.of_moe_layers(meta.num_layers, meta.num_experts, meta.num_ranks, meta.checkpoint)


def read_applied(path: Path, model: Model) -> tuple[ExpertPlacement, Prediction]:
    """A plan and the prediction in its file. Raises ConfigError."""
    stored = read_file(path)
    if isinstance(stored, StoredLoads) or stored.prediction is None:
        raise ConfigError(f"{path}: carries no prediction; give the placement.json that a report has written")
    try:
        predicted = msgspec.convert(stored.prediction, Prediction)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: its prediction cannot be read: {error}") from error
    return read_placement(path, model), predicted


def write(analysis: Analysis, model: Model, folder: Path) -> None:
    """All four files. Raises ConfigError."""
    report = analysis.report
    why = [f"MoE layer {r.layer}: expert {r.expert}: {r.why}" for r in report.reasons]
    carried = msgspec.to_builtins(prediction(analysis))
    texts = {
        "report.json": msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n",
        "report.html": page(report),
        "report.md": markdown(report),
        "placement.json": write_ours(analysis.after, model, why, carried).decode(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            draft = folder / (name + ".draft")
            draft.write_text(text, encoding="utf-8")
            draft.replace(folder / name)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from error


def page(report: Report) -> str:
    """The report as one HTML file."""
    from markupsafe import Markup

    # `<` must not end the script element that holds the JSON.
    numbers = json.dumps(msgspec.to_builtins(report), separators=(",", ":")).replace("<", "\\u003c")
    texts = {name: Markup((PAGE / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js")}
    return _render(
        "page.html.j2", report, True,
        json=Markup(numbers), style=texts["page.css"], script=texts["page.js"],
    )  # fmt: skip


def markdown(report: Report) -> str:
    """The report as text."""
    return _render("report.md.j2", report, False)


def _render(name: str, report: Report, autoescape: bool, **more: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(PAGE),
        autoescape=autoescape,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        us=_us, bytes=_bytes, seconds=_seconds, percent=percent, number=lambda n: f"{n:,}", decimal=_decimal
    )
    return environment.get_template(name).render(r=msgspec.to_builtins(report), **more)


def percent(value: float | None) -> str:
    """A share, with one decimal."""
    return "unknown" if value is None else f"{round(100 * value, 1) + 0.0:.1f} %"


def _decimal(value: float) -> str:
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"


def _us(value: float) -> str:
    for size, unit in ((1e6, "s"), (1e3, "ms")):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} µs"


def _seconds(value: float | None) -> str:
    if value is None:
        return "never"
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if value >= 2 * size:
            return f"{value / size:.3g} {unit}"
    return _us(value * 1e6) if value < 1 else f"{value:.3g} s"


def _bytes(value: float) -> str:
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} bytes"
