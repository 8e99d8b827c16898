"""int4 checkpoints of compressed-tensors, as GPTQ and AWQ models come, through the whole engine, against transformers on the dequantised weights."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.helpers.int4_checkpoints import INT4_FORMATS, write_int4
from tests.helpers.quantised_parity import check_engine, family_cases
from tests.helpers.tiny_models import make_tiny

if TYPE_CHECKING:
    from pathlib import Path

CASES = family_cases(("group32_zero_points", "group128"), ("qwen3_moe", "group32_zero_points", 2))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "name", "ep"), CASES)
def test_matches_transformers(family: str, name: str, ep: int, tmp_path: Path, seed: int) -> None:
    width = random.Random(seed).randint(33, 40)
    make_tiny(family, tmp_path / "source", seed, num_hidden_layers=2, intermediate_size=width)
    folder, plain = tmp_path / "int4", tmp_path / "plain"
    write_int4(tmp_path / "source", INT4_FORMATS[name], folder, plain)
    chosen = check_engine(folder, plain, ep, seed)
    scheme = INT4_FORMATS[name].scheme.name
    assert [(c["quantization"], c["moe_backend"]) for c in chosen] == [(scheme, "cpu")] * ep
