"""The engine of one rank inside a test's own process, at the other end of a script instead of a front-end."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from moe_runtime.config import EngineConfig
from moe_runtime.core import SamplingParams, TokenLogprobs
from moe_runtime.engine.builder import RankBuilder
from moe_runtime.engine.graph_sizes import GraphSizes
from moe_runtime.engine.messages import RankStats, SequenceUpdate, StepOutput, Stop, Submit, Tick
from moe_runtime.topology import Topology
from tests.helpers.parity import CLEAR_MARGIN, MAX_LOGPROB_ERROR

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2, seed=0)


TRITON = {"attention_backend": "triton", "layer_backend": "triton", "moe_backend": "triton"}


def config(folder: str, **settings: Any) -> EngineConfig:
    """A small engine whose kernels are Triton's, unless `settings` say otherwise."""
    defaults: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 64, "block_size": 3, "num_kv_blocks": 40, "skip_tokenizer_init": True,
        "max_num_batched_tokens": 16, "overlap": "off",
    }  # fmt: skip
    return EngineConfig(model=folder, **(defaults | TRITON | settings))


@dataclass
class Script:
    """A rank's link: sends its prompts at once or when others are under way, and Stop once all ranks are idle."""

    prompts: list[list[int]]
    late: list[list[int]] = field(default_factory=list)
    """Come when the rank has been asked for news for the fifth time."""
    sampling: SamplingParams = GREEDY
    last_tick: int = 0
    updates: dict[str, list[SequenceUpdate]] = field(default_factory=dict)
    stats: RankStats | None = None
    _asked: int = 0

    def drain(self) -> list[Tick]:
        self._asked += 1
        if self._asked == 1:
            return [self._tick(self.prompts, "early")]
        return [self._tick(self.late, "late")] if self._asked == 5 else []

    def wait(self) -> list[Tick]:
        return [self._tick([], "", stop=True)]

    def wait_until(self, number: int) -> list[Tick]:
        return self.drain() if self.last_tick < number else []

    def send(self, message: Any) -> None:
        if isinstance(message, StepOutput):
            self.stats = message.stats
            for update in message.updates:
                self.updates.setdefault(update.request_id, []).append(update)

    def _tick(self, prompts: list[list[int]], name: str, stop: bool = False) -> Tick:
        self.last_tick += 1
        commands = [Submit(f"{name}-{i}", ids, self.sampling, []) for i, ids in enumerate(prompts)]
        return Tick(self.last_tick, [Stop()] if stop else list(commands))


@dataclass
class Output:
    """Of one sequence."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]


def topology() -> Topology:
    """Of the default process group."""
    group, pids = dist.group.WORLD, [0] * dist.get_world_size()
    assert group is not None
    dist.all_gather_object(pids, os.getpid())
    rank, size = dist.get_rank(), dist.get_world_size()
    return Topology(rank, size, rank, size, torch.device("cpu"), group, group, tuple(pids))


def run_twice(run: Any) -> Any:
    """In place of a CUDA graph: as one is recorded, the work is done once before; and again at every replay."""
    run()
    return run


class Builder(RankBuilder):
    """Records steps of `sizes` though there is no GPU; () as ever. `device_tokens`: of the collective dispatcher."""

    make_record = staticmethod(lambda: run_twice)

    def __init__(self, config: EngineConfig, sizes: tuple[int, ...], device_tokens: int = 0) -> None:
        super().__init__(config, topology(), lambda stage, fraction: None)
        self.sizes, self.device_tokens = sizes, device_tokens

    def connect(self) -> None:
        super().connect()
        self.graph_sizes = GraphSizes(self.sizes, "a test")
        if self.device_tokens:
            self.dispatcher._device_tokens = self.device_tokens  # type: ignore[attr-defined]


def run_engine(builder: Builder, script: Script) -> tuple[dict[str, Output], RankStats]:
    """What the script's sequences became."""
    for stage in builder.stages:
        stage()
    engine = builder.engine(script)  # type: ignore[arg-type]
    engine.run()
    dist.barrier()
    engine.runner.close()
    outputs = {
        name: Output(
            [t for u in updates for t in u.new_token_ids],
            [p for u in updates for p in u.new_logprobs or []],
        )
        for name, updates in script.updates.items()
    }
    assert script.stats is not None
    return outputs, script.stats


def check_same(
    plain: dict[str, Output], replayed: dict[str, Output], bound: float = MAX_LOGPROB_ERROR
) -> None:
    """Logprobs within `bound`, and the same tokens, but where the best two are no clearer apart than the bound allows."""
    assert plain.keys() == replayed.keys()
    for name, one in plain.items():
        other = replayed[name]
        assert len(one.token_ids) == len(other.token_ids) == GREEDY.max_tokens
        for i, (p, q) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
            mine, theirs = dict(p.top), dict(q.top)
            shared = mine.keys() & theirs.keys()
            assert shared, f"{name} token {i}"
            for token in shared:
                assert abs(mine[token] - theirs[token]) < bound, f"{name} token {i}"
            if one.token_ids[i] != other.token_ids[i]:
                assert p.top[0][1] - p.top[1][1] <= max(CLEAR_MARGIN, 2 * bound), f"{name} token {i} differs"
                break
