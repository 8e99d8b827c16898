"""int8 checkpoints of compressed-tensors through the whole engine, against transformers on the dequantised weights."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.helpers.int8_checkpoints import INT8_FORMATS, write_int8
from tests.helpers.quantised_parity import check_engine, family_cases
from tests.helpers.tiny_models import make_tiny

if TYPE_CHECKING:
    from pathlib import Path

CASES = family_cases(("w8a8", "w8a16_packed"), ("olmoe", "w8a8", 2))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "name", "ep"), CASES)
def test_matches_transformers(family: str, name: str, ep: int, tmp_path: Path, seed: int) -> None:
    """Activations stay as they are, and W8A8 checkpoints are told so."""
    width = random.Random(seed).randint(21, 24)
    make_tiny(family, tmp_path / "source", seed, num_hidden_layers=2, intermediate_size=width)
    folder, plain = tmp_path / "int8", tmp_path / "plain"
    write_int8(tmp_path / "source", INT8_FORMATS[name], folder, plain)
    chosen = check_engine(folder, plain, ep, seed)
    assert [(c["quantization"], c["moe_backend"]) for c in chosen] == [("int8_channel", "cpu")] * ep
    told = [(c.get("expert_activations"), c.get("expert_activations_reason", "")) for c in chosen]
    reason = "the checkpoint asks for int8, W8A8; here activations stay as they are, W8A16"
    assert told == [("float32", reason) if name == "w8a8" else (None, "")] * ep
