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

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3)
Result = list[tuple[int, list[tuple[int, float]]]]


def result(output: Any) -> Result:
    """Tokens and all logprobs, as exact floats; NaN is equal to nothing."""
    (completion,) = output.outputs
    return [
        (token, sorted((t, p.logprob) for t, p in logprobs.items()))
        for token, logprobs in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


def all_ways(folder: Path, prompts: list[list[int]], ep: int, **settings: Any) -> list[list[Result]]:
    """The results of the prompts alone, found in the cache, and together, with preemption."""
    with LLM(
        model=str(folder),
        ep=ep,
        deterministic=True,
        skip_tokenizer_init=True,
        max_model_len=96,
        num_kv_blocks=128 // settings.get("block_size", 4),
        **({"block_size": 4} | settings),
    ) as llm:
        # Also where Triton's interpreter is there.
        chosen = {llm._engine.ready[0].info[f"{what}_backend"] for what in ("moe", "attention", "layer")}
        assert chosen == {"deterministic"}
        few = prompts[:3]
        alone = [llm.generate([p], GREEDY, use_tqdm=False)[0] for p in few]
        hits = [llm.generate([p], GREEDY, use_tqdm=False, routed_dp_rank=i % ep)[0] for i, p in enumerate(few)]
        llm.reset_prefix_cache()
        together = llm.generate(prompts, GREEDY, use_tqdm=False)
        if len(prompts) >= 8 * ep:
            assert sum(rank.preemptions for rank in llm.stats) > 0, "the cache was too large for this test"
    return [[result(o) for o in outputs] for outputs in (alone, hits, together)]


def check(folder: Path, family: str, seed: int, num_prompts: int, ways: list[dict[str, Any]]) -> None:
    draw = random.Random(seed)
    dtype = draw.choice([torch.float32, torch.bfloat16])
    vocab = make_tiny(family, folder, seed, dtype=dtype).config.vocab_size
    prompts = [[draw.randrange(vocab) for _ in range(draw.randint(10, 45))] for _ in range(num_prompts)]
    want: list[Result] = []
    for way in ways:
        alone, hits, together = all_ways(folder, prompts, **way)
        want = want or together
        assert together == want, way
        assert alone == want[:3], way
        assert hits == want[:3], way


def test_same_floats(tmp_path: Path, seed: int) -> None:
    ways: list[dict[str, Any]] = [
        {"ep": 1, "max_num_batched_tokens": 7},
        {"ep": 2, "dispatcher": "collective", "max_num_batched_tokens": 64, "num_redundant_experts": 1},
        {"ep": 2, "dispatcher": "one_sided", "block_size": 16},
    ]
    check(tmp_path, random.choice(list(FAMILIES)), seed, 8, ways)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_floats_everywhere(family: str, tmp_path: Path, seed: int) -> None:
    ways: list[dict[str, Any]] = [
        {"ep": 1},
        {"ep": 2, "dispatcher": "collective", "max_num_batched_tokens": 5},
        {"ep": 4, "num_redundant_experts": 3, "block_size": 8},
        {"ep": 8, "num_redundant_experts": 2, "max_num_batched_tokens": 32},
    ]
    check(tmp_path, family, seed, 32, ways)


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
