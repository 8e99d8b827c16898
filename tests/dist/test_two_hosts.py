"""Two hosts, as two network namespaces joined by a virtual cable: `torchrun --nnodes 2`, over TCP and gloo."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.helpers.real_server import SERVE, TORCHRUN, RealServer
from tests.helpers.started import Started, command_line
from tests.helpers.tiny_models import make_tiny
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

PORT = 8123
BODY = {"prompt": [5, 9, 12, 7], "max_tokens": 16, "temperature": 0, "ignore_eos": True, "logprobs": 1}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces, 10.77.0.1 and 10.77.0.2."""
    names = [f"moe-{os.getpid()}-{i}" for i in (1, 2)]
    cables = [f"v{os.getpid()}-{i}" for i in (1, 2)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"TWO HOSTS NOT TESTED: network namespaces cannot be made here: {error}")
        ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for i, (name, cable) in enumerate(zip(names, cables, strict=True), start=1):
            ip("-n", name, "addr", "add", f"10.77.0.{i}/24", "dev", cable)
            for link in ("lo", cable):
                ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def curl(host: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The answer inside a namespace, None while there is none."""
    command = ["ip", "netns", "exec", host, "curl", "-sf", f"http://127.0.0.1:{PORT}{path}"]
    if body is not None:
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (json.loads(done.stdout) if done.stdout else {}) if done.returncode == 0 else None


def start(host: str, node: int, model: Path, log: Path) -> Started:
    command = ["ip", "netns", "exec", host, *TORCHRUN]
    command += ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"]
    command += ["--master-addr", "10.77.0.1", "--master-port", "29511", SERVE]
    command += ["--ep", "2", "--model", str(model), "--port", str(PORT), "--enable-eplb"]
    return Started(command, log)


@contextmanager
def served(hosts: list[str], folder: Path, seed: int) -> Iterator[list[Started]]:
    """torchrun of each host, once the server is ready."""
    make_tiny("mixtral", folder / "m", seed, vocab_size=VOCAB_SIZE, num_local_experts=5)
    save_tokenizer(folder / "m")
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(start(host, n, folder / "m", folder / f"log{n}"))
            for n, host in enumerate(hosts)
        ]
        deadline = time.monotonic() + 180
        while curl(hosts[0], "/health") is None:
            assert all(n.first.poll() is None for n in nodes), nodes[0].log() + nodes[1].log()
            assert time.monotonic() < deadline, nodes[0].log() + nodes[1].log()
            time.sleep(0.2)
        yield nodes


def only(node: Started, word: str) -> psutil.Process:
    """The process of a host whose command has `word`, torchrun excepted."""
    (found,) = [p for p in node.ours() if word in " ".join(command_line(p))]
    return found


@pytest.mark.slow
def test_two_hosts_serve_over_tcp(hosts: list[str], tmp_path: Path, seed: int) -> None:
    with served(hosts, tmp_path, seed) as nodes:
        assert "dispatcher: collective (auto; not local" in nodes[0].log()
        assert "not one_sided: the ranks are on several hosts" in nodes[0].log()
        # One after another, so that both ranks get a request.
        answers = [curl(hosts[0], "/v1/completions", BODY) for _ in range(2)]
        num_layers = len(curl(hosts[0], "/placement")["slots"])
        moved = curl(hosts[0], "/rebalance", {"placement": [[[4, 3, 0], [2, 1]]] * num_layers})
        assert moved["result"] == "applied"
        answers += [curl(hosts[0], "/v1/completions", BODY) for _ in range(2)]
        nodes[0].first.send_signal(signal.SIGTERM)
        for node in nodes:
            node.wait_gone(30)
            assert "[rank" not in "".join(re.findall(r".*(?:ERROR|WARNING).*", node.log()))
    with RealServer(tmp_path / "m", 1, tmp_path / "alone") as alone:
        wanted = httpx.post(alone.base_url + "/v1/completions", json=BODY, timeout=60).json()
    for answer in answers:
        assert answer["choices"][0]["logprobs"]["tokens"] == wanted["choices"][0]["logprobs"]["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(("node", "word"), [(1, "serve.py"), (0, "moe_runtime.server.main"), (0, "serve.py")])
def test_a_death_ends_both_hosts_also_while_idle(
    node: int, word: str, hosts: list[str], tmp_path: Path, seed: int
) -> None:
    with served(hosts, tmp_path, seed) as nodes:
        # Idle ranks wait for the front-end, not for one another.
        time.sleep(1)
        only(nodes[node], word).kill()
        for one in nodes:
            one.wait_gone(20)
