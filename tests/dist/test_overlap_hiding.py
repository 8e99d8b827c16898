"""With a network that takes 20 ms for each message, half batches in turn hide waiting behind computing.

Computing is sleeping for a known time beside the real work of a tiny model, so that two processes on two busy cores
do not measure each other.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from moe_runtime.core import ExpertBatch
from moe_runtime.dispatch.mailbox import segment_bytes
from moe_runtime.dispatch.one_sided import OneSidedDispatcher
from moe_runtime.experts.base import ExpertWeights
from moe_runtime.experts.cpu import CpuExperts
from moe_runtime.layers.ops import TORCH_OPS
from moe_runtime.models.decoder import Decoder
from moe_runtime.models.registry import load_spec
from moe_runtime.moe import ExpertParallelMoe
from moe_runtime.placement.layout import contiguous, layer_placement
from moe_runtime.profiling.timeline import Timeline
from moe_runtime.profiling.trace import StepTrace, trace_file
from tests.helpers.dispatch_cases import TIMEOUT, exchange
from tests.helpers.spawn import run_ranks
from tests.helpers.tiny_models import FullAttention, make_tiny, whole_batch

DELAY_S = 0.020
NUM_LAYERS = 8
ATTENTION_S = EXPERTS_S = 0.050
"""Of a layer, for the whole batch."""
REPEATS = 3


class SlowAttention(FullAttention):
    def run(self, *args: Any) -> torch.Tensor:
        time.sleep(ATTENTION_S * args[0].shape[0] / 8)
        return super().run(*args)


class SlowExperts(CpuExperts):
    share = 1.0

    def __call__(self, batch: ExpertBatch, weights: ExpertWeights) -> torch.Tensor:
        time.sleep(EXPERTS_S * self.share)
        return super().__call__(batch, weights)


def passes(rank: int, num_ranks: int, folder: str, seed: int) -> torch.Tensor:
    """Forward passes without and with overlap in turn, all in one trace. Returns the largest difference of logits."""
    spec, _ = load_spec(Path(folder) / "model")
    placement = contiguous(spec.num_moe_layers, spec.num_experts, num_ranks, 0)
    slots = [layer[rank] for layer in placement.slots]
    torch.manual_seed(seed)
    decoder = Decoder(spec, [len(s) for s in slots], torch.float32, "cpu", TORCH_OPS)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
    dispatcher = OneSidedDispatcher(
        rank, num_ranks, exchange, hidden_size=spec.hidden_size, topk=spec.top_k, dtype=torch.float32,
        buffer_bytes=2 * segment_bytes(num_ranks, 64, 4 * spec.hidden_size, spec.top_k), step_timeout=TIMEOUT,
        is_alive=lambda rank: True, in_flight=2, delay_s=DELAY_S,
    )  # fmt: skip
    attention, experts, timeline = SlowAttention(spec.attention_specs()), SlowExperts(), Timeline()
    placements = [layer_placement(placement, layer, rank) for layer in range(spec.num_moe_layers)]
    moe = ExpertParallelMoe(dispatcher, experts, placements, rank, timeline)
    trace = StepTrace(timeline)
    trace.begin(2 * REPEATS, trace_file(Path(folder) / "trace", rank))
    prompts = [[5 * rank + i, 2, 3, 4 + i] for i in range(2)]

    whole, halves = whole_batch(prompts), [whole_batch([p]) for p in prompts]
    worst = torch.zeros(())
    with torch.inference_mode():
        for _ in range(REPEATS):
            dist.barrier()
            timeline.begin_step()
            experts.share = 1.0
            alone = decoder([(whole, attention.plan(whole))], attention, moe)
            timeline.end_step(halves=1)
            trace.step_done()
            dist.barrier()
            timeline.begin_step()
            experts.share = 0.5
            turns = decoder([(h, attention.plan(h)) for h in halves], attention, moe)
            timeline.end_step(halves=2)
            trace.step_done()
            worst = torch.maximum(worst, (alone - turns).abs().max())
    dispatcher.close()
    return worst


class Passes(NamedTuple):
    """Milliseconds of one kind of pass, from the trace: medians over the repeats."""

    step: float
    wait: float
    compute: float


def read(path: Path, halves: int) -> Passes:
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    rows = []
    for step in (e for e in events if e["name"] == "step" and e["args"]["halves"] == halves):
        laps = [e for e in events if e["tid"] == 0 and e is not step and 0 <= e["ts"] - step["ts"] < step["dur"]]
        took = {name: sum(e["dur"] for e in laps if e["name"] == name) / 1000 for name in {e["name"] for e in laps}}
        rows.append((step["dur"] / 1000, took["wait"], took["attention"] + took["experts"]))
    assert len(rows) == REPEATS
    return Passes(*(statistics.median(column) for column in zip(*rows, strict=True)))


@pytest.mark.timeout(120)
def test_two_halves_hide_most_of_the_waiting(tmp_path: Path, seed: int) -> None:
    make_tiny("qwen3_moe", tmp_path / "model", seed, num_hidden_layers=NUM_LAYERS)
    for difference in run_ranks(passes, 2, str(tmp_path), seed):
        assert difference < 1e-3
    for rank in range(2):
        off, on = (read(tmp_path / "trace" / f"rank{rank}.json", halves) for halves in (1, 2))
        print(f"rank {rank}: without {off}, with {on}")
        # The network does take its time: two messages a layer.
        assert off.wait >= 0.95 * 2 * NUM_LAYERS * 1000 * DELAY_S
        assert on.compute >= 0.95 * NUM_LAYERS * 1000 * (ATTENTION_S + EXPERTS_S)
        hidden = (off.wait - on.wait) / min(off.wait, off.compute)
        # All but the last message can be hidden; what else is missing is the machine's.
        assert hidden >= 0.7, f"{hidden:.0%} hidden: {off} {on}"
        # And it is not paid for elsewhere: the passes themselves are shorter.
        assert off.step - on.step >= 0.6 * off.wait, f"{off} {on}"
