"""What tests of the client side share: a model folder for scripted ranks, and a check that nothing is left behind."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.config import EngineConfig
from moe_runtime.engine.async_llm import AsyncLLM
from tests.helpers import tiny_tokenizer

WORKER = "tests.helpers.scripted_rank"
VOCAB = 300


def make_model(folder: Path) -> Path:
    """The folder, filled with a tokenizer and a script that says nothing special."""
    tiny_tokenizer.byte_level(folder, VOCAB)
    write_script(folder)
    return folder


@contextmanager
def nothing_left(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On leaving: no file in the temporary folder, which is `scratch`, and no new child process."""
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", None)
    # Other tests' fork server stays for the whole run.
    before = children()
    yield
    assert list(scratch.iterdir()) == []
    assert set(children()) <= set(before)


def children() -> list[int]:
    out = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    return [int(pid) for pid in out.split()]


def write_script(folder: Path, **script: Any) -> None:
    (folder / "script.json").write_text(json.dumps({"vocab_size": VOCAB, **script}))


def told(folder: Path, rank: int, what: str) -> list[Any]:
    lines = (folder / f"rank-{rank}.jsonl").read_text().splitlines()
    return [detail for kind, detail in map(json.loads, lines) if kind == what]


@asynccontextmanager
async def engine(model: Path, limit_queue: bool = True, **flags: Any) -> AsyncIterator[AsyncLLM]:
    """A client of `ep` scripted ranks, closed on leaving."""
    config = EngineConfig(model=str(model), **flags)
    client = await AsyncLLM.from_config(config, limit_queue=limit_queue, worker=WORKER)
    try:
        yield client
    finally:
        await client.close()
