"""--init-expert-location through real ranks: weights go straight where the file says, and the output is the same."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_runtime import LLM, SamplingParams
from moe_runtime.config import EngineConfig
from moe_runtime.config import replace as replace_config
from moe_runtime.engine.initial_placement import initial_placement, placement_model
from moe_runtime.errors import CheckpointError, ConfigError
from moe_runtime.models.registry import load_spec
from moe_runtime.placement.formats import FORMATS, write_placement
from moe_runtime.placement.stored import Model
from moe_runtime.placement.validate import check_slots
from moe_runtime.weights.identity import checkpoint_identity
from tests.helpers.placements import random_placement
from tests.helpers.tiny_models import make_tiny

Result = list[list[tuple[int, list[tuple[int, float]]]]]


def run(folder: Path, prompts: list[list[int]], **settings: Any) -> tuple[Result, list[dict[str, str]]]:
    """Tokens with their logprobs as exact floats, for each prompt; and what the ranks say of themselves."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
    with LLM(str(folder), skip_tokenizer_init=True, max_model_len=64, num_kv_blocks=64, **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        infos = [ready.info for ready in llm._engine.ready]
    results = [
        [
            (token, sorted((t, p.logprob) for t, p in logprobs.items()))
            for token, logprobs in zip(completion.token_ids, completion.logprobs or [], strict=True)
        ]
        for output in outputs
        for completion in output.outputs
    ]
    return results, infos


def sparse_model(folder: Path, seed: int) -> tuple[Model, list[list[int]]]:
    """A checkpoint whose second decoder layer has no experts, what placements for it are held against, and prompts."""
    draw = random.Random(seed)
    config = make_tiny("qwen3_moe", folder, seed, num_hidden_layers=4, mlp_only_layers=[1]).config
    spec, _ = load_spec(folder)
    assert spec.moe_layers == (0, 2, 3)
    prompts = [[draw.randrange(config.vocab_size) for _ in range(draw.randint(5, 30))] for _ in range(8)]
    return placement_model(spec, 1, checkpoint_identity(folder)), prompts


def write_random(path: Path, draw: random.Random, model: Model, ep: int, spare: int, name: str) -> int:
    """A random placement with `spare` more slots per rank than it takes; returns the slots per rank."""
    width = min(-(-model.num_experts // ep) + spare, model.num_experts)
    placement = random_placement(draw, len(model.moe_layers), model.num_experts, ep, width)
    of_ranks = Model(model.num_experts, ep, model.moe_layers, model.num_layers, model.checkpoint)
    write_placement(path, placement, of_ranks, name)
    return width


def test_same_floats_in_any_place(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    model, prompts = sparse_model(tmp_path / "model", seed)
    want, _ = run(tmp_path / "model", prompts, deterministic=True)
    path = tmp_path / "placement"
    width = write_random(path, draw, model, 2, 1, draw.choice(FORMATS))
    got, infos = run(tmp_path / "model", prompts, ep=2, deterministic=True, init_expert_location=str(path))
    assert got == want
    assert [info["slots_per_rank"] for info in infos] == [str(width)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moe_runtime", "sglang_pt", "vllm_ascend"])
def test_same_output_on_four_ranks(name: str, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    model, prompts = sparse_model(tmp_path / "model", seed)
    want, _ = run(tmp_path / "model", prompts, deterministic=True)
    path = tmp_path / "placement"
    write_random(path, draw, model, 4, draw.randint(0, 2), name)
    # Also given as a text, if it is one.
    given = path.read_text() if name != "sglang_pt" else str(path)
    got, _ = run(tmp_path / "model", prompts, ep=4, deterministic=True, init_expert_location=given)
    assert got == want
    default, _ = run(tmp_path / "model", prompts, ep=4, init_expert_location=str(path))
    assert [[token for token, _ in r] for r in default] == [[token for token, _ in r] for r in want]


def test_what_does_not_fit_is_told(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "model"
    model, _ = sparse_model(folder, seed)
    spec, _ = load_spec(folder)
    experts = list(range(model.num_experts))

    def message(**settings: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            initial_placement(EngineConfig(model=str(folder), **settings), spec, 1)
        return str(caught.value)

    assert "there is no such file" in message(init_expert_location=str(tmp_path / "absent"))
    twice = str([experts, experts, [0, *experts[:-1]]])
    assert "MoE layer 2 (decoder layer 3), rank 0, slot 1: holds expert 0 again" in message(init_expert_location=twice)
    text = message(init_expert_location=str(experts), num_redundant_experts=2)
    assert "num_redundant_experts=2, but init_expert_location has 0" in text
    other = Model(model.num_experts, 1, model.moe_layers, model.num_layers, "0" * 64)
    path = tmp_path / "placement.json"
    write_placement(path, random_placement(random.Random(seed), 3, model.num_experts, 1, model.num_experts), other)
    assert "made for another checkpoint (000000000000...)" in message(init_expert_location=str(path))
    # And by the program whose ranks have found it.
    row = [0, *experts[:-1], *experts]
    with pytest.raises(ConfigError, match="MoE layer 0, rank 0, slot 1: holds expert 0 again"):
        LLM(str(folder), skip_tokenizer_init=True, ep=2, init_expert_location=str([row] * 3))


def test_statistics_are_planned_from(tmp_path: Path, seed: int) -> None:
    model, _ = sparse_model(tmp_path, seed)
    spec, _ = load_spec(tmp_path)
    counts = np.random.default_rng(seed).integers(1, 100, (spec.num_layers, spec.num_experts))
    counts[:, 1] = 1000
    given = json.dumps({"logical_count": counts.tolist()})
    config = EngineConfig(model=str(tmp_path), init_expert_location=given, num_redundant_experts=1)
    placement = initial_placement(config, spec, 2)
    check_slots(placement.slots, replace(model, num_ranks=2), "planned")
    # The hot expert is the one with a replica.
    assert all(sum(rank.count(1) for rank in layer) == 2 for layer in placement.slots)
    with pytest.raises(ConfigError, match="999 redundant experts do not fit"):
        initial_placement(replace_config(config, num_redundant_experts=999), spec, 2)
    wrong = json.dumps({"logical_count": counts[:, 1:].tolist()})
    with pytest.raises(ConfigError, match=f"is for {spec.num_experts - 1} experts, but the model has {spec.num_experts}"):
        initial_placement(replace_config(config, init_expert_location=wrong), spec, 2)


def test_trivial_is_the_default(tmp_path: Path, seed: int) -> None:
    sparse_model(tmp_path, seed)
    spec, _ = load_spec(tmp_path)
    default = initial_placement(EngineConfig(model=str(tmp_path), num_redundant_experts=1), spec, 2)
    trivial = EngineConfig(model=str(tmp_path), num_redundant_experts=1, init_expert_location="trivial")
    assert initial_placement(trivial, spec, 2) == default


def test_the_identity_follows_the_files_not_the_folder(tmp_path: Path, seed: int) -> None:
    make_tiny("mixtral", tmp_path / "a", seed)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first = checkpoint_identity(tmp_path / "a")
    assert checkpoint_identity(tmp_path / "b") == first
    with (tmp_path / "b" / "model.safetensors").open("ab") as file:
        file.write(b" ")
    assert checkpoint_identity(tmp_path / "b") != first
    (tmp_path / "a" / "config.json").write_text((tmp_path / "a" / "config.json").read_text() + " ")
    assert checkpoint_identity(tmp_path / "a") != first
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint_identity(tmp_path)
