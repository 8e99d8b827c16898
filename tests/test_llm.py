"""LLM, the synchronous face, against scripted ranks and against real ones."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.core import SamplingParams
from moe_runtime.engine import ranks as ranks_module
from moe_runtime.engine.async_llm import AsyncLLM
from moe_runtime.engine.llm import LLM
from moe_runtime.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    RequestError,
)
from tests.helpers.scripted_model import VOCAB, WORKER, make_model, nothing_left, told
from tests.helpers.scripted_rank import expected_tokens
from tests.helpers.tiny_models import make_tiny

KEYWORDS = AsyncLLM.from_config.__func__.__kwdefaults__


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with nothing_left(tmp_path / "tmp", monkeypatch):
        yield


@pytest.fixture
def llm(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(ranks_module, "WORKER", WORKER)
    monkeypatch.setattr(
        "moe_runtime.engine.async_llm.AsyncLLM.from_config.__func__.__kwdefaults__",
        {**KEYWORDS, "worker": WORKER},
    )
    with LLM(model=str(model), ep=2, max_num_seqs=2) as made:
        yield made


def test_llm_results_are_in_prompt_order(llm: LLM, seed: int) -> None:
    rng = random.Random(seed)
    prompts: list[Any] = [rng.choices(range(VOCAB), k=rng.randrange(1, 30)) for _ in range(40)]
    params = [SamplingParams(max_tokens=rng.randrange(1, 20), seed=i, ignore_eos=True) for i in range(40)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, sampling, output in zip(prompts, params, outputs, strict=True):
        assert output.outputs[0].token_ids == expected_tokens(
            prompt, sampling, sampling.max_tokens or 0, VOCAB
        )
    mixed = ["hello", {"prompt": "hello"}, {"prompt_token_ids": [1, 2]}, [1, 2]]
    outputs = llm.generate(mixed, SamplingParams(seed=3), use_tqdm=False)
    assert [o.prompt for o in outputs] == ["hello", "hello", None, None]
    assert outputs[0].outputs == outputs[1].outputs
    assert outputs[2].outputs == outputs[3].outputs
    assert len(llm.generate("hello", use_tqdm=False)) == 1
    assert len(llm.generate([1, 2, 3], use_tqdm=False)) == 1
    assert llm.generate([], use_tqdm=False) == []


def test_llm_names_the_bad_prompt_before_it_starts(llm: LLM) -> None:
    with pytest.raises(RequestError, match=f"prompt 1: .*{VOCAB}"):
        llm.generate([[1], [VOCAB]], use_tqdm=False)
    with pytest.raises(RequestError, match="2 prompts but 1 sampling_params"):
        llm.generate([[1], [2]], [SamplingParams()], use_tqdm=False)
    for wrong in ({"temperature": 0}, [{"temperature": 0}], 3):
        with pytest.raises(RequestError, match="must be SamplingParams"):
            llm.generate([[1]], wrong, use_tqdm=False)
    with pytest.raises(RequestError, match="not None"):
        llm.generate(None, use_tqdm=False)
    assert told(Path(llm.config.model), 0, "submit") == []


def test_llm_chat(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hello"}]
    (output,) = llm.chat(talk, SamplingParams(seed=1), use_tqdm=False)
    assert output.prompt == "<|start|>user\nhello<|end|>\n<|start|>assistant\n"
    assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt, add_special_tokens=False)
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    assert llm.chat(parts, use_tqdm=False)[0].prompt == output.prompt.replace("hello", "hel\nlo")
    with pytest.raises(RequestError, match="content part 0"):
        llm.chat([{"role": "user", "content": [{"type": "image_url"}]}], use_tqdm=False)
    pair = llm.chat([talk, talk], SamplingParams(seed=1), use_tqdm=False)
    assert [p.outputs for p in pair] == [output.outputs] * 2
    half = [*talk, {"role": "assistant", "content": "well"}]
    (output,) = llm.chat(half, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt.endswith("assistant\nwell")
    (output,) = llm.chat(talk, use_tqdm=False, chat_template="{{ messages[0].content }}!")
    assert output.prompt == "hello!"
    with pytest.raises(RequestError, match=r"conversation 1: .*no such role"):
        llm.chat([talk, [{"role": "bad", "content": ""}]], use_tqdm=False)


def test_llm_survives_an_interrupt(llm: LLM, model: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 3.0)
        many = [[1]] * 10**5
        with pytest.raises(KeyboardInterrupt):
            llm.generate(many, SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert llm.generate([7], SamplingParams(max_tokens=2), use_tqdm=False)[0].finished
    assert llm._engine.num_unfinished == 0


def test_llm_closed(llm: LLM) -> None:
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("x")


def test_llm_unknown_argument() -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(max_model_length=3)
    with pytest.raises(ConfigError, match="tensor parallelism"):
        LLM("demo", tensor_parallel_size=2)


SCRIPT = """
    import asyncio, os, sys
    from moe_runtime.engine import async_llm
    async_llm.AsyncLLM.from_config.__func__.__kwdefaults__["worker"] = "tests.helpers.scripted_rank"
    from moe_runtime import LLM, SamplingParams
    llm = LLM(model=sys.argv[1], ep=2)
    async def notebook():
        return llm.generate([[1, 2]] * 3, SamplingParams(max_tokens=3))
    print("TOKENS", sum(len(o.outputs[0].token_ids) for o in asyncio.run(notebook())))
    print("TORCH", "torch" in sys.modules)
    print("PIDS", *[r.pid for r in llm._engine.ready], flush=True)
    {end}
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        "os.kill(os.getpid(), 9)",
        *(
            pytest.param(end, marks=pytest.mark.slow)
            for end in ("raise SystemExit(3)", "1/0", "del llm; import gc; gc.collect()")
        ),
    ],
)
def test_scripts_leave_no_process(model: Path, tmp_path: Path, end: str) -> None:
    """Unguarded, inside a running loop, and however the script ends."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.format(end=end)))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, str(script), str(model)],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert "TOKENS 9" in done.stdout, done.stderr
    assert "TORCH False" in done.stdout
    pids = [int(p) for p in done.stdout.split("PIDS ")[1].split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert "2 ranks: reading" in done.stderr


# With the real worker.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny("mixtral", folder, random.SystemRandom().randrange(2**31), vocab_size=VOCAB)
    return folder


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if path.stat().st_uid == os.getuid()}


def test_real_ranks_end_to_end(tiny: Path, seed: int) -> None:
    rng = random.Random(seed)
    prompts: list[Any] = [rng.choices(range(3, VOCAB), k=rng.randrange(1, 40)) for _ in range(6)]
    params = SamplingParams(max_tokens=9, seed=seed, ignore_eos=True, n=2, stop_token_ids=[5])
    before = shared_memory()
    answers = []
    for ep in (1, 2):
        with LLM(
            str(tiny), ep=ep, dtype="float32", num_kv_blocks=64, max_model_len=64, skip_tokenizer_init=True
        ) as llm:
            answers.append([o.outputs for o in llm.generate(prompts, params, use_tqdm=False)])
            with pytest.raises(RequestError, match="64"):
                llm.generate([[1] * 64], use_tqdm=False)
            if ep == 2:
                os.kill(llm._engine.ready[1].pid, signal.SIGKILL)
                with pytest.raises(EngineDeadError, match="rank 1"):
                    llm.generate(prompts * 50, params, use_tqdm=False)
    assert answers[0] == answers[1]
    assert shared_memory() <= before


def test_a_real_rank_that_cannot_load(tiny: Path, tmp_path: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="safetensors"):
        LLM(str(tmp_path), ep=1, skip_tokenizer_init=True)
