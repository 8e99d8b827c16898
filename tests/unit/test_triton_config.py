"""Tiles of the grouped GEMM: built-in ones fit every GPU, tables load, what is wrong in them is said."""

from __future__ import annotations

import itertools
import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from moe_runtime.errors import ConfigError
from moe_runtime.experts.triton_config import (
    GemmShape,
    Gpu,
    GroupedGemmConfig,
    choose_config,
    find_table,
    profile_name,
    programs_per_sm,
    read_table,
    shared_bytes,
    to_json,
)

if TYPE_CHECKING:
    from pathlib import Path

GPUS = [
    Gpu(80, 108, 163 << 10),
    Gpu(90, 132, 227 << 10),
    Gpu(100, 148, 227 << 10),
    Gpu("gfx942", 304, 64 << 10),
]
H200 = GPUS[1]
SHAPE = GemmShape(64, 512, 32, 768, 2048, 2, 2, 2)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda g: str(g.arch))
def test_built_in_tiles_fit(gpu: Gpu) -> None:
    kinds = [(4, 4, None), (2, 2, None), (1, 1, "fp8_block"), (2, 1, "fp8_block"), (1, 1, "fp8_channel")]
    for rows, parts, (x, w, scheme) in itertools.product((1, 64, 1024, 65536), (1, 2), kinds):
        shape = replace(SHAPE, num_rows=rows, parts=parts, x_bytes=x, w_bytes=w, scheme=scheme)
        config = choose_config(shape, gpu)
        assert shared_bytes(config, shape) <= gpu.shared_bytes
        assert programs_per_sm(config, shape, gpu) >= 1
        if scheme == "fp8_block":
            assert config.block_n // parts <= 128
            assert config.block_k <= 128


def test_few_rows_go_to_the_n_side_and_split_k() -> None:
    config = choose_config(replace(SHAPE, num_tokens=1, num_rows=2), H200)
    assert config.swap_ab
    assert config.split_k > 1
    assert not choose_config(replace(SHAPE, num_rows=1 << 16), H200).swap_ab


def test_deterministic_tiles_do_not_depend_on_the_batch() -> None:
    chosen = {
        choose_config(replace(SHAPE, num_tokens=n, num_rows=8 * n, num_slots=p), H200, deterministic=True)
        for n, p in itertools.product((1, 3, 64, 5000), (1, 4, 32))
    }
    assert len(chosen) == 1
    assert chosen.pop().split_k == 1


VLLM = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 128,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 5,
}


def test_a_table_in_vllms_format(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = profile_name(128, 384, "NVIDIA H200", "fp8_w8a8", block=True)
    assert name == "E=128,N=384,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    assert (
        profile_name(8, 14336, "NVIDIA H200", None, block=False) == "E=8,N=14336,device_name=NVIDIA_H200.json"
    )
    big = {**VLLM, "BLOCK_SIZE_M": 128, "waves_per_eu": 0, "down": {**VLLM, "USE_TMA": True}}
    (tmp_path / name).write_text(json.dumps({"triton_version": "3.4.0", "1": VLLM, "1024": big}))
    table = find_table(tmp_path, name, "")
    assert table is not None
    assert table.gate_up[1] == GroupedGemmConfig(16, 128, 128, 1, 4, 5, swap_ab=True)
    assert table.gate_up[1024] == GroupedGemmConfig(128, 128, 128, 1, 4, 5)
    assert table.down[1024].use_tma
    for tokens, entry in ((1, 1), (500, 1), (600, 1024), (9999, 1024)):
        shape = replace(SHAPE, num_tokens=tokens)
        assert choose_config(shape, H200, tuned=table.gate_up).block_m == table.gate_up[entry].block_m
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert find_table(tmp_path, "E=1.json", "--num-experts 1") is None
    (line,) = caplog.messages
    assert "E=1.json" in line
    assert "python -m moe_runtime.tools.tune --num-experts 1" in line


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    config = GroupedGemmConfig(16, 256, 64, 4, 8, 2, swap_ab=False, split_k=4, use_tma=True)
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"8": to_json(config)}))
    assert read_table(path).gate_up == {8: config}


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("[]", "not a table"),
        ("{}", "no entries"),
        ('{"x": {}}', "'x'"),
        ('{"1": {"BLOCK_SIZE_M": 16}}', "block_n"),
        (json.dumps({"1": {**VLLM, "BLOCK_SIZE_K": 48}}), "block_k=48: must be a power of two"),
        (json.dumps({"1": {**VLLM, "BLOCK_SIZE_N": 8}}), "block_n=8: must be a whole number of at least 16"),
        (json.dumps({"1": {**VLLM, "num_stages": "3"}}), "num_stages='3'"),
    ],
)
def test_a_bad_table_is_refused(tmp_path: Path, content: str, part: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"bad\.json") as e:
        read_table(path)
    assert part in str(e.value)
