"""Which steps are recorded and replayed, and the buffers of recorded steps."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from moe_runtime.config import EngineConfig
from moe_runtime.core import SamplingParams, ScheduledSequence, Sequence, StepPlan
from moe_runtime.engine.graph_sizes import GraphSizes, Parts, choose_sizes, default_sizes
from moe_runtime.engine.graphs import StepBuffers, StepGraphs
from moe_runtime.engine.model_runner import build_batch
from moe_runtime.errors import ConfigError

CPU = torch.device("cpu")
BLOCK_SIZE, LONGEST, SCRATCH = 4, 30, 99
GPU = Parts(device_type="cuda", attention="triton", experts="triton", overlap="off", dispatch_tokens=1 << 16)


def test_default_sizes() -> None:
    assert default_sizes(1) == (1,)
    assert default_sizes(4) == (1, 2, 4)
    assert default_sizes(30) == (1, 2, 4, 8, 16, 24, 30)
    assert default_sizes(512)[-4:] == (464, 480, 496, 512)
    assert len(default_sizes(512)) == 3 + 31 + 17


def choose(parts: Parts = GPU, **settings: Any) -> GraphSizes:
    return choose_sizes(EngineConfig(**settings), parts)


def test_sizes_follow_the_settings() -> None:
    assert choose() == GraphSizes(default_sizes(256), "auto")
    assert choose(max_num_seqs=1000).sizes[-1] == 512
    assert choose(max_num_seqs=100, max_num_batched_tokens=50).sizes[-1] == 50
    assert choose(cuda_graph_max_size=12, max_num_seqs=3).sizes == (1, 2, 3)
    assert choose(cuda_graph_sizes="8 1,2") == GraphSizes((1, 2, 8), "asked for")
    assert choose(cuda_graph_sizes="1,2,8", cuda_graph_max_size=4).sizes == (1, 2)
    assert choose(GPU._replace(dispatch_tokens=128)).sizes[-1] == 128
    assert choose(enforce_eager=True) == GraphSizes((), "enforce_eager")
    assert str(choose()) == "35 sizes up to 256"
    assert str(choose(enforce_eager=True)) == "off"


@pytest.mark.parametrize(
    ("changes", "settings", "part"),
    [
        ({"device_type": "cpu"}, {}, "need a GPU"),
        ({"attention": "reference"}, {}, "attention_backend reference"),
        ({"experts": "cpu"}, {}, "moe_backend cpu"),
        ({"overlap": "chunks"}, {}, "overlap chunks"),
        ({}, {"deterministic": True}, "--deterministic"),
    ],
)
def test_where_nothing_can_be_recorded(changes: dict[str, Any], settings: dict[str, Any], part: str) -> None:
    """By default nothing is, and the reason is told; whoever asked for it is refused."""
    parts = GPU._replace(**changes)
    found = choose(parts, **settings)
    assert not found.sizes
    assert part in found.why
    for asked in ({"cuda_graph_sizes": "1,2"}, {"cuda_graph_max_size": 8}):
        with pytest.raises(ConfigError, match=part):
            choose(parts, **settings, **asked)
    assert choose(parts, **settings, enforce_eager=True).sizes == ()


@pytest.mark.parametrize("text", ["", ",", "0", "1,a", "-1", "1.5", "70000", "²"])
def test_what_are_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match=r"cuda_graph_sizes=.*must be numbers"):
        choose(cuda_graph_sizes=text)


def test_sizes_that_cannot_be_had_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 128 tokens a rank"):
        choose(GPU._replace(dispatch_tokens=128), cuda_graph_sizes="64,256")
    with pytest.raises(ConfigError, match="at least one size"):
        choose(cuda_graph_sizes="8", cuda_graph_max_size=4)
    with pytest.raises(ConfigError, match="give one of them"):
        choose(cuda_graph_sizes="8", enforce_eager=True)


def plan_of(*spans: tuple[int, int, int]) -> StepPlan:
    """Sequences of (known tokens, first token of the step, new tokens); blocks 10 i, 10 i + 1, ..."""
    scheduled = []
    for i, (known, start, new) in enumerate(spans):
        table = list(range(10 * i, 10 * i + -(-known // BLOCK_SIZE)))
        ids = [100 * i + token for token in range(known)]
        sequence = Sequence(str(i), ids, SamplingParams(), block_table=table)
        scheduled.append(ScheduledSequence(sequence, start, new))
    return StepPlan(tuple(scheduled))


def test_which_steps_fit() -> None:
    graphs = StepGraphs((1, 3), LONGEST, SCRATCH, BLOCK_SIZE, 5, CPU)
    decode = (7, 6, 1)
    assert graphs.fits(plan_of())
    assert graphs.fits(plan_of(decode, (1, 0, 1), (LONGEST, LONGEST - 1, 1)))
    assert not graphs.fits(plan_of(*[decode] * 4)), "too many"
    assert not graphs.fits(plan_of(decode, (7, 5, 2))), "two tokens"
    assert not graphs.fits(plan_of(decode, (7, 5, 1))), "its logits are not wanted"
    assert not graphs.fits(plan_of((LONGEST + 1, LONGEST, 1))), "too long"


def test_buffers_hold_the_step_and_nothing_older(seed: int) -> None:
    buffers = StepBuffers.allocate(9, LONGEST, SCRATCH, BLOCK_SIZE, CPU)
    for _ in range(20):
        count = random.randint(0, 6)
        size = random.choice([n for n in (1, 2, 6, 9) if n >= count])
        lengths = [random.randint(1, LONGEST) for _ in range(count)]
        batch = build_batch(plan_of(*[(n, n - 1, 1) for n in lengths]), BLOCK_SIZE, size, CPU)
        buffers.fill(batch, size)
        kept = buffers.batch(size)
        assert kept.num_tokens == kept.max_num_tokens == size
        assert kept.query_starts_B1.tolist() == list(range(size + 1))
        assert kept.logit_rows.tolist() == list(range(size))
        assert kept.padding_T is not None
        assert kept.padding_T.tolist() == [False] * count + [True] * (size - count)
        empty = size - count
        assert kept.input_ids_T.tolist() == batch.input_ids_T.tolist() + [0] * empty
        assert kept.positions_T.tolist() == [n - 1 for n in lengths] + [0] * empty
        assert kept.seq_lens_B.tolist() == lengths + [1] * empty
        assert kept.slot_mapping_T.tolist() == batch.slot_mapping_T.tolist() + [SCRATCH * BLOCK_SIZE] * empty
        for row in range(size):
            # Of a row's blocks only those are read that its tokens are in.
            blocks = -(-lengths[row] // BLOCK_SIZE) if row < count else 1
            table = kept.block_tables_BM[row, :blocks].tolist()
            assert table == (list(range(10 * row, 10 * row + blocks)) if row < count else [SCRATCH])


def test_what_does_not_fit_the_buffers_is_a_defect() -> None:
    buffers = StepBuffers.allocate(2, LONGEST, SCRATCH, BLOCK_SIZE, CPU)
    for spans, size in (([(5, 4, 1)] * 2, 1), ([(5, 3, 2)], 2), ([(LONGEST + 1, LONGEST, 1)], 2)):
        with pytest.raises(AssertionError):
            buffers.fill(build_batch(plan_of(*spans), BLOCK_SIZE, size, CPU), size)
