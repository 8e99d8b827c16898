"""What cannot start says why in one line, with real processes, and leaves none: servers and `LLM`."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from moe_runtime import LLM, SamplingParams, errors
from moe_runtime.models.registry import ADAPTER_MODULES
from tests.helpers import damage
from tests.helpers.real_server import TORCHRUN, RealServer
from tests.helpers.tiny_models import make_tiny
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

PLAIN = (sys.executable,)
HUGE = 10**9


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    make_tiny("mixtral", folder, 11, vocab_size=VOCAB_SIZE, num_local_experts=5)
    save_tokenizer(folder)
    return folder


def wrong_path(folder: Path) -> list[str]:
    folder.rename(folder.with_name("elsewhere"))
    return [str(folder), "no such folder"]


def no_config(folder: Path) -> list[str]:
    (folder / "config.json").unlink()
    return [str(folder), "config.json"]


def unsupported(folder: Path) -> list[str]:
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return ["LlamaForCausalLM", *ADAPTER_MODULES]


def unsupported_quantization(folder: Path) -> list[str]:
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "awq"}}
    (folder / "config.json").write_text(json.dumps(config))
    return ["quant_method='awq'", "fp8", "compressed-tensors"]


def missing_tensor(folder: Path) -> list[str]:
    return [damage.without_last_tensor(folder), "lacks"]


def truncated(folder: Path) -> list[str]:
    with (folder / damage.WEIGHTS).open("r+b") as file:
        file.truncate((folder / damage.WEIGHTS).stat().st_size // 2)
    return [damage.WEIGHTS, "truncated"]


def truncated_for_rank_1(folder: Path) -> list[str]:
    """Rank 0 of two keeps the first three of five experts."""
    return [damage.truncated_shard_of(folder, ".experts.4."), "truncated"]


def no_tokenizer(folder: Path) -> list[str]:
    (folder / "tokenizer.json").write_text("{")
    return ["tokenizer"]


def too_large(folder: Path) -> list[str]:
    damage.blow_up(folder, psutil.virtual_memory().total)
    return ["weights", "GiB", "free"]


def nothing(folder: Path) -> list[str]:
    return []


Damage = Callable[[Path], list[str]]
CASES: dict[str, tuple[Damage, dict[str, Any], type[errors.MoeRuntimeError], list[str]]] = {
    "path": (wrong_path, {}, errors.CheckpointError, []),
    "no config": (no_config, {}, errors.CheckpointError, []),
    "architecture": (unsupported, {}, errors.ConfigError, []),
    "quantisation": (unsupported_quantization, {}, errors.ConfigError, []),
    "missing tensor": (missing_tensor, {}, errors.CheckpointError, []),
    "truncated": (truncated, {}, errors.CheckpointError, []),
    "truncated for rank 1": (truncated_for_rank_1, {}, errors.CheckpointError, []),
    "tokenizer": (no_tokenizer, {}, errors.CheckpointError, []),
    "weights": (too_large, {}, errors.CapacityError, []),
    "blocks": (nothing, {"num_kv_blocks": HUGE}, errors.CapacityError, [f"num_kv_blocks={HUGE}", "GiB", "free"]),
    "memory": (
        nothing,
        {"max_num_batched_tokens": HUGE},
        errors.CapacityError,
        ["KV cache", "room for 0 tokens", "max_model_len=512"],
    ),
    "shared memory": (
        nothing,
        {"dispatcher": "one_sided", "dispatch_buffer_mib": HUGE},
        errors.BackendUnavailable,
        ["one_sided", "/dev/shm", "MiB free"],
    ),
    "length": (nothing, {"max_model_len": HUGE}, errors.ConfigError, ["max_model_len", "512"]),
    "hardware": (
        nothing,
        {"enable_eplb": True, "eplb_config": '{"hardware": "h100x"}'},
        errors.ConfigError,
        ["hardware 'h100x'", "h200, b200, cpu"],
    ),
}
# Each takes seconds. The slow ones fail on the same way as others that are not.
QUICK_SERVER = ("path", "truncated for rank 1")
QUICK_LLM = ("path", "missing tensor", "memory", "tokenizer")


def cases(quick: tuple[str, ...]) -> list[Any]:
    slow = pytest.mark.slow
    return [pytest.param(name, marks=() if name in quick else slow) for name in CASES]


def prepare(name: str, checkpoint: Path, tmp_path: Path) -> tuple[Path, dict[str, Any], list[str]]:
    """The folder, settings, and words that the error must have."""
    break_it, settings, _, words = CASES[name]
    folder = damage.copy_of(checkpoint, tmp_path / "model")
    return folder, settings, words + break_it(folder)


def as_flags(settings: dict[str, Any]) -> list[str]:
    flags = {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
    return [word for flag, value in flags.items() for word in ((flag,) if value is True else (flag, str(value)))]


def check_failed(server: RealServer, words: list[str]) -> None:
    """It ended by itself with one line that has all the words, and no traceback but torchrun's own."""
    assert server.first.wait(90) != 0
    server.wait_gone(10)
    lines = [line for line in server.log().splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, server.log()
    missing = [word for word in words if word not in lines[0]]
    assert not missing, lines[0]
    assert "[http] ERROR" not in server.log(), "it has been said already"


@pytest.mark.parametrize("name", cases(QUICK_SERVER))
def test_a_server_that_cannot_start_says_why_once(name: str, checkpoint: Path, tmp_path: Path) -> None:
    folder, settings, words = prepare(name, checkpoint, tmp_path)
    with RealServer(
        folder, 2, tmp_path / "log", *as_flags(settings), launcher=PLAIN, wait=False
    ) as server:
        check_failed(server, words)
        assert "Traceback" not in server.log()


def test_torchruns_report_ends_with_the_reason(checkpoint: Path, tmp_path: Path) -> None:
    folder, _, words = prepare("architecture", checkpoint, tmp_path)
    with RealServer(folder, 2, tmp_path / "log", wait=False) as server:
        check_failed(server, words)
        assert server.log().count("Traceback") == 1, "torchrun's, which a command line cannot prevent"
        reason = server.log().splitlines()[-2]
        assert all(word in reason for word in words), server.log()


def test_debug_shows_the_traceback(checkpoint: Path, tmp_path: Path) -> None:
    folder, _, words = prepare("no config", checkpoint, tmp_path)
    flags = ("--log-level", "debug")
    with RealServer(folder, 2, tmp_path / "log", *flags, launcher=PLAIN, wait=False) as server:
        check_failed(server, words)
        assert "Traceback" in server.log()


def test_a_port_in_use(checkpoint: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with RealServer(checkpoint, 2, tmp_path / "log", launcher=PLAIN, wait=False, port=port) as server:
            check_failed(server, [str(port), "in use", "--port"])


@pytest.mark.parametrize(
    ("num_ranks", "flags", "words"),
    [(3, (), ["--ep 2", "3 ranks", "torchrun --nproc-per-node 2 launch/serve.py --ep 2"]), (2, ("--prot", "80"), ["--prot", "--port"])],
    ids=["number of ranks", "unknown flag"],
)  # fmt: skip
def test_mistakes_that_every_rank_sees_are_told_by_one(
    num_ranks: int, flags: tuple[str, ...], words: list[str], checkpoint: Path, tmp_path: Path
) -> None:
    launcher = (*TORCHRUN, "--nproc-per-node", str(num_ranks))
    with RealServer(checkpoint, 2, tmp_path / "log", *flags, launcher=launcher, wait=False) as server:
        check_failed(server, words)


@pytest.mark.parametrize("name", cases(QUICK_LLM))
def test_an_llm_that_cannot_start_raises(
    name: str, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, settings, words = prepare(name, checkpoint, tmp_path)
    children = psutil.Process().children(recursive=True)
    with pytest.raises(CASES[name][2]) as raised:
        LLM(model=str(folder), ep=2, **settings)
    assert all(word in str(raised.value) for word in words), raised.value
    output = capfd.readouterr().err
    assert "Traceback" not in output
    assert "ERROR" not in output
    assert psutil.Process().children(recursive=True) == children


@pytest.mark.slow
def test_auto_takes_another_dispatcher_and_says_why(
    checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with LLM(model=str(checkpoint), ep=2, dispatch_buffer_mib=HUGE, num_kv_blocks=64) as llm:
        (output,) = llm.generate("the router", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3
    line = next(line for line in capfd.readouterr().err.splitlines() if "dispatcher: collective" in line)
    assert "not one_sided" in line
    assert "/dev/shm" in line
