"""Cases for the dispatcher tests, drawn from a seed, and what plain loops say about them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from moe_runtime.core import DispatchPlan, ExpertBatch, ExpertPlacement, Routing
from moe_runtime.dispatch.base import plan_dispatch
from moe_runtime.dispatch.collective import CollectiveDispatcher
from moe_runtime.dispatch.fp8_payload import Fp8Payload
from moe_runtime.dispatch.local import LocalDispatcher
from moe_runtime.dispatch.mailbox import segment_bytes
from moe_runtime.dispatch.one_sided import OneSidedDispatcher
from moe_runtime.experts.base import wide_tokens
from moe_runtime.placement.layout import contiguous, layer_placement
from moe_runtime.quantization import dequantize_rows, pack_rows, unpack_rows
from moe_runtime.topology import all_gather_text

MAX_D, MAX_K = 65, 4
TIMEOUT = 20.0


@dataclass(frozen=True)
class Case:
    """Tokens of the whole group; how they are dealt to the ranks is drawn anew for each number of ranks."""

    name: str
    num_experts: int = 8
    topk: int = 2
    hidden: int = 33
    dtype: torch.dtype = torch.float32
    num_tokens: int = 40
    redundant: int = 0
    hot: bool = False
    """All tokens to expert 0 first."""
    padding: float = 0.0
    """Share of (token, k) pairs that are -1; a tenth of the tokens has only -1."""
    owners: str = "random"
    """Which ranks have tokens: random, one, or nobody."""
    identity: bool = False
    """Experts return their rows, weights are 1."""


CASES = [
    Case("plain"),
    Case("bfloat16", dtype=torch.bfloat16, hidden=7, topk=3),
    Case("float16", dtype=torch.float16, hidden=MAX_D, topk=4),
    Case("identity", identity=True, topk=1, hidden=9, dtype=torch.bfloat16),
    Case("top 1", topk=1, hidden=1),
    Case("one rank has all", owners="one", num_tokens=61),
    Case("nobody has any", owners="nobody", num_tokens=0),
    Case("single token", num_tokens=1, owners="one", topk=1),
    Case("hot expert", hot=True, num_tokens=70),
    Case("some padding", padding=0.4, topk=4, dtype=torch.float16),
    Case("only padding", padding=1.0, num_tokens=12),
    Case("replicas", redundant=5, topk=3),
    Case("a copy everywhere", redundant=99, num_experts=5, dtype=torch.bfloat16),
    Case("experts not divisible", num_experts=7, topk=3, hidden=7),
    Case("fewer experts than ranks", num_experts=2, topk=2),
    Case("one expert", num_experts=1, topk=1, padding=0.2),
    Case("long", num_tokens=300, topk=4, hidden=MAX_D, padding=0.1),
]


@dataclass(frozen=True)
class Data:
    """One case on N ranks."""

    case: Case
    placement: ExpertPlacement
    x: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    scale_E: torch.Tensor
    shift_E: torch.Tensor

    def plan(self, rank: int) -> DispatchPlan:
        routing = Routing(self.ids[rank], self.weights[rank])
        longest = max(x.shape[0] for x in self.x)
        return plan_dispatch(routing, layer_placement(self.placement, 0, rank), rank, longest)

    def expert(self, expert: int, row: torch.Tensor) -> torch.Tensor:
        if self.case.identity:
            return row.clone()
        return row * self.scale_E[expert] + self.shift_E[expert]

    def compute(self, batch: ExpertBatch, rank: int) -> torch.Tensor:
        """The stand-in for the expert kernel: reads tokens by index, slot after slot."""
        rows = wide_tokens(batch, batch.dtype)[batch.row_index_S]
        begin = 0
        for slot, count in enumerate(batch.num_rows_p.tolist()):
            if count:
                expert = self.placement.slots[0][rank][slot]
                assert expert >= 0, f"rows for empty slot {slot}"
                rows[begin : begin + count] = self.expert(expert, rows[begin : begin + count])
            begin += count
        assert begin == rows.shape[0]
        return rows


def make_data(case: Case, num_ranks: int, seed: int) -> Data:
    # What the group has follows from the case and the seed alone, so it can be compared between numbers of ranks.
    draw = torch.Generator().manual_seed(seed)
    T, K, E = case.num_tokens, case.topk, case.num_experts
    x = torch.randn(T, case.hidden, generator=draw).to(case.dtype)
    ids = torch.stack(
        [torch.randperm(max(E, K), generator=draw)[:K] for _ in range(T)] or [torch.empty(0, K)]
    )
    ids = ids.reshape(T, K).long()
    ids[ids >= E] = -1
    if case.hot:
        others = ids[:, 1:]
        others[others == 0] = ids[:, :1].expand_as(others)[others == 0]
        ids[:, 0] = 0
    if case.padding:
        ids[torch.rand(T, K, generator=draw) < case.padding] = -1
        ids[torch.rand(T, generator=draw) < 0.1] = -1
    weights = torch.ones(T, K) if case.identity else torch.randn(T, K, generator=draw)
    scale, shift = (torch.randn(2, E, generator=draw)).to(case.dtype)
    deal = random.Random(seed + num_ranks)
    first = deal.randrange(num_ranks)
    cuts = sorted(deal.randrange(T + 1) for _ in range(num_ranks - 1))
    if case.owners == "one":
        cuts = [0] * first + [T] * (num_ranks - 1 - first)
    bounds = list(zip([0, *cuts], [*cuts, T], strict=True))
    redundant = min(case.redundant, E * (num_ranks - 1))
    return Data(
        case=case,
        placement=contiguous(1, E, num_ranks, redundant),
        x=[x[a:b].clone() for a, b in bounds],
        ids=[ids[a:b].clone() for a, b in bounds],
        weights=[weights[a:b].clone() for a, b in bounds],
        scale_E=scale,
        shift_E=shift,
    )


@dataclass
class Expected:
    """What the loops say about one rank."""

    slot_rows: list[list[tuple[int, int]]]
    """Per slot the (source rank, token) of its rows, in order."""
    received: set[tuple[int, int]]
    sent_rows: int
    returned_rows: int
    out: torch.Tensor
    """Exact combine's, to the bit."""
    float_out: torch.Tensor
    """The sum of the same rows in float64."""
    per_rank_out: torch.Tensor
    """per_rank combine's, to the bit."""
    largest: torch.Tensor
    """(T, 1) float64: the sum of the magnitudes that were added, at their largest; errors are relative to it."""


def expect(data: Data, rank: int) -> Expected:
    num_ranks = len(data.x)
    width = len(data.placement.slots[0][0])
    slot_rows: list[list[tuple[int, int]]] = [[] for _ in range(width)]
    received, sent = set(), set()
    returned = 0
    for source in range(num_ranks):
        table = layer_placement(data.placement, 0, source).expert_to_slot_E.tolist()
        for token, experts in enumerate(data.ids[source].tolist()):
            for expert in experts:
                if expert < 0:
                    continue
                owner, slot = divmod(table[expert], width)
                if owner == rank:
                    slot_rows[slot].append((source, token))
                    received.add((source, token))
                    returned += source != rank
                if source == rank and owner != rank:
                    sent.add((owner, token))
    x, ids, weights = data.x[rank], data.ids[rank], data.weights[rank]
    owner_E = (layer_placement(data.placement, 0, rank).expert_to_slot_E // width).tolist()
    out, per_rank_out = torch.zeros_like(x), torch.zeros_like(x)
    float_out, largest = (
        torch.zeros(x.shape, dtype=torch.float64),
        torch.zeros(len(x), 1, dtype=torch.float64),
    )
    for token, experts in enumerate(ids.tolist()):
        total, partial = torch.zeros(x.shape[1]), torch.zeros(num_ranks, x.shape[1])
        magnitude = torch.zeros(x.shape[1], dtype=torch.float64)
        for k, expert in enumerate(experts):
            if expert >= 0:
                product = weights[token, k] * data.expert(expert, x[token]).float()
                total = total + product
                partial[owner_E[expert]] += product
                float_out[token] += weights[token, k].double() * data.expert(expert, x[token]).double()
                magnitude += product.abs().double()
        out[token], largest[token] = total.to(x.dtype), magnitude.max()
        summed = torch.zeros(x.shape[1])
        for row in partial:
            summed = summed + row.to(x.dtype).float()
        per_rank_out[token] = summed.to(x.dtype)
    return Expected(slot_rows, received, len(sent), returned, out, float_out, per_rank_out, largest)


def exchange(text: str) -> list[str]:
    """Every rank's text over the default group."""
    assert dist.group.WORLD is not None
    return all_gather_text(dist.group.WORLD, text)


def make(kind: str, num_ranks: int) -> Any:
    """A dispatcher over the default group, by a name of words joined by hyphens.

    local, collective, one_sided; -exact sends counts first; -device plans on the device; -tiny has room for three of the
    widest rows; -pair for two calls under way at a time; -per_rank sums on the ranks that compute; -fp8 rounds the rows that
    travel.
    """
    group = dist.group.WORLD
    name, *words = kind.split("-")
    combine = "per_rank" if "per_rank" in words else "exact"
    dispatcher: Any
    if name == "local":
        dispatcher = LocalDispatcher()
    elif name == "collective":
        assert group is not None
        options = {"padded_message_bytes": 0} if "exact" in words else {}
        options |= {"device_tokens": 10**6} if "device" in words else {}
        dispatcher = CollectiveDispatcher(group, TIMEOUT, combine, **options)
    else:
        rows = 3 if "tiny" in words else 4096
        in_flight = 2 if "pair" in words else 1
        segment = segment_bytes(num_ranks, rows, 4 * MAX_D, 2 * MAX_K) + 64 * 2 * num_ranks
        dispatcher = OneSidedDispatcher(
            dist.get_rank(),
            num_ranks,
            exchange,
            hidden_size=MAX_D,
            topk=MAX_K,
            dtype=torch.float32,
            buffer_bytes=in_flight * segment,
            step_timeout=TIMEOUT,
            is_alive=lambda rank: True,
            combine=combine,
            in_flight=in_flight,
        )
    return Fp8Payload(dispatcher) if "fp8" in words else dispatcher


def rounded(data: Data) -> Data:
    """The same, with tokens as they are after a journey in FP8."""
    return replace(
        data, x=[dequantize_rows(*unpack_rows(pack_rows(x), x.shape[1])).to(x.dtype) for x in data.x]
    )
