"""Where a step's rows go under a placement and a split: to which slots, and from rank to rank.

Legend: N ranks (first axis: source), L MoE layers, E experts, p slots per rank, C replicas of an expert, K experts per token,
t tokens with known routes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_runtime.core import ExpertPlacement
from moe_runtime.placement.cost import Cost, sent_rows, slot_rows
from moe_runtime.placement.run_time_split import asks, method_of
from moe_runtime.placement.split import Replicas, split_rows, static_slots
from moe_runtime.placement.stored import Array
from moe_runtime.placement.traffic import StepRoutes


@dataclass(frozen=True)
class Router:
    """Routes counts to slots."""

    replicas_L: list[Replicas]
    nearest_LNE: Array
    """int64 global slot of the replica that the static split gives to a source."""
    split: str
    """Of run_time_split.ALL_SPLITS."""
    ranks_per_node: int

    @staticmethod
    def of(placement: ExpertPlacement, split: str, ranks_per_node: int) -> Router:
        """For the placement's layers; `split` is one of run_time_split.ALL_SPLITS."""
        replicas_L = [Replicas.of(np.array(slots_Np), placement.num_experts) for slots_Np in placement.slots]
        nearest_LNE = np.stack([static_slots(replicas) for replicas in replicas_L])
        return Router(replicas_L, nearest_LNE, split, ranks_per_node)

    def route(
        self,
        counts_NLE: Array,
        tokens_N: Array,
        seed: int,
        routes: StepRoutes | None = None,
        num_steps: int = 1,
    ) -> tuple[Array, Array]:
        """int64 (L, N, p) rows of each slot, float64 (L, N, N) token rows from rank to rank.

        counts_NLE: int64 pairs of each source rank for each expert; tokens_N: its tokens, of so many steps together; seed: see
        split.split_rows. Rows from rank to rank come from `routes` for the sources that have some there, and are expected from
        counts for the others.
        """
        rows_LNp, sent_LNN = self._to_nearest(counts_NLE, tokens_N)
        for layer, replicas in enumerate(self.replicas_L):
            counts_NE = counts_NLE[:, layer]
            method = method_of(self.split, counts_NE, int(tokens_N.max()), num_steps)
            if routes is None and (method == "static" or not len(replicas.shared_D)):
                continue
            rows_NEC = split_rows(
                method, counts_NE, replicas,
                ranks_per_node=self.ranks_per_node, seed=seed * len(self.replicas_L) + layer,
            )  # fmt: skip
            rows_LNp[layer] = slot_rows(
                rows_NEC, replicas.slot_EC, replicas.num_ranks, replicas.slots_per_rank
            )
            sent_LNN[layer] = sent_rows(rows_NEC, replicas.slot_EC, replicas.slots_per_rank, tokens_N)
            if routes is not None and len(routes.source_t):
                nearest_NEC = self.nearest_LNE[layer, :, :, None] == replicas.slot_EC
                share_NEC = np.where(
                    counts_NE[:, :, None] > 0,
                    rows_NEC / np.maximum(counts_NE, 1)[:, :, None],
                    nearest_NEC,
                )
                known_N = np.bincount(routes.source_t, minlength=len(tokens_N)) > 0
                routed_NN = routed_rows(share_NEC, replicas, routes, layer)
                sent_LNN[layer] = np.where(known_N[:, None], routed_NN, sent_LNN[layer])
        return rows_LNp, sent_LNN

    def _to_nearest(self, counts_NLE: Array, tokens_N: Array) -> tuple[Array, Array]:
        """What `route` says of the static split without routes (`slot_rows` and `sent_rows` of all layers at once)."""
        num_layers, num_ranks, _ = self.nearest_LNE.shape
        width = self.replicas_L[0].slots_per_rank
        counts_LNE = counts_NLE.swapaxes(0, 1)
        layer_L11, source_N1 = np.arange(num_layers)[:, None, None], np.arange(num_ranks)[:, None]
        rows = np.bincount(
            (layer_L11 * num_ranks * width + self.nearest_LNE).ravel(),
            weights=counts_LNE.ravel(),
            minlength=num_layers * num_ranks * width,
        )
        with np.errstate(divide="ignore"):
            missed_LNE = np.log1p(-np.minimum(counts_LNE / np.maximum(tokens_N, 1)[:, None], 1.0))
        missed = np.bincount(
            ((layer_L11 * num_ranks + source_N1) * num_ranks + self.nearest_LNE // width).ravel(),
            weights=missed_LNE.ravel(),
            minlength=num_layers * num_ranks**2,
        )
        sent_LNN = -np.expm1(missed.reshape(num_layers, num_ranks, num_ranks)) * tokens_N[:, None]
        return rows.astype(np.int64).reshape(num_layers, num_ranks, width), sent_LNN

    def step_us(
        self, counts_NLE: Array, tokens_N: Array, routes: StepRoutes | None, seed: int, cost: Cost
    ) -> float:
        """Modelled time of the MoE layers of a step (`Traffic.step`), in microseconds; seed: as for `route`."""
        routed_us = cost.step_time_us(*self.route(counts_NLE, tokens_N, seed, routes))
        return routed_us + self.asking_us(tokens_N, cost)

    def asking_us(self, tokens_N: Array, cost: Cost) -> float:
        """What telling counts takes in a step of so many tokens, in microseconds: only in layers with replicas."""
        if not asks(self.split, int(tokens_N.max())):
            return 0.0
        return sum(cost.counts_us(len(r.count_E)) for r in self.replicas_L if len(r.shared_D))


def routed_rows(share_NEC: Array, replicas: Replicas, routes: StepRoutes, layer: int) -> Array:
    """float64 (N, N): token rows from rank to rank, a token once to each rank however many of its experts are there.

    share_NEC: the share of a source's pairs for an expert that goes to each replica. If a source's pairs for an expert go to
    several replicas, any of its tokens may be the one that goes there.
    """
    num_ranks = replicas.num_ranks
    rank_EC = np.where(replicas.slot_EC >= 0, replicas.slot_EC // replicas.slots_per_rank, num_ranks)
    share_NEm = np.zeros((*share_NEC.shape[:2], num_ranks + 1))
    np.put_along_axis(share_NEm, np.broadcast_to(rank_EC, share_NEC.shape), share_NEC, axis=2)
    # The last column took what padding has, and is that of tokens without an expert.
    share_NEm[:, :, num_ranks] = 0.0
    ids_tK = routes.ids_tLK[:, layer]
    missed_tKm = 1.0 - share_NEm[routes.source_t[:, None], np.maximum(ids_tK, 0)]
    missed_tKm[ids_tK < 0] = 1.0
    reached_tm = routes.weight_t[:, None] * (1.0 - missed_tKm.prod(axis=1)[:, :num_ranks])
    of_source_Nt = routes.source_t == np.arange(num_ranks)[:, None]
    sent_NN: Array = of_source_Nt.astype(np.float64) @ reached_tm
    return sent_NN
