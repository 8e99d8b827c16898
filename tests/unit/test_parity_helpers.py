"""The comparison with transformers that the other tests use: what it lets pass, and what not."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.parity import Answer, Reference, check_answers, check_rows
from tests.helpers.tiny_models import make_tiny, reference_logprobs

NUM_TOKENS = 30
TOP_K = 1


def tied(folder: Path, seed: int, token: int) -> tuple[Any, list[int], list[torch.Tensor]]:
    """A model and a text, at one token of which two experts are equally good; and logprobs after the choice of either of them."""
    model = make_tiny(
        "mixtral", folder, seed, num_hidden_layers=2, num_local_experts=5, num_experts_per_tok=TOP_K
    )
    draw = random.Random(seed)
    text = [draw.randrange(model.config.vocab_size) for _ in range(NUM_TOKENS)]
    gate, seen = model.model.layers[0].mlp.gate, []
    hook = gate.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0]))
    reference_logprobs(model, text)
    hook.remove()
    x = seen[0].reshape(NUM_TOKENS, -1)[token].double()

    def with_lead(lead: float) -> Any:
        """A copy in which the best expert of those not chosen is ahead of the last chosen one."""
        changed = copy.deepcopy(model)
        weight = changed.model.layers[0].mlp.gate.weight
        values, experts = (weight.double() @ x).sort(descending=True)
        step = (values[TOP_K - 1] - values[TOP_K] + lead) / (x @ x)
        with torch.no_grad():
            weight[experts[TOP_K]] += (step * x).float()
        return changed

    ways = [reference_logprobs(with_lead(lead), text) for lead in (-1e-5, 1e-5)]
    assert (ways[0][token] - ways[1][token]).abs().max() > 1e-3, "the choice does not matter"
    return with_lead(0.0), text, ways


def test_either_choice_of_equally_good_experts_is_right(tmp_path: Path, seed: int) -> None:
    model, text, ways = tied(tmp_path, seed, 22)
    for found in ways:
        check_rows(Reference(model), [text], found, 1e-4)
        # Where nothing is in doubt, and where all depends on the choice.
        for row in (3, 22):
            wrong = found.clone()
            wrong[row, 5] += 2e-4
            with pytest.raises(AssertionError, match=rf"^row {row}: off by"):
                check_rows(Reference(model), [text], wrong, 1e-4)
        # Of both choices at once.
        with pytest.raises(AssertionError, match="row 22: off by"):
            check_rows(Reference(model), [text], (ways[0] + ways[1]) / 2, 1e-4)


def test_a_comparison_that_is_mostly_in_doubt_fails(tmp_path: Path, seed: int) -> None:
    model, text, ways = tied(tmp_path, seed, 1)

    def compare() -> None:
        for found in ways:
            check_rows(Reference(model), [text], found, 1e-4)

    with pytest.raises(AssertionError, match="of 30 rows are in doubt"):
        compare()


def test_answers(tmp_path: Path, seed: int) -> None:
    model = make_tiny("qwen3_moe", tmp_path, seed)
    ids, candidates = [3, 1, 4, 1, 5], []
    for _ in range(8):
        row = reference_logprobs(model, ids)[-1]
        candidates.append(dict(zip(*(part.tolist() for part in reversed(row.topk(2))), strict=True)))
        ids = [*ids, int(row.argmax())]
    answer = Answer(ids[:5], ids[5:], candidates)
    check_answers(Reference(model), [answer], 8)
    for error in (2e-4, -2e-4, float("nan")):
        wrong = copy.deepcopy(candidates)
        wrong[6][ids[11]] += error
        with pytest.raises(AssertionError, match=rf"^row 6: candidate {ids[11]} is off by"):
            check_answers(Reference(model), [answer._replace(logprobs=wrong)])
    # The least likely one.
    last = int(reference_logprobs(model, ids[:-1])[-1].argmin())
    with pytest.raises(AssertionError, match=rf"^row 7: token {last}, transformers says {ids[-1]}"):
        check_answers(Reference(model), [answer._replace(tokens=[*ids[5:-1], last])])
    with pytest.raises(AssertionError):
        check_answers(Reference(model), [answer], 9)
