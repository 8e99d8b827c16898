"""The two ways of combining, `exact` and `per_rank` (see `base.Dispatcher`): what travels for them, and their sums.

Beside each token row travel W words of int32: its K slots at the destination and, for `per_rank`, the bits of its K
routing weights, since the destination multiplies.

Legend: T tokens here, K experts per token, D hidden, M rows sent, R rows received, S expert rows, J most experts of
one received row on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from moe_runtime.dispatch.rows import sum_in_k_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moe_runtime.dispatch.rows import Float32Array, Int32Array, Int64Array, Outgoing


@dataclass(frozen=True)
class OwnPairs:
    """Per received row, the experts it has on this rank, in k order."""

    position_RJ: Int64Array
    """Expert row of each, -1 where there are fewer than J."""
    weights_RJ: Float32Array


def words_beside(outgoing: Outgoing, weights_TK: Float32Array | None) -> Int32Array:
    """(M, W) int32: the slots of the rows sent, followed by the bits of their routing weights where given."""
    if weights_TK is None:
        return outgoing.slot_MK
    return np.concatenate([outgoing.slot_MK, weights_TK[outgoing.token_M].view(np.int32)], axis=1)


def own_pairs(words_RW: Int32Array, topk: int, return_S: Int64Array) -> OwnPairs:
    """What this rank sums of each received row. words_RW: with weights; return_S: of `rows.Incoming`."""
    here_RK, weights_RK = words_RW[:, :topk] >= 0, words_RW[:, topk:].view(np.float32)
    position_RK = np.full(here_RK.shape, -1, dtype=np.int64)
    position_RK[here_RK] = return_S
    # Most rows have few of their experts here: those first, still in k order, and columns that nobody needs cut.
    longest = max(1, int(here_RK.sum(axis=1).max(initial=0)))
    order_RJ = (~here_RK).argsort(axis=1, kind="stable")[:, :longest]
    return OwnPairs(
        position_RJ=np.take_along_axis(position_RK, order_RJ, axis=1),
        weights_RJ=np.take_along_axis(weights_RK, order_RJ, axis=1),
    )


def partial_sums(y_SD: torch.Tensor, own: OwnPairs) -> torch.Tensor:
    """(R, D): per received row the weighted sum of its experts here, in k order, in the dtype of y_SD."""
    position_RJ = torch.from_numpy(own.position_RJ).to(y_SD.device)
    weights_RJ = torch.from_numpy(own.weights_RJ).to(y_SD.device)
    return sum_in_k_order(y_SD, position_RJ, weights_RJ, all_present=bool((own.position_RJ >= 0).all()))


def sum_in_rank_order(
    returned_MD: torch.Tensor, token_M: torch.Tensor, rows_N: Sequence[int], num_tokens: int
) -> torch.Tensor:
    """out[t] = sum over ranks of what rank n returned for t, added in float32 in the order of the ranks.

    returned_MD: partial sums by (rank, token), rows_N of each rank; token_M: their tokens. A token that no rank returned
    gets zeros. Returns (num_tokens, D) in the dtype of returned_MD.
    """
    total = returned_MD.new_zeros(num_tokens, returned_MD.shape[1], dtype=torch.float32)
    # A rank returns a token once, so no two rows of a part meet.
    parts = torch.split(returned_MD, list(rows_N)), torch.split(token_M, list(rows_N))
    for part, tokens in zip(*parts, strict=True):
        total.index_add_(0, tokens, part.to(torch.float32))
    return total.to(returned_MD.dtype)


def sum_returned(
    returned: torch.Tensor, outgoing: Outgoing, weights_TK: torch.Tensor, *, per_rank: bool
) -> torch.Tensor:
    """(T, D) from the rows that came home: expert rows to be weighted, or partial sums."""
    T, K = outgoing.position_TK.shape
    device = returned.device
    if per_rank:
        return sum_in_rank_order(returned, torch.from_numpy(outgoing.token_M).to(device), outgoing.rows_N, T)
    return sum_in_k_order(
        returned,
        torch.from_numpy(outgoing.position_TK).to(device),
        weights_TK,
        all_present=outgoing.num_pairs == T * K,
    )
