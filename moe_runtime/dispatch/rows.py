"""Which row goes where: the bookkeeping shared by the dispatchers, as pure functions.

It runs on the host in numpy, whose small operations cost a third of torch's: with 1 to 32 tokens a step this is
what a layer's dispatch costs.

    token t of rank 0, experts in slots (1 of rank 0, 0 of rank 2, 3 of rank 2), 4 slots per rank:

        Outgoing on rank 0            Incoming on rank 2               back on rank 0
        to rank 0: t | 1, -, -        row i | -, 0, 3                  returned rows, by (rank, token, k)
        to rank 2: t | -, 0, 3        -> expert rows: slot 0: i        position[t] = where each k's row is
                                                      slot 3: i

Legend: T tokens here, K experts per token, D hidden, N ranks, p slots per rank, M rows sent, R rows received,
S expert rows (computed here in Incoming; returned to here in Outgoing).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Int64Array = npt.NDArray[np.int64]
    Int32Array = npt.NDArray[np.int32]
    Float32Array = npt.NDArray[np.float32]

# Elements of one slice of a weighted sum: on the CPU it should stay in the second-level cache; elsewhere it only
# bounds the memory that is used in passing.
_CPU_CHUNK = 1 << 18
_DEVICE_CHUNK = 1 << 26


@dataclass
class Traffic:
    """What a dispatcher has moved since it was made, for metrics and tests."""

    dispatches: int = 0
    combines: int = 0
    rounds: int = 0
    """Exchanges with the peers; more than dispatches + combines where messages exceeded the buffer."""
    rows_sent: int = 0
    """Token rows sent to other ranks."""
    rows_returned: int = 0
    """Result rows sent back to other ranks."""
    bytes_sent: int = 0
    """What dispatch moved to other ranks: rows and the words beside them, padding included."""
    bytes_returned: int = 0
    """What combine moved to other ranks: result rows, padding included."""
    control_bytes: int = 0
    """Headers and counts to other ranks."""
    bytes_between_hosts: int = 0
    """The part of bytes_sent and bytes_returned that went to ranks of other hosts."""
    bytes_local: int = 0
    """What bytes_sent and bytes_returned would have more if rows for this rank's own experts travelled like the others."""

    @property
    def bytes_within_host(self) -> int:
        """The part of bytes_sent and bytes_returned that went to other ranks of this host."""
        return self.bytes_sent + self.bytes_returned - self.bytes_between_hosts


@dataclass(frozen=True)
class Outgoing:
    """What this rank sends: rows grouped by destination rank, by token inside a group."""

    token_M: Int64Array
    """Row of x to send."""
    slot_MK: Int32Array
    """Local slot at the destination for each of the token's K experts, -1 where the expert is elsewhere."""
    rows_N: list[int]
    """Rows per destination; sums to M."""
    pairs_N: list[int]
    """Expert rows that each destination returns; sums to S."""
    position_TK: Int64Array
    """Where the result of (token, k) stands among the S returned rows, -1 if nothing is computed for it."""

    @property
    def num_pairs(self) -> int:
        """S: expert rows that come back to this rank."""
        return sum(self.pairs_N)


@dataclass(frozen=True)
class Incoming:
    """What this rank computes: S expert rows by (slot, source rank, token, k)."""

    row_index_S: Int64Array
    """Expert row -> token row."""
    rows_p: Int64Array
    """Expert rows per slot; sums to S."""
    return_S: Int64Array
    """The order of going home: the i-th row returned is expert row return_S[i]. By (source rank, token, k)."""
    pairs_N: list[int]
    """Expert rows that go back to each source; sums to S."""


def plan_outgoing(global_slot_TK: Int64Array, num_ranks: int, slots_per_rank: int) -> Outgoing:
    """Group (token, k) pairs by the rank that computes them. Pairs with slot -1 go nowhere."""
    T, K = global_slot_TK.shape
    slot_TK = global_slot_TK.astype(np.int32)
    # -1 // p is -1, which is no rank.
    owner_TK = slot_TK // np.int32(slots_per_rank)
    ranks_N = np.arange(num_ranks, dtype=np.int32)
    goes_NTK = owner_TK == ranks_N[:, None, None]
    # The same with K first: numpy is several times faster over the first axis than over a short last one.
    goes_NT = (np.ascontiguousarray(owner_TK.T)[:, None, :] == ranks_N[:, None]).any(axis=0)
    rank_M, token_M = goes_NT.nonzero()
    local_MK = slot_TK.take(token_M, axis=0) - (rank_M * slots_per_rank).astype(np.int32)[:, None]
    # Listed by (rank, token, k), the order in which results come home.
    pair_S = np.flatnonzero(goes_NTK) % max(1, T * K)
    position = np.full(T * K, -1, dtype=np.int64)
    position[pair_S] = np.arange(pair_S.size)
    return Outgoing(
        token_M=token_M,
        # Slots of lower ranks have become negative, so as unsigned numbers they are large too.
        slot_MK=np.where(local_MK.view(np.uint32) < slots_per_rank, local_MK, np.int32(-1)),
        rows_N=goes_NT.sum(axis=1).tolist(),
        pairs_N=goes_NTK.sum(axis=(1, 2)).tolist(),
        position_TK=position.reshape(T, K),
    )


def plan_incoming(slot_RK: Int32Array, rows_N: Sequence[int], slots_per_rank: int) -> Incoming:
    """Group the received (row, k) pairs by slot. `rows_N`: rows from each source rank, in order; sums to R."""
    K = slot_RK.shape[1]
    slot = slot_RK.reshape(-1)
    pair_S = np.flatnonzero(slot >= 0)
    slot_S = slot[pair_S]
    # numpy sorts 16-bit integers by radix, ten times faster than wider ones.
    order_S = slot_S.astype(np.int16 if slots_per_rank < 1 << 15 else np.int32).argsort(kind="stable")
    return_S = np.empty_like(order_S)
    return_S[order_S] = np.arange(order_S.size)
    ends = np.searchsorted(pair_S, [end * K for end in starts(rows_N)])
    return Incoming(
        row_index_S=pair_S[order_S] // K,
        rows_p=np.bincount(slot_S, minlength=slots_per_rank),
        return_S=return_S,
        pairs_N=[end - begin for begin, end in pairwise(ends.tolist())],
    )


def starts(sizes: Sequence[int]) -> list[int]:
    """Running sum from 0, one longer than `sizes`: group i is [starts[i], starts[i + 1])."""
    result = [0]
    for size in sizes:
        result.append(result[-1] + size)
    return result


def slice_elements(device: torch.device) -> int:
    """How many elements of a weighted sum to compute at a time."""
    return _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK


def sum_in_k_order(
    returned_SD: torch.Tensor,
    position_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    *,
    all_present: bool,
) -> torch.Tensor:
    """out[t] = sum over k of weights[t, k] * returned[position[t, k]]; a position of -1 adds nothing.

    Products and sums are float32, added in the order k = 0, 1, ..., so every dispatcher gives the same bits.
    `all_present`: the caller knows that no position is -1. Returns (T, D) in the dtype of returned_SD.
    """
    T, K = position_TK.shape
    D = returned_SD.shape[1]
    if T == 0 or returned_SD.shape[0] == 0:
        return returned_SD.new_zeros(T, D)
    step = min(T, max(1, slice_elements(returned_SD.device) // max(1, K * D)))
    # Columns first: whole matrices are multiplied and added, and each slice has its place in the cache.
    position_KT = position_TK.t().contiguous()
    weights_KT1 = weights_TK.to(torch.float32).t().unsqueeze(2)
    out = returned_SD.new_empty(T, D)
    # One piece of memory for all slices.
    rows = returned_SD.new_empty(K * step, D)
    terms = rows if rows.dtype == torch.float32 else torch.empty_like(rows, dtype=torch.float32)
    for begin in range(0, T, step):
        part = slice(begin, min(T, begin + step))
        position = position_KT[:, part]
        size = position.numel()
        out[part] = _sum_slice(
            returned_SD, position, weights_KT1[:, part], rows[:size], terms[:size], all_present
        )
    return out


def _sum_slice(
    returned_SD: torch.Tensor,
    position_KT: torch.Tensor,
    weights_KT1: torch.Tensor,
    rows: torch.Tensor,
    terms: torch.Tensor,
    all_present: bool,
) -> torch.Tensor:
    """(T, D) float32, in the memory of `terms`. rows, terms: (K * T, D), the same if the rows are float32."""
    index = position_KT.reshape(-1)
    torch.index_select(returned_SD, 0, index if all_present else index.clamp(min=0), out=rows)
    if terms.dtype != rows.dtype:
        terms.copy_(rows)
    terms_KTD = terms.view(*position_KT.shape, -1)
    terms_KTD *= weights_KT1
    if not all_present:
        # Selected, not multiplied by 0: the row that stands in may hold infinity.
        terms_KTD.masked_fill_((position_KT < 0).unsqueeze(2), 0.0)
    total = terms_KTD[0]
    for k in range(1, position_KT.shape[0]):
        total += terms_KTD[k]
    return total
