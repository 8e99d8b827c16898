"""Comparing what an engine or a decoder gave with transformers, row by row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tests.helpers.tiny_models import reference_logprobs

if TYPE_CHECKING:
    from moe_runtime.engine.outputs import RequestOutput

MAX_LOGPROB_ERROR = 1e-4
CLEAR_MARGIN = 1e-3
NOISE = 3e-7
"""Relative. Weights changed by so much move what routers see three times as far as rounding to float32 does, and logprobs by 1e-5."""
NUM_ROUNDINGS = 16

Problem = Callable[[int, torch.Tensor], str]
"""From the number of a row and the log-probabilities [V] that it should have to what is wrong with it; nothing if it is right."""


class Rows(NamedTuple):
    """Of one sequence: those after each of its tokens from position `first` on."""

    ids: list[int]
    first: int
    problem: Problem


class Reference:
    """transformers' model in float32, and what it becomes where rounding decides.

    About four of a million choices of experts fall otherwise if a sum is rounded otherwise, since two experts are equally good
    to six digits, and then all that follows differs. So a row that is not transformers' own must be one of those that
    transformers computes from weights changed by next to nothing: right of these, not just anything. Most rows must be its own.
    """

    def __init__(self, model: Any, logprobs: Callable[[list[int], int], torch.Tensor] | None = None) -> None:
        """logprobs(ids, first): (len(ids) - first, V) float32, after each token from `first` on; by default the model's."""
        self.model = model
        self.logprobs = logprobs or (lambda ids, first: reference_logprobs(model, ids)[first:])

    def check(self, sequences: Sequence[Rows]) -> None:
        compared = doubtful = 0
        for ids, first, problem in sequences:
            own = self.logprobs(ids, first)
            wrong = {i: text for i, row in enumerate(own) if (text := problem(i, row))}
            compared, doubtful = compared + len(own), doubtful + len(wrong)
            self._check_doubtful(ids, first, problem, wrong)
        assert doubtful <= compared / 2, f"{doubtful} of {compared} rows are in doubt"

    def _check_doubtful(self, ids: list[int], first: int, problem: Problem, wrong: dict[int, str]) -> None:
        left = dict(wrong)
        for rows in self._roundings(ids, first) if left else ():
            left = {i: text for i, text in left.items() if problem(i, rows[i])}
            if not left:
                return
        assert not left, "; ".join(f"row {i}: {text}" for i, text in left.items())

    def _roundings(self, ids: list[int], first: int) -> Iterator[torch.Tensor]:
        """Log-probabilities as of `logprobs`, each of a copy of the model whose weights are changed a little."""
        for number in range(NUM_ROUNDINGS):
            generator = torch.Generator().manual_seed(number)
            changed = copy.deepcopy(self.model)
            with torch.no_grad():
                for weight in changed.parameters():
                    weight.mul_(1 + NOISE * torch.randn(weight.shape, generator=generator))
            yield reference_logprobs(changed, ids)[first:]


class Answer(NamedTuple):
    """Greedy tokens of one sequence, and for each of them the logprobs of some candidates."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[dict[int, float]]

    def rows(self) -> Rows:
        """Teacher-forced on the answer's own tokens, so one doubtful token does not hide the rest."""
        return Rows((self.prompt + self.tokens)[:-1], len(self.prompt) - 1, self._problem)

    def _problem(self, i: int, row: torch.Tensor) -> str:
        for candidate, logprob in self.logprobs[i].items():
            error = abs(logprob - float(row[candidate]))
            # A NaN makes this false too.
            if not error < MAX_LOGPROB_ERROR:
                return f"candidate {candidate} is off by {error}"
        best, second = row.topk(2).values.tolist()
        if not best - second <= CLEAR_MARGIN and self.tokens[i] != int(row.argmax()):
            return f"token {self.tokens[i]}, transformers says {int(row.argmax())}"
        return ""


def check_answers(reference: Reference, answers: Sequence[Answer], num_tokens: int | None = None) -> None:
    """Tokens and logprobs are transformers', where its two best candidates are clearly apart; `num_tokens` of each, if given."""
    assert answers
    for answer in answers:
        assert 0 < len(answer.tokens) == len(answer.logprobs)
        assert num_tokens in (None, len(answer.tokens))
    reference.check([answer.rows() for answer in answers])


def answer_of(prompt: list[int], choice: dict[str, Any]) -> Answer:
    """From a choice of `/v1/completions` with token ids and the logprobs of chosen tokens."""
    tokens = choice["token_ids"]
    logprobs = choice["logprobs"]["token_logprobs"]
    return Answer(prompt, tokens, [{t: p} for t, p in zip(tokens, logprobs, strict=True)])


def check_greedy(reference: Reference, outputs: Sequence[RequestOutput], num_tokens: int) -> None:
    """`check_answers` of outputs with one completion each."""
    answers = []
    for output in outputs:
        (completion,) = output.outputs
        assert completion.logprobs is not None
        logprobs = [{token: one.logprob for token, one in place.items()} for place in completion.logprobs]
        answers.append(Answer(output.prompt_token_ids, completion.token_ids, logprobs))
    check_answers(reference, answers, num_tokens)


def check_rows(reference: Reference, texts: Sequence[list[int]], found_TV: torch.Tensor, atol: float) -> None:
    """Log-probabilities after each token of the texts, in order, are transformers' within `atol`."""
    expected = torch.cat([reference.logprobs(text, 0) for text in texts])
    assert expected.std() > 0.3, "the reference's distribution is too flat to show a difference"
    assert found_TV.shape == expected.shape
    parts = found_TV.split([len(text) for text in texts])

    def problem_of(found: torch.Tensor) -> Problem:
        def problem(i: int, row: torch.Tensor) -> str:
            error = (found[i] - row).abs().max()
            return "" if error <= atol else f"off by {error}"

        return problem

    reference.check([Rows(text, 0, problem_of(found)) for text, found in zip(texts, parts, strict=True)])
