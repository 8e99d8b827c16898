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
from tests.helpers.parity import Reference, Rows
from tests.helpers.tiny_models import make_tiny

if TYPE_CHECKING:
    from pathlib import Path

    import torch

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


def drawn(prompt: list[int], tokens: list[int], seed: int) -> Rows:
    """For `Reference.check`: each token is the one that its seed and position draw from transformers' distribution.

    So two runs of a request agree, but where a draw falls so close to a border that rounding may decide; there the two part.
    """
    assert len(tokens) == NUM_TOKENS

    def problem(position: int, row: torch.Tensor) -> str:
        probs = row.double().exp()
        cdf = (probs.cumsum(0) / probs.sum()).tolist()
        u = uniform(seed, position)
        expected, distance = bisect_right(cdf, u), min(abs(border - u) for border in cdf[:-1])
        right = tokens[position] == expected or distance < ROUNDING
        return "" if right else f"token {tokens[position]}, not {expected}; {distance} from the border"

    return Rows((prompt + tokens)[:-1], len(prompt) - 1, problem)


def test_tokens_follow_from_the_seed(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    model = make_tiny(draw.choice(["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"]), tmp_path, seed)
    vocab = model.config.vocab_size

    def prompt() -> list[int]:
        return [draw.randrange(vocab) for _ in range(draw.randint(5, 40))]

    prompts, seeds = [prompt() for _ in range(NUM_PROMPTS)], draw.sample(range(2**62), NUM_PROMPTS)
    others, other_seed = [prompt() for _ in range(10)], draw.randrange(2**62)
    expected: list[list[int]] = []
    rows: list[Rows] = []
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

            llm.reset_prefix_cache()
            together = run(prompts + others, [seeded(s) for s in seeds] + [seeded(other_seed, top_p=0.7)] * 10)
            assert sum(rank.preemptions for rank in llm.stats) > 0, "the cache was too large for this test"
            for i, (p, s) in enumerate(zip(prompts, seeds, strict=True)):
                outputs = (alone[i], *hits[i], together[i])
                rows += [drawn(p, output.outputs[0].token_ids, s) for output in outputs]

            changed = run(prompts, [seeded(s + 1) for s in seeds])
            assert all(o.outputs[0].token_ids != tokens for o, tokens in zip(changed, expected, strict=True))
    Reference(model).check(rows)


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
    rows = [drawn(ids, single.outputs[0].token_ids, seed)]
    for output in (four, again):
        rows += [drawn(ids, one.token_ids, completion_seed(seed, one.index)) for one in output.outputs]
    Reference(model).check(rows)
