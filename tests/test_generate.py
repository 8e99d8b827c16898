"""launch/generate.py as a user runs it, against scripted ranks: files in and out, kills, and lines that are wrong."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.errors import ConfigError
from moe_runtime.server.batch_file import AnswerFile, BadLine, BatchRequest, read_requests
from moe_runtime.server.errors import invalid
from tests.helpers import tiny_tokenizer

ROOT = Path(__file__).parent.parent
VOCAB = 300
URLS = ("/v1/chat/completions", "/v1/completions")

# The scripts' own command, with ranks that need no model.
RUN = """
import runpy, sys
from moe_runtime.engine import async_llm
async_llm.AsyncLLM.from_config.__func__.__kwdefaults__["worker"] = "tests.helpers.scripted_rank"
sys.argv[0] = "launch/generate.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tiny_tokenizer.byte_level(tmp_path / "toy", VOCAB)
    (folder / "script.json").write_text(json.dumps({"vocab_size": VOCAB}))
    return folder


def command(model: Path, tmp_path: Path, *extra: str) -> list[str]:
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    return [sys.executable, "-c", RUN, *files, "--model", str(model), "--ep", "2", *extra]


def start(model: Path, tmp_path: Path, *extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(model, tmp_path, *extra),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What runs in the background of a shell ignores Ctrl-C, and so would all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def run(model: Path, tmp_path: Path, *extra: str) -> tuple[int, str, str]:
    process = start(model, tmp_path, *extra)
    out, err = process.communicate(timeout=90)
    return process.returncode, out, err


def request(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": URLS[1], "body": {"prompt": [1, 2], **body}}


def write(path: Path, lines: list[Any]) -> None:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def num_submitted(model: Path) -> int:
    lines = [line for log in model.glob("rank-*.jsonl") for line in log.read_text().splitlines()]
    return sum(json.loads(line)[0] == "submit" for line in lines)


def test_good_and_bad_lines(model: Path, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True}
    lines = [
        {"custom_id": "chat", "method": "POST", "url": URLS[0], "body": chat},
        request("two", prompt=["a", "b"], n=2, max_tokens=3, ignore_eos=True),
        "\n",
        "   \n",
        "{not json\n",
        "[1, 2]\n",
        request("two"),
        request("hot", temperature=-1),
        request("stream", stream=True),
        request("model", model="other"),
        request("long", prompt=[1] * 100),
        request("field", temprature=1),
        {"custom_id": "", "method": "POST", "url": URLS[1], "body": {}},
        {"custom_id": "get", "method": "GET", "url": URLS[1], "body": {}},
        {"custom_id": "url", "method": "POST", "url": "/v1/embeddings", "body": {}},
        {"custom_id": "body", "method": "POST", "url": URLS[1]},
        request("last", max_tokens=2, ignore_eos=True),
    ]
    write(tmp_path / "in.jsonl", lines)
    code, out, err = run(model, tmp_path)
    assert code == 0, err
    assert "15 requests, 12 of them with an error" in out
    assert "15/15" in err, "a progress bar"
    answers = read(tmp_path / "out.jsonl")
    assert len(answers) == 15
    good = {a["custom_id"]: a["response"] for a in answers if a["error"] is None}
    assert good.keys() == {"chat", "two", "last"}
    assert all(r["status_code"] == 200 for r in good.values())
    assert good["chat"]["body"]["object"] == "chat.completion"
    assert good["chat"]["body"]["choices"][0]["finish_reason"] == "length"
    assert good["chat"]["body"]["model"] == "toy"
    assert good["two"]["body"]["usage"]["completion_tokens"] == 12
    assert [c["index"] for c in good["two"]["body"]["choices"]] == [0, 1, 2, 3]
    bad = {a["custom_id"]: a for a in answers if a["error"] is not None and a["custom_id"] != "two"}
    assert bad["hot"]["response"]["body"]["error"]["param"] == "temperature"
    assert bad["model"]["response"]["status_code"] == 404
    assert bad["body"]["error"]["line"] == 16
    assert all(a["response"]["status_code"] in (400, 404) and a["error"]["message"] for a in bad.values())
    numbers = {a["error"]["line"]: a["error"] for a in answers if a["error"] and "line" in a["error"]}
    assert numbers.keys() == {5, 6, 7, 13, 14, 15, 16}
    assert numbers[7]["code"] == "duplicate_custom_id"
    assert "line 2" in numbers[7]["message"]

    submitted = num_submitted(model)
    code, out, _ = run(model, tmp_path)
    assert code == 0
    assert "15 requests, 12 of them with an error" in out
    assert read(tmp_path / "out.jsonl") == answers, "nothing is done twice"
    assert num_submitted(model) == submitted


@pytest.mark.parametrize(
    "how",
    [
        signal.SIGKILL,
        *(pytest.param(how, marks=pytest.mark.slow) for how in (signal.SIGTERM, signal.SIGINT)),
    ],
)
def test_killed_runs_go_on(model: Path, tmp_path: Path, seed: int, how: signal.Signals) -> None:
    rng = random.Random(seed)
    # Slow enough that the signal meets a run in progress on a busy machine too.
    (model / "script.json").write_text(json.dumps({"vocab_size": VOCAB, "step_s": 0.03}))
    lines: list[Any] = [
        request(f"id-{i}", max_tokens=rng.randrange(1, 50), ignore_eos=True) for i in range(60)
    ]
    lines.insert(30, "{broken\n")
    write(tmp_path / "in.jsonl", lines)
    output = tmp_path / "out.jsonl"
    process = start(model, tmp_path, "--max-num-seqs", "2")
    deadline = time.monotonic() + 60
    while not output.exists() or output.read_bytes().count(b"\n") < 8:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(how)
    _, err = process.communicate(timeout=30)
    assert process.returncode == (-9 if how == signal.SIGKILL else 130), err
    before = read(output)
    assert 8 <= len(before) < 61
    with output.open("a") as file:
        file.write('{"id": "batch_req_1", "custom_id": "id-59", "respon')
    (model / "script.json").write_text(json.dumps({"vocab_size": VOCAB, "step_s": 0.005}))
    code, out, err = run(model, tmp_path)
    assert code == 0, err
    answers = read(output)
    assert answers[: len(before)] == before
    assert Counter(a["custom_id"] for a in answers) == Counter([f"id-{i}" for i in range(60)] + [None])
    assert "61 requests, 1 of them" in out
    assert "Traceback" not in err


def test_death_of_a_rank_is_no_answer(model: Path, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [request(f"id-{i}", max_tokens=20, ignore_eos=True) for i in range(30)])
    (model / "script.json").write_text(json.dumps({"vocab_size": VOCAB, "die_after_steps": [1, 30]}))
    code, _, err = run(model, tmp_path, "--max-num-seqs", "2")
    assert code == 1
    assert "error: rank 1" in err
    assert "Traceback" not in err
    (model / "script.json").write_text(json.dumps({"vocab_size": VOCAB}))
    assert run(model, tmp_path)[0] == 0
    answers = read(tmp_path / "out.jsonl")
    assert sorted(a["custom_id"] for a in answers) == sorted(f"id-{i}" for i in range(30))
    assert all(a["error"] is None for a in answers)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--output", "{tmp}/none/out.jsonl"], "No such file"),
        (["--input", "{tmp}/none.jsonl"], "No such file"),
        (["--input", ""], "--input FILE is needed"),
        (["--output", "{tmp}/in.jsonl"], "both"),
        (["--model", "{tmp}/none"], "no such folder"),
    ],
)
def test_mistakes_are_one_line(model: Path, tmp_path: Path, flags: list[str], message: str) -> None:
    write(tmp_path / "in.jsonl", [request("a")])
    files = {"--input": f"{tmp_path}/in.jsonl", "--output": f"{tmp_path}/out.jsonl", "--model": str(model)}
    files[flags[0]] = flags[1].format(tmp=tmp_path)
    arguments = [word for pair in files.items() for word in pair]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in done.stderr


def test_answer_file_keeps_whole_lines(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = str(tmp_path / "out.jsonl")
    requests = [BatchRequest(i, f"r{i}", URLS[1], {}) for i in range(1, 9)]
    with AnswerFile(path) as answers:
        for item in requests[:6]:
            answers.answer(item, "x", {"text": "\u2028 line\nbreaks"})
        answers.refuse(BadLine(9, "r7", invalid("no")), invalid("no"))
        with pytest.raises(ConfigError, match="another process"), AnswerFile(path):
            pass
    whole = Path(path).read_bytes()
    for cut in [0, len(whole), *(rng.randrange(len(whole)) for _ in range(20))]:
        Path(path).write_bytes(whole[:cut])
        with AnswerFile(path) as answers:
            kept = whole[:cut].count(b"\n")
            assert answers.done_ids == {f"r{i}" for i in range(1, min(kept, 6) + 1)}
            assert answers.done_lines == ({9} if kept == 7 else set())
            assert not answers.is_done(requests[6])
        assert Path(path).read_bytes() == b"".join(whole[:cut].splitlines(keepends=True)[:kept])


def test_a_foreign_file_is_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary\n")
    with pytest.raises(ConfigError, match="line 1 is not an answer"), AnswerFile(str(path)):
        pass
    assert path.read_text() == "dear diary\n"


def test_input_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\n{"custom_id": 3}\n\xff\n' + json.dumps(request("a")).encode())
    first, second, third = read_requests(str(path), URLS)
    assert isinstance(first, BadLine)
    assert isinstance(second, BadLine)
    assert (first.number, second.number) == (2, 3)
    assert third == BatchRequest(4, "a", URLS[1], {"prompt": [1, 2]})
