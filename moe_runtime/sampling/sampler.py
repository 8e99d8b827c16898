"""Choosing the next token of each sequence on the rank that owns it.

A row's result depends on its own logits, parameters and history only: not on the other rows, their number, or
the random draws of others. The draw is one uniform number, a hash of (seed, position), looked up in the row's
cumulative distribution.

Legend: B sequences, V vocabulary, n some of the rows, k candidates of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import pad

from moe_runtime.errors import MoeRuntimeError
from moe_runtime.sampling.logits import adjust, largest, needs_adjusting, passes, token_logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moe_runtime import core
    from moe_runtime.core import SamplingParams, TokenLogprobs

NUCLEUS_CANDIDATES = 1024
"""Tokens looked at first for top_p without top_k; the whole vocabulary is sorted only where they do not suffice."""


class SampledToken(NamedTuple):
    """One sequence's next token."""

    token_id: int
    logprobs: TokenLogprobs | None
    """Present if the request asked for logprobs."""


class SamplingError(MoeRuntimeError):
    """A sequence's logits allow no token. Concerns `request_id` only: the others can be sampled without it."""

    def __init__(self, message: str, request_id: str) -> None:
        super().__init__(message)
        self.request_id = request_id


def sample(logits_BV: torch.Tensor, sequences: Sequence[core.Sequence]) -> list[SampledToken]:
    """The next token of each sequence, from its row of float32 logits, which are left unchanged.

    Raises SamplingError if a row holds NaN or +inf, or nothing but -inf, before or after the request's own masks.
    """
    assert logits_BV.dtype == torch.float32, f"logits are {logits_BV.dtype}, not float32"
    assert logits_BV.shape[0] == len(sequences), f"{logits_BV.shape[0]} rows, {len(sequences)} sequences"
    if not sequences:
        return []
    best_B, token_B = logits_BV.max(dim=1)
    _require_finite(best_B, sequences, "the model's logits hold NaN, +inf, or nothing but -inf")
    allowed_BV = logits_BV
    to_adjust = [row for row, sequence in enumerate(sequences) if needs_adjusting(sequence)]
    if to_adjust:
        allowed_BV = logits_BV.clone()
        for row in to_adjust:
            adjust(allowed_BV[row], sequences[row])
        best_B, token_B = allowed_BV.max(dim=1)
        _require_finite(
            best_B, sequences, "min_tokens together with the stop tokens leaves no token to choose"
        )
    tokens: list[int] = token_B.tolist()
    for draw, truncated in ((_draw_any, False), (_draw_truncated, True)):
        for part in passes(_rows_of(sequences, truncated), logits_BV.shape[1]):
            drawn = draw(allowed_BV[part], best_B[part], [sequences[row] for row in part])
            for row, token in zip(part, drawn, strict=True):
                tokens[row] = token
    return _with_logprobs(logits_BV, tokens, sequences)


def _require_finite(best_B: torch.Tensor, sequences: Sequence[core.Sequence], problem: str) -> None:
    """A row's largest logit is finite exactly if the row has a distribution: `max` passes NaN on."""
    for row, finite in enumerate(best_B.isfinite().tolist()):
        if not finite:
            request_id = sequences[row].request_id
            raise SamplingError(
                f"request {request_id}, token {len(sequences[row].output_token_ids)}: {problem}", request_id
            )


def _truncates(p: SamplingParams) -> bool:
    return p.top_k > 0 or p.top_p < 1.0


def _rows_of(sequences: Sequence[core.Sequence], truncated: bool) -> list[int]:
    """Rows to be drawn at random, with or without a top_k or top_p."""
    return [
        row
        for row, sequence in enumerate(sequences)
        if not sequence.sampling.greedy and _truncates(sequence.sampling) == truncated
    ]


def _candidates_wanted(p: SamplingParams) -> int:
    return p.top_k if p.top_k > 0 else NUCLEUS_CANDIDATES


def _draw_any(x_nV: torch.Tensor, best_n: torch.Tensor, sequences: list[core.Sequence]) -> list[int]:
    """Draw from the whole vocabulary, in the order of ids; min_p cuts the unlikely ones off."""
    weight_nV = _probabilities(x_nV, best_n, sequences).double()
    min_p_n1 = weight_nV.new_tensor([[s.sampling.min_p] for s in sequences])
    weight_nV.masked_fill_(weight_nV < min_p_n1 * weight_nV.amax(dim=1, keepdim=True), 0.0)
    return _pick(weight_nV, sequences).squeeze(1).tolist()


def _draw_truncated(x_nV: torch.Tensor, best_n: torch.Tensor, sequences: list[core.Sequence]) -> list[int]:
    """Draw from the most likely tokens, in descending order: cut by top_k, min_p and then top_p."""
    num_columns = x_nV.shape[1]
    num_candidates = min(num_columns, max(_candidates_wanted(s.sampling) for s in sequences))
    probs_nV = _probabilities(x_nV, best_n, sequences)
    drawn, short = _draw_from(x_nV, probs_nV, sequences, num_candidates)
    if short:
        subset = [sequences[row] for row in short]
        redrawn, _ = _draw_from(x_nV[short], probs_nV[short], subset, num_columns)
        for row, token in zip(short, redrawn, strict=True):
            drawn[row] = token
    return drawn


def _draw_from(
    x_nV: torch.Tensor, probs_nV: torch.Tensor, sequences: list[core.Sequence], num_candidates: int
) -> tuple[list[int], list[int]]:
    """Draw looking at the `num_candidates` largest of each row; also the rows for which these were too few.

    Otherwise `num_candidates` does not matter: what is kept is a prefix of the sorted row, summed in order.
    """
    num_columns, params = x_nV.shape[1], [s.sampling for s in sequences]
    ids_nk = largest(x_nV, num_candidates)
    weight_nk = probs_nV.gather(1, ids_nk).double()
    top_k_n1 = torch.tensor([[p.top_k if p.top_k > 0 else num_columns] for p in params], device=x_nV.device)
    min_p_n1 = weight_nk.new_tensor([[p.min_p] for p in params])
    top_p_n1 = weight_nk.new_tensor([[p.top_p] for p in params])

    place_k = torch.arange(num_candidates, device=x_nV.device)
    weight_nk.masked_fill_((place_k >= top_k_n1) | (weight_nk < min_p_n1 * weight_nk[:, :1]), 0.0)
    # If the last candidate is out, so are all after it.
    seen_all_n1 = (weight_nk[:, -1:] == 0.0) | (top_k_n1 <= num_candidates)

    # top_p is a share of what top_k and min_p left. Without them that is everything, also what was not looked at.
    cut_n1 = (top_k_n1 < num_columns) | (min_p_n1 > 0.0)
    mass_nk = weight_nk.cumsum(dim=1)
    total_n1 = torch.where(cut_n1, mass_nk[:, -1:], 1.0)
    mass_before_nk = pad(mass_nk[:, :-1], (1, 0))
    weight_nk.masked_fill_((mass_before_nk >= top_p_n1 * total_n1) & (place_k > 0), 0.0)
    seen_all_n1 |= ~cut_n1 & (weight_nk[:, -1:] == 0.0)

    drawn: list[int] = ids_nk.gather(1, _pick(weight_nk, sequences)).squeeze(1).tolist()
    return drawn, (~seen_all_n1).squeeze(1).nonzero().squeeze(1).tolist()


def _probabilities(x_nV: torch.Tensor, best_n: torch.Tensor, sequences: list[core.Sequence]) -> torch.Tensor:
    """softmax(x / temperature), float32. The largest is taken off first, so that no temperature overflows."""
    smallest = torch.finfo(x_nV.dtype).tiny
    temperature_n1 = x_nV.new_tensor([[max(s.sampling.temperature, smallest)] for s in sequences])
    return (x_nV - best_n[:, None]).div_(temperature_n1).softmax(dim=1)


def _pick(weight_nk: torch.Tensor, sequences: list[core.Sequence]) -> torch.Tensor:
    """(n, 1) int64: the column that each row's uniform number falls on; never one of weight 0."""
    mass_nk = weight_nk.cumsum(dim=1)
    u_n1 = weight_nk.new_tensor([[uniform(s.sampling.seed, len(s.output_token_ids))] for s in sequences])
    # The first column whose mass exceeds u * total. There is one: u is at most 1 - 2**-53, so the product is
    # rounded to less than the total.
    return torch.searchsorted(mass_nk, u_n1 * mass_nk[:, -1:], right=True)


def uniform(seed: int | None, position: int) -> float:
    """A number in [0, 1) with 53 random bits, from the seed (None: 0) and the position alone.

    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014): the seed's hash is the
    generator's state, advanced `position` times.
    """
    state = _mix64(seed or 0) + (position + 1) * 0x9E3779B97F4A7C15
    return (_mix64(state) >> 11) / 2**53


def _mix64(x: int) -> int:
    """SplitMix64's finalizer: a bijection of 64-bit integers in which every bit depends on every bit."""
    x &= 0xFFFFFFFFFFFFFFFF
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def _with_logprobs(
    logits_BV: torch.Tensor, tokens: list[int], sequences: Sequence[core.Sequence]
) -> list[SampledToken]:
    wanted = {row: s.sampling.logprobs for row, s in enumerate(sequences) if s.sampling.logprobs is not None}
    found: dict[int, TokenLogprobs] = {}
    for part in passes(list(wanted), logits_BV.shape[1]):
        rows = token_logprobs(logits_BV[part], [tokens[r] for r in part], [wanted[r] for r in part])
        found.update(zip(part, rows, strict=True))
    return [SampledToken(token, found.get(row)) for row, token in enumerate(tokens)]
