"""The sampler against a slow implementation in plain Python, and its promises: no row depends on another."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch

from moe_runtime.core import SamplingParams, Sequence
from moe_runtime.errors import MoeRuntimeError
from moe_runtime.sampling import logits as logits_module
from moe_runtime.sampling import sampler
from moe_runtime.sampling.logits import largest
from moe_runtime.sampling.sampler import SamplingError, sample, uniform

GRID = 400
"""Rows per case when a whole distribution is read off; their uniform numbers are the grid's midpoints."""


def sequence(
    prompt: list[int] | None = None, output: list[int] | None = None, eos: tuple[int, ...] = (), **params: Any
) -> Sequence:
    return Sequence("r", prompt or [], SamplingParams(**params), eos, output or [])


def slow_logits(logits: list[float], s: Sequence) -> list[float]:
    """Masks, bias and penalties, token by token."""
    p, x = s.sampling, list(logits)
    for token in range(len(x)):
        ends = token in (p.stop_token_ids or []) or (token in s.eos_token_ids and not p.ignore_eos)
        if ends and len(s.output_token_ids) < p.min_tokens:
            x[token] = -math.inf
        x[token] += (p.logit_bias or {}).get(token, 0.0)
        if token in s.prompt_token_ids or token in s.output_token_ids:
            x[token] *= 1 / p.repetition_penalty if x[token] > 0 else p.repetition_penalty
        count = s.output_token_ids.count(token)
        x[token] -= p.frequency_penalty * count + (p.presence_penalty if count else 0.0)
    return x


def slow_distribution(logits: list[float], s: Sequence) -> tuple[list[float], float]:
    """Probability of each token, and how near a cut-off came to deciding otherwise."""
    p, x = s.sampling, slow_logits(logits, s)
    order = sorted(range(len(x)), key=lambda t: (-x[t], t))
    if p.greedy:
        return [float(t == order[0]) for t in range(len(x))], 1.0
    weight = [math.exp((v - max(x)) / p.temperature) for v in x]
    kept = order[: p.top_k] if p.top_k > 0 else order
    margin = min((abs(weight[t] - p.min_p) for t in kept if p.min_p and weight[t] != 1.0), default=1.0)
    kept = [t for t in kept if weight[t] >= p.min_p]
    total, mass, nucleus = math.fsum(weight[t] for t in kept), 0.0, []
    for token in kept:
        if p.top_p < 1:
            margin = min(margin, abs(mass / total - p.top_p))
        if mass / total < p.top_p or not nucleus:
            nucleus.append(token)
        mass += weight[token]
    total = math.fsum(weight[t] for t in nucleus)
    return [weight[t] / total if t in nucleus else 0.0 for t in range(len(x))], margin


def observed_counts(logits: torch.Tensor, s: Sequence, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often each token is chosen when the uniform numbers run evenly over [0, 1)."""
    grid = itertools.count()
    monkeypatch.setattr(sampler, "uniform", lambda seed, position: (next(grid) % GRID + 0.5) / GRID)
    chosen = [t.token_id for t in sample(logits.repeat(GRID, 1), [s] * GRID)]
    return [chosen.count(token) for token in range(logits.shape[-1])]


def check_distribution(logits: torch.Tensor, s: Sequence, monkeypatch: pytest.MonkeyPatch) -> None:
    want, margin = slow_distribution(logits.tolist(), s)
    if margin < 1e-5:
        return  # float32 and float64 may rightly disagree about the last token kept
    counts = observed_counts(logits, s, monkeypatch)
    for token, (p, count) in enumerate(zip(want, counts, strict=True)):
        assert abs(count - p * GRID) < 1.01, (token, p, count, s.sampling)
        assert count == 0 or p > 0, (token, count, s.sampling)


CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 5.0},
    "greedy": {"temperature": 0.0, "top_k": 3},
    "top_k": {"top_k": 4},
    "top_k of all": {"top_k": 1000},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "all cuts": {"top_k": 9, "top_p": 0.8, "min_p": 0.05, "temperature": 1.5},
    "top_p and min_p": {"top_p": 0.5, "min_p": 0.01, "temperature": 2.0},
    "logit_bias": {"logit_bias": {3: 2.5, 0: -100.0, 11: -1.0}},
    "repetition": {"repetition_penalty": 1.8},
    "repetition wanted": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.8},
    "min_tokens": {"min_tokens": 7, "stop_token_ids": [1, 5]},
    "min_tokens reached": {"min_tokens": 6, "max_tokens": 9, "stop_token_ids": [1, 5], "logit_bias": {1: 3.0}},
    "min_tokens, ignore_eos": {"min_tokens": 7, "stop_token_ids": [1], "ignore_eos": True},
    "everything": {
        "temperature": 0.9, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {2: 1.0}, "min_tokens": 9,
        "stop_token_ids": [4],
    },
}  # fmt: skip


@pytest.mark.parametrize("candidates", [2, 1024])
@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
def test_distribution(
    seed: int, params: dict[str, Any], candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 2 candidates looked at first, top_p goes through the partial and the whole sort."""
    monkeypatch.setattr(sampler, "NUCLEUS_CANDIDATES", candidates)
    for _ in range(3):
        vocab = random.randint(12, 60)
        s = sequence(
            prompt=random.choices(range(vocab), k=5),
            output=random.choices(range(vocab), k=6),
            eos=(2, 7),
            **{"max_tokens": None, **params},
        )
        check_distribution(torch.randn(vocab) * 2, s, monkeypatch)


def test_distribution_follows_seeds_and_positions() -> None:
    """Chi-square of real draws. Fixed numbers throughout, so it passes always or never."""
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -0.4, 0.9, -2.0, 0.5, 0.1])
    outputs = [[0] * position for position in range(100)]
    for params in ({}, {"top_k": 10}):
        rows = [sequence(output=output, seed=seed, **params) for seed in range(-50, 50) for output in outputs]
        chosen = torch.tensor([t.token_id for t in sample(logits.repeat(len(rows), 1), rows)])
        expected = logits.double().softmax(0) * len(rows)
        chi_square = ((chosen.bincount(minlength=10) - expected) ** 2 / expected).sum()
        assert chi_square < 27.9  # 9 degrees of freedom, p = 0.001


def test_uniform_numbers() -> None:
    numbers = torch.tensor([uniform(12345, position) for position in range(8192)], dtype=torch.float64)
    assert 0.0 <= float(numbers.min()) < float(numbers.max()) < 1.0
    counts = (numbers * 64).long().bincount(minlength=64).double()
    assert ((counts - 128) ** 2 / 128).sum() < 103.4  # 63 degrees of freedom, p = 0.001
    neighbours = [numbers, torch.tensor([uniform(12346, p) for p in range(8192)], dtype=torch.float64)]
    assert abs(float(torch.corrcoef(torch.stack(neighbours))[0, 1])) < 0.04
    assert abs(float(torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1])) < 0.04
    assert uniform(None, 3) == uniform(0, 3) != uniform(1, 3)
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)
    assert len({uniform(s, p) for s in range(-20, 20) for p in range(50)}) == 2000


def random_sequence(vocab: int) -> Sequence:
    maybe = lambda *values: random.choice(values)  # noqa: E731
    return sequence(
        prompt=random.choices(range(vocab), k=random.randint(1, 8)),
        output=random.choices(range(vocab), k=random.randint(0, 8)),
        eos=(random.randrange(vocab),),
        temperature=maybe(0.0, 0.5, 1.0, 3.0),
        top_k=maybe(0, 0, 1, 20, vocab),
        top_p=maybe(1.0, 1.0, 0.3, 0.95),
        min_p=maybe(0.0, 0.0, 0.001, 0.1),
        repetition_penalty=maybe(1.0, 1.3),
        frequency_penalty=maybe(0.0, 0.5),
        logit_bias=maybe(None, {random.randrange(vocab): 1.5}),
        min_tokens=maybe(0, 4),
        max_tokens=None,
        seed=random.randrange(-(2**63), 2**63),
        logprobs=maybe(None, 0, 3, 20),
    )


@pytest.mark.parametrize("vocab", [25, 1003, 40009])
@pytest.mark.parametrize("step", [0.0, 0.25], ids=["distinct", "ties"])
def test_alone_and_in_a_batch_are_bit_identical(
    seed: int, vocab: int, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(33, vocab) * random.choice([1.0, 3.0])
    if step:
        logits = (logits / step).round() * step
    sequences = [random_sequence(vocab) for _ in range(33)]
    alone = [sample(logits[i : i + 1], sequences[i : i + 1])[0] for i in range(33)]
    assert sample(logits, sequences) == alone
    order = random.sample(range(33), 20)
    assert sample(logits[order], [sequences[i] for i in order]) == [alone[i] for i in order]
    torch.set_num_threads(2)
    try:
        assert sample(logits, sequences) == alone
        assert sample(logits[7:8], sequences[7:8]) == alone[7:8]
    finally:
        torch.set_num_threads(1)
    monkeypatch.setattr(logits_module, "ELEMENTS_PER_PASS", 4 * vocab)
    monkeypatch.setattr(sampler, "NUCLEUS_CANDIDATES", 7)
    assert sample(logits, sequences) == alone


def test_equal_logits_choose_the_lower_id(seed: int) -> None:
    logits = torch.full((4, 300), -1.0)
    logits[:, [17, 40, 200]] = 2.0
    rows = [
        sequence(temperature=0.0),
        sequence(temperature=0.0, repetition_penalty=1.1, prompt=[17]),
        sequence(top_k=1),
        sequence(top_p=1e-9),
    ]
    assert [t.token_id for t in sample(logits, rows)] == [17, 40, 17, 17]
    twos = [sequence(top_k=2, seed=s) for s in range(64)]
    assert {t.token_id for t in sample(logits[:1].repeat(64, 1), twos)} == {17, 40}


EXTREMES: list[dict[str, Any]] = [
    {"top_p": 5e-324},
    {"top_p": 5e-324, "top_k": 50},
    {"top_p": 1e-9},
    {"top_k": 1},
    {"min_p": 1.0},
    {"temperature": 1e-3},
    {"temperature": 5e-324},
    {"temperature": 1e-40, "top_p": 0.9, "min_p": 0.5},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("params", EXTREMES, ids=str)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4, 1e36])
def test_extremes_choose_the_best(seed: int, params: dict[str, Any], scale: float) -> None:
    logits = torch.rand(64, 777) * scale
    best = torch.randint(777, (64,))
    logits[torch.arange(64), best] = 2 * scale
    if scale == 1e-6 and params.get("temperature", 1.0) == 1e-3:
        logits *= 1e5  # else so warm that others are rightly chosen
    rows = [sequence(seed=s, **params) for s in range(64)]
    assert [t.token_id for t in sample(logits, rows)] == best.tolist()


@pytest.mark.parametrize(
    "params", [{}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.1}, {"temperature": 100.0}], ids=str
)
def test_all_but_one_impossible(seed: int, params: dict[str, Any]) -> None:
    logits = torch.full((32, 101), -torch.inf)
    logits[:, 60] = -7.0
    rows = [sequence(seed=s, logprobs=2, **params) for s in range(32)]
    for token in sample(logits, rows):
        assert token.token_id == 60
        assert token.logprobs is not None
        assert (token.logprobs.logprob, token.logprobs.rank) == (0.0, 1)
        assert token.logprobs.top == [(60, 0.0), (0, -math.inf)]


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("params", [{}, {"top_k": 60}, {"top_p": 0.999}], ids=str)
def test_impossible_tokens_at_either_end(
    seed: int, u: float, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least and the largest uniform number do not fall on tokens of probability 0."""
    monkeypatch.setattr(sampler, "uniform", lambda seed, position: u)
    logits = torch.randn(50, 60)
    logits[:, :3] = logits[:, -3:] = -torch.inf
    for row, token in zip(logits, sample(logits, [sequence(**params) for _ in range(50)]), strict=True):
        possible = row.isfinite().nonzero().flatten().tolist()
        order = possible if not params else sorted(possible, key=lambda t, row=row: -float(row[t]))
        if u == 0.0:
            assert token.token_id == order[0]
        else:
            assert token.token_id == order[-1] or (params.get("top_p") and token.token_id in order)


def test_extreme_penalties_stay_finite(seed: int) -> None:
    logits = torch.randn(2, 50) * 10
    masked = {"min_tokens": 5, "max_tokens": None, "stop_token_ids": [3]}
    rows = [
        sequence(prompt=[3, 8, 9], output=[3], repetition_penalty=1e-46, **masked),
        sequence(prompt=list(range(50)), repetition_penalty=100.0, temperature=0.5, top_p=0.5),
    ]
    assert sample(logits, rows)[0].token_id != 3


def test_logprobs_are_of_the_untouched_logits(seed: int) -> None:
    logits = (torch.randn(6, 400) * 4).round() / 4
    rows = [
        sequence(logprobs=k, temperature=t, top_k=5, logit_bias={333: 100.0}, seed=3)
        for k, t in [(0, 0.0), (1, 1.0), (5, 2.0), (20, 0.0), (2, 9.0), (20, 1.0)]
    ]
    for row, s, token in zip(logits, rows, sample(logits, rows), strict=True):
        assert token.logprobs is not None
        assert token.token_id == 333
        want = row.double().log_softmax(0)
        order = sorted(range(400), key=lambda t: (-float(row[t]), t))
        assert token.logprobs.rank == order.index(333) + 1
        assert token.logprobs.logprob == pytest.approx(float(want[333]), abs=1e-5)
        assert [t for t, _ in token.logprobs.top] == order[: s.sampling.logprobs]
        for t, logprob in token.logprobs.top:
            assert logprob == pytest.approx(float(want[t]), abs=1e-5)
    assert sample(logits[:1], [sequence()])[0].logprobs is None


def test_more_logprobs_than_tokens(seed: int) -> None:
    (token,) = sample(torch.randn(1, 3), [sequence(logprobs=20)])
    assert token.logprobs is not None
    assert len(token.logprobs.top) == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {}, {"top_p": 0.5, "stop_token_ids": [9], "min_tokens": 1}]
)
def test_bad_logits_name_the_request(seed: int, bad: float, params: dict[str, Any]) -> None:
    logits = torch.randn(3, 20)
    logits[1, 9] = bad
    rows = [sequence(**params) for _ in range(3)]
    rows[1].request_id = "chat-7"
    with pytest.raises(SamplingError, match=r"chat-7, token 0: the model's logits hold NaN") as error:
        sample(logits, rows)
    assert error.value.request_id == "chat-7"
    assert isinstance(error.value, MoeRuntimeError)


def test_no_token_left_names_the_request(seed: int) -> None:
    row = sequence(stop_token_ids=[0, 1], min_tokens=1, eos=(2,))
    with pytest.raises(SamplingError, match=r"request r.*min_tokens"):
        sample(torch.randn(1, 3), [row])
    with pytest.raises(SamplingError, match="nothing but -inf"):
        sample(torch.full((1, 3), -torch.inf), [sequence()])


def test_logits_are_not_changed_and_no_rows_work(seed: int) -> None:
    logits = torch.randn(8, 30)
    before = logits.clone()
    sample(logits, [random_sequence(30) for _ in range(8)])
    assert torch.equal(logits, before)
    assert sample(torch.empty(0, 30), []) == []


def test_ids_outside_the_vocabulary_are_a_bug_of_the_caller(seed: int) -> None:
    for row in (sequence(logit_bias={30: 1.0}), sequence(stop_token_ids=[30], min_tokens=1)):
        with pytest.raises(AssertionError, match=r"outside 0\.\.29"):
            sample(torch.randn(1, 30), [row])


def test_largest_orders_ties_by_index(seed: int) -> None:
    for _ in range(40):
        columns = random.randint(1, 90)
        x = torch.randint(random.choice([2, 5, 1000]), (3, columns)).float()
        if random.random() < 0.3:
            x[x == 0] = -torch.inf
        k = random.randint(0, columns) if random.random() < 0.5 else min(columns, random.randint(0, 8))
        want = [sorted(range(columns), key=lambda t, row=row: (-row[t], t))[:k] for row in x.tolist()]
        assert largest(x, k).tolist() == want
