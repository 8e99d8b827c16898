"""A rank's private memory: the weights it keeps, the KV cache, and little more, while it loads and while it serves."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import psutil
import pytest
import torch

from moe_runtime import LLM, SamplingParams
from moe_runtime.attention.kv_cache import KVCache
from moe_runtime.models.registry import load_spec
from tests.helpers.big_models import make_big
from tests.helpers.usage import PeakPrivate, peak_anonymous_bytes

MIB = 2**20
EP = 2
NUM_EXPERTS = 60
PROMPT = 2048
BLOCK_SIZE = 16
NUM_BLOCKS = 2 * PROMPT // BLOCK_SIZE


def ranks_here() -> list[int]:
    children = psutil.Process().children()
    return [child.pid for child in children if "moe_runtime.engine.worker" in child.cmdline()]


# The number of other prompts and of output tokens of each, at most: the more, the more shapes its kernels meet.
@pytest.mark.parametrize(
    ("dispatcher", "num_others", "max_output", "quantization"),
    [
        ("one_sided", 16, 10, "none"),
        pytest.param("one_sided", 48, 40, "none", marks=pytest.mark.slow),
        pytest.param("collective", 48, 40, "none", marks=pytest.mark.slow),
        pytest.param("one_sided", 16, 10, "fp8", marks=pytest.mark.slow),
    ],
)
def test_a_rank_takes_its_weights_its_cache_and_little_more(
    dispatcher: str, num_others: int, max_output: int, quantization: str, tmp_path: Path, seed: int
) -> None:
    size = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 4096}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    experts = {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
    weight_bytes = make_big(
        "mixtral", tmp_path, seed, torch.bfloat16, **size, **heads, **experts, max_position_embeddings=4096
    )
    expert_bytes = NUM_EXPERTS * 3 * 512 * 1024 * 2 * 4
    # In FP8 half as much, and its scales are next to nothing.
    kept = weight_bytes - expert_bytes + expert_bytes // EP // (2 if quantization == "fp8" else 1)
    spec, _ = load_spec(tmp_path)
    kv = NUM_BLOCKS * KVCache.bytes_per_block(spec.attention_specs(), BLOCK_SIZE, torch.bfloat16)
    limit = 1.15 * kept + kv + 400 * MIB
    assert weight_bytes > 500 * MIB
    assert kept + expert_bytes / EP + kv + 150 * MIB > limit, "all experts, or its own a second time, would fit: the test shows nothing"

    draw = random.Random(seed)
    # Whole prompts, then batches of all sizes down to one.
    lengths = [PROMPT] * EP + [draw.randint(1, 300) for _ in range(num_others)]
    prompts = [[draw.randrange(4096) for _ in range(length)] for length in lengths]
    outputs_wanted = [draw.randint(1, max_output) for _ in prompts]
    params = [SamplingParams(max_tokens=n, ignore_eos=True, top_p=0.9) for n in outputs_wanted]
    with contextlib.ExitStack() as stack:
        with PeakPrivate(ranks_here) as peak:
            llm = stack.enter_context(
                LLM(
                    model=str(tmp_path),
                    ep=EP,
                    dispatcher=dispatcher,
                    quantization=quantization,
                    skip_tokenizer_init=True,
                    block_size=BLOCK_SIZE,
                    num_kv_blocks=NUM_BLOCKS,
                    max_num_batched_tokens=PROMPT,
                )
            )
            loading = dict(peak.bytes)
            outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == outputs_wanted
        exact = {pid: peak_anonymous_bytes(pid) for pid in ranks_here()}
    assert len(exact) == EP
    print(f"MiB: limit {limit / MIB:.0f}, weights kept {kept / MIB:.0f}, KV {kv / MIB:.0f}")
    for pid, anonymous in exact.items():
        highest = max(peak.bytes[pid], anonymous)
        print(f"MiB: while loading {loading[pid] / MIB:.0f}, highest {highest / MIB:.0f}")
        assert loading[pid] > kept, "the sampler saw nothing"
        assert highest <= limit
