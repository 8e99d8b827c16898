"""Without requests the server leaves the machine alone: torchrun, ranks and front-end together."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.helpers.real_server import RealServer
from tests.helpers.tiny_models import make_tiny
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tokenizer
from tests.helpers.usage import cpu_ns, cpu_seconds_between

if TYPE_CHECKING:
    from pathlib import Path

MAX_SHARE_OF_A_CORE = 0.01


def measure(server: RealServer, seconds: float) -> tuple[float, str]:
    """Share of a core that all processes together took, and what each did."""
    processes = server.alive()
    pids = [process.pid for process in processes]
    before, began = {pid: cpu_ns(pid) for pid in pids}, time.perf_counter()
    time.sleep(seconds)
    used = {pid: cpu_seconds_between(before[pid], cpu_ns(pid)) for pid in pids}
    share = sum(used.values()) / (time.perf_counter() - began)
    names = [" ".join(process.cmdline()[1:4]) for process in processes]
    return share, "\n".join(f"{used[pid]:.4f} s  {name}" for pid, name in zip(pids, names, strict=True))


def check_idle(server: RealServer, seconds: float) -> None:
    # What start-up or a request left to do, such as threads that spin a little before they sleep.
    time.sleep(1)
    share, table = measure(server, seconds)
    if share >= MAX_SHARE_OF_A_CORE:
        # What burns for ever burns again; a busy machine's cold caches may have cost this once.
        share, table = measure(server, 2 * seconds)
    assert share < MAX_SHARE_OF_A_CORE, f"{share:.2%} of a core:\n{table}"


@pytest.mark.slow
@pytest.mark.parametrize("ep", [2, 8])
def test_idle_server_takes_no_cpu(ep: int, tmp_path: Path, seed: int) -> None:
    make_tiny("qwen3_moe", tmp_path / "model", seed, vocab_size=VOCAB_SIZE)
    save_tokenizer(tmp_path / "model")
    with RealServer(tmp_path / "model", ep, tmp_path / "log", "--num-kv-blocks", "100") as server:
        assert len(server.alive()) == ep + 3, "the test's torchrun, the one serve.py became, ranks, front-end"
        check_idle(server, 4)

        def request(length: int) -> int:
            body = {"prompt": list(range(10, 10 + length)), "max_tokens": 20, "ignore_eos": True}
            answer = httpx.post(server.base_url + "/v1/completions", json=body, timeout=120)
            return answer.raise_for_status().json()["usage"]["completion_tokens"]

        with ThreadPoolExecutor(6) as threads:
            assert list(threads.map(request, range(1, 13))) == [20] * 12
        check_idle(server, 8)
