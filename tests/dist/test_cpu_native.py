"""The engine on two ranks with the C++ experts, in bfloat16, against transformers in float32."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import pytest

from moe_runtime import LLM, SamplingParams
from moe_runtime.native.build import load_native
from tests.helpers.tiny_models import make_tiny, reference_logprobs

if TYPE_CHECKING:
    from pathlib import Path

FIRST_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=5)
MAX_MEDIAN, MAX_QUARTILE = 0.06, 0.25
"""Of the errors of logprobs, and what a quarter of them may exceed. Not the mean: where bfloat16 makes the router choose another
expert a single prompt is off by 1 and more, with the plain experts as with these (medians 0.011 to 0.041 in 12 models)."""


def test_first_tokens_match_transformers(tmp_path: Path, seed: int) -> None:
    native = load_native()
    if native.library is None:
        pytest.skip(str(native.problem))
    model = make_tiny("qwen3_moe", tmp_path, seed)
    draw = random.Random(seed)
    prompts = [
        [draw.randrange(model.config.vocab_size) for _ in range(draw.randint(1, 40))] for _ in range(16)
    ]
    with LLM(
        model=str(tmp_path),
        ep=2,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        num_kv_blocks=64,
        max_num_batched_tokens=31,
    ) as llm:
        outputs = llm.generate(prompts, FIRST_TOKEN, use_tqdm=False)
        assert [(rank.info["moe_backend"], rank.info["attention_backend"]) for rank in llm._engine.ready] == [
            ("cpu_native", "cpu_native")
        ] * 2
    errors = []
    for output in outputs:
        expected = reference_logprobs(model, output.prompt_token_ids)[-1]
        (logprobs,) = output.outputs[0].logprobs or []
        errors += [abs(found.logprob - float(expected[token])) for token, found in logprobs.items()]
    assert len(errors) == 5 * len(prompts)
    errors.sort()
    assert errors[len(errors) // 2] < MAX_MEDIAN
    assert errors[len(errors) * 3 // 4] < MAX_QUARTILE
    assert math.isfinite(errors[-1])
