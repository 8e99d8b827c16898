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

from moe_runtime.dispatch.rows import slice_elements, sum_in_k_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moe_runtime.dispatch.rows import Float32Array, Int32Array, Int64Array, Outgoing


@dataclass(frozen=True)
class OwnPairs:
    """The experts that received rows have on this rank, as columns: of every row its first in k order, of all with two the
    second, and so on. Rows with more of them come first, so that each column is a run of rows from the first."""

    size_J: list[int]
    """Rows in each column, falling; sums to S."""
    position_S: Int64Array
    """Expert rows, column by column."""
    weights_S: Float32Array
    place_R: Int64Array
    """Where each received row stands in the columns."""


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
    number_RK = here_RK.cumsum(axis=1)
    row_R = (-number_RK[:, -1]).argsort(kind="stable")
    place_R = np.empty_like(row_R)
    place_R[row_R] = np.arange(row_R.size)
    # By (column, place): those that are not here go last, and are cut off.
    key_RK = np.where(here_RK, (number_RK - 1) * row_R.size + place_R[:, None], topk * row_R.size)
    pair_S = key_RK.reshape(-1).argsort(kind="stable")[: return_S.size]
    column_S = number_RK.reshape(-1)[pair_S] - 1
    return OwnPairs(
        size_J=np.bincount(column_S).tolist(),
        position_S=position_RK.reshape(-1)[pair_S],
        weights_S=weights_RK.reshape(-1)[pair_S],
        place_R=place_R,
    )


def partial_sums(y_SD: torch.Tensor, own: OwnPairs) -> torch.Tensor:
    """(R, D): per received row the weighted sum of its experts here, added in float32 in k order; in the dtype of y_SD and
    the order of the columns."""
    position_S = torch.from_numpy(own.position_S).to(y_SD.device)
    weights_S1 = torch.from_numpy(own.weights_S).to(y_SD.device).unsqueeze(1)
    columns = list(zip(torch.split(position_S, own.size_J), torch.split(weights_S1, own.size_J), strict=True))
    out_RD = y_SD.new_empty(own.place_R.size, y_SD.shape[1])
    step = max(1, slice_elements(y_SD.device) // max(1, y_SD.shape[1]))
    for begin in range(0, out_RD.shape[0], step):
        part = slice(begin, begin + step)
        total = _products(y_SD, *columns[0], part)
        for position, weights in columns[1:]:
            if position.shape[0] <= begin:
                break
            terms = _products(y_SD, position, weights, part)
            total[: terms.shape[0]] += terms
        out_RD[part] = total
    return out_RD


def _products(y_SD: torch.Tensor, position: torch.Tensor, weights: torch.Tensor, part: slice) -> torch.Tensor:
    return y_SD.index_select(0, position[part]).to(torch.float32).mul_(weights[part])


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
