"""DeepSpeed as a second oracle: its AutoEP gives this engine's outputs, and what its MoE layers saved can be served."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime import LLM, SamplingParams
from moe_runtime.models.registry import load_spec
from moe_runtime.tools.import_deepspeed import main
from moe_runtime.weights.loader import load_weights
from tests.helpers.deepspeed_ranks import autoep_logprobs, train_and_save
from tests.helpers.parity import MAX_LOGPROB_ERROR, Reference, check_greedy
from tests.helpers.python_packages import deepspeed_folder
from tests.helpers.run_decoder import logprobs_with_cpu_experts
from tests.helpers.spawn import run_ranks
from tests.helpers.tiny_models import make_tiny, tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def packages() -> str:
    return str(deepspeed_folder())


def test_autoep_gives_the_engines_outputs(packages: str, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    ep = 2
    model = make_tiny(
        "qwen3_moe", tmp_path, seed, num_experts=8, num_experts_per_tok=2, norm_topk_prob=draw.random() < 0.5
    )
    prompts = [
        [draw.randrange(model.config.vocab_size) for _ in range(draw.randint(1, 40))] for _ in range(6)
    ]
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5)
    with LLM(
        model=str(tmp_path),
        ep=ep,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=80,
        num_kv_blocks=64,
    ) as llm:
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
    texts = [output.prompt_token_ids + output.outputs[0].token_ids[:-1] for output in outputs]
    found: dict[int, torch.Tensor] = {}
    for part in run_ranks(autoep_logprobs, ep, packages, str(tmp_path), texts, timeout=400):
        found |= part
    oracle = {tuple(text): found[i] for i, text in enumerate(texts)}
    reference = Reference(model, lambda ids, first: oracle[tuple(ids)][first:])
    check_greedy(reference, outputs, NUM_TOKENS)


CASES: list[tuple[str, int, tuple[str, str, str], dict[str, Any]]] = [
    ("mixtral", 2, ("w1", "w3", "w2"), {"num_local_experts": 6, "num_experts_per_tok": 2}),
    ("qwen3_moe", 1, ("gate_proj", "up_proj", "down_proj"), {"num_experts_per_tok": 3, "norm_topk_prob": True}),
    ("qwen3_moe", 2, ("in_gate", "in_up", "out"), {"num_experts": 4, "num_experts_per_tok": 1, "norm_topk_prob": False}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "ep", "names", "overrides"), CASES, ids=["top2-ep2", "top3-ep1", "top1-ep2"]
)
def test_a_checkpoint_that_deepspeed_wrote(
    family: str,
    ep: int,
    names: tuple[str, str, str],
    overrides: dict[str, Any],
    packages: str,
    tmp_path: Path,
    seed: int,
) -> None:
    config = tiny_config(family, seed, num_hidden_layers=2, **overrides)
    config.architectures = ["MixtralForCausalLM" if family == "mixtral" else "Qwen3MoeForCausalLM"]
    draw = random.Random(seed)
    texts = [[draw.randrange(config.vocab_size) for _ in range(n)] for n in (21, 9)]
    source, out = tmp_path / "deepspeed", tmp_path / "model"
    results = run_ranks(train_and_save, ep, packages, config, names, seed, str(source), texts, timeout=400)
    assert main([str(source), str(out), "--config", str(source / "hub"), "--experts", ",".join(names)]) == 0
    spec, adapter = load_spec(out)
    experts = [list(range(spec.num_experts))] * spec.num_moe_layers
    decoder = load_weights(out, spec, adapter, experts, torch.float32, "cpu")
    for i, text in enumerate(texts):
        expected = results[0][i]
        assert expected.std() > 0.3, "the reference's distribution is too flat to show a difference"
        torch.testing.assert_close(
            logprobs_with_cpu_experts(decoder, text), expected, atol=MAX_LOGPROB_ERROR, rtol=0
        )
