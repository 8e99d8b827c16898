"""Cutting a step in two, and the model that decides whether overlap pays."""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING

import pytest
import torch

from moe_runtime.core import Routing, SamplingParams, ScheduledSequence, Sequence, StepPlan
from moe_runtime.engine.control import Agreement, StepTimes
from moe_runtime.engine.overlap import BALANCE, FRESH_STEPS, OverlapModel, Way, half, split
from moe_runtime.layers.ops import TORCH_OPS
from moe_runtime.models.decoder import Decoder
from moe_runtime.models.registry import load_spec
from moe_runtime.moe import cut_rows
from tests.helpers.tiny_models import FullAttention, LoopExperts, make_tiny, whole_batch

if TYPE_CHECKING:
    from pathlib import Path


def plan_of(new_tokens: list[int], draw: random.Random) -> StepPlan:
    """Sequences amid prompts of random lengths; some reach their end and sample."""
    scheduled = []
    for i, count in enumerate(new_tokens):
        start, rest = draw.randrange(50), draw.choice([0, 0, draw.randrange(20)])
        sequence = Sequence(str(i), list(range(start + count + rest)), SamplingParams())
        scheduled.append(ScheduledSequence(sequence, start, count))
    return StepPlan(tuple(scheduled))


def test_halves_are_the_plan(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        counts = [draw.choice([1, 1, 1, draw.randint(1, 90)]) for _ in range(draw.randrange(9))]
        plan = plan_of(counts, draw)
        first = half(plan)
        halves = split(plan, first)
        total = plan.num_tokens
        assert [part.num_tokens for part in halves] == [first, total - first]
        assert total <= 1 or min(first, total - first) >= max(1, int(BALANCE * total))
        tokens = [
            (item.sequence.request_id, item.start + i)
            for part in halves
            for item in part.scheduled
            for i in range(item.num_new_tokens)
        ]
        assert tokens == [
            (s.sequence.request_id, s.start + i) for s in plan.scheduled for i in range(s.num_new_tokens)
        ]
        # Who samples, and in which order, does not change.
        sampling = [item.sequence for part in halves for item in part.scheduled if item.samples]
        assert sampling == [item.sequence for item in plan.scheduled if item.samples]


def test_sequences_stay_whole_where_they_can(seed: int) -> None:
    draw = random.Random(seed)
    before, after = split(plan_of([30, 20, 49], draw), half(plan_of([30, 20, 49], draw)))
    assert [[s.num_new_tokens for s in part.scheduled] for part in (before, after)] == [[30, 20], [49]]
    plan = plan_of([3, 90, 1], draw)
    before, after = split(plan, half(plan))
    assert [[s.num_new_tokens for s in part.scheduled] for part in (before, after)] == [[3, 44], [46, 1]]
    assert after.scheduled[0].start == plan.scheduled[1].start + 44


@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
def test_chunks_are_the_rows(chunks: int, seed: int) -> None:
    draw = random.Random(seed)
    for tokens in (0, 1, 2, draw.randrange(3, 40)):
        most = tokens + draw.randrange(9)
        x = torch.randn(tokens, 3)
        routing = Routing(torch.randint(9, (tokens, 2)), torch.rand(tokens, 2))
        parts = cut_rows(x, routing, most, chunks)
        assert len(parts) == chunks
        assert torch.equal(torch.cat([rows for rows, _, _ in parts]), x)
        assert torch.equal(torch.cat([r.topk_ids_TK for _, r, _ in parts]), routing.topk_ids_TK)
        assert torch.equal(torch.cat([r.topk_weights_TK for _, r, _ in parts]), routing.topk_weights_TK)
        assert all(len(rows) == len(r.topk_ids_TK) <= limit for rows, r, limit in parts)


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_batches_in_turn_are_batches_alone(family: str, tmp_path: Path, seed: int) -> None:
    """The decoder's two ways through the layers; the Qwen model has layers whose MLP does not travel."""
    dense = {"decoder_sparse_step": 2} if family == "qwen2_moe" else {}
    make_tiny(family, tmp_path, seed, num_hidden_layers=3, **dense)
    spec, _ = load_spec(tmp_path)
    decoder = Decoder(spec, [spec.num_experts] * spec.num_moe_layers, torch.float32, "cpu", TORCH_OPS)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    attention = FullAttention(spec.attention_specs())
    moe = LoopExperts.for_local([list(range(spec.num_experts))] * spec.num_moe_layers)
    draw = random.Random(seed)
    batches = [
        whole_batch([[draw.randrange(spec.vocab_size) for _ in range(n)] for n in lens], rows)
        for lens, rows in (([3, 5], [2, 7]), ([], []), ([4], [3]))
    ]
    with torch.inference_mode():
        alone = [decoder([(b, attention.plan(b))], attention, moe) for b in batches]
        moe.calls.clear()
        turns = decoder([(b, attention.plan(b)) for b in batches], attention, moe)
    # The head multiplies all rows at once here, so the last bits may differ.
    torch.testing.assert_close(turns, torch.cat(alone), rtol=1e-4, atol=1e-4)
    assert turns.shape == (3, spec.vocab_size)
    assert [layer for layer, _, _ in moe.calls] == [n for n in range(spec.num_moe_layers) for _ in batches]


def agreement(tokens: int) -> Agreement:
    first = (tokens + 1) // 2
    return Agreement(tokens, (first, tokens - first), True, 0, True, False, False, None)


class Machine:
    """Steps that take what the formulas say: fixed_us of computing per pass, then some per token, and waiting."""

    def __init__(self, fixed_us: int, token_us: int, wait_us: int, setting: str = "auto") -> None:
        self.fixed_us, self.token_us, self.wait_us = fixed_us, token_us, wait_us
        self.model = OverlapModel(setting, log=True)

    def step(self, tokens: int) -> Way:
        way = self.model.choose(agreement(tokens))
        passes = 1 if way is Way.OFF else 2
        compute = passes * self.fixed_us + tokens * self.token_us
        wait = self.wait_us
        if way is Way.TWO_BATCHES:
            wait -= min(wait, compute // 2)
        self.model.observe(StepTimes(compute + wait, wait, compute // 2))
        return way

    def steps(self, number: int, tokens: int) -> list[Way]:
        return [self.step(tokens) for _ in range(number)]


def test_overlap_that_pays_is_switched_on(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(fixed_us=200, token_us=100, wait_us=4000)
    with caplog.at_level(logging.INFO):
        ways = machine.steps(64, tokens=50)
    assert ways[:8] == [Way.OFF] * 8
    assert ways[-32:] == [Way.TWO_BATCHES] * 32
    first = caplog.records[0].getMessage()
    assert first.startswith(
        "overlap of steps with 32 to 63 tokens: on. A step without takes 9.20 ms, of which 4.00 ms"
    )
    assert "on 6.60 ms (estimated: hides 2.60 ms, adds an unknown time of computing)" in first
    # It is measured anew now and then, and stays on.
    later = machine.steps(3 * FRESH_STEPS, tokens=50)
    assert later.count(Way.TWO_BATCHES) > 0.97 * len(later)
    assert later.count(Way.OFF) >= 3


def test_overlap_that_does_not_pay_is_tried_once_and_left_off(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(fixed_us=5000, token_us=1, wait_us=2000)
    with caplog.at_level(logging.INFO):
        ways = machine.steps(400, tokens=50)
    assert ways.count(Way.TWO_BATCHES) == 8
    assert ways[-300:] == [Way.OFF] * 300
    last = caplog.records[-1].getMessage()
    assert "32 to 63 tokens: off. A step without takes 7.05 ms, of which 2.00 ms waiting" in last
    assert "on 10.05 ms (measured: hides 2.00 ms, adds 5.00 ms of computing)" in last


def test_a_known_cost_needs_no_trial() -> None:
    """Weights that are read once more cost what a step of half the size shows."""
    machine = Machine(fixed_us=5000, token_us=1, wait_us=2000)
    for tokens in (3, 9, 20):
        machine.model.choose(agreement(tokens))
        for _ in range(9):
            machine.step(tokens)
    started = machine.steps(200, tokens=40)
    assert started == [Way.OFF] * 200


def test_nothing_is_cut_where_no_rank_has_two_tokens() -> None:
    for setting in ("on", "chunks", "auto"):
        machine = Machine(1, 1, 1000, setting)
        assert machine.steps(40, tokens=1) == [Way.OFF] * 40
    assert Machine(1, 1, 1, "on").steps(3, 2) == [Way.TWO_BATCHES] * 3
    assert Machine(1, 1, 1, "chunks").steps(3, 2) == [Way.CHUNKS] * 3
    assert Machine(1, 1, 9999, "off").steps(40, 64) == [Way.OFF] * 40
