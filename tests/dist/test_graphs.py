"""Recorded decode steps through the whole engine, beside steps that are launched as ever.

There is no CUDA graph on a CPU: a recorded step is then the same function of the same buffers, run again. All else is as on a GPU.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from moe_runtime.config import EngineConfig
from moe_runtime.engine import engine as engine_module
from moe_runtime.engine.builder import RankBuilder
from moe_runtime.errors import ConfigError, LockstepError
from tests.helpers.engine_ranks import (
    GREEDY,
    Builder,
    Output,
    Script,
    check_same,
    config,
    run_engine,
    topology,
)
from tests.helpers.spawn import run_ranks
from tests.helpers.tiny_models import make_tiny

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}


def prompts(rank: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Those that come first and those that come while others are decoding; rank 1 has the fewest, rank 2 none."""
    draw = random.Random(seed + rank)
    lengths = [([4, 1, 9], [6, 2]), ([3], []), ([], [])][rank]
    return tuple([[draw.randrange(60) for _ in range(n)] for n in part] for part in lengths)  # type: ignore[return-value]


class Ran(NamedTuple):
    """One engine's run on one rank."""

    outputs: dict[str, Output]
    steps: int
    graph_steps: int
    rows_sent: int
    """Token rows to other ranks."""
    chosen: list[Any]
    """[phase][layer][expert]: how often, as recorded on this rank."""


def both_ways(
    rank: int, num_ranks: int, folder: str, settings: dict[str, Any], sizes: tuple[int, ...], seed: int
) -> tuple[Ran, Ran]:
    """Without and with recorded steps."""
    device_tokens = 64 if settings.get("dispatcher") == "collective" else 0
    results = []
    for recorded in ((), sizes):
        early, late = prompts(rank, seed)
        builder = Builder(config(folder, ep=num_ranks, **settings), recorded, device_tokens)
        outputs, stats = run_engine(builder, Script(early, late))
        assert stats.num_blocks == 40, "sequences were given the block of the padding"
        chosen = builder.runner.recorder.arrays()["counts_WPLE"].sum(axis=0).tolist()
        rows_sent = builder.dispatcher.traffic.rows_sent
        results.append(Ran(outputs, stats.steps, stats.graph_steps, rows_sent, chosen))
    return results[0], results[1]


SLOW = pytest.mark.slow


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("family", "num_ranks", "settings", "sizes"),
    [
        pytest.param("qwen3_moe", 1, {}, (1, 4, 8), marks=SLOW),
        ("qwen3_moe", 2, {"dispatcher": "one_sided"}, (2, 5)),
        pytest.param("mixtral", 2, {"dispatcher": "collective", "combine": "per_rank"}, (1, 4, 8), marks=SLOW),
        pytest.param("qwen2_moe", 3, {"dispatcher": "one_sided", "dispatch_dtype": "fp8"}, (8,), marks=SLOW),
    ],
    ids=["1 rank", "one_sided", "collective", "fp8 rows and an idle rank"],
)  # fmt: skip
def test_recorded_steps_give_the_same_tokens(
    family: str, num_ranks: int, settings: dict[str, Any], sizes: tuple[int, ...], tmp_path: Path, seed: int
) -> None:
    own = {"sliding_window": 7} if family == "mixtral" else {"num_hidden_layers": max(1, num_ranks - 1)}
    make_tiny(family, tmp_path, seed, **(SIZES | own))
    results = run_ranks(both_ways, num_ranks, str(tmp_path), settings, sizes, seed, timeout=270)
    assert sum(len(plain.outputs) for plain, _ in results) == (5 if num_ranks == 1 else 6)
    tokens = [[[o.token_ids for o in ran.outputs.values()] for ran in both] for both in results]
    for plain, replayed in results:
        check_same(plain.outputs, replayed.outputs)
        # Prompts are never replayed, decodes always are unless another rank has a prompt.
        assert plain.graph_steps == 0
        assert plain.steps == replayed.steps
        assert 4 <= replayed.graph_steps == results[0][1].graph_steps < replayed.steps
        if all(a == b for a, b in tokens):
            assert plain.chosen == replayed.chosen, "the record counts padding, or misses replays"
            if settings.get("dispatcher") == "one_sided":
                assert plain.rows_sent == replayed.rows_sent, "padding travels"


def sizes_are_asked_for(rank: int, num_ranks: int, folder: str) -> str:
    builder = RankBuilder(config(folder, cuda_graph_sizes="1,2"), topology(), lambda stage, fraction: None)
    builder.read_config()
    builder.decide()
    with pytest.raises(ConfigError) as caught:
        builder.connect()
    return str(caught.value)


def test_a_cpu_rank_refuses_sizes(tmp_path: Path, seed: int) -> None:
    make_tiny("qwen3_moe", tmp_path, seed, **SIZES)
    (message,) = run_ranks(sizes_are_asked_for, 1, str(tmp_path))
    assert message == "cuda_graph_sizes: no CUDA graph can be recorded: CUDA graphs need a GPU, the ranks run on cpu"


def a_peer_is_lost_in_a_step(rank: int, num_ranks: int, folder: str, seed: int) -> tuple[str, int]:
    """While the second step's tokens are sampled, what its kernels noted reaches rank 0's host, as on a GPU."""
    # Rank 1 is not told, and waits for rank 0 until its patience ends.
    builder = Builder(config(folder, ep=num_ranks, dispatcher="one_sided", step_timeout=8.0), ())
    script = Script(prompts(0, seed)[0])
    sample, steps = engine_module.sample_each, []

    def sampling(*args: Any) -> Any:
        steps.append(len(script.updates))
        if rank == 0 and len(steps) == 2:
            builder.dispatcher.kernels[0].problem_N[1] = 1  # type: ignore[attr-defined]
        return sample(*args)

    engine_module.sample_each = sampling
    try:
        run_engine(builder, script)
    except LockstepError as error:
        return str(error), sum(len(updates) for updates in script.updates.values()) - steps[-1]
    return "no error", 0


def test_nothing_leaves_a_rank_whose_kernels_lost_a_peer(tmp_path: Path, seed: int) -> None:
    make_tiny("qwen3_moe", tmp_path, seed, **SIZES)
    (message, sent_after), _ = run_ranks(a_peer_is_lost_in_a_step, 2, str(tmp_path), seed, timeout=120)
    assert message == "one-sided dispatch: rank 1 sent nothing in time (step_timeout)"
    assert sent_after == 0
