"""Scores, groups and top-k of the router, a block of tokens per program.

What chooses becomes an int64 key: a float32's bits in an order-preserving form above, the index, counted down, below. So all
keys differ, the largest is the best with ties to the lower index, and NaN is larger than everything, as in torch's sort.
"""

import torch
import triton.language as tl

from moe_runtime.triton_support import jit

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

NONE = tl.constexpr(-(2**63))
"""Less than every key."""
LOW = tl.constexpr(0x7FFFFFFF)
NAN_BITS = tl.constexpr(0x7FC00000)


@jit
def _key(value, index):
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(value == 0.0, 0, bits)  # -0 equals +0
    bits = tl.where(value != value, NAN_BITS, bits)
    ordered = tl.where(bits < 0, bits ^ LOW, bits)
    return (ordered.to(tl.int64) << 32) | (index ^ LOW).to(tl.int64)


@jit
def _value(key):
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ LOW, ordered).to(tl.float32, bitcast=True)


@jit
def _log1p(x):
    """log(1 + x) for 0 <= x <= 1, exact also where 1 + x rounds (Goldberg 1991, theorem 4)."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@jit
def _scores(logits, SCORE: tl.constexpr):
    if SCORE == "softmax":
        exp = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        return exp / tl.sum(exp, axis=1)[:, None]
    elif SCORE == "sigmoid":
        return tl.sigmoid(logits)
    elif SCORE == "sqrt_softplus":
        return tl.sqrt(tl.maximum(logits, 0.0) + _log1p(tl.exp(-tl.abs(logits))))
    else:
        return logits


@jit
def _keep_best_groups(
    key,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr,
):
    """NONE for the keys of all groups but the best."""
    key3 = tl.reshape(key, (TOKENS, GROUPS_PADDED, SIZE_PADDED))
    first = tl.max(key3, axis=2)
    score = _value(first)
    if TOP2_SUM:
        score += _value(tl.max(tl.where(key3 == first[:, :, None], NONE, key3), axis=2))
    group = tl.arange(0, GROUPS_PADDED)[None, :]
    left = tl.where(group < GROUPS, _key(score, group), NONE)
    kept = left == NONE
    kept = kept & (group < 0)
    for _ in range(TOP_GROUPS):
        best = left == tl.max(left, axis=1)[:, None]
        kept = kept | best
        left = tl.where(best, NONE, left)
    return tl.reshape(tl.where(kept[:, :, None], key3, NONE), (TOKENS, GROUPS_PADDED * SIZE_PADDED))


@jit(do_not_specialize=["num_tokens"])
def route_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    num_tokens,
    stride_token,
    eps,
    scale,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr,
    SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROUND_TO: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Columns are the experts, group by group, each padded to a power of two. bias_ptr: None for no bias."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token[:, None] < num_tokens
    column = tl.arange(0, GROUPS_PADDED * SIZE_PADDED)
    expert = (column // SIZE_PADDED) * SIZE + column % SIZE_PADDED
    present = (column // SIZE_PADDED < GROUPS) & (column % SIZE_PADDED < SIZE)
    at = token[:, None].to(tl.int64) * stride_token + expert[None, :]
    logits = tl.load(logits_ptr + at, mask=live & present[None, :], other=0.0).to(tl.float32)
    logits = tl.where(present[None, :], logits, float("-inf"))
    scores = _scores(logits, SCORE)
    choosing = scores
    if bias_ptr is not None:
        choosing += tl.load(bias_ptr + expert, mask=present, other=0.0).to(tl.float32)[None, :]
    key = tl.where(present[None, :], _key(choosing, expert[None, :]), NONE)
    if TOP_GROUPS < GROUPS:
        key = _keep_best_groups(key, TOKENS, GROUPS, GROUPS_PADDED, SIZE_PADDED, TOP_GROUPS, TOP2_SUM)

    rank = tl.arange(0, K_PADDED)[None, :]
    ids = tl.zeros((TOKENS, K_PADDED), tl.int64)
    weights = tl.zeros((TOKENS, K_PADDED), tl.float32)
    for k in range(K):
        best = tl.max(key, axis=1)
        hit = key == best[:, None]
        ids = tl.where(rank == k, ((best & LOW) ^ LOW)[:, None], ids)
        weights = tl.where(rank == k, tl.sum(tl.where(hit, scores, 0.0), axis=1)[:, None], weights)
        key = tl.where(hit, NONE, key)

    if SCORE == "softmax_of_chosen":
        weights = tl.where(rank < K, weights, float("-inf"))
        weights = tl.exp(weights - tl.max(weights, axis=1)[:, None])
        weights = weights / tl.sum(weights, axis=1)[:, None]
    elif SCORE == "sigmoid_of_chosen":
        weights = tl.sigmoid(weights)
    if RENORMALIZE:
        weights = weights / (tl.sum(tl.where(rank < K, weights, 0.0), axis=1)[:, None] + eps)
    weights = (weights * scale).to(ROUND_TO).to(tl.float32)
    out = token[:, None].to(tl.int64) * K + rank
    tl.store(ids_ptr + out, ids, mask=live & (rank < K))
    tl.store(weights_ptr + out, weights, mask=live & (rank < K))
