"""The whole engine against transformers: real ranks, every family, forced small chunks, prefix hits, preemption."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from moe_runtime import LLM, SamplingParams
from moe_runtime.weights.demo_model import demo_model_path
from tests.helpers.parity import Reference, check_greedy
from tests.helpers.tiny_models import FAMILIES, make_tiny, reference_logprobs

if TYPE_CHECKING:
    from pathlib import Path

NUM_TOKENS = 64
BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
# Runs whose only use is what they leave in the prefix cache.
NUM_FIRST = 24
FIRST = SamplingParams(temperature=0.0, max_tokens=NUM_FIRST, ignore_eos=True, logprobs=2)
# On two cores each more rank costs seconds of start-up; the full grid is the slow tier's.
QUICK = [("mixtral", 1), ("olmoe", 2), ("qwen2_moe", 2), ("qwen3_moe", 2)]
FULL = [(family, ep) for family in FAMILIES for ep in (1, 2, 4, 8) if (family, ep) not in QUICK]
CASES = [pytest.param(*case, id=f"{case[0]}-ep{case[1]}") for case in QUICK]
CASES += [pytest.param(*case, id=f"{case[0]}-ep{case[1]}", marks=pytest.mark.slow) for case in FULL]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "ep"), CASES)
def test_tiny_model_matches_transformers(family: str, ep: int, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    model = make_tiny(family, tmp_path, seed)
    vocab = model.config.vocab_size

    def prompt(length: int) -> list[int]:
        return [draw.randrange(vocab) for _ in range(length)]

    # Room for about two of the longest sequences of a rank's 4 to 32: a batch of 32 must preempt.
    with LLM(
        model=str(tmp_path),
        ep=ep,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=160,
        block_size=BLOCK_SIZE,
        num_kv_blocks=(256 if ep <= 4 else 224) // BLOCK_SIZE,
        max_num_batched_tokens=7,
    ) as llm:
        first = prompt(37)
        (alone,) = llm.generate([first], GREEDY, use_tqdm=False)
        assert alone.num_cached_tokens == 0

        batch = [prompt(draw.randint(1, 60)) for _ in range(32)]
        outputs = [alone, *llm.generate(batch, GREEDY, use_tqdm=False)]
        assert sum(rank.preemptions for rank in llm.stats) > 0, "the cache was too large for this test"
        for rank in llm.stats:
            assert rank.num_running == rank.num_waiting == 0
            assert rank.num_free_blocks + rank.num_cached_blocks == rank.num_blocks, "blocks leaked"

        # Prefixes of what the cache holds, cut in the middle of a block and then different.
        for rank, cut in zip(itertools.cycle(range(ep)), (18, 39, 63), strict=False):
            assert cut % BLOCK_SIZE
            llm.reset_prefix_cache()
            (base,) = llm.generate([prompt(41)], FIRST, use_tqdm=False, routed_dp_rank=rank)
            known = base.prompt_token_ids + base.outputs[0].token_ids
            forked = known[:cut] + [(known[cut] + 1) % vocab] + prompt(5)
            (hit,) = llm.generate([forked], GREEDY, use_tqdm=False, routed_dp_rank=rank)
            assert hit.num_cached_tokens == cut
            outputs.append(hit)
    check_greedy(Reference(model), outputs, NUM_TOKENS)


@pytest.fixture(scope="module")
def demo_reference() -> Reference:
    """transformers' logprobs of the demo model, each sequence computed once for all tests."""
    model = transformers.MixtralForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    known: dict[tuple[int, ...], torch.Tensor] = {}

    def logprobs(ids: list[int], first: int) -> torch.Tensor:
        """Those after each token from position `first` on."""
        key = (first, *ids)
        if key not in known:
            # The engine's ranks wait meanwhile.
            torch.set_num_threads(2)
            known[key] = reference_logprobs(model, ids)[first:]
            torch.set_num_threads(1)
        return known[key]

    return Reference(model, logprobs)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_demo_model_matches_transformers(ep: int, demo_reference: Reference) -> None:
    words = "the sea a stone of light was under every old house and nobody could say why it sang".split()
    draw = random.Random(0)
    texts = [" ".join(draw.choices(words, k=draw.randint(1, 24))) for _ in range(32)]
    talks = [
        [{"role": "user", "content": "What is the capital of France?"}],
        [{"role": "user", "content": "Name three colours."}],
    ]
    with LLM(
        model=str(demo_model_path()),
        ep=ep,
        dtype="float32",
        max_model_len=160,
        # Few enough that each rank's share of the batch must preempt.
        num_kv_blocks={1: 100, 2: 60, 4: 32, 8: 18}[ep],
        max_num_batched_tokens=29,
    ) as llm:
        check_greedy(
            demo_reference, llm.chat(talks, FIRST, use_tqdm=False, routed_dp_rank=ep - 1), NUM_FIRST
        )
        outputs = llm.chat(talks, GREEDY, use_tqdm=False, routed_dp_rank=ep - 1)
        for output in outputs:
            # To the token, in the middle of a block: all but the last one, which must be computed.
            assert output.num_cached_tokens == len(output.prompt_token_ids) - 1
        outputs += llm.generate(texts, GREEDY, use_tqdm=False)
        check_greedy(demo_reference, outputs, NUM_TOKENS)
        assert sum(rank.preemptions for rank in llm.stats) > 0, "the cache was too large for this test"
