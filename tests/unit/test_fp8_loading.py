"""FP8 checkpoints of the hub's formats, and experts quantised on loading: values, memory, bytes read, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from moe_runtime.config import EngineConfig
from moe_runtime.engine.model_runner import step_bytes
from moe_runtime.errors import CheckpointError, ConfigError
from moe_runtime.experts.cpu import DEQUANT_TILE
from moe_runtime.models.quantized import with_weight_schemes
from moe_runtime.models.registry import load_spec
from moe_runtime.quantization import FP8, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, INT8_CHANNEL
from moe_runtime.weights.loader import weight_bytes
from tests.helpers.checkpoint_files import FILE, Tensors, drop, edit, load, put, reference
from tests.helpers.fp8_checkpoints import FORMATS, write_fp8
from tests.helpers.parity import Reference, check_rows
from tests.helpers.run_decoder import logprobs_with_cpu_experts
from tests.helpers.tiny_models import FAMILIES, make_tiny

# Two blocks each way, the second one not whole.
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 160,
    "intermediate_size": 150,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SCHEMES = {"fp8": FP8_BLOCK, "fp8_channel": FP8_CHANNEL, "fp8_tensor": FP8_TENSOR, "int8": INT8_CHANNEL}
GRID = [(family, name) for family in FAMILIES for name in FORMATS]
QUICK = [(family, name) for family in FAMILIES for name in ("deepseek", "ct_channel")]
QUICK += [("mixtral", "autofp8"), ("qwen2_moe", "ct_tensor"), ("qwen3_moe", "ct_block")]
CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in GRID]


def sizes(family: str) -> dict[str, Any]:
    """Of a tiny model whose matrices have several blocks of scales."""
    own: dict[str, Any] = {} if family == "olmoe" else {"head_dim": 16}
    if family.startswith("qwen"):
        own["moe_intermediate_size"] = 140
    return SIZES | own


def write(family: str, name: str, folder: Path, seed: int, **changes: Any) -> tuple[Path, Path]:
    """A checkpoint in FP8, and the same values unquantised."""
    make_tiny(family, folder / "source", seed, **(sizes(family) | changes))
    write_fp8(folder / "source", FORMATS[name], folder / "fp8", folder / "plain")
    return folder / "fp8", folder / "plain"


@pytest.mark.parametrize(("family", "name"), CASES)
def test_matches_transformers_on_the_dequantised_weights(
    family: str, name: str, tmp_path: Path, seed: int
) -> None:
    folder, plain = write(family, name, tmp_path, seed)
    decoder, report = load(folder)
    assert {mlp.gate_up.dtype for mlp in decoder.moe_mlps()} == {FP8}
    unread = [t.nbytes for n, t in load_file(folder / FILE).items() if n.endswith("input_scale")]
    assert report.bytes_read == report.bytes_in_checkpoint - sum(unread)
    draw = random.Random(seed)
    text = [draw.randrange(decoder.spec.vocab_size) for _ in range(40)]
    check_rows(Reference(reference(plain)), [text], logprobs_with_cpu_experts(decoder, text), 2e-3)


@pytest.mark.parametrize("name", FORMATS)
def test_a_rank_keeps_the_files_bytes_of_its_experts_and_reads_no_others(
    name: str, tmp_path: Path, seed: int
) -> None:
    folder, _ = write("qwen3_moe", name, tmp_path, seed)
    form, tensors = FORMATS[name], load_file(folder / FILE)
    _, whole = load(folder)
    spec, _ = load_spec(folder)
    # An empty slot, and an expert twice.
    held = [3, -1, 1, 3]
    for expert in set(range(spec.num_experts)) - set(held):
        for tensor_name, tensor in tensors.items():
            if f".experts.{expert}." in tensor_name:
                tensor.fill_(float("nan"))
    save_file(tensors, folder / FILE)
    decoder, report = load(folder, local_experts=[held] * spec.num_moe_layers)
    for layer, mlp in enumerate(decoder.moe_mlps()):
        weights = mlp.expert_weights()
        assert weights.gate_up_scale is not None
        assert weights.down_scale is not None
        for slot, expert in enumerate(held):
            if expert < 0:
                assert not weights.dequantize_gate_up(slot).any()
                assert not weights.dequantize_down(slot).any()
                continue
            matrix = f"model.layers.{layer}.mlp.experts.{expert}.{{}}_proj.weight"
            gate, up, down = (matrix.format(part) for part in ("gate", "up", "down"))
            both = torch.cat([tensors[gate], tensors[up]]).view(torch.uint8)
            assert torch.equal(weights.gate_up_pFD[slot].view(torch.uint8), both)
            assert torch.equal(weights.down_pDF[slot].view(torch.uint8), tensors[down].view(torch.uint8))
            for kept, source in (
                (weights.gate_up_scale[slot][0], gate),
                (weights.gate_up_scale[slot][1], up),
                (weights.down_scale[slot], down),
            ):
                assert kept.dtype == torch.float32
                assert kept.flatten().tolist() == tensors[source + form.suffix].float().flatten().tolist()
    assert report.expert_bytes_read == pytest.approx(whole.expert_bytes_read * 3 / spec.num_experts)
    assert report.bytes_read - report.expert_bytes_read == whole.bytes_read - whole.expert_bytes_read


@pytest.mark.parametrize("name", ["deepseek", "ct_channel", "autofp8"])
def test_experts_can_be_dequantised_on_loading(name: str, tmp_path: Path, seed: int) -> None:
    folder, plain = write("mixtral", name, tmp_path, seed)
    for dtype in (torch.float32, torch.bfloat16):
        decoder, _ = load(folder, "none", dtype=dtype)
        expected, _ = load(plain, dtype=dtype)
        for (a_name, a), (b_name, b) in zip(
            decoder.named_parameters(), expected.named_parameters(), strict=True
        ):
            assert a_name == b_name
            assert torch.equal(a, b), a_name


@pytest.mark.parametrize("hidden", [96, 256])
def test_scales_mean_what_transformers_takes_them_for(hidden: int, tmp_path: Path, seed: int) -> None:
    """transformers reads whole blocks only, so sizes that are multiples of 128, or one block."""
    changes = {"hidden_size": hidden, "moe_intermediate_size": 128, "intermediate_size": 256}
    folder, _ = write("qwen3_moe", "deepseek", tmp_path, seed, **changes)
    tensors = load_file(folder / FILE)
    kept, _ = load(folder)
    undone, _ = load(folder, "none")
    for layer, (fp8, wide) in enumerate(zip(kept.moe_mlps(), undone.moe_mlps(), strict=True)):
        for expert in range(kept.spec.num_experts):
            matrix = f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"
            pair = {"weight": tensors[matrix], "weight_scale_inv": tensors[matrix + "_scale_inv"]}
            (expected,) = Fp8Dequantize(None).convert(pair).values()
            assert torch.equal(fp8.expert_weights().dequantize_down(expert), expected.float())
            assert torch.equal(wide.down[expert], expected.float())


def stack_experts(tensors: Tensors, suffix: str, num_layers: int, num_experts: int) -> None:
    """As transformers 5 stores experts in its own layout: stacked, gate and up in one."""
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        for end, stacked_end in (("", ""), (suffix, "_scale_inv")):
            gate, up, down = (
                torch.stack([tensors.pop(f"{prefix}{e}.{part}_proj.weight{end}") for e in range(num_experts)])
                for part in ("gate", "up", "down")
            )
            tensors[f"{prefix}gate_up_proj{stacked_end}"] = torch.cat([gate, up], dim=1)
            tensors[f"{prefix}down_proj{stacked_end}"] = down


def test_stacked_experts(tmp_path: Path, seed: int) -> None:
    folder, _ = write("qwen3_moe", "deepseek", tmp_path, seed)
    one_by_one, _ = load(folder)
    spec, _ = load_spec(folder)
    edit(folder, lambda t: stack_experts(t, "_scale_inv", spec.num_layers, spec.num_experts))
    held = [[2, 0]] * spec.num_moe_layers
    stacked, _ = load(folder, local_experts=held)
    for a, b in zip(one_by_one.moe_mlps(), stacked.moe_mlps(), strict=True):
        for slot, expert in enumerate(held[0]):
            for name in ("gate_up", "gate_up_scale", "down", "down_scale"):
                wanted, found = (getattr(mlp, name)[i] for mlp, i in ((a, expert), (b, slot)))
                assert torch.equal(wanted.float(), found.float()), name


def test_scales_that_are_powers_of_two_in_one_byte(tmp_path: Path, seed: int) -> None:
    folder, _ = write("qwen3_moe", "deepseek", tmp_path, seed)

    def shrink(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith("_scale_inv"):
                tensors[name] = tensors[name].log2().ceil().exp2()

    edit(folder, shrink)
    expected, _ = load(folder)
    edit(
        folder, lambda t: t.update({n: x.to(torch.float8_e8m0fnu) for n, x in t.items() if "_scale_inv" in n})
    )
    found, _ = load(folder)
    for (name, a), (_, b) in zip(expected.named_parameters(), found.named_parameters(), strict=True):
        assert torch.equal(a.float(), b.float()), name


DENSE = (".attention.qkv.weight", ".attention.out.weight", "head.weight")


@pytest.mark.parametrize("asked", SCHEMES)
@pytest.mark.parametrize(
    ("family", "fused", "stored"),
    [("mixtral", False, torch.bfloat16), ("qwen3_moe", True, torch.float32)],
    ids=["hub bfloat16", "stacked float32"],
)
def test_experts_are_quantised_on_loading(
    asked: str,
    family: str,
    fused: bool,
    stored: torch.dtype,
    tmp_path: Path,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In chunks of a few rows as in one piece, as the oracle does it."""
    make_tiny(family, tmp_path, seed, fused=fused, dtype=stored, **sizes(family))
    wide, _ = load(tmp_path, dtype=torch.float32)
    monkeypatch.setattr("moe_runtime.weights.reading.FP8_CHUNK_BYTES", 5000)
    held = [[1, -1, 0]] * wide.spec.num_moe_layers
    narrow, report = load(tmp_path, asked, held)
    scheme = SCHEMES[asked]
    for before, after in zip(wide.moe_mlps(), narrow.moe_mlps(), strict=True):
        weights = after.expert_weights()
        assert weights.scheme == scheme
        assert weights.gate_up_scale is not None
        assert weights.down_scale is not None
        for slot, expert in ((0, 1), (2, 0)):
            for part, (stored_part, scale) in enumerate(
                zip(weights.gate_up_pFD[slot].chunk(2), weights.gate_up_scale[slot], strict=True)
            ):
                payload, expected = scheme.quantize_weight(before.gate_up[expert].chunk(2)[part])
                assert torch.equal(stored_part.float(), payload.float())
                assert torch.equal(scale, expected)
            payload, expected = scheme.quantize_weight(before.down[expert])
            assert torch.equal(weights.down_pDF[slot].float(), payload.float())
            assert torch.equal(weights.down_scale[slot], expected)
        assert not weights.dequantize_gate_up(1).any()
    others = [n for n, _ in wide.named_parameters() if ".mlp.gate_up" not in n and ".mlp.down" not in n]
    dense = [n for n in others if n.endswith(DENSE)] if asked == "int8" else []
    assert set(others) - set(dense)
    for name in others:
        before, after = wide.get_parameter(name), narrow.get_parameter(name)
        if name in dense:
            payload, scale = INT8_CHANNEL.quantize_weight(before)
            assert torch.equal(after, payload)
            assert torch.equal(narrow.get_parameter(name + "_scale"), scale)
        else:
            assert torch.equal(before, after), name
    assert report.bytes_read < report.bytes_in_checkpoint


def test_the_estimate_of_memory_is_exact(tmp_path: Path, seed: int) -> None:
    make_tiny("qwen2_moe", tmp_path, seed, **sizes("qwen2_moe"))
    taken = {}
    for asked in ("none", *SCHEMES):
        decoder, _ = load(tmp_path, asked, dtype=torch.bfloat16)
        spec = decoder.spec
        taken[asked] = sum(p.numel() * p.element_size() for p in decoder.parameters())
        slots = [spec.num_experts] * spec.num_moe_layers
        assert weight_bytes(spec, slots, torch.bfloat16) == taken[asked]
        tile = step_bytes(EngineConfig(), spec, torch.bfloat16, 1) - step_bytes(
            EngineConfig(),
            dataclasses.replace(spec, expert_scheme=None, dense_scheme=None),
            torch.bfloat16,
            1,
        )
        assert tile == (0 if asked == "none" else DEQUANT_TILE * (4 + 2))
    values = 3 * 140 * 160 * spec.num_experts * spec.num_moe_layers
    assert taken["none"] - taken["fp8_tensor"] == values - 3 * 4 * spec.num_experts * spec.num_moe_layers
    assert taken["fp8_tensor"] < taken["fp8"] < taken["fp8_channel"] < taken["none"]
    # int8 is for dense layers too: half of their bytes, and a scale of four bytes for each row.
    dense = [(p.numel(), p.shape[0]) for p in decoder.parameters() if p.dtype == torch.int8 and p.dim() == 2]
    assert len(dense) == 4 * spec.num_layers + 1
    assert taken["fp8_channel"] - taken["int8"] == sum(values - 4 * rows for values, rows in dense)


def test_settings_and_stored_schemes(tmp_path: Path, seed: int) -> None:
    folder, plain = write("olmoe", "ct_channel", tmp_path, seed)
    unquantised, _ = load_spec(plain)
    assert with_weight_schemes(unquantised, "auto").expert_scheme is None
    assert {a: with_weight_schemes(unquantised, a).expert_scheme for a in SCHEMES} == SCHEMES
    quantised_dense = [a for a in SCHEMES if with_weight_schemes(unquantised, a).dense_scheme is not None]
    assert quantised_dense == ["int8"]
    assert with_weight_schemes(unquantised, "int8").dense_scheme == INT8_CHANNEL
    channel, _ = load_spec(folder)
    for asked in ("auto", "fp8", "fp8_channel"):
        assert with_weight_schemes(channel, asked).expert_scheme == FP8_CHANNEL
    assert with_weight_schemes(channel, "none").expert_scheme is None
    for asked in ("fp8_tensor", "int8"):
        with pytest.raises(ConfigError, match=rf"quantization='{asked}': .*stored as fp8_channel; use auto"):
            with_weight_schemes(channel, asked)
    # On CPUs activations stay as they are; on GPUs they do if the checkpoint is of weights only.
    assert not with_weight_schemes(channel, "auto").quantize_activations
    assert with_weight_schemes(channel, "auto", "cuda").quantize_activations
    with pytest.raises(
        ConfigError, match="'int8': int8 experts are computed on CPUs only; use auto, none or fp8"
    ):
        with_weight_schemes(unquantised, "int8", "cuda")
    assert channel.stored is not None
    # FP8 in dense layers alone is not made int8.
    only_dense = dataclasses.replace(channel, stored=dataclasses.replace(channel.stored, experts=False))
    asked_int8 = with_weight_schemes(only_dense, "int8")
    assert (asked_int8.expert_scheme, asked_int8.dense_scheme) == (INT8_CHANNEL, None)
    weights_only = dataclasses.replace(channel, stored=dataclasses.replace(channel.stored, weights_only=True))
    assert not with_weight_schemes(weights_only, "auto", "cuda").quantize_activations


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_int8_has_no_code_for_is_refused(bad: float, tmp_path: Path, seed: int) -> None:
    make_tiny("mixtral", tmp_path, seed, **sizes("mixtral"))
    expert = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    edit(tmp_path, lambda tensors: tensors[expert].fill_(bad))
    with pytest.raises(CheckpointError, match=rf"{expert} in .* holds NaN or infinity"):
        load(tmp_path, "int8")


EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
HEAD = "lm_head.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(EXPERT + "_scale_inv"), rf"lacks scales of FP8 tensors: {EXPERT}_scale_inv$"),
        (drop(QUERY + "_scale_inv"), rf"lacks scales of FP8 tensors: {QUERY}_scale_inv$"),
        (drop(EXPERT), rf"lacks tensors of this model: {EXPERT}$"),
        (put(EXPERT + "_scale_inv", torch.ones(2, 1)), r"has shape \[2, 1\], but fp8_block .*\[2, 2\]"),
        (put(EXPERT + "_scale_inv", torch.ones(2, 2, dtype=torch.int32)), r"type I32; scales may be F32"),
        (put(EXPERT + "_scale", torch.ones(2, 2)), rf"the scales of {EXPERT} twice"),
        (put(EXPERT, torch.ones(160, 140)), rf"{EXPERT} .*type F32, but quantization_config .* are FP8"),
        (put(QUERY, torch.ones(64, 160)), rf"{QUERY}_scale_inv has scales of {QUERY}, .*type F32"),
        (put(HEAD, torch.ones(71, 160).to(FP8)), rf"lacks scales of FP8 tensors: {HEAD}_scale_inv$"),
        (put(QUERY, torch.ones(64, 160).to(torch.float8_e5m2)), rf"{QUERY} .*F8_E5M2; supported"),
        (put("model.norm.weight", torch.ones(160).to(FP8)), r"model\.norm\.weight .*F8_E4M3; supported"),
        (put(EXPERT, torch.full((160, 140), float("nan")).to(FP8)), rf"{EXPERT} .*holds NaN"),
        (put("model.layers.0.mlp.input_scale", torch.ones(1)), r"does not know: .*mlp\.input_scale$"),
    ],
)  # fmt: skip
def test_damaged_checkpoints(
    change: Callable[[Tensors], Any], message: str, tmp_path: Path, seed: int
) -> None:
    """Every rank says the same of names, shapes and types, whichever experts it holds; values are seen by those who read them."""
    folder, _ = write("qwen3_moe", "deepseek", tmp_path, seed, vocab_size=71)
    edit(folder, change)
    spec, _ = load_spec(folder)
    for held in ([2], [0]) if "NaN" not in message else ([2],):
        with pytest.raises(CheckpointError, match=message):
            load(folder, local_experts=[held] * spec.num_moe_layers)


def test_a_scale_lost_with_the_end_of_the_file(tmp_path: Path, seed: int) -> None:
    folder, _ = write("mixtral", "deepseek", tmp_path, seed)
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[:-6])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        load(folder)


def test_fp8_without_a_word_in_the_configuration(tmp_path: Path, seed: int) -> None:
    folder, plain = write("mixtral", "autofp8", tmp_path, seed)
    (folder / "config.json").write_text((plain / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"does not know: .*_scale"):
        load(folder)
    edit(folder, lambda t: [t.pop(n) for n in list(t) if "_scale" in n])
    with pytest.raises(CheckpointError, match=r"F8_E4M3, but config\.json has no quantization_config"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "key", "pattern"),
    [
        ("deepseek", "modules_to_not_convert", "model.layers.*.mlp.experts"),
        ("ct_channel", "ignore", r"re:.*\.experts\..*"),
    ],
)
def test_experts_left_out_of_quantisation(
    name: str, key: str, pattern: str, tmp_path: Path, seed: int
) -> None:
    """Attention in FP8 and experts not, as the list of modules says."""
    folder, plain = write("qwen3_moe", name, tmp_path, seed)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"][key] = ["lm_head", pattern]
    (folder / "config.json").write_text(json.dumps(config))
    wide = load_file(plain / FILE)

    def undo(tensors: Tensors) -> None:
        for tensor_name in [n for n in tensors if ".experts." in n]:
            del tensors[tensor_name]
        tensors |= {n: tensor for n, tensor in wide.items() if ".experts." in n}

    edit(folder, undo)
    decoder, _ = load(folder)
    assert decoder.spec.expert_scheme is None
    expected, _ = load(plain)
    for (tensor_name, a), (_, b) in zip(decoder.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(a, b), tensor_name
    quantised, _ = load(folder, "fp8_tensor")
    assert quantised.spec.expert_scheme == FP8_TENSOR
