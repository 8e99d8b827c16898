"""Random sampling through real ranks: a request's tokens follow from its seed, whatever runs beside it and wherever."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from moe_runtime import LLM, SamplingParams
from moe_runtime.engine.requests import completion_seed
from moe_runtime.sampling.sampler import uniform
from tests.helpers.tiny_models import make_tiny, reference_logprobs

if TYPE_CHECKING:
    from pathlib import Path

NUM_TOKENS = 16
NUM_PROMPTS = 4
BLOCK_SIZE = 4
ROUNDING = 1e-5
"""A draw that falls this close to the border between two tokens may go either way."""


@contextmanager
def tiny_llm(folder: Path, ep: int) -> Iterator[LLM]:
    """Room for a few sequences per rank only, and small chunks: batches preempt and mix prompts with outputs."""
    with LLM(
        model=str(folder),
        ep=ep,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=96,
        block_size=BLOCK_SIZE,
        num_kv_blocks=32,
        max_num_batched_tokens=16,
    ) as llm:
        yield llm


def seeded(seed: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True, **fields)


def reference_draw(model: Any, known: list[int], seed: int, position: int) -> tuple[int, float]:
    """The token that output `position` of a request with this seed gets after `known`, and how far it is from another."""
    probs = reference_logprobs(model, known)[-1].double().exp()
    cdf = (probs.cumsum(0) / probs.sum()).tolist()
    u = uniform(seed, position)
    return bisect_right(cdf, u), min(abs(border - u) for border in cdf[:-1])


def check_drawn(model: Any, prompt: list[int], tokens: list[int], seed: int) -> None:
    """Each token is the one its seed and position draw from transformers' distribution."""
    assert len(tokens) == NUM_TOKENS
    for position, token in enumerate(tokens):
        expected, distance = reference_draw(model, prompt + tokens[:position], seed, position)
        assert token == expected or distance < ROUNDING, f"output {position}: {token}, not {expected}"


def check_same(model: Any, prompt: list[int], seed: int, first: list[int], second: list[int]) -> None:
    """Equal tokens, up to a draw that rounding may decide; after that the two go different ways."""
    assert len(first) == len(second) == NUM_TOKENS
    for position, (a, b) in enumerate(zip(first, second, strict=True)):
        if a != b:
            _, distance = reference_draw(model, prompt + first[:position], seed, position)
            assert distance < ROUNDING, f"output {position}: {a} and {b}, {distance} from the border"
            return


def test_tokens_follow_from_the_seed(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    model = make_tiny(draw.choice(["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"]), tmp_path, seed)
    vocab = model.config.vocab_size

    def prompt() -> list[int]:
        return [draw.randrange(vocab) for _ in range(draw.randint(5, 40))]

    prompts, seeds = [prompt() for _ in range(NUM_PROMPTS)], draw.sample(range(2**62), NUM_PROMPTS)
    others, other_seed = [prompt() for _ in range(10)], draw.randrange(2**62)
    expected: list[list[int]] = []
    for ep in (1, 2):
        with tiny_llm(tmp_path, ep) as llm:

            def run(ids: list[list[int]], params: list[SamplingParams], llm: LLM = llm) -> list[Any]:
                return llm.generate(ids, params, use_tqdm=False)

            alone, hits = [], []
            for p, s in zip(prompts, seeds, strict=True):
                alone += run([p], [seeded(s)])
                # Once on every rank; the rank that has just computed it finds it in its cache.
                hits.append(run([p] * ep, [seeded(s)] * ep))
                assert max(output.num_cached_tokens for output in hits[-1]) >= len(p) - 1
            if not expected:
                expected = [output.outputs[0].token_ids for output in alone]
                for p, s, tokens in zip(prompts, seeds, expected, strict=True):
                    check_drawn(model, p, tokens, s)

            llm.reset_prefix_cache()
            together = run(prompts + others, [seeded(s) for s in seeds] + [seeded(other_seed, top_p=0.7)] * 10)
            assert sum(rank.preemptions for rank in llm.stats) > 0, "the cache was too large for this test"
            for i, (p, s) in enumerate(zip(prompts, seeds, strict=True)):
                for output in (alone[i], *hits[i], together[i]):
                    check_same(model, p, s, expected[i], output.outputs[0].token_ids)

            changed = run(prompts, [seeded(s + 1) for s in seeds])
            assert all(o.outputs[0].token_ids != tokens for o, tokens in zip(changed, expected, strict=True))


def test_completions_of_a_request_differ(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    model = make_tiny("qwen3_moe", tmp_path, seed)
    ids = [draw.randrange(model.config.vocab_size) for _ in range(21)]
    with tiny_llm(tmp_path, 2) as llm:
        params = seeded(seed, n=4)
        (four,), (again,) = (llm.generate([ids], params, use_tqdm=False) for _ in range(2))
        (single,) = llm.generate([ids], msgspec.structs.replace(params, n=1), use_tqdm=False)
        # Without a seed, each request draws its own.
        free = llm.generate([ids] * 3, msgspec.structs.replace(params, n=1, seed=None), use_tqdm=False)
    completions = [completion.token_ids for completion in four.outputs]
    assert [completion.index for completion in four.outputs] == [0, 1, 2, 3]
    assert len({tuple(tokens) for tokens in completions}) == 4
    assert len({tuple(output.outputs[0].token_ids) for output in free}) == 3
    check_same(model, ids, seed, completions[0], single.outputs[0].token_ids)
    for index, (first, second) in enumerate(zip(completions, again.outputs, strict=True)):
        check_same(model, ids, completion_seed(seed, index), first, second.token_ids)
