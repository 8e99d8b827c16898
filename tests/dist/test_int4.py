"""int4 checkpoints of compressed-tensors, as GPTQ and AWQ models come, through the whole engine, against transformers on the dequantised weights."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from moe_runtime import LLM, SamplingParams
from tests.helpers.checkpoint_files import reference
from tests.helpers.int4_checkpoints import INT4_FORMATS, write_int4
from tests.helpers.parity import check_greedy
from tests.helpers.tiny_models import FAMILIES, make_tiny, reference_logprobs

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2)
QUICK = [("qwen3_moe", "group32_zero_points", 2)]
# Every family with both forms, half of them on one rank and half on two.
GRID = [
    (family, name, 1 + (row + column) % 2)
    for row, family in enumerate(FAMILIES)
    for column, name in enumerate(("group32_zero_points", "group128"))
]
CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in sorted({*GRID, *QUICK})]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "name", "ep"), CASES)
def test_matches_transformers(family: str, name: str, ep: int, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    make_tiny(family, tmp_path / "source", seed, num_hidden_layers=2, intermediate_size=draw.randint(33, 40))
    folder, plain = tmp_path / "int4", tmp_path / "plain"
    write_int4(tmp_path / "source", INT4_FORMATS[name], folder, plain)
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
    scheme = INT4_FORMATS[name].scheme.name
    assert [(c["quantization"], c["moe_backend"]) for c in chosen] == [(scheme, "cpu")] * ep
    model = reference(plain)
    for output in outputs:
        check_greedy(lambda ids, first: reference_logprobs(model, ids)[first:], output, 16)
