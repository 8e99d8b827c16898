"""--combine and --dispatch-dtype through the whole engine: which settings change the result, and which must not."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_runtime import LLM, SamplingParams
from moe_runtime.engine.outputs import RequestOutput
from tests.helpers.parity import Reference, check_greedy
from tests.helpers.tiny_models import make_tiny

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
Answer = list[tuple[list[int], list[dict[int, float]]]]
"""Per prompt the tokens, and the logprobs of each place's candidates."""


def generate(folder: Path, seed: int, **settings: Any) -> list[RequestOutput]:
    draw = random.Random(seed)
    prompts = [[draw.randrange(5, 60) for _ in range(draw.randint(1, 30))] for _ in range(5)]
    llm = LLM(
        model=str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=64,
        num_kv_blocks=64,
        **settings,
    )
    # One after the other: then all numbers of ranks compute the same rows together.
    with llm:
        return [
            llm.generate([ids], GREEDY, use_tqdm=False, routed_dp_rank=i % llm.config.ep)[0]
            for i, ids in enumerate(prompts)
        ]


@pytest.fixture
def one_core() -> Iterator[None]:
    """Ranks get a thread each, however many there are: sums of a product depend on the number of threads."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


def numbers(outputs: list[RequestOutput]) -> Answer:
    result = []
    for output in outputs:
        (completion,) = output.outputs
        assert completion.logprobs is not None
        places = [{i: entry.logprob for i, entry in place.items()} for place in completion.logprobs]
        result.append((completion.token_ids, places))
    return result


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize(
    ("settings", "same_bits"),
    [
        # FP8 changes what travels, alone as well as between ranks: the same bits for every dispatcher and number of ranks, if the
        # products have the same bits wherever an expert lies in memory.
        ({"dispatch_dtype": "fp8", "deterministic": True}, True),
        # Two partial sums of float32 rounded otherwise than one sum.
        ({"combine": "per_rank"}, False),
    ],
    ids=str,
)
def test_settings_reach_the_ranks(
    settings: dict[str, Any], same_bits: bool, tmp_path: Path, seed: int
) -> None:
    model = make_tiny("mixtral", tmp_path, seed, vocab_size=61, num_local_experts=7)
    alone = generate(tmp_path, seed, ep=1, **settings)
    fp8 = settings.get("dispatch_dtype") == "fp8"
    if fp8:
        assert numbers(alone) != numbers(generate(tmp_path, seed, ep=1, deterministic=True)), "nothing was rounded"
    else:
        check_greedy(Reference(model), alone, NUM_TOKENS)
    joined = {
        name: generate(tmp_path, seed, ep=2, dispatcher=name, **settings)
        for name in ("one_sided", "collective")
    }
    assert numbers(joined["one_sided"]) == numbers(joined["collective"])
    if same_bits:
        assert numbers(joined["one_sided"]) == numbers(alone)
    else:
        check_greedy(Reference(model), joined["one_sided"], NUM_TOKENS)
