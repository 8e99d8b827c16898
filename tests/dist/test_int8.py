"""int8 checkpoints of compressed-tensors through the whole engine, against transformers on the dequantised weights."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from moe_runtime import LLM, SamplingParams
from tests.helpers.checkpoint_files import reference
from tests.helpers.int8_checkpoints import INT8_FORMATS, write_int8
from tests.helpers.parity import Reference, check_greedy
from tests.helpers.tiny_models import FAMILIES, make_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2)
QUICK = [("olmoe", "w8a8", 2)]
# Every family with both forms, half of them on one rank and half on two.
GRID = [
    (family, name, 1 + (row + column) % 2)
    for row, family in enumerate(FAMILIES)
    for column, name in enumerate(("w8a8", "w8a16_packed"))
]
CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in GRID]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "name", "ep"), CASES)
def test_matches_transformers(family: str, name: str, ep: int, tmp_path: Path, seed: int) -> None:
    """Activations stay as they are, and W8A8 checkpoints are told so."""
    draw = random.Random(seed)
    make_tiny(family, tmp_path / "source", seed, num_hidden_layers=2, intermediate_size=draw.randint(21, 24))
    folder, plain = tmp_path / "int8", tmp_path / "plain"
    write_int8(tmp_path / "source", INT8_FORMATS[name], folder, plain)
    prompts = [[draw.randrange(61) for _ in range(draw.randint(1, 40))] for _ in range(8)]
    # A copy of some experts on the other rank.
    flags = {"num_redundant_experts": 2} if ep > 1 else {}
    with LLM(
        model=str(folder),
        ep=ep,
        dtype="float32",
        skip_tokenizer_init=True,
        num_kv_blocks=64,
        max_num_batched_tokens=23,
        **flags,
    ) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        chosen = [rank.info for rank in llm._engine.ready]
    assert [(c["quantization"], c["moe_backend"]) for c in chosen] == [("int8_channel", "cpu")] * ep
    told = [(c.get("expert_activations"), c.get("expert_activations_reason", "")) for c in chosen]
    reason = "the checkpoint asks for int8, W8A8; here activations stay as they are, W8A16"
    assert told == [("float32", reason) if name == "w8a8" else (None, "")] * ep
    check_greedy(Reference(reference(plain)), outputs, 16)
