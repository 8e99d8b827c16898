"""--deterministic through real ranks: a request's tokens and logprobs are the same floats, however it was computed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from moe_runtime import LLM, SamplingParams
from moe_runtime.errors import BackendUnavailable, MoeRuntimeError
from tests.helpers.tiny_models import FAMILIES, make_tiny

if TYPE_CHECKING:
    from pathlib import Path

NUM_TOKENS = 16
Result = list[tuple[int, list[tuple[int, int, float]]]]


def params(number: int) -> SamplingParams:
    """Of prompt `number`: greedy, or drawn with all that changes logits or cuts them off."""
    common: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 3}
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.3, "frequency_penalty": 0.2},
        {"temperature": 1.3, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2},
        {"temperature": 1.0, "logit_bias": {5: 2.0}},
    ]
    return SamplingParams(seed=number, **common, **ways[number % len(ways)])


def result(output: Any) -> Result:
    """Tokens and all logprobs, as exact floats; NaN is equal to nothing."""
    (completion,) = output.outputs
    return [
        (token, sorted((t, p.rank, p.logprob) for t, p in logprobs.items()))
        for token, logprobs in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


def all_ways(folder: Path, prompts: list[list[int]], ep: int, **settings: Any) -> tuple[list[list[Result]], int]:
    """The results of the prompts alone, found in the cache, and together; how often one was preempted."""
    with LLM(
        model=str(folder),
        ep=ep,
        deterministic=True,
        skip_tokenizer_init=True,
        max_model_len=96,
        num_kv_blocks=112 // settings.get("block_size", 4),
        **({"block_size": 4} | settings),
    ) as llm:
        # Also where Triton's interpreter is there.
        chosen = {llm._engine.ready[0].info[f"{what}_backend"] for what in ("moe", "attention", "layer")}
        assert chosen == {"deterministic"}
        few = list(enumerate(prompts[:3]))
        alone = [llm.generate([p], params(i), use_tqdm=False)[0] for i, p in few]
        hits = [llm.generate([p], params(i), use_tqdm=False, routed_dp_rank=i % ep)[0] for i, p in few]
        if ep == 1:
            assert max(output.num_cached_tokens for output in hits) > 0
        llm.reset_prefix_cache()
        together = llm.generate(prompts, [params(i) for i in range(len(prompts))], use_tqdm=False)
        preemptions = sum(rank.preemptions for rank in llm.stats)
    return [[result(o) for o in outputs] for outputs in (alone, hits, together)], preemptions


def check(folder: Path, family: str, seed: int, num_prompts: int, ways: list[dict[str, Any]]) -> None:
    draw = random.Random(seed)
    dtype = draw.choice([torch.float32, torch.bfloat16])
    vocab = make_tiny(family, folder, seed, dtype=dtype).config.vocab_size
    prompts = [[draw.randrange(vocab) for _ in range(draw.randint(10, 40))] for _ in range(num_prompts)]
    want: list[Result] = []
    total = 0
    for way in ways:
        (alone, hits, together), preemptions = all_ways(folder, prompts, **way)
        total += preemptions
        want = want or together
        assert together == want, way
        assert alone == want[:3], way
        assert hits == want[:3], way
    assert total > 0, "the caches were too large for this test"


def test_same_floats(tmp_path: Path, seed: int) -> None:
    ways: list[dict[str, Any]] = [
        {"ep": 1, "max_num_batched_tokens": 24},
        {"ep": 2, "dispatcher": "collective", "max_num_batched_tokens": 64, "num_redundant_experts": 1},
        {"ep": 2, "dispatcher": "one_sided", "block_size": 16},
    ]
    check(tmp_path, random.choice(list(FAMILIES)), seed, 8, ways)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("mixtral", {"ep": 8, "num_redundant_experts": 2, "max_num_batched_tokens": 32}),
        ("qwen2_moe", {"ep": 4, "dispatcher": "collective", "num_redundant_experts": 3, "block_size": 8}),
    ],
)
def test_same_floats_everywhere(family: str, way: dict[str, Any], tmp_path: Path, seed: int) -> None:
    check(tmp_path, family, seed, 32, [{"ep": 1}, way])


@pytest.mark.slow
def test_what_is_not_invariant_is_refused(tmp_path: Path, seed: int) -> None:
    make_tiny("mixtral", tmp_path, seed)
    with pytest.raises(MoeRuntimeError, match="with --deterministic allowed are auto, deterministic"):
        LLM(model=str(tmp_path), deterministic=True, moe_backend="cpu", skip_tokenizer_init=True)
    # Said before the weights are read, so not that they are missing.
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BackendUnavailable, match="kv_cache_dtype must be auto"):
        LLM(
            model=str(tmp_path), deterministic=True, attention_backend="deterministic", kv_cache_dtype="fp8",
            skip_tokenizer_init=True,
        )  # fmt: skip
