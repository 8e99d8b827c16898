"""The compile gate: every Triton kernel, in every shipped form, for GPUs that need not be there, within a reviewed budget.

    python -m moe_runtime.tools.compile_check [-k TEXT] [--targets sm_90,...] [--json FILE] [--update]

Kernels are compiled by calling their launchers under a stand-in driver (stand_in_driver.py), as compile_cases.py lists them; what
they take is read from the binaries (kernel_report.py) and compared with kernel_budgets.toml (compile_budgets.py).
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import msgspec

from moe_runtime.dispatch.heap_nvshmem import device_library
from moe_runtime.errors import BackendUnavailable, ConfigError
from moe_runtime.tools import compile_budgets
from moe_runtime.tools.compile_cases import all_cases
from moe_runtime.tools.compile_worker import Request, Row, Start
from moe_runtime.tools.kernel_report import Report
from moe_runtime.tools.stand_in_driver import TARGETS
from moe_runtime.weights.demo_model import models_folder

WORKERS = 2
WORKER = (sys.executable, "-m", "moe_runtime.tools.compile_worker")
LIMIT_S = 120.0
"""Longest time for one case on one target, the start of its worker included."""


def main(argv: list[str] | None = None) -> int:
    """0 if everything is within budget, 1 if not, 2 on wrong arguments."""
    parser = argparse.ArgumentParser(prog="compile_check", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-k", default="", metavar="TEXT", help="only cases with this text in their names")
    parser.add_argument("--targets", default=",".join(TARGETS), help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument("--update", action="store_true", help=f"bring {compile_budgets.FILE.name} up to date")
    parser.add_argument(
        "--also",
        type=Path,
        metavar="FILE",
        help="with --update: rows of another Triton version, as of --json",
    )
    parser.add_argument(
        "--nvshmem", type=Path, metavar="FILE", help="NVSHMEM's device library; default: as installed"
    )
    parser.add_argument(
        "--without-nvshmem", action="store_true", help="leave out the kernels that need NVSHMEM"
    )
    args = parser.parse_args(argv)
    targets = args.targets.split(",")
    unknown = [t for t in targets if t not in TARGETS]
    if unknown:
        parser.error(f"--targets {unknown[0]!r}: known are {', '.join(TARGETS)}")
    library = None if args.without_nvshmem else str(args.nvshmem) if args.nvshmem else installed_nvshmem()
    if args.nvshmem and not args.nvshmem.is_file():
        parser.error(f"--nvshmem {args.nvshmem}: no such file")
    cases = [case for case in all_cases(library) if args.k in case.name]
    left_out = {case.name for case in cases if case.needs_nvshmem and library is None}
    names = [case.name for case in cases if case.name not in left_out]
    if not names:
        parser.error(f"-k {args.k!r}: no case that can be compiled here has that in its name")
    try:
        matrix = compile_budgets.load(TARGETS)
    except ConfigError as e:
        parser.error(str(e))
    complete = not args.k and set(targets) == set(TARGETS)
    if args.update and (not complete or left_out):
        parser.error("--update needs all cases and targets, and NVSHMEM's device library")

    begin = time.monotonic()
    rows = compile_rows(names, targets, library, matrix, bool(args.update or args.json))
    if args.update:
        others = msgspec.json.decode(args.also.read_bytes(), type=list[Row]) if args.also else []
        matrix.update(rows, others)
        compile_budgets.FILE.write_text(matrix.dump(), encoding="utf-8")
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)))
    found = matrix.check(rows, left_out if complete else None)
    lines = [*table(rows), "", *by_subject(rows, matrix, names), "", *excluded_lines(matrix, names, targets)]
    lines.append(summary(rows, time.monotonic() - begin))
    if left_out:
        lines.append(
            f"not compiled: {', '.join(left_out)}: needs nvidia-nvshmem-cu13==3.4.5 installed, or --nvshmem FILE"
        )
    lines += [f"VIOLATION: {text}" for text in found]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if found else 0


def installed_nvshmem() -> str | None:
    """NVSHMEM's device library in this environment, if it is there."""
    try:
        return device_library()
    except BackendUnavailable:
        return None


def compile_rows(
    names: list[str],
    targets: list[str],
    library: str | None,
    matrix: compile_budgets.Matrix,
    disassemble: bool,
) -> list[Row]:
    """All cases on all targets but the excluded ones, by target in the order given.

    disassemble: read the instructions of all kernels, not only of those that must have some.
    """
    cache = models_folder().parent / "compile_check"

    def one(target: str) -> list[Row]:
        wanted = [name for name in names if (name, target) not in matrix.excluded]
        must = [
            (case, kernel) for (case, on, kernel), b in matrix.budgets.items() if on == target and b.needs
        ]
        kept, read = str(cache / "reports"), None if disassemble else must
        return _compile_target(Request(target, wanted, kept, read, library), cache / "triton")

    with ThreadPoolExecutor(WORKERS) as pool:
        return [row for rows in pool.map(one, targets) for row in rows]


def _compile_target(request: Request, triton_cache: Path) -> list[Row]:
    """In worker processes: another one after each case that takes its worker down."""
    rows: list[Row] = []
    left = request.cases
    while left:
        written, problem = _run_worker(msgspec.structs.replace(request, cases=left), triton_cache, LIMIT_S)
        rows += [line for line in written if isinstance(line, Row)]
        if problem is None:
            return rows
        started = [line.start for line in written if isinstance(line, Start)]
        if not started:
            raise RuntimeError(f"the worker for {request.target} did not start: {problem}")
        rows = [row for row in rows if row.case != started[-1]]
        rows.append(Row(started[-1], request.target, "", None, problem, 0.0))
        left = left[left.index(started[-1]) + 1 :]
    return rows


def _run_worker(request: Request, triton_cache: Path, limit_s: float) -> tuple[list[Start | Row], str | None]:
    """What the worker wrote, and what was wrong if it did not come to its end, or was silent for longer than the limit."""
    # Compiled kernels cannot come out of the interpreter, whatever this process uses.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(triton_cache)
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
        given.write(msgspec.json.encode(request))
        given.seek(0)
        # A group of its own, so that the assembler that it waits for ends with it.
        worker = subprocess.Popen(
            WORKER,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
        assert worker.stdout is not None
        with worker.stdout:
            output, in_time = _read(worker.stdout, limit_s)
        if not in_time:
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().splitlines()[-3:]
    problem = None
    if not in_time:
        problem = f"took longer than {limit_s:g} s"
    elif worker.returncode:
        problem = f"the compiler ended its process with {worker.returncode}: {' | '.join(last)}"
    lines = output.split(b"\n")[:-1]
    return [
        msgspec.json.decode(line, type=Start if b'"start"' in line[:9] else Row) for line in lines
    ], problem


def _read(stream: IO[bytes], limit_s: float) -> tuple[bytes, bool]:
    """Everything up to the stream's end, or until nothing comes for so long; whether it came to its end."""
    output = b""
    while select.select([stream], [], [], limit_s)[0]:
        piece = os.read(stream.fileno(), 1 << 16)
        if not piece:
            return output, True
        output += piece
    return output, False


def table(rows: list[Row]) -> list[str]:
    """A line per kernel."""
    width = max(len(row.case) for row in rows)
    kernel_width = max(len(row.kernel) for row in rows)
    head = f"{'target':7} {'case':{width}} {'kernel':{kernel_width}} warps regs spills shared instructions"
    lines = [head, "-" * len(head)]
    for row in rows:
        start = f"{row.target:7} {row.case:{width}} {row.kernel:{kernel_width}} "
        if row.report is None:
            lines.append(start + f"FAILED: {row.error}")
            continue
        r = row.report
        found = " ".join(f"{name}:{count}" for name, count in r.instructions.items())
        lines.append(
            start + f"{r.num_warps:5} {r.registers:4} {r.spills:6} {r.shared_bytes:6} {found}".rstrip()
        )
    return lines


def by_subject(rows: list[Row], matrix: compile_budgets.Matrix, names: list[str]) -> list[str]:
    """Markdown: a line per subject (a case's first word) and target."""
    lines = [
        "| subject | target | kernels | excluded cases | most registers | most spills | most shared bytes |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    groups: dict[tuple[str, str], list[Report]] = {}
    for row in rows:
        if row.report is not None:
            groups.setdefault((row.case.split()[0], row.target), []).append(row.report)
    for (subject, target), found in sorted(groups.items()):
        excluded = sum(
            name.split()[0] == subject and on == target and name in names for name, on in matrix.excluded
        )
        most = [
            max(values)
            for values in zip(*((r.registers, r.spills, r.shared_bytes) for r in found), strict=True)
        ]
        cells = (subject, target, len(found), excluded, *most)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def excluded_lines(matrix: compile_budgets.Matrix, names: list[str], targets: list[str]) -> list[str]:
    """A line per case and target that is left out."""
    return [
        f"{target:7} {name}: excluded: {why}"
        for (name, target), why in matrix.excluded.items()
        if name in names and target in targets
    ]


def summary(rows: list[Row], seconds: float) -> str:
    """What was done."""
    import triton

    compiled = sum(row.report is not None for row in rows)
    return f"triton {triton.__version__}: {compiled} of {len(rows)} kernels compiled in {seconds:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
