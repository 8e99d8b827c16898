"""Building the C++ kernels: once, whole or not at all, and never a reason not to start."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_runtime import backends
from moe_runtime.config import EngineConfig
from moe_runtime.native import build
from moe_runtime.native.build import INSTRUCTION_SETS, cpu_flags, load_native, usable_instruction_sets

ROOT = Path(__file__).parents[2]
COMPILER = next((path for name in build.COMPILERS if (path := shutil.which(name))), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, here and in processes started."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "moe-runtime" / "native"


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def script(folder: Path, text: str) -> None:
    (folder / "g++").write_text(f"#!/bin/sh\nPATH=/usr/local/bin:/usr/bin:/bin\n{text}\n", encoding="utf-8")
    (folder / "g++").chmod(0o755)


def start_build(asked: str = "auto") -> subprocess.Popen[str]:
    code = f"from moe_runtime.native.build import load_native; n = load_native({asked!r}); print(n.instructions, n.problem)"
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )


def experts_chosen(caplog: pytest.LogCaptureFixture, **settings: Any) -> str:
    """The name chosen for a bfloat16 model; what is logged stays in caplog."""
    spec: Any = SimpleNamespace(activation="silu", expert_scheme=None)
    topology: Any = SimpleNamespace(device=torch.device("cpu"), rank=0)
    with caplog.at_level(logging.INFO):
        config = EngineConfig(model="demo", **settings)
        kernel, choice = backends.make_experts(config, spec, torch.bfloat16, topology)
    assert kernel.name == choice.name
    return choice.name


def test_without_a_compiler_torch_computes_and_the_log_says_why(
    cache: Path, tools: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert experts_chosen(caplog) == "cpu"
    (line,) = [m for m in caplog.messages if m.startswith("moe_backend")]
    assert "not cpu_native: no C++ compiler (g++, c++, clang++)" in line
    assert not cache.exists()


@needs_compiler
def test_with_a_compiler_it_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    assert experts_chosen(caplog) == "cpu_native"
    assert experts_chosen(caplog, moe_backend="cpu_native", cpu_kernels="portable") == "cpu_native"
    assert experts_chosen(caplog, cpu_kernels="off") == "cpu"
    assert experts_chosen(caplog, moe_backend="cpu") == "cpu"
    assert experts_chosen(caplog, deterministic=True) == "deterministic"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo 'experts.cpp:1: no' >&2; exit 1", "failed: experts.cpp:1: no"),
        ("exit 3", "failed: exit status 3"),
    ],
)
def test_a_compiler_that_fails(cache: Path, tools: Path, text: str, reason: str) -> None:
    script(tools, text)
    native = load_native("portable")
    assert native.library is None
    assert reason in str(native.problem)
    assert [p.name for p in cache.iterdir()] == [".lock"]


def test_a_compiler_that_never_ends(cache: Path, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "BUILD_SECONDS", 0.3)
    script(tools, "sleep 5")
    begin = time.monotonic()
    assert "took more than 0.3 seconds" in str(load_native("portable").problem)
    assert time.monotonic() - begin < 4
    assert [p.name for p in cache.iterdir()] == [".lock"]


@needs_compiler
def test_a_library_that_cannot_be_loaded(cache: Path, tools: Path) -> None:
    script(tools, 'while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"')
    assert "cannot be built" in str(load_native("portable").problem)


def test_a_cache_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert load_native("portable").library is None


@needs_compiler
def test_two_processes_build_once(cache: Path, tools: Path, tmp_path: Path) -> None:
    script(tools, f'echo built >> {tmp_path}/log; sleep 0.5; exec {COMPILER} "$@"')
    processes = [start_build("portable") for _ in range(2)]
    assert [p.communicate(timeout=100)[0].split() for p in processes] == [["portable", "None"]] * 2
    assert (tmp_path / "log").read_text(encoding="utf-8") == "built\n"
    assert len(list(cache.glob("*.so"))) == 1


@needs_compiler
def test_a_killed_build_leaves_nothing_behind(cache: Path, tools: Path) -> None:
    script(
        tools,
        f'while [ "$1" != -o ]; do set -- "$@" "$1"; shift; done; echo half > "$2"; sleep 60; {COMPILER}',
    )
    process = start_build("portable")
    deadline = time.monotonic() + 60
    while not list(cache.glob(".building-*/*.so")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)
    assert not list(cache.glob("*.so")), "no half of a library where a whole one belongs"
    script(tools, f'exec {COMPILER} "$@"')
    assert load_native("portable").problem is None
    assert sorted(p.suffix or p.name for p in cache.iterdir()) == [".lock", ".so"]


def test_instruction_sets_by_what_the_cpu_has() -> None:
    names = list(INSTRUCTION_SETS)
    assert usable_instruction_sets(frozenset()) == ["portable"]
    everything = frozenset().union(*(flags for _, flags in INSTRUCTION_SETS.values()))
    assert usable_instruction_sets(everything) == names
    assert usable_instruction_sets(everything - {"avx512_bf16"}) == names[1:]
    assert usable_instruction_sets(everything - {"avx512f"}) == names[2:]


def test_what_the_cpu_has_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"avx2"}))
    problem = load_native("avx512").problem
    assert problem == "this CPU has no avx512; cpu_kernels can be auto, off, portable"
    assert load_native("off").problem == "cpu_kernels is off"


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux only")
def test_flags_agree_with_torch() -> None:
    usable = usable_instruction_sets(cpu_flags())
    known = {"AVX512": "avx512", "AVX2": "avx2"}.get(torch.backends.cpu.get_cpu_capability(), "portable")
    assert known in usable
