"""Loading: what is read, where it goes, and what is said about checkpoints that do not fit."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moe_runtime.errors import CheckpointError
from moe_runtime.models.registry import load_spec
from moe_runtime.weights.loader import load_weights
from tests.helpers.checkpoint_files import FILE, Tensors, drop, edit, load, put
from tests.helpers.tiny_models import FAMILIES, make_tiny


@pytest.mark.parametrize("fused", [False, True], ids=["hub", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_reads_only_its_experts(family: str, fused: bool, tmp_path: Path, seed: int) -> None:
    model = make_tiny(family, tmp_path, seed, fused=fused)
    spec, _ = load_spec(tmp_path)
    draw = random.Random(seed)
    # Another choice and order in every layer, an empty slot in between.
    local = []
    for _ in spec.moe_layers:
        held = draw.sample(range(spec.num_experts), spec.num_experts // 2)
        local.append([*held[:1], -1, *held[1:]])
    decoder, report = load(tmp_path, local_experts=local)
    for mlp, layer, experts in zip(decoder.moe_mlps(), spec.moe_layers, local, strict=True):
        expected = model.model.layers[layer].mlp.experts
        for slot, expert in enumerate(experts):
            zero = torch.zeros_like(mlp.gate_up[slot]), torch.zeros_like(mlp.down[slot])
            gate_up, down = (
                zero if expert < 0 else (expected.gate_up_proj[expert], expected.down_proj[expert])
            )
            assert torch.equal(mlp.gate_up[slot], gate_up)
            assert torch.equal(mlp.down[slot], down)
    _, whole = load(tmp_path)
    share = (spec.num_experts // 2) / spec.num_experts
    assert report.expert_bytes_read == pytest.approx(share * whole.expert_bytes_read)
    assert report.bytes_read - report.expert_bytes_read == whole.bytes_read - whole.expert_bytes_read
    assert whole.bytes_read == whole.bytes_in_checkpoint == sum(p.nbytes for p in model.parameters())


def test_bytes_of_other_experts_are_never_touched(tmp_path: Path, seed: int) -> None:
    """Garbage in the place of another rank's expert changes nothing here."""
    make_tiny("mixtral", tmp_path, seed, fused=True)
    spec, _ = load_spec(tmp_path)
    local = [[1, 2]] * spec.num_moe_layers
    before, _ = load(tmp_path, local_experts=local)

    def spoil(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if ".experts." in name:
                tensor[0], tensor[3:] = float("nan"), float("nan")

    edit(tmp_path, spoil)
    after, _ = load(tmp_path, local_experts=local)
    for (name, a), (_, b) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_type_conversion(dtype: torch.dtype, tmp_path: Path, seed: int) -> None:
    make_tiny("qwen2_moe", tmp_path, seed)
    wide, _ = load(tmp_path)
    narrow, _ = load(tmp_path, dtype=dtype)
    for (name, a), (_, b) in zip(wide.named_parameters(), narrow.named_parameters(), strict=True):
        assert b.dtype == dtype
        assert torch.equal(a.to(dtype), b), name


def test_conversion_in_many_chunks(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny("olmoe", tmp_path, seed)
    expected, _ = load(tmp_path, dtype=torch.float16)
    monkeypatch.setattr("moe_runtime.weights.reading.CHUNK_BYTES", 52)
    chunked, _ = load(tmp_path, dtype=torch.float16)
    for (name, a), (_, b) in zip(expected.named_parameters(), chunked.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_shards_and_progress(tmp_path: Path, seed: int) -> None:
    make_tiny("qwen3_moe", tmp_path / "one", seed)
    make_tiny("qwen3_moe", tmp_path / "many", seed, max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, _ = load(tmp_path / "one")
    spec, adapter = load_spec(tmp_path / "many")
    seen: list[float] = []
    experts = [list(range(spec.num_experts))] * spec.num_moe_layers
    many = load_weights(tmp_path / "many", spec, adapter, experts, torch.float32, "cpu", seen.append)
    for (name, a), (_, b) in zip(one.named_parameters(), many.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0.0, 1.0)


EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("model.norm.weight"), r"lacks tensors of this model: model\.norm\.weight$"),
        (drop(EXPERT), f"lacks tensors of this model: {re.escape(EXPERT)}$"),
        (
            drop("model.layers.0.self_attn.k_proj.weight"),
            r"lacks .*: model\.layers\.0\.self_attn\.k_proj\.weight$",
        ),
        (put("model.layers.0.mlp.extra.weight", torch.ones(2)), r"does not know: .*mlp\.extra\.weight$"),
        (put("model.layers.9.input_layernorm.weight", torch.ones(2)), r"does not know: model\.layers\.9"),
        (put(EXPERT, torch.ones(3, 5)), rf"{re.escape(EXPERT)} .*has shape \[3, 5\], but"),
        (put(EXPERT, torch.ones(3, 5, dtype=torch.int16)), rf"{re.escape(EXPERT)} .*type I16; supported"),
        (put(EXPERT, torch.ones(3, 5).to(torch.float8_e4m3fn)), "F8_E4M3"),
        (put("model.layers.0.mlp.experts.down_proj", torch.ones(1)), "holds the same weights twice"),
    ],
)
def test_coverage(change: Callable[[Tensors], Any], message: str, tmp_path: Path, seed: int) -> None:
    """All ranks see the same error, whichever experts they hold."""
    make_tiny("qwen3_moe", tmp_path, seed, num_hidden_layers=2)
    edit(tmp_path, change)
    spec, _ = load_spec(tmp_path)
    for held in ([0], [2], [-1]):
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path, local_experts=[held] * spec.num_moe_layers)


def test_transposed_tensor(tmp_path: Path, seed: int) -> None:
    make_tiny("mixtral", tmp_path, seed, hidden_size=32, intermediate_size=13)
    name = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    edit(tmp_path, lambda tensors: tensors.update({name: tensors[name].T.contiguous()}))
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} .* has shape"):
        load(tmp_path)


def test_many_missing_tensors_are_counted(tmp_path: Path, seed: int) -> None:
    make_tiny("mixtral", tmp_path, seed, num_hidden_layers=4, num_local_experts=5)
    edit(tmp_path, lambda tensors: [tensors.pop(n) for n in list(tensors) if ".w1." in n])
    with pytest.raises(CheckpointError, match=r"experts\.0\.w1\.weight.* and 15 more$"):
        load(tmp_path)


def test_one_expert_layout_must_be_whole(tmp_path: Path, seed: int) -> None:
    """Files in the fused layout without `down_proj`: the message names tensors that would complete it."""
    make_tiny("olmoe", tmp_path, seed, fused=True)
    edit(tmp_path, drop("model.layers.1.mlp.experts.down_proj"))
    with pytest.raises(CheckpointError, match=r"lacks .*model\.layers\.1\.mlp\.experts\.0\.down_proj"):
        load(tmp_path)


def test_rotary_buffers_are_ignored(tmp_path: Path, seed: int) -> None:
    make_tiny("mixtral", tmp_path, seed)
    edit(tmp_path, put("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4)))
    load(tmp_path)


def test_tied_head(tmp_path: Path, seed: int) -> None:
    make_tiny("mixtral", tmp_path, seed, tie_word_embeddings=True)
    alone, report = load(tmp_path)
    assert alone.head is None
    table = load_file(tmp_path / FILE)["model.embed_tokens.weight"]
    edit(tmp_path, put("lm_head.weight", table.clone()))
    both, both_report = load(tmp_path)
    assert both_report.bytes_read == report.bytes_read
    edit(tmp_path, drop("model.embed_tokens.weight"))
    head_only, _ = load(tmp_path)
    for decoder in (both, head_only):
        assert torch.equal(decoder.embedding.weight, table)
    different = table.clone()
    different[-1, -1] += 1
    edit(tmp_path, put("model.embed_tokens.weight", different))
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings.*lm_head\.weight differs"):
        load(tmp_path)


def test_untied_head_is_needed(tmp_path: Path, seed: int) -> None:
    make_tiny("mixtral", tmp_path, seed)
    edit(tmp_path, drop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lacks .*lm_head\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("size", [0, 5, 200, -1])
def test_truncated_file(size: int, tmp_path: Path, seed: int) -> None:
    make_tiny("mixtral", tmp_path, seed)
    data = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(data[:size])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        load(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[1]",
        b'{"x": 3}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
    ],
)
def test_damaged_header(header: bytes, tmp_path: Path, seed: int) -> None:
    make_tiny("mixtral", tmp_path, seed)
    (tmp_path / FILE).write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(tmp_path)


def test_trailing_bytes(tmp_path: Path, seed: int) -> None:
    make_tiny("mixtral", tmp_path, seed)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b"\0" * 8)
    with pytest.raises(CheckpointError, match="damaged"):
        load(tmp_path)


def test_shard_named_by_the_index_is_missing(tmp_path: Path, seed: int) -> None:
    make_tiny("qwen3_moe", tmp_path, seed, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name}, which is missing"):
        load(tmp_path)


def test_index_and_shards_must_agree(tmp_path: Path, seed: int) -> None:
    make_tiny("qwen3_moe", tmp_path, seed, max_shard_size="20KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    # A shard that no other tensor names would not be opened at all, so the tensor left out is one that shares its shard.
    shards = list(index["weight_map"].values())
    name = next(name for name, shard in index["weight_map"].items() if shards.count(shard) > 1)
    shard = index["weight_map"].pop(name)
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} is in the shard but not in the index"):
        load(tmp_path)
    index["weight_map"] |= {name: shard, "model.other": shard}
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.other is not in the shard"):
        load(tmp_path)
    index["weight_map"] = {"model.norm.weight": "../model.safetensors"}
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a file of its folder"):
        load(tmp_path)
    path.write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map"):
        load(tmp_path)


def test_pickle_files_are_never_loaded(tmp_path: Path, seed: int) -> None:
    make_tiny("mixtral", tmp_path, seed)
    (tmp_path / FILE).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: pickle files .* never loaded"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load(tmp_path)


def test_missing_folder(tmp_path: Path, seed: int) -> None:
    make_tiny("mixtral", tmp_path / "a", seed)
    spec, adapter = load_spec(tmp_path / "a")
    with pytest.raises(CheckpointError, match="no model folder"):
        load_weights(tmp_path / "b", spec, adapter, [[0]] * spec.num_moe_layers, torch.float32, "cpu")
