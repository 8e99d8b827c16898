"""Triton attention and layer operations where they are wired in: the whole engine, its kernels interpreted."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from moe_runtime import LLM, SamplingParams
from tests.helpers.parity import check_greedy
from tests.helpers.tiny_models import make_tiny, reference_logprobs

if TYPE_CHECKING:
    from pathlib import Path

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2)
TRITON = {"attention_backend": "triton", "layer_backend": "triton"}


def generate(model: Path, prompts: list[list[int]], **settings: Any) -> tuple[list[Any], dict[str, str]]:
    with LLM(
        model=str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=64,
        block_size=3,
        num_kv_blocks=64,
        max_num_batched_tokens=16,
        **settings,
    ) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        # The first prompt again: its prefix is in the cache now.
        outputs += llm.generate(prompts[0], GREEDY, use_tqdm=False)
        return outputs, llm._engine.ready[0].info


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_tokens_are_transformers_tokens(family: str, tmp_path: Path, seed: int) -> None:
    """Chunked prompts, steps that mix prompts and decodes, a prefix hit; per-head norms or a sliding window."""
    own = {"sliding_window": 7} if family == "mixtral" else {"head_dim": 12, "mlp_only_layers": [0]}
    model = make_tiny(
        family, tmp_path, seed, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **own
    )
    draw = random.Random(seed)
    prompts = [[draw.randrange(model.config.vocab_size) for _ in range(n)] for n in (21, 2, 9)]
    outputs, info = generate(tmp_path, prompts, **TRITON)
    assert (info["attention_backend"], info["layer_backend"]) == ("triton", "triton")
    for output in outputs:
        check_greedy(
            lambda ids, first: reference_logprobs(model, ids)[first:], output, GREEDY.max_tokens or 0
        )
    assert outputs[-1].num_cached_tokens > 0


@pytest.mark.slow
def test_fp8_cache_gives_the_cpu_paths_tokens(tmp_path: Path, seed: int) -> None:
    """Attention rounds keys and values alike in both, so logprobs agree closely."""
    make_tiny("qwen3_moe", tmp_path, seed, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    prompts = [[5, 9, 3, 8, 1, 1, 7], [4]]
    ours, info = generate(tmp_path, prompts, kv_cache_dtype="fp8_e4m3", **TRITON)
    theirs, _ = generate(tmp_path, prompts, kv_cache_dtype="fp8_e4m3")
    assert info["kv_cache_dtype"] == "float8_e4m3fn"
    for one, other in zip(ours, theirs, strict=True):
        ids = one.outputs[0].token_ids
        # A rounding that falls the other way moves a logprob; the first token has had the fewest.
        for mine, yours in zip(one.outputs[0].logprobs[:1], other.outputs[0].logprobs[:1], strict=True):
            shared = mine.keys() & yours.keys()
            assert shared
            assert all(abs(mine[t].logprob - yours[t].logprob) < 0.05 for t in shared)
        assert len(ids) == GREEDY.max_tokens
