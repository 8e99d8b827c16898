"""--deterministic with Triton kernels, as on GPUs, through real ranks in the interpreter: the same floats however it was computed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from moe_runtime import LLM, SamplingParams
from tests.helpers.tiny_models import make_tiny

if TYPE_CHECKING:
    from pathlib import Path

NUM_TOKENS = 2
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}
TRITON = {"attention_backend": "triton", "layer_backend": "triton", "moe_backend": "triton"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
Result = list[tuple[int, list[tuple[int, int, float]]]]


def result(output: Any) -> Result:
    """Tokens and all logprobs, as exact floats; NaN is equal to nothing."""
    (completion,) = output.outputs
    return [
        (token, sorted((t, p.rank, p.logprob) for t, p in logprobs.items()))
        for token, logprobs in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


def results(model: Path, prompts: list[list[int]], one_by_one: bool, **settings: Any) -> list[Result]:
    """Of the prompts, computed together or each alone; the first once more, when its prefix is in the cache."""
    with LLM(
        model=str(model), deterministic=True, skip_tokenizer_init=True, max_model_len=64, block_size=4, num_kv_blocks=64,
        **TRITON, **settings,
    ) as llm:  # fmt: skip
        info = llm._engine.ready[0].info
        assert {name: info[name] for name in (*TRITON, "routing")} == TRITON | {"routing": "triton"}
        groups = [[prompt] for prompt in prompts] if one_by_one else [prompts]
        outputs = [output for group in groups for output in llm.generate(group, GREEDY, use_tqdm=False)]
        assert outputs[0].num_cached_tokens == 0
        (again,) = llm.generate(prompts[:1], GREEDY, use_tqdm=False, routed_dp_rank=0)
    assert result(again) == result(outputs[0])
    return [result(output) for output in outputs]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("family", "dtype", "quantization"),
    [
        ("qwen2_moe", "bfloat16", "none"),
        pytest.param("qwen3_moe", "float32", "none", marks=pytest.mark.slow),
        pytest.param("mixtral", "bfloat16", "fp8", marks=pytest.mark.slow),
    ],
)
def test_same_floats(family: str, dtype: str, quantization: str, tmp_path: Path, seed: int) -> None:
    """One rank, a chunk at a time, and two ranks with copies of experts, all at once."""
    draw = random.Random(seed)
    model = make_tiny(family, tmp_path, seed, dtype=getattr(torch, dtype), **SIZES)
    prompts = [[draw.randrange(model.config.vocab_size) for _ in range(n)] for n in (9, 2)]
    common = {"dtype": dtype, "quantization": quantization}
    alone = results(tmp_path, prompts, one_by_one=True, ep=1, max_num_batched_tokens=5, **common)
    joined = results(
        tmp_path, prompts, one_by_one=False, ep=2, dispatcher="one_sided", num_redundant_experts=1, **common
    )
    assert alone == joined
