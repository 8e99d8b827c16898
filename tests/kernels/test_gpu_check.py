"""benchmarks/gpu_check.py without a GPU: that it runs with torch and triton alone, that its checks can fail, its runner."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check, gpu_experts, gpu_numerics, gpu_timing
from benchmarks.gpu_cases import Env, Skip, close, same
from benchmarks.gpu_check import Settings, run_stage
from benchmarks.gpu_report import Check, Report, Result, print_table

ROOT = Path(__file__).parents[2]
SMALL = Env(torch.device("cpu"), small=True)
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")


def installed_with(*names: str) -> set[str]:
    """Import names of these distributions and of everything that they require."""
    todo, found = list(names), set()
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        todo += [re.split(r"[^\w.-]", r, maxsplit=1)[0] for r in requires if "extra ==" not in r]
    modules = importlib.metadata.packages_distributions()
    return {
        m for m, owners in modules.items() if any(re.sub(r"[-_.]+", "-", o).lower() in found for o in owners)
    }


BLOCKER = """
import sys
allowed = set({allowed!r}) | set(sys.stdlib_module_names) | {{"moe_runtime", "benchmarks", "sitecustomize"}}
class OnlyAllowed:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if (top not in allowed and not top.startswith("_")) or name.startswith("moe_runtime.server"):
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked by the test)", name=name)
sys.meta_path.insert(0, OnlyAllowed())
"""


def run_script(*args: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), *args]
    return subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, check=False, timeout=850)


@pytest.fixture
def only_torch_and_triton(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with which nothing else can be imported, here and in processes that are started."""
    allowed = installed_with("torch", "triton", "numpy")
    assert {"torch", "triton"} <= allowed
    assert not allowed & {"msgspec", "psutil", "fastapi", "zmq", "nvshmem"}
    (tmp_path / "sitecustomize.py").write_text(BLOCKER.format(allowed=sorted(allowed)), encoding="utf-8")
    return tmp_path


@needs_no_gpu
def test_without_a_gpu_it_says_so() -> None:
    done = run_script()
    assert done.returncode == 2
    assert "no GPU" in done.stderr
    assert "--interpret" in done.stderr


@needs_no_gpu
@pytest.mark.parametrize(
    "arguments", [["--interpret", "--stage", "2"], ["--only", "no such check"], ["--jobs", "0"]]
)
def test_bad_arguments(arguments: list[str]) -> None:
    assert run_script(*arguments).returncode == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_no_gpu
def test_stage_one_in_the_interpreter(seed: int, only_torch_and_triton: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run_script("--interpret", "--seed", str(seed), "--out", str(out), path=only_torch_and_triton)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["seed"] == seed
    statuses = {check["name"]: check["status"] for check in report["checks"]}
    assert statuses.pop("one-sided, nvshmem with one rank") == "skipped"
    assert set(statuses.values()) == {"ok"}
    assert set(statuses) < {check.name for check in gpu_check.CHECKS if check.stage == 1}
    for name in statuses:
        assert f"  {name}" in done.stdout


@pytest.mark.slow
def test_speed_checks_run_on_small_shapes(seed: int) -> None:
    """A rehearsal: the same code with small shapes and the host's clock, which measures nothing."""
    known = list(gpu_timing.roofline(SMALL))
    assert {row["what"] for row in known} == {"bf16 product", "copy"}
    env = Env(SMALL.device, small=True, known=known)
    for check in (
        gpu_timing.qwen3_bf16,
        gpu_timing.deepseek_bf16,
        gpu_timing.qwen3_fp8,
        gpu_timing.deepseek_fp8,
    ):
        rows = list(check(env))
        assert [row["tokens"] for row in rows] == [1, 8]
        assert all(row["ms"] > 0 and row["how"] == "host" for row in rows)
    assert len(list(gpu_timing.decode_attention(env))) == 1
    with pytest.raises(Skip, match="roofline"):
        list(gpu_timing.qwen3_bf16(SMALL))
    assert [row["case"] for row in gpu_timing.graph_against_eager(env)] == [
        "B=2 recorded=2",
        "B=3 recorded=4",
    ]


def test_torch_peers_compute_the_same(seed: int) -> None:
    """What the kernels are timed against."""
    from benchmarks.gpu_cases import expert_weights, routed_batch
    from moe_runtime.experts.reference import ReferenceExperts

    weights = expert_weights(SMALL.device, 4, 64, 32)
    batch = routed_batch(SMALL.device, 40, 3, 8, 4, 64)
    assert int(batch.num_rows_p.sum()) == batch.row_index_S.shape[0] > 0
    expected = ReferenceExperts()(batch, weights)
    peers = gpu_timing._Peers(weights)
    close("grouped_mm", peers.grouped_mm(batch, batch.num_rows_p.cumsum(0).int()), expected, 2e-2)
    close("loop of mm", peers.loop_of_mm(batch, batch.num_rows_p.tolist()), expected, 2e-2)


def test_comparisons_refuse_nan_and_shapes() -> None:
    x = torch.ones(3, 2)
    for bad in (torch.tensor([[1.0, 1], [1, torch.nan], [1, 1]]), torch.ones(2, 2), x + 0.1):
        with pytest.raises(AssertionError):
            close("case", bad, x, 0.01)
        with pytest.raises(AssertionError):
            same("case", bad, x)
    assert close("case", x + 0.001, x, 0.01)["error"] == pytest.approx(0.001, rel=1e-3)


def test_a_wrong_kernel_fails_its_check(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_runtime.dispatch import triton_grouping
    from moe_runtime.layers.triton_ops import TritonOps

    right = triton_grouping.group_pairs
    monkeypatch.setattr(triton_grouping, "group_pairs", lambda s, p: right(s.flip(0).contiguous(), p))
    with pytest.raises(AssertionError, match="differ"):
        list(gpu_numerics.grouping(SMALL))
    norm = TritonOps.rms_norm
    monkeypatch.setattr(TritonOps, "rms_norm", lambda self, x, w, eps: norm(self, x, w, 0.1))
    with pytest.raises(AssertionError, match="rms_norm"):
        list(gpu_numerics.layer_operations(SMALL))
    kernel = gpu_experts.TritonExperts.__call__
    monkeypatch.setattr(
        gpu_experts.TritonExperts, "__call__", lambda self, b, w: kernel(self, b, w).roll(1, 0)
    )
    with pytest.raises(AssertionError, match="off by"):
        list(gpu_experts.experts_fp8_block(SMALL))


def test_failures_do_not_stop_the_run(tmp_path: Path) -> None:
    names = ["wrong", "right", "dies", "skipped", "hangs"]
    checks = [
        Check(name, 1, f"tests.helpers.gpu_checks:{name}", 2.0 if name == "hangs" else 60.0) for name in names
    ]
    checks += [
        Check("roofline", 1, "tests.helpers.gpu_checks:right", 60.0),
        Check("last", 1, "tests.helpers.gpu_checks:reads_the_roofline", 60.0),
        Check("late", 1, "tests.helpers.gpu_checks:right", 60.0),
    ]
    report = Report(tmp_path / "out.json", {"seed": 1}, checks)
    settings = Settings("cpu", small=True, poison=False)
    run_stage(checks[:-1], settings, 1, 280.0, 1, report)
    run_stage(checks[-1:], settings, 1, 0.0, 1, report)
    found = {c["name"]: c for c in json.loads((tmp_path / "out.json").read_text())["checks"]}
    assert {name: check["status"] for name, check in found.items()} == {
        "wrong": "failed", "right": "ok", "dies": "failed", "skipped": "skipped", "hangs": "timeout", "roofline": "ok",
        "last": "ok", "late": "not run",
    }  # fmt: skip
    assert [len(found[name]["rows"]) for name in ("wrong", "right", "dies", "hangs")] == [1, 2, 1, 1]
    assert "two is wrong" in found["wrong"]["reason"]
    assert "exit code 17" in found["dies"]["reason"]
    assert found["last"]["rows"][0]["known"] == found["roofline"]["rows"]


def test_the_table_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"tokens": 8, "ms": 0.25, "met": False}, {"tokens": 9, "ms": 0.5, "met": None}]
    results = [
        Result("first", 1, "failed", "Traceback\nAssertionError: off by 3", 1.0, [{"case": "x"}]),
        Result("second", 2, "ok", "", 2.0, rows),
    ]
    print_table(results)
    printed = capsys.readouterr().out
    assert "AssertionError: off by 3" in printed
    assert "tokens=8  ms=0.25  met=False" in printed
    assert "1 ok, 1 failed; 1 targets missed" in printed
