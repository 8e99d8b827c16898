"""Overlap in the real engine: the same tokens as without, and a model of measured times that leaves it off where it loses."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from moe_runtime import LLM, SamplingParams
from moe_runtime.engine.overlap import DECIDE_EVERY
from tests.helpers.parity import Reference, check_greedy
from tests.helpers.tiny_models import make_tiny

if TYPE_CHECKING:
    from pathlib import Path

NUM_TOKENS = 16
BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)


def start(folder: Path, ep: int, **settings: Any) -> LLM:
    """Small chunks, so that steps mix prompts with decodes and are cut inside sequences."""
    defaults: dict[str, Any] = {
        "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 96, "block_size": BLOCK_SIZE,
        "num_kv_blocks": 64, "max_num_batched_tokens": 13,
    }  # fmt: skip
    return LLM(model=str(folder), ep=ep, **(defaults | settings))


def run(llm: LLM, prompts: list[list[int]], forks: list[tuple[list[int], int]]) -> list[Any]:
    """One alone (idle peers; two tokens and fewer a step), all together, then hits of cached prefixes."""
    outputs = llm.generate(prompts[:1], GREEDY, use_tqdm=False, routed_dp_rank=0)
    outputs += llm.generate(prompts, GREEDY, use_tqdm=False)
    llm.reset_prefix_cache()
    for ids, cut in forks:
        outputs += llm.generate([ids], GREEDY, use_tqdm=False, routed_dp_rank=llm.config.ep - 1)
        (hit,) = llm.generate([[*ids[:cut], *ids[: cut // 2]]], GREEDY, use_tqdm=False, routed_dp_rank=llm.config.ep - 1)
        assert hit.num_cached_tokens >= cut
        outputs.append(hit)
    return outputs


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "ep", "extra"),
    [
        pytest.param("qwen3_moe", 2, {}, id="ep2"),
        pytest.param("qwen2_moe", 2, {"dispatcher": "collective"}, id="ep2-collective", marks=pytest.mark.slow),
        pytest.param("olmoe", 4, {}, id="ep4", marks=pytest.mark.slow),
    ],
)
def test_tokens_do_not_depend_on_overlap(
    family: str, ep: int, extra: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    model = make_tiny(family, tmp_path, seed)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(model.config.vocab_size) for _ in range(length)]

    prompts = [prompt(2)] + [prompt(draw.randint(1, 60)) for _ in range(9)]
    forks = [(prompt(41), 18), (prompt(30), 7)]
    outputs = {}
    for way in ("off", "on", "chunks"):
        with start(tmp_path, ep, overlap=way, **extra) as llm:
            outputs[way] = run(llm, prompts, forks)
            for rank in llm.stats:
                assert (rank.two_batch_steps > 10) is (way == "on")
                assert (rank.chunked_steps > 10) is (way == "chunks")
                assert rank.two_batch_steps + rank.chunked_steps < rank.steps, "no step of one token was run"
    for each in outputs.values():
        check_greedy(Reference(model), each, NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_logprobs_are_equal_to_the_bit_in_deterministic_mode(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    vocab = make_tiny("qwen3_moe", tmp_path, seed).config.vocab_size
    prompts = [[draw.randrange(vocab) for _ in range(draw.randint(1, 60))] for _ in range(10)]
    forks = [([draw.randrange(vocab) for _ in range(41)], 18)]
    seen = []
    for way in ("off", "on", "chunks"):
        with start(tmp_path, 2, overlap=way, deterministic=True) as llm:
            seen.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in run(llm, prompts, forks)])
    assert seen[1] == seen[0]
    assert seen[2] == seen[0]


def test_auto_leaves_it_off_on_a_tiny_model_and_says_why(
    tmp_path: Path, seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Between processes of one host rows travel in microseconds: a second pass through the layers costs more."""
    draw = random.Random(seed)
    vocab = make_tiny("qwen3_moe", tmp_path / "model", seed, num_hidden_layers=4).config.vocab_size
    prompts = [[draw.randrange(vocab) for _ in range(8)] for _ in range(12)]
    settings = {"max_num_batched_tokens": 64, "trace_steps": 20, "trace_dir": str(tmp_path / "trace")}
    with start(tmp_path / "model", 2, log_level="info", **settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
        (one, two) = llm.stats
    assert one.two_batch_steps == two.two_batch_steps
    assert one.two_batch_steps + one.chunked_steps < one.steps / 2
    lines = [line for line in capfd.readouterr().err.splitlines() if "overlap of steps with" in line]
    # A busy machine may let it be tried in between.
    off = [line for line in lines if "tokens: off. A step without takes" in line]
    assert off
    assert all("expected of the others: on" in line for line in off)
    assert all("rank 0" in line for line in lines), "told once"
    for rank in range(2):
        check_trace(json.loads((tmp_path / "trace" / f"rank{rank}.json").read_text()), rank, layers=4)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_auto_switches_on_where_the_network_is_slow(
    tmp_path: Path, seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Prompts of 256 tokens a rank, which take a layer several ms, on a network that takes 10 ms a message.

    It is switched on as soon as steps have been timed, for as many steps as a decision holds. Whether it stays on depends
    on what the machine lets it gain: that the measured times decide so is tested in tests/unit/test_overlap.py.
    """
    make_tiny(
        "qwen3_moe", tmp_path, seed, num_hidden_layers=3, hidden_size=512, moe_intermediate_size=1024,
        num_experts=8, num_experts_per_tok=4, vocab_size=128,
    )  # fmt: skip
    draw = random.Random(seed)
    prompts = [[draw.randrange(128) for _ in range(256)] for _ in range(96)]
    settings = {"max_model_len": 300, "num_kv_blocks": 400, "max_num_batched_tokens": 256, "dispatch_delay_ms": 10.0}
    with start(tmp_path, 2, log_level="info", **settings) as llm:
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        (one, two) = llm.stats
    lines = [line for line in capfd.readouterr().err.splitlines() if "overlap of steps with 256 to 511" in line]
    assert one.two_batch_steps == two.two_batch_steps >= DECIDE_EVERY, lines
    assert "tokens: on. A step without takes" in lines[0]


def check_trace(trace: Any, rank: int, layers: int) -> None:
    """Each step is cut into laps without gaps, and each layer's rows travel out and back."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {rank}
    steps = [event for event in events if event["name"] == "step"]
    assert len(steps) == 20
    for step in steps:
        end = step["ts"] + step["dur"]
        inside = [e for e in events if step["ts"] <= e["ts"] < end and e is not step]
        laps = [e for e in inside if e["tid"] == 0]
        assert sum(e["dur"] for e in laps) <= step["dur"] + 1
        names = {e["name"] for e in laps}
        assert names >= {"attention", "dispatch", "wait", "experts", "combine", "head"}
        passes = layers * step["args"]["halves"]
        for name in ("dispatch under way", "combine under way"):
            assert sum(e["name"] == name for e in inside) in (passes, 2 * passes)
