"""What happens to logits before a token is chosen, and the logprobs of the one that was.

Meaning and order follow vLLM: logprobs come from the untouched logits; then min_tokens, logit_bias,
repetition penalty (arXiv 1909.05858), presence and frequency penalties (as OpenAI's API defines them).

Everything is computed per row by operations whose result does not depend on the other rows.
Legend: B sequences, V vocabulary, n some of the rows, k tokens kept of each row.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from moe_runtime.core import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moe_runtime import core

ELEMENTS_PER_PASS = 2**22
"""Rows are worked on in passes of about this many logits, which bounds the temporary memory."""


def needs_adjusting(sequence: core.Sequence) -> bool:
    """Whether `adjust` would change this sequence's row."""
    p = sequence.sampling
    return bool(
        len(sequence.output_token_ids) < p.min_tokens
        or p.logit_bias
        or p.repetition_penalty != 1.0
        or p.presence_penalty
        or p.frequency_penalty
    )


def adjust(logits_V: torch.Tensor, sequence: core.Sequence) -> None:
    """Apply the sequence's masks, bias and penalties to its row (float32), in place.

    No logit becomes NaN or +inf, whatever the request says.
    """
    p, outputs = sequence.sampling, sequence.output_token_ids
    if len(outputs) < p.min_tokens:
        logits_V[_ids(_ending_tokens(sequence), logits_V)] = -torch.inf
    if p.logit_bias:
        logits_V[_ids(p.logit_bias, logits_V)] += logits_V.new_tensor(list(p.logit_bias.values()))
    limits = torch.finfo(logits_V.dtype)
    if p.repetition_penalty != 1.0:
        seen = _ids({*sequence.prompt_token_ids, *outputs}, logits_V)
        # A penalty that rounds to 0 would make NaN of -inf * 0; a tiny one makes inf, which is cut off.
        penalty, old = max(p.repetition_penalty, limits.tiny), logits_V[seen]
        logits_V[seen] = torch.where(old > 0, old / penalty, old * penalty).clamp_(max=limits.max)
    if (p.presence_penalty or p.frequency_penalty) and outputs:
        counts = Counter(outputs)
        count = logits_V.new_tensor(list(counts.values()))
        logits_V[_ids(counts, logits_V)] -= p.frequency_penalty * count + p.presence_penalty


def _ending_tokens(sequence: core.Sequence) -> set[int]:
    """Tokens that would end the sequence. With ignore_eos the end-of-sequence token does not, so it may appear."""
    stops = set(sequence.sampling.stop_token_ids or ())
    return stops if sequence.sampling.ignore_eos else stops.union(sequence.eos_token_ids)


def _ids(tokens: set[int] | dict[int, float] | Counter[int], logits_V: torch.Tensor) -> torch.Tensor:
    ids = list(tokens)
    assert all(0 <= token < logits_V.shape[0] for token in ids), (
        f"token ids outside 0..{logits_V.shape[0] - 1}: the client checks them"
    )
    return torch.tensor(ids, dtype=torch.int64, device=logits_V.device)


def passes(rows: list[int], num_columns: int) -> Iterator[list[int]]:
    """`rows` in parts of at most about ELEMENTS_PER_PASS elements."""
    step = max(1, ELEMENTS_PER_PASS // num_columns)
    for first in range(0, len(rows), step):
        yield rows[first : first + step]


def largest(x_nV: torch.Tensor, k: int) -> torch.Tensor:
    """Indices (n, k) of each row's k largest values, largest first, equal values by lower index. k is at most V."""
    if k * 8 >= x_nV.shape[1] or k == 0:
        return _sorted_ids(x_nV)[:, :k] if k else x_nV.new_empty(x_nV.shape[0], 0, dtype=torch.int64)
    # `topk` breaks ties as it likes: order what it found, and sort rows whole where it cut through a tie.
    values_nk, ids_nk = x_nV.topk(k + 1, dim=1)
    cut_through_tie_n = values_nk[:, k - 1] == values_nk[:, k]
    ids_nk = ids_nk[:, :k].sort(dim=1).values
    ids_nk = ids_nk.gather(1, _sorted_ids(x_nV.gather(1, ids_nk)))
    if bool(cut_through_tie_n.any()):
        ids_nk[cut_through_tie_n] = _sorted_ids(x_nV[cut_through_tie_n])[:, :k]
    return ids_nk


def _sorted_ids(x_nV: torch.Tensor) -> torch.Tensor:
    return x_nV.sort(dim=1, descending=True, stable=True).indices


def token_logprobs(logits_nV: torch.Tensor, tokens: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """Logprob and rank of each row's token, and its `num_top` most likely tokens, from untouched logits.

    Tokens are ranked by logit, equal logits by lower id.
    """
    logprobs_nV = logits_nV.log_softmax(dim=1)
    token_n1 = torch.tensor(tokens, dtype=torch.int64, device=logits_nV.device)[:, None]
    logit_n1 = logits_nV.gather(1, token_n1)
    ids_V = torch.arange(logits_nV.shape[1], device=logits_nV.device)
    ahead_nV = (logits_nV > logit_n1) | ((logits_nV == logit_n1) & (ids_V < token_n1))
    top_nk = largest(logits_nV, min(max(num_top), logits_nV.shape[1]))
    columns = (
        logprobs_nV.gather(1, token_n1).squeeze(1).tolist(),
        (ahead_nV.sum(dim=1) + 1).tolist(),
        top_nk.tolist(),
        logprobs_nV.gather(1, top_nk).tolist(),
        num_top,
    )
    return [
        TokenLogprobs(logprob, rank, list(zip(top_ids[:k], top_logprobs[:k], strict=True)))
        for logprob, rank, top_ids, top_logprobs, k in zip(*columns, strict=True)
    ]
