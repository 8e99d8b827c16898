"""The ways to start a server that the documentation names, each as it is typed."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path

import httpx
import pytest

from tests.helpers.parity import Reference, answer_of, check_answers
from tests.helpers.real_server import TORCHRUN, RealServer
from tests.helpers.tiny_models import make_tiny
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

NUM_TOKENS = 20
FORMS = [
    pytest.param(TORCHRUN, 8, id="torchrun --ep 8", marks=pytest.mark.slow),
    pytest.param((*TORCHRUN, "--nproc-per-node", "4"), 4, id="torchrun -n 4 --ep 4", marks=pytest.mark.slow),
    pytest.param((sys.executable,), 2, id="python --ep 2", marks=pytest.mark.slow),
    pytest.param((sys.executable,), 1, id="python --ep 1"),
]


@pytest.mark.parametrize(("launcher", "ep"), FORMS)
def test_a_server_starts_answers_and_ends(
    launcher: tuple[str, ...], ep: int, tmp_path: Path, seed: int
) -> None:
    # Fewer experts than ranks in the largest form.
    model = make_tiny("mixtral", tmp_path / "model", seed, vocab_size=VOCAB_SIZE, num_local_experts=7)
    save_tokenizer(tmp_path / "model")
    draw = random.Random(seed)
    prompts = [[draw.randrange(5, VOCAB_SIZE) for _ in range(draw.randint(1, 40))] for _ in range(2 * ep)]
    body = {"prompt": prompts, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    flags = ("--num-kv-blocks", "64")
    with RealServer(tmp_path / "model", ep, tmp_path / "log", *flags, launcher=launcher) as server:
        answer = httpx.post(
            server.base_url + "/v1/completions", json=body | {"return_token_ids": True}, timeout=120
        ).json()
        ranks = httpx.get(server.base_url + "/server_info", timeout=10).json()["ranks"]
        assert len({rank["pid"] for rank in ranks}) == ep
        server.signal(signal.SIGTERM)
        server.wait_gone(20)
        assert "ERROR" not in server.log()
    assert len(answer["choices"]) == len(prompts)
    answers = [
        answer_of(prompt, choice) for prompt, choice in zip(prompts, answer["choices"], strict=True)
    ]
    check_answers(Reference(model), answers, NUM_TOKENS)
