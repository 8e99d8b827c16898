"""Checkpoints with quantised weights through the whole engine, against transformers on the dequantised ones."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from moe_runtime import LLM, SamplingParams
from tests.helpers.checkpoint_files import reference
from tests.helpers.parity import Reference, check_greedy
from tests.helpers.tiny_models import FAMILIES

if TYPE_CHECKING:
    from pathlib import Path

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2)


def family_cases(formats: tuple[str, str], quick: tuple[str, str, int]) -> list[Any]:
    """pytest's parameters (family, format, ep): every family with both formats, half of them on one rank and half on two; all but `quick` slow."""
    grid = {
        (family, name, 1 + (row + column) % 2)
        for row, family in enumerate(FAMILIES)
        for column, name in enumerate(formats)
    }
    return [
        pytest.param(*case, marks=() if case == quick else pytest.mark.slow)
        for case in sorted({*grid, quick})
    ]


def check_engine(folder: Path, plain: Path, ep: int, seed: int) -> list[dict[str, Any]]:
    """Greedy answers in float32 from `folder` are transformers' from `plain`. Returns what the ranks say they chose."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(61) for _ in range(draw.randint(1, 40))] for _ in range(8)]
    # A copy of some experts on the other rank.
    redundant = 2 if ep > 1 else 0
    with LLM(
        model=str(folder),
        ep=ep,
        dtype="float32",
        skip_tokenizer_init=True,
        num_kv_blocks=64,
        max_num_batched_tokens=23,
        num_redundant_experts=redundant,
    ) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        chosen = [rank.info for rank in llm._engine.ready]
    check_greedy(Reference(reference(plain)), outputs, 16)
    return chosen
