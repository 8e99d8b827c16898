"""Copies chosen at run time: rows land as placement.split says, the fullest rank has fewer, and results stay the same."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moe_runtime import LLM, SamplingParams
from moe_runtime.core import Routing
from moe_runtime.dispatch.base import plan_dispatch
from moe_runtime.dispatch.counts import GatherCounts, keep_counts
from moe_runtime.errors import CapacityError
from moe_runtime.placement.layout import layer_placement
from moe_runtime.placement.run_time_split import split_of
from moe_runtime.placement.split import Replicas, split_rows
from moe_runtime.replicas import ChooseByCounts, choose_randomly
from tests.helpers.dispatch_cases import CASES, TIMEOUT, Case, Data, make, make_data
from tests.helpers.spawn import run_ranks
from tests.helpers.tiny_models import make_tiny

if TYPE_CHECKING:
    from pathlib import Path

HOT = Case("hot with copies", hot=True, redundant=4, num_tokens=400, topk=2, num_experts=6)
WITH_COPIES = [case for case in CASES if case.redundant] + [HOT, replace(HOT, name="few", num_tokens=9)]


def counts_of(data: Data) -> np.ndarray[Any, Any]:
    return np.stack(
        [np.bincount(ids[ids >= 0].numpy(), minlength=data.case.num_experts) for ids in data.ids]
    )


def share_of(kind: str, dispatcher: Any) -> Any:
    if kind == "local":
        return keep_counts
    if kind == "collective":
        assert dist.group.WORLD is not None
        return GatherCounts(dist.group.WORLD, TIMEOUT)
    return dispatcher.share


def choices(rank: int, num_ranks: int, kind: str, seed: int) -> list[dict[str, Any]]:
    """Per case and way of choosing: rows of this rank's slots, and whether the results are the static ones."""
    dispatcher = make(kind, num_ranks)
    dynamic = ChooseByCounts(share_of(kind, dispatcher))
    seldom = ChooseByCounts(share_of(kind, dispatcher), least_tokens=10**6)
    found = []
    for index, case in enumerate(WITH_COPIES):
        data = make_data(case, num_ranks, seed + index)
        routing, longest = Routing(data.ids[rank], data.weights[rank]), max(len(x) for x in data.x)
        placement = layer_placement(data.placement, 0, rank)
        rows, outs = {}, {}
        for name, choose in (("static", plan_dispatch), ("random", choose_randomly), ("dynamic", dynamic), ("seldom", seldom)):
            plan = choose(routing, placement, rank, longest)
            batch = dispatcher.dispatch(data.x[rank], plan).wait()
            rows[name] = batch.num_rows_p.tolist()
            outs[name] = dispatcher.combine(data.compute(batch, rank), batch, plan).wait()
        same = all(torch.equal(out, outs["static"]) for out in outs.values())
        found.append(rows | {"same": same})
    dispatcher.close()
    return found


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [("local", 1), ("collective", 2), ("collective", 4), ("one_sided", 2), ("one_sided", 3)],
)
def test_rows_land_where_the_split_says(kind: str, num_ranks: int, seed: int) -> None:
    results = run_ranks(choices, num_ranks, kind, seed)
    for index, case in enumerate(WITH_COPIES):
        data = make_data(case, num_ranks, seed + index)
        assert all(result[index]["same"] for result in results), case.name
        assert all(result[index]["seldom"] == result[index]["static"] for result in results), case.name
        counts_NE = counts_of(data)
        replicas = Replicas.of(np.array(data.placement.slots[0]), case.num_experts)
        wanted = np.zeros(num_ranks * replicas.slots_per_rank, dtype=np.int64)
        # Nobody is asked when no rank has a token.
        if counts_NE.any():
            rows_EC = split_rows(split_of(counts_NE), counts_NE, replicas).sum(axis=0)
            np.add.at(wanted, replicas.slot_EC[replicas.slot_EC >= 0], rows_EC[replicas.slot_EC >= 0])
        got = [rows for result in results for rows in result[index]["dynamic"]]
        assert got == wanted.tolist(), case.name
        if case is HOT and num_ranks > 1:
            fullest = {
                name: max(sum(result[index][name]) for result in results) for name in ("static", "dynamic")
            }
            mean = counts_NE.sum() / num_ranks
            # The hot expert has half of all pairs and a copy on other ranks.
            assert fullest["dynamic"] <= min(fullest["static"], 1.35 * mean), fullest


def counts_too_wide(rank: int, num_ranks: int) -> str:
    dispatcher = make("one_sided-tiny", num_ranks)
    with pytest.raises(CapacityError) as error:
        dispatcher.share(torch.zeros(1 << 16, dtype=torch.int32))
    dispatcher.close()
    return str(error.value)


def test_counts_that_fit_no_buffer_say_so() -> None:
    for message in run_ranks(counts_too_wide, 2):
        assert "dispatch_buffer_mib" in message


def answers(folder: Path, ep: int, **settings: Any) -> list[tuple[list[int], Any]]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
    prompts = [list(range(5 + i, 5 + i + 9 * (i + 1))) for i in range(5)]
    with LLM(
        model=str(folder),
        ep=ep,
        deterministic=True,
        skip_tokenizer_init=True,
        max_model_len=96,
        num_kv_blocks=64,
        **settings,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(list(o.outputs[0].token_ids), o.outputs[0].logprobs) for o in outputs]


@pytest.mark.timeout(240)
def test_answers_do_not_depend_on_the_choice(tmp_path: Path, seed: int) -> None:
    make_tiny("qwen3_moe", tmp_path, seed)
    alone = answers(tmp_path, 1)
    for algorithm, dispatcher in (("dynamic", "one_sided"), ("random", "collective")):
        settings = {"ep_dispatch_algorithm": algorithm, "dispatcher": dispatcher, "overlap": "on"}
        assert answers(tmp_path, 2, num_redundant_experts=3, **settings) == alone, settings
