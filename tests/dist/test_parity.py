"""The whole engine against transformers: real ranks, every family, forced small chunks, prefix hits, preemption."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from moe_runtime import LLM, SamplingParams
from tests.helpers.parity import check_greedy
from tests.helpers.tiny_models import FAMILIES, make_tiny

if TYPE_CHECKING:
    from pathlib import Path

NUM_TOKENS = 64
BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
# On two cores each more rank costs seconds of start-up; the full grid is the slow tier's.
QUICK = [("mixtral", 1), ("mixtral", 4), ("olmoe", 2), ("qwen2_moe", 2), ("qwen3_moe", 2)]
FULL = [(family, ep) for family in FAMILIES for ep in (1, 2, 4, 8) if (family, ep) not in QUICK]
CASES = [pytest.param(*case, id=f"{case[0]}-ep{case[1]}") for case in QUICK]
CASES += [pytest.param(*case, id=f"{case[0]}-ep{case[1]}", marks=pytest.mark.slow) for case in FULL]


@pytest.mark.parametrize(("family", "ep"), CASES)
def test_tiny_model_matches_transformers(family: str, ep: int, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    reference = make_tiny(family, tmp_path, seed)
    vocab = reference.config.vocab_size

    def prompt(length: int) -> list[int]:
        return [draw.randrange(vocab) for _ in range(length)]

    # Room for little more than one of the longest sequences per rank: a batch of 32 must preempt.
    with LLM(
        model=str(tmp_path),
        ep=ep,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=128,
        block_size=BLOCK_SIZE,
        num_kv_blocks=160 // BLOCK_SIZE,
        max_num_batched_tokens=7,
    ) as llm:
        first = prompt(37)
        (alone,) = llm.generate([first], GREEDY, use_tqdm=False)
        check_greedy(reference, alone, NUM_TOKENS)
        assert alone.num_cached_tokens == 0

        batch = [prompt(draw.randint(1, 60)) for _ in range(32)]
        outputs = llm.generate(batch, GREEDY, use_tqdm=False)
        for output in outputs:
            check_greedy(reference, output, NUM_TOKENS)
        if ep <= 2:
            assert sum(rank.preemptions for rank in llm.stats) > 0, "the cache was too large for this test"
        for rank in llm.stats:
            assert rank.num_running == rank.num_waiting == 0
            assert rank.num_free_blocks + rank.num_cached_blocks == rank.num_blocks, "blocks leaked"

        # Prefixes of what the cache holds, cut in the middle of a block and then different.
        llm.reset_prefix_cache()
        (base,) = llm.generate([prompt(41)], GREEDY, use_tqdm=False)
        known = base.prompt_token_ids + base.outputs[0].token_ids
        for cut in (18, 39, 63):
            assert cut % BLOCK_SIZE
            other = (known[cut] + 1) % vocab
            prompts = [known[:cut] + [other] + prompt(5)] * ep
            hits = llm.generate(prompts, GREEDY, use_tqdm=False)
            for output in hits:
                check_greedy(reference, output, NUM_TOKENS)
            # Least-loaded ranks get one each, so one of them is where the prefix is.
            assert max(output.num_cached_tokens for output in hits) >= cut


@pytest.mark.slow
@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_demo_model_matches_transformers(ep: int) -> None:
    import torch
    import transformers

    from moe_runtime.weights.demo_model import demo_model_path

    folder = demo_model_path()
    reference = transformers.MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    questions = ["What is the capital of France?", "Write one sentence about the sea.", "Name three colours."]
    with LLM(
        model=str(folder), ep=ep, dtype="float32", max_model_len=512, num_kv_blocks=128, max_num_batched_tokens=29
    ) as llm:
        talks = [[{"role": "user", "content": question}] for question in questions]
        for _ in range(2):  # the second time from the prefix cache
            for output in llm.chat(talks, GREEDY, use_tqdm=False):
                check_greedy(reference, output, NUM_TOKENS)
