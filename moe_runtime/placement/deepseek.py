"""The placement algorithm of DeepSeek's EPLB, global and hierarchical, computed for all layers at once.

Source of the algorithm: the EPLB repository of DeepSeek (github.com/deepseek-ai/EPLB, `rebalance_experts`): experts with the largest
load per replica are replicated one by one; items are packed by falling load onto the pack with the least load that has room. The
hierarchical form first packs groups of experts onto nodes, then replicates and packs within each node. Its ties go to the lower index.

Legend: L layers, E experts, S slots of all ranks, G groups, X layers or (layer, node) pairs, M items to pack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_runtime.errors import ConfigError

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class EplbArrays:
    """What EPLB returns, but for the padded logical-to-physical table (see `expert_to_slots`)."""

    slot_to_expert_LS: Array
    """int64: expert in each slot; rank r holds slots r * S / N to (r + 1) * S / N. Two replicas of an expert may share a rank."""
    replica_LS: Array
    """int64: which replica of its expert a slot holds, from 0."""
    num_replicas_LE: Array
    """int64."""

    def expert_to_slots(self) -> Array:
        """int64 (L, E, most replicas): slot of each replica of each expert, padded with -1."""
        num_layers, num_slots = self.slot_to_expert_LS.shape
        table = np.full((*self.num_replicas_LE.shape, int(self.num_replicas_LE.max())), -1, dtype=np.int64)
        layer_L1 = np.arange(num_layers)[:, None]
        table[layer_L1, self.slot_to_expert_LS, self.replica_LS] = np.arange(num_slots)
        return table


def rebalance_experts(
    load_LE: Array, num_slots: int, num_groups: int, num_nodes: int, num_ranks: int
) -> EplbArrays:
    """EPLB's plan for the load of each expert (any unit); the arguments have the meaning of EPLB's own.

    Hierarchical if the groups can be dealt out evenly to the nodes, else global. Raises ConfigError for sizes that do not divide.
    """
    load_LE = np.asarray(load_LE, dtype=np.float32)
    num_layers, num_experts = load_LE.shape
    if num_groups < 1 or num_groups % num_nodes:
        num_groups = num_nodes = 1
    _check_sizes(num_experts, num_slots, num_groups, num_nodes, num_ranks)
    group_size = num_experts // num_groups
    per_node, slots_per_rank = num_experts // num_nodes, num_slots // num_ranks

    group_load_LG = load_LE.reshape(num_layers, num_groups, group_size).sum(-1)
    node_LG, place_LG = pack_balanced(group_load_LG, num_nodes)
    first_LG = (node_LG * (num_groups // num_nodes) + place_LG) * group_size
    sorted_LE = (first_LG[:, :, None] + np.arange(group_size)).reshape(num_layers, num_experts)
    expert_LE = np.argsort(sorted_LE, axis=1)  # the expert at each place when experts stand by node

    load_XE = np.take_along_axis(load_LE, expert_LE, axis=1).reshape(-1, per_node)
    item_XM, replica_XM, count_XE = replicate(load_XE, num_slots // num_nodes)
    share_XM = np.take_along_axis(load_XE / count_XE, item_XM, axis=1)
    rank_XM, place_XM = pack_balanced(share_XM, num_ranks // num_nodes)
    order_XM = np.argsort(rank_XM * slots_per_rank + place_XM, axis=1)
    item_XM = np.take_along_axis(item_XM, order_XM, axis=1)
    replica_XM = np.take_along_axis(replica_XM, order_XM, axis=1)

    place_LS = item_XM.reshape(num_layers, num_nodes, -1) + np.arange(0, num_experts, per_node)[:, None]
    return EplbArrays(
        slot_to_expert_LS=np.take_along_axis(expert_LE, place_LS.reshape(num_layers, num_slots), axis=1),
        replica_LS=replica_XM.reshape(num_layers, num_slots),
        num_replicas_LE=np.take_along_axis(count_XE.reshape(num_layers, num_experts), sorted_LE, axis=1),
    )


def _check_sizes(num_experts: int, num_slots: int, num_groups: int, num_nodes: int, num_ranks: int) -> None:
    for what, whole, part, of in (
        ("experts", num_experts, num_groups, "groups"),
        ("ranks", num_ranks, num_nodes, "nodes"),
        ("slots", num_slots, num_ranks, "ranks"),
    ):
        if part < 1 or whole % part:
            raise ConfigError(
                f"EPLB needs the number of {what} ({whole}) to be a multiple of the number of {of} ({part})"
            )
    if num_slots < num_experts:
        raise ConfigError(
            f"{num_slots} slots cannot hold {num_experts} experts; at least {num_experts} are needed"
        )


def replicate(load_XE: Array, num_slots: int) -> tuple[Array, Array, Array]:
    """Give `num_slots` replicas to the experts, each next one to the expert with the largest load per replica.

    Returns int64 item_XM (expert of each replica: first every expert once), replica_XM (its number), count_XE.
    """
    num_rows, num_experts = load_XE.shape
    item_XM = np.tile(np.arange(num_slots), (num_rows, 1))
    replica_XM = np.zeros((num_rows, num_slots), dtype=np.int64)
    count_XE = np.ones((num_rows, num_experts), dtype=np.int64)
    share_XE = load_XE.copy()
    rows = np.arange(num_rows)
    for slot in range(num_experts, num_slots):
        best_X = share_XE.argmax(axis=1)
        item_XM[:, slot] = best_X
        replica_XM[:, slot] = count_XE[rows, best_X]
        count_XE[rows, best_X] += 1
        share_XE[rows, best_X] = load_XE[rows, best_X] / count_XE[rows, best_X].astype(load_XE.dtype)
    return item_XM, replica_XM, count_XE


def pack_balanced(load_XM: Array, num_packs: int) -> tuple[Array, Array]:
    """Items by falling load, each to the least loaded pack with room; all packs get equally many.

    Returns int64 pack_XM and place_XM, the item's place within its pack.
    """
    num_rows, num_items = load_XM.shape
    per_pack = num_items // num_packs
    if per_pack == 1:
        return np.tile(np.arange(num_items), (num_rows, 1)), np.zeros((num_rows, num_items), dtype=np.int64)
    order_XM = np.argsort(-load_XM, axis=1, kind="stable")
    pack_XM = np.empty((num_rows, num_items), dtype=np.int64)
    place_XM = np.empty_like(pack_XM)
    filled = np.zeros((num_rows, num_packs), dtype=np.int64)
    open_load = np.zeros((num_rows, num_packs), dtype=load_XM.dtype)  # infinite where there is no more room
    rows = np.arange(num_rows)
    for item_X in order_XM.T:
        pack_X = open_load.argmin(axis=1)
        place_X = filled[rows, pack_X]
        pack_XM[rows, item_X] = pack_X
        place_XM[rows, item_X] = place_X
        filled[rows, pack_X] = place_X + 1
        open_load[rows, pack_X] += np.where(place_X + 1 == per_pack, np.inf, load_XM[rows, item_X])
    return pack_XM, place_XM
