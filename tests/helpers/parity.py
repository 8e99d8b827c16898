"""Comparing what an engine generated with transformers, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from moe_runtime.engine.outputs import RequestOutput

MAX_LOGPROB_ERROR = 1e-4
CLEAR_MARGIN = 1e-3


def check_greedy(
    reference: Callable[[list[int], int], torch.Tensor], output: RequestOutput, num_tokens: int
) -> None:
    """The engine's greedy tokens and logprobs are transformers', where its two best candidates are clearly apart.

    reference(ids, first): transformers' logprobs (len(ids) - first, V) after each token from position `first` on.
    Teacher-forced on the engine's own tokens, so one doubtful token does not hide the rest.
    """
    (completion,) = output.outputs
    assert len(completion.token_ids) == num_tokens, completion.finish_reason
    assert completion.logprobs is not None
    expected = reference(output.prompt_token_ids + completion.token_ids, len(output.prompt_token_ids) - 1)
    for i, (token, logprobs) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        row = expected[i]
        for candidate, logprob in logprobs.items():
            error = abs(logprob.logprob - float(row[candidate]))
            # A NaN makes this false too.
            assert error < MAX_LOGPROB_ERROR, f"output token {i}, candidate {candidate}: off by {error}"
        best, second = row.topk(2).values.tolist()
        if best - second > CLEAR_MARGIN:
            assert token == int(row.argmax()), (
                f"output token {i}: {token}, transformers says {int(row.argmax())}"
            )
