"""The tuner: what it tries fits the GPU, the search, resuming; end to end in Triton's interpreter with the host's clock."""

from __future__ import annotations

import json
import logging
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from moe_runtime.errors import ConfigError
from moe_runtime.experts.triton_config import GemmShape, Gpu, choose_config, fit, read_table, shared_bytes
from moe_runtime.experts.triton_grouped import TritonExperts, compute_experts, gemm_shapes, gpu_of
from moe_runtime.tools import tune as tool
from moe_runtime.tools.tune import Job, make_batch, make_weights, tune, tune_tokens
from moe_runtime.tools.tune_space import Pair, candidates, search
from moe_runtime.triton_support import availability

CPU = torch.device("cpu")
GPUS = [Gpu(80, 108, 163 << 10), Gpu(90, 132, 227 << 10), Gpu("gfx942", 304, 64 << 10)]
SHAPES = [
    GemmShape(1, 8, 128, 768, 2048, 2, 2, 2),
    GemmShape(4096, 32768, 128, 2048, 768, 1, 2, 2),
    GemmShape(64, 512, 32, 2048, 7168, 2, 1, 1, "fp8_block"),
    GemmShape(64, 512, 32, 2048, 7168, 2, 2, 1, "fp8_channel"),
]
JOB = Job(num_experts=3, hidden_size=64, intermediate_size=48, top_k=2)


def host_timer(function: object) -> float:
    began = time.perf_counter()
    function()  # type: ignore[operator]
    return (time.perf_counter() - began) * 1e3


@pytest.mark.parametrize("gpu", GPUS, ids=lambda g: str(g.arch))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.scheme}-{s.num_tokens}")
def test_candidates_fit(gpu: Gpu, shape: GemmShape) -> None:
    found = candidates(shape, gpu)
    assert found[0] == choose_config(shape, gpu)
    assert len(found) == len(set(found))
    assert 20 < len(found) < 1500
    for config in found:
        assert fit(config, shape, gpu) == config
        assert shared_bytes(config, shape) <= gpu.shared_bytes
    assert any(c.use_tma for c in found) == gpu.wide_m


def test_the_search_finds_the_least(seed: int) -> None:
    """Of a cost that is known: both products' tiles are found, and some that do not run are passed over."""
    shapes, gpu = (SHAPES[1], SHAPES[1]), GPUS[1]
    options = candidates(SHAPES[1], gpu)
    wanted = options[len(options) // 2], options[-1]

    def cost(pair: Pair) -> float | None:
        if pair[0].num_stages == 2 and pair[0] not in wanted:
            return None
        return 1.0 + (pair[0] != wanted[0]) + (pair[1] != wanted[1])

    assert search(shapes, gpu, cost, time.monotonic() + 60) == (wanted, 1.0, 3.0)


def test_the_search_stops_in_time() -> None:
    calls: list[Pair] = []

    def cost(pair: Pair) -> float:
        calls.append(pair)
        return float(len(calls))

    pair, least, built_in = search((SHAPES[0], SHAPES[0]), GPUS[1], cost, time.monotonic() - 1)
    assert (len(calls), least, built_in) == (1, 1.0, 1.0)
    assert pair == (choose_config(SHAPES[0], GPUS[1]),) * 2
    with pytest.raises(RuntimeError, match="built-in tiles do not run"):
        search((SHAPES[0], SHAPES[0]), GPUS[1], lambda _: None, time.monotonic())


@pytest.mark.parametrize(("kind", "block"), [(None, False), ("fp8_w8a8", True), ("fp8_w8a16", False)])
def test_end_to_end_and_resuming(
    seed: int, kind: str | None, block: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table it writes is the one that the kernel takes, with the same result as the built-in tiles."""
    job = Job(3, 64, 48, kind, block, 2)
    path = tmp_path / job.file_name("A GPU")
    gpu = gpu_of(CPU)
    assert tune(job, CPU, gpu, path, (2, 9), 0.03, False, host_timer) == 2
    before = json.loads(path.read_text())
    assert set(before) == {"triton_version", "2", "9"}
    assert set(read_table(path).down) == {2, 9}
    assert tune(job, CPU, gpu, path, (2, 9, 4), 0.01, False, host_timer) == 1
    after = json.loads(path.read_text())
    assert {key: after[key] for key in before} == before
    assert list(after) == ["triton_version", "2", "4", "9"]
    weights, batch = make_weights(job, CPU), make_batch(job, 9, CPU)
    monkeypatch.setattr(availability, "device_name", lambda _: "A GPU")
    kernel = TritonExperts(CPU, profiles=tmp_path)
    table = kernel._tuned(weights, batch.tokens_RD.dtype)
    assert table == read_table(path)
    shapes = gemm_shapes(batch, weights, gpu)
    plain = compute_experts(
        batch, weights, (choose_config(shapes[0], gpu), choose_config(shapes[1], gpu)), gpu
    )
    assert tool._agrees(kernel(batch, weights), plain)


def test_tiles_with_wrong_results_are_left_out(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are the fastest."""
    weights, batch, gpu = make_weights(JOB, CPU), make_batch(JOB, 5, CPU), gpu_of(CPU)
    shapes = gemm_shapes(batch, weights, gpu)
    built_in = choose_config(shapes[0], gpu), choose_config(shapes[1], gpu)
    tried: list[Pair] = []

    def broken(batch: object, weights: object, pair: Pair, gpu: object) -> torch.Tensor:
        tried.append(pair)
        return torch.ones(4) if pair == built_in else torch.tensor([1.0, 1, 1, torch.nan])

    monkeypatch.setattr(tool, "compute_experts", broken)
    found = tune_tokens(weights, batch, gpu, lambda _: 1.0 / len(tried), time.monotonic() + 0.5)
    assert found[0] == built_in
    assert len(tried) > 1


def test_a_file_that_is_no_table_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="not a table"):
        tune(JOB, CPU, gpu_of(CPU), path, (1,), 0.01, False, host_timer)
    assert path.read_text() == "{}"


def test_the_command_in_the_log_is_understood(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What TritonExperts says to run gives the table that it looked for."""
    flags: list[tuple[str, str]] = []
    monkeypatch.setattr(availability, "device_name", lambda _: "A GPU")
    monkeypatch.setattr(
        "moe_runtime.experts.triton_grouped.find_table",
        lambda folder, name, text, log: flags.append((name, text)),
    )
    for job in (JOB, Job(3, 64, 48, "fp8_w8a8", True, 2), Job(3, 64, 48, "fp8_w8a16", False, 2)):
        weights, batch = make_weights(job, CPU), make_batch(job, 2, CPU)
        TritonExperts(CPU, profiles=tmp_path)._tuned(weights, batch.tokens_RD.dtype)
        name, text = flags.pop()
        parsed = tool._parse([*shlex.split(text), "--top-k", "2"])
        assert parsed.job == job
        assert parsed.job.file_name("A GPU") == name


TABLES = Path(__file__).parents[1] / "data" / "tiles"


@pytest.mark.parametrize(("num_tokens", "rows_of_a_tile"), [(1, 16), (4, 16), (9, 32), (600, 128)])
def test_a_table_in_vllms_shape_is_what_the_kernel_takes(
    seed: int,
    num_tokens: int,
    rows_of_a_tile: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Found by the GPU's name and the weights' shape and type, chosen from by the number of tokens; results are the built-in tiles'."""
    job = Job(3, 64, 48, "fp8_w8a8", True, 2)
    weights, batch = make_weights(job, CPU), make_batch(job, num_tokens, CPU)
    built_in = TritonExperts(CPU)(batch, weights)
    taken: list[Pair] = []

    def compute(batch: object, weights: object, pair: Pair, gpu: object) -> torch.Tensor:
        taken.append(pair)
        return compute_experts(batch, weights, pair, gpu)  # type: ignore[arg-type]

    monkeypatch.setattr(availability, "device_name", lambda _: "A GPU")
    monkeypatch.setattr("moe_runtime.experts.triton_grouped.compute_experts", compute)
    with caplog.at_level(logging.DEBUG):
        y = TritonExperts(CPU, profiles=TABLES)(batch, weights)
    assert not caplog.messages
    assert [config.block_m for config in taken[0]] == [rows_of_a_tile] * 2
    assert max(config.block_k for config in taken[0]) <= 128, "a tile lies across two scale groups"
    assert tool._agrees(y, built_in)


@pytest.mark.parametrize("log", [True, False])
def test_a_missing_table_is_told_once_by_one_rank(
    seed: int, log: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the command that makes it, which makes just that file."""
    job = Job(3, 64, 48, "fp8_w8a8", True, 2)
    weights, batch = make_weights(job, CPU), make_batch(job, 2, CPU)
    monkeypatch.setattr(availability, "device_name", lambda _: "A GPU")
    kernel = TritonExperts(CPU, profiles=tmp_path, log=log)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            kernel(batch, weights)
    assert len(caplog.messages) == log
    for line in caplog.messages:
        path = tmp_path / job.file_name("A GPU")
        assert str(path) in line
        command = line.partition("python -m moe_runtime.tools.tune ")[2]
        parsed = tool._parse([*shlex.split(command), "--top-k", "2", "--tokens", "2", "--out", str(tmp_path)])
        assert parsed.out / parsed.job.file_name("A GPU") == path
        assert tune(parsed.job, CPU, gpu_of(CPU), path, parsed.tokens, 0.005, False, host_timer) == 1
        assert set(read_table(path).gate_up) == {2}


@pytest.mark.parametrize(
    "arguments", ["--dtype fp4", "--block", "--top-k 9", "--tokens 0", "--minutes 0", "--hidden-size -1"]
)
def test_bad_arguments(arguments: str) -> None:
    needed = "--num-experts 8 --hidden-size 64 --intermediate-size 64"
    with pytest.raises(SystemExit) as error:
        tool._parse([*needed.split(), *arguments.split()])
    assert error.value.code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    flags = ["--num-experts", "8", "--hidden-size", "64", "--intermediate-size", "64"]
    done = subprocess.run(
        [sys.executable, "-m", "moe_runtime.tools.tune", *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no GPU" in done.stderr
