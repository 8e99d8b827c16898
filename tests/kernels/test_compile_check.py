"""The compile gate, as users and CI run it, and what it says when a kernel breaks its budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_runtime.errors import ConfigError
from moe_runtime.tools import compile_budgets, compile_check
from moe_runtime.tools.compile_budgets import Budget, Matrix
from moe_runtime.tools.compile_cases import all_cases
from moe_runtime.tools.compile_worker import Request, Row
from moe_runtime.tools.kernel_report import Report
from moe_runtime.tools.stand_in_driver import TARGETS
from tests.helpers.python_packages import installed_packages

ROOT = Path(__file__).parents[2]


def run_gate(
    *args: str, path: tuple[str, ...] = (), timeout: float = 280
) -> subprocess.CompletedProcess[str]:
    """The gate in its own process. `path`: folders whose packages come before the environment's."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, str(ROOT)])}
    command = [sys.executable, "-m", "moe_runtime.tools.compile_check", *args]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=timeout, check=False
    )


@pytest.mark.timeout(900)
def test_every_kernel_compiles_within_its_budget() -> None:
    done = run_gate(timeout=800)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "VIOLATION" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nvshmem_kernels_compile() -> None:
    """To a binary without open ends, with the device library of the version that torch pins."""
    folder = installed_packages("nvidia-nvshmem-cu13==3.4.5")
    library = folder / "nvidia/nvshmem/lib/libnvshmem_device.bc"
    done = run_gate("--nvshmem", str(library), "-k", "NVSHMEM", timeout=800)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert {f"sm_{n}" for n in (80, 90, 100)} == {
        line.split()[0] for line in done.stdout.splitlines() if "put_messages" in line
    }
    # Without the library's code, the calls stay open, and that is a violation.
    empty = folder / "empty.bc"
    empty.write_bytes(b"")
    done = run_gate("--nvshmem", str(empty), "-k", "NVSHMEM", "--targets", "sm_90")
    assert done.returncode == 1
    assert "VIOLATION: one-sided exact over NVSHMEM" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kernel_compiles_with_the_older_triton() -> None:
    """3.6.0 comes with torch 2.11, which GPU machines have."""
    folder = installed_packages("triton==3.6.0")
    done = run_gate("--without-nvshmem", path=(str(folder),), timeout=800)
    print(done.stdout)
    assert "triton 3.6.0:" in done.stdout
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


MATRIX_UNIT = {"sm_80": {"HMMA"}, "sm_90": {"HGMMA", "QGMMA"}, "sm_100": {"TCGEN05"}, "gfx942": {"MFMA"}}
"""What a tile of many rows is nothing without: one of them."""


def test_tiles_of_many_rows_need_the_matrix_units() -> None:
    """In the budgets' own words, so that a kernel that falls back to slower instructions is a violation. Not in float32."""
    matrix, seen = compile_budgets.load(TARGETS), set()
    for (case, target, kernel), budget in matrix.budgets.items():
        gemm = kernel.startswith("grouped_gemm") and case.startswith("experts") and "prefill" in case
        if (gemm or kernel == "extend") and "fp32" not in case:
            assert MATRIX_UNIT[target] & set(budget.needs), (case, target, kernel)
            if gemm and target in ("sm_90", "sm_100") and "W8A16" not in case:
                assert "UTMALDG" in budget.needs, (case, target, kernel)
            seen.add((target, kernel))
    assert seen == {(t, k) for t in TARGETS for k in ("grouped_gemm", "grouped_gemm_2", "extend")}


def test_a_kernel_without_a_required_instruction_is_a_violation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The router has no matrix product."""
    path, load = tmp_path / "budgets.toml", compile_budgets.load
    entry = '{ registers = 255, spills = 0, shared = 4096, needs = ["HGMMA"] }'
    path.write_text(f'["router Mixtral-8x7B"]\nsm_90.route_kernel = {entry}\n')
    monkeypatch.setattr(compile_budgets, "load", lambda targets: load(targets, path))
    assert compile_check.main(["-k", "router Mixtral", "--targets", "sm_90", "--without-nvshmem"]) == 1
    out = capsys.readouterr().out
    assert "VIOLATION: router Mixtral-8x7B / route_kernel on sm_90: no HGMMA instruction" in out


def test_rows_as_json(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    done = run_gate("-k", "router Mixtral", "--targets", "sm_90", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(path.read_text())
    assert (row["kernel"], row["target"], row["error"]) == ("route_kernel", "sm_90", None)
    assert 0 < row["report"]["registers"] < 256


def test_a_case_that_takes_too_long_is_one_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker is stopped, and the cases after it get one of their own."""
    monkeypatch.setattr(compile_check, "LIMIT_S", 0.05)
    names = ["router Mixtral-8x7B", "router OLMoE"]
    matrix = Matrix(0, {}, {})
    with pytest.raises(RuntimeError, match=r"the worker for sm_90 did not start: took longer than 0\.05 s"):
        compile_check.compile_rows(names, ["sm_90"], None, matrix, False)
    worker = tmp_path / "worker.py"
    worker.write_text(STUCK_WORKER)
    request = Request("sm_90", ["a", "b", "c"], str(tmp_path), None, None)
    monkeypatch.setattr(compile_check, "LIMIT_S", 5.0)
    monkeypatch.setattr(compile_check, "WORKER", (sys.executable, str(worker)))
    rows = compile_check._compile_target(request, tmp_path)
    assert [(r.case, r.kernel, r.error) for r in rows] == [
        ("a", "kernel", None), ("b", "", "took longer than 5 s"), ("c", "kernel", None),
    ]  # fmt: skip


STUCK_WORKER = """
import json, subprocess, sys
for case in json.load(sys.stdin)["cases"]:
    print(json.dumps({"start": case}), flush=True)
    if case == "b":
        subprocess.run(["sleep", "60"])
    row = {"case": case, "target": "sm_90", "kernel": "kernel", "report": None, "error": None, "seconds": 0.1}
    print(json.dumps(row), flush=True)
"""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--targets", "sm_75"), "--targets 'sm_75': known are sm_80, sm_90, sm_100, gfx942"),
        (("-k", "no such kernel"), "no case that can be compiled here"),
        (("--update", "-k", "router"), "--update needs all cases and targets"),
        (("--nvshmem", "/nowhere.bc"), "--nvshmem /nowhere.bc: no such file"),
    ],
)
def test_wrong_arguments(args: tuple[str, ...], message: str) -> None:
    done = run_gate(*args)
    assert done.returncode == 2
    assert message in done.stderr


def row(case: str = "a", target: str = "sm_90", *, report: Report | None, error: str | None = None) -> Row:
    return Row(case, target, "kernel" if report else "", report, error, 0.1)


GOOD = Report(64, 0, 1024, 4, {"HGMMA": 8})
BUDGET = Budget(64, 0, 1024, ("HGMMA",))


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        (GOOD, None),
        (Report(65, 0, 1024, 4, {"HGMMA": 8}), "65 registers, budget 64"),
        (Report(64, 2, 1024, 4, {"HGMMA": 8}), "2 spills, budget 0"),
        (Report(64, 0, 1025, 4, {"HGMMA": 8}), "1025 bytes of shared memory, budget 1024"),
        (Report(64, 0, 1024, 4, {"HMMA": 8}), "no HGMMA instruction"),
        (Report(64, 0, 1024, 4, {"HGMMA": 8}, ("f",)), "calls f, which is not linked"),
    ],
)
def test_budgets(report: Report, problem: str | None) -> None:
    matrix = Matrix(1, {("a", "sm_90", "kernel"): BUDGET}, {})
    expected = [] if problem is None else [f"a / kernel on sm_90: {problem}"]
    assert matrix.check([row(report=report)], left_out=()) == expected


def test_the_matrix_may_not_shrink() -> None:
    matrix = Matrix(2, {("a", "sm_90", "kernel"): BUDGET}, {})
    found = matrix.check([row(report=GOOD)], left_out=())
    assert found == ["1 kernels are supported, but kernel_budgets.toml promises 2: that count may not fall"]
    failed = row(report=None, error="ValueError: no")
    assert matrix.check([failed], left_out=())[0] == "a on sm_90: does not compile: ValueError: no"
    assert "a / kernel on sm_90: has a budget, but was not launched" in matrix.check([], left_out=())
    assert "has no budget" in matrix.check([row("b", report=GOOD)], left_out=None)[0]
    # What is left out as a whole is taken as good.
    assert Matrix(1, matrix.budgets, {}).check([], left_out=("a",)) == []


def test_update_adds_and_drops_but_never_changes() -> None:
    old, gone = ("a", "sm_90", "kernel"), ("gone", "sm_90", "kernel")
    matrix = Matrix(
        2, {old: Budget(10, 0, 0, ("HMMA",)), gone: BUDGET}, {("c", "sm_80"): "no; fallback = torch"}
    )
    wider = row("b", report=Report(80, 1, 512, 4, {}))
    matrix.update([row(report=GOOD), row("b", report=GOOD)], [wider, row(report=GOOD)])
    assert matrix.budgets == {old: Budget(10, 0, 0, ("HMMA",)), ("b", "sm_90", "kernel"): Budget(88, 1, 1024)}
    assert matrix.supported == 2


def test_the_file_is_what_dump_writes(tmp_path: Path) -> None:
    text = compile_budgets.FILE.read_text()
    matrix = compile_budgets.load(TARGETS)
    assert matrix.dump() == text, "run compile_check --update"
    names = {case.name for case in all_cases(None)}
    assert {case for case, _, _ in matrix.budgets} | {case for case, _ in matrix.excluded} == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]\nsm_75.k = {}", "'sm_75' is not one of gfx942, sm_100"),
        ('[a]\nsm_80.excluded = "too slow"', 'must be text of the form "<reason>; fallback = <what>"'),
        ("[a]\nsm_80.k = { registers = 8 }", "must have registers, spills, shared"),
        (
            '[a]\nsm_80.k = { registers = 8, spills = 0, shared = 0, needs = ["FOO"] }',
            "known instructions are",
        ),
    ],
)
def test_wrong_budget_files(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "budgets.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message.replace("<", "<")):
        compile_budgets.load(TARGETS, path)
