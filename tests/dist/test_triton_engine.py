"""Triton kernels and FP8 rows where they are wired in: the whole engine, its kernels interpreted, beside the CPU path."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from moe_runtime import LLM, SamplingParams
from tests.helpers.fp8_checkpoints import FORMATS, write_fp8
from tests.helpers.parity import CLEAR_MARGIN, MAX_LOGPROB_ERROR, Reference, check_greedy
from tests.helpers.tiny_models import make_tiny

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2)
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}
TRITON = {"attention_backend": "triton", "layer_backend": "triton", "moe_backend": "triton"}
FAST = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
SLOW = pytest.mark.slow


def generate(
    model: Path, prompts: list[list[int]], params: SamplingParams = GREEDY, **settings: Any
) -> tuple[list[Any], dict[str, str]]:
    """The outputs of all prompts, then of the first again, whose prefix is in the cache; and rank 0's choices."""
    defaults = {"dtype": "float32", "max_model_len": 64, "block_size": 3, "num_kv_blocks": 64}
    with LLM(
        model=str(model), skip_tokenizer_init=True, max_num_batched_tokens=16, **(defaults | settings)
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        outputs += llm.generate(prompts[0], params, use_tqdm=False)
        return outputs, llm._engine.ready[0].info


def shared_logprobs(one: Any, other: Any) -> Iterator[tuple[bool, float]]:
    """For every output token up to the first that differs: whether it is the same, and the largest difference of logprobs."""
    (a,), (b,) = one.outputs, other.outputs
    assert len(a.token_ids) == len(b.token_ids) > 0
    for mine, theirs, p, q in zip(a.token_ids, b.token_ids, a.logprobs, b.logprobs, strict=True):
        shared = p.keys() & q.keys()
        assert shared
        errors = [abs(p[t].logprob - q[t].logprob) for t in shared]
        assert all(e == e for e in errors), "NaN"
        yield mine == theirs, max(errors)
        if mine != theirs:
            return


def check_same(ours: list[Any], theirs: list[Any], bound: float = MAX_LOGPROB_ERROR) -> None:
    """Logprobs within `bound`, and the same tokens, but where the best two are no clearer apart than the bound allows."""
    for one, other in zip(ours, theirs, strict=True):
        for i, (same, error) in enumerate(shared_logprobs(one, other)):
            assert error < bound, f"output token {i}: off by {error}"
            if not same:
                best, second = sorted(
                    (p.logprob for p in other.outputs[0].logprobs[i].values()), reverse=True
                )[:2]
                assert best - second <= max(CLEAR_MARGIN, 2 * bound), f"output token {i} differs"


def draw_prompts(vocab: int, seed: int, *lengths: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(n)] for n in lengths]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("family", "ep"),
    [
        ("qwen3_moe", 1),
        ("qwen3_moe", 2),
        pytest.param("qwen2_moe", 2, marks=SLOW),
    ],
)
def test_tokens_are_transformers_tokens(family: str, ep: int, tmp_path: Path, seed: int) -> None:
    """Chunked prompts, steps that mix prompts and decodes, a prefix hit; per-head norms, a sliding window or shared experts."""
    own: dict[str, Any] = {"head_dim": 12}
    if family == "mixtral":
        own = {"sliding_window": 7}
    if family == "qwen3_moe" and ep == 1:
        own |= {"mlp_only_layers": [0], "num_hidden_layers": 2}
    model = make_tiny(family, tmp_path, seed, **(SIZES | own))
    prompts = draw_prompts(model.config.vocab_size, seed, *((19, 2) if ep == 1 else (4, 2)))
    ways = {} if ep == 1 else {"dispatcher": "one_sided"}
    outputs, info = generate(tmp_path, prompts, ep=ep, **ways, **TRITON)
    assert {name: info[name] for name in TRITON} == TRITON
    assert info["dispatcher"] == ("local" if ep == 1 else "one_sided")
    assert info["routing"] == "triton"
    check_greedy(Reference(model), outputs, GREEDY.max_tokens or 0)
    assert outputs[-1].num_cached_tokens > 0


# What is rounded to 8 bits may fall the other way after an error of the last bit, so those bounds are wider.
@SLOW
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("checkpoint", "settings", "bound"),
    [
        ("plain", {"ep": 2, "combine": "per_rank"}, MAX_LOGPROB_ERROR),
        ("plain", {"ep": 1, "kv_cache_dtype": "fp8_e4m3"}, 0.05),
        ("fp8", {"ep": 1}, 0.05),
        ("fp8", {"ep": 2, "combine": "per_rank", "dispatch_dtype": "fp8", "dtype": "bfloat16"}, 0.15),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_gives_the_cpu_paths_tokens(
    checkpoint: str, settings: dict[str, Any], bound: float, tmp_path: Path, seed: int
) -> None:
    """The same settings with torch's kernels round the same values."""
    model = make_tiny("qwen3_moe", tmp_path / "plain", seed, **SIZES, hidden_size=140)
    write_fp8(tmp_path / "plain", FORMATS["deepseek"], tmp_path / "fp8", tmp_path / "dequantised")
    prompts = draw_prompts(model.config.vocab_size, seed, 7, 1)
    dispatcher = "local" if settings["ep"] == 1 else "one_sided"
    ours, info = generate(tmp_path / checkpoint, prompts, dispatcher=dispatcher, **TRITON, **settings)
    theirs, _ = generate(tmp_path / checkpoint, prompts, **settings)
    assert {name: info[name] for name in TRITON} == TRITON
    assert info["dispatcher"] == dispatcher
    assert info["kv_cache_dtype"] == (
        "float8_e4m3fn" if "kv_cache_dtype" in settings else settings.get("dtype", "float32")
    )
    assert info["quantization"] == ("fp8_block" if checkpoint == "fp8" else "none")
    check_same(ours, theirs, bound)


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", ["one_sided", "collective"])
def test_sums_per_rank_give_the_same_tokens(dispatcher: str, tmp_path: Path, seed: int) -> None:
    """Only the order of the sums differs."""
    model = make_tiny("qwen2_moe", tmp_path, seed, num_experts_per_tok=3)
    prompts = draw_prompts(model.config.vocab_size, seed, 19, 2, 9, 30)
    outputs, _ = generate(
        tmp_path,
        prompts,
        FAST,
        ep=2,
        dispatcher=dispatcher,
        combine="per_rank",
        overlap="on",
        num_redundant_experts=1,
    )
    check_greedy(Reference(model), outputs, FAST.max_tokens or 0)
