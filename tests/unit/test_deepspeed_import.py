"""Converting DeepSpeed-MoE checkpoints: every tensor bit for bit, and every way a checkpoint can be wrong.

Here the checkpoints are written in DeepSpeed's layout without it; tests/test_deepspeed.py has one that DeepSpeed wrote.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from moe_runtime.errors import CheckpointError, ConfigError
from moe_runtime.tools.import_deepspeed import main
from moe_runtime.weights.deepspeed_files import MAIN_FILE
from moe_runtime.weights.deepspeed_import import ImportOptions, import_deepspeed
from moe_runtime.weights.loader import list_tensors
from tests.helpers.deepspeed_checkpoints import expert_file, hub_tensors, write_deepspeed
from tests.helpers.tiny_models import make_tiny

if TYPE_CHECKING:
    from collections.abc import Callable

CASES: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"num_experts_per_tok": 2}),
    ("mixtral", {"num_experts_per_tok": 3, "tie_word_embeddings": True}),
    ("qwen3_moe", {"norm_topk_prob": True, "num_experts_per_tok": 2, "num_hidden_layers": 3, "mlp_only_layers": [1]}),
    ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 1, "attention_bias": True}),
    ("qwen2_moe", {"norm_topk_prob": True, "num_experts_per_tok": 2}),
]  # fmt: skip


def silent(done: int, total: int) -> None:
    assert 0 <= done <= total


@pytest.mark.parametrize(("family", "overrides"), CASES, ids=[f"{f}-{'-'.join(o)}"[:60] for f, o in CASES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_tensor_comes_back(
    family: str, overrides: dict[str, Any], dtype: torch.dtype, tmp_path: Path, seed: int
) -> None:
    hub, out = tmp_path / "hub", tmp_path / "new" / "out"
    make_tiny(family, hub, seed, dtype=dtype, **overrides)
    (hub / "tokenizer.json").write_text("{}")
    write_deepspeed(hub, tmp_path / "deepspeed")
    steps: list[tuple[int, int]] = []
    options = ImportOptions(tmp_path / "deepspeed", out, hub, shard_bytes=4096)
    report = import_deepspeed(options, lambda done, total: steps.append((done, total)))
    expected, got = hub_tensors(hub), hub_tensors(out)
    assert got.keys() == expected.keys() == list_tensors(out).keys()
    for name, tensor in expected.items():
        assert got[name].dtype == dtype
        assert torch.equal(got[name], tensor), name
    assert json.loads((out / "config.json").read_text()) == json.loads((hub / "config.json").read_text())
    assert (out / "tokenizer.json").read_text() == "{}"
    assert len(list(out.glob("*.safetensors"))) > 2
    total = sum(t.nbytes for t in expected.values())
    assert steps[-1] == (total, total)
    assert (report.num_tensors, report.num_bytes) == (len(expected), total)
    assert report.left_out == ("expp_rank_0_mp_rank_00_optim_states.pt",)


def test_other_names(tmp_path: Path, seed: int) -> None:
    """A model of one's own classes: names given with --rename and --experts, at the command line."""
    hub = tmp_path / "hub"
    make_tiny("mixtral", hub, seed, num_experts_per_tok=2)
    folder = write_deepspeed(hub, tmp_path / "deepspeed", tag=None)
    renames = [
        ("model.layers.", "backbone.h."),
        (".w1.", ".ffn.gate."),
        (".w3.", ".ffn.up."),
        (".w2.", ".ffn.down."),
    ]
    for path in folder.glob("*_model_states.pt"):
        edit(path, lambda tensors: {_swap(key, renames): value for key, value in tensors.items()})
    argv = [str(folder), str(tmp_path / "out"), "--config", str(hub / "config.json"), "--quiet"]
    assert main(argv) == 1
    assert (
        main(
            [
                *argv,
                "--rename",
                r"^backbone\.h\.(\d+)=model.layers.\2",
                "--experts",
                "ffn.gate,ffn.up,ffn.down",
            ]
        )
        == 1
    )
    assert (
        main([*argv, "--rename", r"^backbone\.h\.=model.layers.", "--experts", "ffn.gate,ffn.up,ffn.down"])
        == 0
    )
    expected, got = hub_tensors(hub), hub_tensors(tmp_path / "out")
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def _swap(key: str, renames: list[tuple[str, str]]) -> str:
    for old, new in renames:
        key = key.replace(old, new)
    return key


def edit(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Rewrite a file's tensors."""
    # The tests may not use torch.load either.
    from moe_runtime.weights.deepspeed_files import load

    state = load(path)
    if path.name == MAIN_FILE:
        state = state | {"module": {k: v.clone() for k, v in change(state["module"]).items()}}
    else:
        state = {k: v.clone() for k, v in change(state).items()}
    path.unlink()
    torch.save(state, path)


def _without(part: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {k: v for k, v in tensors.items() if part not in k}


def _with(name: str, like: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A tensor more: `name`, with the value and the prefix of the one that ends with `like`."""

    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        key = next(k for k in tensors if k.endswith(like))
        return tensors | {key.removesuffix(like) + name: tensors[key]}

    return change


def _shaped(part: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {k: v[:-1] if part in k else v for k, v in tensors.items()}


class Payload:
    """Unpickling it would make a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


MAIN = Path(MAIN_FILE)
E10 = expert_file(Path(), 1, 0)
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no expert file": (lambda f: (f / E10).unlink(), "lacks layer_1_expert_0_mp_rank_00_model_states.pt"),
    "one expert too many": (
        lambda f: (f / E10).rename(expert_file(f, 1, 44)) and torch.save({}, f / E10), "expert_44_mp_rank_00_model_states.pt is one too many",
    ),
    "an expert's matrix": (lambda f: edit(f / E10, _without(".w3.")), r"lacks.*layers\.1\..*experts\.0\.w3\.weight"),
    "an expert's bias": (lambda f: edit(f / E10, _with("w2.bias", "w2.weight")), "w2.bias.*none of an expert's matrices"),
    "an expert's shape": (lambda f: edit(f / E10, _shaped(".w2.")), r"layers\.1\..*w2.weight.*has shape"),
    "another expert's": (
        lambda f: (f / E10).write_bytes(expert_file(f, 1, 1).read_bytes()), "not a tensor of expert 0",
    ),
    "another layer's": (
        lambda f: (f / E10).write_bytes(expert_file(f, 0, 0).read_bytes()), "belongs to layer 0, as does another",
    ),
    "a router": (lambda f: edit(f / MAIN, _without("layers.1.block_sparse_moe")), r"lacks.*layers\.1\.block_sparse_moe\.gate"),
    "a norm": (lambda f: edit(f / MAIN, _without("model.norm")), r"lacks.*model\.norm\.weight"),
    "an unknown tensor": (lambda f: edit(f / MAIN, _with("model.extra", "model.norm.weight")), r"does not know: model\.extra"),
    "a residual layer": (
        lambda f: edit(f / MAIN, _with("coefficient.weight", "deepspeed_moe.gate.wg.weight")), "use_residual",
    ),
    "no MoE layer": (lambda f: edit(f / MAIN, _without("deepspeed_moe")), "has no DeepSpeed-MoE layer"),
    "tensor parallelism": (
        lambda f: torch.save({}, f / "mp_rank_01_model_states.pt"), "mp_rank_01_model_states.pt: only checkpoints without tensor",
    ),
    "ZeRO stage 3": (lambda f: (f / MAIN).rename(f / "zero_pp_rank_0_mp_rank_00_model_states.pt"), "ZeRO stage 3"),
    "no main file": (lambda f: (f / MAIN).unlink(), f"has no {MAIN_FILE}"),
    "pipeline parallelism": (lambda f: torch.save({"module": None}, f / MAIN), "pipeline parallelism"),
    "AutoEP": (lambda f: torch.save({"module": {}, "ds_autoep_layers": [{}]}, f / MAIN), "AutoEP"),
    "a truncated file": (lambda f: os.truncate(f / E10, 700), "layer_1_expert_0.*cannot be read"),
    "an empty file": (lambda f: (f / E10).write_bytes(b""), "layer_1_expert_0.*cannot be read"),
    "not a dict": (lambda f: torch.save([1], f / E10), "holds a list"),
    "not a tensor": (lambda f: torch.save({"model.layers.1.m.deepspeed_moe.experts.deepspeed_experts.0.w1.weight": 3}, f / E10), "is a int"),
    "code": (lambda f: torch.save(Payload(f / "run"), f / E10), "cannot be read as tensors and plain values"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_nothing_is_written(kind: str, tmp_path: Path, seed: int) -> None:
    hub, out = tmp_path / "hub", tmp_path / "made" / "out"
    make_tiny("mixtral", hub, seed, num_experts_per_tok=2, num_hidden_layers=2)
    folder = write_deepspeed(hub, tmp_path / "deepspeed")
    damage, message = DAMAGE[kind]
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        import_deepspeed(ImportOptions(folder, out, hub), silent)
    assert not (folder / "run").exists(), "the checkpoint ran code"
    assert not out.parent.exists() or not list(out.parent.iterdir())


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("mixtral", {"num_experts_per_tok": 1}),
        ("qwen3_moe", {"num_experts_per_tok": 2, "norm_topk_prob": False}),
        ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}),
    ],
)
def test_a_gate_that_would_weigh_differently_is_refused(
    family: str, overrides: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    make_tiny(family, tmp_path / "hub", seed, **overrides)
    folder = write_deepspeed(tmp_path / "hub", tmp_path / "deepspeed")
    with pytest.raises(ConfigError, match=r"num_experts_per_tok=.*would differ"):
        import_deepspeed(ImportOptions(folder, tmp_path / "out", tmp_path / "hub"), silent)


def test_two_tensors_of_one_name(tmp_path: Path, seed: int) -> None:
    make_tiny("mixtral", tmp_path / "hub", seed, num_experts_per_tok=2, tie_word_embeddings=False)
    folder = write_deepspeed(tmp_path / "hub", tmp_path / "deepspeed")
    options = ImportOptions(
        folder, tmp_path / "out", tmp_path / "hub", renames=(("lm_head", "model.embed_tokens"),)
    )
    with pytest.raises(CheckpointError, match="as another tensor does"):
        import_deepspeed(options, silent)


def test_where_from_and_where_to(tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    hub, out = tmp_path / "hub", tmp_path / "out"
    make_tiny("mixtral", hub, seed, num_experts_per_tok=2)
    write_deepspeed(hub, tmp_path / "deepspeed")
    capsys.readouterr()

    def run(source: Path, *options: str) -> tuple[int, str]:
        status = main([str(source), str(out), "--quiet", *options])
        return status, capsys.readouterr().err

    assert run(tmp_path / "none") == (1, f"error: {tmp_path / 'none'}: no such folder\n")
    status, error = run(tmp_path / "deepspeed")
    assert status == 1
    assert "--config" in error
    (tmp_path / "deepspeed" / "config.json").write_text((hub / "config.json").read_text())
    assert run(tmp_path / "deepspeed") == (0, "")
    status, error = run(tmp_path / "deepspeed")
    assert (status, "exists" in error) == (1, True)
    assert list_tensors(out).keys() == hub_tensors(hub).keys()


@pytest.mark.parametrize(
    "wrong", [("--experts", "a,b"), ("--experts", "a,a,b"), ("--rename", "x"), ("--rename", "(=y")]
)
def test_wrong_usage(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["in", "out", *wrong])
    assert left.value.code == 2
    assert wrong[1] in capsys.readouterr().err
