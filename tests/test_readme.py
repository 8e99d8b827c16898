"""README says what is so: its commands parse, its snippets run, its endpoints, files and targets are there."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from torch.distributed.run import get_args_parser as torchrun_parser

from moe_runtime import cli
from moe_runtime.config import BatchConfig, EngineConfig, ServerConfig
from moe_runtime.server.app import create_app
from moe_runtime.server.state import Phase, ServerState
from tests.helpers.real_server import RealServer

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DEFAULT_URL = "http://127.0.0.1:8000"
CONFIGS = {
    "launch/serve.py": (EngineConfig, ServerConfig),
    "launch/generate.py": (EngineConfig, BatchConfig),
}


def blocks(language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(README) if kind == language]


def spans() -> list[str]:
    """What stands between backticks in the running text, which may break a line there."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCE.sub("", README))]


def commands(first: str) -> list[list[str]]:
    """Every command that begins with the word `first`, in words."""
    lines = [line for block in blocks("") for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines + spans() if (words := shlex.split(line)) and words[0] == first]


def check_flags(script: str, arguments: list[str]) -> None:
    if script in CONFIGS:
        cli.build_parser(script, "", CONFIGS[script]).parse_arguments(arguments)
        return
    command = [sys.executable, str(ROOT / script), "--help"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert all(word in told for word in arguments if word.startswith("--"))


def test_is_short() -> None:
    assert len(README.splitlines()) <= 200


def test_what_is_looked_for_is_there() -> None:
    """So that the tests below do not pass for want of commands."""
    assert [len(blocks(language)) for language in ("", "python")] == [4, 2]
    assert len(commands("make")) >= 5
    assert len(commands("torchrun")) >= 2
    assert len(commands("curl")) == 1
    assert len(commands(".venv/bin/python")) == 2


@pytest.mark.parametrize("command", commands("make"), ids=" ".join)
def test_make_targets_exist(command: list[str]) -> None:
    # Python that is there, so that make does not look for it; -n prints what would be done.
    subprocess.run(
        ["make", "-n", *command[1:]],
        cwd=ROOT,
        check=True,
        capture_output=True,
        env=os.environ | {"MAKEFLAGS": ""},
    )
    flags = [shlex.split(word.removeprefix("ARGS=")) for word in command if word.startswith("ARGS=")]
    for arguments in flags:
        check_flags("launch/serve.py", arguments)


@pytest.mark.parametrize("command", commands("torchrun"), ids=" ".join)
def test_torchrun_commands_parse(command: list[str]) -> None:
    if "launch/serve.py" in command:
        parsed = torchrun_parser().parse_args(command[1:])
        assert parsed.training_script == "launch/serve.py"
        check_flags("launch/serve.py", parsed.training_script_args)


@pytest.mark.parametrize("command", commands(".venv/bin/python"), ids=" ".join)
def test_python_commands_parse(command: list[str]) -> None:
    assert (ROOT / command[1]).is_file()
    check_flags(command[1], command[2:])


@pytest.mark.parametrize("script", CONFIGS)
def test_help_names_every_flag_of_readme(script: str) -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / script), "--help"], check=True, capture_output=True, text=True
    )
    used = {word.split("=")[0] for span in spans() for word in span.split() if word.startswith("--")}
    others = {"--help", "--nnodes", "--nproc-per-node"}
    told = result.stdout.replace("--[no-]", "--")
    missing = {flag for flag in used - others if flag not in told}
    # The batch script has no port.
    assert missing <= ({"--port"} if script == "launch/generate.py" else set())


def test_endpoints_exist() -> None:
    named = {span for span in spans() if re.fullmatch(r"/[a-z0-9_/]+", span)}
    assert "/v1/chat/completions" in named

    async def schema() -> dict[str, object]:
        transport = httpx.ASGITransport(create_app(ServerState(ServerConfig(), phase=Phase.READY)))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return (await client.get("/openapi.json")).raise_for_status().json()["paths"]

    assert named <= set(asyncio.run(schema()))


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", README)
    assert len(links) >= 4
    assert [link for link in links if not (ROOT / link).exists()] == []


def run_snippet(folder: Path, text: str) -> str:
    """As a user would: a file of its own, in a folder of its own."""
    (folder / "snippet.py").write_text(text, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "snippet.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_offline_snippet(tmp_path: Path) -> None:
    (snippet,) = [text for text in blocks("python") if "moe_runtime" in text]
    assert "Paris" in run_snippet(tmp_path, snippet)


@pytest.mark.slow
def test_server_snippets(tmp_path: Path) -> None:
    (snippet,) = [text for text in blocks("python") if "openai" in text]
    (curl,) = commands("curl")
    with RealServer(Path("demo"), 2, tmp_path / "log", "--num-kv-blocks", "200") as server:

        def here(text: str) -> str:
            assert server.base_url != DEFAULT_URL
            return text.replace(DEFAULT_URL, server.base_url)

        answer = subprocess.run(
            ["curl", "-sS", "--fail-with-body", *map(here, curl[1:])],
            check=True,
            capture_output=True,
        )
        assert "Paris" in json.loads(answer.stdout)["choices"][0]["message"]["content"]
        said = run_snippet(tmp_path, here(snippet))
        assert re.search(r"\bsea\b", said.lower())
