"""Which copy of an expert computes a (token, k) pair, where an expert has several. Results do not depend on it.

    static    the copy nearest to the token: its own rank's, else one that depends on the rank alone
    random    any copy, by a hash of the token's place in the batch
    dynamic   ranks tell one another how many pairs each expert got, and split them so that the fullest rank has
              the least; with few rows per expert, where reading weights is what takes time, one copy serves all

Legend: T tokens, K experts per token, S = T * K pairs, N ranks, E experts, p slots of a rank, C = X copies of an expert at most.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch

from moe_runtime.core import DispatchPlan, LayerPlacement, Routing
from moe_runtime.dispatch.base import plan_dispatch
from moe_runtime.placement.run_time_split import split_of
from moe_runtime.placement.split import Replicas, split_rows

if TYPE_CHECKING:
    import numpy.typing as npt

    from moe_runtime.dispatch.counts import ShareCounts

    IntArray = npt.NDArray[np.int64]

_MULTIPLIER, _OFFSET = 0x9E3779B1, 0x85EBCA6B
"""Odd constants with well-mixed bits: Knuth's multiplicative hashing with 2**32 / golden ratio, and one of MurmurHash3's."""


def choose_randomly(
    routing: Routing, placement: LayerPlacement, rank: int, max_num_tokens: int
) -> DispatchPlan:
    """ChooseReplicas `random`. No host synchronisation."""
    plan = plan_dispatch(routing, placement, rank, max_num_tokens)
    copies_TKX = placement.copies_EX[routing.topk_ids_TK.clamp(min=0)]
    T, K = routing.topk_ids_TK.shape
    pair_TK = torch.arange(T * K, device=copies_TKX.device).view(T, K)
    hashed_TK = ((pair_TK + rank * _OFFSET) * _MULTIPLIER & 0xFFFFFFFF) >> 16
    which_TK = hashed_TK % (copies_TKX >= 0).sum(dim=2).clamp(min=1)
    slot_TK = copies_TKX.gather(2, which_TK[..., None]).squeeze(2)
    return replace(plan, global_slot_TK=torch.where(routing.topk_ids_TK >= 0, slot_TK, -1))


@dataclass(frozen=True)
class ChooseByCounts:
    """ChooseReplicas `dynamic`, on CPUs. Collective where the layer has replicas."""

    share: ShareCounts
    least_tokens: int = 0
    """With fewer tokens on every rank, the nearest copies are taken without asking."""
    _replicas: WeakKeyDictionary[LayerPlacement, Replicas] = field(default_factory=WeakKeyDictionary)

    def __call__(
        self, routing: Routing, placement: LayerPlacement, rank: int, max_num_tokens: int
    ) -> DispatchPlan:
        """See ChooseReplicas."""
        plan = plan_dispatch(routing, placement, rank, max_num_tokens)
        if placement.copies_EX.shape[1] == 1 or max_num_tokens < max(1, self.least_tokens):
            return plan
        num_experts = placement.copies_EX.shape[0]
        id_S = routing.topk_ids_TK.numpy().reshape(-1)
        counts_E = np.bincount(id_S[id_S >= 0], minlength=num_experts)
        counts_NE = self.share(torch.from_numpy(counts_E.astype(np.int32))).numpy()
        replicas = self._replicas.get(placement)
        if replicas is None:
            replicas = self._replicas[placement] = Replicas.of(
                placement.slot_to_expert_Np.numpy(), num_experts
            )
        quota_EC = split_rows(split_of(counts_NE), counts_NE, replicas)[rank]
        slot_S = deal(id_S, replicas.slot_EC, quota_EC)
        return replace(plan, global_slot_TK=torch.from_numpy(slot_S).view(routing.topk_ids_TK.shape))


def deal(id_S: IntArray, copies_EC: IntArray, quota_EC: IntArray) -> IntArray:
    """The slot of each pair: the first quota[e, 0] pairs of expert e, in order, get its copy 0, the next copy 1, and so on.

    id_S: -1 for none, which stays. quota_EC: sums over C to each expert's pairs; 0 where there is no copy.
    """
    # numpy sorts 16-bit integers by radix, several times faster; any number of experts fits.
    order_S = np.argsort(id_S.astype(np.int16), kind="stable")
    slot_S = np.full_like(id_S, -1)
    sorted_slots = np.repeat(copies_EC.ravel(), quota_EC.ravel())
    slot_S[order_S[id_S.size - sorted_slots.size :]] = sorted_slots
    return slot_S
