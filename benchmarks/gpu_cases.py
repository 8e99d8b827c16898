"""Random inputs of gpu_check's checks, and comparisons that NaN never passes.

Legend: T tokens, K experts per token, D hidden, F expert intermediate size, S expert rows, p slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from moe_runtime.core import ExpertBatch
from moe_runtime.experts.base import ExpertWeights
from moe_runtime.layers.activation import is_gated
from moe_runtime.quantization import QuantScheme

BF16 = torch.bfloat16
STEP = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""A step of the last digit, with some room in float32: where a sum in another order crosses a rounding boundary."""


class Skip(Exception):  # noqa: N818
    """A check cannot run here; its text says why."""


@dataclass(frozen=True)
class Env:
    """Where checks run."""

    device: torch.device
    small: bool
    """Shapes that the interpreter can do."""
    known: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the roofline check."""


def error_of(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest expected magnitude (or 1, if that is larger); NaN if there is one."""
    if not expected.numel():
        return 0.0
    ours, expected = ours.double(), expected.double()
    return float((ours - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def close(what: str, ours: torch.Tensor, expected: torch.Tensor, tolerance: float) -> dict[str, Any]:
    """The case's row. Raises AssertionError unless shapes agree and error_of is at most the tolerance."""
    assert ours.shape == expected.shape, f"{what}: shape {tuple(ours.shape)}, not {tuple(expected.shape)}"
    error = error_of(ours, expected)
    # A NaN makes this false too.
    assert error <= tolerance, f"{what}: off by {error:.3g} of the largest value, {tolerance:.3g} allowed"
    return {"case": what, "error": error, "allowed": tolerance}


def same(what: str, ours: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    """The case's row. Raises AssertionError unless every value is equal."""
    assert ours.shape == expected.shape, f"{what}: shape {tuple(ours.shape)}, not {tuple(expected.shape)}"
    wrong = int((ours != expected).sum())
    assert wrong == 0, f"{what}: {wrong} of {ours.numel()} values differ"
    return {"case": what, "error": 0.0, "allowed": 0.0}


def expert_weights(
    device: torch.device,
    slots: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype = BF16,
    scheme: QuantScheme | None = None,
    rounds: bool = False,
    activation: str = "silu",
    bias: bool = False,
    limit: float | None = None,
) -> ExpertWeights:
    """Random weights. Made slot after slot, so that large ones take little more memory than they keep."""
    parts = 2 if is_gated(activation) else 1
    made: list[list[torch.Tensor]] = [[], [], [], []]
    for _ in range(slots):
        gate_up = torch.randn(parts, inner, hidden, device=device) / hidden**0.5
        down = torch.randn(hidden, inner, device=device) / inner**0.5
        if scheme is not None:
            # Channels of different size: a scale from the wrong place shows.
            gate_up *= torch.logspace(-0.5, 0.5, inner, device=device)[torch.randperm(inner)][:, None]
            for into, part in zip(
                made, (*scheme.quantize_weight(gate_up), *scheme.quantize_weight(down)), strict=True
            ):
                into.append(part)
        else:
            made[0].append(gate_up.to(dtype))
            made[2].append(down.to(dtype))
    gate_up_p, gate_up_scale, down_p, down_scale = (torch.stack(m) if m else None for m in made)
    assert gate_up_p is not None
    assert down_p is not None
    biases = [
        torch.randn(slots, n, device=device).to(dtype) if bias else None for n in (parts * inner, hidden)
    ]
    return ExpertWeights(
        gate_up_p.view(slots, parts * inner, hidden), down_p, activation, limit, *biases,
        scheme, gate_up_scale, down_scale, rounds,
    )  # fmt: skip


def expert_batch(
    device: torch.device, counts: list[int], hidden: int, dtype: torch.dtype, num_tokens: int, spare: int = 5
) -> ExpertBatch:
    """Rows for each slot, drawn from the tokens; behind them `spare` rows of capacity whose index must not be followed."""
    index = torch.randint(max(1, num_tokens), (sum(counts),))
    return ExpertBatch(
        tokens_RD=torch.randn(num_tokens, hidden, device=device).to(dtype),
        row_index_S=torch.cat([index, torch.full((spare,), 1 << 50)]).to(device),
        num_rows_p=torch.tensor(counts, dtype=torch.int64, device=device),
    )


def routed_batch(
    device: torch.device, tokens: int, top_k: int, experts: int, slots: int, hidden: int
) -> ExpertBatch:
    """What a rank with the first `slots` of `experts` receives when `tokens` bf16 tokens choose top_k of them evenly."""
    chosen_TK = torch.cat([
        torch.rand(min(16384, tokens - at), experts, device=device).topk(top_k, dim=1).indices
        for at in range(0, tokens, 16384)
    ])  # fmt: skip
    here_TK = chosen_TK < slots
    comes_T = here_TK.any(1)
    row_T = comes_T.cumsum(0) - 1
    slot_S, token_S = chosen_TK[here_TK], here_TK.nonzero()[:, 0]
    order = slot_S.argsort(stable=True)
    return ExpertBatch(
        tokens_RD=torch.randn(int(comes_T.sum()), hidden, device=device, dtype=BF16),
        row_index_S=row_T[token_S[order]],
        num_rows_p=torch.bincount(slot_S, minlength=slots),
    )


def valid_rows(batch: ExpertBatch) -> ExpertBatch:
    """The batch without spare capacity, its tokens in float32: what the reference takes."""
    count = int(batch.num_rows_p.sum())
    return replace(batch, tokens_RD=batch.tokens_RD.float(), row_index_S=batch.row_index_S[:count])
