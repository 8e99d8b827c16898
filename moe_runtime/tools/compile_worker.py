"""Compiles launch cases for one target, in a process of its own: `compile_check` starts it and reads what it writes.

Standard input: JSON of a `Request`. Standard output: a line of JSON per `Row`, and before each case a line with its name, so
that a compiler that takes the process down is known by the case.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from moe_runtime.tools import kernel_report
from moe_runtime.tools.compile_cases import all_cases
from moe_runtime.tools.kernel_report import Report
from moe_runtime.tools.stand_in_driver import TARGETS, StandInDriver

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

    from moe_runtime.tools.compile_cases import Case
    from moe_runtime.tools.stand_in_driver import Launch


class Request(msgspec.Struct):
    """What to compile."""

    target: str
    cases: list[str]
    reports_folder: str
    """Where reports are kept, by the compiled kernel's hash."""
    disassembled: list[tuple[str, str]] | None
    """(case, kernel) whose instructions are wanted; None: all."""
    nvshmem: str | None
    """NVSHMEM's device library, or None."""


class Row(msgspec.Struct):
    """One kernel of one case on one target; or the case's failure, with no kernel."""

    case: str
    target: str
    kernel: str
    report: Report | None
    error: str | None
    seconds: float
    """To compile and launch the case, its other kernels included."""


class Start(msgspec.Struct):
    """Written before a case."""

    start: str


def main() -> int:
    """See the module."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    # What LLVM prints must not mix with the rows: it goes where errors go.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    driver = StandInDriver(TARGETS[request.target])
    driver.install()
    cases = {case.name: case for case in all_cases(request.nvshmem)}
    reports = Reports(Path(request.reports_folder), request.disassembled)
    for name in request.cases:
        _write(answers, Start(name))
        for row in _rows(cases[name], driver, reports):
            _write(answers, row)
    return 0


def _write(answers: IO[bytes], what: Start | Row) -> None:
    answers.write(msgspec.json.encode(what) + b"\n")
    answers.flush()


def _rows(case: Case, driver: StandInDriver, reports: Reports) -> Iterator[Row]:
    begin, target = time.monotonic(), driver.target.name
    driver.launches.clear()
    error = None
    try:
        case.launch()
    except Exception as e:  # noqa: BLE001 - whatever the launcher or the compiler raises is the result
        error = f"{type(e).__name__}: {e}"
    seconds = time.monotonic() - begin
    if error is None and not driver.launches:
        error = "launched no kernel"
    if error is not None:
        yield Row(case.name, target, "", None, error, seconds)
        return
    # A kernel launched again in the same form is one row; in another form, a row with a number.
    distinct = list({launch.hash: launch for launch in driver.launches}.values())
    seen: dict[str, int] = {}
    for launch in distinct:
        seen[launch.kernel] = number = seen.get(launch.kernel, 0) + 1
        label = launch.kernel if number == 1 else f"{launch.kernel}_{number}"
        yield Row(case.name, target, label, reports.of(launch, case.name, label), None, seconds)


class Reports:
    """Reads compiled kernels, or takes from the folder what was read before: it takes longer than all the rest of a warm run."""

    def __init__(self, folder: Path, disassembled: list[tuple[str, str]] | None) -> None:
        reader = hashlib.sha256(Path(kernel_report.__file__).read_bytes()).hexdigest()[:12]
        self._folder = folder / reader
        self._disassembled = None if disassembled is None else set(disassembled)

    def of(self, launch: Launch, case: str, kernel: str) -> Report:
        """Of a case's kernel."""
        whole = self._disassembled is None or (case, kernel) in self._disassembled
        path = self._folder / f"{launch.hash}{'' if whole else '.brief'}.json"
        if path.exists():
            return msgspec.json.decode(path.read_bytes(), type=Report)
        report = kernel_report.report(launch, whole)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{launch.num_warps}.{time.monotonic_ns()}")
        partial.write_bytes(msgspec.json.encode(report))
        partial.replace(path)
        return report


if __name__ == "__main__":
    sys.exit(main())
